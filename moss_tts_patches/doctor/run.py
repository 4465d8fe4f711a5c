"""Runs the checks in the order in which a person would look."""

from __future__ import annotations

from collections.abc import Callable, Iterator

from ..messages import Messages
from .engine import check_engine
from .facts import Facts
from .finding import Finding
from .host import check_host
from .machine import check_machine
from .preparation import check_preparation
from .storage import check_storage

Check = Callable[[Facts, Messages], Iterator[Finding]]

CHECKS: tuple[Check, ...] = (check_machine, check_host, check_storage, check_engine, check_preparation)


def run_checks(facts: Facts, say: Messages) -> list[Finding]:
    """Runs every check for which ``facts`` has something to look at.

    Args:
        facts: of this machine, or of one that a test made up.
        say: the language of the findings.
    """
    return [found for check in CHECKS for found in check(facts, say)]
