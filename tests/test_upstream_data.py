"""Positions, faults and files as the real upstream's own data sets, collators and loaders have them."""

from __future__ import annotations

import importlib
import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any, NamedTuple

import pytest
import torch
from typer.testing import CliRunner
from upstream_v15 import active, import_trainer

from moss_tts_patches import cli
from moss_tts_patches.data.check import UpperBounds, check_files
from moss_tts_patches.data.files import files_of_rank, find_files
from moss_tts_patches.data.install import DataOptions, compare_loaders, counting, load_checked
from moss_tts_patches.errors import DataError, SeamError
from moss_tts_patches.families import recognise_family
from moss_tts_patches.loss.problem import IGNORE_INDEX

pytestmark = pytest.mark.upstream

FAMILIES = ("moss_tts_local", "moss_tts_delay", "moss_tts_local_v1.5", "moss_tts_realtime")
TALKS = "moss_tts_realtime"

# The pre-tokenizer of Qwen tokenizers: unlike GPT-2's it lets a line break end a run of punctuation, so that tokens
# reach across the seams of a prompt.
_QWEN_SPLIT = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
# One process for all: importing torch and transformers is most of what a checkpoint takes.
_MAKE_ALL = """
import sys, make_tiny
upstream, *wanted = sys.argv[1:]
for one in wanted:
    for name in [name for name in sys.modules if name.startswith("_tiny_src")]:
        del sys.modules[name]
    sys.argv = ["make_tiny.py", upstream, *one.split("=", 1)]
    make_tiny.main()
"""
_LINE_BREAK = "Ċ"  # as byte-level tokenizers write it


class Upstream(NamedTuple):
    """A family's trainer, the command line it would get, and what it makes of records."""

    family: str
    trainer: ModuleType
    arguments: Any
    processor: Any
    folder: Path

    def dataset(self, records: list[dict[str, Any]]) -> Any:
        name = next(name for name in vars(self.trainer) if name.endswith("SFTDataset"))
        return getattr(self.trainer, name)(records=records, processor=self.processor, n_vq=None)

    def real_sizes(self, records: list[dict[str, Any]]) -> list[tuple[int, int]]:
        """Positions and supervised positions of each record in a batch of its own."""
        dataset = self.dataset(records)
        batches = [dataset.collate_fn([dataset[index]]) for index in range(len(dataset))]
        return [
            (batch["input_ids"].shape[1], int((batch["labels"] != IGNORE_INDEX).any(dim=-1).sum())) for batch in batches
        ]

    def counting(self) -> Any:
        rules, counter, problem = counting(
            vars(self.trainer), self.arguments, recognise_family(vars(self.trainer)).record_rules
        )
        assert problem is None
        return rules, counter

    def codes(self, frames: int, seed: int = 0) -> list[list[int]]:
        codebooks = 16 if self.family == TALKS else 4
        generator = torch.Generator().manual_seed(seed)
        return torch.randint(0, 32, (frames, codebooks), generator=generator).tolist()

    def shapes(self) -> list[dict[str, Any]]:
        """Records of every shape that the data set understands."""
        return conversations(self) if self.family == TALKS else speeches(self)

    def record(self, text: str) -> dict[str, Any]:
        """A plain record of that text."""
        if self.family == TALKS:
            return {"conversations": [{"role": "assistant", "text": text, "audio_codes": self.codes(40)}]}
        return {"text": text, "audio_codes": self.codes(5)}


