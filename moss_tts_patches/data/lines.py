"""What a line alone tells of its record: everything but its positions. Needs no torch, so a small process can do it."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import islice
from typing import Any, NamedTuple

from .conversation import examine_conversation
from .files import BLANK, parse
from .matrices import CodeMatrix, cut, decode, put_back
from .rules import RecordFault, RecordRules
from .speech import examine_speech

EXAMINE: dict[str, Callable[..., Any]] = {"speech": examine_speech, "conversation": examine_conversation}

# Bytes of lines that are read as one: arrays of 64 KB stay in a core's own cache, and 1 MB of them took 1.4 times as
# long. A line of 300 frames of 32 codes has 48 KB.
_BATCH_BYTES = 64 * 1024
# Blank or short lines that are held at most.
_BATCH_LINES = 64


class Examined(NamedTuple):
    """A record and what its line tells.

    Attributes:
        line: its number in the file.
        identity: its id, for messages.
        digest: of the line; empty for a faulty record.
        record: what JSON makes of the line but for its code matrices, which stand in ``places`` (container and key);
            empty if records are not kept.
        audio: as the layout's ``examine`` returns it.
        fault: kind and problem of a record that cannot be trained on.
    """

    line: int
    identity: str
    digest: bytes = b""
    record: dict[str, Any] | None = None
    places: Sequence[tuple[Any, Any]] = ()
    audio: Any = None
    fault: tuple[str, str] | None = None

    def whole_record(self) -> dict[str, Any]:
        """Returns the record as JSON would have made it; its lists are made here, where they are needed next."""
        for container, key in self.places:
            container[key] = container[key].lists()
        return {} if self.record is None else self.record


def examine_lines(
    lines: Iterable[tuple[int, bytes]], rules: RecordRules, keeps_records: bool = True
) -> Iterator[Examined]:
    """Yields what each line holds, in their order; blank ones hold nothing.

    Args:
        lines: number and content.
        rules: the family's.
        keeps_records: whether records are of any use later.
    """
    for batch in _batches(lines):
        cuts = [cut(line) for _, line in batch]
        matrices = iter(decode([rows for one in cuts for rows in one.rows]))
        for (number, line), one in zip(batch, cuts):
            own = list(islice(matrices, len(one.rows)))
            found = _examine_rest(number, line, one.rest, own, rules) if own and None not in own else None
            found = _examine_whole(number, line, rules) if found is None else found
            if found is not None:
                yield found if keeps_records else found._replace(record=None, places=())


def _batches(lines: Iterable[tuple[int, bytes]]) -> Iterator[list[tuple[int, bytes]]]:
    batch: list[tuple[int, bytes]] = []
    size = 0
    for number, line in lines:
        batch.append((number, line))
        size += len(line)
        if size >= _BATCH_BYTES or len(batch) == _BATCH_LINES:
            yield batch
            batch, size = [], 0
    if batch:
        yield batch


def _examine_rest(
    number: int, line: bytes, rest: bytes, matrices: Sequence[CodeMatrix | None], rules: RecordRules
) -> Examined | None:
    """Returns the record of a line whose matrices were read apart; None where something is wrong or unusual.

    Such a line is read again as a whole: what is wrong with it is said by one piece of code only.
    """
    try:
        record = parse(rest)
        if not isinstance(record, dict):
            return None
        places = put_back(record, [one for one in matrices if one is not None])
        if places is None:
            return None
        # Two searches through what has no codes in it, instead of a look at each code.
        audio = EXAMINE[rules.layout](record, rules, b"true" in rest or b"false" in rest)
    except RecordFault:
        return None
    return Examined(number, record_identity(record), hashlib.sha256(line).digest(), record, places, audio)


def _examine_whole(number: int, line: bytes, rules: RecordRules) -> Examined | None:
    """Returns a record that JSON alone has read; None for a blank line."""
    record: Any = None
    try:
        record = parse(line)
        if record is BLANK:
            return None
        if not isinstance(record, dict):
            raise RecordFault("JSON", f"a {type(record).__name__}; expected one JSON object a line")
        audio = EXAMINE[rules.layout](record, rules, b"true" in line or b"false" in line)
    except RecordFault as fault:
        return Examined(number, record_identity(record), fault=(fault.kind, fault.problem))
    return Examined(number, record_identity(record), hashlib.sha256(line).digest(), record, (), audio)


def record_identity(record: Any) -> str:
    found = record.get("id") if isinstance(record, dict) else None
    return "none" if found is None else str(found)
