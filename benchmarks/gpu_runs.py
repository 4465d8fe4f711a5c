"""Real training steps with random weights: upstream's own and the layer's, as benchmarks/gpu.py measures them."""

from __future__ import annotations

import contextlib
import copy
import statistics
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from moss_tts_patches.families.family import Family, TrainingContext, supervised_positions
from moss_tts_patches.loss.engine import EngineOptions, LossEngine
from moss_tts_patches.loss.problem import IGNORE_INDEX
from moss_tts_patches.memory.rungs import MicroBatch, Rung
from moss_tts_patches.memory.tracker import StorageTracker
from moss_tts_patches.memory.weight_parking import WeightParking
from moss_tts_patches.optim import build_optimizer, build_store
from moss_tts_patches.runtime.checkpointing import checkpoint_layers, layer_parameters
from moss_tts_patches.runtime.parked import park_embedding

MICRO_BATCHES_A_STEP = 2
TIMED_STEPS = 2  # after a first one, which compiles kernels and makes the states


@dataclass
class Figures:
    """One run; bytes and seconds.

    Attributes:
        host_traffic_bytes: between GPU and host memory, an optimizer step with its micro-batches.
        optimizer_kernel_seconds: of the step on the device's own clock; 0 without one.
        optimizer_bytes: that this step reads and writes at least: weights, gradients, states.
    """

    peak_allocated: int = 0
    peak_reserved: int = 0
    seconds_micro_batch: float = 0.0
    seconds_optimizer_step: float = 0.0
    host_traffic_bytes: int = 0
    optimizer_kernel_seconds: float = 0.0
    optimizer_bytes: int = 0


class Meter:
    """Reads the peak of a device: the allocator's on CUDA, live storages on the CPU."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self._tracker: StorageTracker | None = None

    @contextlib.contextmanager
    def running(self) -> Iterator[None]:
        if self.device.type == "cuda":
            yield
            return
        with StorageTracker() as self._tracker:
            yield

    def watch(self, model: torch.nn.Module) -> None:
        if self._tracker is not None:
            self._tracker.watch(model.parameters())

    def reset(self) -> None:
        if self._tracker is not None:
            self._tracker.reset_peak()
        else:
            torch.cuda.synchronize()
            torch.cuda.reset_peak_memory_stats()

    def peaks(self) -> tuple[int, int]:
        """Returns ``(allocated, reserved)``."""
        if self._tracker is not None:
            return self._tracker.peak_bytes, self._tracker.peak_bytes
        return torch.cuda.max_memory_allocated(), torch.cuda.max_memory_reserved()

    def now(self) -> float:
        if self.device.type == "cuda":
            torch.cuda.synchronize()
        return time.perf_counter()

    def device_seconds(self, work: Callable[[], object]) -> float:
        """Returns how long ``work`` takes by the device's clock; 0 where there is none."""
        if self.device.type != "cuda":
            work()
            return 0.0
        begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        begin.record()
        work()
        end.record()
        end.synchronize()
        return begin.elapsed_time(end) / 1000


class HostTraffic(TorchDispatchMode):
    """Counts the bytes of copies from one kind of device to another, those of the backward included.

    Attributes:
        bytes: moved so far.
    """

    def __init__(self) -> None:
        super().__init__()
        self.bytes = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        if func is torch.ops.aten.copy_.default:
            self._count(args[1], args[0])
        elif func is torch.ops.aten._to_copy.default:
            self._count(args[0], result)
        return result

    def _count(self, source: torch.Tensor, target: torch.Tensor) -> None:
        if source.device.type != target.device.type:
            self.bytes += source.numel() * source.element_size()


def memory_bandwidth(device: torch.device, size: int = 2**30) -> float | None:
    """Returns bytes a second that a copy within the GPU's memory reads and writes; None on a CPU."""
    if device.type != "cuda":
        return None
    source = torch.empty(size, dtype=torch.uint8, device=device)
    target, meter, seconds = torch.empty_like(source), Meter(device), []
    for _ in range(6):
        seconds.append(meter.device_seconds(lambda: target.copy_(source)))
    return 2 * size / statistics.median(seconds[1:])


def real_batch(family: Family, config: Any, batch: MicroBatch, device: torch.device) -> dict[str, Any]:
    """A micro-batch of the wanted shape, the last ``supervised`` positions with labels, without padding."""
    inputs = family.simulated_batch(config, batch.records, batch.positions)
    labels = inputs["labels"]
    labels[:, : batch.positions - batch.supervised // batch.records] = IGNORE_INDEX
    return {name: value.to(device) if isinstance(value, torch.Tensor) else value for name, value in inputs.items()}


def build_model(model_class: Any, config: Any, device: torch.device) -> Any:
    """Random weights in bfloat16, made on the device."""
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.bfloat16)
    try:
        with torch.device(device):
            return model_class(copy.deepcopy(config)).train()
    finally:
        torch.set_default_dtype(before)


