"""What of a run goes into its log: the bridge between the loop's events and :mod:`.progress`."""

from __future__ import annotations

import functools
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any

import torch

from ..loss.problem import FrameLoss
from .progress import LOG_NAME, LineLog, StepRecorder, describe_channels, read_memory


class RunRecord:
    """Gathers what the loop does and writes a line a step; silent until :meth:`started`.

    Attributes:
        gradient_norm: before clipping, of the current window; None where nothing was clipped.
        micro_batches: done so far.
    """

    def __init__(self) -> None:
        self.gradient_norm: torch.Tensor | None = None
        self.micro_batches = 0
        self._recorder: StepRecorder | None = None
        self._observed: dict[str, Any] = {}

    def started(self, folder: Path, device: torch.device) -> None:
        """Begins to write; on the process that writes only."""
        self._recorder = StepRecorder(LineLog(folder / LOG_NAME), lambda: read_memory(device))

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

    def step(self, number: int, micro_batches_per_epoch: int | None, lr: float) -> None:
        """An optimizer step is done."""
        if self._recorder is not None:
            epoch = self.micro_batches / (micro_batches_per_epoch or 1)
            self._recorder.step(number, epoch, lr, self.gradient_norm)
        self.gradient_norm = None

    def validation(self, values: dict[str, Any]) -> None:
        """Validation records were evaluated."""
        if self._recorder is not None:
            self._recorder.validation(values)

    def leave_out(self, seconds: float) -> None:
        """The step that goes on had to wait so long for something that is no training."""
        if self._recorder is not None:
            self._recorder.leave_out(seconds)
