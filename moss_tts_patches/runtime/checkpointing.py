"""Gradient checkpointing set layer by layer.

Never through transformers' ``gradient_checkpointing_enable``: it hooks the input embeddings so that their output is a
leaf that requires a gradient, which upstream writes into in place (moss_tts_local fails on it as soon as embeddings
are frozen), and it would also recompute the depth model, which the loss engine already runs chunk by chunk.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator
from typing import Any

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint
from transformers.modeling_layers import GradientCheckpointingLayer

from ..errors import SeamError


def checkpoint_layers(backbone: nn.Module) -> int:
    """Switches recomputation on for every layer of ``backbone``; returns how many there are.

    Raises:
        SeamError: the backbone has no layer that can be checkpointed.
    """
    layers: list[Any] = list(getattr(backbone, "layers", ()))
    if not layers:
        raise SeamError(
            f"gradient checkpointing: {type(backbone).__name__} has no layers. Set MOSS_LOWMEM_CHECKPOINTING=0 to "
            "train without, or use the transformers version that upstream pins."
        )
    for layer in layers:
        knows_how = isinstance(layer, GradientCheckpointingLayer)
        if knows_how:
            layer.gradient_checkpointing = True
            layer._gradient_checkpointing_func = functools.partial(checkpoint, use_reentrant=False)
        elif "forward" not in vars(layer):
            layer.forward = functools.partial(_recomputed, layer)
    return len(layers)


def layer_parameters(backbone: nn.Module) -> Iterator[nn.Parameter]:
    """Yields the weights of the layers that :func:`checkpoint_layers` switches."""
    for layer in getattr(backbone, "layers", ()):
        yield from layer.parameters()


def _recomputed(layer: nn.Module, *args: Any, **options: Any) -> Any:
    """The forward of a layer that transformers did not build; set on the instance, so that no parameter is renamed."""
    forward = functools.partial(type(layer).forward, layer)
    if layer.training and torch.is_grad_enabled():
        return checkpoint(forward, *args, use_reentrant=False, **options)
    return forward(*args, **options)
