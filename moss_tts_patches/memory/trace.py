"""A short simulation's figures as a flat dictionary of numbers, which can be added, scaled and kept."""

from __future__ import annotations

from dataclasses import asdict

import torch

from .footprint import CATEGORIES, Footprint
from .step_figures import StepFigures

Trace = dict[str, float]

PHASES = ("forward", "loss", "backward", "step")


def flatten(figures: StepFigures) -> Trace:
    """Writes a step's figures as ``phase.moment.category``, ``standing.name`` and three totals."""
    trace: Trace = {
        "host_bytes": figures.host_bytes,
        "matmul_flops": figures.matmul_flops,
        "attention_flops": figures.attention_flops,
    }
    for name, phase in figures.phases.items():
        for moment, footprint in (("start", phase.start), ("peak", phase.peak)):
            trace.update({f"{name}.{moment}.{category}": value for category, value in asdict(footprint).items()})
    for name, value in asdict(figures.standing).items():
        trace[f"standing.{name}"] = value if name != "trained_dtype" else getattr(torch, value).itemsize
    return trace


def trained_dtype_name(trace: Trace) -> str:
    """Of trained parameters: their size tells the two that an optimizer takes apart."""
    return "bfloat16" if trace["standing.trained_dtype"] == 2 else "float32"


def footprint_of(trace: Trace, phase: str, moment: str) -> Footprint:
    """Reads one of :data:`PHASES` at its ``start`` or ``peak``."""
    return Footprint(**{category: trace[f"{phase}.{moment}.{category}"] for category in CATEGORIES})


def added(left: Trace, right: Trace) -> Trace:
    """What both have together, by the names of ``left``; one that ``right`` lacks counts 0 there."""
    return {name: value + right.get(name, 0) for name, value in left.items()}


def difference(left: Trace, right: Trace) -> Trace:
    """What ``left`` has more; within a phase the loss's peak moves with what was there when it began."""
    moved = {name: left[name] - right[name] for name in left}
    for category in CATEGORIES:
        if f"loss.peak.{category}" in moved:
            moved[f"loss.peak.{category}"] = moved[f"loss.start.{category}"]
    return moved
