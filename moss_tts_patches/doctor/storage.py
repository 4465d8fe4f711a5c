"""The output folder: is there room for every checkpoint, can it be written, does it belong to another run."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
from collections.abc import Iterator
from pathlib import Path

from ..messages import Messages, gib
from .facts import Facts, SaveTarget
from .finding import Finding, finding

_CHECKPOINT_NAMES = ("checkpoint-epoch-*", "checkpoint-last", "checkpoint-step-*")
_WEIGHT_PATTERNS = ("*.safetensors", "pytorch_model*.bin")
_ARGUMENTS_FILE = "finetune_args.json"


def check_storage(facts: Facts, say: Messages) -> Iterator[Finding]:
    """Yields what was found about the output folder; nothing where there is none."""
    if facts.target is None:
        return
    yield from _room(facts.target, say)
    yield _trial_save(facts.target, say)
    yield from _other_run(facts.target, say)


def _room(target: SaveTarget, say: Messages) -> Iterator[Finding]:
    free = shutil.disk_usage(nearest_folder(target.folder)).free
    if target.checkpoint_bytes is None:
        yield finding(say, "disk", "ok", "disk_unknown", free=gib(free), folder=target.folder)
        return
    wanted = target.checkpoint_bytes * target.checkpoints
    values = {
        "free": gib(free),
        "wanted": gib(wanted),
        "one": gib(target.checkpoint_bytes),
        "count": target.checkpoints,
        "folder": target.folder,
    }
    if target.checkpoint_bytes > free:
        yield finding(say, "disk", "error", "disk_full", **values)
    elif wanted > free:
        fitting = free // target.checkpoint_bytes
        yield finding(say, "disk", "warning", "disk_short", **values, fitting=fitting)
    else:
        yield finding(say, "disk", "ok", "disk", **values)


def weight_bytes(model_path: Path) -> int | None:
    """Size of a model's weight files, which is that of a checkpoint; None where there are none in the folder."""
    sizes = [path.stat().st_size for pattern in _WEIGHT_PATTERNS for path in model_path.glob(pattern)]
    return sum(sizes) or None


def nearest_folder(folder: Path) -> Path:
    """The folder itself or, where it does not exist yet, the nearest one above it."""
    folder = folder.absolute()
    while not folder.is_dir() and folder != folder.parent:
        folder = folder.parent
    return folder


def _trial_save(target: SaveTarget, say: Messages) -> Finding:
    try:
        try_to_save(target.folder, target.sample)
    except OSError as error:
        reason = error.strerror or str(error)
        return finding(say, "save", "error", "save_failed", folder=target.folder, reason=reason)
    return finding(say, "save", "ok", "save", folder=target.folder, size=len(target.sample))


def try_to_save(folder: Path, content: bytes) -> None:
    """Does with ``content`` what saving a checkpoint does: write beside, flush, rename, read back; leaves nothing.

    Raises:
        OSError: any of it failed.
    """
    missing = [parent for parent in (folder, *folder.parents) if not parent.exists()]
    # The name of an unfinished save, which the next start removes if this process is killed right here.
    trial = folder / f"trial.incomplete-{os.getpid()}"
    renamed = folder / f"trial-renamed.incomplete-{os.getpid()}"
    try:
        trial.mkdir(parents=True)
        with (trial / "weights").open("wb") as file:
            file.write(content)
            file.flush()
            os.fsync(file.fileno())
        os.replace(trial, renamed)
        if (renamed / "weights").read_bytes() != content:
            raise OSError("what was read back is not what was written")
    finally:
        for path in (trial, renamed):
            shutil.rmtree(path, ignore_errors=True)
        for parent in missing:  # the training itself makes the folder, when it has something to put there
            with contextlib.suppress(OSError):
                parent.rmdir()


def _other_run(target: SaveTarget, say: Messages) -> Iterator[Finding]:
    checkpoints = find_checkpoints(target.folder)
    if not checkpoints or target.resumes:
        return
    names = ", ".join(path.name for path in checkpoints[:5])
    for checkpoint in checkpoints:
        difference = _difference(checkpoint, target)
        if difference:
            yield finding(say, "output", "error", "other_run", folder=target.folder, names=names, difference=difference)
            return
    yield finding(say, "output", "warning", "earlier_run", folder=target.folder, names=names)


def find_checkpoints(folder: Path) -> list[Path]:
    """The checkpoints that stand in an output folder."""
    found = {path for pattern in _CHECKPOINT_NAMES for path in folder.glob(pattern) if path.is_dir()}
    return sorted(path for path in found if ".incomplete-" not in path.name and ".replaced-" not in path.name)


def _difference(checkpoint: Path, target: SaveTarget) -> str | None:
    """The first argument with which the checkpoint was trained otherwise; None where nothing says so."""
    try:
        saved = json.loads((checkpoint / _ARGUMENTS_FILE).read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return None
    for name, value in target.arguments.items():
        if isinstance(saved, dict) and name in saved and saved[name] != value:
            return f"{name}: {saved[name]} / {value}"
    return None
