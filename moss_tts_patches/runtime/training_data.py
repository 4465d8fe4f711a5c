"""The trainer's records and its loader: checked as they are read, and the longest of them tried first."""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from ..data.install import CheckedData, DataOptions, Loaded, counting, load_checked
from .longest_probe import probe_longest


class TrainingData:
    """What a run knows of its data.

    Args:
        options: what to do about faulty and long records.
        record_rules: the family's.
        say: logs a line.

    Attributes:
        checked: the records and what was found; None until they are read.
        micro_batches: of an epoch in one process, once the trainer has made its loader.
    """

    def __init__(self, options: DataOptions, record_rules: Callable[[Any], Any], say: Callable[[str], None]) -> None:
        self._options, self._record_rules, self._say = options, record_rules, say
        self.checked: CheckedData | None = None
        self.micro_batches: int | None = None
        self._dataset: Any = None
        self._collate: Callable[[list[Any]], Any] | None = None
        self._batch_size = 1

    def load(
        self,
        upstream: Callable[..., Loaded],
        trainer: dict[str, Any],
        arguments: Any,
        *,
        spec: str,
        processes: int,
        rank: int,
        output_folder: Path,
    ) -> Loaded:
        """Reads and checks the records, in the place of the trainer's ``load_jsonl_for_rank``.

        Raises:
            DataError: a record is faulty, and faulty ones are not to be skipped.
        """
        rules, counter, problem = counting(trainer, arguments, self._record_rules)
        if problem is not None:
            self._say(f"data positions=upper_bounds reason='{problem}'")
        self.checked = load_checked(
            upstream,
            spec,
            processes,
            rank,
            rules=rules,
            counter=counter,
            options=self._options,
            output_folder=output_folder,
            say=self._say,
        )
        return self.checked.loaded

    @property
    def is_sharded(self) -> bool:
        """Whether each process has read files of its own."""
        return self.checked is not None and self.checked.loaded[3]

    def loader_made(self, loader: Any, processes: int) -> None:
        """The trainer has made its ``DataLoader``, whose batches so many processes share."""
        self._dataset, self._collate = loader.dataset, loader.collate_fn
        self._batch_size = loader.batch_size or 1
        self.micro_batches = math.ceil(len(loader) / (1 if self.is_sharded else processes))

    def try_longest(
        self, batch: dict[str, Any], run: Callable[[dict[str, Any]], object], drop_gradients: Callable[[], object]
    ) -> None:
        """Trains on the longest records and forgets it, so that memory fails now or never.

        Args:
            batch: the first real one: the trainer's other arguments, and the device.
            run: forward and backward.
            drop_gradients: takes back what ``run`` left.
        """
        if self.checked is None or self._collate is None or len(self.checked.report.positions) != len(self._dataset):
            return
        device = next(value.device for value in batch.values() if isinstance(value, torch.Tensor))

        def on_longest(collated: dict[str, Any]) -> None:
            moved = {n: v.to(device) if isinstance(v, torch.Tensor) else v for n, v in collated.items() if n in batch}
            run({**batch, **moved})

        probe = probe_longest(
            self._dataset, self._collate, self.checked.report.positions, self._batch_size, on_longest, drop_gradients
        )
        self._say(f"longest_first positions={','.join(map(str, probe.positions))} fits=yes")
