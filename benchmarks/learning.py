#!/usr/bin/env python3
"""Fine-tunes through the real run_train.sh and sft.py: all weights, LoRA and QLoRA beside upstream in float32 and bf16.

    MOSS_TTS_REPO=/path/to/MOSS-TTS python benchmarks/learning.py [--steps 150] [--json FILE] [--png FILE]

Takes about four minutes on one core; writes benchmarks/results/learning.json and docs/images/learning.png (the plot
needs matplotlib, extra `dev`).

The model is upstream's moss_tts_local with 0.3 M weights (tests/make_tiny.py). In every record each codebook counts up
by a step of its own from a random start. A short float32 run of upstream teaches it one set of steps; its checkpoint is
the base of all runs, which learn another set from the same records in the same order. A window is one micro-batch, so
that the loss that upstream prints, that of its last micro-batch, is the window's; the layer's is read from its log.

Weights are N(0, 0.1) to begin with where MOSS-TTS has 0.02, so the rate is 5e-5 where upstream's is 1e-5: the same
share of a weight in each step, which is what decides whether rounding to bf16 throws an update away. Adapters start
from nothing and get ten times that, as is usual.

Upstream has bf16 weights only where CUDA is; every run with --mixed-precision bf16 is told here that its weights are
bf16, by start-up code that answers for the trainer's own resolve_torch_dtype. Nothing else of upstream is touched.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import re
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from machine import SEED, describe_run
from upstream_local import FAMILY, REPOSITORY, find_upstream, make_checkpoint

from moss_tts_patches.runtime.progress import LOG_NAME, read_log

RESULT = REPOSITORY / "benchmarks" / "results" / "learning.json"
PICTURE = REPOSITORY / "docs" / "images" / "learning.png"
PACKAGES = ("torch", "transformers", "accelerate", "peft", "bitsandbytes", "moss_tts_patches")
LEARNING_RATE, ADAPTER_RATE, BASE_RATE = 5e-5, 5e-4, 2e-3
RECORDS_A_STEP, FRAMES, CODES = 4, 32, 32
# What each codebook counts by: the base learns the first set, the fine-tuning runs the second.
BASE_STRIDES, STRIDES = (3, 5, 7, 9), (5, 7, 9, 11)
# Start, end and what is drawn are means over so many steps: the records of one step differ from the next one's.
MEAN_STEPS = 20

_START_UP = """
import argparse, sys
own = argparse.ArgumentParser.parse_args

def parse_args(self, *arguments, **options):
    main = sys.modules["__main__"]
    if hasattr(main, "resolve_torch_dtype"):
        import torch

        def resolve_torch_dtype(mixed_precision):
            return torch.bfloat16 if mixed_precision == "bf16" else torch.float32

        main.resolve_torch_dtype = resolve_torch_dtype
    return own(self, *arguments, **options)

