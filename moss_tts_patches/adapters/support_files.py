"""What stands beside a checkpoint's weights and is needed to use it: config, code, tokenizer and processor."""

from __future__ import annotations

import os
from pathlib import Path

from .adapter_folder import CONFIG
from .record import RECORD_NAME
from .safetensors_shards import WEIGHTS

_TOP = (".json", ".py", ".jinja", ".txt", ".model", ".tiktoken")
_INSIDE = (".py", ".jinja")  # moss_tts_realtime keeps its code in a folder; nothing else of a folder belongs to it
_NEVER = (CONFIG, RECORD_NAME, "trainer_state.json")


def support_files(folder: Path) -> dict[str, Path]:
    """Finds the support files of a checkpoint or adapter.

    Args:
        folder: a model, an adapter, or a snapshot in the hub's cache, whose files are links.

    Returns:
        Path by name relative to ``folder``. Weights, logs and whatever else was put there are not among them.
    """
    found = {}
    for entry in sorted(os.scandir(folder), key=lambda entry: entry.name):
        if entry.name.startswith(".") or entry.name in _NEVER:
            continue
        if entry.is_file() and entry.name.endswith(_TOP) and not WEIGHTS.fullmatch(entry.name):
            found[entry.name] = Path(entry.path)
        elif entry.is_dir() and not _is_model(Path(entry.path)):
            found.update(_inside(Path(entry.path)))
    return found


def _inside(folder: Path) -> dict[str, Path]:
    files = (path for path in sorted(folder.iterdir()) if path.is_file() and path.name.endswith(_INSIDE))
    return {f"{folder.name}/{path.name}": path for path in files}


def _is_model(folder: Path) -> bool:
    return any((folder / name).is_file() for name in ("config.json", CONFIG))
