"""One training at a time in an output folder: two would replace each other's checkpoints and resume points.

The folder itself is locked, so that no file is left behind; the system gives the lock back when the process ends,
however it ends.
"""

from __future__ import annotations

import os
import time
from pathlib import Path

from ..errors import EnvironmentProblem, ending_the_run

try:
    import fcntl
except ImportError:  # Windows
    fcntl = None  # type: ignore[assignment]

# A data loader's workers hold a killed trainer's lock until they look for it, every 5 s (torch's
# MP_STATUS_CHECK_INTERVAL): the same command, started again at once, waits for them.
WAIT_SECONDS = 10.0
_ASK_SECONDS = 0.2

_held: dict[tuple[int, str], int] = {}


@ending_the_run()
def claim(folder: Path, *, makes: bool = False, wait_seconds: float = WAIT_SECONDS) -> None:
    """Has this process alone train into ``folder`` until it ends.

    Args:
        folder: of the trainer's output; where it does not exist, nothing happens.
        makes: it is made where it does not exist.
        wait_seconds: for a process that is about to end.

    Raises:
        SystemExit: another process trains into it.
    """
    if makes:
        folder.mkdir(parents=True, exist_ok=True)
    key = os.getpid(), os.path.realpath(folder)
    if fcntl is None or key in _held or not folder.is_dir():
        return
    descriptor = os.open(folder, os.O_RDONLY)
    until = time.monotonic() + wait_seconds
    while True:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            if time.monotonic() < until:
                time.sleep(_ASK_SECONDS)
                continue
            os.close(descriptor)
            raise EnvironmentProblem(
                f"output folder {folder}: found another training that is writing into it, expected one at a time. "
                "Their checkpoints and resume points would take each other's place. Choose another OUTPUT_DIR, or end "
                "the other one first."
            ) from None
        except OSError:  # a network disk without such locks
            os.close(descriptor)
        else:
            _held[key] = descriptor
        return
