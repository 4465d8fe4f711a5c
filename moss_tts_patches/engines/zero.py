"""DeepSpeed ZeRO: optimizer states and gradients (stage 2), and weights too (stage 3), split between the processes."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any, ClassVar

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from ..errors import EnvironmentProblem, SettingsError
from ..loss.module_schedule import ByModule, keep, recompute
from .engine import TrainingEngine, largest_of_all

# Both are Adam or AdamW, by an attribute.
_OPTIMIZER_CLASSES = ("DeepSpeedCPUAdam", "FusedAdam")


def reenter(function: Callable[..., Any], *inputs: Any, **options: Any) -> Any:
    """Calls ``function`` now and again in a backward of its own, for weights that are used once.

    ZeRO-3 gathers a module's weights when the backward reaches it. Within one graph torch's recomputation would run
    after that and let go of them again, and frozen weights, of which torch keeps no copy, would be empty. An input that
    wants a gradient is added, for a first layer behind frozen embeddings.
    """
    anchor = torch.zeros((), requires_grad=True)
    return checkpoint(lambda _, *values: function(*values, **options), anchor, *inputs, use_reentrant=True)


class Zero(TrainingEngine):
    """See :class:`.engine.TrainingEngine`.

    DeepSpeed runs the backward, the clipping and the step by itself. It is given torch's AdamW on purpose: an optimizer
    that accelerate does not know becomes Adam with L2 regularisation under offload, without a word.
    """

    title: ClassVar[str] = "DeepSpeed"
    autograd_reason: ClassVar[str | None] = (
        "DeepSpeed collects the gradients that autograd delivers; the other schedules deliver theirs during the forward"
    )
    device_gradients_reason: ClassVar[str | None] = "DeepSpeed keeps gradients itself, split between the processes"
    owns_optimizer: ClassVar[bool] = True
    optimizer_reason: ClassVar[str] = "DeepSpeed splits the states and keeps float32 weights beside 16-bit ones"
    can_try_longest: ClassVar[bool] = False  # a backward may be followed by a step at once

    def __init__(self, accelerator: Any) -> None:
        super().__init__(accelerator)
        self.stage = int(self._plugin.deepspeed_config["zero_optimization"]["stage"])
        self.title = f"DeepSpeed ZeRO-{self.stage}"  # type: ignore[misc]
        # A weight of stage 3 is split while it is loaded, and small where it is never gathered.
        self._loads_whole = self._adapters = False
        self.parks_embeddings = self.stage != 3  # type: ignore[misc]

    @property
    def _plugin(self) -> Any:
        return self.accelerator.state.deepspeed_plugin

    @property
    def several(self) -> bool:
        return True  # gradients are collected into buckets even where there is one process

    def check(self, arguments: Any, method: str) -> None:
        super().check(arguments, method)
        self._adapters = method != "full"
        if method == "qlora":
            raise EnvironmentProblem(
                f"engine {self.title} with MOSS_LOWMEM_METHOD=qlora: DeepSpeed cannot split weights in 4 bit. Expected "
                "DDP (ACCELERATE_CONFIG_FILE=lowmem:ddp), or MOSS_LOWMEM_METHOD=lora."
            )
        if self.stage == 3 and not self._plugin.zero3_save_16bit_model:
            raise EnvironmentProblem(
                f"engine {self.title} with zero3_save_16bit_model: false: the run would end at its first checkpoint, "
                "which has whole weights. Expected true, as in upstream's configs and in lowmem:zero3."
            )

        clipping = self._plugin.deepspeed_config.get("gradient_clipping")
        if isinstance(clipping, (int, float)) and clipping != arguments.max_grad_norm:
            raise SettingsError(
                f"engine {self.title} with gradient_clipping: {clipping}: DeepSpeed clips as the accelerate config "
                f"says, while --max-grad-norm is {arguments.max_grad_norm}. Set both to the same number, or leave "
                "it out of the config."
            )

    def settle_clipping(self, arguments: Any, *, corrected: bool) -> str | None:
        # Source: accelerate ``_prepare_deepspeed`` fills "auto" with 1.0, whatever the trainer asks for.
        config = self._plugin.deepspeed_config
        if not corrected or config.get("gradient_clipping") != "auto" or arguments.max_grad_norm == 1.0:
            return None
        config["gradient_clipping"] = float(arguments.max_grad_norm)
        return f"DeepSpeed clips at --max-grad-norm {arguments.max_grad_norm} (upstream: at 1.0, whatever it says)"

    def steps_as(self, handed_over: Any, optimizer: Any) -> bool:
        # DeepSpeed's own optimizer stands around the one that does the arithmetic: ours, or its AdamW for the CPU.
        steps = getattr(optimizer, "optimizer", optimizer)
        if steps is handed_over:
            return True
        return type(steps).__name__ in _OPTIMIZER_CLASSES and bool(getattr(steps, "adam_w_mode", False))

    def settle_loading(self, in_parts: bool) -> None:
        self._loads_whole = self.stage == 3 and not in_parts
        if self._loads_whole:
            self._plugin.zero3_init_flag = False

    @contextmanager
    def building(self) -> Iterator[None]:
        from transformers.integrations import deepspeed as integration

        # transformers takes weights apart as long as it knows of a config with stage 3; accelerate holds the config.
        reference = integration._hf_deepspeed_config_weak_ref
        integration.unset_hf_deepspeed_config()
        try:
            yield
        finally:
            config = reference() if reference is not None else None
            if config is not None:
                integration.set_hf_deepspeed_config(config)

    def loading(self) -> AbstractContextManager[object]:
        return self.building() if self._loads_whole else nullcontext()

    @property
    def by_module(self) -> ByModule | None:
        if self.stage != 3:
            return None
        return ByModule(
            lambda frames: largest_of_all(frames, self.accelerator.device), keep if self._adapters else recompute
        )

    @property
    def recompute(self) -> Callable[..., Any]:
        return reenter if self.stage == 3 and self._adapters else recompute

    def complete(self, weights: dict[str, torch.Tensor], model: nn.Module) -> dict[str, torch.Tensor]:
        """Makes tied weights one tensor again: DeepSpeed copies each of them, and each would be saved."""
        if not weights:  # stage 3 gathers on the main process alone
            return weights
        first: dict[int, str] = {}
        for name, parameter in model.named_parameters(remove_duplicate=False):
            original = first.setdefault(id(parameter), name)
            if original != name and name in weights and original in weights:
                weights[name] = weights[original]
        return weights

    def gathered(self, parameters: Iterable[nn.Parameter]) -> AbstractContextManager[object]:
        if self.stage != 3:
            return nullcontext()
        import deepspeed

        return deepspeed.zero.GatheredParameters(list(parameters), modifier_rank=None)
