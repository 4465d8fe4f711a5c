"""What cannot be merged is refused with a reason before anything is written."""

from __future__ import annotations

import shutil
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from safetensors.torch import load_file, save_file
from small_adapters import (  # noqa: F401  (fixtures)
    adapter_fixture,
    base_fixture,
    edit_config,
    record_of,
    save_random_adapter,
    small_model,
    tensor_bytes,
)

from moss_tts_patches.adapters import merge as merge_module
from moss_tts_patches.adapters.merge import merge_adapter
from moss_tts_patches.errors import EnvironmentProblem, LowMemError, NumericsError, SettingsError, StateError

PREFIX = "base_model.model."


def change_tensors(adapter: Path, change) -> None:
    tensors = load_file(adapter / "adapter_model.safetensors")
    change(tensors)
    save_file(tensors, adapter / "adapter_model.safetensors")


def rewrite_base(base: Path, change) -> None:
    tensors = load_file(base / "model.safetensors")
    change(tensors)
    save_file(tensors, base / "model.safetensors", metadata={"format": "pt"})


A_LORA = PREFIX + "layers.0.q_proj.lora_A.weight"
B_LORA = PREFIX + "layers.0.q_proj.lora_B.weight"
REFUSALS = {
    "half an adapter": (lambda a, b: change_tensors(a, lambda t: t.pop(B_LORA)), r"missing in the adapter \(1\)"),
    "a module less": (
        lambda a, b: change_tensors(a, lambda t: [t.pop(A_LORA), t.pop(B_LORA)]),
        r"missing in the adapter \(2\): .*layers.0.q_proj",
    ),
    "one more": (
        lambda a, b: change_tensors(a, lambda t: t.update({PREFIX + "heads.0.lora_A.weight": torch.ones(4, 12)})),
        r"unexpected \(1\): .*heads.0.lora_A",
    ),
    "another rank": (
        lambda a, b: edit_config(a, r=5),
        r"of another shape \(8\): .*found \(4, 12\), expected \(5, 12\)",
    ),
    "another width": (
        lambda a, b: rewrite_base(b, lambda t: t.update({"layers.0.q_proj.weight": torch.ones(20, 13)})),
        r"of another shape \(1\)",
    ),
    "a tied head": (
        lambda a, b: rewrite_base(b, lambda t: t.pop("layers.0.q_proj.weight")),
        r"not in the base, or tied there \(1\): layers.0.q_proj",
    ),
    "integers": (
        lambda a, b: rewrite_base(b, lambda t: t.update({"layers.0.q_proj.weight": torch.ones(20, 12).char()})),
        r"no floating-point weight in the base \(1\)",
    ),
    "a bias too much": (lambda a, b: edit_config(a, lora_bias=True), "a lora_bias without a bias in the base"),
    "another target": (lambda a, b: edit_config(a, target_modules=["k_proj"]), "PEFT says: Target modules"),
    "a changed base": (lambda a, b: edit_config(a, init_lora_weights="pissa"), "pissa', which changed the base"),
    "new tokens": (
        lambda a, b: edit_config(a, trainable_token_indices=[1]),
        r"trainable_token_indices=\[1\] cannot be merged one module at a time",
    ),
    "another method": (lambda a, b: edit_config(a, peft_type="LOHA"), "peft_type is 'LOHA', expected 'LORA'"),
    "nothing in it": (
        lambda a, b: save_file({}, a / "adapter_model.safetensors"),
        "holds no tensor. Something renamed the model's parts",
    ),
    "cut off": (
        lambda a, b: (a / "adapter_model.safetensors").write_bytes((a / "adapter_model.safetensors").read_bytes()[:-1]),
        "where its header promises",
    ),
    "no weights": (lambda a, b: (a / "adapter_model.safetensors").unlink(), "expected adapter_model.safetensors"),
    "pickled": (
        lambda a, b: (a / "adapter_model.safetensors").rename(a / "adapter_model.bin"),
        "found adapter_model.bin, which may run code",
    ),
    "a whole checkpoint": (
        lambda a, b: (a / "adapter_config.json").rename(a / "config.json"),
        "found a whole checkpoint, .*nothing to merge",
    ),
    "merged already": (lambda a, b: record_of("x", kind="merged").write(a), "there is nothing to merge"),
    "a broken record": (lambda a, b: (a / "lowmem.json").write_text("{"), "lowmem.json: not JSON"),
    "not finite": (
        lambda a, b: change_tensors(a, lambda t: t[B_LORA].fill_(float("nan"))),
        "layers.0.q_proj has values that are not finite",
    ),
    "no base": (lambda a, b: shutil.rmtree(b), "no folder of that name.*--base"),
    "a base without config": (lambda a, b: (b / "config.json").unlink(), "no config.json found"),
    "a broken config": (lambda a, b: (b / "config.json").write_text("["), "config.json: not JSON"),
    "a quantised base": (
        lambda a, b: (b / "config.json").write_text('{"quantization_config": {"load_in_4bit": true}}'),
        "16-bit model; pass that with --base",
    ),
    "an adapter in the base": (
        lambda a, b: rewrite_base(b, lambda t: t.update({"x.lora_A.default.weight": torch.ones(1)})),
        "belong to an adapter that was saved inside a model",
    ),
    "a pickled base": (
        lambda a, b: (b / "model.safetensors").rename(b / "pytorch_model.bin"),
        "found pytorch_model.bin, expected model.safetensors. Load it with upstream's class",
    ),
    "no weights in the base": (lambda a, b: (b / "model.safetensors").unlink(), "neither model.safetensors nor"),
    "something there": (
        lambda a, b: (a.parent / "merged").mkdir() or save_file({}, a.parent / "merged" / "x"),
        "new or",
    ),
    "a file there": (lambda a, b: (a.parent / "merged").write_text("mine"), "something stands there already"),
}


