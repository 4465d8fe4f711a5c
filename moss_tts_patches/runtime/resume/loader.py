"""The trainer's DataLoader, which hands out placeholders for micro-batches that an earlier process has finished.

No record of a finished micro-batch is fetched or tokenized, with workers or without. In the epoch in which training
goes on, the sampler draws its order again from the generator states that were noted before it drew the first time,
and the batches of indices that are used up are thrown away.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, Protocol

import torch
from torch.utils.data import DataLoader

from .record_order import FollowedSampler, RecordOrder

#: What the four trainers read of a batch.
BATCH_TENSORS = ("input_ids", "attention_mask", "labels")


class EpochPlan(Protocol):
    """What a loader asks at the start of an epoch; :class:`.run.ResumableRun` answers."""

    device: torch.device
    order: RecordOrder

    def loader_made(self, loader: DataLoader[Any]) -> None:
        """The trainer has built this loader."""

    def begin_epoch(self, generator: torch.Generator | None) -> int | None:
        """An epoch starts; returns how many of its micro-batches are finished, None where it is an earlier one."""

    def rewind(self, generator: torch.Generator | None) -> None:
        """Puts all generators where they were when the epoch started the first time."""

    def forward_again(self, generator: torch.Generator | None) -> None:
        """Undoes :meth:`rewind`."""


def loader_class(base: type[DataLoader[Any]], plan: EpochPlan) -> type[DataLoader[Any]]:
    """Derives the class that the trainer's name ``DataLoader`` gets.

    Args:
        base: torch's ``DataLoader`` as the trainer imported it.
        plan: the run.
    """

    class ResumableLoader(base):  # type: ignore[misc, valid-type]
        """torch's ``DataLoader`` under the low-memory layer."""

        def __init__(self, *args: Any, **options: Any) -> None:
            super().__init__(*args, **options)
            plan.loader_made(self)

        def __iter__(self) -> Any:
            generator = loader_generator(self)
            finished = plan.begin_epoch(generator)
            if finished == 0:
                return followed(self, super().__iter__, 0, plan.order)
            if finished is None or finished >= len(self):
                return placeholders(len(self), plan.device)
            return self._go_on(finished, generator)

        def _go_on(self, finished: int, generator: torch.Generator | None) -> Iterator[Any]:
            yield from placeholders(finished, plan.device)
            plan.rewind(generator)
            batches = followed(self, super().__iter__, finished, plan.order)  # workers ask for the first batches here
            first = next(batches)  # by now the sampler has drawn its order
            plan.forward_again(generator)
            yield first
            yield from batches

    ResumableLoader.__name__ = ResumableLoader.__qualname__ = base.__name__
    return ResumableLoader


def placeholders(count: int, device: torch.device) -> Iterator[dict[str, Any]]:
    """Yields batches without content that stand on the device already, so that nothing is copied."""
    empty = {name: torch.zeros((1, 1, 1), dtype=torch.int64, device=device) for name in BATCH_TENSORS}
    for _ in range(count):
        yield dict(empty)


def followed(loader: DataLoader[Any], iterate: Any, finished: int, order: RecordOrder) -> Iterator[Any]:
    """Starts an epoch whose first ``finished`` batches are left out, and has ``order`` know which records come."""
    whole = loader.batch_sampler
    # A loader refuses a new sampler by plain assignment, since an iterator may be using the old one; here none does.
    object.__setattr__(loader, "batch_sampler", FollowedSampler(whole, finished, order))
    try:
        return iterate()
    finally:
        object.__setattr__(loader, "batch_sampler", whole)


def loader_generator(loader: Any) -> torch.Generator | None:
    """Returns the generator that a loader's order is drawn from, None for torch's global one."""
    sampler = loader.batch_sampler
    while hasattr(sampler, "batch_sampler"):  # accelerate's share of it for one of several processes
        sampler = sampler.batch_sampler
    return getattr(sampler.sampler, "generator", None) or loader.generator
