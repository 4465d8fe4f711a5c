"""One line per optimizer step in ``lowmem_log.jsonl``, readable while the training runs and after a crash."""

from __future__ import annotations

import json
import math
import os
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import psutil  # comes with accelerate
import torch

from ..loss.problem import IGNORE_INDEX, FrameLoss

LOG_NAME = "lowmem_log.jsonl"

# A line is in the hands of the operating system at once, which survives a killed process. Only a power cut can lose
# what is not on the disk yet; forcing it there makes a step wait, so it is done this often.
_SECONDS_TO_DISK = 10.0


class LineLog:
    """A JSONL file that only ever grows by whole lines.

    A line is one write to a file opened for appending, so nothing else can come between its bytes. What a crash of the
    machine left of a last line is cut off when the file is opened again.

    Args:
        path: of the file.
        clock: seconds.
        say: logs a line when a disk takes no more: no training ends for its log.
    """

    def __init__(
        self, path: Path, clock: Callable[[], float] = time.monotonic, say: Callable[[str], None] = lambda line: None
    ) -> None:
        self._name, self._say, self._works = path.name, say, True
        path.parent.mkdir(parents=True, exist_ok=True)
        self._file = os.open(path, os.O_RDWR | os.O_APPEND | os.O_CREAT | getattr(os, "O_BINARY", 0), 0o644)
        self._clock, self._on_disk = clock, clock()
        _cut_torn_line(self._file)

    def write(self, values: Mapping[str, Any]) -> None:
        """Appends one line, or none where the disk is full; numbers that JSON has no word for become null."""
        line = (json.dumps(_without_nan(values), ensure_ascii=False) + "\n").encode()
        with self._whatever_the_disk_says():
            self._append(line)
            if self._clock() - self._on_disk >= _SECONDS_TO_DISK:
                os.fsync(self._file)
                self._on_disk = self._clock()
            self._works = True

    def _append(self, line: bytes) -> None:
        before, written = os.fstat(self._file).st_size, 0
        try:
            while written < len(line):  # a full disk, or a signal, may let a part pass
                written += os.write(self._file, line[written:])
        except OSError:
            if written:
                os.ftruncate(self._file, before)
            raise

    @contextmanager
    def _whatever_the_disk_says(self) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            if self._works:
                self._say(
                    f"warning: {self._name}: {error.strerror or error}; steps are left out until it can be written"
                )
            self._works = False

    def close(self) -> None:
        with self._whatever_the_disk_says():
            os.fsync(self._file)
        os.close(self._file)


def _cut_torn_line(file: int) -> None:
    size = os.fstat(file).st_size
    end = size
    while end > 0:
        start = max(0, end - 65536)
        os.lseek(file, start, os.SEEK_SET)
        found = os.read(file, end - start).rfind(b"\n")
        if found >= 0:
            end = start + found + 1
            break
        end = start
    if end < size:
        os.ftruncate(file, end)


def _without_nan(value: Any) -> Any:
    if isinstance(value, float) and not math.isfinite(value):
        return None
    if isinstance(value, Mapping):
        return {name: _without_nan(item) for name, item in value.items()}
    return [_without_nan(item) for item in value] if isinstance(value, (list, tuple)) else value


def describe_channels(problem: FrameLoss, sums: torch.Tensor) -> dict[str, Any]:
    """Returns the arguments of :meth:`StepRecorder.micro_batch` that the loss engine knows; nothing waits for the GPU.

    Args:
        problem: of the micro-batch.
        sums: ``[channels]`` float32.
    """
    labels = torch.stack([channel.labels for channel in problem.channels])
    return {
        "frames": labels.shape[1],
        "channels": [channel.name for channel in problem.channels],
        "sums": sums,
        "counts": (labels != IGNORE_INDEX).sum(dim=1),
    }


