"""The rungs that a run can stand on, narrowed by what the user has pinned."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import fields
from typing import Any

from ..errors import SettingsError
from .rungs import METHODS, Rung

PINNABLE = tuple(field.name for field in fields(Rung))

Pinned = Mapping[str, Any]


def list_rungs(
    pinned: Pinned, *, has_depth: bool, methods: Iterable[str] = METHODS, complete: bool = False
) -> list[Rung]:
    """Lists the ladder, the most complete training first.

    Args:
        pinned: values of :class:`.rungs.Rung` that the user insists on, by field.
        has_depth: without a depth model ``fused`` is ``staged`` by another name.
        methods: those that can be run here.
        complete: also the schedule that is for engines which own the backward.

    Raises:
        SettingsError: the pinned values contradict each other, so that no rung is left.
    """
    unknown = set(pinned) - set(PINNABLE)
    assert not unknown, unknown
    rungs = [rung for method in _chosen(pinned, "method", methods) for rung in _of_method(method, pinned, has_depth)]
    if complete and "schedule" not in pinned:
        rungs += [r for r in _of_method("full", {**pinned, "schedule": "autograd", "checkpointing": True}, has_depth)
                  if "method" not in pinned or pinned["method"] == "full"]  # fmt: skip
    rungs = list(dict.fromkeys(rungs))
    if not rungs:
        said = ", ".join(f"{name}={value}" for name, value in pinned.items())
        raise SettingsError(
            f"plan: nothing can run with {said}. Idle weights can only wait in host memory with schedule fused or "
            "staged and checkpointing on; unset one of them."
        )
    return rungs


def _of_method(method: str, pinned: Pinned, has_depth: bool) -> Iterator[Rung]:
    """Adapters have few gradients and states: moving them away saves nothing worth its copies."""
    places = ("device", "host") if method == "full" else ("device",)
    choices = {
        "schedule": _chosen(pinned, "schedule", ("fused", "staged") if has_depth else ("staged",)),
        "checkpointing": _chosen(pinned, "checkpointing", (True, False)),
        **{name: _chosen(pinned, name, places) for name in ("gradients", "states", "weights")},
    }
    fixed = {name: pinned[name] for name in ("chunk_frames", "optimizer", "host_gradient_dtype") if name in pinned}
    for values in itertools.product(*choices.values()):
        rung = Rung(method=method, **fixed, **dict(zip(choices, values)))
        if _makes_sense(rung, pinned):
            yield rung


def _makes_sense(rung: Rung, pinned: Pinned) -> bool:
    if rung.weights == "device":
        return True
    if not rung.checkpointing or rung.schedule == "autograd":
        return False  # a graph would hold the weights that are to go
    # The dearest of the three moves (every micro-batch, nothing to overlap with) comes after the other two.
    return "weights" in pinned or (rung.gradients == "host" and rung.states == "host")


def _chosen(pinned: Pinned, name: str, otherwise: Iterable[Any]) -> tuple[Any, ...]:
    return (pinned[name],) if name in pinned else tuple(otherwise)
