"""Chooses where gradients and optimizer states live when the user leaves it to us."""

from __future__ import annotations

from dataclasses import dataclass

from ..runtime.report import GIB


@dataclass(frozen=True)
class StorePlacement:
    """``device`` or ``host`` for each store."""

    gradients: str
    states: str


def choose_placement(gradients: str, states: str, card_bytes: int | None) -> StorePlacement:
    """Resolves ``auto``.

    Host traffic costs time, so each store stays on the device as long as a typical run of the 1.7B family fits:
    peaks at 600 positions are about 16.8 GiB with both stores on the device, 11.9 with gradients on the host, 6.9
    with both on the host, and 1.5 GiB on top are context, workspaces and allocator rounding
    (``python benchmarks/memory.py``).

    Args:
        gradients: ``auto``, ``device`` or ``host``.
        states: likewise.
        card_bytes: memory of the GPU, or None where there is none.
    """
    wanted = StorePlacement("device", "device")
    if card_bytes is not None and card_bytes < 14 * GIB:
        wanted = StorePlacement("host", "host")
    elif card_bytes is not None and card_bytes < 19 * GIB:
        wanted = StorePlacement("host", "device")
    return StorePlacement(
        wanted.gradients if gradients == "auto" else gradients,
        wanted.states if states == "auto" else states,
    )
