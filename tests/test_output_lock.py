"""One training at a time in an output folder, for as long as its process lives."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from moss_tts_patches.runtime.output_lock import claim

HOLDER = """
import os, sys, time
from pathlib import Path
from moss_tts_patches.runtime.output_lock import claim
claim(Path(sys.argv[1]), makes=True)
if not os.fork():  # a worker of the data loader, which outlives a killed trainer
    time.sleep(float(sys.argv[2]))
    os._exit(0)
print("held", flush=True)
time.sleep(60)
"""

pytestmark = pytest.mark.skipif(os.name == "nt", reason="folders are not locked there")


@pytest.fixture
def holder():
    """Starts a process that claims a folder and returns once it has."""
    started = []

    def start(folder: Path, worker_lives: float) -> subprocess.Popen[str]:
        command = [sys.executable, "-c", HOLDER, str(folder), str(worker_lives)]
        started.append(subprocess.Popen(command, stdout=subprocess.PIPE, text=True))
        assert started[-1].stdout.readline() == "held\n"
        return started[-1]

    yield start
    for process in started:
        process.kill()
        process.communicate()


def test_a_second_training_is_refused_until_the_first_has_ended(tmp_path, holder):
    folder, link = tmp_path / "out", tmp_path / "link"
    link.symlink_to(folder)
    claim(folder)  # not there yet: nothing is made
    assert not folder.exists()
    process = holder(folder, worker_lives=0.0)
    with pytest.raises(SystemExit, match="found another training that is writing into it"):
        claim(link, wait_seconds=0.0)
    process.send_signal(signal.SIGKILL)
    process.wait()
    claim(folder, wait_seconds=0.0)
    claim(link, makes=True, wait_seconds=0.0)  # by the same process, as often as it likes
    assert list(folder.iterdir()) == []


def test_the_workers_of_a_killed_training_are_waited_for(tmp_path, holder):
    process = holder(tmp_path, worker_lives=1.0)
    process.send_signal(signal.SIGKILL)
    process.wait()
    with pytest.raises(SystemExit):
        claim(tmp_path, wait_seconds=0.0)
    began = time.monotonic()
    claim(tmp_path)
    assert time.monotonic() - began < 10
