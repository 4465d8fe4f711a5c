"""Ties the validation to its run, once everything that it needs is there."""

from __future__ import annotations

from typing import TYPE_CHECKING

from torch import nn

from ..report import log
from ..resume.identity import records_fingerprint
from .best import BestCheckpoint
from .course import Surrounding
from .evaluation import Evaluation, make_batches

if TYPE_CHECKING:
    from ...session import Session


def begin_validation(session: Session, model: nn.Module) -> None:
    """Begins the validation where there are records for it.

    Args:
        session: the run; its loop and its resume are ready.
        model: as ``accelerator.prepare`` returned it.
    """
    data, accelerator = session.data, session.accelerator
    if data.validation is None or data.collate is None:
        return
    records, of_all = data.validation.records, data.validation.of_all
    batches = make_batches(data.dataset, data.collate, records, data.batch_size, of_all=of_all, accelerator=accelerator)
    evaluation = Evaluation(
        session.family,
        session.family.loss_of_trainer(vars(session.trainer)),
        model,
        session.loop.context,
        batches,
        accelerator,
        session.loop.diverted_to,
    )
    position = session.resume

    def left_out(seconds: float) -> None:
        session.record.leave_out(seconds)
        session.clock.leave_out(seconds)

    session.validation.begins(
        Surrounding(
            evaluation,
            _best_checkpoint(session, model),
            call_form=lambda: session.loop.call_form,
            position=lambda: (position.position.steps, position.position.epoch + 1),
            # Agreed on by all: they hear of a signal at different moments, and must make the same number of forwards.
            stopping=position.is_told_to_stop,
            record=session.record.validation,
            left_out=left_out,
            records=records_fingerprint(records) if of_all else None,
            goes_on=position.goes_on,
            phase=lambda: session.watch.guard.phase("validation"),
        )
    )


def _best_checkpoint(session: Session, model: nn.Module) -> BestCheckpoint | None:
    if session.save_plainly is None:
        return None
    return BestCheckpoint(
        session.save_plainly,
        accelerator=session.accelerator,
        model=model,
        arguments=vars(session.arguments_parsed),
        folder=session.output_folder,
        say=log,
    )
