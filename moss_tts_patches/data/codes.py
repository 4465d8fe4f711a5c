"""Audio codes as they stand in a record: rectangular, integer, in range; passes in C over all of them."""

from __future__ import annotations

from array import array
from typing import Any

import numpy as np

from .matrices import CodeMatrix
from .rules import RecordFault, RecordRules


def check_codes(value: Any, field: str, rules: RecordRules, may_hold_booleans: bool) -> int:
    """Checks one audio and returns its number of frames.

    Args:
        value: what JSON made of ``[frames, codebooks]``, or a matrix that was read apart.
        field: for the message.
        rules: the family's.
        may_hold_booleans: the line has a ``true`` or ``false`` somewhere, which C would take for 1 and 0.

    Raises:
        RecordFault: it is no rectangle, or has other numbers than codes, or another number of codebooks.
    """
    if isinstance(value, CodeMatrix):
        return _check_matrix(value, field, rules)
    rows, columns = _shape(value, field)
    # 16 bits hold every codebook there is; 140 µs for 300 frames of 32 codes, half of what max() and min() take.
    flat = array("h")
    try:
        for row in value:
            flat.fromlist(row)
    except (TypeError, OverflowError):
        raise _first_wrong(value, field, rules) from None
    if may_hold_booleans and any(isinstance(code, bool) for row in value for code in row):
        raise _first_wrong(value, field, rules)
    frames = _frames(rows, columns, field, rules)
    codes = np.frombuffer(flat, np.int16)
    if codes.min() < 0 or codes.max() >= min(rules.code_limits):
        _check_each(value, field, rules, transposed=frames != rows)
    return frames


def _check_matrix(matrix: CodeMatrix, field: str, rules: RecordRules) -> int:
    """Checks what is known to be a rectangle of integers that are not negative."""
    rows, columns = matrix.values.shape
    frames = _frames(rows, columns, field, rules)
    if matrix.values.max() >= min(rules.code_limits):
        _check_each(matrix.lists(), field, rules, transposed=frames != rows)
    return frames


def _shape(value: Any, field: str) -> tuple[int, int]:
    try:
        lengths = set(map(len, value))
    except TypeError:
        lengths = set()
    if isinstance(value, list) and len(lengths) == 1 and 0 not in lengths:
        return len(value), lengths.pop()
    raise _wrong_shape(value, field)


def _wrong_shape(value: Any, field: str) -> RecordFault:
    if not isinstance(value, list) or not value:
        return RecordFault("shape", f"{field} is {_shown(value)}; expected a list of frames, each a list of codes")
    for index, row in enumerate(value):
        if not isinstance(row, list) or not row:
            break
        if len(row) != len(value[0]):
            problem = f"{field}[{index}] has {len(row)} codes, the first frame {len(value[0])}; expected a rectangle"
            return RecordFault("shape", problem)
    return RecordFault("shape", f"{field}[{index}] is {_shown(row)}; expected a list of codes")


def _frames(rows: int, columns: int, field: str, rules: RecordRules) -> int:
    """Returns which of the two numbers counts frames.

    Source: upstream ``moss_tts_realtime/finetuning/dataset.py``, ``_normalize_audio_codes`` for the loose shape.
    """
    codebooks = rules.codebooks
    if rules.loose_shape and rows == codebooks and columns != codebooks:
        return columns
    if columns == codebooks or (rules.loose_shape and columns > codebooks):
        return rows
    raise RecordFault("codebooks", f"{field} has {columns} codes a frame; the model expects {codebooks}")


def _check_each(value: list[list[int]], field: str, rules: RecordRules, transposed: bool) -> None:
    """Compares every code with its own codebook's limit; reached only where one is beyond the smallest limit."""
    for row_index, row in enumerate(value):
        for column_index, code in enumerate(row):
            codebook = row_index if transposed else column_index
            if codebook < rules.codebooks and not 0 <= code < rules.code_limits[codebook]:
                raise RecordFault(
                    "range",
                    f"{field}[{row_index}][{column_index}] is {code}; expected 0 to {rules.code_limits[codebook] - 1}",
                )


def _first_wrong(value: list[list[Any]], field: str, rules: RecordRules) -> RecordFault:
    for row_index, row in enumerate(value):
        if not isinstance(row, list):
            return _wrong_shape(value, field)
        for column_index, code in enumerate(row):
            if isinstance(code, bool) or not isinstance(code, int):
                return RecordFault(
                    "type", f"{field}[{row_index}][{column_index}] is {_shown(code)}; expected an integer"
                )
    furthest = max((code for row in value for code in row), key=abs)  # beyond 16 bits
    return RecordFault("range", f"{field} holds {furthest}; expected 0 to {max(rules.code_limits) - 1}")


def _shown(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 40 else f"{text[:37]}..."
