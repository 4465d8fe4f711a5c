"""Every record is read once; what cannot be trained on is found with its file and line, and nothing else is."""

from __future__ import annotations

import json
import random
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from typer.testing import CliRunner

from moss_tts_patches import cli
from moss_tts_patches.data import files as data_files
from moss_tts_patches.data.check import RecordCheck, UpperBounds, check_files, reading_bar
from moss_tts_patches.data.files import files_of_rank, find_files, missing_shards, parse, read_lines
from moss_tts_patches.data.install import DataOptions, compare_loaders, counting, load_checked
from moss_tts_patches.data.pool import examiners
from moss_tts_patches.data.report import DataReport
from moss_tts_patches.data.rules import RecordFault, RecordRules
from moss_tts_patches.errors import DataError, SeamError

SPEECH = RecordRules(layout="speech", code_limits=(8, 8, 4), template_bytes=10)
TALK = RecordRules(layout="conversation", code_limits=(8, 8, 8), template_bytes=20, loose_shape=True)
CODES = [[1, 2, 3], [4, 5, 0]]
TURN = {"role": "assistant", "text": "hi", "audio_codes": CODES}


def write(path: Path, *records: Any) -> Path:
    lines = [record if isinstance(record, str) else json.dumps(record) for record in records]
    path.write_text("\n".join(lines) + "\n", encoding="utf-8")
    return path


def check(path: Path, rules: RecordRules = SPEECH, **options: Any) -> DataReport:
    return check_files([path], rules, UpperBounds(rules), **options)


def speech(**fields: Any) -> dict[str, Any]:
    return {"id": "a", "text": "hello", "audio_codes": CODES, **fields}


def talk(*turns: Any, **fields: Any) -> dict[str, Any]:
    return {"id": "a", "conversations": list(turns), **fields}


# -- single records --------------------------------------------------------------------------------------------------

