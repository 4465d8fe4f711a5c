"""What stopped a training, told to the launcher too: accelerate prints a traceback of its own below the message."""

from __future__ import annotations

import os
from contextlib import suppress
from pathlib import Path

#: Names a folder in which every training process keeps its last readings as ``<pid>.json``, and what stopped it as
#: ``<pid>.error``. Not a setting: the launcher gives it to the processes that it starts.
READINGS_VARIABLE = "MOSS_READINGS_FOLDER"

_SUFFIX = ".error"


def leave(message: str) -> None:
    """Writes down what ends this process, where a launcher wants to know."""
    folder = os.environ.get(READINGS_VARIABLE)
    if folder:
        with suppress(OSError):  # a launcher that is gone
            Path(folder, f"{os.getpid()}{_SUFFIX}").write_text(message, encoding="utf-8", errors="replace")


def read(folder: Path, *, but: int) -> list[str]:
    """Returns what stopped the processes, each message once.

    Args:
        folder: given to them.
        but: number of a process that is left out; what the command itself has printed is the last line anyway.
    """
    paths = sorted(path for path in folder.glob(f"*{_SUFFIX}") if path.stem != str(but))
    return list(dict.fromkeys(path.read_text(encoding="utf-8") for path in paths))
