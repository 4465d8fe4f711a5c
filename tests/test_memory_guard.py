"""Phases that run out of memory: what is reported, and that the original error goes on; once for real."""

from __future__ import annotations

import gc
import json
import subprocess
import sys
import time
import weakref
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import cast

import pytest
import torch
from launcher import environment_of
from test_oom_report import GPU_MESSAGE, ON_GPU, SIZES

from moss_tts_patches.memory.candidates import gpu_candidates
from moss_tts_patches.memory.guard import MemoryGuard, device_bytes_by_category
from moss_tts_patches.memory.oom_report import (
    FILE_NAME,
    PhaseTracker,
    Situation,
    reporting_out_of_memory,
)
from moss_tts_patches.memory.readings import DeviceReading
from moss_tts_patches.messages import Messages
from moss_tts_patches.runtime.watch import MachineWatch, Surroundings
from moss_tts_patches.units import GIB

# -- phases -----------------------------------------------------------------------------------------------------------


def fail(
    error: BaseException, *phases: str, folder: Path | None = None, describe: Callable[[], Situation] = Situation
) -> list[str]:
    """Raises ``error`` within ``phases``; returns what was shown."""
    shown: list[str] = []
    tracker = PhaseTracker()

    def within(remaining: tuple[str, ...]) -> None:
        if not remaining:
            raise error
        with reporting_out_of_memory(
            remaining[0],
            tracker,
            describe,
            folder=folder,
            say=Messages(),
            show=shown.append,  # type: ignore[arg-type]
        ):
            assert tracker.current == remaining[0]
            within(remaining[1:])

    with pytest.raises(type(error)) as caught:
        within(phases)
    assert caught.value is error and tracker.current == "other"
    return shown


def test_the_innermost_phase_reports_once() -> None:
    (shown,) = fail(torch.OutOfMemoryError(GPU_MESSAGE), "backward", "forward chunk")
    assert "during the forward pass" in shown


@pytest.mark.parametrize("error", [RuntimeError("shapes"), KeyboardInterrupt(), SystemExit("[lowmem] error: x")])
def test_other_errors_pass_in_silence(error: BaseException, tmp_path: Path) -> None:
    assert fail(error, "backward", folder=tmp_path) == []
    assert list(tmp_path.iterdir()) == []


def test_the_original_error_is_untouched() -> None:
    cause = ValueError("cause")
    error = torch.OutOfMemoryError(GPU_MESSAGE)
    error.__cause__ = cause
    fail(error, "save")
    assert error.args == (GPU_MESSAGE,) and error.__cause__ is cause and error.__context__ is None
    assert not hasattr(error, "__notes__")


def test_a_report_that_fails_does_not_hide_the_error(tmp_path: Path) -> None:
    def describe() -> Situation:
        raise RuntimeError("no memory to describe with")

    (tmp_path / "file").write_text("")
    (shown,) = fail(MemoryError(), "load", folder=tmp_path / "file" / "output", describe=describe)
    assert "Host memory ran out during the loading of the model" in shown and "Written" not in shown


def test_a_second_failure_is_reported_too() -> None:
    shown: list[str] = []
    tracker = PhaseTracker()
    for _ in range(2):
        with (
            pytest.raises(MemoryError),
            reporting_out_of_memory("backward", tracker, Situation, folder=None, say=Messages(), show=shown.append),
        ):
            raise MemoryError
    assert len(shown) == 2


def test_a_reported_error_is_let_go() -> None:
    """Its frames hold the tensors of the step that failed."""

    class Tensor:
        pass

    def step() -> None:
        held = Tensor()
        references.append(weakref.ref(held))
        raise MemoryError

    references: list[weakref.ref[Tensor]] = []
    tracker = PhaseTracker()
    try:
        with reporting_out_of_memory("backward", tracker, Situation, folder=None, say=Messages(), show=print):
            step()
    except MemoryError:
        pass
    gc.collect()
    assert references[0]() is None


