"""Data that was split between the processes beforehand: an epoch ends with a step, and as soon in all processes."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator
from typing import Any

from accelerate.data_loader import prepare_data_loader
from torch.utils.data import Sampler

from ..errors import DataError
from .engine import largest_of_all


class FirstBatches(Sampler[list[int]]):
    """The first ``count`` batches of an epoch; their order is drawn for all of it, so others are left out each time.

    Args:
        batch_sampler: of the whole epoch.
        count: how many of its batches are trained on.
    """

    def __init__(self, batch_sampler: Any, count: int) -> None:
        self.batch_sampler, self._count = batch_sampler, count
        # What accelerate reads of a batch sampler.
        self.sampler, self.batch_size = batch_sampler.sampler, batch_sampler.batch_size
        self.drop_last = batch_sampler.drop_last

    def __iter__(self) -> Iterator[list[int]]:
        return itertools.islice(iter(self.batch_sampler), self._count)

    def __len__(self) -> int:
        return self._count


def close_windows(loader: Any, accelerator: Any, accumulation: int, max_train_steps: int | None) -> Any:
    """Returns the trainer's loader with an end that accelerate sees, the same number of micro-batches everywhere.

    The trainer leaves such a loader as it is, so that accelerate does not know where an epoch ends: a window that is
    not full then goes on with the next epoch's records, and the last one of the training is thrown away. A process
    with a batch more than others waits for them in vain.

    Args:
        loader: torch's, made by the trainer; every process calls this with its own.
        accelerator: the trainer's.
        accumulation: micro-batches of a window.
        max_train_steps: ``--max-train-steps``.

    Raises:
        DataError: a process has no whole batch, or the shards are so unequal that the trainer would give each process
            a learning rate of its own.

    Source: accelerate ``accelerator.py``, ``Accelerator._do_sync``; upstream ``sft.py``, ``main``.
    """
    device = accelerator.device
    shortest = -largest_of_all(-len(loader), device)
    if not shortest:
        raise DataError(
            "data: files were sharded by rank, and a process has fewer records than a batch. Expected at least "
            f"{loader.batch_size} (--per-device-batch-size) for each of {accelerator.num_processes} processes; make "
            "fewer or larger shards."
        )
    steps = math.ceil(math.ceil(len(loader.dataset) / loader.batch_size) / accumulation)
    fewest, most = -largest_of_all(-steps, device), largest_of_all(steps, device)
    if fewest != most and not max_train_steps:
        raise DataError(
            f"data: files were sharded by rank, and the trainer counts {fewest} to {most} optimizer steps an epoch in "
            "its processes and sizes each one's learning rate by its own: their weights would come apart. Expected "
            f"shards of equal size. An epoch has {math.ceil(shortest / accumulation)} steps for all: multiply by the "
            "number of epochs and set it as --max-train-steps, or split the data again."
        )
    if shortest < len(loader):
        # A loader refuses a new sampler by plain assignment, since an iterator may be using the old one; none does yet.
        object.__setattr__(loader, "batch_sampler", FirstBatches(loader.batch_sampler, shortest))
    kind = type(loader)
    closed = prepare_data_loader(
        loader, device, num_processes=1, process_index=0, put_on_device=True, even_batches=False, rng_types=None
    )
    closed.base_dataloader.__class__ = kind  # accelerate built torch's own class from the trainer's parts
    return closed
