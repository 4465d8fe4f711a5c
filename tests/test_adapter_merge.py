"""Merging adapters: PEFT's own numbers, upstream's own files."""

from __future__ import annotations

import dataclasses
import json

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file
from small_adapters import (  # noqa: F401  (fixtures)
    CONFIG,
    LINEAR,
    TABLES,
    adapter_fixture,
    base_fixture,
    edit_config,
    largest_difference,
    record_of,
    save_base,
    save_random_adapter,
    small_model,
    tensor_bytes,
)
from tolerances import TOLERANCES
from typer.testing import CliRunner

from moss_tts_patches.adapters import safetensors_shards
from moss_tts_patches.adapters.merge import merge_adapter
from moss_tts_patches.adapters.record import AdapterRecord
from moss_tts_patches.cli import app
from moss_tts_patches.errors import EnvironmentProblem

KINDS = {
    "lora": {},
    "rslora": {"use_rslora": True},
    "dora": {"use_dora": True},
    "patterns": {"rank_pattern": {"layers.1.q_proj": 2}, "alpha_pattern": {"down_proj": 3}},
    "embeddings": {"target_modules": [*LINEAR, *TABLES]},
    "embeddings dora": {"target_modules": [*LINEAR, *TABLES], "use_dora": True},
    "square head": {"target_modules": ["heads.0"]},
    "whole modules": {"modules_to_save": ["norm", "heads.1", "tables.0"]},
    "trained bias": {"target_modules": ["down_proj"], "lora_bias": True},
    "one layer": {"target_modules": ["q_proj"], "layers_to_transform": [1], "layers_pattern": "layers"},
    "regular expression": {"target_modules": r"layers\.0\..*proj", "init_lora_weights": "gaussian"},
    "one excluded": {"exclude_modules": ["layers.0.q_proj"]},
}


@pytest.fixture(autouse=True)
def small_blocks(monkeypatch):
    """Blocks of 50 elements cut every matrix of the small model into several, some of them uneven."""
    monkeypatch.setattr(safetensors_shards, "BLOCK_ELEMENTS", 50)


@pytest.mark.parametrize("kind", KINDS)
def test_merged_weights_are_pefts(tmp_path, base, kind):
    expected = save_random_adapter(tmp_path / "adapter", small_model(), base, **KINDS[kind])
    report = merge_adapter(tmp_path / "adapter", tmp_path / "merged")
    found, before = load_file(tmp_path / "merged" / "model.safetensors"), small_model().state_dict()
    assert largest_difference(found, expected) <= TOLERANCES["merged_weights_fp32_relative"]
    changed = {name for name in before if not torch.equal(before[name], expected[name])}
    for name in before:
        if name in changed:  # the comparison above can fail: what it is about is far larger than its tolerance
            assert largest_difference({name: before[name]}, {name: expected[name]}) > 1e-2
        else:
            assert torch.equal(found[name], before[name])
    modules = {name.rpartition(".")[0] for name in changed}
    assert modules and report.merged_modules == len(modules - set(KINDS[kind].get("modules_to_save", ())))


@pytest.mark.parametrize(
    ("kind", "changes"),
    [
        ("lora", {"use_rslora": True}),
        ("lora", {"lora_alpha": 9}),
        ("patterns", {"alpha_pattern": {}}),
        ("dora", {"lora_alpha": 9}),
    ],
)
def test_control_another_config_makes_other_weights(tmp_path, base, kind, changes):
    expected = save_random_adapter(tmp_path / "adapter", small_model(), base, **KINDS[kind])
    edit_config(tmp_path / "adapter", **changes)
    merge_adapter(tmp_path / "adapter", tmp_path / "merged")
    found = load_file(tmp_path / "merged" / "model.safetensors")
    assert largest_difference(found, expected) > 1000 * TOLERANCES["merged_weights_fp32_relative"]


def test_shards_and_their_index_stay_and_weights_are_rounded_once(tmp_path):
    model = small_model(torch.bfloat16)
    base = save_base(tmp_path / "base", model, shards=3, config={**CONFIG, "dtype": "bfloat16"})
    whole = {"modules_to_save": ["heads.1"]}
    expected = save_random_adapter(tmp_path / "adapter", model, base, {"base_dtype": "bfloat16"}, **whole)
    report = merge_adapter(tmp_path / "adapter", tmp_path / "merged")

    index, before = (
        json.loads((folder / "model.safetensors.index.json").read_text()) for folder in (tmp_path / "merged", base)
    )
    assert index == before and report.shards == 3 and report.bytes == index["metadata"]["total_size"]
    found = {}
    for file in sorted(set(index["weight_map"].values())):
        with safe_open(tmp_path / "merged" / file, framework="pt") as shard:
            assert shard.metadata() == {"format": "pt"}
            assert {name for name, place in index["weight_map"].items() if place == file} == set(shard.keys())
        found.update(load_file(tmp_path / "merged" / file))
    for name, tensor in expected.items():
        rounded = tensor.bfloat16() if tensor.is_floating_point() else tensor
        assert found[name].dtype == rounded.dtype and torch.equal(found[name], rounded), name
    # The control: the change rounded before it is added gives other bits.
    name = "layers.0.q_proj.weight"
    twice = model.state_dict()[name] + (expected[name] - model.state_dict()[name].float()).bfloat16()
    assert not torch.equal(found[name], twice)


def test_another_dtype_is_written_and_named_by_every_config(tmp_path, base, adapter):
    report = merge_adapter(adapter, tmp_path / "merged", dtype="bfloat16")
    found = load_file(tmp_path / "merged" / "model.safetensors")
    assert {tensor.dtype for tensor in found.values()} == {torch.bfloat16, torch.int64}
    config = json.loads((tmp_path / "merged" / "config.json").read_text())
    assert (config["dtype"], config["part"]["dtype"], report.dtype) == ("bfloat16",) * 3
    assert config["part"]["layers"] == [1, 2]