class StepRecorder:
    """Gathers what happens in an accumulation window and writes it as one line.

    Losses stay on the device until the step ends: one synchronisation a step, none a micro-batch.

    Args:
        log: gets the lines.
        read_memory: bytes by name, asked once a step.
        clock: seconds.
    """

    def __init__(
        self,
        log: LineLog,
        read_memory: Callable[[], Mapping[str, int]],
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        self._log, self._read_memory, self._clock = log, read_memory, clock
        self._last_step = clock()
        self._reset()

    def _reset(self) -> None:
        self._losses: list[torch.Tensor] = []
        self._channels: dict[str, tuple[torch.Tensor, torch.Tensor]] = {}
        self._positions = self._frames = 0
        self._seconds: dict[str, float] = {}

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """Adds the time of the block to a phase of this step, such as ``forward``.

        On a GPU this is the time until the work is queued; what the step waits for shows in the step's total.
        """
        start = self._clock()
        try:
            yield
        finally:
            self._seconds[name] = self._seconds.get(name, 0.0) + self._clock() - start

    def micro_batch(
        self,
        loss: torch.Tensor,
        positions: int,
        frames: int,
        channels: Sequence[str] = (),
        sums: torch.Tensor | None = None,
        counts: torch.Tensor | None = None,
    ) -> None:
        """Notes one micro-batch.

        Args:
            loss: ``[]``, as the trainer gets it.
            positions: of the batch, padding included.
            frames: positions with a label.
            channels: names of the entries of ``sums``.
            sums: ``[channels]`` float32, the sum of each channel's losses; a channel may be missing in a batch.
            counts: ``[channels]``, how many labels each had.
        """
        self._losses.append(loss.detach().float())
        self._positions += positions
        self._frames += frames
        if sums is None or counts is None:
            return
        for index, name in enumerate(channels):
            before = self._channels.get(name, (0.0, 0.0))
            self._channels[name] = (before[0] + sums[index].detach(), before[1] + counts[index])  # type: ignore[operator]

    def step(
        self, step: int, epoch: float, lr: float, grad_norm: torch.Tensor | float | None, skipped: bool = False
    ) -> dict[str, Any]:
        """Writes the line of an optimizer step and begins the next window.

        Args:
            step: number of the step, from 1.
            epoch: how many times the data was seen, with its fraction.
            lr: the learning rate of this step.
            grad_norm: before clipping; None where it was not asked for.
            skipped: the weights were left as they were, because the gradients were not finite.

        Returns:
            What was written.
        """
        now = self._clock()
        losses = torch.stack(self._losses).tolist() if self._losses else []
        seconds = now - self._last_step
        finite = [loss for loss in losses if math.isfinite(loss)]
        values = {
            "step": step,
            "epoch": round(epoch, 4),
            "loss": sum(finite) / len(finite) if finite else None,
            "micro_batches": len(losses),
            "loss_by_codebook": self._channel_losses(),
            "grad_norm": None if grad_norm is None else float(grad_norm),
            "lr": lr,
            "positions": self._positions,
            "frames": self._frames,
            "frames_per_second": self._frames / max(seconds, 1e-9),
            "seconds": seconds,
            "seconds_by_phase": dict(self._seconds),
            "memory_bytes": dict(self._read_memory()),
            "time": time.time(),
        }
        if len(finite) < len(losses):
            values["nonfinite_losses"] = len(losses) - len(finite)
        if skipped:
            values["skipped"] = True
        self._log.write(values)
        self._last_step = now
        self._reset()
        return values

    def leave_out(self, seconds: float) -> None:
        """The current step had to wait so long for something that is no training."""
        self._last_step += seconds

    def validation(self, values: Mapping[str, Any]) -> None:
        """Writes a line about an evaluation."""
        self._log.write({**values, "time": time.time()})

    def forget(self) -> None:
        """Drops what was gathered since the last line; its time counts to the next one."""
        self._reset()

    def _channel_losses(self) -> dict[str, float]:
        """Returns each channel's mean over the window's labels; a channel without labels is left out."""
        if not self._channels:
            return {}
        pairs = torch.stack([torch.stack([total.float(), count.float()]) for total, count in self._channels.values()])
        return {name: total / count for name, (total, count) in zip(self._channels, pairs.tolist()) if count}


def read_memory(device: torch.device) -> dict[str, int]:
    """Returns bytes in use: the GPU's now and at most so far, and this process's in host memory."""
    found = {"host": psutil.Process().memory_info().rss}
    if device.type == "cuda":
        found["gpu"] = torch.cuda.memory_allocated(device)
        found["gpu_peak"] = torch.cuda.max_memory_allocated(device)
    return found


@dataclass
class RunLog:
    """What a log says.

    Attributes:
        about: the run (lines without a step, later ones win).
        steps: in order. A step that was done twice, because a run went on from an earlier one, counts as it was done
            last; steps that a resumed run has not reached again yet are of the run before, and are left out.
        validation: lines with a ``valid_loss``, in order, by the same rule.
    """

    about: dict[str, Any] = field(default_factory=dict)
    steps: list[dict[str, Any]] = field(default_factory=list)
    validation: list[dict[str, Any]] = field(default_factory=list)


def read_log(path: Path) -> RunLog:
    """Reads a log, whole or being written; lines of other kinds are passed over."""
    about: dict[str, Any] = {}
    steps: dict[int, dict[str, Any]] = {}
    validation: dict[int, dict[str, Any]] = {}
    with open(path, encoding="utf-8") as file:
        for line in file:
            if not line.endswith("\n"):
                break  # being written
            values = json.loads(line)
            step = values.get("step")
            if step is None:
                about.update(values)
            elif "loss" in values:
                if step in steps:
                    steps = {number: one for number, one in steps.items() if number < step}
                    validation = {number: one for number, one in validation.items() if number < step}
                steps[step] = values
            elif "valid_loss" in values:
                validation[step] = values
    return RunLog(about, [steps[number] for number in sorted(steps)], [validation[n] for n in sorted(validation)])
