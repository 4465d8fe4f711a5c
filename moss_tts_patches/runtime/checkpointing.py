"""Gradient checkpointing set layer by layer.

Never through transformers' ``gradient_checkpointing_enable``: it hooks the input embeddings so that their output is a
leaf that requires a gradient, which upstream writes into in place (moss_tts_local fails on it as soon as embeddings
are frozen), and it would also recompute the depth model, which the loss engine already runs chunk by chunk.
"""

from __future__ import annotations

import functools
from typing import Any

from torch import nn
from torch.utils.checkpoint import checkpoint
from transformers.modeling_layers import GradientCheckpointingLayer

from ..errors import SeamError


def checkpoint_layers(backbone: nn.Module) -> int:
    """Switches recomputation on for every layer of ``backbone``; returns how many there are.

    Raises:
        SeamError: the backbone has no layer that can be checkpointed.
    """
    layers: list[Any] = [module for module in backbone.modules() if isinstance(module, GradientCheckpointingLayer)]
    if not layers:
        raise SeamError(
            f"gradient checkpointing: {type(backbone).__name__} has no GradientCheckpointingLayer (transformers 5 "
            "builds its decoder layers on it). Set MOSS_LOWMEM_CHECKPOINTING=0 to train without, or use the "
            "transformers version that upstream pins."
        )
    for layer in layers:
        layer.gradient_checkpointing = True
        layer._gradient_checkpointing_func = functools.partial(checkpoint, use_reentrant=False)
    return len(layers)
