"""One step of the learning rate per step of the optimizer, whatever the number of processes."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from accelerate.scheduler import AcceleratedScheduler


def step_rate_once(prepared: Iterable[Any], processes: int) -> str | None:
    """Keeps accelerate from stepping the learning rate once per process at every optimizer step.

    Upstream sizes its schedule in optimizer steps, so that on N processes the rate would reach its end after 1/N of the
    training. accelerate's own switch for it says that a batch is split between the processes, which is when it counts
    as upstream does.

    Args:
        prepared: what ``accelerator.prepare`` returned.
        processes: how many there are.

    Returns:
        What was changed, or None.

    Source: accelerate ``scheduler.py``, ``AcceleratedScheduler.step``; upstream ``sft.py``, ``main``.
    """
    wrong = [
        item
        for item in prepared
        if isinstance(item, AcceleratedScheduler) and item.step_with_optimizer and not item.split_batches
    ]
    if processes == 1 or not wrong:
        return None
    for scheduler in wrong:
        scheduler.split_batches = True
    return (
        f"the learning rate takes one step per optimizer step (upstream: {processes}, so that its schedule ends after "
        f"1/{processes} of the training)"
    )
