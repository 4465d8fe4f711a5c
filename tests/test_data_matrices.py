"""Codes read from a line's bytes are those of JSON, and a line that is unusual in any way is read as JSON alone."""

from __future__ import annotations

import hashlib
import json
import random
from typing import Any

import numpy as np
import pytest
from test_data_check import CODES, SPEECH, TALK, TURN, speech, talk

from moss_tts_patches.data.files import parse
from moss_tts_patches.data.lines import Examined, examine_lines
from moss_tts_patches.data.matrices import CodeMatrix, cut, decode, put_back
from moss_tts_patches.data.rules import RecordRules

SEPARATORS = [None, (",", ":")]


def codes(frames: int, columns: int, rng: random.Random, limit: int = 1024) -> list[list[int]]:
    return [[rng.randrange(limit) for _ in range(columns)] for _ in range(frames)]


def rows_of(value: Any, separators: Any = None) -> bytes:
    return json.dumps(value, separators=separators).encode()[1:-1]


# -- the proof -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("separators", SEPARATORS)
@pytest.mark.parametrize("limit", [1, 10, 11, 100, 1024, 10_000])
@pytest.mark.parametrize(("frames", "columns"), [(1, 1), (1, 5), (7, 1), (40, 3)])
def test_values_are_those_of_json(separators: Any, limit: int, frames: int, columns: int) -> None:
    rng = random.Random(frames * limit)
    several = [codes(frames + extra, columns, rng, limit) for extra in range(3)]
    found = decode([rows_of(value, separators) for value in several])
    assert [one and one.lists() for one in found] == several
    assert all(type(code) is int for one in found if one for row in one.lists() for code in row)


NOT_SURE = [
    b"[01, 2]",
    b"[00]",
    b"[10000]",
    b"[100000000000, 2]",
    b"[1, 2], [3]",
    b"[1], [2, 3]",
    b"[1, 2, 3], [4], [5, 6]",
    b"[1,2, 3]",
    b"[1 , 2]",
    b"[1,  2]",
    b"[1, 2,]",
    b"[, 1]",
    b"[1,, 2]",
    b"[1 2]",
    b"[1, 2] , [3, 4]",
    b"[1, 2],[3, 4]",
    b"[1, 2]  [3, 4]",
    b"[1, 2], [3, 4], ",
    b"[1, 2]]",
    b"[[1, 2]",
    b"]1, 2[",
    b"[]",
    b"[], []",
    b"[1], []",
    b"[1, a]",
    b"[1, 2}",
    b"[1, 2], {3, 4]",
    b"[1, -2]",
    b"[1, 2.0]",
    b"[1, 2e1]",
    b"[1, \t2]",
    b"[1,5 2, 3]",
    b"[1, 2]5, [3, 4]",
    b"[1, 2], 5[3, 4]",
    b"[1, 2]], [[3, 4]",
    b"",
    b"5",
    "[1, ٣]".encode(),
]


@pytest.mark.parametrize("rows", NOT_SURE)
def test_what_is_not_surely_a_matrix_is_none(rows: bytes) -> None:
    assert decode([rows]) == [None]
    between = decode([b"[7, 8]", rows, b"[9, 9]"])
    assert between[1] is None
    assert [one and one.lists() for one in (between[0], between[2])] == [[[7, 8]], [[9, 9]]]


def test_no_changed_byte_is_read_as_something_else() -> None:
    """Every value that the bytes are proved to be is what JSON makes of them, whatever has happened to a byte."""
    rng = random.Random(3)
    alphabet = b"0123456789[], .-\n"
    proved = 0
    for separators in SEPARATORS:
        for _ in range(4000):
            text = bytearray(rows_of(codes(rng.randint(1, 4), rng.randint(1, 4), rng), separators))
            for _ in range(rng.randint(1, 2)):
                place = rng.randrange(len(text))
                change = rng.randrange(3)
                text[place : place + (change != 1)] = bytes([rng.choice(alphabet)]) if change < 2 else b""
            (found,) = decode([bytes(text)])
            if found is not None:
                proved += 1
                assert found.lists() == json.loads(b"[" + bytes(text) + b"]"), bytes(text)
    assert 1000 < proved < 7000


def test_integers_are_shared() -> None:
    (found,) = decode([b"[1000, 1000], [1000, 999]"])
    lists = found.lists() if found else []
    assert lists[0][0] is lists[0][1] is lists[1][0]


# -- lines -----------------------------------------------------------------------------------------------------------

