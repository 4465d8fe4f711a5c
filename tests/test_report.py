"""A training's log grows by whole lines, says what happened, and becomes pictures."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from itertools import count
from pathlib import Path
from typing import Any

import pytest
import torch
from tolerances import TOLERANCES
from typer.testing import CliRunner

from moss_tts_patches import cli
from moss_tts_patches.runtime.plots import PAGE, _draw_loss, _draw_memory, write_report
from moss_tts_patches.runtime.progress import LOG_NAME, LineLog, StepRecorder, read_log, read_memory

PNG = b"\x89PNG\r\n\x1a\n"


class Clock:
    """Seconds that pass when a test says so."""

    now = 100.0

    def __call__(self) -> float:
        return self.now


def lines(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]


# -- lines -----------------------------------------------------------------------------------------------------------


def test_lines_are_appended_and_numbers_without_a_word_are_null(tmp_path: Path) -> None:
    path = tmp_path / "new" / LOG_NAME
    log = LineLog(path)
    log.write({"step": 1, "loss": float("nan"), "by": {"a": float("inf"), "b": 1.5}, "list": [float("-inf"), "é"]})
    assert lines(path) == [{"step": 1, "loss": None, "by": {"a": None, "b": 1.5}, "list": [None, "é"]}]
    log.close()
    LineLog(path).write({"step": 2})
    assert [one["step"] for one in lines(path)] == [1, 2]


def test_a_full_disk_costs_lines_and_nothing_else(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Between two checkpoints the log is all that is written: a minute without room must not end the training."""
    said: list[str] = []
    path = tmp_path / LOG_NAME
    log = LineLog(path, say=said.append)
    log.write({"step": 1})
    write = os.write
    for room in (0, 5):
        with monkeypatch.context() as patch:
            rooms = iter([room] * (room > 0))

            def until_full(file: int, data: bytes, rooms: Iterator[int] = rooms) -> int:
                left = next(rooms, 0)
                if not left:
                    raise OSError(28, "No space left on device")
                return write(file, data[:left])

            patch.setattr(os, "write", until_full)
            log.write({"step": 2})
            log.write({"step": 3})
    log.write({"step": 4})
    assert [line["step"] for line in lines(path)] == [1, 4]
    assert said == [f"warning: {LOG_NAME}: No space left on device; steps are left out until it can be written"]


@pytest.mark.parametrize("torn", ['{"step": 3, "lo', "\0" * 200_000, "x"])
def test_a_torn_last_line_is_cut_off(tmp_path: Path, torn: str) -> None:
    path = tmp_path / LOG_NAME
    path.write_text('{"step": 1}\n{"step": 2}\n' + torn, encoding="utf-8")
    LineLog(path).write({"step": 3})
    assert [one["step"] for one in lines(path)] == [1, 2, 3]


def test_a_file_without_a_whole_line_is_emptied(tmp_path: Path) -> None:
    path = tmp_path / LOG_NAME
    path.write_text("{" * 70_000, encoding="utf-8")
    LineLog(path).write({"step": 1})
    assert [one["step"] for one in lines(path)] == [1]


_WRITER = """
import sys
from pathlib import Path
from moss_tts_patches.runtime.progress import LineLog
log = LineLog(Path(sys.argv[1]))
step = 0
while True:
    step += 1
    log.write({"step": step, "filler": "x" * 5000})
"""


@pytest.mark.skipif(os.name == "nt", reason="no SIGKILL")
def test_a_killed_writer_leaves_whole_lines(tmp_path: Path) -> None:
    path = tmp_path / LOG_NAME
    with subprocess.Popen([sys.executable, "-c", _WRITER, str(path)]) as process:
        for _ in range(600):
            if path.is_file() and path.stat().st_size > 100_000:
                break
            time.sleep(0.1)
        process.send_signal(signal.SIGKILL)
    LineLog(path).write({"step": 0})
    found = [one["step"] for one in lines(path)]
    assert found == [*range(1, len(found)), 0]
    assert len(found) > 20


# -- steps -----------------------------------------------------------------------------------------------------------


