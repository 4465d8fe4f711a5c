"""The bar, and where else the values of a step go."""

from __future__ import annotations

import io
import os
import re
import subprocess
import sys
import types
from pathlib import Path
from typing import Any, ClassVar

import pytest
import torch
from mini import MINI, MiniServer, clean_environment, command_line, make_mini_inputs, read_steps
from test_resume import SAVE_ALL
from test_training_runs import ON

from moss_tts_patches.runtime import recording
from moss_tts_patches.runtime.bar import StepBar, describe_step, wants_bar
from moss_tts_patches.runtime.recording import RunRecord
from moss_tts_patches.runtime.trackers import open_tensorboard, scalars
from moss_tts_patches.units import GIB

if sys.platform != "win32":
    import fcntl
    import pty
    import struct
    import termios

VALUES: dict[str, Any] = {
    "step": 3,
    "epoch": 0.5,
    "loss": 2.5,
    "loss_by_codebook": {"text": 4.0, "codebook 1": float("nan")},
    "grad_norm": None,
    "lr": 1e-4,
    "positions": 100,
    "frames": 50,
    "frames_per_second": 12.5,
    "seconds": 4.0,
    "seconds_by_phase": {"forward": 1.0},
    "memory_bytes": {"host": 3 * GIB},
}


@pytest.fixture(scope="module")
def inputs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_mini_inputs(tmp_path_factory.mktemp("inputs") / "tiny", records=10, frames=(8, 12))


# -- the bar ---------------------------------------------------------------------------------------------------------


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def test_who_gets_a_bar() -> None:
    answers = [(wants_bar(setting, Terminal()), wants_bar(setting, io.StringIO())) for setting in ("auto", "1", "0")]
    assert answers == [(True, False), (True, True), (False, False)]


def test_what_a_bar_says() -> None:
    assert describe_step(VALUES) == "loss 2.5000, lr 1.0e-04, RAM 3.0 GiB, 12 frames/s"
    card = {"memory_bytes": {"host": GIB, "gpu": 5 * GIB, "gpu_peak": 6 * GIB}, "skipped": True, "loss": None}
    assert describe_step({**VALUES, **card}) == ("loss not finite, lr 1.0e-04, VRAM 5.0/6.0 GiB, 12 frames/s, left out")


def test_a_bar_begins_where_the_run_goes_on() -> None:
    stream = Terminal()
    bar = StepBar(10, 2, stream)
    bar.step(VALUES)
    bar.close()
    shown = stream.getvalue()
    assert " 2/10 " in shown and "epoch 0.50 3/10, loss 2.5000" in shown and " 0/10" not in shown
    assert "\r" in shown and shown.endswith("\n")


def test_where_there_is_no_terminal_each_state_is_a_line() -> None:
    stream = io.StringIO()
    bar = StepBar(None, 0, stream)
    for step in (1, 2, 3):  # within 10 s: only the first and the last state are shown
        bar.step({**VALUES, "step": step})
    bar.close()
    lines = stream.getvalue().splitlines()
    assert "\r" not in stream.getvalue() and 1 <= len(lines) <= 3
    assert lines[-1].startswith("epoch 0.50 3/?, loss 2.5000")


def on_terminal(command: list[str], environment: dict[str, str], columns: int) -> str:
    """Runs a command whose standard output and error are a terminal; returns what it wrote there.

    Args:
        columns: of the terminal; 0 is one that does not know its width.
    """
    main, other = pty.openpty()
    if columns:
        fcntl.ioctl(other, termios.TIOCSWINSZ, struct.pack("HHHH", 40, columns, 0, 0))
    process = subprocess.Popen(command, cwd=MINI, env=environment, stdout=other, stderr=other)
    os.close(other)
    written = b""
    while True:
        try:
            part = os.read(main, 65536)
        except OSError:  # nobody holds the other end any more
            part = b""
        if not part:
            break
        written += part
    os.close(main)
    assert process.wait() == 0, written.decode()[-3000:]
    return written.decode()


@pytest.mark.skipif(sys.platform == "win32", reason="no pseudo-terminals")
def test_a_terminal_without_a_width_has_a_bar_too() -> None:
    code = (
        "from moss_tts_patches.runtime.bar import StepBar; bar = StepBar(10, 2); bar.step({'step': 3, 'epoch': 0.5, "
        "'loss': 1.0, 'lr': 1e-4, 'memory_bytes': {}, 'frames_per_second': 5.0}); bar.close()"
    )
    assert "3/10, loss 1.0000" in on_terminal([sys.executable, "-c", code], clean_environment(), columns=0)