# -- the guard --------------------------------------------------------------------------------------------------------


def test_the_guard_says_what_the_session_told_it(tmp_path: Path) -> None:
    shown: list[str] = []
    guard = MemoryGuard(tmp_path, Messages(), shown.append)
    guard.plan, guard.records = {"weights": GIB}, [("utt-1", 3000)]
    guard.measure = lambda: {"weights": 2 * GIB}
    guard.gpu_candidates = lambda: gpu_candidates(SIZES, ON_GPU)
    steps = []

    def step(closure: str) -> str:
        if len(steps) == 2:
            raise torch.OutOfMemoryError(GPU_MESSAGE)
        steps.append((closure, guard.tracker.current))
        return closure

    guarded = guard.within(lambda: "optimizer step" if steps else "optimizer state creation", step)
    assert [guarded("a"), guarded(closure="b")] == ["a", "b"]
    assert steps == [("a", "optimizer state creation"), ("b", "optimizer step")] and guarded.__name__ == "step"
    with pytest.raises(torch.OutOfMemoryError):
        guarded("c")
    (text,) = shown
    assert "during the optimizer step" in text and "utt-1 (3000)" in text
    assert "planned 1.00 GiB, found 2.00 GiB" in text and "MOSS_LOWMEM_STATES=host" in text
    content = json.loads((tmp_path / FILE_NAME).read_text())
    assert content["host"]["process_bytes"] > 0 and content["device"] is None


@pytest.mark.parametrize("looked_for", [True, False])
def test_the_guard_keeps_readings_where_somebody_looks_for_them(tmp_path: Path, looked_for: bool) -> None:
    code = (
        "import sys\nfrom pathlib import Path\nfrom moss_tts_patches.memory.guard import MemoryGuard\n"
        "from moss_tts_patches.messages import Messages\n"
        "guard = MemoryGuard(None, Messages(), print, Path(sys.argv[1]) if sys.argv[1] else None)\n"
        "guard.watch()\nwith guard.phase('save'): pass\n"
    )
    command = [sys.executable, "-c", code, str(tmp_path) if looked_for else ""]
    subprocess.run(command, env=environment_of(), check=True, capture_output=True)
    assert [json.loads(path.read_text())["ended"] for path in tmp_path.iterdir()] == ([True] if looked_for else [])


def test_each_process_asks_its_own_gpu(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A thread's current GPU is the first one, where asking would take 0.3 GiB for each process on another."""
    asked = []
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda *device: asked.append(device) or (GIB, 8 * GIB))
    monkeypatch.setattr(torch.cuda, "memory_allocated", lambda *device: asked.append(device) or 1)
    monkeypatch.setattr(torch.cuda, "memory_reserved", lambda *device: asked.append(device) or 2)
    watch = MachineWatch(Surroundings(readings_folder=tmp_path), print)
    watch.started(tmp_path)
    assert not asked and watch.guard.situation().device is None  # accelerate has not said yet which one it is
    watch.device_known(torch.device("cuda:2"))
    assert watch.guard.situation().device == DeviceReading(8 * GIB, GIB, 1, 2)
    (path,) = tmp_path.glob("*.json")
    deadline = time.monotonic() + 30
    while json.loads(path.read_text())["device"] is None:
        assert time.monotonic() < deadline
        time.sleep(0.02)
    assert set(asked) == {(2,)}


def test_memory_is_told_apart() -> None:
    model = torch.nn.Sequential(torch.nn.Linear(8, 8, bias=False), torch.nn.Linear(8, 8, bias=False))
    model[1].weight = model[0].weight
    model.register_buffer("table", torch.zeros(4))
    cpu = torch.device("cpu")
    found = device_bytes_by_category(model, cpu, gradients=100, states=50, allocated=1000)
    assert found == {"weights": 256 + 16, "gradients": 100, "states": 50, "other": 1000 - 272 - 150}
    assert device_bytes_by_category(model, torch.device("meta"), gradients=0, states=0, allocated=0)["weights"] == 0


