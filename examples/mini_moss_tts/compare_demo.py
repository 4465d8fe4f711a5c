#!/usr/bin/env python3
"""Trains the miniature twice, without and with the low-memory layer, and shows both side by side.

    python compare_demo.py [--folder FOLDER]

Both trainings start from the same random weights, read the same records in the same order and run the same script
with the same options; only ``MOSS_LOWMEM`` differs. In float32, with the same AdamW arithmetic in both, their losses
have to agree in the four digits that the script prints: the layer changes how the training is computed, not what it
computes. Ends with ``demo: OK``, or with ``demo: FAILED`` and exit status 1.
"""

from __future__ import annotations

import argparse
import os
import re
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from rich.console import Console
from rich.table import Table

ROOT = Path(__file__).resolve().parent
LOWMEM_LAUNCHER = ROOT.parents[1] / "run_train_lowmem.sh"
OFFICIAL_LAUNCHER = ROOT / "moss_tts_local" / "finetuning" / "run_train.sh"

# Accumulation over 2 so that the layer's loss scale is not 1; no warm-up so that the first step already moves weights.
OPTIONS = (
    "--per-device-batch-size 2 --gradient-accumulation-steps 2 --num-epochs 1 --mixed-precision no "
    "--learning-rate 1e-3 --warmup-ratio 0"
)
LARGEST_DIFFERENCE = 1e-4  # one unit of the last printed digit
STEP_LINE = re.compile(r"step=(\d+)/(\d+) loss=(\S+) lr=(\S+) step_time=([\d.]+)s")
GPU_LINE = re.compile(r"\[sft\] peak_gpu_allocated=([\d.]+)GiB")
LOG_LINES_SHOWN = 30  # enough for a traceback

# What a trainer has loaded before it reads its first weight.
IDLE_TRAINER = "import torch, accelerate, transformers.models.qwen3.modeling_qwen3"


class DemoFailed(RuntimeError):
    """The comparison could not be made, or did not come out equal."""


@dataclass(frozen=True)
class Step:
    """One printed step."""

    number: int
    of: int
    loss: float
    rate: float
    seconds: float


@dataclass(frozen=True)
class Training:
    """What is known of a finished training.

    Attributes:
        peak_gib: largest resident memory of any of its processes.
        peak_gpu_gib: torch's largest allocation on the GPU, None without one.
    """

    steps: tuple[Step, ...]
    peak_gib: float
    peak_gpu_gib: float | None = None

    @property
    def seconds_per_step(self) -> float:
        return statistics.median(step.seconds for step in self.steps)


def read_steps(output: str) -> tuple[Step, ...]:
    """Finds the step lines in what a trainer printed."""
    found = STEP_LINE.findall(output)
    return tuple(Step(int(n), int(of), float(loss), float(rate), float(sec)) for n, of, loss, rate, sec in found)


def run_measured(command: Sequence[str], environment: Mapping[str, str], folder: Path, log: Path) -> tuple[str, float]:
    """Runs a command and returns its output and the largest resident memory, in GiB, of it and its descendants.

    A child begins as a copy of its parent, and Linux counts that: nothing below the calling process's own size can be
    measured. This file therefore does not import torch (0.5 GiB).

    Raises:
        DemoFailed: it ended with an error; the message holds the end of its output.
    """
    with log.open("w", encoding="utf-8") as sink:
        process = subprocess.Popen(command, env=environment, cwd=folder, stdout=sink, stderr=subprocess.STDOUT)
        _, status, usage = os.wait4(process.pid, 0)  # unlike wait(): the memory of this command's processes alone
    process.returncode = os.waitstatus_to_exitcode(status)
    output = log.read_text(encoding="utf-8", errors="replace")
    if process.returncode != 0:
        end = "\n".join(output.splitlines()[-LOG_LINES_SHOWN:])
        raise DemoFailed(f"{' '.join(command)} ended with status {process.returncode}. Its last lines:\n{end}")
    unit = 1 if sys.platform == "darwin" else 1024  # macOS counts bytes, Linux KiB
    return output, usage.ru_maxrss * unit / 2**30


def environment_for(data: Path, output: Path, layer: bool) -> dict[str, str]:
    """The variables of a training: the official script's own ones and, for the layer, its switch."""
    inherited = {name: value for name, value in os.environ.items() if name != "AUTOWRAPT_BOOTSTRAP"}
    return {
        **inherited,
        # `accelerate` and `python` must be those of the interpreter that runs this.
        "PATH": os.pathsep.join([str(Path(sys.executable).parent), inherited.get("PATH", "")]),
        "HF_HUB_OFFLINE": "1",
        "MODEL_PATH": str(data),
        "TRAIN_JSONL": str(data / "train.jsonl"),
        "SKIP_PREPARE": "1",
        "OUTPUT_DIR": str(output),
        "ACCELERATE_CONFIG_FILE": str(ROOT / "one_process.yaml"),
        "TRAIN_EXTRA_ARGS_STR": OPTIONS,
        "MOSS_TTS_REPO": str(ROOT),
        "MOSS_LOWMEM": "1" if layer else "0",
        "MOSS_LOWMEM_FAMILY": "moss_tts_local",
        "MOSS_LOWMEM_OPTIMIZER": "adamw",
        "MOSS_LOWMEM_CORRECTIONS": "none",
    }


