"""A model of fake tensors as it stands in the middle of a run: weights, gradients so far, optimizer states."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode

from ..families.family import Family
from ..optim.compensated_sum import SLICE_ELEMENTS
from ..optim.gradients import ChunkSum, GradientStore
from ..optim.streamed import StreamedOptimizer
from .flops import FlopCounter
from .rungs import Rung
from .tracker import GRADIENTS, STATES, WEIGHTS, StorageTracker


@contextlib.contextmanager
def simulation() -> Iterator[tuple[StorageTracker, FlopCounter]]:
    """Within it every tensor is a fake one, and the two instruments watch."""
    counter = FlopCounter()
    with FakeTensorMode(allow_non_fake_inputs=True), StorageTracker(counter) as tracker:
        yield tracker, counter


def build_model(family: Family, model_class: Any, config: Any, tracker: StorageTracker, layers: int | None) -> Any:
    """Builds the class in bfloat16, in training mode; with ``layers``, no more than so many of the backbone's."""
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


def bring_about_second_micro_batch(
    model: nn.Module, optimizer: StreamedOptimizer, rung: Rung, tracker: StorageTracker
) -> None:
    """Makes what earlier micro-batches and steps have left, where ``rung`` keeps it."""
    if rung.gradients == "device":
        allocate_gradients(model, tracker)
    reserve_states(model, optimizer, rung.states, tracker)


def reserve_states(model: nn.Module, optimizer: StreamedOptimizer, states: str, tracker: StorageTracker) -> None:
    """Makes optimizer states; ``states`` is ``device`` or ``host``."""
    optimizer.reserve_states()
    if states == "device":
        for parameter in model.parameters():
            if parameter.requires_grad:
                tracker.watch(optimizer.states.read(parameter).values(), STATES)


def allocate_gradients(model: nn.Module, tracker: StorageTracker) -> None:
    """Gives every trained parameter a gradient of its own dtype on the device."""
    for parameter in model.parameters():
        if parameter.requires_grad:
            parameter.grad = torch.zeros_like(parameter)
            tracker.watch([parameter.grad], GRADIENTS)


def watch_chunk_sums(store: GradientStore, tracker: StorageTracker) -> None:
    """Running sums of a micro-batch's chunks are gradients too: 2.5 GiB of them in ``fused`` with a host store."""

    class _WatchedSum(ChunkSum):
        def add(self, value: torch.Tensor) -> None:
            super().add(value)
            tracker.watch([part for part in (self.total, self.error) if part is not None], GRADIENTS)

        def compensate(self, total: torch.Tensor, error: torch.Tensor, value: torch.Tensor) -> None:
            _take_room_of_compensated_sum(total)

    store.chunk_sum_type = _WatchedSum


def _take_room_of_compensated_sum(total: torch.Tensor) -> None:
    """Takes what ``add_by_torch`` takes at its largest moment, in 3 operations instead of 25 a slice.

    Source: :func:`..optim.compensated_sum.add_by_torch`: the exact sum of a slice and its last place in float32, the
    exponent bits of the total; without them a simulated step has 40 % fewer operations.
    """
    elements = min(total.numel(), SLICE_ELEMENTS)
    taken = [torch.empty(elements * size, dtype=torch.uint8) for size in (4, 2, 4)]
    del taken