def train(meter: Meter, micro_batch: Callable[[], object], step: Callable[[], object]) -> Figures:
    """Does some optimizer steps; the peak and the times are those of the last ones, the traffic that of one more."""
    micro_batches, steps, kernels = [], [], []
    for number in range(1 + TIMED_STEPS):
        if number == 1:
            meter.reset()
        for _ in range(MICRO_BATCHES_A_STEP):
            began = meter.now()
            micro_batch()
            micro_batches.append(meter.now() - began)
        began = meter.now()
        kernels.append(meter.device_seconds(step))
        steps.append(meter.now() - began)
    allocated, reserved = meter.peaks()
    with HostTraffic() as traffic:
        for _ in range(MICRO_BATCHES_A_STEP):
            micro_batch()
        step()
    return Figures(
        allocated,
        reserved,
        statistics.median(micro_batches[MICRO_BATCHES_A_STEP:]),
        statistics.median(steps[1:]),
        traffic.bytes,
        statistics.median(kernels[1:]),
    )


def run_layer(family: Family, model_class: Any, config: Any, batch: MicroBatch, rung: Rung, meter: Meter) -> Figures:
    """Trains some steps through the layer's own parts."""
    device = meter.device
    with meter.running():
        model = build_model(model_class, config, device)
        meter.watch(model)
        for parent, attribute in family.unread_embeddings(model):
            park_embedding(parent, attribute)
        checkpoint_layers(family.backbone(model))
        store = build_store(rung.gradients, getattr(torch, rung.host_gradient_dtype))
        store.attach(model.named_parameters())
        optimizer = build_optimizer(
            rung.optimizer, list(model.named_parameters()), store, rung.states, seed=0, lr=1e-5, betas=(0.9, 0.95)
        )
        optimizer.reserve_states()
        parking = WeightParking(layer_parameters(family.backbone(model))) if rung.weights == "host" else None
        engine = LossEngine(
            EngineOptions(rung.schedule, rung.chunk_frames),
            store,
            parking.away if parking is not None else contextlib.nullcontext,
        )
        scale = 1 / MICRO_BATCHES_A_STEP
        context = TrainingContext(
            engine=engine,
            direct=rung.schedule != "autograd",
            loss_scale=lambda: scale,
            finite_empty_channels=True,
            say_once=lambda line: None,
            summarise_labels=lambda labels: supervised_positions(labels, IGNORE_INDEX),
        )
        inputs = real_batch(family, config, batch, device)

        def micro_batch() -> None:
            with torch.autocast(device.type, torch.bfloat16):
                loss = family.training_output(model, inputs, context).loss
            (loss.float() * scale).backward()
            store.end_micro_batch(context.expected_contributions)

        def step() -> None:
            optimizer.step()
            if parking is not None:
                parking.weights_changed()
            optimizer.zero_grad()

        try:
            figures = train(meter, micro_batch, step)
        finally:  # out of memory or not: its hooks would keep the weights on the GPU for the runs to come
            store.detach()
    if rung.gradients == rung.states == "device":
        figures.optimizer_bytes = least_optimizer_bytes(model)
    return figures


def least_optimizer_bytes(model: torch.nn.Module) -> int:
    """Bytes that an 8-bit step must read and write where everything stands on the GPU.

    Weights and both 8-bit states are read and written, with one float32 scale for each 256 values of a state; gradients
    are read.
    """
    trained = [p for p in model.parameters() if p.requires_grad]
    weights = sum(p.numel() * p.element_size() for p in trained)
    states = sum(p.numel() for p in trained) * 2 * (1 + 4 / 256)
    return round(2 * weights + weights + 2 * states)


def run_upstream(family: Family, model_class: Any, config: Any, batch: MicroBatch, meter: Meter) -> Figures:
    """Upstream's own step with its own checkpointing and torch's AdamW, as accelerate runs it."""
    device = meter.device
    with meter.running():
        model = build_model(model_class, config, device)
        meter.watch(model)
        for parent, attribute in family.unread_embeddings(model):
            getattr(parent, attribute).weight.requires_grad_(False)
        model.gradient_checkpointing_enable()
        optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-5)
        inputs = real_batch(family, config, batch, device)

        def micro_batch() -> None:
            with torch.autocast(device.type, torch.bfloat16):
                loss = model(**inputs).loss
            (loss.float() / MICRO_BATCHES_A_STEP).backward()

        def step() -> None:
            optimizer.step()
            optimizer.zero_grad()

        return train(meter, micro_batch, step)