def train(data: Path, output: Path, layer: bool) -> Training:
    """Runs one training through its launcher."""
    launcher = LOWMEM_LAUNCHER if layer else OFFICIAL_LAUNCHER
    log = output.with_suffix(".log")
    text, peak = run_measured(["bash", str(launcher)], environment_for(data, output, layer), ROOT, log)
    steps, gpu = read_steps(text), GPU_LINE.findall(text)
    if not steps:
        raise DemoFailed(f"{launcher.name} ended well but printed no training step; its output is in {log}")
    return Training(steps, peak, float(gpu[-1]) if gpu else None)


def largest_difference(without: Training, with_layer: Training) -> float:
    """Compares the printed losses step by step.

    Raises:
        DemoFailed: the trainings have other steps, a loss is not a number, or two losses differ too much.
    """
    if [s.number for s in without.steps] != [s.number for s in with_layer.steps]:
        raise DemoFailed(f"{len(without.steps)} steps without the layer and {len(with_layer.steps)} with it")
    differences = [abs(a.loss - b.loss) for a, b in zip(without.steps, with_layer.steps)]
    worst = max(differences)
    # Rounded, because 5.7266 - 5.7265 is a little more than 1e-4 in binary; and "not <=", because nan must fail.
    if not all(round(difference, 6) <= LARGEST_DIFFERENCE for difference in differences):
        raise DemoFailed(f"the losses differ by up to {worst:.4f}; expected at most {LARGEST_DIFFERENCE:.4f}")
    return worst


def loss_table(without: Training, with_layer: Training) -> Table:
    table = Table(title="Loss printed at each optimizer step", title_justify="left")
    for heading in ("step", "official script", "with the layer", "difference"):
        table.add_column(heading, justify="right")
    for plain, ours in zip(without.steps, with_layer.steps):
        table.add_row(
            f"{plain.number}/{plain.of}", f"{plain.loss:.4f}", f"{ours.loss:.4f}", f"{ours.loss - plain.loss:+.4f}"
        )
    return table


def cost_table(without: Training, with_layer: Training, idle_gib: float) -> Table:
    table = Table(title="What it took", title_justify="left")
    for heading in ("", "official script", "with the layer"):
        table.add_column(heading, justify="right")
    both = (without, with_layer)
    if without.peak_gpu_gib is not None and with_layer.peak_gpu_gib is not None:
        table.add_row("GPU memory, peak", *(f"{run.peak_gpu_gib:.3f} GiB" for run in both))
    table.add_row("memory of the process, peak", *(f"{run.peak_gib:.2f} GiB" for run in both))
    table.add_row("of it for training", *(f"{run.peak_gib - idle_gib:.2f} GiB" for run in both))
    table.add_row("seconds per step", *(f"{run.seconds_per_step:.2f}" for run in both))
    return table


def demonstrate(folder: Path, console: Console) -> None:
    """Makes the data in ``folder``, trains twice, prints the tables.

    Raises:
        DemoFailed: see :func:`run_measured` and :func:`largest_difference`.
    """
    started = time.perf_counter()
    data = folder / "data"
    environment = dict(os.environ)
    console.print("1/4 A small random model and data set (nothing is downloaded) …")
    made, _ = run_measured(
        [sys.executable, str(ROOT / "make_demo_data.py"), str(data)], environment, ROOT, folder / "data.log"
    )
    console.print(f"    {made.strip().splitlines()[-1]}")
    console.print("2/4 How much memory Python takes with torch loaded and nothing to train …")
    _, idle = run_measured([sys.executable, "-c", IDLE_TRAINER], environment, ROOT, folder / "idle.log")
    console.print("3/4 Training with the official script alone …")
    without = train(data, folder / "without", layer=False)
    console.print("4/4 The same training with the layer (MOSS_LOWMEM=1) …")
    with_layer = train(data, folder / "with", layer=True)
    console.print()
    console.print(loss_table(without, with_layer))
    console.print(cost_table(without, with_layer, idle))
    worst = largest_difference(without, with_layer)
    console.print(
        f"The losses agree to {LARGEST_DIFFERENCE:.4f} at every step (largest difference {worst:.4f}): both trainings "
        f"compute the same.\nPython and torch alone take {idle:.2f} GiB of the process. These are a toy's figures; "
        f"README.md of the repository has the real model's.\nTook {time.perf_counter() - started:.0f} s."
    )


def main() -> int:
    parser = argparse.ArgumentParser(description="Trains the miniature without and with the layer and compares.")
    parser.add_argument("--folder", type=Path, help="keep data, checkpoints and logs here (default: thrown away)")
    args = parser.parse_args()
    console = Console(highlight=False, soft_wrap=True)
    try:
        if args.folder is not None:
            args.folder.mkdir(parents=True, exist_ok=True)
            demonstrate(args.folder.resolve(), console)
        else:
            with tempfile.TemporaryDirectory(prefix="moss_lowmem_demo_") as temporary:
                demonstrate(Path(temporary), console)
    except DemoFailed as error:
        console.print(str(error), markup=False)
        console.print("demo: FAILED")
        return 1
    console.print("demo: OK")
    return 0


if __name__ == "__main__":
    sys.exit(main())
