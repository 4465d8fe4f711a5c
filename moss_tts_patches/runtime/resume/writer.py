"""When a resume point is due, and what goes into it."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ...errors import EnvironmentProblem
from ...units import GIB
from .point import FOLDER, remove_older, write_point
from .tensors import optimizer_scalars, trained_parameters, write_states, write_weights


@dataclass(frozen=True)
class ResumeOptions:
    """What a user chose.

    Attributes:
        save_steps: write a point every so many optimizer steps; 0 for never.
        save_minutes: write one when so many minutes have passed; 0 for never.
        keep: how many stay.
        resume: ``auto``, ``off``, or a path.
    """

    save_steps: int = 0
    save_minutes: float = 0
    keep: int = 2
    resume: str = "auto"

    @property
    def saves(self) -> bool:
        """Whether points are written at all."""
        return bool(self.save_steps or self.save_minutes)


class PointWriter:
    """Writes the points of a run.

    Args:
        options: the user's.
        say: logs a line.

    Attributes:
        root: folder of the points.
        facts: what every point says of its run: family, arguments, settings, versions, fingerprints.
        saved_steps: the step that the newest point stands at.
    """

    def __init__(self, options: ResumeOptions, facts: dict[str, Any], say: Callable[[str], None]) -> None:
        self.root = Path(FOLDER)
        self.facts = facts
        self.saved_steps = 0
        self._options, self._say = options, say
        self._saved_time = time.monotonic()
        self._model: Any = None
        self._optimizer: Any = None

    def attach(self, model: Any, optimizer: Any) -> None:
        """The things to save exist; says how large a point will be."""
        self._model, self._optimizer = model, optimizer
        parameters = trained_parameters(model).values()
        states = sum(s.size(p.numel()) for p in parameters for s in optimizer.layout_of(p).values())
        size = states + sum(p.numel() * p.element_size() for p in parameters)
        self._say(
            f"resume_points={self.root} each={size / GIB:.2f}GiB keep={self._options.keep} "
            f"steps={self._options.save_steps or 'off'} minutes={self._options.save_minutes or 'off'}"
        )

    def stands_at(self, steps: int) -> None:
        """There is a point of that step: the time to the next begins."""
        self.saved_steps, self._saved_time = steps, time.monotonic()

    def waits_anew(self) -> None:
        """A point was not written: the next is due when as much time has passed again, and not at every step."""
        self._saved_time = time.monotonic()

    def is_due(self, steps: int) -> bool:
        """Whether a point is wanted now."""
        every, minutes = self._options.save_steps, self._options.save_minutes
        by_steps = every > 0 and steps % every == 0
        return by_steps or (minutes > 0 and time.monotonic() - self._saved_time >= 60 * minutes)

    def write(self, mark: dict[str, Any], ranks: dict[int, dict[str, Any]]) -> bool:
        """Writes a point; a disk that is full ends no training.

        Args:
            mark: what was noted at the last optimizer step.
            ranks: what each process needs for itself, by rank.

        Returns:
            Whether it stands.
        """
        began, steps = time.perf_counter(), mark["position"]["steps"]
        values = {
            "saved_at": time.strftime("%Y-%m-%d %H:%M:%S"),
            **self.facts,
            **mark,
            "optimizer": optimizer_scalars(self._optimizer),  # unchanged since the mark, as the tensors are
            "processes": len(ranks),
        }
        try:
            folder = write_point(self.root, values, ranks, self._write_tensors, self._say)
        except (OSError, EnvironmentProblem) as error:
            self._say(f"warning: no resume point could be written at step {steps}: {error}")
            return False
        self.stands_at(steps)
        size = sum(path.stat().st_size for path in folder.iterdir())
        seconds = time.perf_counter() - began
        self._say(f"resume_point={folder.name} size={size / GIB:.2f}GiB seconds={seconds:.1f}")
        remove_older(self.root, self._options.keep, self._say)
        return True

    def _write_tensors(self, folder: Path) -> None:
        write_weights(folder, trained_parameters(self._model))
        write_states(folder, self._optimizer)
