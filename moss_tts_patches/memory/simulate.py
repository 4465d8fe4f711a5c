"""Simulates a training step of the full-size model without weights, without a GPU and in seconds.

The real model class is built under ``FakeTensorMode`` and the layer's real code runs one micro-batch in the middle of
an accumulation window and the optimizer step after it, with gradients of earlier micro-batches and optimizer states
already there: that is where a long run has its peak. (The first step of a run needs less: its states come into being
while its gradients are let go.)
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import nn

from ..families.family import Family, LabelSummary, TrainingContext
from ..loss.engine import EngineOptions, LossEngine
from ..loss.module_schedule import ByModule, keep
from ..optim import build_optimizer, build_store
from ..runtime.checkpointing import checkpoint_layers, layer_parameters
from ..runtime.parked import park_embedding
from .few_chunks import FewChunksEngine
from .flops import FlopCounter
from .rungs import MicroBatch, Rung, UpstreamRung
from .simulated_model import (
    allocate_gradients,
    bring_about_second_micro_batch,
    build_model,
    reserve_states,
    simulation,
    watch_chunk_sums,
)
from .step_figures import Standing, StepFigures
from .tracker import STATES, WEIGHTS, StorageTracker
from .weight_parking import WeightParking

__all__ = ["MicroBatch", "Rung", "StepFigures", "UpstreamRung", "simulate_rung", "simulate_upstream"]

ShapeModel = Callable[[Family, Any], None]


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
    with simulation() as (tracker, counter):
        model = build_model(family, model_class, config, tracker, layers)
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
        bring_about_second_micro_batch(model, optimizer, rung, tracker)
        watch_chunk_sums(store, tracker)
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
        _step_uncounted(optimizer.step if step else lambda: None, tracker, counter)
        return StepFigures.of(tracker, counter, Standing.of(family, model, optimizer))


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

    with simulation() as (tracker, counter):
        model = build_model(family, model_class, config, tracker, layers)
        for parent, attribute in family.unread_embeddings(model):
            getattr(parent, attribute).weight.requires_grad_(False)  # upstream freezes what it never reads
        if shape_model is not None:
            shape_model(family, model)
            tracker.watch([*model.parameters(), *model.buffers()], WEIGHTS)
        if checkpointing:
            enable_checkpointing(model)
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-5, foreach=False)
        allocate_gradients(model, tracker)
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
        _step_uncounted(optimizer.step, tracker, counter)
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
    with simulation() as (tracker, _):
        model = nn.ParameterList(nn.Parameter(torch.empty(count, dtype=dtype)) for count in elements)
        store = build_store(gradients, getattr(torch, host_dtype))
        store.attach(model.named_parameters())
        stepper = build_optimizer(optimizer, list(model.named_parameters()), store, states, seed=0)
        for parameter in model.parameters():
            store.add(parameter, torch.zeros_like(parameter))
        reserve_states(model, stepper, states, tracker)
        tracker.reset_peak()
        before = tracker.live_bytes
        stepper.step()
        return tracker.peak_bytes - before


def _step_uncounted(step: Callable[[], Any], tracker: StorageTracker, counter: FlopCounter) -> None:
    """Runs the optimizer step as a phase of its own; its FLOPs are not the micro-batch's."""
    counted = (counter.matmul_flops, counter.attention_flops)
    tracker.phase("step")
    step()
    counter.matmul_flops, counter.attention_flops = counted


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