argparse.ArgumentParser.parse_args = parse_args
"""
_STEP = re.compile(r" step=(\d+)/\d+ loss=(\S+) ")


@dataclass(frozen=True)
class Way:
    """A way to train.

    Attributes:
        precision: upstream's ``--mixed-precision``.
        rate: ``--learning-rate``.
        layer: MOSS_LOWMEM_* settings; None is upstream without the layer.
    """

    label: str
    precision: str
    rate: float = LEARNING_RATE
    layer: dict[str, str] | None = None


WAYS = {
    "upstream_fp32": Way("upstream, float32", "no"),
    "upstream_bf16": Way("upstream, bf16", "bf16"),
    "full": Way("this layer, bf16, all weights", "bf16", layer={}),
    "lora": Way("this layer, bf16, LoRA", "bf16", ADAPTER_RATE, {"MOSS_LOWMEM_METHOD": "lora"}),
    "qlora": Way("this layer, bf16, QLoRA", "bf16", ADAPTER_RATE, {"MOSS_LOWMEM_METHOD": "qlora"}),
}
EXACT = "upstream_fp32"


@dataclass
class Workshop:
    """Where the runs happen.

    Attributes:
        folder: everything is written below it.
    """

    upstream: Path
    folder: Path
    environment: dict[str, str] = field(init=False)

    def __post_init__(self) -> None:
        start_up = self.folder / "start_up"
        start_up.mkdir(parents=True)
        (start_up / "sitecustomize.py").write_text(_START_UP, encoding="utf-8")
        (start_up / "torchaudio.py").write_text("", encoding="utf-8")  # upstream imports it, training never calls it
        inherited = {name: value for name, value in os.environ.items() if not name.startswith("MOSS_")}
        self.environment = {
            **inherited,
            "PATH": os.pathsep.join([str(Path(sys.executable).parent), inherited.get("PATH", "")]),
            "PYTHONPATH": str(start_up),
            "PYTHONDONTWRITEBYTECODE": "1",
            "OMP_NUM_THREADS": "1",
            "HF_HUB_OFFLINE": "1",
            "HF_HUB_DISABLE_PROGRESS_BARS": "1",
            "HF_MODULES_CACHE": str(self.folder / "modules"),
            "SKIP_PREPARE": "1",
        }

    def records(self, name: str, strides: Iterable[int], steps: int, seed: int) -> Path:
        """Writes ``steps`` windows of records in which every codebook counts."""
        numbers, path = random.Random(seed), self.folder / f"{name}.jsonl"
        with open(path, "w", encoding="utf-8") as file:
            for _ in range(steps * RECORDS_A_STEP):
                counters = [(numbers.randrange(CODES), stride) for stride in strides]
                codes = [[(start + time * stride) % CODES for start, stride in counters] for time in range(FRAMES)]
                file.write(json.dumps({"text": "Rain fell.", "audio_codes": codes}) + "\n")
        return path

    def train(self, name: str, way: Way, model: Path, data: Path) -> tuple[Path, list[float]]:
        """Runs the trainer; returns where it saved, and the loss of every step.

        Raises:
            SystemExit: it failed.
        """
        output = self.folder / name
        options = f"--gradient-accumulation-steps 1 --num-epochs 1 --warmup-ratio 0.03 --seed {SEED}"
        options += f" --per-device-batch-size {RECORDS_A_STEP}"
        options += f" --mixed-precision {way.precision} --learning-rate {way.rate}"
        paths = {"MODEL_PATH": str(model), "TRAIN_JSONL": str(data), "OUTPUT_DIR": str(output)}
        environment = {**self.environment, **paths, "TRAIN_EXTRA_ARGS_STR": options}
        script = self.upstream / FAMILY / "finetuning" / "run_train.sh"
        if way.layer is not None:
            environment |= {"MOSS_LOWMEM_FAMILY": FAMILY, "MOSS_TTS_REPO": str(self.upstream), **way.layer}
            script = REPOSITORY / "run_train_lowmem.sh"
        done = subprocess.run(
            ["bash", str(script)], cwd=self.upstream, env=environment, capture_output=True, text=True, check=False
        )
        if done.returncode:
            raise SystemExit(f"{way.label} failed:\n{done.stdout[-3000:]}{done.stderr[-3000:]}")
        if way.layer is None:
            return output, printed_losses(done.stdout)
        steps = read_log(output / LOG_NAME).steps
        return output, [step["loss"] for step in steps]


def printed_losses(text: str) -> list[float]:
    """The loss of every step, as upstream prints it."""
    return [float(loss) for _, loss in _STEP.findall(text)]


def measure(upstream: Path, folder: Path, steps: int, base_steps: int) -> dict[str, list[float]]:
    """Makes the base and trains every way from it; returns losses of every step."""
    shop = Workshop(upstream, folder)
    random_weights = make_checkpoint(upstream, folder / "random", "--seed", str(SEED))
    data = shop.records("base", BASE_STRIDES, base_steps, SEED)
    output, losses = shop.train("base", Way("base", "no", BASE_RATE), random_weights, data)
    print(f"base: loss {losses[0]:.3f} -> {losses[-1]:.3f}", flush=True)
    base, data = output / "checkpoint-epoch-0", shop.records("data", STRIDES, steps, SEED + 1)
    curves = {}
    for name, way in WAYS.items():
        _, curves[name] = shop.train(name, way, base, data)
        print(f"{way.label:30} loss {curves[name][0]:.4f} -> {final_loss(curves[name]):.4f}", flush=True)
    return curves


def final_loss(losses: list[float]) -> float:
    return statistics.fmean(losses[-MEAN_STEPS:])


def compare(curves: dict[str, list[float]]) -> list[dict[str, Any]]:
    """Returns a row a way: final loss, how far from float32's, and the share of float32's decrease."""
    start, exact = curves[EXACT][0], final_loss(curves[EXACT])
    return [
        {
            "name": name,
            "label": WAYS[name].label,
            "learning_rate": WAYS[name].rate,
            "first_loss": losses[0],
            "final_loss": final_loss(losses),
            "distance_to_fp32": final_loss(losses) - exact,
            "share_of_fp32_decrease": (start - final_loss(losses)) / (start - exact),
        }
        for name, losses in curves.items()
    ]


def running_mean(losses: list[float]) -> list[float]:
    """The mean of each step's and the steps before it, at most :data:`MEAN_STEPS`."""
    return [statistics.fmean(losses[max(0, end - MEAN_STEPS) : end]) for end in range(1, len(losses) + 1)]