def test_a_step_holds_the_mean_of_its_window(tmp_path: Path) -> None:
    clock = Clock()
    recorder = StepRecorder(LineLog(tmp_path / LOG_NAME), lambda: {"host": 7}, clock)
    names = ("text", "codebook 1", "codebook 2")
    window = (([3.0, 8.0, 0.0], [1, 2, 0], 2.0), ([1.0, 1.0, 0.0], [3, 1, 0], 4.0))
    for sums, counts, loss in window:
        with recorder.phase("forward"):
            clock.now += 2
        recorder.micro_batch(
            torch.tensor(loss, requires_grad=True), 10, 3, names, torch.tensor(sums), torch.tensor(counts)
        )
        with recorder.phase("backward"):
            clock.now += 3
    clock.now += 1
    written = recorder.step(step=1, epoch=0.25, lr=1e-4, grad_norm=torch.tensor(1.5))
    assert lines(tmp_path / LOG_NAME) == [written]
    assert written["loss"] == 3.0
    assert written["loss_by_codebook"] == pytest.approx({"text": 1.0, "codebook 1": 3.0}, rel=TOLERANCES["log_mean"])
    assert (written["positions"], written["frames"], written["micro_batches"]) == (20, 6, 2)
    assert written["seconds"] == 11.0
    assert written["seconds_by_phase"] == {"forward": 4.0, "backward": 6.0}
    assert (written["grad_norm"], written["lr"], written["memory_bytes"]) == (1.5, 1e-4, {"host": 7})


def test_the_next_window_starts_empty(tmp_path: Path) -> None:
    clock = Clock()
    recorder = StepRecorder(LineLog(tmp_path / LOG_NAME), dict, clock)
    recorder.micro_batch(torch.tensor(5.0), 1, 1, ("a",), torch.ones(1), torch.ones(1))
    recorder.step(1, 0.1, 1e-3, None)
    clock.now += 4
    recorder.micro_batch(torch.tensor(float("nan")), 1, 1)
    recorder.step(2, 0.2, 1e-3, 2.0)
    _, second = lines(tmp_path / LOG_NAME)
    assert second["loss"] is None
    assert second["seconds"] == 4.0
    assert (second["nonfinite_losses"], second["frames_per_second"]) == (1, 0.25)
    assert second["loss_by_codebook"] == {}


def test_one_loss_that_is_not_finite_does_not_hide_the_others(tmp_path: Path) -> None:
    recorder = StepRecorder(LineLog(tmp_path / LOG_NAME), dict, Clock())
    for loss in (2.0, float("inf"), 4.0):
        recorder.micro_batch(torch.tensor(loss), 1, 1)
    written = recorder.step(1, 0.1, 1e-3, float("inf"), skipped=True)
    assert (written["loss"], written["micro_batches"], written["nonfinite_losses"]) == (3.0, 3, 1)
    assert written["skipped"] is True
    recorder.micro_batch(torch.tensor(9.0), 1, 1)
    recorder.forget()
    recorder.micro_batch(torch.tensor(5.0), 1, 1)
    again = recorder.step(2, 0.1, 1e-3, 1.0)
    assert again["loss"] == 5.0 and "skipped" not in again and "nonfinite_losses" not in again


def test_no_synchronisation_before_the_step_ends(tmp_path: Path) -> None:
    recorder = StepRecorder(LineLog(tmp_path / LOG_NAME), dict)
    meta = torch.ones(2, device="meta")  # a read of its value would raise
    recorder.micro_batch(torch.ones((), device="meta"), 1, 1, ("a", "b"), meta, meta)
    with pytest.raises(NotImplementedError):
        recorder.step(1, 0.1, 1e-3, None)


def test_memory_is_this_processs() -> None:
    before = read_memory(torch.device("cpu"))
    assert set(before) == {"host"}
    held = torch.ones(64 * 2**20)
    assert read_memory(torch.device("cpu"))["host"] - before["host"] > held.nbytes / 2


# -- reading ---------------------------------------------------------------------------------------------------------


def test_a_resumed_run_replaces_what_it_does_again(tmp_path: Path) -> None:
    path = tmp_path / LOG_NAME
    log = LineLog(path)
    for step in (1, 2, 3, 4):
        log.write({"step": step, "loss": 1.0})
    log.write({"plan_bytes": {"gpu": 5}})
    for step in (3,):
        log.write({"step": step, "loss": 2.0})
    with open(path, "a", encoding="utf-8") as file:
        file.write('{"step": 9')
    run = read_log(path)
    assert run.about == {"plan_bytes": {"gpu": 5}}
    assert [(one["step"], one["loss"]) for one in run.steps] == [(1, 1.0), (2, 1.0), (3, 2.0)]


def test_lines_of_other_kinds_are_told_apart(tmp_path: Path) -> None:
    """Validation lines are kept by themselves and go when their step is done again; events are passed over."""
    log = LineLog(tmp_path / LOG_NAME)
    for step in (1, 2, 3):
        log.write({"step": step, "loss": 1.0})
        log.write({"step": step, "valid_loss": 2.0 + step})
    log.write({"step": 4, "nonfinite": "left out", "parameters": ["a"]})
    log.write({"step": 2, "loss": 1.5})
    run = read_log(tmp_path / LOG_NAME)
    assert [(one["step"], one["loss"]) for one in run.steps] == [(1, 1.0), (2, 1.5)]
    assert [(one["step"], one["valid_loss"]) for one in run.validation] == [(1, 3.0)]
    assert run.about == {}


