"""What a check found, for a reader and for the planner."""

from __future__ import annotations

from array import array
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from .rules import LeftOut, Place

#: Faults that are listed one by one: more do not help to see what they have in common.
LISTED = 20
TOO_LONG = "too long"


@dataclass
class DataReport:
    """The records of a run.

    Attributes:
        files: in the order in which they were read.
        exact: positions are the trainer's own; otherwise they are upper bounds.
        records: how many were read, those left out included.
        kept: how many the trainer gets.
        faults: records that cannot be trained on.
        too_long: records beyond the longest that was allowed.
        positions: one number a kept record, in the trainer's order.
        lines: line of each kept record in its file, in the same order.
        files_of: index into ``files`` of each kept record.
        supervised: positions with a label, of all kept records.
        frames: of the audio that is learned, of all kept records.
        longest: place and id of the kept record with the most positions.
        references_without_codes: reference audio files that the trainer has to encode, in kept records; their frames
            are in no number here.
        without_prompt: kept records that hold an audio, and nothing that says what it is.
        fingerprint: of the kept records' text, in order; the files' names do not matter.
        notes: what else a reader should know.
    """

    files: list[Path] = field(default_factory=list)
    exact: bool = True
    records: int = 0
    faults: list[LeftOut] = field(default_factory=list)
    too_long: list[LeftOut] = field(default_factory=list)
    positions: array[int] = field(default_factory=lambda: array("I"))
    lines: array[int] = field(default_factory=lambda: array("I"))
    files_of: array[int] = field(default_factory=lambda: array("I"))
    supervised: int = 0
    frames: int = 0
    longest: tuple[Place, str] | None = None
    references_without_codes: int = 0
    without_prompt: int = 0
    fingerprint: str = ""
    notes: list[str] = field(default_factory=list)

    @property
    def kept(self) -> int:
        return len(self.positions)

    def place(self, index: int) -> Place:
        """Returns where a kept record stands."""
        return Place(self.files[self.files_of[index]], self.lines[index])

    @property
    def kinds(self) -> dict[str, int]:
        """Faults by kind, the most frequent first."""
        return dict(Counter(fault.kind for fault in self.faults).most_common())

    @property
    def supervised_share(self) -> float:
        total = sum(self.positions)
        return self.supervised / total if total else 0.0

    def quantile(self, share: float) -> int:
        """Returns the number of positions that ``share`` of the kept records do not exceed; 0 where there are none."""
        ordered = sorted(self.positions)
        return ordered[max(0, -int(-share * len(ordered) // 1) - 1)] if ordered else 0

    def as_values(self) -> dict[str, Any]:
        """Returns the report for JSON."""
        return {
            "files": [str(path) for path in self.files],
            "records": self.records,
            "kept": self.kept,
            "faults": len(self.faults),
            "faults_by_kind": self.kinds,
            "first_faults": [_values(fault) for fault in self.faults[:LISTED]],
            "too_long": len(self.too_long),
            "first_too_long": [_values(record) for record in self.too_long[:LISTED]],
            "positions": {
                "exact": self.exact,
                "median": self.quantile(0.5),
                "p95": self.quantile(0.95),
                "longest": max(self.positions, default=0),
                "longest_record": None if self.longest is None else f"{self.longest[0]} id={self.longest[1]}",
                "total": sum(self.positions),
            },
            "supervised_share": round(self.supervised_share, 4),
            "frames": self.frames,
            "references_without_codes": self.references_without_codes,
            "fingerprint": self.fingerprint,
            "notes": self.notes,
        }

    def summary(self) -> list[str]:
        """Returns the lines of a start-up log."""
        lines = [
            f"data records={self.records} kept={self.kept} faults={len(self.faults)} too_long={len(self.too_long)} "
            f"fingerprint={self.fingerprint[:16]}"
        ]
        if self.longest is not None:
            place, identity = self.longest
            kind = "exact" if self.exact else "at_most"
            lines.append(
                f"data positions={kind} median={self.quantile(0.5)} p95={self.quantile(0.95)} "
                f"longest={max(self.positions)} record={place.file.name}:{place.line} id={identity} "
                f"supervised={self.supervised_share:.0%}"
            )
        if self.references_without_codes:
            lines.append(
                f"data references_without_codes={self.references_without_codes}: the trainer encodes them while it "
                "trains, and their frames are not counted; prepare_data.py can do it once"
            )
        return lines + [f"data note: {note}" for note in self.notes]

    def fault_list(self) -> str:
        """Returns counts by kind and the first faults, one a line."""
        kinds = ", ".join(f"{kind} {count}" for kind, count in self.kinds.items())
        return "\n".join([f"{len(self.faults)} of {self.records} records are faulty ({kinds}):", *listed(self.faults)])


def listed(left_out: Sequence[LeftOut]) -> list[str]:
    """Returns the first of them, one a line, and how many more there are."""
    lines = [f"  {record}" for record in left_out[:LISTED]]
    if len(left_out) > LISTED:
        lines.append(f"  and {len(left_out) - LISTED} more")
    return lines


def _values(record: LeftOut) -> dict[str, Any]:
    return {
        "file": str(record.place.file),
        "line": record.place.line,
        "id": record.id,
        "kind": record.kind,
        "problem": record.problem,
    }


def skipped_values(report: DataReport) -> list[dict[str, Any]]:
    """Returns one entry a record left out, as ``skipped_records.jsonl`` holds them."""
    entries = sorted(report.faults + report.too_long, key=lambda record: (str(record.place.file), record.place.line))
    return [
        {
            "file": str(record.place.file),
            "line": record.place.line,
            "id": record.id,
            "reason": f"{record.kind}: {record.problem}",
        }
        for record in entries
    ]