@pytest.mark.parametrize(("device", "weights"), [("cuda", 256), ("cuda:1", 256), ("cuda:0", 0), ("cpu", 0)])
def test_one_process_has_a_gpu_without_an_index(device: str, weights: int) -> None:
    """accelerate's device is ``cuda`` then, and that of tensors ``cuda:0``."""
    stand_in = SimpleNamespace(
        device=torch.device("cuda:1"),
        untyped_storage=lambda: SimpleNamespace(data_ptr=lambda: 0, nbytes=lambda: 256),
    )
    model = cast(torch.nn.Module, SimpleNamespace(parameters=lambda: [stand_in], buffers=list))
    found = device_bytes_by_category(model, torch.device(device), gradients=0, states=0, allocated=1000)
    assert found == {"weights": weights, "gradients": 0, "states": 0, "other": 1000 - weights}


# -- for real ---------------------------------------------------------------------------------------------------------

RUNS_OUT = """
import resource, sys
from pathlib import Path
import torch
from moss_tts_patches.memory.oom_report import PhaseTracker, Situation, reporting_out_of_memory
from moss_tts_patches.memory.readings import read_host
from moss_tts_patches.messages import Messages
held = int(Path('/proc/self/statm').read_text().split()[0]) * resource.getpagesize()
limit = held + 300 * 2**20
if sys.argv[2] == 'limited':
    resource.setrlimit(resource.RLIMIT_AS, (limit, limit))
with reporting_out_of_memory('optimizer state creation', PhaseTracker(), lambda: Situation(host=read_host()),
                             folder=Path(sys.argv[1]), say=Messages(), show=lambda text: print(text, flush=True)):
    states = [torch.zeros(2**26, dtype=torch.uint8) for _ in range(8)]
print('trained')
"""


@pytest.mark.parametrize("limited", [True, False])
def test_a_process_that_really_runs_out(tmp_path: Path, limited: bool) -> None:
    output = tmp_path / "output"
    command = [sys.executable, "-c", RUNS_OUT, str(output), "limited" if limited else "free"]
    done = subprocess.run(command, env=environment_of(OMP_NUM_THREADS="1"), capture_output=True, text=True)
    if not limited:
        assert (done.returncode, done.stdout) == (0, "trained\n"), done.stderr
        assert not output.exists()
        return
    assert done.returncode == 1
    assert (
        "Host memory ran out during the creation of optimizer states (first step): 0.06 GiB were wanted" in done.stdout
    )
    assert f"Written to {output / FILE_NAME}" in done.stdout
    # The last word is the original error's, of its own kind.
    assert done.stderr.splitlines()[-1].startswith("RuntimeError:") and "you tried to allocate 67108864" in done.stderr
    content = json.loads((output / FILE_NAME).read_text())
    assert (content["place"], content["wanted_bytes"]) == ("host", 2**26)
    assert content["host"]["process_bytes"] > 0


@pytest.mark.parametrize("rank", ["0", "1"])
def test_every_process_reports_its_own_failure(monkeypatch, capsys, tmp_path, rank):
    """Memory may run out on one GPU alone; the file is the main process's."""
    from moss_tts_patches.runtime.report import log
    from moss_tts_patches.runtime.watch import MachineWatch, Surroundings

    monkeypatch.setenv("RANK", rank)
    watch = MachineWatch(Surroundings(is_main=rank == "0"), log)
    watch.started(tmp_path)
    with pytest.raises(torch.OutOfMemoryError), watch.guard.phase("backward"):
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB.")
    shown = capsys.readouterr().out
    assert ("rank=1 " in shown) is (rank == "1") and "backward" in shown
    assert (tmp_path / "lowmem_oom.json").exists() is (rank == "0")