WRONG_SPEECH = {
    "missing": ({"id": "a", "text": "x"}, "missing: no audio_codes"),
    "null": (speech(audio_codes=None), "missing: no audio_codes"),
    "empty": (speech(audio_codes=[]), "shape: audio_codes is []"),
    "flat": (speech(audio_codes=[1, 2, 3]), "shape: audio_codes[0] is 1; expected a list of codes"),
    "text": (speech(audio_codes=["abc", "def"]), "shape: audio_codes[0] is 'abc'"),
    "empty frame": (speech(audio_codes=[[], []]), "shape: audio_codes[0] is []"),
    "ragged": (speech(audio_codes=[[1, 2, 3], [1, 2]]), "shape: audio_codes[1] has 2 codes, the first frame 3"),
    "float": (speech(audio_codes=[[1, 2, 3], [1, 2.0, 3]]), "type: audio_codes[1][1] is 2.0; expected an integer"),
    "true": (speech(audio_codes=[[1, True, 3]]), "type: audio_codes[0][1] is True"),
    "none": (speech(audio_codes=[[1, None, 3]]), "type: audio_codes[0][1] is None"),
    "nested": (speech(audio_codes=[[1, [2], 3]]), "type: audio_codes[0][1] is [2]"),
    "huge": (speech(audio_codes=[[1, 70000, 3]]), "range: audio_codes holds 70000"),
    "negative": (speech(audio_codes=[[1, -1, 3]]), "range: audio_codes[0][1] is -1; expected 0 to 7"),
    "pad code": (speech(audio_codes=[[1, 8, 3]]), "range: audio_codes[0][1] is 8; expected 0 to 7"),
    "smaller codebook": (speech(audio_codes=[[1, 2, 4]]), "range: audio_codes[0][2] is 4; expected 0 to 3"),
    "codebooks": (speech(audio_codes=[[1, 2]]), "codebooks: audio_codes has 2 codes a frame; the model expects 3"),
    "reference": (speech(ref_audio_codes=[[1, 2, 9]]), "range: ref_audio_codes[0][2] is 9"),
    "second reference": (speech(reference_audio_codes=[CODES, [[1, 2]]]), "codebooks: reference_audio_codes[1] has 2"),
    "null in the wrong field": (speech(ref_audio_codes=[CODES, None]), "shape: ref_audio_codes[1] is None"),
    "reference no list": (speech(ref_audio_codes="x"), "reference: ref_audio_codes is a str"),
    "reference flat": (speech(ref_audio_codes=[1, 2]), "reference: ref_audio_codes[0] is a int"),
    "path": (speech(ref_audio=[None]), "reference: ref_audio is no path"),
}
WRONG_TALK = {
    "missing": ({"id": "a"}, "missing: no conversations"),
    "empty": (talk(), "missing: no conversations"),
    "no object": (talk("x"), "shape: conversations[0] is a str"),
    "no codes": (talk({"role": "user", "text": "x"}, TURN), "missing: conversations[0] has no audio_codes"),
    "no codes in a turn that is left out": (
        talk(TURN, {"role": "user", "text": "x"}),
        "missing: conversations[1] has no audio_codes",
    ),
    "no text": (talk({"role": "user", "audio_codes": CODES}, TURN), "missing: conversations[0] has no text"),
    "no role": (talk({**TURN, "role": None}), "missing: conversations[0] has no role"),
    "raw voice": (talk(TURN, ref_wav="x.wav"), "missing: ref_wav without ref_audio_codes"),
    "voice": (talk(TURN, ref_audio_codes=[[1, 2, 8]]), "range: ref_audio_codes[0][2] is 8"),
    "user alone": (talk({**TURN, "role": "user"}), "nothing to learn: no turn of the assistant"),
    "codebooks": (talk({**TURN, "audio_codes": [[1, 2]]}), "codebooks: conversations[0].audio_codes has 2"),
    "transposed": (
        talk({**TURN, "audio_codes": [[1, 1], [9, 1], [1, 1]]}),
        "range: conversations[0].audio_codes[1][0]",
    ),
}
RIGHT_SPEECH = {
    "plain": speech(),
    "no text": {"audio_codes": CODES},
    "text says true": speech(text="true"),
    "reference": speech(ref_audio_codes=CODES),
    "one of two": speech(reference_audio_codes=[CODES, None]),
    "empty reference": speech(reference_audio_codes=[], ref_audio=""),
    "path": speech(ref_audio="a.wav"),
    "paths": speech(reference=["a.wav", None]),
}
RIGHT_TALK = {
    "plain": talk(TURN),
    "user turn at the end": talk(TURN, {"role": "user", "text": "x", "audio_codes": "not read"}),
    "transposed": talk({**TURN, "audio_codes": [[1, 1], [2, 2], [3, 3]]}),
    "more codebooks": talk({**TURN, "audio_codes": [[1, 2, 3, 99]]}),
}


@pytest.mark.parametrize(
    ("record", "rules", "expected"),
    [
        pytest.param(record, rules, expected, id=f"{rules.layout}: {name}")
        for rules, cases in ((SPEECH, WRONG_SPEECH), (TALK, WRONG_TALK))
        for name, (record, expected) in cases.items()
    ],
)
def test_a_wrong_record_is_named(tmp_path: Path, record: Any, rules: RecordRules, expected: str) -> None:
    good = speech() if rules is SPEECH else talk(TURN)
    report = check(write(tmp_path / "a.jsonl", good, record), rules)
    assert (report.records, report.kept, len(report.faults)) == (2, 1, 1)
    assert str(report.faults[0]).startswith(f"{tmp_path / 'a.jsonl'}:2 id=a {expected}")


@pytest.mark.parametrize(
    ("record", "rules"),
    [
        pytest.param(record, rules, id=f"{rules.layout}: {name}")
        for rules, cases in ((SPEECH, RIGHT_SPEECH), (TALK, RIGHT_TALK))
        for name, record in cases.items()
    ],
)
def test_a_right_record_passes(tmp_path: Path, record: Any, rules: RecordRules) -> None:
    report = check(write(tmp_path / "a.jsonl", record), rules)
    assert (report.records, report.kept, report.faults) == (1, 1, [])