@pytest.mark.parametrize("kind", REFUSALS)
def test_what_cannot_be_merged_is_refused_and_nothing_is_written(tmp_path, base, adapter, kind):
    change, message = REFUSALS[kind]
    change(adapter, base)
    before = tensor_bytes(tmp_path)
    with pytest.raises(LowMemError, match=message):
        merge_adapter(adapter, tmp_path / "merged")
    assert tensor_bytes(tmp_path) == before
    assert {path.name for path in tmp_path.iterdir()} <= {"base", "adapter", "merged"}


@pytest.mark.parametrize(
    ("changed", "shared"), [({"target_modules": ["tables.0"]}, "tables.0"), ({"modules_to_save": ["norm"]}, "norm")]
)
def test_a_module_that_shares_its_weight_is_refused(tmp_path, base, changed, shared):
    save_random_adapter(tmp_path / "adapter", small_model(), base, **changed)
    with pytest.raises(StateError, match=f"{shared} shares its weight with another module"):
        merge_adapter(tmp_path / "adapter", tmp_path / "merged", tied=(r"tables\.\d+", "norm"))
    merge_adapter(tmp_path / "adapter", tmp_path / "merged", tied=(r"heads\.\d+", "tables", "orm"))


def test_values_beyond_float16_are_refused(tmp_path, base, adapter):
    rewrite_base(base, lambda tensors: tensors["heads.0.weight"].fill_(7e4))
    with pytest.raises(NumericsError, match=r"heads.0.weight has values beyond what float16 can hold"):
        merge_adapter(adapter, tmp_path / "merged", dtype="float16")
    assert not (tmp_path / "merged").exists()
    rewrite_base(base, lambda tensors: tensors["heads.0.weight"].fill_(6e4))
    merge_adapter(adapter, tmp_path / "merged", dtype="float16")
    with pytest.raises(SettingsError, match="dtype is 'int8', expected one of bfloat16, float16, float32"):
        merge_adapter(adapter, tmp_path / "merged2", dtype="int8")


def test_a_full_disk_is_foreseen(tmp_path, adapter, monkeypatch):
    needed = merge_adapter(adapter, tmp_path / "merged").bytes
    for free, fits in ((needed - 1, False), (needed + 10_000, True)):
        monkeypatch.setattr(merge_module.shutil, "disk_usage", lambda path, free=free: SimpleNamespace(free=free))
        if fits:
            merge_adapter(adapter, tmp_path / "second")
        else:
            with pytest.raises(EnvironmentProblem, match="GiB are free and the merged model takes"):
                merge_adapter(adapter, tmp_path / "second")
