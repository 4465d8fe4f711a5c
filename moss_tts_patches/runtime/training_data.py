"""The trainer's records and its loader: checked as they are read, and the longest of them tried first."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from ..data.held_out import HeldOut, ValidationRecords, load_files, take_share
from ..data.install import INEXACT, CheckedData, DataOptions, Loaded, counting, load_checked
from ..data.lines import record_identity
from ..errors import DataError
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
        most_positions: that a record may have; None where every one is kept.
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
        self.most_positions = options.max_positions
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
        find_limit: Callable[[CheckedData], int | None] | None = None,
    ) -> Loaded:
        """Reads and checks the records, in the place of the trainer's ``load_jsonl_for_rank``.

        Args:
            upstream: the trainer's own function.
            trainer: its namespace.
            arguments: its parsed command line.
            spec, processes, rank: what the trainer passes.
            output_folder: of the run.
            find_limit: is asked how many positions a record may have, until every one that is left fits (None).

        Raises:
            DataError: a record is faulty, and faulty ones are not to be skipped.
        """
        rules, counter, problem = counting(trainer, arguments, self._rules)
        if problem is not None:
            self._say(f"data positions=upper_bounds reason='{problem}'")
        if find_limit is not None and not counter.exact:
            raise DataError(INEXACT.format("auto"))

        def load(options: DataOptions) -> CheckedData:
            return load_checked(
                upstream,
                spec,
                processes,
                rank,
                rules=rules,
                counter=counter,
                options=options,
                output_folder=output_folder,
                say=self._say,
            )

        checked = load(self._options)
        while find_limit is not None and (limit := find_limit(checked)) is not None:
            # Read again instead of thinned out, so that everything is as with that number. Another time where the
            # records that are left have a larger share of positions with labels.
            self.most_positions = limit
            checked = load(replace(self._options, max_positions=limit))
        self.checked = checked
        self._hold_out(upstream, rank, int(arguments.seed), rules=rules, counter=counter, output_folder=output_folder)
        return self.checked.loaded

    def _hold_out(self, upstream: Any, rank: int, seed: int, **reading: Any) -> None:
        """Reads the records to evaluate, or takes them out of the training's."""
        assert self.checked is not None
        if self._held_out.files is not None:
            options = replace(self._options, max_positions=self.most_positions)
            self.validation = load_files(
                upstream, self._held_out.files, rank, self.checked, options=options, say=self._say, **reading
            )
        elif self._held_out.wanted:
            self.checked, self.validation = take_share(self.checked, self._held_out.share, seed)
            self._say(
                f"data held_out={len(self.validation.records)} for validation, trained_on={self.checked.report.kept}"
            )

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

    def name_record(self, index: int) -> str:
        """Says where a record stands, as a report of faulty records does; ``index`` is the trainer's own."""
        known = self.checked
        if known is None or index >= len(known.report.lines):
            return f"record {index}"
        return f"{known.report.place(index)} id={record_identity(known.loaded[1][index])}"

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


def steps_of_training(arguments: Any, micro_batches: int | None) -> int | None:
    """Returns how many optimizer steps a trainer will do; None where that is not known.

    Args:
        arguments: its parsed command line.
        micro_batches: of an epoch, on one process.

    Source: upstream ``*/finetuning/sft.py``, ``main``.
    """
    most = getattr(arguments, "max_train_steps", None)
    if most or micro_batches is None:
        return most or None
    return arguments.num_epochs * math.ceil(micro_batches / arguments.gradient_accumulation_steps)
