"""What a GPU and a host need beside what a simulated step counts. Every constant with its reason, in one place."""

from __future__ import annotations

from dataclasses import dataclass

from ..units import GIB, MIB
from .figures import RungFigures
from .rungs import EngineRung, Rung, UpstreamRung

# What a process takes before its first tensor: 0.3 to 0.5 GiB for the context, and the kernels of cuBLAS, cuDNN and
# attention as they are loaded.
CONTEXT_BYTES = 550 * MIB

# cuBLAS takes 8.1 MiB for each handle and stream (32 MiB on Hopper); there are two streams.
WORKSPACE_BYTES = 64 * MIB

# A desktop and its browser on the same card, and what a driver keeps for itself.
DESKTOP_BYTES = 350 * MIB

# The caching allocator rounds requests to 512 bytes, takes 2 MiB and 20 MiB blocks for small and middle ones, and
# cannot always reuse a hole for the next, larger one.
ROUNDING_SHARE = 0.04

# Gradients that have left autograd and not yet arrived in host memory hold their storage: the lane's staging buffers
# are 256 MiB, and no more than that is under way at once.
IN_FLIGHT_BYTES = 256 * MIB

# Python, torch and CUDA's libraries in host memory, data loading and the staging buffers included.
HOST_PROCESS_BYTES = 3 * GIB


@dataclass(frozen=True)
class Reserve:
    """What has to stay free on the device, by reason, in bytes."""

    context: float
    workspaces: float
    desktop: float
    rounding: float
    in_flight: float

    @classmethod
    def for_figures(cls, figures: RungFigures) -> Reserve:
        """Works out the reserve of a rung."""
        rung = figures.rung
        sends = isinstance(rung, Rung) and rung.gradients == "host"
        # What stands between steps was allocated once, in one piece each; only the rest is asked for again and again.
        moving = figures.categories.activations + figures.categories.largest_temporary
        fixed = figures.peak_bytes - moving
        rounding = ROUNDING_SHARE * moving + ROUNDING_SHARE / 2 * fixed
        return cls(CONTEXT_BYTES, WORKSPACE_BYTES, DESKTOP_BYTES, rounding, IN_FLIGHT_BYTES if sends else 0)

    @property
    def total(self) -> float:
        return self.context + self.workspaces + self.desktop + self.rounding + self.in_flight

    def describe(self) -> str:
        """One line with every part in GiB."""
        parts = {
            "CUDA context": self.context,
            "cuBLAS workspaces": self.workspaces,
            "desktop and driver": self.desktop,
            "allocator rounding": self.rounding,
            "gradients on their way to the host": self.in_flight,
        }
        return ", ".join(f"{name} {size / GIB:.2f}" for name, size in parts.items() if size)


@dataclass(frozen=True)
class Limits:
    """What there is.

    Attributes:
        card_bytes: memory of the GPU.
        host_bytes: memory of the machine that training may take; None where it is not known.
        accumulation: micro-batches an optimizer step.
    """

    card_bytes: float
    host_bytes: float | None = None
    accumulation: int = 1


@dataclass(frozen=True)
class Assessment:
    """A rung against the limits.

    Attributes:
        figures: of the rung, its host gradients in the precision that the host has room for.
        reserve: what has to stay free beside it.
        margin: bytes of the card that are left over; negative where it does not fit.
        host_margin: the same for host memory; infinite where the limit is not known.
    """

    figures: RungFigures
    reserve: Reserve
    margin: float
    host_margin: float

    @property
    def fits(self) -> bool:
        return self.margin >= 0 and self.host_margin >= 0

    @property
    def verdict(self) -> str:
        """Fits or not, and by how much, in a few words."""
        if self.margin < 0:
            return f"no, {-self.margin / GIB:.2f} GiB short"
        if self.host_margin < 0:
            return f"no, {-self.host_margin / GIB:.2f} GiB of RAM short"
        return f"yes, {self.margin / GIB:.2f} GiB free"


def assess(figures: RungFigures, limits: Limits) -> Assessment:
    """Holds a rung against the limits."""
    reserve = Reserve.for_figures(figures)
    margin = limits.card_bytes - figures.peak_bytes - reserve.total
    host_margin = float("inf") if limits.host_bytes is None else limits.host_bytes - host_needed(figures)
    return Assessment(figures, reserve, margin, host_margin)


def host_needed(figures: RungFigures) -> float:
    """Bytes of host memory that a rung needs, the process itself included."""
    if isinstance(figures.rung, UpstreamRung):
        return HOST_PROCESS_BYTES + figures.model_bytes
    processes = figures.rung.processes if isinstance(figures.rung, EngineRung) else 1
    return HOST_PROCESS_BYTES * processes + max(figures.host_total(), figures.model_bytes)
