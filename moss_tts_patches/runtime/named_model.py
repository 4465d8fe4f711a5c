"""Whether ``--model-path`` names a checkpoint that this trainer can train, asked before anything is read or loaded."""

from __future__ import annotations

import json
from pathlib import Path

from ..errors import SettingsError
from ..hub_cache import cached_config
from ..launch.families import family_of_config


def check_named_model(model_path: str, family: str) -> None:
    """Checks that the path is a checkpoint's folder of the trainer's family, or may be a name on a model hub.

    One family's trainer can load another's checkpoint: moss_tts_delay's takes one of moss_tts_local without its depth
    model, trains, and saves what nobody can use.

    Args:
        model_path: as the trainer got it, empty where it has none; a name whose files are not in the local cache yet
            is not looked at.
        family: of the trainer.

    Raises:
        SettingsError: no such folder, no checkpoint in it, or one of another family.
    """
    config = _config_file(model_path) if model_path else None
    if config is None:
        return
    try:
        found = family_of_config(json.loads(config.read_text(encoding="utf-8")))
    except (OSError, ValueError, TypeError):  # upstream reads it in a moment, and says more
        return
    if found not in (None, family):
        raise SettingsError(
            f"--model-path {model_path} is a checkpoint of {found}, and the trainer that was started is {family}'s. "
            f"Start {found}'s (run_train_lowmem.sh: MOSS_LOWMEM_FAMILY={found}), or correct MODEL_PATH."
        )


def _config_file(model_path: str) -> Path | None:
    """Where the checkpoint's config stands; None where only the hub could tell."""
    folder = Path(model_path)
    if (folder / "config.json").is_file():
        return folder / "config.json"
    if (folder / "adapter_config.json").is_file():
        raise SettingsError(
            f"--model-path {model_path} is an adapter; expected a whole checkpoint. Merge it first (moss-lowmem merge "
            f"{model_path}), or go on training it: its base in MODEL_PATH, this folder in MOSS_LOWMEM_LORA_INIT."
        )
    if folder.is_dir():
        raise SettingsError(
            f"--model-path {model_path} has no config.json; expected a checkpoint's folder. In a training's output "
            "folder that is a checkpoint-epoch-N. Correct MODEL_PATH."
        )
    try:
        return cached_config(model_path)
    except ValueError:
        raise SettingsError(
            f"--model-path {model_path}: no such folder, and not the form of a name on a model hub (OWNER/NAME). "
            "Correct MODEL_PATH."
        ) from None
