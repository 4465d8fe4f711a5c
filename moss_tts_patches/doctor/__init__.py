"""Preflight: what would end or spoil the training, found before it starts.

Each file holds one group of checks: pure functions of facts that :mod:`.facts` gathers, so that every situation can be
tested on any machine.
"""

from .finding import Finding, Severity
from .preflight import preflight, stop_on_errors
from .run import run_checks

__all__ = ["Finding", "Severity", "preflight", "run_checks", "stop_on_errors"]