@pytest.mark.skipif(sys.platform == "win32", reason="no pseudo-terminals")
def test_a_training_on_a_terminal_has_one_bar_and_whole_lines(inputs: Path, tmp_path: Path) -> None:
    """Every line of the trainer and of the layer stands alone: whatever was on its row was taken away before."""
    command = [sys.executable, "moss_tts_local/finetuning/sft.py", *command_line(inputs, tmp_path / "out")]
    shown = on_terminal(command, clean_environment(**ON), columns=200)
    printed = read_steps(shown)
    assert [step.number for step in printed] == [1, 2, 3]
    for mark in (r"\[\d{4}-\d\d-\d\d [\d:]+\] epoch=", r"\[\d{4}-\d\d-\d\d [\d:]+\] \[lowmem\]"):
        starts = [match.start() for match in re.finditer(mark, shown)]
        assert len(starts) >= 3 and all(shown[start - 1] in "\r\n" for start in starts if start)
    bars = re.findall(
        r"epoch ([\d.]+) (\d+)/(\d+), loss [\d.]+, lr \S+, RAM [\d.]+ GiB, \d+ frames/s \[\S+<\S+, ", shown
    )
    assert {total for _, _, total in bars} == {"3"} and bars[-1][:2] == ("1.00", "3")
    assert "checking data" not in shown


def test_bars_of_whole_trainings(inputs: Path, tmp_path: Path) -> None:
    """None in a log unless asked for; none while a replay passes, and then from the resumed step on."""
    with MiniServer() as server:
        run = server.run("moss_tts_local", inputs, tmp_path / "out", environment={**ON, **SAVE_ALL})
        assert "frames/s" not in run.output
        bar = {**ON, "MOSS_LOWMEM_PROGRESS": "1", "MOSS_LOWMEM_RESUME": str(run.folder / "resume" / "step-2")}
        resumed = server.run("moss_tts_local", inputs, tmp_path / "again", environment=bar)
    lines = [line for line in resumed.output.splitlines() if re.search(r"\d/3[, ]", line) and "step=" not in line]
    assert lines[0].startswith("training 2/3 ") and lines[-1].startswith("epoch 1.00 3/3, loss ")
    order = resumed.output.index("resume replayed=4"), resumed.output.index(lines[0]), resumed.output.index("step=3/3")
    assert list(order) == sorted(order)


# -- trackers --------------------------------------------------------------------------------------------------------


def test_numbers_by_name() -> None:
    found = dict(scalars(VALUES))
    assert found["loss"] == 2.5 and found["loss_by_codebook/text"] == 4.0 and found["memory_gib/host"] == 3.0
    assert found["frames_per_second"] == 12.5 and found["seconds_by_phase/forward"] == 1.0
    assert "grad_norm" not in found and "loss_by_codebook/codebook 1" not in found  # unknown, and not finite


class Writer:
    """Stands for torch's ``SummaryWriter``."""

    made: ClassVar[list[Writer]] = []

    def __init__(self, folder: str, purge_step: int) -> None:
        self.folder, self.purge_step, self.closed = folder, purge_step, False
        self.scalars: list[tuple[str, float, int]] = []
        Writer.made.append(self)

    def add_scalar(self, name: str, value: float, step: int) -> None:
        self.scalars.append((name, value, step))

    def close(self) -> None:
        self.closed = True


class FakeWandb(types.ModuleType):
    """Stands for wandb: the rows of a run by step, as ``log`` with a step joins them."""

    def __init__(self, run: object) -> None:
        super().__init__("wandb")
        self.run, self.rows = run, dict[int, dict[str, float]]()

    def log(self, values: dict[str, float], step: int) -> None:
        assert step >= max(self.rows, default=0)
        self.rows.setdefault(step, {}).update(values)


def record_two_steps(folder: Path, done: int = 0, record: RunRecord | None = None) -> RunRecord:
    record = record or RunRecord("0")
    record.started(folder, torch.device("cpu"), {"family": "x"})
    record.begins(done, 4)
    for step in (done + 1, done + 2):
        record._observed = {"frames": 2}
        record.micro_batch(torch.tensor(float(step)), {"input_ids": torch.zeros(1, 5, 1)})
        record.step(step, 4, 1e-3)
    return record


