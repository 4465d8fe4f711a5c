"""What of a run goes into its log: the bridge between the loop's events and :mod:`.progress`."""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from pathlib import Path
from typing import Any

import torch

from ..loss.problem import FrameLoss
from .bar import StepBar, wants_bar
from .progress import LOG_NAME, LineLog, StepRecorder, describe_channels, read_memory
from .trackers import TensorBoard, Wandb, open_tensorboard


class RunRecord:
    """Gathers what the loop does, writes a line a step and passes it on; silent until :meth:`started`.

    Args:
        bar: whether there is a bar: ``1``, ``0``, or ``auto`` (on a terminal).
        say: logs a line.

    Attributes:
        gradient_norm: before clipping, of the current window; None where nothing was clipped.
        micro_batches: done so far, by this process or one before it.
    """

    def __init__(self, bar: str = "0", say: Callable[[str], None] = lambda line: None) -> None:
        self._bar, self._say = bar, say
        self.gradient_norm: torch.Tensor | None = None
        self.micro_batches = 0
        self._recorder: StepRecorder | None = None
        self._observed: dict[str, Any] = {}
        self._outlets: list[StepBar | TensorBoard | Wandb] = []

    def started(self, folder: Path, device: torch.device, about: Mapping[str, Any]) -> None:
        """Begins to write; on the process that writes only.

        Args:
            folder: gets the log.
            device: whose memory is read.
            about: the run.
        """
        self._folder, self._log = folder, LineLog(folder / LOG_NAME, say=self._say)
        self._log.write(about)
        self._recorder = StepRecorder(self._log, lambda: read_memory(device))

    def begins(self, done: int, total: int | None) -> None:
        """The first micro-batch that is computed comes next: opens what else the steps go to.

        Args:
            done: steps of an earlier process.
            total: steps of the training; None where it is not known.
        """
        if self._recorder is None:
            return
        self._outlets.append(Wandb())
        tensorboard = open_tensorboard(self._folder, done, self._say)
        if tensorboard is not None:
            self._outlets.append(tensorboard)
        if wants_bar(self._bar, sys.stderr):
            self._outlets.append(StepBar(total, done))

    def ended(self) -> None:
        """The training is over, or the process ends; may be called twice."""
        while self._outlets:
            outlet = self._outlets.pop()
            with self._whatever_it_says(outlet, "its last steps may be missing"):
                outlet.close()

    def event(self, values: Mapping[str, Any]) -> None:
        """Writes a line about something else than a step; it must not hold a ``loss``."""
        if self._recorder is not None:
            self._log.write(values)

    def window_left_out(self) -> None:
        """The trainer drops the current window without counting it as a step."""
        self.gradient_norm = None
        if self._recorder is not None:
            self._recorder.forget()

    def observe(self, problem: FrameLoss, sums: torch.Tensor) -> None:
        """The engine has computed a training loss."""
        self._observed = describe_channels(problem, sums) if self._recorder is not None else {}

    def phase(self, name: str) -> AbstractContextManager[None]:
        """Adds the block's time to a phase of the current step."""
        return nullcontext() if self._recorder is None else self._recorder.phase(name)

    def within(self, name: str, function: Callable[..., Any]) -> Callable[..., Any]:
        """Returns ``function`` as a phase."""

        @functools.wraps(function)
        def recorded(*args: Any, **options: Any) -> Any:
            with self.phase(name):
                return function(*args, **options)

        return recorded

    def micro_batch(self, loss: torch.Tensor, batch: dict[str, Any]) -> None:
        """A micro-batch's loss is there."""
        self.micro_batches += 1
        if self._recorder is not None and self._observed:
            records, positions = batch["input_ids"].shape[:2]
            self._recorder.micro_batch(loss, records * positions, **self._observed)

    def step(self, number: int, micro_batches_per_epoch: int | None, lr: float, skipped: bool = False) -> None:
        """An optimizer step is done, or left out because the gradients were not finite."""
        if self._recorder is not None:
            epoch = self.micro_batches / (micro_batches_per_epoch or 1)
            values = self._recorder.step(number, epoch, lr, self.gradient_norm, skipped)
            for outlet in [*self._outlets]:
                with self._whatever_it_says(outlet, "it gets no more steps"):
                    outlet.step(values)
        self.gradient_norm = None

    @contextmanager
    def _whatever_it_says(self, outlet: StepBar | TensorBoard | Wandb, cost: str) -> Iterator[None]:
        """TensorBoard's own thread may meet a full disk, and says so here: no training ends for that."""
        try:
            yield
        except OSError as error:
            self._say(f"warning: {type(outlet).__name__}: {error.strerror or error}; {cost}")
            self._outlets = [other for other in self._outlets if other is not outlet]

    def validation(self, values: dict[str, Any]) -> None:
        """Validation records were evaluated."""
        if self._recorder is not None:
            self._recorder.validation(values)

    def leave_out(self, seconds: float) -> None:
        """The step that goes on had to wait so long for something that is no training."""
        if self._recorder is not None:
            self._recorder.leave_out(seconds)
