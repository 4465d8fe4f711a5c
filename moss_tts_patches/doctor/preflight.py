"""The checks that a training makes of itself when it starts."""

from __future__ import annotations

from collections.abc import Callable, Iterable

from ..errors import EnvironmentProblem
from ..messages import Messages
from .facts import SaveTarget, gather_facts
from .finding import Finding
from .run import run_checks


def preflight(
    *,
    target: SaveTarget | None = None,
    config_file: str = "",
    host_bytes_wanted: int | None = None,
    device_bytes_wanted: int | None = None,
    say: Messages | None = None,
) -> list[Finding]:
    """Runs what takes milliseconds: no ``nvidia-smi``, no deepspeed (the launcher has looked at that one).

    Args:
        target: the output folder and what will be written to it.
        config_file: the accelerate config in use.
        host_bytes_wanted: host memory that the plan takes.
        device_bytes_wanted: GPU memory that the plan takes.
        say: the language; English by default.
    """
    facts = gather_facts(
        target=target,
        config_file=config_file,
        thorough=False,
        host_bytes_wanted=host_bytes_wanted,
        device_bytes_wanted=device_bytes_wanted,
    )
    return run_checks(facts, say or Messages())


def stop_on_errors(findings: Iterable[Finding], log: Callable[[str], object]) -> None:
    """Logs every warning and ends the run if there is an error.

    Raises:
        EnvironmentProblem: what would have ended the training later, all of it at once.
    """
    errors = []
    for found in findings:
        line = f"{found.evidence} {found.advice}".strip()
        if found.severity == "error":
            errors.append(f"{found.check}: {line}")
        elif found.severity == "warning":
            log(f"preflight={found.check} severity=warning {line}")
    if errors:
        raise EnvironmentProblem(" | ".join(errors) + " (MOSS_LOWMEM_PREFLIGHT=0 starts all the same.)")
