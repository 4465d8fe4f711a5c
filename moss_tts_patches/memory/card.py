"""Chooses where gradients and optimizer states live when the user leaves it to us."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from torch import nn

from ..units import GIB

# Beside weights, gradients and states: 1.6 GiB of activations and temporaries in the simulated step of 3000 positions
# (python benchmarks/memory.py), 1.5 GiB for the CUDA context, workspaces, the desktop and the allocator's rounding.
HEADROOM_BYTES = int(3.1 * GIB)


@dataclass(frozen=True)
class StorePlacement:
    """``device`` or ``host`` for each store, and for weights that a phase of the step does not use."""

    gradients: str
    states: str
    weights: str = "device"


@dataclass(frozen=True)
class StoreSizes:
    """What stands in memory between steps, in bytes."""

    weights: int
    gradients: int
    states: int

    @classmethod
    def of(cls, parameters: Iterable[nn.Parameter], optimizer: str) -> StoreSizes:
        """Adds up a model's parameters; 8-bit states take 2.03 bytes an element, others twice the parameter."""
        found = list(parameters)
        weights = sum(p.numel() * p.element_size() for p in found)
        trained = [p for p in found if p.requires_grad]
        gradients = sum(p.numel() * p.element_size() for p in trained)
        elements = sum(p.numel() for p in trained)
        return cls(weights, gradients, round(2.03 * elements) if optimizer == "adamw8bit" else 2 * gradients)


def choose_placement(wanted: StorePlacement, card_bytes: float | None, sizes: StoreSizes) -> StorePlacement:
    """Resolves ``auto``: host traffic costs time, so each store stays on the device as long as it fits.

    Args:
        wanted: ``auto``, ``device`` or ``host`` for each.
        card_bytes: memory of the GPU, or None where there is none.
        sizes: of this model and optimizer.
    """
    free = float("inf") if card_bytes is None else card_bytes - sizes.weights - HEADROOM_BYTES
    best = StorePlacement("host", "host", "host")
    if sizes.gradients + sizes.states <= free:
        best = StorePlacement("device", "device")
    elif sizes.states <= free:
        best = StorePlacement("host", "device")
    elif free >= 0:
        best = StorePlacement("host", "host")
    return StorePlacement(
        best.gradients if wanted.gradients == "auto" else wanted.gradients,
        best.states if wanted.states == "auto" else wanted.states,
        best.weights if wanted.weights == "auto" else wanted.weights,
    )
