"""Bases and adapters of a few kilobytes, made and merged by PEFT itself: the reference for our own merge."""

from __future__ import annotations

import copy
import json
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import LoraConfig, get_peft_model
from safetensors.torch import save_file
from torch import nn

from moss_tts_patches.adapters.record import AdapterRecord

LINEAR = ("q_proj", "down_proj")
TABLES = ("tables.0", "tables.1")
CONFIG = {
    "architectures": ["SmallModel"],
    "model_type": "small",
    "dtype": "float32",
    "part": {"dtype": "float32", "layers": [1, 2]},
}


class SmallModel(nn.Module):
    """Two layers, two embedding tables, a square head, a norm with a bias and a counter."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(self._layer() for _ in range(2))
        self.tables = nn.ModuleList(nn.Embedding(size, 12) for size in (23, 7))
        self.norm = nn.LayerNorm(12)
        self.heads = nn.ModuleList(nn.Linear(12, size, bias=False) for size in (12, 9))
        self.register_buffer("counter", torch.tensor([3, 2**40]))

    @staticmethod
    def _layer() -> nn.Module:
        layer = nn.Module()
        layer.q_proj = nn.Linear(12, 20, bias=False)
        layer.down_proj = nn.Linear(20, 12)
        return layer


def small_model(dtype: torch.dtype = torch.float32) -> SmallModel:
    with torch.random.fork_rng():
        torch.manual_seed(0)
        return SmallModel().to(dtype)


def save_base(folder: Path, model: nn.Module, shards: int = 1, config: dict[str, Any] | None = None) -> Path:
    """Writes a checkpoint as transformers does, with code, a processor and what does not belong to a model."""
    folder.mkdir(parents=True)
    tensors = {name: tensor.contiguous() for name, tensor in model.state_dict().items()}
    if shards == 1:
        save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    else:
        _save_shards(folder, tensors, shards)
    texts = {
        "config.json": json.dumps(config or CONFIG),
        "generation_config.json": "{}",
        "modeling_small.py": "of the base",
        "package/__init__.py": "inside",
        "package/notes.md": "",
        "tokenizer.json": '"of the base"',
        "train.jsonl": "{}",
        "README.md": "",
        ".git/config.py": "",
        "checkpoint-epoch-0/config.json": "{}",
        "checkpoint-epoch-0/modeling_small.py": "of another checkpoint",
    }
    write_texts(folder, texts)
    return folder


def write_texts(folder: Path, texts: dict[str, str]) -> None:
    for name, text in texts.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(text, encoding="utf-8")


def _save_shards(folder: Path, tensors: dict[str, torch.Tensor], shards: int) -> None:
    places = {}
    for number in range(shards):
        file = f"model-{number + 1:05d}-of-{shards:05d}.safetensors"
        part = {name: tensors[name] for name in sorted(tensors)[number::shards]}
        save_file(part, folder / file, metadata={"format": "pt"})
        places.update(dict.fromkeys(part, file))
    size = sum(tensor.nbytes for tensor in tensors.values())
    index = {"metadata": {"total_size": size, "total_parameters": 5}, "weight_map": places}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index), encoding="utf-8")


def record_of(base: str, **changes: Any) -> AdapterRecord:
    fields: dict[str, Any] = {
        "kind": "adapter",
        "family": "moss_tts_local",
        "base_model": base,
        "base_dtype": "float32",
        "method": "lora",
        "rank": 4,
        "alpha": 8,
        "targets": ("backbone",),
        "steps": 120,
        "epoch": 2,
        "settings": {"schedule": "staged"},
        "versions": {"peft": "0"},
    }
    return AdapterRecord(**{**fields, **changes})


def save_random_adapter(
    folder: Path, model: nn.Module, base: Path | str, record: dict[str, Any] | None = None, **options: Any
) -> dict[str, torch.Tensor]:
    """Has PEFT save an adapter with random values for ``model``, as the layer would leave it.

    Returns:
        The weights that PEFT's own ``merge_and_unload`` makes of it in float32.
    """
    config = LoraConfig(**{"r": 4, "lora_alpha": 8, "target_modules": list(LINEAR), **options})
    with torch.random.fork_rng(), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        torch.manual_seed(1)
        adapted: Any = get_peft_model(copy.deepcopy(model).float(), config)
        with torch.no_grad():
            for parameter in adapted.parameters():
                if parameter.requires_grad:
                    parameter.add_(torch.randn(parameter.shape) * 0.1)
        adapted.save_pretrained(folder)
        merged = adapted.merge_and_unload().state_dict()
    record_of(str(base), **(record or {})).write(folder)
    write_texts(folder, {"tokenizer.json": '"of the adapter"', "finetune_args.json": "{}", "README.md": ""})
    return {name: tensor.clone() for name, tensor in merged.items()}


def edit_config(adapter: Path, **changes: Any) -> None:
    """Changes ``adapter_config.json``."""
    path = adapter / "adapter_config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **changes}), encoding="utf-8")


def tensor_bytes(folder: Path) -> dict[str, bytes]:
    """Everything in ``folder``, file by file."""
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def largest_difference(found: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> float:
    """Over all tensors, relative to each one's norm."""
    assert found.keys() == expected.keys()
    return max(
        ((found[name].double() - expected[name].double()).norm() / expected[name].double().norm()).item()
        for name in expected
    )


@pytest.fixture(name="base")
def base_fixture(tmp_path: Path) -> Path:
    """A float32 base in one file."""
    return save_base(tmp_path / "base", small_model())


@pytest.fixture(name="adapter")
def adapter_fixture(tmp_path: Path, base: Path) -> Path:
    """A plain LoRA adapter of it."""
    save_random_adapter(tmp_path / "adapter", small_model(), base)
    return tmp_path / "adapter"
