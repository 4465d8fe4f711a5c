"""Optimizers and the stores that their gradients and states live in.

Nothing here knows a model family, the environment or upstream.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import nn

from .gradients import DeviceGradients, GradientStore
from .host_gradients import HostGradients
from .optimizers import AdamW, AdamW8bit
from .streamed import StreamedOptimizer

_OPTIMIZERS: dict[str, type[StreamedOptimizer]] = {"adamw8bit": AdamW8bit, "adamw": AdamW}

# What torch.optim.AdamW takes beyond ours and what may be ignored of it: how its arithmetic is batched.
_BATCHING_OPTIONS = ("foreach", "fused")


def build_store(placement: str, host_dtype: torch.dtype) -> GradientStore:
    """Returns the gradient store for ``device`` or ``host``."""
    return HostGradients(host_dtype) if placement == "host" else DeviceGradients()


def build_optimizer(
    kind: str,
    named_parameters: Sequence[tuple[str, nn.Parameter]],
    store: GradientStore,
    states: str,
    *,
    seed: int,
    **options: Any,
) -> StreamedOptimizer:
    """Returns the optimizer ``kind`` with the hyperparameters of a ``torch.optim.AdamW(...)`` call.

    Args:
        kind: ``adamw8bit`` or ``adamw``.
        named_parameters: frozen ones may be among them, as upstream passes all.
        store: where gradients come from.
        states: ``device`` or ``host``.
        seed: of the rounding noise.
        options: ``lr``, ``betas``, ``eps``, ``weight_decay``; ``foreach`` and ``fused`` are ignored.

    Raises:
        SettingsError: a value is out of range.
        TypeError: an option that is none of torch's AdamW as upstream calls it.
    """
    numbers = {name: value for name, value in options.items() if name not in _BATCHING_OPTIONS}
    return _OPTIMIZERS[kind](named_parameters, gradients=store, states=states, seed=seed, **numbers)
