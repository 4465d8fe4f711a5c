"""Several processes find in big files what one finds; and how long readers wait without a sign."""

from __future__ import annotations

import io
import os
import random
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from test_data_check import SPEECH, speech, write

from moss_tts_patches.cores import cores
from moss_tts_patches.data import pool as data_pool
from moss_tts_patches.data.check import RecordCheck, UpperBounds, check_files, reading_bar
from moss_tts_patches.data.pool import examiners, workers_for
from moss_tts_patches.data.tokens import token_ids
from moss_tts_patches.data.worker import receive, send
from moss_tts_patches.errors import DataError


@pytest.fixture(scope="module")
def mixed(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    """Two files with all sorts of lines, blank ones and faults among them."""
    rng, folder = random.Random(5), tmp_path_factory.mktemp("pool")
    paths = []
    for name in ("a", "b"):
        lines: list[Any] = []
        for number in range(400):
            rows = [[rng.randrange(4) for _ in range(3)] for _ in range(rng.randint(1, 30))]
            record = speech(id=f"{name}{number}", audio_codes=rows)
            kind = rng.randrange(12)
            if kind == 0:
                record["audio_codes"][0][0] = 9
            lines.append({1: "", 2: "{"}.get(kind, record))
        paths.append(write(folder / f"{name}.jsonl", *lines))
    with open(paths[1], "ab") as file:
        file.write(b'{"id": "torn\r{"audio_codes": [[1, 2, 3]]}\r\r\n \n{"audio_codes": [[1, 2, 3]]}')
    return paths


@pytest.fixture(autouse=True)
def small_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(data_pool, "_PIECE_BYTES", 1500)


def account(paths: list[Path], workers: int) -> tuple[Any, ...]:
    advanced: list[int] = []
    with examiners(SPEECH, keeps_records=True, workers=workers) as examine:
        check = RecordCheck(UpperBounds(SPEECH), examine, max_positions=45)
        records = [record for path in paths for record in check.read(path, advanced.append)]
    report = check.finish()
    return records, list(report.positions), report.faults, report.too_long, report.as_values(), sum(advanced)


def test_several_processes_find_what_one_finds(mixed: list[Path]) -> None:
    alone = account(mixed, 1)
    assert account(mixed, 3) == alone
    records, positions, faults, too_long, values, advanced = alone
    assert advanced == sum(path.stat().st_size for path in mixed)
    assert len(faults) > 40 and len(too_long) > 20 and len(records) == len(positions) > 400
    assert values["faults_by_kind"].keys() == {"range", "JSON"}
    places = [(fault.place.file, fault.place.line) for fault in faults]
    assert places == sorted(places)
    assert [fault.place.line for fault in faults if fault.id == "none"][-1] == 401
    assert check_files(mixed, SPEECH, UpperBounds(SPEECH), 45).as_values() == values


def test_a_process_that_dies_loses_nothing(mixed: list[Path], monkeypatch: pytest.MonkeyPatch) -> None:
    """As one does that the kernel kills for the memory it took: the work goes on in this one."""
    asked: list[Any] = []
    whole = data_pool.run
    monkeypatch.setattr(data_pool, "run", lambda task: asked.append(task) or whole(task))
    monkeypatch.setattr(data_pool, "_START", "import sys; sys.stdin.buffer.read(100)")
    assert account(mixed, 2) == account(mixed, 1)
    assert len(asked) > 10


def test_no_process_is_left(mixed: list[Path], monkeypatch: pytest.MonkeyPatch) -> None:
    with examiners(SPEECH, keeps_records=False, workers=2) as examine:
        next(examine(mixed[0], None))
        processes = [worker._process for worker in examine.func.__self__._workers]  # type: ignore[attr-defined]
        assert all(process.poll() is None for process in processes)
    assert all(process.returncode is not None for process in processes)


@pytest.mark.parametrize("workers", [1, 2])
def test_a_file_that_is_gone_is_one_error(tmp_path: Path, workers: int) -> None:
    with (
        examiners(SPEECH, keeps_records=False, workers=workers) as examine,
        pytest.raises(DataError, match=r"none\.jsonl cannot be read"),
    ):
        list(RecordCheck(UpperBounds(SPEECH), examine).read(tmp_path / "none.jsonl"))


def test_workers_need_neither_torch_nor_the_layer() -> None:
    code = (
        "import sys; import moss_tts_patches.data.worker; print({'torch', 'transformers', 'pydantic'} & {*sys.modules})"
    )
    done = subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True)
    assert done.stdout.strip() == "set()"