@pytest.mark.parametrize(
    ("config", "key"),
    [({**CONFIG, "dtype": None}, "dtype"), ({"torch_dtype": "float32"}, "torch_dtype"), ({"a": 1}, "dtype")],
)
def test_without_a_record_the_base_decides(tmp_path, config, key):
    base = save_base(tmp_path / "base", small_model(), config=config)
    save_random_adapter(tmp_path / "adapter", small_model(), base)
    (tmp_path / "adapter" / "lowmem.json").unlink()
    edit_config(tmp_path / "adapter", base_model_name_or_path=str(base))
    assert merge_adapter(tmp_path / "adapter", tmp_path / "merged").dtype == "float32"
    assert json.loads((tmp_path / "merged" / "config.json").read_text())[key] == "float32"
    assert not (tmp_path / "merged" / "lowmem.json").exists()  # nothing is known to put there


def test_files_are_upstreams_and_the_adapters_own_win(tmp_path, base, adapter):
    merge_adapter(adapter, tmp_path / "merged")
    found = tensor_bytes(tmp_path / "merged")
    assert set(found) == {
        *("model.safetensors", "config.json", "generation_config.json", "lowmem.json", "finetune_args.json"),
        *("modeling_small.py", "package/__init__.py", "tokenizer.json"),
    }
    assert found["tokenizer.json"] == b'"of the adapter"' and found["modeling_small.py"] == b"of the base"
    record = AdapterRecord.read(tmp_path / "merged")
    assert record == dataclasses.replace(AdapterRecord.read(adapter), kind="merged")
    assert not [name for name in load_file(tmp_path / "merged" / "model.safetensors") if "lora" in name]


def test_an_adapter_of_a_4_bit_base_goes_into_the_16_bit_one(tmp_path):
    model = small_model(torch.bfloat16)
    base = save_base(tmp_path / "base", model, config={**CONFIG, "dtype": "bfloat16"})
    record = {"method": "qlora", "base_dtype": "bfloat16", "base_model": "gone/away"}
    expected = save_random_adapter(tmp_path / "adapter", model, base, record)
    merge_adapter(tmp_path / "adapter", tmp_path / "merged", base)
    found = load_file(tmp_path / "merged" / "model.safetensors")
    assert torch.equal(found["layers.0.q_proj.weight"], expected["layers.0.q_proj.weight"].bfloat16())
    assert AdapterRecord.read(tmp_path / "merged").method == "qlora"


def test_a_base_in_the_hub_cache_is_found(tmp_path, base, adapter, monkeypatch):
    cache = tmp_path / "hub" / "models--Open--Small"
    (cache / "refs").mkdir(parents=True)
    (cache / "refs" / "main").write_text("c0ffee")
    (cache / "snapshots" / "c0ffee").mkdir(parents=True)
    for path in base.iterdir():
        (cache / "snapshots" / "c0ffee" / path.name).symlink_to(path)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path / "hub"))
    record_of("Open/Small").write(adapter)
    merge_adapter(adapter, tmp_path / "merged")
    assert not [path for path in (tmp_path / "merged").rglob("*") if path.is_symlink()]
    record_of("Open/Other").write(adapter)
    with pytest.raises(EnvironmentProblem, match=r"no model of it in the local hub cache.*--base"):
        merge_adapter(adapter, tmp_path / "merged2")


def test_merging_draws_no_random_number_of_the_process(tmp_path, adapter):
    torch.manual_seed(5)
    before = torch.random.get_rng_state()
    merge_adapter(adapter, tmp_path / "merged")
    assert torch.equal(torch.random.get_rng_state(), before)


def test_an_interrupted_merge_leaves_nothing_and_an_older_one_stays(tmp_path, base, adapter):
    (tmp_path / "merged").mkdir()  # an empty folder may be given
    merge_adapter(adapter, tmp_path / "merged")
    before = tensor_bytes(tmp_path)

    def interrupt(shard: str, done: int, total: int) -> None:
        if done > total / 2:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        merge_adapter(adapter, tmp_path / "merged", replace=True, progress=interrupt)
    assert tensor_bytes(tmp_path) == before
    expected = save_random_adapter(adapter, small_model(), base, use_rslora=True)
    merge_adapter(adapter, tmp_path / "merged", replace=True)
    found = load_file(tmp_path / "merged" / "model.safetensors")
    assert largest_difference(found, expected) <= TOLERANCES["merged_weights_fp32_relative"]


def test_progress_counts_every_byte_and_names_the_shards(tmp_path):
    base = save_base(tmp_path / "base", small_model(), shards=2)
    save_random_adapter(tmp_path / "adapter", small_model(), base)
    calls = []
    report = merge_adapter(tmp_path / "adapter", tmp_path / "merged", progress=lambda *call: calls.append(call))
    assert [done for _, done, _ in calls] == sorted({done for _, done, _ in calls})
    assert calls[-1] == ("shard 2 of 2", report.bytes, report.bytes) and calls[0][0] == "shard 1 of 2"


def test_the_command_merges_beside_the_adapter(tmp_path, base, adapter):
    done = CliRunner().invoke(app, ["merge", str(adapter), "--base", str(base), "--dtype", "bfloat16"])
    assert done.exit_code == 0, done.output
    assert "[lowmem] merged=" in done.output and "modules=4" in done.output
    found = load_file(tmp_path / "adapter-merged" / "model.safetensors")
    assert found["norm.weight"].dtype == torch.bfloat16
    again = CliRunner().invoke(app, ["merge", str(adapter)])
    assert again.exit_code == 2 and again.output.count("\n") == 1 and "[lowmem] error: output" in again.output