def speeches(upstream: Upstream) -> list[dict[str, Any]]:
    codes = upstream.codes
    texts = [
        "One.",
        "",
        " leads and trails \n",
        "\n\nbreaks",
        "多行\n\n文本。",
        "a->b -- c!!!",
        "...",
        "x" * 200,
        "e.g. 7:45?",
    ]
    return [
        *({"text": text, "audio_codes": codes(3 + index)} for index, text in enumerate(texts)),
        {"audio_codes": codes(1)},
        {"text": "Hi.", "audio_codes": codes(4), "ref_audio_codes": codes(6)},
        {"text": "Hi.", "audio_codes": codes(4), "reference_audio_codes": [codes(6), codes(2)], "tokens": 50},
        {"text": "Hi.", "audio_codes": codes(4), "reference_audio_codes": [None, codes(2)], "language": "en"},
        {"text": "Hi.", "audio_codes": codes(4), "reference_audio_codes": [None, None]},
        {"text": "Hi.", "audio_codes": codes(4), "reference_audio_codes": [], "ref_audio": ""},
        {"text": "Hi.", "audio_codes": codes(4), "instruction": "Slow.\n", "quality": "", "sound_event": " rain "},
        {"text": "Hi.", "audio_codes": codes(4), "ambient_sound": "wind:", "ref_audio_codes": [codes(2), codes(3)]},
    ]


def conversations(upstream: Upstream) -> list[dict[str, Any]]:
    codes = upstream.codes

    def turn(role: str, text: str, frames: int, seed: int = 0) -> dict[str, Any]:
        return {"role": role, "text": text, "audio_codes": codes(frames, seed)}

    texts = [
        "Hi.",
        "",
        "\n\nbreaks",
        " x",
        "A text of more than twelve tokens, that is sure.",
        "y" * 90,
        "多行文本。" * 9,
    ]
    return [
        *({"conversations": [turn("assistant", text, 5 + 9 * index)]} for index, text in enumerate(texts)),
        {"conversations": [turn("assistant", "z" * 60, 2)]},
        {"conversations": [turn("user", "Why?", 7), turn("assistant", "Well.\n", 9), turn("user", "Oh!", 3)]},
        {"conversations": [turn("assistant", "One.", 7), turn("user", "q" * 40, 9), turn("assistant", "Two.", 30)]},
        {"conversations": [turn("assistant", "One.", 7)], "ref_audio_codes": codes(5)},
        {"conversations": [turn("assistant", "One.", 7)], "ref_audio_codes": codes(16)},
        {"conversations": [{**turn("assistant", "One.", 7), "audio_codes": torch.tensor(codes(20)).T.tolist()}]},
        {"conversations": [{**turn("assistant", "One.", 7), "audio_codes": [[*row, 1] for row in codes(4)]}]},
    ]


@pytest.fixture(scope="module", name="checkpoints")
def checkpoints_fixture(upstream_repo: Path, torchaudio_stub: Path, tmp_path_factory: Any) -> dict[str, Path]:
    """A tiny checkpoint a family."""
    folder = tmp_path_factory.mktemp("data")
    made = {family: folder / f"tiny_{number}" for number, family in enumerate(FAMILIES)}
    command = [sys.executable, "-c", _MAKE_ALL, upstream_repo, *(f"{name}={made[name]}" for name in made)]
    subprocess.run(command, check=True, capture_output=True, cwd=Path(__file__).parent)
    for checkpoint in made.values():
        _reach_across_seams(checkpoint / "tokenizer.json")
    return made


def _reach_across_seams(path: Path) -> None:
    """Gives the tokenizer Qwen's pre-tokenizer and tokens that end in line breaks."""
    stored = json.loads(path.read_text(encoding="utf-8"))
    split = {"type": "Split", "pattern": {"Regex": _QWEN_SPLIT}, "behavior": "Isolated", "invert": False}
    level = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": False, "use_regex": False}
    stored["pre_tokenizer"] = {"type": "Sequence", "pretokenizers": [split, level]}
    vocabulary, merges = stored["model"]["vocab"], stored["model"]["merges"]
    for left in (".", ":", "!", _LINE_BREAK):  # each takes the id of the last word's longest prefix
        number = vocabulary.pop("".join(merges.pop()))
        vocabulary[left + _LINE_BREAK] = number
        merges.insert(0, [left, _LINE_BREAK])
    path.write_text(json.dumps(stored), encoding="utf-8")


