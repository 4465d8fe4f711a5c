"""Which settings would have helped, and by how much: arithmetic on what stands in memory between steps."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:  # that module imports torch
    from .card import StorePlacement, StoreSizes


@dataclass(frozen=True)
class Candidate:
    """A setting to change: ``variable=value`` saves ``saved_bytes`` of the memory that ran out."""

    variable: str
    value: str
    saved_bytes: int


def gpu_candidates(
    sizes: StoreSizes,
    placement: StorePlacement,
    *,
    parkable_bytes: int = 0,
    chunk_bytes: int = 0,
    chunk_frames: int = 0,
) -> list[Candidate]:
    """What would take memory off the GPU, the largest saving first.

    Args:
        sizes: of weights, gradients and states.
        placement: where they are now.
        parkable_bytes: weights that could wait in host memory while the loss works; 0 where they cannot.
        chunk_bytes: activations and logits of one chunk of the loss; 0 where it is not known.
        chunk_frames: frames of a chunk; half of them take half of ``chunk_bytes``.
    """
    found = []
    if placement.gradients == "device":
        found.append(Candidate("MOSS_LOWMEM_GRADIENTS", "host", sizes.gradients))
    if placement.states == "device":
        found.append(Candidate("MOSS_LOWMEM_STATES", "host", sizes.states))
    if placement.weights == "device" and parkable_bytes:
        found.append(Candidate("MOSS_LOWMEM_WEIGHTS", "host", parkable_bytes))
    if chunk_bytes and chunk_frames > 1:
        found.append(Candidate("MOSS_LOWMEM_CHUNK_FRAMES", str(chunk_frames // 2), chunk_bytes // 2))
    return _largest_first(found)


def host_candidates(
    sizes: StoreSizes, placement: StorePlacement, *, gradient_bytes: int, parked_bytes: int = 0
) -> list[Candidate]:
    """What would take memory off the host, the largest saving first.

    Args:
        sizes: of weights, gradients and states on the GPU.
        placement: where they are now.
        gradient_bytes: that the host gradient store takes: 4 bytes an element in float32, where bfloat16 takes 2.
        parked_bytes: that the host copies of weights take.
    """
    found = []
    if placement.gradients == "host":
        found.append(Candidate("MOSS_LOWMEM_GRADIENTS", "device", gradient_bytes))
        # Weights are bfloat16 where gradients of half the size can be kept at all.
        if gradient_bytes > sizes.gradients:
            halved = gradient_bytes - gradient_bytes // 2
            found.append(Candidate("MOSS_LOWMEM_HOST_GRADIENT_DTYPE", "bfloat16", halved))
    if placement.states == "host":
        found.append(Candidate("MOSS_LOWMEM_STATES", "device", sizes.states))
    if placement.weights == "host":
        found.append(Candidate("MOSS_LOWMEM_WEIGHTS", "device", parked_bytes))
    return _largest_first(found)


def _largest_first(found: Sequence[Candidate]) -> list[Candidate]:
    useful = [candidate for candidate in found if candidate.saved_bytes > 0]
    return sorted(useful, key=lambda candidate: candidate.saved_bytes, reverse=True)
