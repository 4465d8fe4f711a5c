"""Trained weights and optimizer states of a resume point: written and read a few megabytes at a time.

Frozen and parked weights equal the base and are not saved. Everything is by parameter name, and has to match in both
directions, dtype and shape included, before anything is changed.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file
from torch import nn

from ...adapters.safetensors_shards import TensorEntry, TensorFile, row_blocks, write_tensors
from ...errors import StateError
from ...optim.saved_state import SHOWN
from ...optim.streamed import StreamedOptimizer
from .point import STATES, WEIGHTS

# Bytes that leave the device at once: 3 ms on PCIe 4.0 x16 from pageable memory, nothing beside the host's RAM.
PIECE_BYTES = 2**25


def trained_parameters(model: nn.Module) -> dict[str, nn.Parameter]:
    """Returns what a point holds of the model, by name; a tied weight once."""
    return {name: parameter for name, parameter in model.named_parameters() if parameter.requires_grad}


def write_weights(folder: Path, parameters: dict[str, nn.Parameter]) -> None:
    """Writes the weights in their own dtype."""
    entries = {name: TensorEntry(p.dtype, tuple(p.shape)) for name, p in parameters.items()}
    write_tensors(folder / WEIGHTS, entries, lambda name: _pieces(parameters[name].detach()), {}, lambda count: None)


def write_states(folder: Path, optimizer: StreamedOptimizer) -> None:
    """Writes the optimizer's states, 8-bit ones as 8 bits; its scalars are :func:`optimizer_scalars`."""
    stepped = {name: p for p, name in optimizer.names.items() if optimizer.steps.get(p, 0)}
    entries = {
        f"{name}/{state}": TensorEntry(spec.dtype, (spec.entries(p.numel()),))
        for name, p in stepped.items()
        for state, spec in optimizer.layout_of(p).items()
    }
    last: tuple[str, dict[str, torch.Tensor]] = ("", {})

    def parts(key: str) -> Iterator[torch.Tensor]:
        nonlocal last
        name, _, state = key.rpartition("/")
        if last[0] != name:  # a host store puts a large parameter's pieces together anew at each reading
            last = (name, optimizer.states.read(stepped[name]))
        return _pieces(last[1][state])

    write_tensors(folder / STATES, entries, parts, {}, lambda count: None)


def _pieces(tensor: torch.Tensor) -> Iterator[torch.Tensor]:
    flat = tensor.reshape(-1)
    for piece in flat.split(max(1, PIECE_BYTES // flat.element_size())):
        yield piece.cpu()


def optimizer_scalars(optimizer: StreamedOptimizer) -> dict[str, Any]:
    """Returns what the optimizer's state has beside tensors, as JSON values."""
    groups = [{**group, "params": [optimizer.names[p] for p in group["params"]]} for group in optimizer.param_groups]
    steps = {name: optimizer.steps.get(p, 0) for p, name in optimizer.names.items() if p.requires_grad}
    return {"class": type(optimizer).__name__, "seed": optimizer.seed, "param_groups": groups, "steps": steps}


def read_weights(folder: Path, parameters: dict[str, nn.Parameter]) -> None:
    """Puts the saved weights in place; :func:`check_weights` has found them to fit."""
    file = TensorFile.open(folder / WEIGHTS)
    with torch.no_grad():
        for name, parameter in parameters.items():
            for first, last in row_blocks(tuple(parameter.shape)):
                place = parameter.data[first:last] if parameter.dim() else parameter.data
                place.copy_(file.rows(name, first, last))


def check_weights(folder: Path, parameters: dict[str, nn.Parameter]) -> None:
    """Compares the saved weights with those that are trained here.

    Raises:
        StateError: they are not the same ones; lists ten of each kind of difference.
    """
    file = TensorFile.open(folder / WEIGHTS)
    differences = {
        "missing in the point": [name for name in parameters if name not in file.tensors],
        "not trained in this run": [name for name in file.tensors if name not in parameters],
        "of another shape or dtype": [
            f"{name} (saved {entry.shape} {entry.dtype}, expected {tuple(parameters[name].shape)} "
            f"{parameters[name].dtype})"
            for name, entry in file.tensors.items()
            if name in parameters
            and (entry.shape, entry.dtype) != (tuple(parameters[name].shape), parameters[name].dtype)
        ],
    }
    found = [
        f"{len(names)} {kind}: {', '.join(names[:SHOWN])}{', …' if len(names) > SHOWN else ''}"
        for kind, names in differences.items()
        if names
    ]
    if found:
        raise StateError(
            f"resume point {folder}: other weights are trained here. {'; '.join(found)}. Nothing was loaded. Use the "
            "model, MOSS_LOWMEM_METHOD and MOSS_LOWMEM_LORA_* that it was saved with, or set MOSS_LOWMEM_RESUME=off."
        )


def read_states(folder: Path, optimizer: StreamedOptimizer, scalars: dict[str, Any]) -> None:
    """Puts the saved optimizer states in place.

    Raises:
        StateError: they do not belong to this optimizer.
    """
    if scalars["class"] != type(optimizer).__name__:
        raise StateError(
            f"resume point {folder}: its states are {scalars['class']}'s, and this run uses "
            f"{type(optimizer).__name__}. Set MOSS_LOWMEM_OPTIMIZER as it was, or MOSS_LOWMEM_RESUME=off to start anew."
        )
    TensorFile.open(folder / STATES)
    state: dict[str, dict[str, Any]] = {name: {"step": step} for name, step in scalars["steps"].items()}
    for key, tensor in load_file(folder / STATES).items():  # mapped, not read: copied into the store one by one
        name, _, kind = key.rpartition("/")
        state.setdefault(name, {})[kind] = tensor
    groups = [{**group, "betas": tuple(group["betas"])} for group in scalars["param_groups"]]
    optimizer.load_state_dict({"state": state, "param_groups": groups, "seed": scalars["seed"]})
