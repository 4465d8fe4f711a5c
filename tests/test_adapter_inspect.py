"""moss-lowmem inspect: what a folder is, and why it is broken."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from mini import clean_environment
from safetensors.torch import load_file, save_file
from small_adapters import (  # noqa: F401  (fixtures)
    adapter_fixture,
    base_fixture,
    record_of,
    save_base,
    save_random_adapter,
    small_model,
)
from typer.testing import CliRunner

from moss_tts_patches.adapters.inspect import describe_folder
from moss_tts_patches.adapters.merge import merge_adapter
from moss_tts_patches.adapters.record import AdapterRecord
from moss_tts_patches.cli import app
from moss_tts_patches.errors import EnvironmentProblem, StateError

WEIGHTS, MODEL = "adapter_model.safetensors", "model.safetensors"


def test_a_full_checkpoint(base):
    found = describe_folder(base)
    expected = small_model().state_dict()
    assert (found.kind, found.problems, found.base, found.family) == ("full checkpoint", (), None, None)
    assert found.tensors == len(expected) and found.bytes == sum(tensor.nbytes for tensor in expected.values())
    assert found.dtypes == {"float32": found.bytes - 16, "int64": 16}


def test_shards_count_as_one_model(tmp_path, base):
    whole = describe_folder(base)
    sharded = describe_folder(save_base(tmp_path / "sharded", small_model(), shards=3))
    assert sharded.is_whole and (sharded.tensors, sharded.bytes) == (whole.tensors, whole.bytes)


def test_an_adapter_and_what_is_merged_of_it(tmp_path, base, adapter):
    record_of(str(base), method="qlora", fully_trained=("norms",)).write(adapter)
    merge_adapter(adapter, tmp_path / "merged")
    for folder, kind, tensors in ((adapter, "adapter", 8), (tmp_path / "merged", "merged", 13)):
        found = describe_folder(folder)
        assert (found.kind, found.problems, found.tensors) == (kind, (), tensors)
        assert (found.base, found.family, found.method) == (str(base), "moss_tts_local", "qlora")
        assert (found.rank, found.alpha, found.targets, found.steps, found.epoch) == (4, 8, ("backbone",), 120, 2)
        assert found.fully_trained == ("norms",)


@pytest.mark.parametrize(
    ("options", "targets"),
    [({}, ("down_proj", "q_proj")), ({"target_modules": r".*q_proj"}, (r".*q_proj",)), ({"use_dora": True}, None)],
)
def test_an_adapter_of_another_tool(tmp_path, options, targets):
    save_random_adapter(tmp_path / "adapter", small_model(), "x", modules_to_save=["norm"], **options)
    (tmp_path / "adapter" / "lowmem.json").unlink()
    found = describe_folder(tmp_path / "adapter")
    assert found.is_whole and found.kind == "adapter"
    assert (found.rank, found.alpha, found.fully_trained, found.steps) == (4, 8, ("norm",), None)
    assert targets is None or found.targets == targets


def cut(path: Path, size: int) -> None:
    path.write_bytes(path.read_bytes()[:size])


def drop(path: Path, name: str) -> None:
    tensors = load_file(path)
    del tensors[name]
    save_file(tensors, path, metadata={"format": "pt"})


def save_empty(path: Path) -> None:
    """What PEFT writes when it finds none of its own tensors."""
    save_file({}, path, metadata={"format": "pt"})
    assert path.stat().st_size <= 48


B = "base_model.model.layers.1.q_proj.lora_B.weight"
BROKEN_ADAPTERS = {
    "empty": (lambda a: save_empty(a / WEIGHTS), "holds no tensor"),
    "cut off": (lambda a: cut(a / WEIGHTS, -1), "where its header promises"),
    "cut off in its header": (lambda a: cut(a / WEIGHTS, 100), "100 bytes, fewer than its header needs"),
    "no bytes": (lambda a: cut(a / WEIGHTS, 0), "0 bytes, fewer than"),
    "not safetensors": (lambda a: (a / WEIGHTS).write_text("<html>Not found</html> " * 20), "fewer than its header"),
    "no weights": (lambda a: (a / WEIGHTS).unlink(), f"found none, expected {WEIGHTS}"),
    "no config": (lambda a: (a / "adapter_config.json").unlink(), "adapter_config.json: No such file"),
    "half a pair": (lambda a: drop(a / WEIGHTS, B), "1 modules lack a part of their adapter.*layers.1.q_proj"),
    "a model beside it": (lambda a: save_file({}, a / MODEL), "an adapter and a model's weights"),
    "a broken record": (lambda a: (a / "lowmem.json").write_text("[]"), "found a list, expected a JSON object"),
    "a record of something else": (lambda a: record_of("x", kind="merged").write(a), "says merged, and PEFT's"),
    "only a record": (
        lambda a: [(a / n).unlink() for n in (WEIGHTS, "adapter_config.json")],
        "says adapter, and neither",
    ),
}


@pytest.mark.parametrize("kind", BROKEN_ADAPTERS)
def test_a_broken_adapter(adapter, kind):
    assert describe_folder(adapter).is_whole
    change, message = BROKEN_ADAPTERS[kind]
    change(adapter)
    found = describe_folder(adapter)
    assert found.kind == "broken"
    assert re.search(message, "; ".join(found.problems))


def replace_text(path: Path, old: str, new: str) -> None:
    text = path.read_text()
    assert old in text
    path.write_text(text.replace(old, new, 1))


SHARD, INDEX = "model-00002-of-00003.safetensors", "model.safetensors.index.json"
BROKEN_CHECKPOINTS = {
    "a shard less": (lambda b: (b / SHARD).unlink(), f"names 3 shards, and {SHARD} not found"),
    "a shard cut off": (lambda b: cut(b / SHARD, -8), f"{SHARD}: .* where its header promises"),
    "a tensor elsewhere": (lambda b: drop(b / SHARD, "heads.0.weight"), f"places heads.0.weight in {SHARD}"),
    "a broken index": (lambda b: (b / INDEX).write_text("{}"), "expected JSON with the shard of each tensor"),
    "a shard outside": (lambda b: replace_text(b / INDEX, SHARD, "../x"), "expected JSON with the shard"),
    "no index": (lambda b: (b / INDEX).unlink(), "neither model.safetensors nor"),
    "no config": (lambda b: (b / "config.json").unlink(), "config.json was not found"),
    "a broken config": (lambda b: (b / "config.json").write_text("{"), "config.json is not JSON"),
}


@pytest.mark.parametrize("kind", BROKEN_CHECKPOINTS)
def test_a_broken_checkpoint(tmp_path, kind):
    base = save_base(tmp_path / "sharded", small_model(), shards=3)
    assert describe_folder(base).is_whole
    change, message = BROKEN_CHECKPOINTS[kind]
    change(base)
    found = describe_folder(base)
    assert found.kind == "broken"
    assert re.search(message, "; ".join(found.problems))


@pytest.mark.parametrize("name", ["layers.0.q_proj.lora_A.default.weight", "layers.0.q_proj.base_layer.weight"])
def test_an_adapter_inside_a_full_checkpoint_is_broken(base, name):
    save_file({**load_file(base / MODEL), name: torch.ones(2)}, base / MODEL)
    found = describe_folder(base)
    assert found.kind == "broken" and f"1 of its tensors are an adapter's, {name} among them" in found.problems[0]


def test_an_unfinished_save_is_broken_whatever_it_holds(tmp_path, base):
    base.rename(tmp_path / "checkpoint-epoch-0.incomplete-123")
    found = describe_folder(tmp_path / "checkpoint-epoch-0.incomplete-123")
    assert found.kind == "broken" and "the save was not finished" in found.problems[0] and found.tensors == 13


@pytest.mark.parametrize("make", [Path.mkdir, Path.touch, lambda path: None])
def test_other_paths(tmp_path, make):
    make(tmp_path / "path")
    if (tmp_path / "path").is_dir():
        assert describe_folder(tmp_path / "path").kind == "broken"
    else:
        with pytest.raises(EnvironmentProblem, match="expected the folder of a checkpoint or an adapter"):
            describe_folder(tmp_path / "path")


def test_the_command_prints_and_its_status_tells(base, adapter, tmp_path):
    run = CliRunner().invoke
    whole = run(app, ["inspect", str(adapter)])
    assert whole.exit_code == 0 and whole.output.startswith(f"{adapter}: adapter\n")
    assert {"rank:4", "steps:120", "targets:backbone", f"base:{base}"} <= set(whole.output.replace(" ", "").split())
    as_json = run(app, ["inspect", "--json", str(base)])
    assert as_json.exit_code == 0 and json.loads(as_json.output)["kind"] == "full checkpoint"
    (adapter / WEIGHTS).unlink()
    broken = run(app, ["inspect", str(adapter)])
    assert broken.exit_code == 1 and "broken\n" in broken.output and "problem:" in broken.output
    absent = run(app, ["inspect", str(tmp_path / "absent")])
    assert absent.exit_code == 2 and absent.output.startswith("[lowmem] error: inspect")


def test_inspecting_takes_neither_peft_nor_transformers(base, adapter):
    code = (
        "import sys; from pathlib import Path; from moss_tts_patches.adapters.inspect import describe_folder\n"
        "print([describe_folder(Path(path)).kind for path in sys.argv[1:]])\n"
        "print([name for name in ('peft', 'transformers') if name in sys.modules])"
    )
    command = [sys.executable, "-c", code, str(base), str(adapter)]
    done = subprocess.run(command, env=clean_environment(), capture_output=True, text=True, check=True)
    assert done.stdout == "['full checkpoint', 'adapter']\n[]\n"


def test_a_record_is_read_as_it_was_written(tmp_path):
    record = record_of("某处/模型", alpha=0.5, targets=("backbone", r".*q_proj"), fully_trained=("norms",))
    record.write(tmp_path)
    assert AdapterRecord.read(tmp_path) == record == AdapterRecord.find(tmp_path)
    content = json.loads((tmp_path / "lowmem.json").read_text(encoding="utf-8"))
    assert content["format"] == 1 and content["base_model"] == "某处/模型"
    replace_text(tmp_path / "lowmem.json", "{", '{"added_later": 1,')
    assert AdapterRecord.read(tmp_path) == record


def test_a_record_is_replaced_as_a_whole(tmp_path, monkeypatch):
    record_of("old").write(tmp_path)

    def fail(source, target):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "replace", fail)
    with pytest.raises(OSError, match="No space"):
        record_of("new").write(tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == ["lowmem.json"]
    assert AdapterRecord.read(tmp_path).base_model == "old"


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        ('"format": 1', '"format": 2', "format is 2, expected 1; upgrade moss_tts_patches"),
        ('"format": 1', '"format": true', "format is True, expected 1; save it again"),
        ('"rank": 4', '"rank": "4"', "rank is '4', expected int"),
        ('"steps": 120', '"steps": true', "steps is True, expected int"),
        ('"steps": 120,', "", "steps not found"),
        ('"kind": "adapter"', '"kind": "model"', "kind is 'model', expected adapter or merged"),
        ('"method": "lora"', '"method": "full"', "method is 'full', expected lora or qlora"),
        ('"backbone"', "1", r"targets is \[1\], expected tuple"),
        ("{", "", "not JSON"),
    ],
)
def test_a_broken_record_says_what_is_wrong(tmp_path, old, new, message):
    record_of("base").write(tmp_path)
    text = (tmp_path / "lowmem.json").read_text()
    assert old in text
    (tmp_path / "lowmem.json").write_text(text.replace(old, new, 1))
    with pytest.raises(StateError, match=message):
        AdapterRecord.read(tmp_path)


def test_no_record(tmp_path):
    assert AdapterRecord.find(tmp_path) is None
    with pytest.raises(EnvironmentProblem, match="No such file"):
        AdapterRecord.read(tmp_path)
