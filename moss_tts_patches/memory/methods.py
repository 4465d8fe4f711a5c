"""What a training method does to a model before it is trained, by name: the planner simulates what is registered."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from ..errors import SettingsError


@dataclass(frozen=True)
class Shape:
    """How a method shapes a model.

    Attributes:
        shape_model: called with family and model, under ``FakeTensorMode``: replaces modules, freezes, injects.
        identity: changes with everything that changes what ``shape_model`` does, for the cache.
    """

    shape_model: Callable[[Any, Any], None] | None
    identity: str


#: ``full`` trains the model as it is; packages that know other methods add them here.
SHAPES: dict[str, Shape] = {"full": Shape(None, "full")}


def find_shape(shapes: Mapping[str, Shape], method: str) -> Shape:
    """Looks a method up.

    Raises:
        SettingsError: it is not registered.
    """
    found = shapes.get(method) or SHAPES.get(method)
    if found is None:
        known = ", ".join([*SHAPES, *shapes])
        raise SettingsError(f"planner: method {method} cannot be simulated here; expected one of: {known}.")
    return found
