"""The trainer's records and its loader: checked as they are read, and the longest of them tried first."""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from ..data.held_out import HeldOut, ValidationRecords, load_files, take_share
from ..data.install import CheckedData, DataOptions, Loaded, counting, load_checked
from .longest_probe import probe_longest


class TrainingData:
    """What a run knows of its data.

    Args:
        options: what to do about faulty and long records.
        record_rules: the family's.
        say: logs a line.
        held_out: which records are evaluated and not trained on.

    Attributes:
        checked: the records and what was found; None until they are read.
        validation: the records to evaluate; None where there are none.
        micro_batches: of an epoch in one process, once the trainer has made its loader.
        dataset: the trainer's, once it has made its loader.
        collate: makes a batch of its items.
        batch_size: records of a micro-batch.
    """

    def __init__(
        self,
        options: DataOptions,
        record_rules: Callable[[Any], Any],
        say: Callable[[str], None],
        held_out: HeldOut | None = None,
    ) -> None:
        self._options, self._record_rules, self._say = options, record_rules, say
        self._held_out = held_out or HeldOut()
        self.validation: ValidationRecords | None = None
        self.checked: CheckedData | None = None
        self.micro_batches: int | None = None
        self.dataset: Any = None
        self.collate: Callable[[list[Any]], Any] | None = None
        self.batch_size = 1

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
        rules, counter, problem = counting(trainer, arguments, self._rules)
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
        if self._held_out.files is not None:
            self.validation = load_files(
                upstream,
                self._held_out.files,
                rank,
                self.checked,
                rules=rules,
                counter=counter,
                options=self._options,
                output_folder=output_folder,
                say=self._say,
            )
        elif self._held_out.wanted:
            self.checked, self.validation = take_share(self.checked, self._held_out.share, int(arguments.seed))
            self._say(
                f"data held_out={len(self.validation.records)} for validation, trained_on={self.checked.report.kept}"
            )
        return self.checked.loaded

    @property
    def is_sharded(self) -> bool:
        """Whether each process has read files of its own."""
        return self.checked is not None and self.checked.loaded[3]

    def loader_made(self, loader: Any, processes: int) -> None:
        """The trainer has made its ``DataLoader``, whose batches so many processes share."""
        self.dataset, self.collate = loader.dataset, loader.collate_fn
        self.batch_size = loader.batch_size or 1
        self.micro_batches = math.ceil(len(loader) / (1 if self.is_sharded else processes))

    def _rules(self, config: Any) -> Any:
        rules = self._record_rules(config)
        return rules.with_prompt_length() if self._options.corrects_prompt_length else rules

    def try_longest(
        self, batch: dict[str, Any], run: Callable[[dict[str, Any]], object], drop_gradients: Callable[[], object]
    ) -> None:
        """Trains on the longest records and forgets it, so that memory fails now or never.

        Args:
            batch: the first real one: the trainer's other arguments, and the device.
            run: forward and backward.
            drop_gradients: takes back what ``run`` left.
        """
        if self.checked is None or self.collate is None or len(self.checked.report.positions) != len(self.dataset):
            return
        device = next(value.device for value in batch.values() if isinstance(value, torch.Tensor))

        def on_longest(collated: dict[str, Any]) -> None:
            moved = {n: v.to(device) if isinstance(v, torch.Tensor) else v for n, v in collated.items() if n in batch}
            run({**batch, **moved})

        probe = probe_longest(
            self.dataset, self.collate, self.checked.report.positions, self.batch_size, on_longest, drop_gradients
        )
        self._say(f"longest_first positions={','.join(map(str, probe.positions))} fits=yes")
