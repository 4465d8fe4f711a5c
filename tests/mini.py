"""The miniature trainer for tests: makes its inputs and runs it in a process of its own.

Importing this module also makes ``mini_moss_tts.moss_tts_local.…`` importable, under names that do not clash with an
upstream checkout's ``moss_tts_local``.
"""

from __future__ import annotations

import functools
import json
import os
import re
import select
import signal
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
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


FAMILIES = ("moss_tts_local", "moss_tts_delay", "moss_tts_local_v1.5", "moss_tts_realtime")


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
        """The checkpoint of an epoch; moss_tts_local_v1.5 counts them from 1, and then there is no 0."""
        folder = self.folder / f"checkpoint-epoch-{epoch}"
        return folder if epoch or folder.exists() else self.folder / "checkpoint-last"

    def weights(self, epoch: int = 0) -> dict[str, torch.Tensor]:
        return load_file(self.checkpoint(epoch) / "model.safetensors")

    def files(self) -> dict[str, bytes]:
        """Contents of all checkpoints, by path; the output folder's name and the time of saving are taken out."""
        return {
            str(path.relative_to(self.folder)): re.sub(
                rb'"saved_at": "[^"]*"', b"", path.read_bytes().replace(str(self.folder).encode(), b"OUTPUT")
            )
            for path in self.folder.glob("checkpoint-*/**/*")
            if path.is_file()
        }


def make_mini_inputs(folder: Path, **options: Any) -> Path:
    """Makes a checkpoint and ``train.jsonl`` in ``folder``; options as of ``make_demo_data``, tiny by default."""
    make_demo_data(folder, **options)
    return folder


def inputs_made_once(root: Path, **options: Any) -> Callable[[str], Path]:
    """Returns a function that makes a family's inputs below ``root`` when it is first asked for them.

    The folder's name is the key of transformers' cache of a checkpoint's code, and may have no dot.
    """
    return functools.cache(
        lambda family: make_mini_inputs(root / f"{family.replace('.', '_')}_tiny", family=family, **options)
    )


def write_shards(folder: Path, shards: Sequence[Sequence[str]]) -> Path:
    """Writes a file for each rank with its lines, named as upstream's prepare_data.py does; returns ``folder``."""
    folder.mkdir(exist_ok=True)
    for rank, lines in enumerate(shards):
        path = folder / f"train.rank{rank:05d}-of-{len(shards):05d}.jsonl"
        path.write_text("".join(lines), encoding="utf-8")
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


def command_line(inputs: Path, output: Path, *arguments: str) -> list[str]:
    """Arguments of a trainer's sft.py."""
    data = ["--model-path", str(inputs), "--train-jsonl", str(inputs / "train.jsonl"), "--output-dir", str(output)]
    return [*data, *ARGUMENTS.split(), *arguments]


def run_mini(
    inputs: Path,
    output: Path,
    *arguments: str,
    launcher: bool = False,
    environment: Mapping[str, str] | None = None,
    check: bool = True,
    trainer: Path = MINI,
    family: str = FAMILIES[0],
) -> MiniRun:
    """Trains the miniature on ``inputs`` and saves below ``output``, in a process that starts from nothing.

    Args:
        arguments: for sft.py, after :data:`ARGUMENTS` (a flag given twice counts the second time).
        launcher: start it through its run_train.sh and ``accelerate launch`` instead of ``python sft.py``.
        environment: variables on top of :func:`clean_environment`, such as the layer's own.
        check: fail the test, showing the output, if the training does not end with status 0.
        trainer: root of the miniature, or of a changed copy of it.
        family: whose trainer; ``inputs`` must be made for it.
    """
    variables = dict(environment or {})
    if launcher:
        command = ["bash", f"{family}/finetuning/run_train.sh"]
        variables |= {"SKIP_PREPARE": "1", "MODEL_PATH": str(inputs), "TRAIN_JSONL": str(inputs / "train.jsonl")}
        variables |= {"OUTPUT_DIR": str(output), "TRAIN_EXTRA_ARGS_STR": " ".join([ARGUMENTS, *arguments])}
    else:
        command = [sys.executable, f"{family}/finetuning/sft.py", *command_line(inputs, output, *arguments)]
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


class MiniServer:
    """Trains the miniature in processes that need not load torch first: 1 s for a training instead of 5.

    See ``mini_server.py``. Use it as a context manager.
    """

    def __enter__(self) -> MiniServer:
        script = Path(__file__).with_name("mini_server.py")
        self._process = subprocess.Popen(
            [sys.executable, str(script)],
            env=clean_environment(),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            bufsize=1,
            start_new_session=True,  # so that one signal reaches a hung trainer too
        )
        return self

    def __exit__(self, *_: object) -> None:
        with self._process as process:  # closes its input, which ends it, and waits
            process.communicate()

    def run(
        self,
        family: str,
        inputs: Path,
        output: Path,
        *arguments: str,
        environment: Mapping[str, str] | None = None,
        check: bool = True,
        trainer: Path = MINI,
    ) -> MiniRun:
        """Does what :func:`run_mini` does."""
        log = output.with_suffix(".log")
        log.parent.mkdir(parents=True, exist_ok=True)
        log.touch()
        request = {
            "script": f"{family}/finetuning/sft.py",
            "arguments": command_line(inputs, output, *arguments),
            "environment": dict(environment or {}),
            "folder": str(trainer),
            "log": str(log),
        }
        assert self._process.stdin is not None and self._process.stdout is not None
        self._process.stdin.write(json.dumps(request) + "\n")
        if not select.select([self._process.stdout], [], [], SECONDS_ALLOWED)[0]:
            os.killpg(self._process.pid, signal.SIGKILL)
        answer = self._process.stdout.readline()
        assert answer, f"no answer about {family}; what it printed last:\n{log.read_text(encoding='utf-8')[-4000:]}"
        status = int(answer)
        text = log.read_text(encoding="utf-8")
        if check and status != 0:
            raise AssertionError(f"{family} {' '.join(arguments)} ended with status {status}:\n{text[-4000:]}")
        return MiniRun(status, text, output)
