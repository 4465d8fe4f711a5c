"""Log lines in upstream's form, from the main process only."""

from __future__ import annotations

import os
import statistics
import sys
from datetime import datetime

import torch
from torch import nn

from ..units import GIB
from .bar import lines_above_bars


def process_rank() -> int:
    """Which of the job's processes this is, before anything of torch's is set up; the launchers set ``RANK``."""
    return int(os.environ.get("RANK", "0"))


def log(line: str) -> None:
    """Prints ``[timestamp] [lowmem] line`` where this is the main process."""
    if process_rank() == 0:
        log_from_any(line)


def log_from_any(line: str) -> None:
    """Prints a line whichever process this is; others than the main one say which they are."""
    rank = process_rank()
    speaker = f"rank={rank} " if rank else ""
    with lines_above_bars():
        print(f"[{datetime.now():%Y-%m-%d %H:%M:%S}] [lowmem] {speaker}{line}", flush=True)


class StepClock:
    """Durations of optimizer steps, accumulation included."""

    def __init__(self) -> None:
        self._last: float | None = None
        self._durations: list[float] = []
        self._before = 0

    def start(self, now: float) -> None:
        """Notes when the first micro-batch of the run began; later calls do nothing."""
        if self._last is None:
            self._last = now

    def step(self, now: float) -> None:
        """Notes the end of an optimizer step."""
        if self._last is not None:
            self._durations.append(now - self._last)
        self._last = now

    def leave_out(self, seconds: float) -> None:
        """The step that goes on had to wait so long for something that is no training."""
        if self._last is not None:
            self._last += seconds

    def go_on_from(self, steps: int) -> None:
        """An earlier process has done that many steps."""
        self._before = steps

    @property
    def steps(self) -> int:
        """Steps of the whole training."""
        return self._before + len(self._durations)

    @property
    def has_timed(self) -> bool:
        """Whether this process has done a step."""
        return bool(self._durations)

    def median_seconds(self) -> float:
        """Of the steps of this process; it has done one."""
        return statistics.median(self._durations)


def peak_memory(device: torch.device) -> str:
    """What the run needed at most, as ``key=value`` pairs: allocator's view on CUDA, resident set of the process."""
    parts = []
    if device.type == "cuda":
        allocated, reserved = torch.cuda.max_memory_allocated(device), torch.cuda.max_memory_reserved(device)
        parts += [f"peak_gpu_allocated={allocated / GIB:.2f}GiB", f"peak_gpu_reserved={reserved / GIB:.2f}GiB"]
    resident = _peak_resident_bytes()
    if resident:
        parts.append(f"peak_host={resident / GIB:.2f}GiB")
    return " ".join(parts)


def _peak_resident_bytes() -> int:
    try:
        import resource
    except ImportError:  # Windows
        return 0
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024  # macOS counts bytes, Linux KiB


def describe_module(name: str, module: nn.Module | None) -> str:
    """Effective dtype and attention implementation, read from the module itself and not from a flag."""
    if module is None:
        return f"{name}=none"
    dtypes = sorted({str(parameter.dtype).removeprefix("torch.") for parameter in module.parameters()})
    attention = getattr(getattr(module, "config", None), "_attn_implementation", "unknown")
    return f"{name}_dtype={'+'.join(dtypes)} {name}_attention={attention}"


def describe_parameters(model: nn.Module) -> str:
    """Counts trainable and frozen parameters."""
    trainable = sum(p.numel() for p in model.parameters() if p.requires_grad)
    frozen = sum(p.numel() for p in model.parameters() if not p.requires_grad)
    return f"trainable_parameters={trainable:,} frozen_parameters={frozen:,}"
