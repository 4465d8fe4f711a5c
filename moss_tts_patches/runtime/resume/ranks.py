"""What the processes of a training tell each other about resume points.

They talk over gloo, by the CPU, whatever the training's own backend is: asking after every micro-batch whether one of
them was told to stop then takes 0.5 ms on two crowded cores (``benchmarks/rank_agreement.py``), and does not wait for
what a GPU has queued. Nor does NCCL's watchdog, which ends a training after ten minutes without news, run while one
process writes a large point.
"""

from __future__ import annotations

import datetime
from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist

# The longest that processes wait for the one that writes: 230 GB at 128 MB/s. A process that died is noticed at once.
WAIT = datetime.timedelta(minutes=30)


class Ranks:
    """The processes of a training, seen by one of them; alone until it is told otherwise.

    Args:
        rank: of this process.
        count: how many there are.

    Attributes:
        rank: see there.
        count: see there.
    """

    def __init__(self, rank: int = 0, count: int = 1) -> None:
        self.rank, self.count = rank, count
        self._group: Any = None

    @property
    def several(self) -> bool:
        """Whether there are others to agree with."""
        return self.count > 1

    @property
    def is_main(self) -> bool:
        """Whether this process decides and writes."""
        return self.rank == 0

    def open_channel(self) -> None:
        """Makes the connection that :meth:`largest`, :meth:`gathered` and :meth:`alike` need; all processes call it."""
        if self.several:
            self._group = dist.new_group(backend="gloo", timeout=WAIT)

    def of_main(self, value: Any) -> Any:
        """Returns the main process's ``value``, which has to survive pickling."""
        if not self.several:
            return value
        box = [value if self.is_main else None]
        dist.broadcast_object_list(box, src=0, group=self._group)
        return box[0]

    def largest(self, values: Sequence[int]) -> list[int]:
        """Returns the largest of all processes' values, place by place."""
        if not self.several:
            return list(values)
        shared = torch.tensor(values, dtype=torch.int64)
        dist.all_reduce(shared, op=dist.ReduceOp.MAX, group=self._group)
        return shared.tolist()

    def gathered(self, own: dict[str, Any]) -> dict[int, dict[str, Any]]:
        """Returns what each process has, by rank, to the main process; to the others nothing."""
        if not self.several:
            return {0: own}
        everyone: list[Any] | None = [None] * self.count if self.is_main else None
        dist.gather_object(own, everyone, dst=0, group=self._group)
        return dict(enumerate(everyone or ()))

    def alike(self, number: int) -> bool:
        """Whether all processes have the same ``number``."""
        largest, smallest = self.largest([number, -number])
        return largest == -smallest
