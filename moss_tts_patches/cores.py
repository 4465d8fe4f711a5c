"""How many cores there are for this process, which the machine's number does not tell."""

from __future__ import annotations

import os


def cores() -> int:
    """Returns how many cores this process may use."""
    affinity = getattr(os, "sched_getaffinity", None)  # Linux
    return len(affinity(0)) if affinity is not None else os.cpu_count() or 1
