"""Compares a saved optimizer state with the parameters that it is to be loaded into, before anything is changed.

torch matches states to parameters by position and does not look at names: a model with one adapter more trains on with
every state shifted by one. Here everything has to match, in both directions.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch

from ..errors import StateError

SHOWN = 10  # of each kind of difference: enough to see the pattern, short enough to read

Entry = dict[str, Any]
Expected = Mapping[str, Mapping[str, tuple[tuple[int, ...], torch.dtype]]]


def check_saved_state(state_dict: Mapping[str, Any], groups: Sequence[Sequence[str]], expected: Expected) -> None:
    """Returns if ``state_dict`` fits.

    Args:
        state_dict: as saved by :class:`.streamed.StreamedOptimizer`.
        groups: the names of all parameters, by parameter group.
        expected: for every trainable parameter, shape and dtype of each of its states.

    Raises:
        StateError: it does not; one error with all kinds of difference.
    """
    absent = [key for key in ("state", "param_groups", "seed") if key not in state_dict]
    if absent:
        raise StateError(
            f"optimizer state: {', '.join(absent)} not found; expected a state saved by this optimizer. A state of "
            "another optimizer cannot be converted: start without it."
        )
    differences = {
        "missing": _missing(state_dict, groups, expected),
        "unexpected": _unexpected(state_dict, groups, expected),
        "wrong shape": _wrong(state_dict["state"], expected, 0),
        "wrong dtype": _wrong(state_dict["state"], expected, 1),
    }
    found = [f"{kind} ({len(items)}): {_shorten(items)}" for kind, items in differences.items() if items]
    if not found and [list(group["params"]) for group in state_dict["param_groups"]] != [list(g) for g in groups]:
        found = ["the parameters are the same, but in another order or in other groups"]
    if found:
        raise StateError(
            f"optimizer state: it does not belong to these parameters. {'; '.join(found)}. Nothing was loaded. Use the "
            "model, adapter and optimizer settings that it was saved with, or start without it."
        )


def _missing(state_dict: Mapping[str, Any], groups: Sequence[Sequence[str]], expected: Expected) -> list[str]:
    saved_names = {name for group in state_dict["param_groups"] for name in group["params"]}
    missing = [name for group in groups for name in group if name not in saved_names]
    state = state_dict["state"]
    if not state:  # saved before the first step
        return missing
    for name, states in expected.items():
        if name not in state:
            missing += [name] if name in saved_names else []
        elif _step(state[name]) is None:
            missing.append(f"{name}.step")
        elif _step(state[name]):
            missing += [f"{name}.{key}" for key in states if not isinstance(state[name].get(key), torch.Tensor)]
    return missing


def _unexpected(state_dict: Mapping[str, Any], groups: Sequence[Sequence[str]], expected: Expected) -> list[str]:
    names = {name for group in groups for name in group}
    saved_names = [name for group in state_dict["param_groups"] for name in group["params"]]
    unexpected = [str(name) for name in saved_names if name not in names]
    for name, entry in state_dict["state"].items():
        if name not in expected:
            unexpected += [str(name)] if str(name) not in unexpected else []
        else:
            unexpected += [f"{name}.{key}" for key in entry if key != "step" and key not in expected[name]]
    return unexpected


def _wrong(state: Mapping[str, Any], expected: Expected, index: int) -> list[str]:
    """Lists states that are there but differ in shape (``index`` 0) or dtype (1)."""
    wrong = []
    for name, states in expected.items():
        for key, want in states.items():
            value = state.get(name, {}).get(key)
            if isinstance(value, torch.Tensor):
                found = (tuple(value.shape), value.dtype)[index]
                if found != want[index]:
                    wrong.append(f"{name}.{key} (found {found}, expected {want[index]})")
    return wrong


def _step(entry: Mapping[str, Any]) -> int | None:
    step = entry.get("step")
    return step if isinstance(step, int) and step >= 0 else None


def _shorten(items: Iterable[str]) -> str:
    listed = list(items)
    more = f" and {len(listed) - SHOWN} more" if len(listed) > SHOWN else ""
    return ", ".join(listed[:SHOWN]) + more
