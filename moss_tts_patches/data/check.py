"""Reads every record once and says which can be trained on; 300 frames of 32 codes take about a millisecond."""

from __future__ import annotations

import hashlib
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple, Protocol

from ..errors import DataError
from .conversation import ConversationCounter, estimate_conversation, examine_conversation
from .files import BLANK, missing_shards, parse, read_lines
from .report import TOO_LONG, DataReport
from .rules import LeftOut, Place, RecordFault, RecordRules, Size
from .speech import SpeechCounter, estimate_speech, examine_speech

# Texts that are tokenized at once: a fast tokenizer works on a batch in native code.
_BATCH_RECORDS = 256
# Seconds of reading after which a bar is shown.
_SILENT_SECONDS = 2.0


class Layout(NamedTuple):
    """How one form of records is examined, estimated and counted."""

    examine: Callable[..., Any]
    estimate: Callable[..., Size]
    counter: Callable[[RecordRules, Any], Counter]


class Counter(Protocol):
    """Gives records' sizes."""

    exact: bool

    def count(self, batch: Sequence[Any]) -> Sequence[Size | RecordFault]:
        """Returns one size a record, or what is wrong with it."""


LAYOUTS = {
    "speech": Layout(examine_speech, estimate_speech, SpeechCounter),
    "conversation": Layout(examine_conversation, estimate_conversation, ConversationCounter),
}


class UpperBounds:
    """Sizes that no record exceeds, where there is no tokenizer: one token a byte of text."""

    exact = False

    def __init__(self, rules: RecordRules) -> None:
        self._rules = rules

    def count(self, batch: Sequence[Any]) -> list[Size | RecordFault]:
        estimate = LAYOUTS[self._rules.layout].estimate
        return [estimate(audio, self._rules) for audio in batch]


def make_counter(rules: RecordRules, processor: Any | None) -> Counter:
    """Returns what counts positions: exactly with upstream's processor, else as upper bounds."""
    return UpperBounds(rules) if processor is None else LAYOUTS[rules.layout].counter(rules, processor)


class _Pending(NamedTuple):
    place: Place
    identity: str
    digest: bytes
    record: dict[str, Any]
    audio: Any


class RecordCheck:
    """Checks files one after the other and keeps account.

    Args:
        rules: the family's.
        counter: see :func:`make_counter`.
        max_positions: records with more are left out; None allows all.
        keeps_records: :meth:`read` yields the records; else it yields an empty one for each.
    """

    def __init__(
        self, rules: RecordRules, counter: Counter, max_positions: int | None = None, keeps_records: bool = True
    ) -> None:
        self._keeps_records = keeps_records
        self._rules, self._counter, self._max_positions = rules, counter, max_positions
        self._examine = LAYOUTS[rules.layout].examine
        self._hash = hashlib.sha256()
        self._report = DataReport(exact=counter.exact)
        self._longest = -1

    def read(self, path: Path, advance: Callable[[int], object] | None = None) -> Iterator[dict[str, Any]]:
        """Yields the records of a file that can be trained on, in their order.

        Args:
            path: a JSONL file.
            advance: is told how many bytes were read.

        Raises:
            DataError: the file cannot be read.
        """
        self._report.files.append(path)
        pending: list[_Pending] = []
        try:
            for number, line in read_lines(path, advance):
                accepted = self._accept(Place(path, number), line)
                if accepted is not None:
                    pending.append(accepted)
                if len(pending) == _BATCH_RECORDS:
                    yield from self._settle(pending)
                    pending = []
        except OSError as error:
            raise DataError(f"data: {path} cannot be read ({error.strerror or error}); check the path.") from None
        yield from self._settle(pending)

    def finish(self) -> DataReport:
        """Returns the account of everything read."""
        self._report.fingerprint = self._hash.hexdigest()
        shards = missing_shards(self._report.files)
        if shards is not None:
            self._report.notes.append(shards)
        return self._report

    def _accept(self, place: Place, line: bytes) -> _Pending | None:
        """Returns the record if everything but its text is right; it is kept account of otherwise."""
        record: Any = None
        self._report.records += 1
        try:
            record = parse(line)
            if record is BLANK:
                self._report.records -= 1
                return None
            if not isinstance(record, dict):
                raise RecordFault("JSON", f"a {type(record).__name__}; expected one JSON object a line")
            # Two searches through the line, 27 µs each for 50 KB, instead of a look at each of its codes.
            may_hold_booleans = b"true" in line or b"false" in line
            audio = self._examine(record, self._rules, may_hold_booleans)
            # Without its codes a record is a few hundred bytes. Holding 256 whole ones made parsing three times as
            # slow: every list came from memory that no cache knew.
            kept = record if self._keeps_records else {}
            return _Pending(place, _identity(record), hashlib.sha256(line).digest(), kept, audio)
        except RecordFault as fault:
            self._leave_out(place, _identity(record), fault)
            return None

    def _settle(self, pending: list[_Pending]) -> Iterator[dict[str, Any]]:
        """Counts the positions of a batch, and yields what is kept of it."""
        sizes = self._counter.count([item.audio for item in pending]) if pending else ()
        for item, size in zip(pending, sizes):
            if isinstance(size, RecordFault):
                self._leave_out(item.place, item.identity, size)
            elif self._max_positions is not None and size.positions > self._max_positions:
                problem = f"{size.positions} positions; at most {self._max_positions} are allowed"
                self._leave_out(item.place, item.identity, RecordFault(TOO_LONG, problem))
            else:
                self._keep(item, size)
                yield item.record

    def _keep(self, item: _Pending, size: Size) -> None:
        report = self._report
        if size.positions > self._longest:
            self._longest = size.positions
            report.longest = (item.place, item.identity)
        report.positions.append(size.positions)
        report.supervised += size.supervised
        report.frames += size.frames
        report.references_without_codes += size.references_without_codes
        self._hash.update(item.digest)

    def _leave_out(self, place: Place, identity: str, fault: RecordFault) -> None:
        entry = LeftOut(place, identity, fault.kind, fault.problem)
        (self._report.too_long if fault.kind == TOO_LONG else self._report.faults).append(entry)


def check_files(
    files: Sequence[Path], rules: RecordRules, counter: Counter, max_positions: int | None = None
) -> DataReport:
    """Checks files without keeping their records.

    Args:
        files: in order.
        rules: the family's.
        counter: see :func:`make_counter`.
        max_positions: see :class:`RecordCheck`.

    Raises:
        DataError: a file cannot be read.
    """
    check = RecordCheck(rules, counter, max_positions, keeps_records=False)
    with reading_bar(files) as advance:
        for path in files:
            for _ in check.read(path, advance):
                pass
    return check.finish()


class reading_bar:
    """Lends a function that takes bytes read; shows a bar after two seconds, on a terminal only."""

    def __init__(self, files: Sequence[Path], shown: bool = True) -> None:
        self._shown = shown and sys.stderr.isatty()
        self._total = sum(path.stat().st_size for path in files if path.is_file())

    def __enter__(self) -> Callable[[int], object]:
        from tqdm import tqdm  # comes with transformers

        self._bar = tqdm(
            total=self._total,
            desc="checking data",
            unit="B",
            unit_scale=True,
            delay=_SILENT_SECONDS,
            leave=False,
            disable=not self._shown,
        )
        return self._bar.update

    def __exit__(self, *_: object) -> None:
        self._bar.close()


def _identity(record: Any) -> str:
    found = record.get("id") if isinstance(record, dict) else None
    return "none" if found is None else str(found)
