"""Writes a training's adapter as a standard PEFT folder, in the place of upstream's whole model."""

from __future__ import annotations

from pathlib import Path

import torch
from safetensors import safe_open
from safetensors.torch import save_file

from ..errors import StateError
from .adapter_folder import WEIGHTS
from .injection import Adapters
from .record import AdapterRecord


def save_adapter(
    adapters: Adapters, folder: Path, record: AdapterRecord, tensors: dict[str, torch.Tensor] | None = None
) -> None:
    """Writes ``adapter_config.json``, ``adapter_model.safetensors`` and ``lowmem.json`` into ``folder``.

    Args:
        adapters: of the training.
        folder: may exist.
        record: for ``lowmem.json``.
        tensors: of :meth:`.injection.Adapters.state_dict`, where they have been gathered already.

    Raises:
        StateError: what was written is not what was trained.
        SeamError: see :meth:`.injection.Adapters.state_dict`.
    """
    if tensors is None:
        tensors = adapters.state_dict()
    tensors = {name: tensor.detach().to("cpu").contiguous() for name, tensor in tensors.items()}
    folder.mkdir(parents=True, exist_ok=True)
    save_file(tensors, folder / WEIGHTS, metadata={"format": "pt"})
    _write_config(adapters, folder)
    _check_written(folder / WEIGHTS, tensors)
    record.write(folder)


def _write_config(adapters: Adapters, folder: Path) -> None:
    config, model_class = adapters.config, type(adapters.model)
    before = config.inference_mode, config.modules_to_save
    config.inference_mode, config.modules_to_save = True, list(adapters.fully_trained) or None
    try:
        config.save_pretrained(
            str(folder),
            # What AutoPeftModel needs where there is no task type.
            auto_mapping_dict={"base_model_class": model_class.__name__, "parent_library": model_class.__module__},
        )
    finally:
        config.inference_mode, config.modules_to_save = before


def _check_written(path: Path, tensors: dict[str, torch.Tensor]) -> None:
    """A PEFT save can be 40 bytes long and say nothing; ours is read again."""
    with safe_open(path, framework="pt") as file:
        found = {name: tuple(file.get_slice(name).get_shape()) for name in file.keys()}  # noqa: SIM118  (no dict)
    expected = {name: tuple(tensor.shape) for name, tensor in tensors.items()}
    if found != expected or not found:
        raise StateError(
            f"adapter {path}: {len(found)} tensors on disk, expected {len(expected)}. The checkpoint is not whole; "
            "check the disk and save again."
        )
