"""The demo's comparison of two trainings: what it reads, measures and refuses."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import mini
import pytest
from mini_moss_tts.compare_demo import (
    DemoFailed,
    Training,
    cost_table,
    environment_for,
    largest_difference,
    loss_table,
    read_steps,
    run_measured,
)
from rich.console import Console

from moss_tts_patches.units import MIB

LINE = "[2026-01-01 00:00:00] epoch=0 step={}/2 loss={} lr=1.00e-03 step_time={}s steps_per_sec=1.000"


def training(*losses: str, peak_gib: float = 1.0, gpu: float | None = None) -> Training:
    lines = [LINE.format(number + 1, loss, f"0.{number + 1}0") for number, loss in enumerate(losses)]
    return Training(read_steps("noise\n" + "\n".join(lines)), peak_gib, gpu)


def test_steps_are_read_from_what_a_trainer_prints() -> None:
    steps = training("3.9135", "nan").steps
    assert [(step.number, step.of, step.loss) for step in steps[:1]] == [(1, 2, 3.9135)]
    assert steps[1].loss != steps[1].loss
    assert read_steps("no step here") == ()


def test_losses_that_differ_by_one_printed_digit_pass() -> None:
    assert largest_difference(training("5.7266", "5.0"), training("5.7265", "5.0")) == pytest.approx(1e-4)


@pytest.mark.parametrize(
    ("ours", "expected"),
    [
        (("5.7264", "5.0000"), "differ by up to 0.0002"),
        (("5.7266", "nan"), "differ by up to"),
        (("5.7266",), "2 steps without the layer and 1 with it"),
    ],
)
def test_other_losses_fail_the_demo(ours: tuple[str, ...], expected: str) -> None:
    with pytest.raises(DemoFailed, match=expected):
        largest_difference(training("5.7266", "5.0000"), training(*ours))


def test_tables_show_both_trainings(tmp_path: Path) -> None:
    plain, ours = (
        training("5.7266", "5.0000", peak_gib=0.85, gpu=0.5),
        training("5.7265", "5.0000", peak_gib=0.61, gpu=0.25),
    )
    with (tmp_path / "tables.txt").open("w+", encoding="utf-8") as sink:
        console = Console(file=sink, width=120)
        console.print(loss_table(plain, ours))
        console.print(cost_table(plain, ours, idle_gib=0.5))
        sink.seek(0)
        text = sink.read()
    for shown in (
        "5.7266",
        "5.7265",
        "-0.0001",
        "0.85 GiB",
        "0.61 GiB",
        "0.35 GiB",
        "0.11 GiB",
        "0.500 GiB",
        "0.250 GiB",
    ):
        assert shown in text


MEASURE = """
import json, os, sys
from pathlib import Path
sys.path.insert(0, sys.argv[1])
from mini_moss_tts.compare_demo import run_measured
assert "torch" not in sys.modules
allocate = "import sys; block = bytearray(int(sys.argv[1])); block[::4096] = b'x' * len(block[::4096])"
nested = f"import subprocess, sys; subprocess.run([sys.executable, '-c', {allocate!r}, sys.argv[1]], check=True)"
folder = Path(sys.argv[2])
for size in map(int, sys.argv[3:]):
    print(run_measured([sys.executable, "-c", nested, str(size)], dict(os.environ), folder, folder / "log")[1])
"""


def test_memory_is_measured_per_command_and_includes_descendants(tmp_path: Path) -> None:
    # The larger one first: a maximum over all children so far would hide the second.
    command = [sys.executable, "-c", MEASURE, str(mini.MINI.parent), str(tmp_path), str(200 * MIB), str(MIB)]
    printed = subprocess.run(command, check=True, capture_output=True, text=True).stdout
    large, small = (float(line) * 2**30 for line in printed.split())
    assert large >= 200 * MIB
    assert small < 100 * MIB


def test_a_training_that_fails_shows_the_end_of_its_output(tmp_path: Path) -> None:
    command = [sys.executable, "-c", "print('what went wrong'); raise SystemExit(3)"]
    with pytest.raises(DemoFailed, match=r"(?s)status 3.*what went wrong"):
        run_measured(command, dict(os.environ), tmp_path, tmp_path / "log")


def test_only_the_switch_differs_between_the_two_trainings(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AUTOWRAPT_BOOTSTRAP", "moss_tts_patches")
    plain, ours = (environment_for(tmp_path, tmp_path / "out", layer) for layer in (False, True))
    assert {name for name in plain if plain[name] != ours[name]} == {"MOSS_LOWMEM"}
    assert plain.keys() == ours.keys()
    assert "AUTOWRAPT_BOOTSTRAP" not in plain
    assert ours["MOSS_LOWMEM_OPTIMIZER"] == "adamw"
