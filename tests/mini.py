"""The miniature trainer for tests: makes its inputs and runs it in a process of its own.

Importing this module also makes ``mini_moss_tts.moss_tts_local.…`` importable, under names that do not clash with an
upstream checkout's ``moss_tts_local``.
"""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file

REPOSITORY = Path(__file__).resolve().parents[1]
MINI = REPOSITORY / "examples" / "mini_moss_tts"
if str(MINI.parent) not in sys.path:
    sys.path.insert(0, str(MINI.parent))

from mini_moss_tts.compare_demo import Step, read_steps  # noqa: E402
from mini_moss_tts.make_demo_data import make_demo_data  # noqa: E402

ARGUMENTS = (
    "--per-device-batch-size 2 --gradient-accumulation-steps 2 --num-epochs 1 --mixed-precision no --learning-rate 1e-3"
)
SECONDS_ALLOWED = 300  # a run takes 5 s on an idle machine; a hung one must not hold the suite for long


@dataclass(frozen=True)
class MiniRun:
    """A finished training: exit status, standard output and error together, and where it saved."""

    status: int
    output: str
    folder: Path

    @property
    def steps(self) -> tuple[Step, ...]:
        return read_steps(self.output)

    @property
    def losses(self) -> list[float]:
        return [step.loss for step in self.steps]

    def checkpoint(self, epoch: int = 0) -> Path:
        return self.folder / f"checkpoint-epoch-{epoch}"

    def weights(self, epoch: int = 0) -> dict[str, torch.Tensor]:
        return load_file(self.checkpoint(epoch) / "model.safetensors")


def make_mini_inputs(folder: Path, **options: Any) -> Path:
    """Makes a checkpoint and ``train.jsonl`` in ``folder``; options as of ``make_demo_data``, tiny by default."""
    make_demo_data(folder, **options)
    return folder


def clean_environment(**variables: str) -> dict[str, str]:
    """This process's environment without the layer, offline, one thread, this interpreter's programs first."""
    inherited = {
        name: value
        for name, value in os.environ.items()
        if not name.startswith("MOSS_") and name not in ("AUTOWRAPT_BOOTSTRAP", "TRAIN_EXTRA_ARGS_STR")
    }
    return {
        **inherited,
        "PATH": os.pathsep.join([str(Path(sys.executable).parent), inherited.get("PATH", "")]),
        "HF_HUB_OFFLINE": "1",
        "HF_HUB_DISABLE_PROGRESS_BARS": "1",
        "OMP_NUM_THREADS": "1",
        "ACCELERATE_CONFIG_FILE": str(MINI / "one_process.yaml"),
        **variables,
    }


def run_mini(
    inputs: Path,
    output: Path,
    *arguments: str,
    launcher: bool = False,
    environment: Mapping[str, str] | None = None,
    check: bool = True,
    trainer: Path = MINI,
) -> MiniRun:
    """Trains the miniature on ``inputs`` and saves below ``output``.

    Args:
        arguments: for sft.py, after :data:`ARGUMENTS` (a flag given twice counts the second time).
        launcher: start it through its run_train.sh and ``accelerate launch`` instead of ``python sft.py``.
        environment: variables on top of :func:`clean_environment`, such as the layer's own.
        check: fail the test, showing the output, if the training does not end with status 0.
        trainer: root of the miniature, or of a changed copy of it.
    """
    all_arguments = [*ARGUMENTS.split(), *arguments]
    data = inputs / "train.jsonl"
    variables = dict(environment or {})
    if launcher:
        command = ["bash", "moss_tts_local/finetuning/run_train.sh"]
        variables |= {"SKIP_PREPARE": "1", "MODEL_PATH": str(inputs), "TRAIN_JSONL": str(data)}
        variables |= {"OUTPUT_DIR": str(output), "TRAIN_EXTRA_ARGS_STR": " ".join(all_arguments)}
    else:
        command = [sys.executable, "moss_tts_local/finetuning/sft.py", "--model-path", str(inputs)]
        command += ["--train-jsonl", str(data), "--output-dir", str(output), *all_arguments]
    done = subprocess.run(
        command,
        cwd=trainer,
        env=clean_environment(**variables),
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=SECONDS_ALLOWED,
    )
    if check and done.returncode != 0:
        raise AssertionError(f"{' '.join(command)} ended with status {done.returncode}:\n{done.stdout[-4000:]}")
    return MiniRun(done.returncode, done.stdout, output)
