"""Puts adapters into a model, or starts from given ones, and hands them over in PEFT's own form."""

from __future__ import annotations

import warnings
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from peft import LoraConfig, get_peft_model_state_dict, inject_adapter_in_model, set_peft_model_state_dict
from peft.tuners.tuners_utils import BaseTunerLayer
from torch import nn

from ..errors import SeamError, SettingsError
from .adapter_folder import FILE_PREFIX
from .peft_merge import strange_options
from .plan import AdapterPlan
from .targets import fully_trained_modules, is_norm, resolve_targets

ADAPTER_NAME = "default"


@dataclass(frozen=True)
class Adapters:
    """The adapters of a model in training.

    Attributes:
        model: upstream's class, its target modules wrapped by PEFT.
        plan: what was asked for.
        config: PEFT's, as it will stand in ``adapter_config.json``.
        targets: full names of the adapted modules.
        fully_trained: full names of modules whose own weights are trained too.
    """

    model: nn.Module
    plan: AdapterPlan
    config: LoraConfig
    targets: tuple[str, ...]
    fully_trained: tuple[str, ...]

    def named_parameters(self) -> Iterator[tuple[str, nn.Parameter]]:
        """Yields everything that is trained, adapters and fully trained weights."""
        return ((name, p) for name, p in self.model.named_parameters() if p.requires_grad)

    def state_dict(self) -> dict[str, torch.Tensor]:
        """Returns what belongs into ``adapter_model.safetensors``, by PEFT's names for it.

        Raises:
            SeamError: it is not one tensor for every trained parameter: something renames the model's parts.
        """
        tensors = {
            FILE_PREFIX + name: tensor
            for name, tensor in get_peft_model_state_dict(
                self.model, adapter_name=ADAPTER_NAME, save_embedding_layers=False
            ).items()
        }
        own = dict(self.model.named_parameters())
        for module in self.fully_trained:
            weights = {name: p for name, p in own.items() if name.startswith(module + ".") and p.requires_grad}
            tensors.update((FILE_PREFIX + name, parameter.detach()) for name, parameter in weights.items())
        trained = sum(1 for _ in self.named_parameters())
        if len(tensors) != trained or any(not tensor.numel() for tensor in tensors.values()):
            raise SeamError(
                f"adapter: {len(tensors)} tensors to save for {trained} trained parameters. Something wraps the "
                "model's layers and renames them; an adapter saved like this would be empty where it counts. Nothing "
                "was written. Unset what wraps them, or report it."
            )
        return tensors

    def scale(self) -> dict[str, Any]:
        """Returns, as JSON knows it, what decides how much the adapters' tensors count; their shapes do not show it."""
        config = self.config
        return {
            "lora_alpha": config.lora_alpha,
            "alpha_pattern": dict(config.alpha_pattern or {}),
            "use_rslora": config.use_rslora,
        }

    def describe(self) -> str:
        """One ``key=value`` line for the log."""
        trained = sum(parameter.numel() for _, parameter in self.named_parameters())
        return (
            f"method={self.plan.method} rank={self.config.r} alpha={self.config.lora_alpha} "
            f"dropout={self.config.lora_dropout} adapted_modules={len(self.targets)} "
            f"fully_trained_modules={len(self.fully_trained)} trained_parameters={trained:,}"
            + (f" start={self.plan.start}" if self.plan.start is not None else "")
        )


def inject(
    model: nn.Module,
    plan: AdapterPlan,
    groups: Mapping[str, str],
    *,
    base_model: str,
    seed: int,
) -> Adapters:
    """Freezes ``model`` and gives its target modules float32 adapters.

    Args:
        model: changed in place; its class, its names of frozen weights' owners and its forward stay upstream's.
        plan: what to make.
        groups: the family's target groups.
        base_model: path or hub id that the adapter files will name.
        seed: of the adapters' initial values. No global generator is touched, so records keep their order.

    Raises:
        SettingsError: a target does not exist or cannot be adapted, or ``plan.start`` does not fit.
    """
    start = _Start.read(plan) if plan.start is not None else None
    targets = resolve_targets(model, plan.targets, groups) if plan.targets or start is None else start.modules(model)
    fully_trained = fully_trained_modules(
        model, plan.also_train, groups, targets, variable="MOSS_LOWMEM_LORA_ALSO_TRAIN"
    )
    fully_trained = _with_what_peft_cannot_tell_apart(model, fully_trained)
    options = {**plan.options, **(start.options if start is not None else {})}
    config = LoraConfig(
        **options,
        target_modules=list(targets),
        # A task type would have PEFT expect that task's forward, which none of these models has.
        task_type=None,
        base_model_name_or_path=base_model,
    )
    with torch.random.fork_rng(devices=_devices(model)), warnings.catch_warnings():
        torch.manual_seed(seed)
        warnings.filterwarnings("ignore", message=".*tie_word_embeddings.*")
        try:
            inject_adapter_in_model(config, model, adapter_name=ADAPTER_NAME)
        except (ValueError, NotImplementedError) as error:
            raise SettingsError(f"adapter: PEFT refuses these options ({error}). Change MOSS_LOWMEM_LORA_*.") from error
    adapted = [name for name, module in model.named_modules() if isinstance(module, BaseTunerLayer)]
    missing = set(targets) - set(adapted)
    if missing and not config.exclude_modules:
        raise SettingsError(f"adapter: PEFT left {len(missing)} targets without an adapter, {min(missing)} among them.")
    _train_in_float32(model, fully_trained)
    adapters = Adapters(model, plan, config, tuple(adapted), tuple(fully_trained))
    if start is not None:
        start.load_into(adapters)
    return adapters


