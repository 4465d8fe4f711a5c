"""When the validation records are evaluated in a training, and what follows from the result.

After every so many optimizer steps, where gradients are gone, and before each checkpoint of the trainer, so also at the
end. A resume point holds what is known by then; nothing is evaluated while finished steps are passed.
"""

from __future__ import annotations

import functools
import math
import time
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any

from .best import BestCheckpoint
from .evaluation import CallForm, Evaluation, Result


def _never() -> bool:
    return False


@dataclass(frozen=True)
class Surrounding:
    """What a validation needs of its run.

    Attributes:
        evaluation: the pass over the records.
        best: saves the best weights; None where they are not wanted.
        call_form: how the trainer calls its loss, None before it has.
        position: optimizer steps done and the number of the epoch, from 1.
        stopping: the run was told to stop, and can.
        record: is given a line for the log.
        left_out: is given seconds that belong to no step.
        records: fingerprint of the records; None where each process has its own.
        goes_on: the run continues from a point.
        phase: open while records are evaluated.
    """

    evaluation: Evaluation
    best: BestCheckpoint | None
    call_form: Callable[[], CallForm | None]
    position: Callable[[], tuple[int, int]]
    stopping: Callable[[], bool]
    record: Callable[[dict[str, Any]], None]
    left_out: Callable[[float], None]
    records: str | None = None
    goes_on: bool = False
    phase: Callable[[], AbstractContextManager[Any]] = nullcontext


class Validation:
    """The validation of a run; does nothing until :meth:`begins`.

    Args:
        every_steps: evaluate after so many optimizer steps; 0 for before checkpoints only.
        say: logs a line.

    Attributes:
        best_loss: the lowest so far; infinite before the first.
        best_step: when that was.
        evaluated_step: the step that was evaluated last.
    """

    def __init__(self, every_steps: int, say: Callable[[str], None]) -> None:
        self._every_steps, self._say = every_steps, say
        self._around: Surrounding | None = None
        self._form: CallForm | None = None
        self.best_loss, self.best_step = math.inf, 0
        self.evaluated_step = 0
        self._best_is_ours = False

    def begins(self, around: Surrounding) -> None:
        """The training is about to begin."""
        self._around = around
        self._best_is_ours = around.goes_on  # what the interrupted run has found after its point is found again

    # -- when ----------------------------------------------------------------------------------------------------

    def step_done(self, steps: int) -> None:
        """An optimizer step is done and its gradients are gone."""
        if self._every_steps and steps % self._every_steps == 0:
            self._evaluate_at(steps, may_stop=True)

    def before_checkpoint(self, save: Callable[..., Any]) -> Callable[..., Any]:
        """Wraps a trainer's ``save_checkpoint``: each checkpoint has its validation loss."""

        @functools.wraps(save)
        def save_checkpoint(*args: Any, **options: Any) -> Any:
            if self._around is not None:
                self._evaluate_at(self._around.position()[0])
            return save(*args, **options)

        return save_checkpoint

    # -- resume points -------------------------------------------------------------------------------------------

    def values(self) -> dict[str, Any]:
        """Returns what a resume point has to hold, as JSON values."""
        if self._around is None:
            return {}
        form = self._call_form()
        return {
            "best_loss": self.best_loss if self.best_step else None,
            "best_step": self.best_step,
            "evaluated_step": self.evaluated_step,
            "records": self._around.records,
            "call_form": None if form is None else form.as_values(),
        }

    def restore(self, values: dict[str, Any]) -> None:
        """Goes on from what a resume point holds; a run that had no validation knows nothing."""
        if self._around is None:
            return
        if not values:
            self._best_is_ours = False
            return
        best_loss, form = values["best_loss"], values["call_form"]
        self._form = None if form is None else CallForm.from_values(form)
        if values.get("records", self._around.records) != self._around.records:
            self._best_is_ours = False
            lowest = "none" if best_loss is None else f"{best_loss:.4f}"
            self._say(
                "warning: the validation records are others than before the resume point, and losses of the two cannot "
                f"be compared: the lowest so far ({lowest}) is forgotten"
            )
            return
        self.best_loss = math.inf if best_loss is None else best_loss
        self.best_step, self.evaluated_step = values["best_step"], values["evaluated_step"]
        if self.best_step and self._around.best is not None and not self._around.best.stands():
            self._say(
                f"warning: the resume point knows of best weights at step {self.best_step}, and the output folder has "
                f"none: they are saved again below a validation loss of {self.best_loss:.4f}"
            )

    # -- what ----------------------------------------------------------------------------------------------------

    def _call_form(self) -> CallForm | None:
        assert self._around is not None
        return self._around.call_form() or self._form

    def _evaluate_at(self, steps: int, may_stop: bool = False) -> None:
        around = self._around
        form = self._call_form() if around is not None else None
        if around is None or form is None or steps == self.evaluated_step:
            return
        began = time.perf_counter()
        with around.phase():
            result = around.evaluation.run(form, around.stopping if may_stop else _never)
        if result is None:  # the resumed run begins with it
            return
        self.evaluated_step = steps
        self._note(steps, result, time.perf_counter() - began)
        if result.loss < self.best_loss and self._is_saved(steps, result.loss):
            self.best_loss, self.best_step = result.loss, steps
        around.left_out(time.perf_counter() - began)

    def _note(self, steps: int, result: Result, seconds: float) -> None:
        assert self._around is not None
        values = {
            "step": steps,
            "valid_loss": result.loss,
            "valid_loss_by_codebook": result.by_codebook,
            "records": result.records,
            "seconds": seconds,
        }
        self._around.record(values)
        before = f"{self.best_loss:.4f} (step {self.best_step})" if self.best_step else "none"
        self._say(
            f"validation step={steps} valid_loss={result.loss:.4f} lowest_before={before} records={result.records} "
            f"seconds={seconds:.1f}"
        )
        if not math.isfinite(result.loss):
            self._say(f"warning: the validation loss at step {steps} is not finite: it is not taken for the best")

    def _is_saved(self, steps: int, loss: float) -> bool:
        """Saves the best weights so far; whether they may be called that."""
        assert self._around is not None
        best = self._around.best
        saved = best is None or best.write(steps, self._around.position()[1], loss, is_first=not self._best_is_ours)
        self._best_is_ours |= saved
        return saved
