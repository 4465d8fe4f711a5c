"""PEFT's own arithmetic, applied to a few rows of one module at a time.

How rank, alpha, their patterns, rank stabilisation and DoRA turn into a change of the weight is PEFT's knowledge and
stays there: a module is rebuilt without its model, PEFT injects and merges. What makes that possible in little memory
is that the rows of a linear layer do not know of each other, in LoRA and in DoRA (whose norms are by row).
"""

from __future__ import annotations

import copy
import dataclasses
import re
import warnings
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from peft import LoraConfig, get_peft_model, set_peft_model_state_dict
from peft.utils import get_peft_model_state_dict
from torch import nn

from ..errors import NumericsError, StateError
from .adapter_folder import CONFIG, AdapterFolder, base_name, is_lora, module_of, some_of
from .safetensors_shards import TensorEntry, row_blocks

# Options whose effect is in the tensors, in the merge that PEFT does here, or in training alone. Any other option with
# a value of its own means something that a merge module by module would miss.
_UNDERSTOOD = frozenset(
    [
        *("peft_type", "auto_mapping", "peft_version", "base_model_name_or_path", "revision", "task_type"),
        *("r", "lora_alpha", "rank_pattern", "alpha_pattern", "use_rslora", "use_dora", "lora_bias"),
        *("target_modules", "exclude_modules", "layers_to_transform", "layers_pattern", "modules_to_save"),
        *("lora_dropout", "fan_in_fan_out", "inference_mode", "runtime_config", "megatron_core", "qalora_group_size"),
        *("init_lora_weights", "eva_config", "corda_config", "lora_ga_config", "loftq_config"),
    ]
)
# Beginnings that leave the base as it is on disk; the others (pissa, olora, corda, loftq) move a part of it into the
# adapter, which then belongs to a base that nobody has.
_INITIALISATIONS = (True, False, "gaussian", "orthogonal", "eva")


