"""FSDP: weights, gradients and optimizer states are split between the processes, layer by layer."""

from __future__ import annotations

from typing import Any, ClassVar

from torch import nn

from ..errors import EnvironmentProblem
from ..loss.module_schedule import ByModule
from .engine import TrainingEngine, largest_of_all


class FullySharded(TrainingEngine):
    """See :class:`.engine.TrainingEngine`.

    Outside the forward of the model that it wrapped, FSDP has nothing but slices: the loss is computed inside, through
    modules. The optimizer is torch's AdamW: accelerate keeps the slices in float32 under mixed precision, so that no
    update is lost, and states are split already.
    """

    title: ClassVar[str] = "FSDP"
    autograd_reason: ClassVar[str | None] = (
        "FSDP collects the gradients that autograd delivers; the other schedules deliver theirs during the forward"
    )
    device_gradients_reason: ClassVar[str | None] = "FSDP keeps gradients itself, split between the processes"
    owns_optimizer: ClassVar[bool] = True
    optimizer_reason: ClassVar[str] = "FSDP splits the states and keeps the split weights in float32"
    loss_inside_forward: ClassVar[bool] = True
    parks_embeddings: ClassVar[bool] = False
    can_try_longest: ClassVar[bool] = False

    def before_prepare(self, backbone: nn.Module) -> None:
        # Gradients that wait for the last micro-batch of a window wait whole, on every GPU: 16 GiB of an 8B model.
        # Exchanged each time they are split at once, and added up in float32.
        self.accelerator.gradient_state.plugin_kwargs["sync_each_batch"] = True
        plugin = self.accelerator.state.fsdp_plugin
        if not plugin.transformer_cls_names_to_wrap:
            # accelerate would ask the model, and moss_tts_local names another model's layer.
            layers: Any = backbone.layers
            plugin.transformer_cls_names_to_wrap = sorted({type(layer).__name__ for layer in layers})

    @property
    def by_module(self) -> ByModule:
        return ByModule(lambda frames: largest_of_all(frames, self.accelerator.device))

    def check(self, arguments: Any, method: str) -> None:
        super().check(arguments, method)
        plugin = self.accelerator.state.fsdp_plugin
        if method != "full":
            raise EnvironmentProblem(
                f"engine FSDP with MOSS_LOWMEM_METHOD={method}: FSDP joins weights of one layer into one tensor of one "
                "dtype, and adapters are float32 beside their base. Expected DDP (ACCELERATE_CONFIG_FILE=lowmem:ddp: "
                "adapters have small gradients and states) or ZeRO-3 (lowmem:zero3)."
            )
        if not self.accelerator.is_fsdp2 and not plugin.use_orig_params:
            raise EnvironmentProblem(
                "engine FSDP with fsdp_use_orig_params: false: frozen and trained weights cannot be told apart then. "
                "Expected true, as in upstream's configs and in lowmem:fsdp."
            )
        kind = str(getattr(plugin.state_dict_type, "name", plugin.state_dict_type))
        if kind != "FULL_STATE_DICT":
            raise EnvironmentProblem(
                f"engine FSDP with fsdp_state_dict_type: {kind}: upstream's save_checkpoint writes whole weights. "
                "Expected FULL_STATE_DICT, as in upstream's configs and in lowmem:fsdp."
            )
