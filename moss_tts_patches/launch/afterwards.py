"""What to say after a training that could say nothing itself: was the host's memory full, or the GPU's?"""

from __future__ import annotations

import json
import signal
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ..memory.readings import CgroupReading, DeviceReading, HostReading
from ..messages import Messages, gib
from ..units import GIB

# Between the last reading and the kill lies up to a second, in which an arena of some GiB may have been allocated.
_FULL_BYTES, _FULL_SHARE = 2 * GIB, 0.1

# The driver itself keeps some hundred MiB; below 2 % the next allocation of a training fails.
_GPU_FULL_SHARE = 0.02

_SHELL_OFFSET = 128  # a shell reports a signal as 128 + its number


@dataclass(frozen=True)
class LastReadings:
    """What a training process wrote down last, see :class:`..memory.watcher.Watcher`."""

    pid: int
    time: float
    ended: bool
    phase: str
    host: HostReading
    device: DeviceReading | None


@dataclass(frozen=True)
class Ending:
    """How a command ended.

    Attributes:
        status: as a shell reports it.
        trainers: last readings of every training process that it started.
        oom_kills: how many processes the kernel killed for lack of memory meanwhile; None where it does not say.
        passed_on: the signal that the launcher was asked to pass on, if any.
        last_words: of training processes that the layer stopped, printed long before the end.
    """

    status: int
    trainers: Sequence[LastReadings] = ()
    oom_kills: int | None = None
    passed_on: int | None = None
    last_words: Sequence[str] = ()

    @property
    def lost(self) -> list[LastReadings]:
        """Training processes that ended without a word."""
        return [trainer for trainer in self.trainers if not trainer.ended]


def shell_status(returncode: int) -> int:
    """The status that a shell gives for ``subprocess``'s return code."""
    return _SHELL_OFFSET - returncode if returncode < 0 else returncode


def killing_signal(status: int) -> str:
    """``SIGKILL`` for 137; "" where the status means no signal."""
    try:
        return signal.Signals(status - _SHELL_OFFSET).name if status > _SHELL_OFFSET else ""
    except ValueError:
        return ""


def read_trainers(folder: Path) -> list[LastReadings]:
    """Reads what the watchers left in ``folder``."""
    found = []
    for path in sorted(folder.glob("*.json")):
        try:
            found.append(_parse(json.loads(path.read_text(encoding="utf-8"))))
        except (OSError, ValueError, KeyError, TypeError):  # not ours, or of another version
            continue
    return found


def _parse(content: dict[str, Any]) -> LastReadings:
    host, device = dict(content["host"]), content["device"]
    host["cgroup"] = CgroupReading(**host["cgroup"]) if host["cgroup"] else None
    return LastReadings(
        pid=int(content["pid"]),
        time=float(content["time"]),
        ended=bool(content["ended"]),
        phase=str(content["phase"]),
        host=HostReading(**host),
        device=DeviceReading(**device) if device else None,
    )


def explain_ending(ending: Ending, say: Messages) -> list[str]:
    """Explains an end by SIGKILL or SIGTERM, or of a training process that could say nothing; else no lines.

    What the layer itself stopped is named again: it stands above tracebacks of whatever launched the training.

    A process under ``accelerate launch`` that is killed ends the launcher with status 1: what tells is that its watcher
    did not mark the end.
    """
    if ending.status == 0 or ending.passed_on == signal.SIGINT:
        return []
    if ending.last_words:
        return [say("ended_by_the_layer", message=words.splitlines()[0]) for words in ending.last_words]
    killed_by = killing_signal(ending.status)
    if killed_by not in ("SIGKILL", "SIGTERM") and not ending.lost:
        return []
    if ending.passed_on is not None:
        lines = [say("ended_passed_on", signal=signal.Signals(ending.passed_on).name)]
    elif killed_by in ("SIGKILL", "SIGTERM"):
        lines = [say(f"ended_{killed_by.lower()}", status=ending.status)]
    else:
        lines = [say("ended_without_a_word", status=ending.status)]
    for trainer in ending.lost:
        lines.append(_describe(trainer, say))
    return [*lines, *_judge(ending, say)]


def _describe(trainer: LastReadings, say: Messages) -> str:
    host, device = trainer.host, trainer.device
    text = say(
        "ended_readings",
        pid=trainer.pid,
        phase=say(f"phase {trainer.phase}") if trainer.phase else "?",
        process=gib(host.process_bytes),
        free=gib(host.free_bytes),
        limit=gib(host.limit_bytes),
    )
    if device is not None:
        text += " " + say("ended_gpu_readings", free=gib(device.free_bytes), total=gib(device.total_bytes))
    return text


def _judge(ending: Ending, say: Messages) -> list[str]:
    verdicts = []
    full_host = [trainer for trainer in ending.lost if is_host_full(trainer.host)]
    if ending.oom_kills:
        verdicts.append(say("ended_oom_kill", count=ending.oom_kills))
    elif full_host:
        contained = any(trainer.host.limit_bytes < trainer.host.total_bytes for trainer in full_host)
        verdicts.append(say("ended_group_full" if contained else "ended_host_full"))
    devices = [trainer.device for trainer in ending.lost if trainer.device is not None]
    if any(device.is_spilled for device in devices):
        verdicts.append(say("ended_spilled"))
    elif any(is_gpu_full(device) for device in devices):
        verdicts.append(say("ended_gpu_full"))
    if not verdicts and ending.passed_on is None:
        verdicts.append(say("ended_not_full" if ending.lost else "ended_no_readings"))
    return verdicts


def is_host_full(host: HostReading) -> bool:
    """Whether there was so little left that the next allocation may have been the last."""
    return host.free_bytes < min(_FULL_BYTES, _FULL_SHARE * host.limit_bytes)


def is_gpu_full(device: DeviceReading) -> bool:
    """Whether the driver had nothing left to give."""
    return device.free_bytes < _GPU_FULL_SHARE * device.total_bytes
