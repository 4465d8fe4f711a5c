"""Trains on the longest batch before the first step and forgets it: memory fails in the first minute or never.

Nothing of the run changes: every generator is where it was, byte for byte, and the data order is the trainer's.
"""

from __future__ import annotations

import contextlib
import random
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch


@dataclass(frozen=True)
class Probe:
    """What was tried: the records' indices in the data set, the longest first, and the positions of each."""

    indices: tuple[int, ...]
    positions: tuple[int, ...]


def probe_longest(
    dataset: Any,
    collate: Callable[[list[Any]], Any],
    positions: Sequence[int],
    batch_size: int,
    run: Callable[[Any], object],
    drop_gradients: Callable[[], object],
) -> Probe:
    """Runs forward and backward on the longest records that can come together in a micro-batch.

    An error of the run passes through, gradients dropped and generators restored.

    Args:
        dataset: the trainer's; only the longest records are asked for.
        collate: makes a batch of records.
        positions: one number a record of ``dataset``.
        batch_size: records of a micro-batch on one device.
        run: forward and backward on a batch.
        drop_gradients: takes back what ``run`` left in parameters and stores.

    Raises:
        ValueError: ``positions`` and ``dataset`` do not belong together (a slip of ours).
    """
    if len(positions) != len(dataset):
        raise ValueError(f"{len(positions)} lengths for {len(dataset)} records")
    indices = longest_records(positions, batch_size)
    with generators_restored():
        batch = collate([dataset[index] for index in indices])
        try:
            run(batch)
        finally:
            del batch
            drop_gradients()
    return Probe(tuple(indices), tuple(positions[index] for index in indices))


def longest_records(positions: Sequence[int], count: int) -> list[int]:
    """Returns the indices of the longest records, the longest first, equal ones in their order."""
    return sorted(range(len(positions)), key=lambda index: (-positions[index], index))[:count]


@contextlib.contextmanager
def generators_restored() -> Iterator[None]:
    """Puts back the global generators of Python, numpy, torch and every CUDA device when the block ends."""
    numpy_random = getattr(sys.modules.get("numpy"), "random", None)  # not imported: nobody has drawn from it
    python_state = random.getstate()
    numpy_state = numpy_random.get_state() if numpy_random is not None else None
    torch_state = torch.get_rng_state()
    cuda_states = torch.cuda.get_rng_state_all() if torch.cuda.is_available() else []
    try:
        yield
    finally:
        random.setstate(python_state)
        if numpy_random is not None:
            numpy_random.set_state(numpy_state)
        torch.set_rng_state(torch_state)
        if cuda_states:
            torch.cuda.set_rng_state_all(cuda_states)
