"""Gradient checkpointing set layer by layer.

Never through transformers' ``gradient_checkpointing_enable``: it hooks the input embeddings so that their output is a
leaf that requires a gradient, which upstream writes into in place (moss_tts_local fails on it as soon as embeddings
are frozen), and it would also recompute the depth model, which the loss engine already runs chunk by chunk.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import nn
from transformers.modeling_layers import GradientCheckpointingLayer

from ..errors import SeamError
from ..loss.module_schedule import recompute


def checkpoint_layers(backbone: nn.Module, run: Callable[..., Any] = recompute) -> int:
    """Switches recomputation on for every layer of ``backbone``; returns how many there are.

    Args:
        backbone: has ``layers``.
        run: calls a layer now and again in the backward.

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
            layer._gradient_checkpointing_func = run
        elif "forward" not in vars(layer):
            layer.forward = functools.partial(_recomputed, layer, run)
    return len(layers)


def layer_parameters(backbone: nn.Module) -> Iterator[nn.Parameter]:
    """Yields the weights of the layers that :func:`checkpoint_layers` switches."""
    for layer in getattr(backbone, "layers", ()):
        yield from layer.parameters()


def _recomputed(layer: nn.Module, run: Callable[..., Any], /, *args: Any, **options: Any) -> Any:
    """The forward of a layer that transformers did not build; set on the instance, so that no parameter is renamed."""
    forward = functools.partial(type(layer).forward, layer)
    if layer.training and torch.is_grad_enabled():
        return run(forward, *args, **options)
    return forward(*args, **options)