def test_tensorboard_gets_every_step_and_drops_what_is_done_again(tmp_path: Path, monkeypatch: Any) -> None:
    monkeypatch.setitem(sys.modules, "torch.utils.tensorboard", types.SimpleNamespace(SummaryWriter=Writer))
    Writer.made.clear()
    record = record_two_steps(tmp_path, done=5)
    [writer] = Writer.made
    assert (writer.folder, writer.purge_step, writer.closed) == (str(tmp_path / "tensorboard"), 6, False)
    assert [(value, step) for name, value, step in writer.scalars if name == "loss"] == [(6.0, 6), (7.0, 7)]
    record.ended()
    record.ended()
    assert writer.closed


@pytest.mark.parametrize(
    ("method", "cost"), [("add_scalar", "it gets no more steps"), ("close", "its last steps may be missing")]
)
def test_no_training_ends_because_tensorboard_meets_a_full_disk(
    tmp_path: Path, monkeypatch: Any, method: str, cost: str
) -> None:
    """``close`` writes what is still in its queue; where bad gradients stop a run, before it is said why."""

    def full(*_: Any) -> None:
        raise OSError(28, "No space left on device")

    writer = type("Full", (Writer,), {method: full})
    monkeypatch.setitem(sys.modules, "torch.utils.tensorboard", types.SimpleNamespace(SummaryWriter=writer))
    said: list[str] = []
    record_two_steps(tmp_path, record=RunRecord("0", said.append)).ended()
    assert said == [f"warning: TensorBoard: No space left on device; {cost}"]


def test_tensorboard_is_not_needed(tmp_path: Path, monkeypatch: Any) -> None:
    monkeypatch.setitem(sys.modules, "torch.utils.tensorboard", None)
    said: list[str] = []
    assert open_tensorboard(tmp_path, 0, said.append) is None and not said
    record_two_steps(tmp_path).ended()
    assert not (tmp_path / "tensorboard").exists()

    class Broken(types.ModuleType):
        def __getattr__(self, name: str) -> Any:
            raise TypeError("numpy is too new")

    monkeypatch.setitem(sys.modules, "torch.utils.tensorboard", Broken("broken"))
    assert open_tensorboard(tmp_path, 0, said.append) is None
    assert said == ["tensorboard=off reason='TypeError: numpy is too new'"]


def test_tensorboards_own_files(tmp_path: Path) -> None:
    accumulator = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")
    record_two_steps(tmp_path, done=0).ended()
    record_two_steps(tmp_path, done=1).ended()  # step 2 is done again
    found = accumulator.EventAccumulator(str(tmp_path / "tensorboard")).Reload().Scalars("loss")
    assert [(event.step, event.value) for event in found] == [(1, 1.0), (2, 2.0), (3, 3.0)]


def test_wandb_gets_the_values_where_the_trainer_has_a_run(tmp_path: Path, monkeypatch: Any) -> None:
    wandb = FakeWandb(run=object())
    monkeypatch.setitem(sys.modules, "wandb", wandb)
    record_two_steps(tmp_path)
    wandb.log({"train/loss": 9.0}, step=2)  # the trainer's own, after the layer's
    assert wandb.rows[1]["lowmem/loss"] == 1.0
    assert (wandb.rows[2]["lowmem/loss"], wandb.rows[2]["train/loss"]) == (2.0, 9.0)
    assert "lowmem/memory_gib/host" in wandb.rows[1] and "lowmem/lr" in wandb.rows[1]


@pytest.mark.parametrize("wandb", [None, FakeWandb(run=None)], ids=["not imported", "no run"])
def test_without_a_run_wandb_is_left_alone(tmp_path: Path, monkeypatch: Any, wandb: FakeWandb | None) -> None:
    if wandb is None:
        monkeypatch.delitem(sys.modules, "wandb", raising=False)
    else:
        monkeypatch.setitem(sys.modules, "wandb", wandb)
    record_two_steps(tmp_path)
    assert sys.modules.get("wandb") is wandb and (wandb is None or not wandb.rows)


def test_no_process_but_the_first_opens_anything(monkeypatch: Any) -> None:
    """``started`` is called on the process that writes only."""
    monkeypatch.setattr(recording, "open_tensorboard", lambda *_: pytest.fail("opened"))
    record = RunRecord("1")
    record.begins(0, 4)
    record.step(1, 4, 1e-3)
    record.event({"a": 1})
    record.ended()
