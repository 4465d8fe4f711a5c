"""What people use today instead: PEFT around upstream's own forward, loss and checkpointing, torch's AdamW.

Rank, alpha and dropout are the layer's own defaults, and the adapted projections are those of the backbone that the
layer adapts too, so that the two differ in what happens around them. (The layer adapts the depth model as well.)
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from peft import LoraConfig, get_peft_model
from torch import nn

from moss_tts_patches.adapters.shapes import USUAL_OPTIONS
from moss_tts_patches.adapters.simulated import injected_without_values
from moss_tts_patches.families.family import Family

NAME = "LoRA script"


def adapt(family: Family, model: nn.Module) -> None:
    """Freezes the model and puts adapters on its backbone's attention and MLP projections, as ``get_peft_model`` does.

    PEFT changes the model in place, so upstream's forward is called as before; adapters of a bf16 model are float32.
    """
    get_peft_model(model, LoraConfig(target_modules=family.adapter_groups["backbone"], **USUAL_OPTIONS))


def adapt_simulated(family: Family, model: nn.Module) -> None:
    """The same for a model of tensors without values."""
    with injected_without_values(model):
        adapt(family, model)


def checkpoint_without_hooks(enable: Callable[[Any], None] | None) -> Callable[[Any], None]:
    """Returns what switches upstream's checkpointing on and makes it work with frozen embeddings.

    transformers 5 has the outputs of embeddings require gradients with it. Where they are frozen those are leaves, and
    moss_tts_local's forward writes to them in place: "a leaf Variable that requires grad is being used in an in-place
    operation". Whoever gets a LoRA script to run there takes the hooks away again; checkpoints that are not reentrant
    need none. They are taken away in every family, which costs the script nothing.

    Args:
        enable: what upstream's trainer does; by default the model's own method.
    """

    def checkpoint(model: Any) -> None:
        if enable is None:
            model.gradient_checkpointing_enable()
        else:
            enable(model)
        for module in model.modules():
            if hasattr(module, "disable_input_require_grads"):
                module.disable_input_require_grads()

    return checkpoint