# -- pictures --------------------------------------------------------------------------------------------------------


def training(folder: Path, steps: int = 12) -> Path:
    """Writes the log of a short training; the text channel comes later, a loss is not finite."""
    clock = Clock()
    log = LineLog(folder / LOG_NAME)
    log.write({"plan_bytes": {"gpu_peak": 2**31}, "family": "<b>a&b</b>"})
    memory = count(2**30, 2**26)
    recorder = StepRecorder(log, lambda: {"host": next(memory), "gpu_peak": 2**30}, clock)
    for step in range(1, steps + 1):
        loss = float("nan") if step == 5 else 5.0 / step
        names = ("text", "codebook 1") if step > 3 else ("codebook 1",)
        recorder.micro_batch(torch.tensor(loss), 50, 20, names, torch.full((2,), loss), torch.ones(2))
        clock.now += 1
        recorder.step(step, step / steps, 1e-4, 1.0)
    log.close()
    return folder


def test_pictures_and_a_page(tmp_path: Path) -> None:
    written = write_report(training(tmp_path))
    assert [path.name for path in written] == ["lowmem_loss.png", "lowmem_memory.png", "lowmem_throughput.png", PAGE]
    assert all(path.read_bytes().startswith(PNG) and path.stat().st_size > 5000 for path in written[:3])
    page = written[3].read_text(encoding="utf-8")
    assert page.count("data:image/png;base64,") == 3
    assert "<td>1 to 12</td>" in page
    assert "<td>20.0</td>" in page
    assert "<td>1.69 GiB</td>" in page
    assert "&lt;b&gt;a&amp;b&lt;/b&gt;" in page and "<b>" not in page


def drawn(folder: Path) -> tuple[dict[str, Any], dict[str, Any]]:
    """Curves of the two pictures by label: loss and memory."""
    from matplotlib.figure import Figure

    run = read_log(folder / LOG_NAME)
    pictures = []
    for draw in (_draw_loss, _draw_memory):
        axes = Figure().add_subplot()
        draw(axes, run)
        pictures.append({line.get_label(): line for line in axes.get_lines()})
    return pictures[0], pictures[1]


def test_plan_and_validation_are_drawn_where_there_are_any(tmp_path: Path) -> None:
    loss, memory = drawn(training(tmp_path))
    assert "validation" not in loss
    assert list(memory["gpu peak, planned"].get_ydata()) == [2.0, 2.0]
    log = LineLog(tmp_path / LOG_NAME)
    log.write({"plan_bytes": {}, "plan": None})
    log.write({"step": 4, "valid_loss": 3.5})
    log.write({"step": 8, "valid_loss": 2.25})
    loss, memory = drawn(tmp_path)
    assert [list(loss["validation"].get_xdata()), list(loss["validation"].get_ydata())] == [[4, 8], [3.5, 2.25]]
    assert set(memory) == {"host", "gpu peak"}
    page = write_report(tmp_path)[-1].read_text(encoding="utf-8")
    assert "2.2500 at step 8" in page and "planned" not in page and "None" not in page


def test_another_training_is_another_picture(tmp_path: Path) -> None:
    (tmp_path / "a").mkdir(), (tmp_path / "b").mkdir(), (tmp_path / "c").mkdir()
    first, second = write_report(training(tmp_path / "a")), write_report(training(tmp_path / "b", steps=9))
    again = write_report(training(tmp_path / "c"))
    for one, other, same in zip(first[:3], second[:3], again[:3]):
        assert one.read_bytes() != other.read_bytes()
        assert one.read_bytes() == same.read_bytes()


def command(folder: Path) -> Any:
    return CliRunner().invoke(cli.app, ["report", str(folder)])


def test_the_command_names_the_files(tmp_path: Path) -> None:
    done = command(training(tmp_path))
    assert done.exit_code == 0, done.output
    assert done.stdout.split() == [str(path) for path in sorted(tmp_path.glob("*.png"))] + [str(tmp_path / PAGE)]


def test_the_command_names_what_is_missing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert f"{tmp_path / LOG_NAME} not found" in command(tmp_path).stderr
    (tmp_path / LOG_NAME).write_text('{"family": "x"}\n', encoding="utf-8")
    assert "has no step yet" in command(tmp_path).stderr
    training(tmp_path)
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    done = command(tmp_path)
    assert done.exit_code == 2
    assert "pip install 'moss_tts_patches[report]'" in done.stderr
    assert not list(tmp_path.glob("*.png"))
