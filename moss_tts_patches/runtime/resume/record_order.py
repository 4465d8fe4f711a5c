"""Which records a micro-batch is made of: the sampler's order, followed as the loader draws it."""

from __future__ import annotations

import itertools
from collections import deque
from collections.abc import Iterator
from typing import Any

from torch.utils.data import Sampler


class RecordOrder:
    """Indices of the records on their way from the sampler to the loop.

    Workers and accelerate fetch ahead, but batches come in the order in which they were drawn.
    """

    def __init__(self) -> None:
        self._drawn: deque[list[int]] = deque()

    def epoch_begins(self) -> None:
        """A sampler starts anew; what it drew before and the loop did not ask for is forgotten."""
        self._drawn.clear()

    def drawn(self, indices: list[int]) -> None:
        """The sampler has chosen a batch."""
        self._drawn.append(indices)

    def next(self) -> list[int]:
        """The loop is at the next micro-batch; returns its records' indices, none where the order is not known."""
        return self._drawn.popleft() if self._drawn else []


class FollowedSampler(Sampler[list[int]]):
    """A batch sampler's batches without the first ones, each reported when it is drawn.

    The first ones are drawn all the same: a share for one of several processes fills up its last batch with indices of
    the first.

    Args:
        whole: the loader's own.
        finished: batches to leave out.
        order: is told.
    """

    def __init__(self, whole: Any, finished: int, order: RecordOrder) -> None:
        self._whole, self._finished, self._order = whole, finished, order

    def __iter__(self) -> Iterator[list[int]]:
        self._order.epoch_begins()
        for indices in itertools.islice(iter(self._whole), self._finished, None):
            self._order.drawn(indices)
            yield indices

    def __len__(self) -> int:
        return len(self._whole)
