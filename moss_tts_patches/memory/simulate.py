"""Simulates a training step of the full-size model without weights, without a GPU and in seconds.

The real model class is built under ``FakeTensorMode`` and the layer's real code runs one micro-batch in the middle of
an accumulation window and the optimizer step after it, with gradients of earlier micro-batches and optimizer states
already there: that is where a long run has its peak. (The first step of a run needs less: its states come into being
while its gradients are let go.)
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode

from ..families.family import Family, LabelSummary, TrainingContext
from ..loss.engine import EngineOptions, LossEngine
from ..loss.module_schedule import ByModule, keep
from ..optim import build_optimizer, build_store
from ..optim.compensated_sum import SLICE_ELEMENTS
from ..optim.gradients import ChunkSum, GradientStore
from ..optim.streamed import StreamedOptimizer
from ..runtime.checkpointing import checkpoint_layers, layer_parameters
from ..runtime.parked import park_embedding
from .few_chunks import FewChunksEngine
from .flops import FlopCounter
from .footprint import Footprint
from .rungs import MicroBatch, Rung, UpstreamRung
from .tracker import GRADIENTS, STATES, WEIGHTS, Phase, StorageTracker
from .weight_parking import WeightParking

__all__ = ["MicroBatch", "Rung", "StepFigures", "UpstreamRung", "simulate_rung", "simulate_upstream"]

ShapeModel = Callable[[Family, Any], None]


@dataclass(frozen=True)
class Standing:
    """What there is between steps, wherever a rung keeps it.

    Attributes:
        device_states: bytes of optimizer states on the device.
        host_states: bytes of the arena that they take in host memory.
        gradient_bytes: of all trained parameters, in their own dtype.
        trained_elements: of all trained parameters.
        layer_weights: bytes of the backbone's layers.
        largest_trained: elements of the largest trained parameter.
        after_largest: elements of the one that is stepped after it, whose states are on their way by then.
        trained_dtype: its dtype, by name.
    """

    device_states: int = 0
    host_states: int = 0
    gradient_bytes: int = 0
    trained_elements: int = 0
    layer_weights: int = 0
    largest_trained: int = 0
    after_largest: int = 0
    trained_dtype: str = "bfloat16"


@dataclass(frozen=True)
class StepFigures:
    """What a simulated step needs.

    Attributes:
        peak_bytes: largest sum of live device storages, optimizer step included.
        backward_peak_bytes: the same up to the end of the backward.
        host_bytes: host buffers of the stores and parked weights.
        matmul_flops: of the matrix products of one micro-batch.
        attention_flops: of its attention kernels.
        phases: what was alive in the ``forward``, the ``loss`` (schedules that back-propagate in it), the ``backward``
            and the ``step``.
        standing: what there is between steps.
    """

    peak_bytes: int
    backward_peak_bytes: int
    host_bytes: int
    matmul_flops: int
    attention_flops: int
    phases: dict[str, Phase] = field(default_factory=dict, compare=False, repr=False)
    standing: Standing = field(default=Standing(), compare=False, repr=False)

    @classmethod
    def of(cls, tracker: StorageTracker, counter: FlopCounter, standing: Standing = Standing()) -> StepFigures:
        """Reads the instruments at the end of a step."""
        before = [phase.peak.device_bytes for name, phase in tracker.phases.items() if name != "step"]
        return cls(
            tracker.peak_bytes,
            round(max(before)),
            tracker.host_bytes,
            counter.matmul_flops,
            counter.attention_flops,
            dict(tracker.phases),
            standing,
        )

    @property
    def categories(self) -> Footprint:
        """What the peak is made of."""
        return max((phase.peak for phase in self.phases.values()), key=lambda peak: peak.device_bytes)


def simulate_rung(
    family: Family,
    model_class: Any,
    config: Any,
    batch: MicroBatch,
    rung: Rung,
    shape_model: ShapeModel | None = None,
    *,
    layers: int | None = None,
    step: bool = True,
    every_chunk: bool = True,
) -> StepFigures:
    """Simulates the layer.

    Args:
        family: whose forward runs.
        model_class: upstream's class.
        config: at full size.
        batch: the micro-batch's shape.
        rung: the settings.
        shape_model: called with the built model before checkpointing; may replace modules, freeze and inject.
        layers: keep only that many layers of the backbone.
        step: run the optimizer step too; it takes longer than everything else.
        every_chunk: run the depth model on all chunks of frames; otherwise on as many as there are different ones, and
            their FLOPs are counted for those that were left out.
    """
    with _simulation() as (tracker, counter):
        model = _build(family, model_class, config, tracker, layers)
        for parent, attribute in family.unread_embeddings(model):
            park_embedding(parent, attribute)
        if shape_model is not None:
            shape_model(family, model)
            tracker.watch([*model.parameters(), *model.buffers()], WEIGHTS)
        if rung.checkpointing:
            checkpoint_layers(family.backbone(model))
        store = build_store(rung.gradients, getattr(torch, rung.host_gradient_dtype))
        store.attach(model.named_parameters())
        optimizer = build_optimizer(
            rung.optimizer, list(model.named_parameters()), store, rung.states, seed=0, lr=1e-5, betas=(0.9, 0.95)
        )
        _bring_about_second_micro_batch(model, optimizer, rung, tracker)
        _watch_chunk_sums(store, tracker)
        options = _engine_options(rung)
        phase = _loss_phase(family, model, rung, tracker)
        engine = LossEngine(options, store, phase) if every_chunk else FewChunksEngine(options, store, phase, counter)
        context = _context(engine, rung, batch)
        tracker.reset_peak()
        tracker.phase("forward")
        with family.simulated_precision(model):
            inputs = family.simulated_batch(config, batch.records, batch.positions)
            loss = family.training_output(model, inputs, context).loss
        if "backward" not in tracker.phases:
            tracker.phase("backward")
        (loss.float() * 0.5).backward()
        store.end_micro_batch(context.expected_contributions)
        counted = (counter.matmul_flops, counter.attention_flops)
        tracker.phase("step")
        if step:
            optimizer.step()
        counter.matmul_flops, counter.attention_flops = counted
        return StepFigures.of(tracker, counter, _standing(family, model, optimizer))


def simulate_upstream(
    family: Family,
    model_class: Any,
    config: Any,
    batch: MicroBatch,
    *,
    checkpointing: bool,
    forward: Any = None,
    enable_checkpointing: Callable[[Any], None] = lambda model: model.gradient_checkpointing_enable(),
    shape_model: ShapeModel | None = None,
    layers: int | None = None,
) -> StepFigures:
    """Simulates upstream's own step as accelerate runs it: autocast, outputs converted to float32, torch's AdamW.

    Args:
        family: whose trainer's inputs and frozen parts they are.
        model_class: upstream's class.
        config: at full size.
        batch: the micro-batch's shape.
        checkpointing: upstream's own, where it has any.
        forward: upstream's forward where the class has been patched, or where the trainer computes the loss; by default
            the class's own.
        enable_checkpointing: what upstream's trainer does to the model for it.
        shape_model: as for :func:`simulate_rung`; for other people's scripts around upstream's forward.
        layers: keep only that many layers of the backbone.
    """
    from accelerate.utils.operations import convert_to_fp32

    with _simulation() as (tracker, counter):
        model = _build(family, model_class, config, tracker, layers)
        for parent, attribute in family.unread_embeddings(model):
            getattr(parent, attribute).weight.requires_grad_(False)  # upstream freezes what it never reads
        if shape_model is not None:
            shape_model(family, model)
            tracker.watch([*model.parameters(), *model.buffers()], WEIGHTS)
        if checkpointing:
            enable_checkpointing(model)
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-5, foreach=False)
        _allocate_gradients(model, tracker)
        optimizer.step()
        for state in optimizer.state.values():
            tracker.watch((value for value in state.values() if isinstance(value, torch.Tensor)), STATES)
        tracker.reset_peak()
        tracker.phase("forward")
        inputs = family.simulated_batch(config, batch.records, batch.positions)
        with family.simulated_precision(model):
            output = family.simulated_upstream_output(forward or model_class.forward, model, inputs, batch.supervised)
        output = convert_to_fp32(output)
        tracker.phase("backward")
        (output.loss * 0.5).backward()
        counted = (counter.matmul_flops, counter.attention_flops)
        tracker.phase("step")
        optimizer.step()
        counter.matmul_flops, counter.attention_flops = counted
        return StepFigures.of(tracker, counter)


def simulate_update(
    optimizer: str, gradients: str, states: str, host_dtype: str, elements: tuple[int, int], dtype: Any
) -> int:
    """Returns the most bytes that the optimizer step of two parameters takes beside what stands there anyway.

    Args:
        optimizer: ``adamw8bit`` or ``adamw``.
        gradients: ``device`` or ``host``.
        states: ``device`` or ``host``.
        host_dtype: of gradients in host memory.
        elements: of the two parameters.
        dtype: of both.
    """
    with _simulation() as (tracker, _):
        model = nn.ParameterList(nn.Parameter(torch.empty(count, dtype=dtype)) for count in elements)
        store = build_store(gradients, getattr(torch, host_dtype))
        store.attach(model.named_parameters())
        stepper = build_optimizer(optimizer, list(model.named_parameters()), store, states, seed=0)
        for parameter in model.parameters():
            store.add(parameter, torch.zeros_like(parameter))
        _reserve_states(model, stepper, states, tracker)
        tracker.reset_peak()
        before = tracker.live_bytes
        stepper.step()
        return tracker.peak_bytes - before


def _engine_options(rung: Rung) -> EngineOptions:
    by_module = {"by_module": ByModule(), "by_module_kept": ByModule(recompute=keep)}.get(rung.schedule)
    schedule = rung.schedule if by_module is None else "autograd"
    return EngineOptions(schedule, rung.chunk_frames, verify_scale=False, by_module=by_module)


def _context(engine: LossEngine, rung: Rung, batch: MicroBatch) -> TrainingContext:
    return TrainingContext(
        engine=engine,
        direct=rung.schedule in ("fused", "staged"),
        loss_scale=lambda: 0.5,
        finite_empty_channels=True,
        say_once=lambda line: None,
        summarise_labels=lambda labels: LabelSummary(torch.zeros(batch.supervised, dtype=torch.int64)),
    )


def _loss_phase(
    family: Family, model: nn.Module, rung: Rung, tracker: StorageTracker
) -> Callable[[], contextlib.AbstractContextManager[None]]:
    """What the engine enters around its work: a phase of its own, with the idle weights away where the rung says so."""
    parameters = list(layer_parameters(family.backbone(model)))
    parking = WeightParking(parameters)

    @contextlib.contextmanager
    def phase() -> Iterator[None]:
        with parking.away() if rung.weights == "host" else contextlib.nullcontext():
            tracker.phase("loss")
            yield
            tracker.phase("backward")
        tracker.watch(parameters, WEIGHTS)

    return phase


def _standing(family: Family, model: nn.Module, optimizer: StreamedOptimizer) -> Standing:
    trained = list(dict.fromkeys(parameter for parameter in model.parameters() if parameter.requires_grad))
    largest = max(trained, key=torch.numel)
    following = trained[([id(p) for p in trained].index(id(largest)) + 1) % len(trained)]
    layers = dict.fromkeys(layer_parameters(family.backbone(model)))
    return Standing(
        device_states=sum(
            spec.size(parameter.numel()) for parameter in trained for spec in optimizer.layout_of(parameter).values()
        ),
        host_states=optimizer.states.host_bytes(),
        gradient_bytes=sum(parameter.numel() * parameter.element_size() for parameter in trained),
        trained_elements=sum(parameter.numel() for parameter in trained),
        layer_weights=sum(parameter.numel() * parameter.element_size() for parameter in layers),
        largest_trained=largest.numel(),
        after_largest=following.numel(),
        trained_dtype=str(largest.dtype).removeprefix("torch."),
    )


@contextlib.contextmanager
def _simulation() -> Iterator[tuple[StorageTracker, FlopCounter]]:
    counter = FlopCounter()
    with FakeTensorMode(allow_non_fake_inputs=True), StorageTracker(counter) as tracker:
        yield tracker, counter


def _build(family: Family, model_class: Any, config: Any, tracker: StorageTracker, layers: int | None) -> Any:
    """Builds the class in bfloat16, in training mode."""
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.bfloat16)
    try:
        model = model_class(config).train()
    finally:
        torch.set_default_dtype(before)
    if layers is not None:
        backbone: Any = family.backbone(model)
        backbone.layers = backbone.layers[:layers]
    tracker.watch([*model.parameters(), *model.buffers()], WEIGHTS)
    return model


def _bring_about_second_micro_batch(
    model: nn.Module, optimizer: StreamedOptimizer, rung: Rung, tracker: StorageTracker
) -> None:
    if rung.gradients == "device":
        _allocate_gradients(model, tracker)
    _reserve_states(model, optimizer, rung.states, tracker)


def _reserve_states(model: nn.Module, optimizer: StreamedOptimizer, states: str, tracker: StorageTracker) -> None:
    optimizer.reserve_states()
    if states == "device":
        for parameter in model.parameters():
            if parameter.requires_grad:
                tracker.watch(optimizer.states.read(parameter).values(), STATES)


def _allocate_gradients(model: nn.Module, tracker: StorageTracker) -> None:
    for parameter in model.parameters():
        if parameter.requires_grad:
            parameter.grad = torch.zeros_like(parameter)
            tracker.watch([parameter.grad], GRADIENTS)


def _watch_chunk_sums(store: GradientStore, tracker: StorageTracker) -> None:
    """Running sums of a micro-batch's chunks are gradients too: 2.5 GiB of them in ``fused`` with a host store."""
    opened = store._open_sum

    class _WatchedSum(ChunkSum):
        def add(self, value: torch.Tensor) -> None:
            if self.total is None or self.total.dtype != torch.bfloat16:
                super().add(value)
            else:
                if self._error is None:
                    self._error = torch.zeros_like(self.total, dtype=torch.int8)
                _take_room_of_compensated_sum(self.total)
            tracker.watch([part for part in (self.total, self._error) if part is not None], GRADIENTS)

    def watched(parameter: nn.Parameter) -> ChunkSum:
        plain = opened(parameter)
        return _WatchedSum(plain.total, plain._error)

    store._open_sum = watched  # type: ignore[method-assign]


def _take_room_of_compensated_sum(total: torch.Tensor) -> None:
    """Takes what ``add_by_torch`` takes at its largest moment, in 3 operations instead of 25 a slice.

    Source: :func:`..optim.compensated_sum.add_by_torch`: the exact sum of a slice and its last place in float32, the
    exponent bits of the total; without them a simulated step has 40 % fewer operations.
    """
    elements = min(total.numel(), SLICE_ELEMENTS)
    taken = [torch.empty(elements * size, dtype=torch.uint8) for size in (4, 2, 4)]
    del taken
