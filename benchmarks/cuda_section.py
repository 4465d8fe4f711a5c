"""The part of docs/benchmarks.md about real cards, while there is no results file of one: every run that waits."""

from __future__ import annotations

from gpu import CAPS_GIB, RUNGS


def write_cuda() -> str:
    """One row for each run that the prepared script makes."""
    lines = ["| memory cap | run | peak allocated, reserved, s/micro-batch, s/step |", "|---|---|---|"]
    names = ["upstream-checkpointing", *(rung.name for rung in RUNGS)]
    for cap in [*(f"{cap} GiB" for cap in CAPS_GIB), "none"]:
        lines += [f"| {cap} | `{name}` | not yet measured on a GPU |" for name in names]
    return "\n".join(lines) + "\n\nThe script is prepared and tested on a CPU; it needs a card and nothing else."