def plot(curves: dict[str, list[float]], path: Path) -> None:
    """Draws the curves, 1200 pixels wide."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    # The layer's full run lies on float32's: a thin dark line over a broad pale one shows both.
    styles: dict[str, dict[str, Any]] = {
        "upstream_fp32": {"color": "#9ecae1", "linewidth": 8, "solid_capstyle": "round"},
        "upstream_bf16": {"color": "#d95f02", "linewidth": 2.5},
        "full": {"color": "#08306b", "linewidth": 2, "linestyle": (0, (5, 2))},
        "lora": {"color": "#238b45", "linewidth": 2},
        "qlora": {"color": "#74c476", "linewidth": 2, "linestyle": (0, (2, 1))},
    }
    figure, axes = pyplot.subplots(figsize=(8, 4.6), dpi=150, facecolor="white")
    for name, losses in curves.items():
        label = f"{WAYS[name].label}: {final_loss(losses):.3f}"
        axes.plot(range(1, len(losses) + 1), running_mean(losses), label=label, **styles[name])
    axes.set_title("Fine-tuning a small model through upstream's own run_train.sh", fontsize=12, pad=12)
    axes.set_xlabel(f"optimizer step (rate {LEARNING_RATE:g}; adapters {ADAPTER_RATE:g})")
    axes.set_ylabel(f"training loss, mean of {MEAN_STEPS} steps")
    axes.set_xlim(1, len(curves[EXACT]))
    axes.grid(color="#dddddd", linewidth=0.8)
    axes.spines[["top", "right"]].set_visible(False)
    axes.legend(title=f"mean loss of the last {MEAN_STEPS} steps", frameon=False, alignment="left")
    figure.tight_layout()
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=150, metadata={"Software": None})
    pyplot.close(figure)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=150)
    parser.add_argument("--base-steps", type=int, default=100)
    parser.add_argument("--json", type=Path, default=RESULT)
    parser.add_argument("--png", type=Path, default=PICTURE)
    arguments = parser.parse_args()
    upstream = find_upstream()
    with tempfile.TemporaryDirectory() as folder:
        curves = measure(upstream, Path(folder), arguments.steps, arguments.base_steps)
    result = {
        **describe_run(PACKAGES, torch.device("cpu"), upstream),
        "command": "python benchmarks/learning.py",
        "steps": arguments.steps,
        "base_steps": arguments.base_steps,
        "mean_steps": MEAN_STEPS,
        "rows": compare(curves),
        "curves": {name: [round(loss, 4) for loss in losses] for name, losses in curves.items()},
    }
    arguments.json.parent.mkdir(parents=True, exist_ok=True)
    arguments.json.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")
    plot(curves, arguments.png)


if __name__ == "__main__":
    main()
