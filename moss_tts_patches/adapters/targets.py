"""Which modules get an adapter: named groups of a family, or any pattern that PEFT understands."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from torch import nn

from ..errors import SettingsError

#: What every family has is adapted by default, as the field does: all projections of all transformer layers.
DEFAULT_GROUPS = ("backbone", "depth")

VARIABLE = "MOSS_LOWMEM_LORA_TARGETS"
_PLAIN_NAME = re.compile(r"[\w.]+")


def resolve_targets(
    model: nn.Module, wanted: Sequence[str], groups: Mapping[str, str], *, variable: str = VARIABLE
) -> list[str]:
    """Finds the modules that ``wanted`` names.

    Args:
        model: before injection.
        wanted: group names, module name endings (``q_proj``) or regular expressions over whole module names, as PEFT's
            ``target_modules`` takes them; empty means :data:`DEFAULT_GROUPS`.
        groups: the family's groups, each a regular expression over whole module names.
        variable: the setting that ``wanted`` came from, for the messages.

    Returns:
        Full module names in the model's order.

    Raises:
        SettingsError: an item matches nothing, or something that cannot carry an adapter.
    """
    modules = dict(model.named_modules())
    items = tuple(wanted) or tuple(name for name in DEFAULT_GROUPS if name in groups)
    found: set[str] = set()
    for item in items:
        matched = _matches(item, modules, groups, variable)
        if item not in groups:
            _refuse_what_cannot_adapt(item, matched, modules, variable)
        found.update(matched)
    _refuse_tied(model, found, variable)
    return [name for name in modules if name in found]


def _matches(item: str, modules: Iterable[str], groups: Mapping[str, str], variable: str) -> list[str]:
    expression = groups.get(item)
    if expression is None and _PLAIN_NAME.fullmatch(item):
        found = [name for name in modules if name == item or name.endswith("." + item)]
    else:
        try:
            pattern = re.compile(expression or item)
        except re.error as error:
            raise SettingsError(f"{variable}: {item!r} is not a regular expression ({error}).") from None
        found = [name for name in modules if pattern.fullmatch(name)]
    if not found:
        raise SettingsError(
            f"{variable}: {item!r} matches no module of this model. Expected one of the groups {', '.join(groups)}, "
            "the ending of a module's name (q_proj), or a regular expression that matches whole names "
            r"(.*layers\.[0-3]\.mlp\.up_proj)."
        )
    return found


def _refuse_what_cannot_adapt(item: str, found: list[str], modules: Mapping[str, Any], variable: str) -> None:
    wrong = [name for name in found if not isinstance(modules[name], (nn.Linear, nn.Embedding))]
    if wrong:
        raise SettingsError(
            f"{variable}: {item!r} matches {wrong[0]}, a {type(modules[wrong[0]]).__name__}. Expected linear layers "
            "and embeddings that training reads; LoRA is defined for these."
        )


def _refuse_tied(model: nn.Module, found: set[str], variable: str) -> None:
    """An adapter on a shared weight would be merged into its other user as well."""
    owners: dict[int, list[str]] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        owners.setdefault(id(parameter), []).append(name)
    for names in owners.values():
        modules = [name.rpartition(".")[0] for name in names]
        hit = next((module for module in modules if module in found), None)
        if hit is not None and len(names) > 1:
            others = ", ".join(module for module in modules if module != hit)
            raise SettingsError(
                f"{variable}: {hit} shares its weight with {others} in this model. Merging an adapter of one of them "
                "would silently change the other. Leave it out."
            )


def fully_trained_modules(
    model: nn.Module, wanted: Sequence[str], groups: Mapping[str, str], adapted: Iterable[str], *, variable: str
) -> list[str]:
    """Finds modules whose own weights are trained beside the adapters.

    Args:
        model: before injection.
        wanted: ``norms`` or names of groups.
        groups: the family's.
        adapted: modules that get an adapter.
        variable: the setting that ``wanted`` came from.

    Raises:
        SettingsError: a name is no group, a weight is shared, or the module has an adapter already.
    """
    known = ("norms", *(name for name in groups if name not in DEFAULT_GROUPS))
    found: set[str] = set()
    for item in wanted:
        if item not in known:
            raise SettingsError(f"{variable}: {item!r} is not a group of this model; expected {', '.join(known)}.")
        if item == "norms":
            found.update(name for name, module in model.named_modules() if is_norm(module))
        else:
            found.update(_matches(item, dict(model.named_modules()), groups, variable))
    both = sorted(found & set(adapted))
    if both:
        raise SettingsError(f"{variable}: {both[0]} has an adapter already (MOSS_LOWMEM_LORA_TARGETS); choose one.")
    _refuse_tied(model, found, variable)
    return [name for name, _ in model.named_modules() if name in found]


def is_norm(module: nn.Module) -> bool:
    """Whether the module is a norm of any kind; the families bring classes of their own."""
    weights = list(module.parameters())
    return "norm" in type(module).__name__.lower() and bool(weights) and all(weight.ndim == 1 for weight in weights)
