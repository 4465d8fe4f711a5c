"""Kills at random moments, saves included: a training can always go on, and a torn point is never taken for whole."""

from __future__ import annotations

import json
import os
import random
import signal
import threading
import time
from pathlib import Path

import psutil
import pytest
import torch
from mini import MiniServer, make_mini_inputs
from safetensors.torch import load_file
from test_training_runs import ON

from moss_tts_patches.errors import StateError
from moss_tts_patches.runtime.resume.point import MANIFEST, points_in, read_point, remove_older, write_point

SEED = 8
KILLS_OF_WRITERS = 50
KILLS_OF_TRAININGS = 4
KEEP = 2


def payload(serial: int) -> bytes:
    return random.Random(serial).randbytes(200_000)


def write_for_ever(root: Path, first: int) -> None:
    """Saves a point a step, as a training does, until it is killed."""
    for step in range(first, first + 10**6):

        def write(folder: Path, step: int = step) -> None:
            for part in range(3):
                (folder / f"part-{part}.safetensors").write_bytes(payload(step + part))

        write_point(root, {"position": {"steps": step}}, {0: {"step": step}}, write, lambda line: None)
        remove_older(root, KEEP, lambda line: None)


def kill_a_writer(seconds: float, root: Path, first: int) -> None:
    """In a forked process: 20 ms each instead of 3 s for the imports."""
    child = os.fork()
    if child == 0:
        try:
            write_for_ever(root, first)
        finally:
            os._exit(1)
    time.sleep(seconds)
    os.kill(child, signal.SIGKILL)
    _, status = os.waitpid(child, 0)
    assert os.WIFSIGNALED(status), "the writer ended by itself"


@pytest.fixture(scope="module")
def root(tmp_path_factory):
    return tmp_path_factory.mktemp("points") / "resume"


@pytest.fixture(scope="module")
def killed_writers(root):
    """Kills 50 writers one after the other in the same folder; returns what each left."""
    moments, left = random.Random(SEED), []
    first = 1
    for _ in range(KILLS_OF_WRITERS):
        kill_a_writer(moments.uniform(0.005, 0.08), root, first)
        names = {path.name for path in root.iterdir()} if root.exists() else set()
        points = points_in(root)
        for point in points:
            step = point.step
            assert point.rank_values(0) == {"step": step}
            for part in range(3):
                assert (point.folder / f"part-{part}.safetensors").read_bytes() == payload(step + part)
        left.append((names, [point.step for point in points]))
        first = max([first, *(point.step for point in points)]) + 1
    return left


def test_every_point_that_is_found_is_whole(killed_writers):
    steps = [found for _, found in killed_writers]
    assert sum(1 for found in steps if found) > KILLS_OF_WRITERS // 2
    newest = [max(found) for found in steps if found]
    assert newest == sorted(newest)  # none is lost once it was there
    # A kill between a save and what goes for it leaves one more each time; the save of a run that lives takes them all.
    assert all(min(len(found), KEEP) == KEEP for found in steps[10:])


def test_one_save_that_is_not_killed_clears_up(killed_writers, root):
    """Whatever the fifty left: half folders go, and the last two points stay."""
    step = max(point.step for point in points_in(root)) + 1
    write_point(root, {"position": {"steps": step}}, {0: {}}, lambda folder: None, print)
    remove_older(root, KEEP, print)
    assert len(list(root.iterdir())) == len(points_in(root)) == KEEP
    assert points_in(root)[0].step == step


def test_the_kills_did_come_in_the_middle_of_saving(killed_writers):
    torn = [names for names, _ in killed_writers if any(".incomplete-" in name for name in names)]
    assert len(torn) >= 5


def test_control_a_point_written_under_its_own_name_is_torn(tmp_path):
    """What the rename is for, and that the sizes in the manifest show it."""
    whole = write_point(
        tmp_path, {"position": {"steps": 1}}, {0: {}}, lambda folder: (folder / "a").write_bytes(b"x" * 100), print
    )
    assert read_point(whole).step == 1
    (whole / "a").write_bytes(b"x" * 99)
    with pytest.raises(StateError, match="a has 99 bytes, expected 100"):
        read_point(whole)
    (whole / "a").unlink()
    with pytest.raises(StateError, match="not whole"):
        read_point(whole)
    (whole / MANIFEST).write_text('{"form')
    with pytest.raises(StateError, match="cannot be read"):
        read_point(whole)
    assert points_in(tmp_path) == []


def test_older_points_go_by_when_they_were_saved_not_by_their_step(tmp_path):
    for step in (5, 9, 3):
        write_point(tmp_path, {"position": {"steps": step}}, {0: {}}, lambda folder: None, print)
    remove_older(tmp_path, 2, print)
    assert [point.step for point in points_in(tmp_path)] == [3, 9]


def test_killed_trainings_go_on_to_the_same_weights(tmp_path):
    """kill -9 again and again in one training, which then ends with the weights of one that was left alone."""
    inputs = make_mini_inputs(tmp_path / "inputs", records=10, frames=(8, 12))
    arguments = ("--num-epochs", "4")
    environment = {**ON, "MOSS_LOWMEM_SAVE_STEPS": "1", "MOSS_LOWMEM_LONGEST_FIRST": "0"}
    moments = random.Random(SEED)
    training = ("moss_tts_local", inputs, tmp_path / "out")
    with MiniServer() as server:
        whole = server.run("moss_tts_local", inputs, tmp_path / "whole", *arguments, environment=ON)
        kills, resumed = 0, 0
        for _ in range(KILLS_OF_TRAININGS):
            killer = _Killer(tmp_path / "out", moments.randint(1, 3))
            run = server.run(
                "moss_tts_local", inputs, tmp_path / "out", *arguments, environment=environment, check=False
            )
            killer.join()
            kills += run.status == -signal.SIGKILL
            resumed += "resume replayed=" in run.output
        last = server.run(*training, *arguments, environment=environment)
    assert kills >= KILLS_OF_TRAININGS - 1 and resumed >= kills - 1
    for name in ("checkpoint-epoch-2", "checkpoint-epoch-3"):
        found = load_file(last.folder / name / "model.safetensors")
        expected = load_file(whole.folder / name / "model.safetensors")
        assert all(torch.equal(found[key], expected[key]) for key in expected)
    assert len(points_in(tmp_path / "out" / "resume")) == 2


class _Killer(threading.Thread):
    """Kills the trainer a random moment after it has saved some points; its number is in the folders' names."""

    def __init__(self, output: Path, saves: int) -> None:
        super().__init__(daemon=True)
        self._root, self._saves = output / "resume", saves
        self._before = _newest(self._root)
        self.start()

    def run(self) -> None:
        end = time.monotonic() + 60
        while time.monotonic() < end and _newest(self._root) < self._before + self._saves:
            time.sleep(0.002)
        for process in _trainers(self._root):
            os.kill(process, signal.SIGKILL)


def _newest(root: Path) -> int:
    return max((point.serial for point in points_in(root)), default=0)


def _trainers(root: Path) -> list[int]:
    """The process that prints into this training's log; its server is its parent."""
    found = []
    for process in psutil.Process().children(recursive=True):
        try:
            if os.readlink(f"/proc/{process.pid}/fd/1") == str(root.parent.with_suffix(".log")):
                found.append(process.pid)
        except OSError:
            continue
    return found


def test_the_manifest_is_plain_json(tmp_path):
    folder = write_point(tmp_path, {"position": {"steps": 2}, "family": "x"}, {0: {"a": 1}}, lambda folder: None, print)
    assert json.loads((folder / MANIFEST).read_text())["files"] == {"rank-00000.json": 8}
