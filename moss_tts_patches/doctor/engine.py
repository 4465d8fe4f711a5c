"""The engine: settings and packages that let a training run for hours and then not save it."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from ..errors import EnvironmentProblem, SettingsError
from ..launch.configs import PREFIX, write_config
from ..launch.engine import read_config
from ..messages import Messages
from .facts import Facts
from .finding import Finding, finding


def check_engine(facts: Facts, say: Messages) -> Iterator[Finding]:
    """Yields what was found about deepspeed and the accelerate config."""
    if facts.ask_deepspeed is not None:
        problem = facts.ask_deepspeed()
        if problem is None:
            yield finding(say, "deepspeed", "ok", "deepspeed")
        else:
            yield finding(say, "deepspeed", "error", "broken_deepspeed", reason=problem)
    if facts.config_file:
        yield from _config(facts, say)


def _config(facts: Facts, say: Messages) -> Iterator[Finding]:
    path = facts.config_file
    try:
        if path.startswith(PREFIX):  # as run_train_lowmem.sh takes it
            path = str(write_config(path.removeprefix(PREFIX), max(1, len(facts.gpus or ()))))
        config = read_config(path)
        engine = zero_settings(path)
    except (EnvironmentProblem, SettingsError) as error:
        yield finding(say, "engine", "error", "config_unreadable", reason=error)
        return
    if config.zero_stage != 3 and engine.get("stage") != 3:
        return
    if not engine.get("gathers_at_save", False):
        yield finding(say, "engine", "error", "zero3_without_weights", path=path)
    alone = len(facts.gpus or ()) == 1 or config.processes == 1
    if alone and not engine.get("offloads", False):
        yield finding(say, "engine", "warning", "zero3_alone", path=path)


def zero_settings(path: str) -> dict[str, Any]:
    """What a ZeRO config says about saving and offloading: ``stage``, ``gathers_at_save``, ``offloads``.

    Source: accelerate ``utils/dataclasses.py``, ``DeepSpeedPlugin``: ``zero3_save_16bit_model`` of its own file
    (default false) is ``stage3_gather_16bit_weights_on_model_save`` of deepspeed's, which ``deepspeed_config_file``
    names and which wins.

    Raises:
        EnvironmentProblem: deepspeed's own file cannot be read.
    """
    import yaml

    content = yaml.safe_load(Path(path).read_text(encoding="utf-8"))
    engine = content.get("deepspeed_config") or {}
    own_file = engine.get("deepspeed_config_file")
    if not own_file:
        devices = (engine.get("offload_param_device"), engine.get("offload_optimizer_device"))
        return {
            "stage": engine.get("zero_stage"),
            "gathers_at_save": _is_true(engine.get("zero3_save_16bit_model")),
            "offloads": any(device not in (None, "none") for device in devices),
        }
    try:
        zero = json.loads(Path(own_file).read_text(encoding="utf-8")).get("zero_optimization") or {}
    except (OSError, ValueError, AttributeError) as error:
        raise EnvironmentProblem(
            f"deepspeed_config_file {own_file}, named by {path}, cannot be read: {error}"
        ) from None
    return {
        "stage": zero.get("stage"),
        "gathers_at_save": _is_true(zero.get("stage3_gather_16bit_weights_on_model_save")),
        "offloads": bool(zero.get("offload_param") or zero.get("offload_optimizer")),
    }


def _is_true(value: Any) -> bool:
    return value is True or str(value).lower() in ("true", "1")
