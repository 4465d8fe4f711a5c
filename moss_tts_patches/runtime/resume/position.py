"""How far a training has come, counted where upstream's loop passes the layer."""

from __future__ import annotations

from dataclasses import asdict, dataclass, field
from typing import Any


@dataclass
class Position:
    """Counts since the start of the whole training, not of this process.

    Attributes:
        epoch: of the micro-batch last fetched, from 0; -1 before the first.
        batches: micro-batches done in it.
        micro_batches: micro-batches done in all.
        steps: optimizer steps done: upstream's ``global_step``.
        skipped: the numbers, among all micro-batches, of those that upstream left out because something was not finite.
    """

    epoch: int = -1
    batches: int = 0
    micro_batches: int = 0
    steps: int = 0
    skipped: list[int] = field(default_factory=list)

    def begin_epoch(self) -> None:
        self.epoch += 1
        self.batches = 0

    def micro_batch_done(self) -> None:
        self.batches += 1
        self.micro_batches += 1

    def as_values(self) -> dict[str, Any]:
        """Returns a copy as JSON values."""
        return asdict(self)