def test_small_files_stay_in_this_process(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "a.jsonl"
    with open(path, "wb") as file:
        file.truncate(data_pool._SMALL_BYTES - 1)
    for count, expected in ((1, 1), (6, 6), (64, data_pool._MOST_WORKERS)):
        monkeypatch.setattr(data_pool, "cores", lambda count=count: count)
        assert workers_for([path]) == 1
        assert workers_for([path, path]) == expected
    assert workers_for([path, path], processes=16) == 4
    assert workers_for([path, path], processes=100) == 1
    assert workers_for([path, tmp_path / "none.jsonl"]) == 1


@pytest.mark.skipif(not hasattr(os, "sched_getaffinity"), reason="cores can be taken from a process on Linux only")
def test_only_the_cores_of_this_process_count() -> None:
    assert cores() == len(os.sched_getaffinity(0))


def test_a_pipe_that_ends_is_noticed() -> None:
    stream = io.BytesIO()
    send(stream, {"a": [1]})
    content = stream.getvalue()
    assert receive(io.BytesIO(content)) == {"a": [1]}
    for length in (0, 4, 8, len(content) - 1):
        with pytest.raises(EOFError):
            receive(io.BytesIO(content[:length]))


# -- tokens ----------------------------------------------------------------------------------------------------------


class Letters:
    """A tokenizer: one token a letter, and one in front unless told otherwise; ``native`` is its other way."""

    def __init__(self, native: Any = None) -> None:
        self.asked = 0
        if native is not None:
            self.backend_tokenizer = SimpleNamespace(encode_batch_fast=native)

    def __call__(self, texts: list[str], add_special_tokens: bool = True, return_attention_mask: bool = True) -> Any:
        self.asked += len(texts)
        return {"input_ids": [[0] * add_special_tokens + [ord(letter) for letter in text] for text in texts]}


def native(texts: list[str], add_special_tokens: bool) -> list[Any]:
    return [SimpleNamespace(ids=ids) for ids in Letters()(texts, add_special_tokens)["input_ids"]]


def other(texts: list[str], add_special_tokens: bool) -> list[Any]:
    return [SimpleNamespace(ids=[1, 2]) for _ in texts]


@pytest.mark.parametrize("special", [True, False])
@pytest.mark.parametrize(("way", "asked"), [(None, 3), (native, 1), (other, 4)])
def test_tokens_are_the_tokenizers(way: Any, asked: int, special: bool) -> None:
    tokenizer = Letters(way)
    texts = ["ab", "", "c"]
    assert token_ids(tokenizer, texts, add_special_tokens=special) == native_ids(texts, special)
    assert tokenizer.asked == asked
    assert token_ids(tokenizer, []) == []


def native_ids(texts: list[str], special: bool) -> list[list[int]]:
    return Letters()(texts, special)["input_ids"]


# -- the bar ---------------------------------------------------------------------------------------------------------


def test_the_bar_comes_after_two_seconds(
    mixed: list[Path], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """By a clock that this test turns: nothing on standard error before two seconds, a share of the bytes after."""
    now = [time.time()]
    monkeypatch.setattr("tqdm.std.time", lambda: now[0])
    monkeypatch.setattr("sys.stderr.isatty", lambda: True, raising=False)
    total = mixed[0].stat().st_size
    with reading_bar(mixed[:1]) as advance:
        now[0] += 1.9
        advance(total // 4)
        assert capsys.readouterr().err == ""
        now[0] += 0.2
        advance(total // 4)
        shown = capsys.readouterr()
    assert "checking data" in shown.err and " 50%" in shown.err
    assert shown.out == ""
