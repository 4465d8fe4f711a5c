"""One run's memory, watched and explained: the phases, the report and the readings in one place.

The session tells it what it knows as soon as it knows it, and puts what may run out of memory into phases.
"""

from __future__ import annotations

import functools
import os
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import torch
from torch import nn

from ..messages import Messages
from .candidates import Candidate
from .oom_report import Phase, PhaseTracker, Situation, reporting_out_of_memory
from .readings import read_device, read_host
from .watcher import Watcher, current_readings

Candidates = Callable[[], Sequence[Candidate]]


def _no_candidates() -> Sequence[Candidate]:
    return ()


class MemoryGuard:
    """Reports memory that runs out, and keeps readings for the launcher.

    Args:
        folder: the output folder.
        say: the language of the report.
        show: prints it.
        readings_folder: where the launcher looks for readings; None where nobody does.

    Attributes:
        folder: the output folder, once it is known.
        gpu: index of the GPU that this process trains on, once it is known; None without one.
        plan: expected device bytes by category.
        measure: device bytes by category now; asked after a failure only.
        records: id and length in positions of every record of the current batch.
        gpu_candidates: settings that would take memory off the GPU; asked after a failure only.
        host_candidates: the same for host memory.
    """

    def __init__(
        self,
        folder: Path | None,
        say: Messages,
        show: Callable[[str], object],
        readings_folder: Path | None = None,
    ) -> None:
        self.tracker = PhaseTracker()
        self.gpu: int | None = None
        self.plan: Mapping[str, int] = {}
        self.measure: Callable[[], Mapping[str, int]] = dict
        self.records: Sequence[tuple[str, int]] = ()
        self.gpu_candidates: Candidates = _no_candidates
        self.host_candidates: Candidates = _no_candidates
        self.folder, self._say, self._show = folder, say, show
        self._readings_folder = readings_folder

    def watch(self) -> None:
        """Starts to keep readings, if somebody looks for them."""
        if self._readings_folder is not None and self._readings_folder.is_dir():
            path = self._readings_folder / f"{os.getpid()}.json"
            Watcher(path, lambda: self.tracker.current, lambda: current_readings(self.gpu)).start()

    def phase(self, name: Phase) -> AbstractContextManager[None]:
        """What the block does; running out of memory in it is reported, and goes on as it is."""
        return reporting_out_of_memory(
            name, self.tracker, self.situation, folder=self.folder, say=self._say, show=self._show
        )

    def within(self, name: Callable[[], Phase], function: Callable[..., Any]) -> Callable[..., Any]:
        """Returns ``function`` as a phase.

        Args:
            name: asked at every call; the first optimizer step is another phase than the second.
            function: such as the ``step`` that the trainer calls.
        """

        @functools.wraps(function)
        def guarded(*args: Any, **options: Any) -> Any:
            with self.phase(name()):
                return function(*args, **options)

        return guarded

    def situation(self) -> Situation:
        """Everything known at this moment."""
        return Situation(
            plan=self.plan,
            reality=self.measure(),
            records=list(self.records),
            gpu_candidates=self.gpu_candidates(),
            host_candidates=self.host_candidates(),
            device=read_device(self.gpu),
            host=read_host(),
        )


def device_bytes_by_category(
    model: nn.Module, device: torch.device, *, gradients: int, states: int, allocated: int
) -> dict[str, int]:
    """Says where a device's memory went: weights, gradients, states, and the rest.

    Args:
        model: its parameters and buffers that stand on ``device`` are counted; a tied one counts once.
        device: of the training; accelerate's has no index where there is one process.
        gradients: bytes that the gradient store holds there.
        states: bytes that the optimizer's states take there.
        allocated: all bytes of live tensors there, by the allocator.
    """
    storages = {
        tensor.untyped_storage().data_ptr(): tensor.untyped_storage().nbytes()
        for tensor in (*model.parameters(), *model.buffers())
        if tensor.device.type == device.type and device.index in (None, tensor.device.index)
    }
    weights = sum(storages.values())
    rest = allocated - weights - gradients - states
    return {"weights": weights, "gradients": gradients, "states": states, "other": max(0, rest)}
