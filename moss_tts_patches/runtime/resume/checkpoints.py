"""The trainer's own checkpoints during a replay: they were written by the interrupted run, and stay as they are."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from pathlib import Path
from typing import Any

from .run import ResumableRun


def unless_replaying(run: ResumableRun, save: Callable[..., Any], say: Callable[[str], None]) -> Callable[..., Any]:
    """Wraps a trainer's ``save_checkpoint``: a replay rewrites nothing, and has nothing to write.

    Args:
        run: tells whether a replay goes on.
        save: the trainer's, whose ``output_dir`` is the checkpoint's folder.
        say: logs a line.
    """
    signature = inspect.signature(save)

    @functools.wraps(save)
    def save_checkpoint(*args: Any, **options: Any) -> Any:
        if not run.replaying:
            run.quiet.end()
            return save(*args, **options)
        folder = Path(signature.bind(*args, **options).arguments["output_dir"])
        if not folder.is_dir():
            say(f"{folder.name} is not there and cannot be written: the resume point is of a later step than it")
        return None

    return save_checkpoint
