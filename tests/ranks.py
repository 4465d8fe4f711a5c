"""Trainings on several processes for tests: each rank forked from a process that has imported everything already."""

from __future__ import annotations

import json
import os
import re
import select
import signal
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from mini import SECONDS_ALLOWED, clean_environment, read_steps
from safetensors.torch import load_file

LAYER = {"MOSS_LOWMEM": "1", "AUTOWRAPT_BOOTSTRAP": "moss_tts_patches"}
#: What makes a run comparable with upstream's, number by number.
EXACT = {**LAYER, "MOSS_LOWMEM_OPTIMIZER": "adamw", "MOSS_LOWMEM_CORRECTIONS": "none", "MOSS_LOWMEM_CHUNK_FRAMES": "7"}


def layer(*settings: Mapping[str, str], **named: str) -> tuple[tuple[str, str], ...]:
    """A run's variables, later ones winning, in a form that a cache can have for its key."""
    merged: dict[str, str] = {}
    for one in settings:
        merged |= one
    return tuple(sorted({**merged, **named}.items()))


@dataclass(frozen=True)
class Job:
    """A finished training: exit status and output of every rank, and where it saved."""

    statuses: Sequence[int]
    outputs: Sequence[str]
    folder: Path

    @property
    def losses(self) -> list[float]:
        return [step.loss for step in read_steps(self.outputs[0])]

    @property
    def rates(self) -> list[float]:
        """Learning rates as the trainer prints them: those of the step to come."""
        return [float(rate) for rate in re.findall(r" lr=(\S+)", self.outputs[0])]

    @property
    def digests(self) -> list[str]:
        """Of the weights at the end, one a rank."""
        return [re.findall(r"^rank=\d+ weights=(\w+)$", output, re.MULTILINE)[-1] for output in self.outputs]

    @property
    def writers(self) -> set[str]:
        """Ranks that wrote a file of weights through transformers."""
        return set(re.findall(r"^rank=(\d+) writes=", "\n".join(self.outputs), re.MULTILINE))

    def checkpoint(self) -> Path:
        last = self.folder / "checkpoint-last"
        return last if last.exists() else self.folder / "checkpoint-epoch-0"

    def weights(self, name: str = "model.safetensors") -> dict[str, torch.Tensor]:
        return load_file(self.checkpoint() / name)


class RankServer:
    """Starts jobs; use it as a context manager. See ``rank_server.py``.

    Args:
        variables: of every rank, such as PYTHONPATH for packages that have to be there when it starts.
    """

    def __init__(self, **variables: str) -> None:
        self._variables = variables

    def __enter__(self) -> RankServer:
        self._process = subprocess.Popen(
            [sys.executable, str(Path(__file__).with_name("rank_server.py"))],
            env=clean_environment(PYTHONDONTWRITEBYTECODE="1", **self._variables),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            bufsize=1,
            start_new_session=True,  # so that one signal reaches hung ranks too
        )
        return self

    def __exit__(self, *_: object) -> None:
        with self._process as process:
            process.communicate()

    def run(
        self,
        script: str,
        arguments: Sequence[str],
        output: Path,
        *,
        folder: Path,
        processes: int = 2,
        environment: Mapping[str, str] | None = None,
        check: bool = True,
    ) -> Job:
        """Runs ``script``, a trainer's sft.py below ``folder``, on so many ranks.

        Args:
            check: fail the test, showing the output, unless every rank ends with status 0.
        """
        log = output.with_name(output.name + ".log")
        log.parent.mkdir(parents=True, exist_ok=True)
        request: dict[str, Any] = {
            "script": script,
            "arguments": [*arguments, "--output-dir", str(output)],
            "environment": dict(environment or {}),
            "folder": str(folder),
            "log": str(log),
            "processes": processes,
        }
        assert self._process.stdin is not None and self._process.stdout is not None
        self._process.stdin.write(json.dumps(request) + "\n")
        if not select.select([self._process.stdout], [], [], SECONDS_ALLOWED)[0]:
            os.killpg(self._process.pid, signal.SIGKILL)
        answer = self._process.stdout.readline()
        outputs = [Path(f"{log}.rank{rank}").read_text(encoding="utf-8") for rank in range(processes)]
        shown = "\n".join(f"--- rank {rank}\n{text[-3000:]}" for rank, text in enumerate(outputs))
        assert answer, f"no answer about {script} within {SECONDS_ALLOWED} s:\n{shown}"
        statuses = json.loads(answer)
        if check and any(statuses):
            raise AssertionError(f"{script} ended with statuses {statuses}:\n{shown}")
        return Job(statuses, outputs, output)
