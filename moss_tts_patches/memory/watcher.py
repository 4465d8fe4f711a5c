"""Keeps the last memory readings on disk, for whoever has to explain why this process is gone.

A process that the kernel kills says nothing. What it had used, and what it was doing, has to be written down before:
about once a second, into one small file, by a thread that holds no lock and no memory worth mentioning.
"""

from __future__ import annotations

import atexit
import json
import os
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import asdict
from pathlib import Path
from typing import Any

from .oom_report import write_whole
from .readings import read_device, read_host

# A page-locked arena grows at some GiB/s: once a second sees it coming. One costs 4 ms on a busy machine.
INTERVAL_SECONDS = 1.0


def current_readings(gpu: int | None = None) -> dict[str, Any]:
    """Host memory of this process and, by the GPU's index, its GPU's, as plain values."""
    device = read_device(gpu)
    return {"host": asdict(read_host()), "device": None if device is None else asdict(device)}


class Watcher:
    """Writes readings until the process ends; an orderly end is marked as one.

    Args:
        path: the file; its folder exists.
        phase: what the run is doing, such as ``tracker.current``.
        read: one set of readings.
        interval_seconds: between two of them.
    """

    def __init__(
        self,
        path: Path,
        phase: Callable[[], str] = lambda: "",
        read: Callable[[], dict[str, Any]] = current_readings,
        interval_seconds: float = INTERVAL_SECONDS,
    ) -> None:
        self._path, self._phase, self._read, self._interval = path, phase, read, interval_seconds
        self._ended = threading.Event()
        self._thread: threading.Thread | None = None
        self._owner = os.getpid()

    def start(self) -> None:
        """Writes the first readings and goes on in a thread."""
        self._write(ended=False)
        self._thread = threading.Thread(target=self._run, name="lowmem-watcher", daemon=True)
        self._thread.start()
        atexit.register(self.stop)

    def stop(self) -> None:
        """Marks the end as orderly: with an error or without, Python itself has said what there is to say."""
        if self._thread is None or os.getpid() != self._owner:  # a forked worker that ends is not the end of the run
            return
        self._ended.set()
        self._thread.join(timeout=10 * self._interval)
        self._thread = None
        atexit.unregister(self.stop)
        self._write(ended=True)

    def _run(self) -> None:
        while not self._ended.wait(self._interval):
            self._write(ended=False)

    def _write(self, *, ended: bool) -> None:
        with suppress(Exception):  # neither a full disk nor a driver in trouble ends a training
            readings = self._read()  # a driver in trouble answers late, and must not unsay the orderly end
            if self._ended.is_set() and not ended:
                return
            content = {"pid": os.getpid(), "time": time.time(), "ended": ended, "phase": self._phase(), **readings}
            write_whole(self._path, json.dumps(content))
