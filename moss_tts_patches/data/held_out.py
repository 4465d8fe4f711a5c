"""Records that are not trained on: from files of their own, or a share of the training records."""

from __future__ import annotations

import random
from array import array
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from ..errors import DataError
from .check import Counter
from .install import CheckedData, DataOptions, Loaded, load_checked
from .rules import RecordRules

# Below OUTPUT_DIR: where ``skipped_records.jsonl`` of the validation records goes.
SKIPPED_FOLDER = "validation"


@dataclass(frozen=True)
class HeldOut:
    """Which records are evaluated; at most one of the two is set.

    Attributes:
        files: as ``--train-jsonl`` names files; None for none.
        share: of the training records; 0 for none.
    """

    files: str | None = None
    share: float = 0.0

    @property
    def wanted(self) -> bool:
        return self.files is not None or self.share > 0


@dataclass(frozen=True)
class ValidationRecords:
    """The records to evaluate.

    Attributes:
        records: in a fixed order.
        of_all: every process has the same ones; else each has its own.
    """

    records: list[dict[str, Any]]
    of_all: bool


def take_share(checked: CheckedData, share: float, seed: int) -> tuple[CheckedData, ValidationRecords]:
    """Takes a seeded share out of the training records; no global generator is asked.

    Args:
        checked: the training records.
        share: at least one record is taken, and one is left.
        seed: of the trainer.

    Returns:
        The training records without them, and them; both in the files' order.

    Raises:
        DataError: there is only one record.
    """
    files, records, own, sharded = checked.loaded
    count = len(records)
    if count < 2:
        raise DataError(
            f"data: MOSS_LOWMEM_VALID_SHARE={share:g} of {count} record. Expected 2 or more, so that one is left to "
            "train on; name other records with MOSS_LOWMEM_VALID_JSONL, or unset it."
        )
    wanted = min(max(1, round(share * count)), count - 1)
    taken = set(random.Random(f"validation {seed}").sample(range(count), wanted))
    kept = [index for index in range(count) if index not in taken]
    held = [records[index] for index in range(count) if index in taken]
    report = checked.report
    positions, lines, files_of = (
        array("I", (values[index] for index in kept)) for values in (report.positions, report.lines, report.files_of)
    )
    # Labels are not counted by record; what is left has its part of them by length.
    part = sum(positions) / max(sum(report.positions), 1)
    left = replace(
        report,
        positions=positions,
        lines=lines,
        files_of=files_of,
        supervised=round(part * report.supervised),
        frames=round(part * report.frames),
    )
    training = CheckedData((files, [records[index] for index in kept], own, sharded), left)
    return training, ValidationRecords(held, of_all=not sharded)


def load_files(
    upstream: Callable[..., Loaded],
    spec: str,
    rank: int,
    training: CheckedData,
    *,
    rules: RecordRules,
    counter: Counter,
    options: DataOptions,
    output_folder: Path,
    say: Callable[[str], None],
) -> ValidationRecords:
    """Reads and checks validation files like training files; every process gets all of them.

    Args:
        upstream: the trainer's ``load_jsonl_for_rank``.
        spec: ``MOSS_LOWMEM_VALID_JSONL``.
        rank: which process this is; the first one reports.
        training: the training records.
        rules: see :func:`.install.load_checked`, as the rest.

    Raises:
        DataError: a file is missing, a record is faulty, or one needs an audio codec that the trainer has not loaded.
    """
    found = load_checked(
        upstream,
        spec,
        1,
        rank,
        rules=rules,
        counter=counter,
        options=options,
        output_folder=output_folder / SKIPPED_FOLDER,
        say=lambda line: say(f"validation {line}"),
    )
    without = found.report.references_without_codes
    if without and not training.report.references_without_codes:
        raise DataError(
            f"data: MOSS_LOWMEM_VALID_JSONL={spec} has {without} reference audio files without codes, and the trainer "
            "loads its codec only where training records need it. Run prepare_data.py on the validation records, with "
            "its encoding of references."
        )
    return ValidationRecords(found.loaded[1], of_all=True)
