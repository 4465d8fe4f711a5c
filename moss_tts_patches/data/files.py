"""Which files a run reads, and their records, as the trainers understand both."""

from __future__ import annotations

import glob
import io
import json
import re
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

from ..errors import DataError
from .rules import RecordFault

try:  # twice as fast as json on lines whose codes have to be looked at one by one; json gives the same records
    import orjson
except ImportError:
    orjson = None  # type: ignore[assignment]

#: What :func:`parse` returns for a line that holds nothing.
BLANK = object()

# Lines of 48 KB come out of Python's 8 KB in many pieces: 26 µs each, with this 10.
_BUFFER_BYTES = 2**18

_SHARD = re.compile(r"\.rank(\d+)-of-(\d+)\.jsonl$")


def find_files(spec: str | Sequence[str]) -> list[Path]:
    """Returns the files that ``--train-jsonl`` names, each once.

    Args:
        spec: files, folders and patterns, separated by commas or as a list.

    Raises:
        DataError: it names none, or one that is not there.

    Source: upstream ``*/finetuning/common.py``, ``resolve_jsonl_paths``.
    """
    parts = spec.split(",") if isinstance(spec, str) else spec
    found: dict[Path, Path] = {}
    for part in filter(None, (str(part).strip() for part in parts)):
        for path in _matches(part):
            found.setdefault(path.resolve(), path)
    if not found:
        raise DataError(f"data: {spec} names no .jsonl file. Expected files, folders or patterns; check the path.")
    missing = [str(path) for path in found.values() if not path.is_file()]
    if missing:
        raise DataError(f"data: {', '.join(missing)} not found. Expected a .jsonl file; check the path.")
    return list(found.values())


def _matches(part: str) -> list[Path]:
    if any(character in part for character in "*?[]"):
        return [path for path in map(Path, sorted(glob.glob(part))) if path.suffix == ".jsonl"]
    path = Path(part)
    if path.is_dir():
        return sorted(child for child in path.iterdir() if child.suffix == ".jsonl")
    return [path]


def files_of_rank(files: list[Path], processes: int, rank: int) -> tuple[list[Path], bool]:
    """Returns a process's own files, and whether they were made for it (``*.rankR-of-N.jsonl``).

    Raises:
        DataError: all files are such shards, and none is for this process.

    Source: upstream ``*/finetuning/sft.py``, ``shard_paths_for_rank``.
    """
    shards = [_SHARD.search(path.name) for path in files]
    totals = {int(shard[2]) if shard else None for shard in shards}
    if processes <= 1 or None in totals or len(totals) != 1:
        return files, False
    own = [path for path, shard in zip(files, shards) if shard and int(shard[1]) % processes == rank]
    if not own:
        raise DataError(
            f"data: none of the {len(files)} shards is for process {rank} of {processes}. Expected shards 0 to "
            f"{processes - 1} at least; run prepare_data.py again with that number, or start fewer processes."
        )
    return own, True


def missing_shards(files: list[Path]) -> str | None:
    """Says which shards of a set are not among ``files``; None where nothing is missing."""
    shards = [match for match in (_SHARD.search(path.name) for path in files) if match]
    totals = {int(shard[2]) for shard in shards}
    if len(totals) != 1:
        return None
    total = totals.pop()
    absent = sorted(set(range(total)) - {int(shard[1]) for shard in shards})
    return f"shards {', '.join(map(str, absent))} of {total} are not among the files" if absent else None


def read_lines(path: Path, advance: Callable[[int], object] | None = None) -> Iterator[tuple[int, bytes]]:
    """Yields the number and content of each line that is not blank, as Python's text mode would split them.

    Args:
        path: a file.
        advance: is told how many bytes were read.
    """
    number = 0
    with open(path, "rb", buffering=_BUFFER_BYTES) as file:
        for raw in file:
            if advance is not None:
                advance(len(raw))
            for content in _split(raw):
                number += 1
                if content:
                    yield number, content


def read_part(path: Path, start: int, stop: int) -> tuple[list[tuple[int, bytes]], int]:
    """Returns a part's lines as :func:`read_lines` yields them, counted from 1, and how many there are with blanks.

    Args:
        path: a file.
        start: where the part starts, in bytes; a line starts there.
        stop: where it ends; a line ends there.
    """
    with open(path, "rb") as file:
        file.seek(start)
        raws = io.BytesIO(file.read(stop - start))
    contents = [content for raw in raws for content in _split(raw)]
    return [(number, content) for number, content in enumerate(contents, 1) if content], len(contents)


def _split(raw: bytes) -> list[bytes]:
    """Returns the lines within what a newline ends, without what JSON takes for blank."""
    lines = [raw]
    if b"\r" in raw:  # a lone carriage return ends a line too, and JSON has none within a record
        lines = raw.replace(b"\r\n", b"\n").removesuffix(b"\n").replace(b"\r", b"\n").split(b"\n")
    return [line.strip(b" \t\r\n") for line in lines]


def parse(line: bytes) -> Any:
    """Returns what ``json.loads`` makes of the line, or :data:`BLANK` for blanks that only Unicode knows.

    Raises:
        RecordFault: it is not UTF-8, or not JSON.
    """
    if orjson is not None:
        try:
            return orjson.loads(line)
        except orjson.JSONDecodeError:
            pass  # json accepts NaN and lone surrogates, and says where the error is
    try:
        text = line.decode("utf-8")
        if not text.strip():
            return BLANK
        return json.loads(text)
    except UnicodeDecodeError as error:
        raise RecordFault("encoding", f"byte {error.start} is not UTF-8; expected a UTF-8 file") from None
    except (json.JSONDecodeError, RecursionError) as error:
        where = f"{error.msg} at column {error.colno}" if isinstance(error, json.JSONDecodeError) else "nested too deep"
        raise RecordFault("JSON", f"{where}; expected one JSON object a line") from None