class PeftMerge:
    """Merges the modules of one adapter.

    Attributes:
        adapter: whose.
        config: PEFT's own reading of it.
    """

    def __init__(self, adapter: AdapterFolder) -> None:
        """Has PEFT read the config.

        Raises:
            StateError: it cannot, or the adapter does something that cannot be merged module by module.
        """
        self.adapter = adapter
        self.config = _peft_config(adapter.folder)
        self._cached: tuple[str, dict[str, torch.Tensor]] = ("", {})

    def check(self, base: Mapping[str, TensorEntry], tied: Sequence[str] = ()) -> None:
        """Returns if this adapter can be merged into a model with the tensors ``base``.

        PEFT itself says which tensors, of which shapes, the config means on such a model; each of them has to be here,
        and nothing else.

        Args:
            base: name, dtype and shape of every tensor of the base's files.
            tied: regular expressions over whole names of modules that share their weight with another one.

        Raises:
            StateError: it cannot; the message names why.
        """
        touched = sorted(self.adapter.targets | {name.rpartition(".")[0] for name in self.adapter.replaced})
        shared = [module for module in touched if any(re.fullmatch(pattern, module) for pattern in tied)]
        if shared:
            raise StateError(
                f"adapter {self.adapter.folder}: {some_of(shared)} shares its weight with another module of this "
                "model, which merging would change too. Train without it."
            )
        differences = {"not in the base, or tied there": self._absent(base)}
        if not any(differences.values()):
            differences = self._differences(base)
        told = [f"{kind} ({len(names)}): {some_of(names)}" for kind, names in differences.items() if names]
        if told:
            raise self._stranger("; ".join(told))

    def _absent(self, base: Mapping[str, TensorEntry]) -> list[str]:
        """Names the adapted modules and whole tensors that the base's files do not have; tied heads are not stored."""
        modules = [module for module in sorted(self.adapter.targets) if f"{module}.weight" not in base]
        return modules + [name for name in self.adapter.replaced if name not in base]

    def _differences(self, base: Mapping[str, TensorEntry]) -> dict[str, list[str]]:
        """Compares what is here with what PEFT expects, by kind of difference."""
        found = {name: entry.shape for name, entry in self.adapter.file.tensors.items()}
        expected = self._expected(base)
        wanted = {name: expected.get(name, base[own].shape if own in base else None) for name, own in _own_names(found)}
        targets = sorted(self.adapter.targets)
        return {
            "missing in the adapter": [name for name in expected if name not in found],
            "unexpected": [n for n, shape in wanted.items() if shape is None or (is_lora(n) and n not in expected)],
            "of another shape": [
                f"{name} (found {found[name]}, expected {shape})"
                for name, shape in wanted.items()
                if shape not in (None, found[name])
            ],
            "no floating-point weight in the base": [
                module for module in targets if not base[f"{module}.weight"].dtype.is_floating_point
            ],
            "a lora_bias without a bias in the base": [
                module for module in targets if self.config.lora_bias and f"{module}.bias" not in base
            ],
        }

    def _stranger(self, what: str) -> StateError:
        return StateError(
            f"adapter {self.adapter.folder}: it does not belong to this base. {what}. Pass the base that it was "
            "trained on with --base."
        )

    def changes(self, name: str) -> bool:
        """Whether an adapter changes the base's tensor of this name."""
        module, _, kind = name.rpartition(".")
        return module in self.adapter.targets and (kind == "weight" or (kind == "bias" and self.config.lora_bias))

    def blocks(self, module: str, shape: tuple[int, ...]) -> Iterator[tuple[int, int]]:
        """Returns the ranges of rows in which one of :attr:`AdapterFolder.targets` can be merged.

        Args:
            module: its name.
            shape: of its weight.
        """
        if self.adapter.uses_dora and module in self.adapter.embeddings:
            return iter(((0, shape[0]),))  # DoRA's norms of an embedding go over all its rows
        return row_blocks(shape)

    def merged(
        self, module: str, weight: torch.Tensor, bias: torch.Tensor | None, first: int, last: int
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Merges rows ``first`` to ``last`` of one module.

        Args:
            module: one of :attr:`AdapterFolder.targets`.
            weight: ``[last - first, in]`` of the base, any floating-point dtype.
            bias: ``[last - first]`` of the base, where it has one.

        Returns:
            Weight and bias, float32.

        Raises:
            NumericsError: the result is not finite.

        Source: PEFT, ``LoraModel.merge_and_unload``, which is what runs.
        """
        skeleton = nn.Module()
        _put(skeleton, module, _layer(weight.float(), bias, embedding=module in self.adapter.embeddings))
        config = copy.deepcopy(self.config)
        config.target_modules, config.modules_to_save = [module], None
        config.exclude_modules = config.layers_to_transform = config.layers_pattern = None
        config.init_lora_weights = True  # overwritten at once
        with _quiet_peft():
            model = get_peft_model(skeleton, config)
            loaded: Any = set_peft_model_state_dict(model, self._rows(module, first, last))
            if loaded.unexpected_keys or any("lora_" in name for name in loaded.missing_keys):
                raise StateError(
                    f"adapter {self.adapter.folder}: PEFT does not take the tensors of {module}; upgrade peft."
                )
            merge_and_unload: Any = model.merge_and_unload
            layer = merge_and_unload().get_submodule(module)
        # PEFT's own check takes a third of the time of a merge; the sum of a block is finite if its values are.
        if not bool(layer.weight.sum().isfinite()):
            raise NumericsError(
                f"adapter {self.adapter.folder}: {module} has values that are not finite once it is merged. Training "
                "diverged; use an earlier checkpoint."
            )
        new_bias = getattr(layer, "bias", None)
        return layer.weight.detach(), None if new_bias is None else new_bias.detach()

    def _rows(self, module: str, first: int, last: int) -> dict[str, torch.Tensor]:
        """Returns the module's adapter tensors, cut to the given rows of its weight."""
        if self._cached[0] != module:
            names = [name for name in self.adapter.file.tensors if is_lora(name) and module_of(name) == module]
            self._cached = module, {name: self.adapter.file.rows(name) for name in names}
        if module in self.adapter.embeddings and self.adapter.uses_dora:
            return self._cached[1]
        return {name: _cut(name, tensor, first, last) for name, tensor in self._cached[1].items()}

    def _expected(self, base: Mapping[str, TensorEntry]) -> dict[str, tuple[int, ...]]:
        """Asks PEFT, on a model without values, which tensors the config stands for."""
        try:
            with _quiet_peft():
                model = get_peft_model(
                    _meta_model(base, self.adapter.embeddings), copy.deepcopy(self.config), low_cpu_mem_usage=True
                )
                tensors = get_peft_model_state_dict(model, save_embedding_layers=False)
        except (ValueError, TypeError, AttributeError, KeyError, RuntimeError, re.error) as error:
            raise self._stranger(f"PEFT says: {error}") from error
        return {name: tuple(tensor.shape) for name, tensor in tensors.items()}


def _peft_config(folder: Path) -> LoraConfig:
    try:
        with _quiet_peft():
            config = LoraConfig.from_pretrained(str(folder))
    except (OSError, ValueError, TypeError, AttributeError, KeyError) as error:
        raise StateError(f"adapter {folder / CONFIG}: PEFT cannot read it ({error}). Copy the folder again.") from error
    _refuse_what_is_not_understood(folder / CONFIG, config)
    # Which part of the library reads the adapter, and as what, has no bearing on its arithmetic.
    config.task_type, config.inference_mode, config.fan_in_fan_out = None, False, False
    return config


def strange_options(config: LoraConfig) -> list[str]:
    """Returns what an adapter does that its tensors, its ranks and alphas do not tell, as ``name=value``."""
    plain = LoraConfig()
    strange = [
        f"{item.name}={getattr(config, item.name)!r}"
        for item in dataclasses.fields(config)
        if item.name not in _UNDERSTOOD and getattr(config, item.name) != getattr(plain, item.name)
    ]
    if config.init_lora_weights not in _INITIALISATIONS:
        strange.append(f"init_lora_weights={config.init_lora_weights!r}, which changed the base")
    return strange


def _refuse_what_is_not_understood(path: Path, config: LoraConfig) -> None:
    strange = strange_options(config)
    if strange:
        raise StateError(
            f"adapter {path}: {'; '.join(strange)} cannot be merged one module at a time. Load the model with PEFT "
            "and call merge_and_unload, in the memory that the whole model takes."
        )


def _own_names(names: Iterable[str]) -> Iterator[tuple[str, str]]:
    """Yields each tensor's name in the adapter, and in the base if it stands for a whole tensor."""
    return ((name, name if is_lora(name) else base_name(name)) for name in names)


def _cut(name: str, tensor: torch.Tensor, first: int, last: int) -> torch.Tensor:
    if name.endswith(".lora_embedding_A"):
        return tensor[:, first:last]  # [rank, rows of the embedding]
    if ".lora_B." in name or ".lora_magnitude_vector" in name:
        return tensor[first:last]
    return tensor


def _layer(weight: torch.Tensor, bias: torch.Tensor | None, *, embedding: bool) -> nn.Module:
    """A module with the given values, and nothing initialised for it."""
    rows, width = weight.shape
    layer: Any
    if embedding:
        layer = nn.Embedding(rows, width, device="meta")
    else:
        layer = nn.Linear(width, rows, bias=bias is not None, device="meta")
        if bias is not None:
            layer.bias = nn.Parameter(bias.float(), requires_grad=False)
    layer.weight = nn.Parameter(weight, requires_grad=False)
    return layer


def _meta_model(base: Mapping[str, TensorEntry], embeddings: frozenset[str]) -> nn.Module:
    """A model without values whose modules have the names and shapes of ``base``."""
    root = nn.Module()
    modules: dict[str, dict[str, torch.Tensor]] = {}
    for name, entry in base.items():
        module, _, kind = name.rpartition(".")
        modules.setdefault(module, {})[kind] = torch.empty(entry.shape, device="meta")
    for module, tensors in sorted(modules.items()):  # a parent before what is inside it
        weight = tensors.get("weight")
        if module and weight is not None and weight.ndim == 2:
            _put(root, module, _layer(weight, tensors.get("bias"), embedding=module in embeddings))
        else:
            holder = _put(root, module, nn.Module()) if module else root
            for kind, tensor in tensors.items():
                holder.register_parameter(kind, nn.Parameter(tensor, requires_grad=False))
    return root


def _put(root: nn.Module, path: str, module: nn.Module) -> nn.Module:
    """Puts ``module`` at ``path``, with bare modules on the way there."""
    *parents, last = path.split(".")
    for name in parents:
        if name not in root._modules:
            root.add_module(name, nn.Module())
        root = root.get_submodule(name)
    root.add_module(last, module)
    return module


@contextmanager
def _quiet_peft() -> Iterator[None]:
    """PEFT draws initial values, which must not move a trainer's data order, and warns of what a bare module lacks."""
    with torch.random.fork_rng(devices=[]), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield
