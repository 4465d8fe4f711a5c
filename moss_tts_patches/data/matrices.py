"""Audio codes straight from a line's bytes, without a Python object for each.

Codes are 99 % of a record. ``json`` makes an integer object of each one, orjson too; to look at 9,600 of them takes
longer than anything else a check does. Here the bytes that are codes are cut out of the line, proved to be a rectangle
of integers by operations on whole arrays, and the small rest is parsed. What cannot be proved stays where it was, for
the JSON parser.
"""

from __future__ import annotations

import bisect
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np

#: Stands for a matrix in the rest of its line: a number no record has any use for. Lines that have it are left whole.
_MARK = b"-90071992547409"
_FIRST = int(_MARK + b"0000")
_CODE_FIELDS = "audio_codes"  # the end of the name of every field that the trainers take codes from

_ZERO, _COMMA, _SPACE, _OPEN, _CLOSE = (np.uint8(ord(character)) for character in "0, []")
_LARGEST = 9999  # four digits

# One object for each number. A record of 300 frames of 32 codes takes 97 KB with them and 298 KB with objects of its
# own, as every JSON parser makes them (by tracemalloc).
_INTEGERS = np.arange(_LARGEST + 1).astype(object)


class CodeMatrix:
    """A rectangle of integers from 0 to 9999 that stood in a line.

    Attributes:
        values: ``[rows, columns]`` int16.
    """

    __slots__ = ("values",)

    def __init__(self, values: np.ndarray) -> None:
        self.values = values

    def lists(self) -> list[list[int]]:
        """Returns what JSON makes of it."""
        return _INTEGERS[self.values].tolist()


class Cut(NamedTuple):
    """A line without its matrices.

    Attributes:
        rest: the line, with a number in the place of each matrix.
        rows: the rows of each, as they stood there: ``[1, 2], [3, 4]``.
    """

    rest: bytes
    rows: list[bytes]


def cut(line: bytes) -> Cut:
    """Takes out of a line what looks like matrices of integers, in strings too; :func:`put_back` notices those."""
    closes = np.frombuffer(line, np.uint8) == _CLOSE
    ends = np.flatnonzero(closes[:-1] & closes[1:]).tolist()  # the first bracket of ]]
    pieces: list[bytes] = []
    rows: list[bytes] = []
    done = 0
    start = line.find(b"[[")
    while start >= 0:
        while line[start + 2 : start + 3] == b"[":
            start += 1
        index = bisect.bisect(ends, start)
        if index == len(ends):
            break
        end = ends[index] + 1
        found = line[start + 1 : end]
        if found[1:2].isdigit() and b"." not in found and b"-" not in found:
            pieces += [line[done:start], b" %s%04d " % (_MARK, len(rows))]
            rows.append(found)
            done = end + 1
            start = line.find(b"[[", done)
        else:
            start = line.find(b"[[", start + 2)
    if not rows or len(rows) > _LARGEST or any(_MARK in piece for piece in pieces[::2]) or _MARK in line[done:]:
        return Cut(line, [])
    return Cut(b"".join([*pieces, line[done:]]), rows)


def put_back(record: Any, matrices: Sequence[CodeMatrix]) -> list[tuple[Any, Any]] | None:
    """Puts matrices in their places in what the rest of a line was parsed to; lists, where none of codes belongs.

    Returns:
        Where matrices stand now, as a container and its key or index; None if one of them had no place of its own (it
        was in a string, or in a field that comes twice), and the record must not be used.
    """
    places: list[tuple[Any, Any]] = []
    left = dict(enumerate(matrices))
    containers: list[tuple[Any, str]] = [(record, "")]
    while containers:
        container, name = containers.pop()
        for key, value in container.items() if isinstance(container, dict) else enumerate(container):
            own_name = key if isinstance(key, str) else name
            if isinstance(value, (dict, list)):
                containers.append((value, own_name))
            elif type(value) is int and value <= _FIRST and (matrix := left.pop(_FIRST - value, None)) is not None:
                if own_name.endswith(_CODE_FIELDS):
                    container[key] = matrix
                    places.append((container, key))
                else:
                    container[key] = matrix.lists()
    return None if left else places


def decode(rows: Sequence[bytes]) -> list[CodeMatrix | None]:
    """Returns what each text of rows holds; None where it is not surely a rectangle of integers from 0 to 9999.

    They are read as one text, which they nearly always can be: for 100 frames of 12 codes that is four times as fast.
    """
    if not rows:
        return []
    separator = b", " if b" " in rows[0][:8] else b","  # the first one is within 8 bytes
    read = _decode(separator.join(rows))
    if read is None:
        return [None] if len(rows) == 1 else [one for text in rows for one in decode([text])]
    values, closing = read
    lengths = np.fromiter((len(text) + len(separator) for text in rows), np.int64, len(rows))
    borders = np.searchsorted(closing, np.cumsum(lengths)).tolist()
    return [CodeMatrix(values[start:end]) for start, end in zip([0, *borders], borders)]


def _decode(text: bytes) -> tuple[np.ndarray, np.ndarray] | None:
    """Reads ``[1, 2], [3, 4]`` or ``[1,2],[3,4]``.

    The proof that the text has this form and no other: (1) it has digits, brackets, commas and perhaps spaces only;
    (2) all spaces follow commas and all commas are followed by one, or there is no space; (3) brackets open and close
    in turn, from the first byte to the last, with one separator between; (4) numbers (runs of digits) can be laid out
    in as many rows of the same length as there are brackets, each row's last number right before its bracket; (5) there
    is one comma less than numbers. Between two numbers of a row there is at least one separator, by (5) then exactly
    one and none elsewhere. (6) The digits are as many as the numbers read need: no zero in front, no fifth digit.

    Returns:
        Values ``[rows, columns]`` int16 and the offsets of the closing brackets ``[rows]``, or None.
    """
    content = np.frombuffer(text, np.uint8)
    digits = content - _ZERO
    is_digit = digits < 10
    is_comma = content == _COMMA
    commas, digit_count = np.count_nonzero(is_comma), np.count_nonzero(is_digit)
    brackets = np.flatnonzero(content >= _OPEN)  # letters too
    opening, closing = brackets[0::2], brackets[1::2]
    spaces = content.size - commas - digit_count - brackets.size  # if it has nothing else
    if not brackets.size or opening.size != closing.size or spaces not in (0, commas):
        return None
    gap = 3 if spaces else 2
    if (
        (spaces and not np.array_equal(is_comma[:-1], content[1:] == _SPACE))
        or opening[0] != 0
        or closing[-1] != content.size - 1
        or (content[opening] != _OPEN).any()
        or (content[closing] != _CLOSE).any()
        or (opening[1:] - closing[:-1] != gap).any()
        or not is_comma[closing[:-1] + 1].all()
    ):
        return None
    last_digits = np.flatnonzero(is_digit[:-1] > is_digit[1:])
    columns, left = divmod(last_digits.size, closing.size)
    if left or not columns or commas != last_digits.size - 1:
        return None
    if (last_digits[columns - 1 :: columns] + 1 != closing).any():
        return None
    values = _numbers(digits, is_digit, last_digits)
    needed = values.size + sum(np.count_nonzero(values >= power) for power in (10, 100, 1000))
    return (values.reshape(-1, columns), closing) if needed == digit_count else None


def _numbers(digits: np.ndarray, is_digit: np.ndarray, last_digits: np.ndarray) -> np.ndarray:
    """Returns the numbers' last four digits as values.

    Args:
        digits: ``[bytes]`` uint8, a digit's value where there is one.
        is_digit: ``[bytes]`` bool; the first byte is none.
        last_digits: ``[numbers]`` int64, where each number ends.
    """
    pairs = digits * is_digit  # two digits that end at a byte; uint8 holds 99
    pairs[1:] += pairs[:-1] * np.uint8(10)
    pairs *= is_digit
    hundreds = pairs[:-1] * is_digit[1:]  # only where the number goes on
    values = np.multiply(hundreds[last_digits - 2], 100, dtype=np.int16)
    values += pairs[last_digits]
    return values
