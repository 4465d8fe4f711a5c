"""Reads every record once and says which can be trained on."""

from __future__ import annotations

import hashlib
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple, Protocol

from ..errors import DataError
from .conversation import ConversationCounter, estimate_conversation
from .files import missing_shards
from .lines import Examined
from .pool import Examine, examiners, workers_for
from .report import TOO_LONG, DataReport
from .rules import LeftOut, Place, RecordFault, RecordRules, Size
from .speech import SpeechCounter, estimate_speech

# Texts that are tokenized at once: a fast tokenizer works on a batch in native code.
_BATCH_RECORDS = 256
# Seconds of reading after which a bar is shown.
_SILENT_SECONDS = 2.0


class Layout(NamedTuple):
    """How one form of records is estimated and counted."""

    estimate: Callable[..., Size]
    counter: Callable[[RecordRules, Any], Counter]


class Counter(Protocol):
    """Gives records' sizes."""

    exact: bool

    def count(self, batch: Sequence[Any]) -> Sequence[Size | RecordFault]:
        """Returns one size a record, or what is wrong with it."""


LAYOUTS = {
    "speech": Layout(estimate_speech, SpeechCounter),
    "conversation": Layout(estimate_conversation, ConversationCounter),
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


class RecordCheck:
    """Checks files one after the other and keeps account.

    Args:
        counter: see :func:`make_counter`.
        max_positions: records with more are left out; None allows all.
        examine: reads files, see :func:`.pool.examiners`.
    """

    def __init__(self, counter: Counter, examine: Examine, max_positions: int | None = None) -> None:
        self._counter, self._examine, self._max_positions = counter, examine, max_positions
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
        pending: list[Examined] = []
        try:
            for examined in self._examine(path, advance):
                pending.append(examined)
                if len(pending) == _BATCH_RECORDS:
                    yield from self._settle(path, pending)
                    pending = []
        except OSError as error:
            raise DataError(f"data: {path} cannot be read ({error.strerror or error}); check the path.") from None
        yield from self._settle(path, pending)

    def finish(self) -> DataReport:
        """Returns the account of everything read."""
        self._report.fingerprint = self._hash.hexdigest()
        shards = missing_shards(self._report.files)
        if shards is not None:
            self._report.notes.append(shards)
        if self._report.without_prompt:
            self._report.notes.append(
                f"{self._report.without_prompt} of {self._report.kept} records have no text and no other field of a "
                "prompt: they teach audio that nothing asks for. Is a key misspelt?"
            )
        return self._report

    def _settle(self, path: Path, pending: list[Examined]) -> Iterator[dict[str, Any]]:
        """Counts the positions of a batch, and yields what is kept of it."""
        right = [item.audio for item in pending if item.fault is None]
        sizes = iter(self._counter.count(right) if right else ())
        self._report.records += len(pending)
        for item in pending:
            place = Place(path, item.line)
            size = RecordFault(*item.fault) if item.fault is not None else next(sizes)
            if isinstance(size, RecordFault):
                self._leave_out(place, item.identity, size)
            elif self._max_positions is not None and size.positions > self._max_positions:
                problem = f"{size.positions} positions; at most {self._max_positions} are allowed"
                self._leave_out(place, item.identity, RecordFault(TOO_LONG, problem))
            else:
                self._keep(place, item, size)
                yield item.whole_record()

    def _keep(self, place: Place, item: Examined, size: Size) -> None:
        report = self._report
        if size.positions > self._longest:
            self._longest = size.positions
            report.longest = (place, item.identity)
        report.positions.append(size.positions)
        report.lines.append(item.line)
        report.files_of.append(len(report.files) - 1)
        report.supervised += size.supervised
        report.frames += size.frames
        report.references_without_codes += size.references_without_codes
        report.without_prompt += not item.audio.has_prompt
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
    with examiners(rules, keeps_records=False, workers=workers_for(files)) as examine, reading_bar(files) as advance:
        check = RecordCheck(counter, examine, max_positions)
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