def test_records_without_a_prompt_are_mentioned(tmp_path: Path) -> None:
    """Upstream takes them; with a misspelt key it would train on a whole corpus without its texts."""
    nothing = {"id": "a", "Text": "hello", "audio_codes": CODES}
    report = check(
        write(tmp_path / "a.jsonl", speech(), nothing, speech(text=" "), {**nothing, "ambient_sound": "rain"})
    )
    assert report.kept == 4 and not report.faults
    assert "note: 2 of 4 records have no text and no other field of a prompt" in "\n".join(report.summary())
    assert not check(write(tmp_path / "b.jsonl", speech())).notes
    assert not check(write(tmp_path / "c.jsonl", talk(TURN)), TALK).notes


def test_references_that_have_to_be_encoded_are_counted(tmp_path: Path) -> None:
    path = write(tmp_path / "a.jsonl", speech(reference=["a.wav", None, "b.wav"]), speech(ref_audio_codes=CODES))
    report = check(path)
    assert report.references_without_codes == 2
    assert "references_without_codes=2" in "\n".join(report.summary())


# -- lines -----------------------------------------------------------------------------------------------------------

WRONG_LINES = {
    b'{"id": "a", ': "JSON: ",
    b'[{"id": "a"}]': "JSON: a list; expected one JSON object a line",
    b"null": "JSON: a NoneType",
    b'{"text": "\xff"}': "encoding: byte 10 is not UTF-8",
    b'\xef\xbb\xbf{"text": "x"}': "JSON: Unexpected UTF-8 BOM",
    b"{} {}": "JSON: Extra data at column 4",
}


@pytest.mark.parametrize("with_orjson", [True, False])
@pytest.mark.parametrize(("line", "expected"), WRONG_LINES.items())
def test_a_wrong_line_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, with_orjson: bool, line: bytes, expected: str
) -> None:
    if not with_orjson:
        monkeypatch.setattr(data_files, "orjson", None)
    path = tmp_path / "a.jsonl"
    path.write_bytes(b"\n" + line + b"\n\xc2\xa0\n" + json.dumps(speech()).encode())
    report = check(path)
    assert (report.records, report.kept) == (2, 1)
    assert str(report.faults[0]).startswith(f"{path}:2 id=none {expected}")


def test_lines_are_numbered_and_split_as_text_mode_does(tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    content = '{"a": 1}\r\n\n{"a": "\u2028"}\r{"a": 3}\r\n \t\n{"a": 4}\r\r\n{"a": 5}'
    path.write_bytes(content.encode())
    with open(path, encoding="utf-8") as file:
        expected = [(number, json.loads(line)) for number, line in enumerate(file, 1) if line.strip()]
    assert [(number, parse(line)) for number, line in read_lines(path)] == expected
    assert len(expected) == 5


@pytest.mark.parametrize("with_orjson", [True, False])
def test_values_are_those_of_json(monkeypatch: pytest.MonkeyPatch, with_orjson: bool) -> None:
    if not with_orjson:
        monkeypatch.setattr(data_files, "orjson", None)
    text = '{"a": [1, -0, 0.1, 1e22, 9223372036854775807], "b": "\\ud83d\\ude00 \\u00e9", "c": null, "a2": NaN, "c": 1}'
    assert repr(parse(text.encode())) == repr(json.loads(text))
    assert parse(b'"\\ud800"') == json.loads('"\\ud800"')


def test_deep_nesting_is_a_fault() -> None:
    with pytest.raises(RecordFault, match="nested too deep"):
        parse(b"[" * 100_000 + b"]" * 100_000)


# -- files -----------------------------------------------------------------------------------------------------------


def test_files_are_found_once_and_in_order(tmp_path: Path) -> None:
    for name in ("b.jsonl", "a.jsonl", "c.txt"):
        write(tmp_path / name, speech())
    a, b, c = (tmp_path / name for name in ("a.jsonl", "b.jsonl", "c.txt"))
    assert find_files(str(tmp_path)) == [a, b]
    assert find_files(f"{tmp_path}/*") == [a, b]
    assert find_files(f" {b},, {tmp_path}/../{tmp_path.name}/*.jsonl") == [
        b,
        tmp_path / ".." / tmp_path.name / "a.jsonl",
    ]
    assert find_files([str(c)]) == [c]


@pytest.mark.parametrize(("spec", "expected"), [("{}/none.jsonl", "not found"), ("{}/*.json", "no .jsonl"), ("", "no")])
def test_missing_files_are_one_error(tmp_path: Path, spec: str, expected: str) -> None:
    with pytest.raises(DataError, match=expected):
        find_files(spec.format(tmp_path))


def test_shards_of_a_process() -> None:
    shards = [Path(f"x.rank{rank:05d}-of-00004.jsonl") for rank in range(4)]
    assert files_of_rank(shards, 2, 1) == ([shards[1], shards[3]], True)
    assert files_of_rank(shards, 1, 0) == (shards, False)
    assert files_of_rank([*shards, Path("y.jsonl")], 2, 1) == ([*shards, Path("y.jsonl")], False)
    with pytest.raises(DataError, match="none of the 4 shards is for process 5 of 6"):
        files_of_rank(shards, 6, 5)
    assert missing_shards(shards) is None
    assert missing_shards([shards[0], shards[2]]) == "shards 1, 3 of 4 are not among the files"


# -- report ----------------------------------------------------------------------------------------------------------


def records(count: int, seed: int = 0) -> list[dict[str, Any]]:
    rng = random.Random(seed)
    return [speech(id=f"r{i}", audio_codes=[[1, 2, 3]] * rng.randint(1, 50)) for i in range(count)]


def test_distribution(tmp_path: Path) -> None:
    report = check(write(tmp_path / "a.jsonl", *records(300)))
    ordered = sorted(report.positions)
    assert (report.quantile(0.5), report.quantile(0.95), report.quantile(1.0)) == (
        ordered[149],
        ordered[284],
        ordered[299],
    )
    assert report.longest is not None
    line = report.longest[0].line
    assert report.positions[line - 1] == max(report.positions)
    assert list(report.positions).index(max(report.positions)) == line - 1
    assert 0 < report.supervised_share < 1
    assert report.frames == sum(len(record["audio_codes"]) for record in records(300))


@pytest.mark.parametrize(("values", "share", "expected"), [([], 0.5, 0), ([7], 0.95, 7), ([1, 2], 0.5, 1)])
def test_quantiles_of_few(values: list[int], share: float, expected: int) -> None:
    report = DataReport()
    report.positions.extend(values)
    assert report.quantile(share) == expected


def test_the_fingerprint_is_of_the_content(tmp_path: Path) -> None:
    one, two = records(2)

    def fingerprint(name: str, *content: Any) -> str:
        return check(write(tmp_path / name, *content)).fingerprint

    expected = fingerprint("a.jsonl", one, two)
    assert fingerprint("b.jsonl", one, "", two) == expected
    assert fingerprint("b.jsonl", one, speech(audio_codes=[]), two) == expected
    assert fingerprint("b.jsonl", two, one) != expected
    assert fingerprint("b.jsonl", one) != expected
    write(tmp_path / "c.jsonl", one), write(tmp_path / "d.jsonl", two)
    parts = check_files([tmp_path / "c.jsonl", tmp_path / "d.jsonl"], SPEECH, UpperBounds(SPEECH))
    assert parts.fingerprint == expected


def test_only_the_first_twenty_faults_are_listed(tmp_path: Path) -> None:
    bad = [speech(id=f"b{i}", audio_codes=[[1, 2]]) for i in range(23)]
    report = check(write(tmp_path / "a.jsonl", speech(), *bad, "{"))
    listed = report.fault_list()
    assert listed.startswith("24 of 25 records are faulty (codebooks 23, JSON 1):\n")
    assert listed.count("id=b") == 20
    assert listed.endswith("and 4 more")


def test_upper_bounds_are_never_called_exact(tmp_path: Path) -> None:
    report = check(write(tmp_path / "a.jsonl", speech(text="äb" * 10, ref_audio_codes=CODES)))
    # 10 template, 30 bytes of text, 2 + 16 reference, 2 frames, 7 around them
    assert list(report.positions) == [10 + 30 + 18 + 2 + 7]
    assert "positions=at_most" in report.summary()[1]


# -- in the place of the trainer's loader ----------------------------------------------------------------------------


def upstream_loader(spec: str, world_size: int, rank: int) -> Any:
    """Reads as the trainers do; the real ones are compared in test_upstream_data.py."""
    found = find_files(spec)
    own, sharded = files_of_rank(found, world_size, rank)
    lines = [line for path in own for line in path.read_text(encoding="utf-8").split("\n") if line.strip()]
    return found, [json.loads(line) for line in lines], own, sharded


def load(path: Path, said: list[str] | None = None, processes: int = 1, rank: int = 0, **options: Any) -> Any:
    counter = UpperBounds(SPEECH)
    counter.exact = bool(options.get("max_positions"))
    return load_checked(
        upstream_loader,
        str(path),
        processes,
        rank,
        rules=SPEECH,
        counter=counter,
        options=DataOptions(**options),
        output_folder=path.parent / "out",
        say=(said if said is not None else []).append,
    )


def test_good_records_arrive_as_the_trainer_would_read_them(tmp_path: Path) -> None:
    path = write(tmp_path / "a.jsonl", *records(600), "")
    data = load(path)
    assert data.loaded == upstream_loader(str(path), 1, 0)
    assert len(data.report.positions) == 600
    assert not (tmp_path / "out").exists()


def test_faulty_records_stop_the_run(tmp_path: Path) -> None:
    path = write(tmp_path / "a.jsonl", speech(), speech(id="bad", audio_codes=[[1, 2, 9]]))
    with pytest.raises(DataError) as caught:
        load(path)
    message = str(caught.value)
    assert f"{path}:2 id=bad range: audio_codes[0][2] is 9; expected 0 to 3" in message
    assert "MOSS_LOWMEM_BAD_RECORDS=skip" in message
    assert not (tmp_path / "out").exists()


def test_faulty_and_long_records_are_left_out_and_written_down(tmp_path: Path) -> None:
    given = records(20)
    given[3]["audio_codes"] = [[1, 2]]
    given[9]["audio_codes"] = [[1, 2, 3]] * 500
    said: list[str] = []
    data = load(write(tmp_path / "a.jsonl", *given), said, bad_records="skip", max_positions=300)
    kept = [record for index, record in enumerate(given) if index not in (3, 9)]
    assert data.loaded[1] == kept
    skipped = [json.loads(line) for line in (tmp_path / "out" / "skipped_records.jsonl").read_text().splitlines()]
    assert [(entry["line"], entry["id"]) for entry in skipped] == [(4, "r3"), (10, "r9")]
    assert skipped[0]["reason"].startswith("codebooks: ")
    assert "positions; at most 300 are allowed" in skipped[1]["reason"]
    assert any("id=r9 too long" in line for line in said)
    given[3]["audio_codes"] = given[9]["audio_codes"] = CODES
    load(write(tmp_path / "a.jsonl", *given), bad_records="skip", max_positions=300)
    assert not (tmp_path / "out" / "skipped_records.jsonl").exists()


def test_too_long_alone_does_not_stop_the_run(tmp_path: Path) -> None:
    path = write(tmp_path / "a.jsonl", speech(audio_codes=[[1, 2, 3]] * 500), speech())
    assert load(path, max_positions=300).loaded[1] == [speech()]
    assert len(load(path).loaded[1]) == 2


def test_nothing_left_is_an_error(tmp_path: Path) -> None:
    path = write(tmp_path / "a.jsonl", speech(audio_codes=[]))
    with pytest.raises(DataError, match=r"none of the 1 records .* 1 faulty, 0 too long"):
        load(path, bad_records="skip")


def test_upper_bounds_leave_nothing_out(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="MAX_POSITIONS=10000 needs exact positions"):
        load_checked(
            upstream_loader,
            str(write(tmp_path / "a.jsonl", speech())),
            1,
            0,
            rules=SPEECH,
            counter=UpperBounds(SPEECH),
            options=DataOptions(max_positions=10_000),
            output_folder=tmp_path,
            say=print,
        )


def test_shards_write_a_list_each(tmp_path: Path) -> None:
    for rank in range(2):
        write(tmp_path / f"a.rank{rank:05d}-of-00002.jsonl", speech(), speech(audio_codes=[]))
    for rank in range(2):
        load(tmp_path / "*.jsonl", processes=2, rank=rank, bad_records="skip")
    names = sorted(path.name for path in (tmp_path / "out").iterdir())
    assert names == [f"skipped_records.rank{rank:05d}-of-00002.jsonl" for rank in range(2)]


def test_only_the_first_process_speaks_of_shared_files(tmp_path: Path) -> None:
    path = write(tmp_path / "a.jsonl", speech(), speech(audio_codes=[]))
    said: list[str] = []
    load(path, said, processes=2, rank=1, bad_records="skip")
    assert said == []
    assert not (tmp_path / "out").exists()
    load(path, said, processes=2, rank=0, bad_records="skip")
    assert said


def test_no_random_number_is_drawn(tmp_path: Path) -> None:
    import numpy

    path = write(tmp_path / "a.jsonl", *records(10))
    before = random.getstate(), numpy.random.get_state()[1].tolist(), torch.get_rng_state().tolist()
    load(path)
    assert (random.getstate(), numpy.random.get_state()[1].tolist(), torch.get_rng_state().tolist()) == before


def drop_last(spec: str, world_size: int, rank: int) -> Any:
    found, loaded, own, sharded = upstream_loader(spec, world_size, rank)
    return found, loaded[:-1], own, sharded


def other_order(spec: str, world_size: int, rank: int) -> Any:
    found, loaded, own, sharded = upstream_loader(spec, world_size, rank)
    return found[::-1], loaded, own, sharded


def more_arguments(spec: str, world_size: int, rank: int, cache: bool = False) -> Any:
    return upstream_loader(spec, world_size, rank)


@pytest.mark.parametrize("loader", [drop_last, other_order, more_arguments])
def test_a_loader_that_reads_otherwise_is_refused(loader: Callable[..., Any]) -> None:
    compare_loaders(upstream_loader)
    with pytest.raises(SeamError, match="load_jsonl_for_rank"):
        compare_loaders(loader)


# -- the trainer's own processor -------------------------------------------------------------------------------------


def rules_of(config: Any) -> RecordRules:
    return RecordRules(layout="speech", code_limits=(8,) * config.n_vq)


def test_a_processor_of_another_make_gives_upper_bounds() -> None:
    asked: list[Any] = []

    def build_processor(args: Any, *, need_audio_tokenizer: bool, extra: int = 3) -> Any:
        asked.append((args, need_audio_tokenizer, extra))
        return SimpleNamespace(model_config=SimpleNamespace(n_vq=5))

    arguments = SimpleNamespace(model_path="none")
    rules, counter, problem = counting({"build_processor": build_processor}, arguments, rules_of)
    assert asked == [(arguments, False, 3)]
    assert (rules.codebooks, counter.exact) == (5, False)
    assert problem is not None and "AttributeError" in problem


def test_another_number_of_codebooks_on_the_command_line_is_refused_before_the_model_loads(tmp_path: Path) -> None:
    def build_processor(model_path: str) -> Any:
        return SimpleNamespace(model_config=SimpleNamespace(n_vq=5))

    trainer = {"build_processor": build_processor}
    for given in (None, 5):
        counting(trainer, SimpleNamespace(model_path="m", n_vq=given), rules_of)
    with pytest.raises(DataError, match="--n-vq 8, but the model m has 5 codebooks"):
        counting(trainer, SimpleNamespace(model_path="m", n_vq=8), rules_of)


def test_a_processor_without_a_config_takes_the_checkpoints(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text('{"n_vq": 4}', encoding="utf-8")
    trainer = {"build_processor": lambda model_path: SimpleNamespace()}
    assert counting(trainer, SimpleNamespace(model_path=tmp_path), rules_of)[0].codebooks == 4


def test_a_processor_that_wants_something_new_is_refused() -> None:
    def build_processor(model_path: str, voices: list[str]) -> Any:
        raise AssertionError("must not be called")

    with pytest.raises(SeamError, match="it wants voices"):
        counting({"build_processor": build_processor}, SimpleNamespace(model_path="none"), rules_of)


# -- memory and bar --------------------------------------------------------------------------------------------------


def test_records_are_not_held_by_a_check(tmp_path: Path) -> None:
    path = write(tmp_path / "a.jsonl", *records(5))
    with examiners(SPEECH, keeps_records=False) as examine:
        assert list(RecordCheck(UpperBounds(SPEECH), examine).read(path)) == [{}] * 5


@pytest.mark.parametrize("terminal", [True, False])
def test_a_bar_on_a_terminal_and_after_two_seconds(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], terminal: bool
) -> None:
    path = write(tmp_path / "a.jsonl", speech())
    monkeypatch.setattr("sys.stderr.isatty", lambda: terminal, raising=False)
    with reading_bar([path]) as advance:
        advance(1)
    assert capsys.readouterr().err == ""
    monkeypatch.setattr("moss_tts_patches.data.check._SILENT_SECONDS", 0.0)
    with reading_bar([path]) as advance:
        advance(1)
    assert ("checking data" in capsys.readouterr().err) == terminal


# -- moss-lowmem check-data ------------------------------------------------------------------------------------------


def command(*arguments: str) -> Any:
    return CliRunner().invoke(cli.app, ["check-data", *arguments], env={"MOSS_TTS_REPO": None})


def local_record(**fields: Any) -> dict[str, Any]:
    return speech(audio_codes=[[1023] * 32] * 3, **fields)


def test_the_command_passes_good_files(tmp_path: Path) -> None:
    path = write(tmp_path / "a.jsonl", local_record())
    done = command(str(path), "--family", "moss_tts_local")
    assert done.exit_code == 0, done.output
    assert "no faulty record" in done.output
    assert "positions are upper bounds" in done.output


def test_the_command_lists_faults(tmp_path: Path) -> None:
    path = write(tmp_path / "a.jsonl", local_record(), speech())
    other = write(tmp_path / "b.jsonl", local_record())
    done = command(f"{path},{other}", "--family", "moss_tts_local", "--json")
    assert done.exit_code == 1
    values = json.loads(done.stdout)
    assert (values["records"], values["kept"], values["faults_by_kind"]) == (3, 2, {"codebooks": 1})
    assert values["first_faults"][0]["line"] == 2
    assert values["positions"]["exact"] is False


@pytest.mark.parametrize(
    ("mark", "expected"),
    [({"rvq": 16}, "expects 16"), ({"gpt2_config": {}, "n_vq": 12}, "expects 12"), ({"n_vq": 7}, "expects 7")],
)
def test_the_command_reads_the_model(tmp_path: Path, mark: dict[str, Any], expected: str) -> None:
    (tmp_path / "config.json").write_text(json.dumps(mark), encoding="utf-8")
    codes = [[1] * 5] * 2
    path = write(tmp_path / "a.jsonl", {**speech(audio_codes=codes), "conversations": [{**TURN, "audio_codes": codes}]})
    done = command(str(path), "--model-path", str(tmp_path))
    assert done.exit_code == 1, done.output
    assert expected in done.output


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        (["{}/a.jsonl"], "of which family"),
        (["{}/a.jsonl", "--family", "moss_tts_lokal"], "the nearest one is moss_tts_local"),
        (["{}/none.jsonl", "--family", "moss_tts_local"], "not found"),
        (["{}/a.jsonl", "--model-path", "{}"], "cannot be read as a model's config"),
    ],
)
def test_the_command_refuses_what_it_cannot_check(tmp_path: Path, arguments: list[str], expected: str) -> None:
    write(tmp_path / "a.jsonl", local_record())
    done = command(*(argument.format(tmp_path) for argument in arguments))
    assert done.exit_code == 2
    assert expected in done.stderr
    assert done.stdout == ""


def test_an_empty_file_is_no_success(tmp_path: Path) -> None:
    assert command(str(write(tmp_path / "a.jsonl", "")), "--family", "moss_tts_local").exit_code == 1
