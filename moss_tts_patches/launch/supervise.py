"""Runs a command as a shell would, and explains its end where it could not do so itself.

``python -m moss_tts_patches.launch.supervise COMMAND [ARGUMENTS…]`` is how ``run_train_lowmem.sh`` ends.
The command keeps the terminal, standard streams and process group; signals are passed on; the status is its own.
"""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterable, Mapping
from pathlib import Path
from types import FrameType

import psutil  # comes with accelerate

from ..last_words import READINGS_VARIABLE
from ..last_words import read as read_last_words
from ..memory.readings import HostReading, is_wsl, read_host
from ..messages import Messages, language_of
from .afterwards import Ending, explain_ending, read_trainers, shell_status
from .allocator import allocator_environment, installed_torch

_PASSED_ON = tuple(
    getattr(signal, name) for name in ("SIGINT", "SIGTERM", "SIGHUP") if hasattr(signal, name)
)  # Windows has no SIGHUP


def prepared_environment(environment: Mapping[str, str], python: str | None = None) -> dict[str, str]:
    """Adds what a training needs from its launcher before torch is imported.

    Args:
        environment: with the layer switched on.
        python: that trains, as far as it is known.
    """
    version = installed_torch(python or sys.executable)
    return allocator_environment(environment, version, native_linux=sys.platform == "linux" and not is_wsl())


def supervise(program: str, command: list[str], environment: Mapping[str, str]) -> int:
    """Runs ``command``, passes signals on and says what happened if it was killed.

    Args:
        program: the file to execute.
        command: its name and arguments.
        environment: all its variables.

    Returns:
        The status as a shell reports it: 128 + N for signal N.

    Raises:
        OSError: ``program`` could not be started.
    """
    folder = Path(tempfile.mkdtemp(prefix="moss_lowmem_"))
    try:
        before = read_host()
        child = _Child(folder)
        status = child.run(program, command, {**environment, READINGS_VARIABLE: str(folder)})
        words = read_last_words(folder, but=child.pid)
        ending = Ending(status, read_trainers(folder), _oom_kills(before, read_host()), child.passed_on, words)
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    for line in explain_ending(ending, Messages(language_of(environment))):
        print(f"[lowmem] {line}", file=sys.stderr, flush=True)
    return status


def _oom_kills(before: HostReading, after: HostReading) -> int | None:
    """Counts the kernel's kills meanwhile: in our own control group where it counts them, else on the machine."""
    pairs = [(before.oom_kills, after.oom_kills)]
    if before.cgroup is not None and after.cgroup is not None and before.cgroup.folder == after.cgroup.folder:
        pairs.insert(0, (before.cgroup.oom_kills, after.cgroup.oom_kills))
    for first, last in pairs:
        if first is not None and last is not None:
            return last - first
    return None


class _Child:
    """A running command and the signals that are meant for it.

    Attributes:
        passed_on: the last signal that was passed on or that the terminal gave to everyone.
    """

    def __init__(self, folder: Path) -> None:
        self.passed_on: int | None = None
        self._folder = folder
        self._process: subprocess.Popen[bytes] | None = None
        self._told: set[psutil.Process] = set()

    @property
    def pid(self) -> int:
        """Number of the command's own process, 0 before there is one."""
        return self._process.pid if self._process is not None else 0

    def run(self, program: str, command: list[str], environment: Mapping[str, str]) -> int:
        """Starts the command; waits for it and for every process that a signal was passed on to."""
        # What is ignored here (SIGHUP under nohup) is ignored there: nobody means it to arrive.
        heard = [number for number in _PASSED_ON if signal.getsignal(number) is not signal.SIG_IGN]
        before = {number: signal.signal(number, self._pass_on) for number in heard}
        try:
            self._process = subprocess.Popen(command, executable=program, env=dict(environment))
            if self.passed_on is not None:  # it came while the command was being started
                self._pass_on(self.passed_on, None)
            status = shell_status(self._process.wait())
            # The command may be a shell that dies at once, while the training that it started saves its state.
            while psutil.wait_procs(self._told, timeout=1)[1]:
                pass
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)
        # A launcher in between turns the training's 143 into its own 1.
        return shell_status(-self.passed_on) if status == 1 and self.passed_on is not None else status

    def _pass_on(self, number: int, _: FrameType | None) -> None:
        self.passed_on = number
        targets = self._targets()
        self._told.update(targets)
        if number == signal.SIGINT and _in_foreground():
            return  # the terminal has told every process of the group itself; a second time means "at once" to many
        for target in targets:
            try:
                target.send_signal(number)
            except psutil.Error:  # ended meanwhile
                continue

    def _targets(self) -> list[psutil.Process]:
        """The training processes, or, where none has begun, the command with everything that it started.

        Only the training: a signal to its data loading workers would look like a crash to it, and a launcher in between
        would be gone before the training has saved.
        """
        family = _family(self._process.pid) if self._process is not None else []
        trainers = {trainer.pid for trainer in read_trainers(self._folder) if not trainer.ended}
        return [process for process in family if process.pid in trainers] or family


def _family(pid: int) -> list[psutil.Process]:
    try:
        process = psutil.Process(pid)
        return [process, *process.children(recursive=True)]
    except psutil.Error:
        return []


def _in_foreground() -> bool:
    """Whether this process belongs to the foreground group of a terminal, which gets Ctrl-C as a whole."""
    if os.name == "nt":  # consoles do the same
        return True
    try:
        with open("/dev/tty", "rb", buffering=0) as terminal:
            return os.tcgetpgrp(terminal.fileno()) == os.getpgrp()
    except OSError:
        return False


def main(arguments: Iterable[str]) -> int:
    command = list(arguments)
    program = shutil.which(command[0])
    if program is None:
        print(f"[lowmem] error: {command[0]}: command not found.", file=sys.stderr)
        return 127
    return supervise(program, command, prepared_environment(os.environ))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
