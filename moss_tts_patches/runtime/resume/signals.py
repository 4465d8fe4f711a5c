"""Turns SIGTERM and SIGINT into a wish to stop, which the training grants after the micro-batch that it is at."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable
from types import FrameType
from typing import Any

# SIGINT: Ctrl-C; SIGTERM: what a scheduler, systemd or a shutdown sends, 10 to 90 s before it kills.
HEARD = (signal.SIGTERM, signal.SIGINT)
# torchrun passes Ctrl-C on to processes that have it from the terminal already, some milliseconds later.
ECHO_SECONDS = 1.0


class StopWish:
    """Remembers the first signal; a second one, but for its echo, does what it would have done without the layer.

    Args:
        say: logs a line.

    Attributes:
        number: of the signal that came, or None.
    """

    def __init__(self, say: Callable[[str], None]) -> None:
        self.number: int | None = None
        self._say = say
        self._before: dict[int, Any] = {}
        self._process = os.getpid()
        self._heard_at = 0.0

    def listen(self) -> None:
        """Takes the place of the handlers; one that ignores its signal (``nohup``) stays."""
        self._process = os.getpid()
        for number in HEARD:
            if number not in self._before and signal.getsignal(number) is not signal.SIG_IGN:
                self._before[number] = signal.signal(number, self._heard)

    def stop_listening(self) -> None:
        """Puts the former handlers back."""
        while self._before:
            signal.signal(*self._before.popitem())

    @property
    def exit_status(self) -> int:
        """128 + N, as a shell reports a process that signal N ended."""
        assert self.number is not None
        return 128 + self.number

    def _heard(self, number: int, _: FrameType | None) -> None:
        if os.getpid() != self._process:
            return  # a worker of the data loader, forked with this handler: its parent ends it
        if self.number is not None:
            if number == self.number and time.monotonic() - self._heard_at < ECHO_SECONDS:
                return
            self.stop_listening()
            signal.raise_signal(number)
            return
        self.number, self._heard_at = number, time.monotonic()
        self._say(
            f"signal={signal.Signals(number).name}: stopping after this micro-batch, with a resume point; "
            "a second one stops at once"
        )
