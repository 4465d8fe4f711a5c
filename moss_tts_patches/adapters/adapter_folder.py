"""An adapter folder in PEFT's form, read without PEFT."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from ..errors import StateError
from .safetensors_shards import TensorFile

CONFIG, WEIGHTS = "adapter_config.json", "adapter_model.safetensors"
#: What PEFT puts before every module name in an adapter file.
FILE_PREFIX = "base_model.model."
SHOWN = 5  # of each kind of difference


class AdapterFolder:
    """A LoRA adapter, of which config and header were read.

    Attributes:
        folder: where it stands.
        config: content of ``adapter_config.json``.
        file: its tensors, read when they are needed.
        targets: full names of the modules with an adapter.
        embeddings: those of them that are embeddings.
        replaced: tensors that were trained as a whole: name in the base -> name in this file.
    """

    def __init__(self, folder: Path) -> None:
        """Reads config and header.

        Raises:
            StateError: it is no LoRA adapter, or not whole.
        """
        self.folder = folder
        self.config = _read_config(folder)
        self.file = TensorFile.open(_weights(folder))
        if not self.file.tensors:
            raise StateError(
                f"adapter {folder}: {WEIGHTS} holds no tensor. Something renamed the model's parts while it was saved; "
                "what was trained is not here. Use an earlier checkpoint."
            )
        self.targets = frozenset(module_of(name) for name in self.file.tensors if is_lora(name))
        self.embeddings = frozenset(module_of(name) for name in self.file.tensors if ".lora_embedding_" in name)
        self.replaced = {base_name(name): name for name in self.file.tensors if not is_lora(name)}

    @property
    def uses_dora(self) -> bool:
        return bool(self.config.get("use_dora"))

    def check_pairs(self) -> None:
        """Returns if every adapter has all of its parts, none of them empty; needs no base.

        Raises:
            StateError: one has not.
        """
        parts: dict[str, set[str]] = {}
        for name in filter(is_lora, self.file.tensors):
            part = name.rpartition(".lora_")[2].removesuffix(".weight")
            parts.setdefault(module_of(name), set()).add(part.removeprefix("embedding_"))
        needed = {"A", "B"} | ({"magnitude_vector"} if self.uses_dora else set())
        halves = [module for module, found in parts.items() if not needed <= found]
        empty = [name for name, entry in self.file.tensors.items() if not entry.bytes]
        if halves or empty:
            raise StateError(
                f"adapter {self.folder}: {len(halves)} modules lack a part of their adapter and {len(empty)} tensors "
                f"are empty: {some_of(halves + empty)}. Copy or save it again."
            )


def _read_config(folder: Path) -> dict[str, Any]:
    path = folder / CONFIG
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        if (folder / "config.json").is_file():
            raise StateError(
                f"adapter {folder}: found a whole checkpoint, expected an adapter's folder as PEFT saves it. There is "
                "nothing to merge: use it as it is."
            ) from None
        raise StateError(f"adapter {path}: {error.strerror}. Expected a folder as PEFT saves it.") from None
    except ValueError as error:
        raise StateError(f"adapter {path}: not JSON ({error}). Copy the folder again.") from None
    kind = content.get("peft_type") if isinstance(content, dict) else None
    if kind != "LORA":
        raise StateError(f"adapter {path}: peft_type is {kind!r}, expected 'LORA'.")
    return content


def _weights(folder: Path) -> Path:
    """Returns the file of the weights, which has to be there."""
    path = folder / WEIGHTS
    if not path.is_file():
        beside = "adapter_model.bin, which may run code when it is read" if any(folder.glob("*.bin")) else "none"
        raise StateError(f"adapter {folder}: found {beside}, expected {WEIGHTS}. Save it with PEFT as safetensors.")
    return path


def module_of(name: str) -> str:
    """``base_model.model.a.b.lora_A.weight`` -> ``a.b``."""
    return name.removeprefix(FILE_PREFIX).partition(".lora_")[0]


def base_name(name: str) -> str:
    """Name of a whole tensor in the base; PEFT writes targeted embeddings a second time, as ``base_layer``."""
    return name.removeprefix(FILE_PREFIX).replace(".base_layer.", ".")


def is_lora(name: str) -> bool:
    return ".lora_" in name


def some_of(names: Sequence[str]) -> str:
    more = f" and {len(names) - SHOWN} more" if len(names) > SHOWN else ""
    return ", ".join(names[:SHOWN]) + more
