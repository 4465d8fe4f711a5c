"""What the user asked for, as plain values."""

from __future__ import annotations

import difflib
import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from ..errors import SettingsError

CONFIG_VARIABLE = "MOSS_LOWMEM_LORA_CONFIG"

# Options of PEFT's LoraConfig that the file may hold: those that leave the forward, the base and the file format alone.
_FROM_FILE = ("rank_pattern", "alpha_pattern", "exclude_modules", "init_lora_weights", "lora_bias")
# Where the others are set.
_ELSEWHERE = {
    "r": "MOSS_LOWMEM_LORA_RANK",
    "lora_alpha": "MOSS_LOWMEM_LORA_ALPHA",
    "lora_dropout": "MOSS_LOWMEM_LORA_DROPOUT",
    "use_rslora": "MOSS_LOWMEM_LORA_RSLORA",
    "use_dora": "MOSS_LOWMEM_LORA_DORA",
    "target_modules": "MOSS_LOWMEM_LORA_TARGETS",
    "modules_to_save": "MOSS_LOWMEM_LORA_ALSO_TRAIN",
    "base_model_name_or_path": "the trainer's --model-path",
}
# Initialisations that leave the base weights as they are on disk; pissa, olora and the like move part of them into the
# adapter, which then fits no base that upstream can load.
_INITIALISATIONS = (True, False, "gaussian", "orthogonal")


@dataclass(frozen=True)
class AdapterPlan:
    """How adapters are to be made.

    Attributes:
        method: ``lora`` or ``qlora``.
        targets: groups, name endings or regular expressions; empty for the default groups.
        also_train: groups whose own weights are trained beside the adapters.
        options: keyword arguments of PEFT's ``LoraConfig`` (``r``, ``lora_alpha``, …).
        start: adapter folder to start from, or None.
        start_fixes: keys of ``options`` that the user chose, which ``start`` must agree with.
    """

    method: str
    targets: tuple[str, ...] = ()
    also_train: tuple[str, ...] = ()
    options: Mapping[str, Any] = field(default_factory=dict)
    start: Path | None = None
    start_fixes: frozenset[str] = frozenset()


def options_from_file(path: Path) -> dict[str, Any]:
    """Reads rarer options of PEFT's ``LoraConfig``.

    Args:
        path: a JSON object, for example ``{"rank_pattern": {"down_proj": 32}}``.

    Raises:
        SettingsError: the file is missing or no JSON object, or holds an option that is not for it.
    """
    try:
        options = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise SettingsError(f"{CONFIG_VARIABLE}={path}: {error.strerror}.") from None
    except ValueError as error:
        raise SettingsError(f"{CONFIG_VARIABLE}={path}: not JSON ({error}).") from None
    if not isinstance(options, dict):
        raise SettingsError(f"{CONFIG_VARIABLE}={path}: found a {type(options).__name__}, expected one JSON object.")
    for name in options:
        if name in _ELSEWHERE:
            raise SettingsError(
                f"{CONFIG_VARIABLE}={path}: {name} is not taken from this file; set {_ELSEWHERE[name]}."
            )
        if name not in _FROM_FILE:
            nearest = difflib.get_close_matches(name, _FROM_FILE, n=1, cutoff=0.6)
            hint = f"; did you mean {nearest[0]}?" if nearest else "."
            raise SettingsError(
                f"{CONFIG_VARIABLE}={path}: {name} is not an option that works with these models{hint} "
                f"Expected some of {', '.join(_FROM_FILE)}."
            )
    start = options.get("init_lora_weights", True)
    if start not in _INITIALISATIONS:
        raise SettingsError(
            f"{CONFIG_VARIABLE}={path}: init_lora_weights={start!r} changes the base weights, so the adapter would not "
            f"fit the base on disk. Expected one of {', '.join(map(repr, _INITIALISATIONS))}."
        )
    return options