RIGHT_LINES = {
    "plain": speech(),
    "reference": speech(ref_audio_codes=CODES),
    "references": speech(reference_audio_codes=[CODES, None, [[7, 7, 3]]]),
    "matrix in a text": speech(text="see [[1, 2, 3]] there"),
    "open in a text": speech(text="[[1"),
    "close in a text": speech(text="x]]", other=[[1, 2], [3, 4]]),
    "a prompt field that is a matrix": speech(tokens=[[1, 2]]),
    "nested elsewhere": speech(meta={"spans": [[1, 2], [3, 4]], "deep": [[[5]], [[6]]], "f": [[0.5, 1], [-1, 2]]}),
    "the mark": speech(other=-900719925474090000),
    "the mark in a text": speech(text=" -900719925474090000 "),
    "escapes": speech(text='quote " and [[1]] and \\ end'),
    "true in a text": speech(text="true"),
    "flag": speech(flag=True),
    "column": {**speech(), "id": [[1, 2]]},
}
TALK_LINES = {
    "turns": talk(TURN, {"role": "user", "text": "[[1]]", "audio_codes": CODES}, TURN, ref_audio_codes=CODES),
    "transposed": talk({**TURN, "audio_codes": [[1, 1], [2, 2], [3, 3]]}),
}


def examined(line: bytes, rules: RecordRules) -> Examined:
    (found,) = examine_lines([(1, line)], rules)
    return found


@pytest.mark.parametrize("separators", SEPARATORS)
@pytest.mark.parametrize(
    ("record", "rules"),
    [
        pytest.param(record, rules, id=name)
        for rules, cases in ((SPEECH, RIGHT_LINES), (TALK, TALK_LINES))
        for name, record in cases.items()
    ],
)
def test_a_line_gives_the_record_of_json(
    monkeypatch: pytest.MonkeyPatch, record: Any, rules: RecordRules, separators: Any
) -> None:
    line = json.dumps(record, separators=separators).encode()
    found = examined(line, rules)
    assert found.fault is None
    assert found.digest == hashlib.sha256(line).digest()
    audio = found.audio
    assert repr(found.whole_record()) == repr(json.loads(line))
    monkeypatch.setattr("moss_tts_patches.data.lines.cut", lambda line: cut(b"{}"))
    assert examined(line, rules).audio == audio


def test_most_lines_are_read_fast() -> None:
    """Control for the tests above: their records do go the short way, but for those made to leave it."""
    left = {name for name, record in RIGHT_LINES.items() if not examined(json.dumps(record).encode(), SPEECH).places}
    assert left == {"matrix in a text", "open in a text", "the mark", "the mark in a text", "escapes"}


@pytest.mark.parametrize(
    "line",
    [
        b'{"audio_codes": [[1, 2, 3]], "audio_codes": [[4, 5, 0]]}',
        b'{"audio_codes": [[1, 2, 3]], "audio_codes": null}',
        b'{"audio_codes": [[1, 2, 3]]5}',
        b'{"audio_codes": 5[[1, 2, 3]]}',
        b'{[[1, 2, 3]]: 1, "audio_codes": [[1, 2, 3]]}',
        b'{"audio_codes": [[1, 2, 3]]',
        b"[[1, 2, 3]]",
        b'{"id": "x", "audio_codes": [[[[1, 2, 3]]]]}',
        b'{"id": "x", "reference_audio_codes": [[[[1]]]], "audio_codes": [[1, 2, 3]]}',
        b'{"text": "\xff", "audio_codes": [[1, 2, 3]]}',
        b'{"id": [[1, 2, 3]], "audio_codes": [[1, 2, 9]]}',
    ],
)
def test_odd_lines_are_as_json_alone_has_them(monkeypatch: pytest.MonkeyPatch, line: bytes) -> None:
    fast = examined(line, SPEECH)
    fast_record = fast.whole_record()
    monkeypatch.setattr("moss_tts_patches.data.lines.cut", lambda line: cut(b"{}"))
    plain = examined(line, SPEECH)
    assert (fast.fault, fast.identity, fast.audio, fast_record) == (
        plain.fault,
        plain.identity,
        plain.audio,
        plain.whole_record(),
    )


def test_a_matrix_without_a_place_is_noticed() -> None:
    one = CodeMatrix(np.ones((1, 2), np.int16))
    rest, rows = cut(b'{"audio_codes": [[1, 2]], "x": 1}')
    assert rows == [b"[1, 2]"]
    assert put_back(parse(rest), [one]) is not None
    assert put_back(parse(rest), [one, one]) is None
    assert put_back({"x": 1}, [one]) is None
