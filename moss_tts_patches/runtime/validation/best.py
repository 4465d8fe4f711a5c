"""``OUTPUT_DIR/best``: the weights with the lowest validation loss so far, as the trainer saves a checkpoint.

They are written to ``best-step-N``, which appears as a whole; then the link ``best`` is moved to it, and only then is
the folder of the former best deleted. So ``best`` always leads to a whole checkpoint. Where the disk has no links,
``best`` is a folder, replaced as a whole. The best of another training in the same folder, with which nothing was
compared, stays under the name ``best-step-N-earlier``.
"""

from __future__ import annotations

import inspect
import itertools
import os
import re
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

from safetensors import SafetensorError

from ...errors import EnvironmentProblem, SeamError

NAME = "best"
_STEP_FOLDER = re.compile(r"best-step-\d+")
_KNOWN = ("accelerator", "model", "model_path", "codec_path", "output_dir", "train_args", "global_step", "epoch")


def check_signature(save: Callable[..., Any]) -> None:
    """Checks that a trainer's ``save_checkpoint`` can be called from here.

    Raises:
        SeamError: it wants something that only its ``main()`` knows.
    """
    wanted = inspect.signature(save).parameters
    unknown = [name for name, one in wanted.items() if name not in _KNOWN and one.default is one.empty]
    if unknown:
        raise SeamError(
            f"seam sft.py.save_checkpoint: it wants {', '.join(unknown)}, which the layer does not know. Upgrade "
            "moss_tts_patches, or set MOSS_LOWMEM_VALID_BEST=0."
        )


class BestCheckpoint:
    """Saves the best weights.

    Args:
        save: the trainer's ``save_checkpoint``, whose folder appears as a whole.
        accelerator: the trainer's.
        model: as ``accelerator.prepare`` returned it.
        arguments: the trainer's command line, by name.
        folder: its output folder.
        say: logs a line.
    """

    def __init__(
        self,
        save: Callable[..., Any],
        *,
        accelerator: Any,
        model: Any,
        arguments: dict[str, Any],
        folder: Path,
        say: Callable[[str], None],
    ) -> None:
        self._save, self._accelerator, self._model = save, accelerator, model
        self._arguments, self._folder, self._say = arguments, folder, say

    def write(self, step: int, epoch: int, loss: float, *, is_first: bool = False) -> bool:
        """Saves the weights as they are; a full disk ends no training of one process.

        Args:
            step: optimizer steps done.
            epoch: of the last of them, from 1.
            loss: of the validation records.
            is_first: the training has saved none before; what stands there was never compared with it.

        Returns:
            Whether they stand under the name ``best``.
        """
        linked = can_link(self._folder)
        destination = self._folder / (f"{NAME}-step-{step}" if linked else NAME)
        try:
            if is_first and self._accelerator.is_main_process:
                set_aside(self._folder, self._say)
            self._call(destination, step, epoch, loss)
            if self._accelerator.is_main_process and linked:
                point_to(self._folder / NAME, destination.name)
                remove_former(self._folder, destination.name, self._say)
        except (OSError, SafetensorError, EnvironmentProblem) as error:
            if self._accelerator.num_processes > 1:  # the others wait for this one
                raise
            self._say(f"warning: the best weights could not be saved at step {step}: {error}")
            return False
        return True

    def stands(self) -> bool:
        """Whether there are best weights in the output folder."""
        return (self._folder / NAME).is_dir()

    def _call(self, destination: Path, step: int, epoch: int, loss: float) -> None:
        known = {
            "accelerator": self._accelerator,
            "model": self._model,
            "model_path": self._arguments.get("model_path"),
            "codec_path": self._arguments.get("codec_path"),
            "output_dir": destination,
            "train_args": {**self._arguments, "best_step": step, "best_validation_loss": loss},
            "global_step": step,
            "epoch": epoch,
        }
        wanted = inspect.signature(self._save).parameters
        self._save(**{name: value for name, value in known.items() if name in wanted})


def can_link(folder: Path) -> bool:
    """Whether ``best`` can be a link: the disk has links, and no folder of that name stands there."""
    best = folder / NAME
    if best.is_dir() and not best.is_symlink():
        return False
    trial = folder / f"{NAME}.link-{os.getpid()}"
    folder.mkdir(parents=True, exist_ok=True)
    try:
        trial.unlink(missing_ok=True)
        trial.symlink_to(NAME, target_is_directory=True)
        trial.unlink()
    except OSError:  # Windows without the right to, exFAT, some network disks
        return False
    return True


def set_aside(folder: Path, say: Callable[[str], None]) -> None:
    """Gives the best weights of another training in ``folder`` names that :func:`remove_former` leaves alone."""
    link = folder / NAME
    led_to = os.readlink(link) if link.is_symlink() else None
    for entry in sorted(os.scandir(folder), key=lambda entry: entry.name):
        is_best = _STEP_FOLDER.fullmatch(entry.name) or entry.name == NAME
        if not is_best or not entry.is_dir(follow_symlinks=False):
            continue
        kept = _free_name(Path(f"{entry.path}-earlier"))
        os.replace(entry.path, kept)
        if entry.name == led_to:
            point_to(link, kept.name)
        say(f"{entry.name} is an earlier training's: it stays as {kept.name}; delete it when it is not needed")


def _free_name(path: Path) -> Path:
    numbered = (path.with_name(f"{path.name}-{number}") for number in itertools.count(2))
    return next(name for name in itertools.chain([path], numbered) if not os.path.lexists(name))


def point_to(link: Path, name: str) -> None:
    """Makes ``link`` lead to its sibling ``name``, at once."""
    fresh = link.with_name(f"{link.name}.link-{os.getpid()}")
    fresh.unlink(missing_ok=True)
    fresh.symlink_to(name, target_is_directory=True)
    os.replace(fresh, link)


def remove_former(folder: Path, kept: str, say: Callable[[str], None]) -> None:
    """Deletes what was the best before, under a name that says it is no checkpoint any more."""
    for entry in [entry for entry in os.scandir(folder) if _STEP_FOLDER.fullmatch(entry.name)]:
        if entry.name == kept or not entry.is_dir(follow_symlinks=False):
            continue
        rubbish = f"{entry.path}.incomplete-{os.getpid()}"
        try:
            os.replace(entry.path, rubbish)
            shutil.rmtree(rubbish)
        except OSError as error:
            say(f"could not remove {entry.name}, which is not the best any more: {error.strerror or error}")
