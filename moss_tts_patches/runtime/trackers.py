"""Where else the values of a step go: TensorBoard where it is installed, and the wandb run that the trainer began."""

from __future__ import annotations

import math
import sys
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

from ..units import GIB

FOLDER = "tensorboard"
_PLAIN = ("loss", "grad_norm", "lr", "epoch", "frames_per_second", "positions", "seconds")


def scalars(values: Mapping[str, Any]) -> Iterator[tuple[str, float]]:
    """Yields the numbers of a step's line by name; what is not finite or was not asked for is left out."""
    groups = {"": {name: values.get(name) for name in _PLAIN}}
    groups |= {f"{name}/": values[name] for name in ("loss_by_codebook", "seconds_by_phase")}
    for prefix, group in groups.items():
        for name, value in group.items():
            if value is not None and math.isfinite(value):
                yield prefix + name, float(value)
    for name, value in values["memory_bytes"].items():
        yield f"memory_gib/{name}", value / GIB


class TensorBoard:
    """Writes the scalars of a training.

    Args:
        writer: a ``SummaryWriter``.
    """

    def __init__(self, writer: Any) -> None:
        self._writer = writer

    def step(self, values: Mapping[str, Any]) -> None:
        """Writes a step.

        Args:
            values: its line in the log.
        """
        for name, value in scalars(values):
            self._writer.add_scalar(name, value, values["step"])

    def close(self) -> None:
        """Puts the last steps on the disk."""
        self._writer.close()


def open_tensorboard(folder: Path, done: int, say: Callable[[str], None]) -> TensorBoard | None:
    """Opens ``folder/tensorboard``; returns None where TensorBoard is not installed.

    Args:
        folder: the trainer's output folder.
        done: steps that are done; whatever stands there of later ones is not shown any more.
        say: logs a line if it is installed and cannot be used.
    """
    try:
        from torch.utils.tensorboard import SummaryWriter
    except ImportError:
        return None
    except Exception as error:  # an old one beside a new numpy or setuptools; training does not depend on it
        say(f"tensorboard=off reason='{type(error).__name__}: {error}'")
        return None
    return TensorBoard(SummaryWriter(str(folder / FOLDER), purge_step=done + 1))


class Wandb:
    """Adds the layer's values to the run that the trainer has begun; what the trainer sends there stays as it is.

    wandb is not imported: where a trainer has not done so, there is no run.
    """

    def step(self, values: Mapping[str, Any]) -> None:
        """Sends a step; the trainer's own values of the same step join it.

        Args:
            values: its line in the log.
        """
        wandb: Any = sys.modules.get("wandb")
        if wandb is not None and getattr(wandb, "run", None) is not None:
            wandb.log({f"lowmem/{name}": value for name, value in scalars(values)}, step=values["step"])

    def close(self) -> None:
        """The trainer ends its run itself."""