@pytest.fixture(scope="module", name="upstream", params=FAMILIES)
def upstream_fixture(
    request: pytest.FixtureRequest, upstream_repo: Path, torchaudio_stub: Path, checkpoints: dict[str, Path]
) -> Iterator[Upstream]:
    family, folder = request.param, checkpoints[request.param]
    before, bytecode = list(sys.path), sys.dont_write_bytecode
    sys.path[:0] = [str(upstream_repo), str(torchaudio_stub)]
    sys.dont_write_bytecode = True
    try:
        if family.endswith("v1.5"):
            trainer = import_trainer(upstream_repo)
        else:
            trainer = importlib.import_module(f"{family}.finetuning.sft")
        arguments = _parsed(trainer, folder)
        from moss_tts_patches.data.processors import training_processor

        yield Upstream(family, trainer, arguments, training_processor(vars(trainer), arguments), folder)
    finally:
        sys.path[:], sys.dont_write_bytecode = before, bytecode


def _parsed(trainer: ModuleType, folder: Path) -> Any:
    with pytest.MonkeyPatch.context() as patch:
        given = ["--model-path", str(folder), "--train-jsonl", str(folder / "train.jsonl"), "--output-dir", "none"]
        patch.setattr(sys, "argv", ["sft.py", *given])
        return trainer.parse_args()


def write(path: Path, records: list[dict[str, Any]]) -> Path:
    path.write_text("".join(json.dumps(record, ensure_ascii=False) + "\n" for record in records), encoding="utf-8")
    return path


def test_positions_are_upstreams(upstream: Upstream, tmp_path: Path) -> None:
    records = upstream.shapes()
    rules, counter = upstream.counting()
    report = check_files([write(tmp_path / "a.jsonl", records)], rules, counter)
    real = upstream.real_sizes(records)
    assert report.faults == []
    assert list(report.positions) == [positions for positions, _ in real]
    assert report.supervised == sum(supervised for _, supervised in real)
    for record, size in zip(records, real):
        single = check_files([write(tmp_path / "b.jsonl", [record])], rules, counter)
        assert (single.positions[0], single.supervised) == size, record


def test_upper_bounds_are_bounds(upstream: Upstream, tmp_path: Path) -> None:
    records = upstream.shapes()
    rules, _ = upstream.counting()
    report = check_files([write(tmp_path / "a.jsonl", records)], rules, UpperBounds(rules))
    real = upstream.real_sizes(records)
    assert all(bound > positions for bound, (positions, _) in zip(report.positions, real))


def test_tokens_reach_across_the_seams_of_the_prompt(upstream: Upstream) -> None:
    """Control: with this tokenizer the lengths of a prompt's parts do not add up, so the equality above means much."""
    encode = upstream.processor.tokenizer.encode
    assert len(encode("x.\ny")) < len(encode("x.")) + len(encode("\ny"))


FAULTY_TEXTS = {
    "moss_tts_local": ("a <|audio|> b", "a <|vision_start|> b", "<|vision_end|>"),
    "moss_tts_delay": ("a <|audio|> b", "a <|vision_start|> b", "<|vision_end|>"),
    "moss_tts_local_v1.5": ("a <|audio|> b", "a <|audio_start|> b", "<|audio_end|>"),
    TALKS: ("\nA text of more than twelve tokens.",),
}


def test_texts_that_upstream_fails_on_are_faults(upstream: Upstream, tmp_path: Path) -> None:
    rules, counter = upstream.counting()
    for text in FAULTY_TEXTS[upstream.family]:
        record = upstream.record(text)
        with pytest.raises((ValueError, IndexError)):
            upstream.dataset([record])[0]
        report = check_files([write(tmp_path / "a.jsonl", [record])], rules, counter)
        assert [fault.kind for fault in report.faults] == ["text"], text


def test_records_that_upstream_fails_on_are_faults(upstream: Upstream, tmp_path: Path) -> None:
    rules, counter = upstream.counting()
    good = upstream.record("Fine.")
    holder = good["conversations"][0] if upstream.family == TALKS else good
    codes = holder["audio_codes"]
    for wrong in ([], [1, 2], [codes[0], codes[0][:-1]], [[None] * len(codes[0])], "x"):
        holder["audio_codes"] = wrong
        with pytest.raises((ValueError, TypeError, RuntimeError)):
            upstream.dataset([good])[0]
        assert check_files([write(tmp_path / "a.jsonl", [good])], rules, counter).kept == 0, wrong
    holder["audio_codes"] = codes
    assert check_files([write(tmp_path / "a.jsonl", [good])], rules, counter).kept == 1