def _train_in_float32(model: nn.Module, fully_trained: list[str]) -> None:
    """Adapters are float32 whatever the base is; fully trained weights only where the base is fp16.

    A loss scaler cannot unscale fp16 gradients, and 8-bit AdamW rounds bf16 weights stochastically.
    """
    for module in model.modules():
        if isinstance(module, BaseTunerLayer):
            for parameter in module.parameters():
                if parameter.requires_grad and parameter.dtype != torch.float32:
                    parameter.data = parameter.data.float()
    for name in fully_trained:
        for parameter in model.get_submodule(name).parameters(recurse=False):
            parameter.requires_grad_(True)
            if parameter.dtype == torch.float16:
                parameter.data = parameter.data.float()


def _with_what_peft_cannot_tell_apart(model: nn.Module, fully_trained: list[str]) -> list[str]:
    """PEFT finds ``modules_to_save`` by the end of their names: a norm that fits as well is trained and saved too.

    moss_tts_local's ``layer_norm_before_lm_heads.1`` ends like ``lm_heads.1``.

    Raises:
        SettingsError: something larger than a norm fits.
    """
    wanted = set(fully_trained)
    also = [n for n, _ in model.named_modules() if n not in wanted and any(n.endswith(name) for name in wanted)]
    for name in also:
        if not is_norm(model.get_submodule(name)):
            raise SettingsError(
                f"MOSS_LOWMEM_LORA_ALSO_TRAIN: PEFT's file format cannot tell {name} from what is to be trained."
            )
    return [name for name, _ in model.named_modules() if name in wanted or name in also]


def _devices(model: nn.Module) -> list[int]:
    return sorted({p.device.index or 0 for p in model.parameters() if p.device.type == "cuda"})


@dataclass(frozen=True)
class _Start:
    """An adapter trained elsewhere that training goes on from."""

    folder: Path
    options: dict[str, Any]
    tensors: dict[str, torch.Tensor]

    @classmethod
    def read(cls, plan: AdapterPlan) -> _Start:
        from safetensors.torch import load_file

        folder = plan.start
        assert folder is not None
        file = folder / "adapter_model.safetensors"
        if not (folder / "adapter_config.json").is_file() or not file.is_file():
            raise SettingsError(
                f"MOSS_LOWMEM_LORA_INIT={folder}: expected a folder with adapter_config.json and "
                "adapter_model.safetensors, as PEFT saves it."
            )
        try:
            config = LoraConfig.from_pretrained(str(folder))
            tensors = load_file(file)
        except Exception as error:  # json, safetensors and PEFT each raise their own kinds
            raise SettingsError(f"MOSS_LOWMEM_LORA_INIT={folder}: it cannot be read ({error}).") from error
        if not isinstance(config, LoraConfig) or config.modules_to_save:
            raise SettingsError(
                f"MOSS_LOWMEM_LORA_INIT={folder}: a {config.peft_type} adapter with fully trained modules "
                f"{config.modules_to_save}; expected a LoRA adapter and nothing else."
            )
        if strange := strange_options(config):
            raise SettingsError(
                f"MOSS_LOWMEM_LORA_INIT={folder}: {'; '.join(strange)} cannot be carried over, and without it the "
                "adapter means something else. Expected a plain LoRA adapter, trained on the base as it is on disk."
            )
        taken = ("r", "lora_alpha", "use_rslora", "use_dora", "rank_pattern", "alpha_pattern", "lora_bias")
        options = {name: getattr(config, name) for name in taken}
        for name in sorted(plan.start_fixes & set(taken)):
            if plan.options[name] != options[name]:
                raise SettingsError(
                    f"MOSS_LOWMEM_LORA_INIT={folder}: it has {name}={options[name]}, and {plan.options[name]} is set. "
                    "Leave the setting out to take the adapter's."
                )
        return cls(folder, options, tensors)

    def modules(self, model: nn.Module) -> list[str]:
        """Returns the modules of ``model`` that the adapter belongs to."""
        known = dict(model.named_modules())
        found = {name.removeprefix(FILE_PREFIX).partition(".lora_")[0] for name in self.tensors}
        strangers = sorted(found - known.keys())
        if strangers:
            raise SettingsError(
                f"MOSS_LOWMEM_LORA_INIT={self.folder}: {len(strangers)} of its modules are not in this model, "
                f"{strangers[0]} among them. It was trained on another class."
            )
        return [name for name in known if name in found]

    def load_into(self, adapters: Adapters) -> None:
        """Copies the values; every tensor must find its place."""
        own = {name: tensor.shape for name, tensor in adapters.state_dict().items()}
        wrong = [name for name, tensor in self.tensors.items() if own.get(name) != tensor.shape]
        if wrong:
            found = own.get(wrong[0])
            raise SettingsError(
                f"MOSS_LOWMEM_LORA_INIT={self.folder}: {len(wrong)} of its tensors do not fit this model, {wrong[0]} "
                f"{tuple(self.tensors[wrong[0]].shape)} among them (expected {tuple(found) if found else 'none'})."
            )
        bare = {name.removeprefix(FILE_PREFIX): tensor for name, tensor in self.tensors.items()}
        set_peft_model_state_dict(adapters.model, bare, adapter_name=ADAPTER_NAME)
