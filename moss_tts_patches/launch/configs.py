"""Ready accelerate configs, by name: ``lowmem:zero2-offload`` instead of a path.

accelerate wants the number of processes in the file, and it differs from machine to machine: the files in the package
have a word there, and what accelerate gets is a copy with the number.
"""

from __future__ import annotations

import difflib
import os
from pathlib import Path

from ..errors import SettingsError

FOLDER = Path(__file__).resolve().parents[1] / "configs"
PREFIX = "lowmem:"
_PROCESSES = "num_processes: PROCESSES"


def config_names() -> list[str]:
    """The configs that need a number of processes, all engines over several GPUs."""
    return sorted(path.stem for path in FOLDER.glob("*.yaml") if _PROCESSES in path.read_text(encoding="utf-8"))


def describe_config(name: str) -> str:
    """What the file says of itself in its first line."""
    return _template(name).splitlines()[0].removeprefix("# ")


def config_text(name: str, processes: int) -> str:
    """The config for so many processes, all on this machine.

    Raises:
        SettingsError: there is no config of that name.
    """
    return _template(name).replace(_PROCESSES, f"num_processes: {processes}")


def write_config(name: str, processes: int) -> Path:
    """Writes the config where accelerate can read it, and returns its path.

    Raises:
        SettingsError: there is no config of that name.
    """
    text = config_text(name, processes)
    cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    path = cache / "moss_tts_patches" / "configs" / f"{name}-{processes}.yaml"
    path.parent.mkdir(parents=True, exist_ok=True)
    unfinished = path.with_name(f"{path.name}.{os.getpid()}")
    unfinished.write_text(text, encoding="utf-8")
    os.replace(unfinished, path)
    return path


def _template(name: str) -> str:
    names = config_names()
    if name not in names:
        nearest = difflib.get_close_matches(name, names, n=1, cutoff=0.0)[0]
        raise SettingsError(
            f"{PREFIX}{name} is not a config; the nearest one is {PREFIX}{nearest}. There are: {', '.join(names)}."
        )
    return (FOLDER / f"{name}.yaml").read_text(encoding="utf-8")