def test_special_codes_are_out_of_range(upstream: Upstream, tmp_path: Path) -> None:
    rules, counter = upstream.counting()
    pad = 1024 if upstream.family == TALKS else 32
    record = upstream.record("Fine.")
    codes = (record["conversations"][0] if upstream.family == TALKS else record)["audio_codes"]
    for code, kept in ((pad - 1, 1), (pad, 0)):
        codes[1][2] = code
        assert check_files([write(tmp_path / "a.jsonl", [record])], rules, counter).kept == kept


def test_files_and_records_are_upstreams(upstream: Upstream, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    trainer = upstream.trainer
    compare_loaders(trainer.load_jsonl_for_rank)
    for name in ("b", "a", "c.rank00000-of-00003", "c.rank00001-of-00003", "c.rank00002-of-00003"):
        write(tmp_path / f"{name}.jsonl", [{**upstream.record(name), "id": name}, upstream.record("x\u2028y")])
    (tmp_path / "d.txt").write_text("{}\r\n\n{}\n", encoding="utf-8")
    monkeypatch.chdir(tmp_path)
    shards = "c.*.jsonl"
    for spec in ("a.jsonl", "b.jsonl, a.jsonl,a.jsonl", ".", "*", "[ab].jsonl", shards, f"{shards},a.jsonl", "d.txt"):
        assert find_files(spec) == trainer.resolve_jsonl_paths(spec), spec
        for processes, rank in ((1, 0), (2, 0), (2, 1), (3, 2)):
            files = find_files(spec)
            assert files_of_rank(files, processes, rank) == trainer.shard_paths_for_rank(files, processes, rank), spec
    with pytest.raises(ValueError, match="No shard"):
        trainer.shard_paths_for_rank(find_files(shards), 5, 4)
    with pytest.raises(DataError, match="shards"):
        files_of_rank(find_files(shards), 5, 4)


def checked(upstream: Upstream, spec: str, processes: int, rank: int, **options: Any) -> Any:
    rules, counter = upstream.counting()
    return load_checked(
        upstream.trainer.load_jsonl_for_rank,
        spec,
        processes,
        rank,
        rules=rules,
        counter=counter,
        options=DataOptions(**options),
        output_folder=Path("out"),
        say=lambda line: None,
    )


def test_the_trainer_gets_its_own_records(upstream: Upstream, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    records = upstream.shapes()
    for shard in range(2):
        write(tmp_path / f"s.rank{shard:05d}-of-00002.jsonl", records[shard::2])
    for processes, rank in ((1, 0), (2, 1)):
        expected = upstream.trainer.load_jsonl_for_rank("*.jsonl", processes, rank)
        data = checked(upstream, "*.jsonl", processes, rank)
        assert data.loaded == expected
        assert list(data.report.positions) == [positions for positions, _ in upstream.real_sizes(expected[1])]


def test_the_trainers_data_set_lacks_what_is_skipped(
    upstream: Upstream, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    records = upstream.shapes()
    sizes = [positions for positions, _ in upstream.real_sizes(records)]
    limit = sorted(sizes)[-2]
    write(tmp_path / "a.jsonl", [*records[:2], {"id": "bad"}, *records[2:]])
    data = checked(upstream, "a.jsonl", 1, 0, bad_records="skip", max_positions=limit)
    kept = [record for record, size in zip(records, sizes) if size <= limit]
    assert len(kept) < len(records)
    assert upstream.dataset(data.loaded[1]).records == kept
    skipped = (tmp_path / "out" / "skipped_records.jsonl").read_text(encoding="utf-8").splitlines()
    assert len(skipped) == 1 + len(records) - len(kept)


def test_the_command_counts_as_the_trainer(upstream: Upstream, upstream_repo: Path) -> None:
    data = upstream.folder / "train.jsonl"
    arguments = [str(data), "--model-path", str(upstream.folder), "--json", "--repo", str(upstream_repo)]
    done = CliRunner().invoke(cli.app, ["check-data", *arguments], env={"MOSS_LOWMEM_CORRECTIONS": "none"})
    assert done.exit_code == 0, done.output
    values = json.loads(done.stdout)
    records = [json.loads(line) for line in data.read_text(encoding="utf-8").splitlines()]
    real = upstream.real_sizes(records)
    assert values["positions"]["exact"] is True
    assert values["positions"]["total"] == sum(positions for positions, _ in real)
    assert values["positions"]["longest"] == max(real)[0]
    assert values["supervised_share"] == round(sum(n for _, n in real) / sum(n for n, _ in real), 4)


# -- the correction of v1.5 ------------------------------------------------------------------------------------------


def items(upstream: Upstream, records: list[dict[str, Any]]) -> list[dict[str, Any]]:
    dataset = upstream.dataset(records)
    return [dataset[index] for index in range(len(dataset))]


def labelled_frames(item: dict[str, Any], start_token: int) -> list[bool]:
    """Whether each position after the token that opens the audio has a label, and those before it in front."""
    opening = int((item["input_ids"][:, 0] == start_token).nonzero()[-1])
    return [bool(item["loss_mask"][:opening].any()), *item["loss_mask"][opening:].tolist()]


@pytest.mark.parametrize("upstream", ["moss_tts_local_v1.5"], indirect=True)
def test_every_frame_is_learned(upstream: Upstream, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    records = upstream.shapes()
    write(tmp_path / "a.jsonl", records)
    start = upstream.processor.model_config.audio_start_token_id
    before, load = items(upstream, records), upstream.trainer.load_jsonl_for_rank
    with active(upstream.trainer, monkeypatch, preflight="0") as session:
        after = items(upstream, records)
        real = upstream.real_sizes(records)
        session.data.load(
            load,
            vars(upstream.trainer),
            upstream.arguments,
            spec=str(tmp_path / "a.jsonl"),
            processes=1,
            rank=0,
            output_folder=tmp_path,
        )
        assert list(session.data.checked.report.positions) == [positions for positions, _ in real]
        assert session.data.checked.report.supervised == sum(supervised for _, supervised in real)
    for item in after:
        prompt, *audio = labelled_frames(item, start)
        assert not prompt and all(audio)
    assert all(torch.equal(ours["input_ids"], theirs["input_ids"]) for ours, theirs in zip(after, before))
    # Control: upstream leaves the first frame of some without a label, and has some begin before the audio.
    upstreams = [labelled_frames(item, start) for item in before]
    right, late, early = ([False, True], [False, False], [True, True])
    found = [labels[:2] for labels in upstreams]
    assert found.count(late) >= 4 and found.count(early) >= 2 and found.count(right) >= 4
    assert found.count(late) + found.count(early) + found.count(right) == len(records)
    assert all(all(labels[2:]) for labels in upstreams)
    with active(upstream.trainer, monkeypatch, preflight="0", corrections="none"):
        uncorrected = items(upstream, records)
    for ours, theirs in zip(uncorrected, before):
        assert torch.equal(ours["loss_mask"], theirs["loss_mask"])


@pytest.mark.parametrize("upstream", ["moss_tts_local_v1.5"], indirect=True)
def test_items_of_another_make_are_refused(upstream: Upstream, monkeypatch: pytest.MonkeyPatch) -> None:
    dataset = upstream.trainer.MossTTSLocalV15SFTDataset
    monkeypatch.setattr(dataset, "__getitem__", lambda self, index: {"input_ids": None})
    with (
        active(upstream.trainer, monkeypatch, preflight="0"),
        pytest.raises(SeamError, match=r"items have no loss_mask.*MOSS_LOWMEM_CORRECTIONS"),
    ):
        upstream.dataset([upstream.record("x")])[0]
