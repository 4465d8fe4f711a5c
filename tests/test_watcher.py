"""The watcher's readings, and what is said of a training that was killed."""

from __future__ import annotations

import dataclasses
import json
import os
import signal
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from moss_tts_patches.launch.afterwards import (
    Ending,
    LastReadings,
    explain_ending,
    killing_signal,
    read_trainers,
    shell_status,
)
from moss_tts_patches.memory.readings import CgroupReading, DeviceReading, HostReading
from moss_tts_patches.memory.watcher import Watcher
from moss_tts_patches.messages import Messages
from moss_tts_patches.units import GIB

SECONDS_ALLOWED = 30


def wait_for(condition: Callable[[], object]) -> None:
    deadline = time.monotonic() + SECONDS_ALLOWED
    while not condition():
        assert time.monotonic() < deadline, "it did not happen"
        time.sleep(0.02)


# -- the watcher ------------------------------------------------------------------------------------------------------


def content(path: Path) -> dict:
    return json.loads(path.read_text())


def test_readings_are_on_disk_from_the_start_and_renewed(tmp_path: Path) -> None:
    path, numbers = tmp_path / "1.json", iter(range(10**6))
    watcher = Watcher(path, lambda: "backward", lambda: {"number": next(numbers)}, interval_seconds=0.01)
    watcher.start()
    first = content(path)
    assert (first["pid"], first["ended"], first["phase"]) == (os.getpid(), False, "backward")
    wait_for(lambda: content(path)["number"] > first["number"] + 3)
    watcher.stop()
    last = content(path)
    assert last["ended"] is True
    time.sleep(0.05)
    assert content(path) == last and [entry.name for entry in tmp_path.iterdir()] == ["1.json"]
    watcher.stop()  # a second time does nothing
    assert content(path) == last


def test_real_readings_are_read_back(tmp_path: Path) -> None:
    watcher = Watcher(tmp_path / "1.json", lambda: "save")
    watcher.start()
    watcher.stop()
    (found,) = read_trainers(tmp_path)
    assert (found.pid, found.phase, found.ended, found.device) == (os.getpid(), "save", True, None)
    assert 0 < found.host.process_bytes < found.host.total_bytes


def test_a_full_disk_or_a_driver_in_trouble_ends_nothing(tmp_path: Path) -> None:
    def read() -> dict:
        raise RuntimeError("the driver is gone")

    for watcher in (Watcher(tmp_path / "gone" / "1.json"), Watcher(tmp_path / "2.json", read=read)):
        watcher.start()
        watcher.stop()
    assert list(tmp_path.iterdir()) == []


def test_what_is_not_ours_is_not_read(tmp_path: Path) -> None:
    for number, text in enumerate(("", "[]", '{"pid": 1}', '{"pid": 1, "time": 0, "ended": false, "host": {}}')):
        (tmp_path / f"{number}.json").write_text(text)
    assert read_trainers(tmp_path) == []


# -- explanations -----------------------------------------------------------------------------------------------------

HOST = HostReading(9 * GIB, 32 * GIB, 12 * GIB, 0, 0)
FULL_HOST = dataclasses.replace(HOST, available_bytes=GIB)
FULL_GROUP = dataclasses.replace(HOST, cgroup=CgroupReading("/g", 16 * GIB, 15 * GIB))
DEVICE = DeviceReading(16 * GIB, 4 * GIB, 11 * GIB, 12 * GIB)
FULL_DEVICE = dataclasses.replace(DEVICE, free_bytes=GIB // 8)
SPILLED_DEVICE = dataclasses.replace(FULL_DEVICE, reserved_bytes=17 * GIB)


def trainer(host: HostReading = HOST, device: DeviceReading | None = DEVICE, *, ended: bool = False) -> LastReadings:
    return LastReadings(7, 0.0, ended, "optimizer step", host, device)


def explained(ending: Ending, language: str = "en") -> str:
    return "\n".join(explain_ending(ending, Messages(language)))  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("found", "expected"),
    [
        (trainer(FULL_HOST), "Host memory was full. Keep more on the GPU"),
        (trainer(FULL_GROUP), "The memory limit of the container was reached"),
        (trainer(device=FULL_DEVICE), "GPU memory was full. Move more to host memory"),
        (trainer(device=SPILLED_DEVICE), "the driver spilled into system RAM"),
        (trainer(device=None), "Neither host memory nor the GPU was full"),
        (trainer(), "Neither host memory nor the GPU was full"),
    ],
)
@pytest.mark.parametrize("status", [137, 1])  # 1: `accelerate launch` when the process that it started is killed
def test_what_was_full_is_said(found: LastReadings, expected: str, status: int) -> None:
    text = explained(Ending(status, [found]))
    assert expected in text and "process 7, during the optimizer step" in text
    others = ("Host memory was full", "limit of the container", "GPU memory was full", "spilled", "Neither")
    assert sum(mark in text for mark in others) == 1
    assert ("SIGKILL" in text) == (status == 137) and ("without a word" in text) == (status == 1)


def test_the_kernels_own_count_is_proof() -> None:
    text = explained(Ending(137, [trainer()], oom_kills=2))
    assert "Host memory was full: the kernel killed 2 process(es)" in text and "Neither" not in text
    assert "Neither" in explained(Ending(137, [trainer()], oom_kills=0))


@pytest.mark.parametrize(
    "ending",
    [
        Ending(0, [trainer(FULL_HOST)]),
        Ending(1, [trainer(FULL_HOST, ended=True)]),  # Python has said itself what went wrong
        Ending(1),
        Ending(2),
        Ending(130, [trainer()], passed_on=signal.SIGINT),
    ],
)
def test_an_end_that_needs_no_words_gets_none(ending: Ending) -> None:
    assert explained(ending) == ""


def test_ends_by_others() -> None:
    assert "told to end by somebody else (SIGTERM, status 143)" in explained(Ending(143, [trainer()]))
    passed_on = explained(Ending(143, [trainer(FULL_HOST)], passed_on=signal.SIGTERM))
    assert "passed on by this launcher" in passed_on and "Host memory was full" in passed_on
    assert "Neither" not in explained(Ending(143, [trainer()], passed_on=signal.SIGTERM))
    assert "No training process had written readings" in explained(Ending(137))


def test_the_same_in_chinese() -> None:
    text = explained(Ending(137, [trainer(FULL_HOST)]), "zh")
    assert "命令被系统杀死" in text and "内存已满" in text and "was" not in text


def test_statuses() -> None:
    assert [shell_status(code) for code in (0, 7, -9, -15)] == [0, 7, 137, 143]
    assert [killing_signal(status) for status in (0, 128, 137, 143, 255)] == ["", "", "SIGKILL", "SIGTERM", ""]
