"""The few ways in which the layer stops a run, each before anything expensive starts where that is possible.

A message names the component, what was found, what was expected and what to do next.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

from .last_words import leave


class LowMemError(RuntimeError):
    """Base of every error that the layer raises on purpose."""


class SettingsError(LowMemError):
    """A ``MOSS_LOWMEM_*`` variable has an unknown name, a wrong value, or contradicts another one."""


class SeamError(LowMemError):
    """Upstream does not have the name, signature or attribute that a patch holds on to."""


class EnvironmentProblem(LowMemError):
    """The machine or an installed package cannot do what was asked for."""


class NumericsError(LowMemError):
    """A number that has to hold does not: a loss scale, a count of contributions, a finite value."""


class StateError(LowMemError):
    """Something saved is not what it should be: not whole, or not of the parameters it is loaded into."""


class DataError(LowMemError):
    """Training files are missing, or have records that cannot be trained on."""


def first_ten(names: Sequence[str], separator: str = ", ") -> str:
    """Joins names for a message, and counts those beyond the tenth."""
    return separator.join(names[:10]) + (f" and {len(names) - 10} more" if len(names) > 10 else "")


@contextmanager
def ending_the_run() -> Iterator[None]:
    """Turns an error of the layer into the end of the process with its one message.

    For what happens before training starts: nothing is lost, and a traceback through upstream would only hide the line.
    """
    try:
        yield
    except LowMemError as error:
        leave(str(error))
        raise SystemExit(f"[lowmem] error: {error}") from None
