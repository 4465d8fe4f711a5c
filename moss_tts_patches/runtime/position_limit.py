"""How ``MOSS_LOWMEM_MAX_POSITIONS=auto`` finds its number."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

from ..data.install import CheckedData

if TYPE_CHECKING:
    from ..session import Session


def limit_finder(session: Session) -> Callable[[CheckedData], int | None] | None:
    """Returns what says how many positions a record may have, or None where every one fits; None: nobody asked.

    A run that goes on keeps the number that it began with: the records have to be the same.
    """
    if session.settings.max_positions != "auto":
        return None
    if not session.resume.goes_on:
        return lambda checked: _longest_record(session, checked)
    noted = session.resume.noted("max_positions")
    return lambda checked: noted if noted is not None and max(checked.report.positions) > noted else None


def _longest_record(session: Session, checked: CheckedData) -> int | None:
    family, accelerator = session.family, session.accelerator
    model_class, config = family.class_and_config(vars(session.trainer), session.arguments_parsed, accelerator.device)
    family.check_class(model_class)
    return session.decisions.longest_record(model_class, config, accelerator, checked)
