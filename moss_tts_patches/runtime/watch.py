"""What a run knows of its machine: checked before it starts, and explained when memory runs out."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

import torch
from torch import nn

from ..doctor.facts import SaveTarget
from ..doctor.preflight import preflight, stop_on_errors
from ..doctor.storage import weight_bytes
from ..memory.candidates import gpu_candidates, host_candidates
from ..memory.guard import MemoryGuard, device_bytes_by_category
from ..messages import Messages
from ..optim.streamed import StreamedOptimizer
from .report import log_from_any
from .stores import Stores


@dataclass(frozen=True)
class Surroundings:
    """What the process that started the training told it.

    Attributes:
        messages: in the user's language.
        config_file: accelerate's.
        readings_folder: where the launcher looks for memory readings after a kill; None where nobody does.
        is_main: this is the process that speaks and writes.
    """

    messages: Messages = field(default_factory=Messages)
    config_file: str = ""
    readings_folder: Path | None = None
    is_main: bool = True


class MachineWatch:
    """Checks, phases and reports of one run.

    Args:
        surroundings: see there.
        log: says a line.

    Attributes:
        guard: puts what may run out of memory into phases.
    """

    def __init__(self, surroundings: Surroundings, log: Callable[[str], None]) -> None:
        self._surroundings, self._log = surroundings, log
        # Memory may run out in one process alone, and it is not always the one that speaks.
        self.guard = MemoryGuard(None, surroundings.messages, log_from_any, surroundings.readings_folder)

    @property
    def is_main(self) -> bool:
        """Whether this is the process that speaks and writes."""
        return self._surroundings.is_main

    def started(self, output_folder: Path) -> None:
        """The trainer's arguments are known; readings are kept from now on."""
        self.guard.folder = output_folder if self._surroundings.is_main else None
        self.guard.watch()

    def device_known(self, device: torch.device) -> None:
        """The trainer's accelerator has chosen this process's device."""
        if device.type == "cuda":
            self.guard.gpu = torch.cuda.current_device() if device.index is None else device.index

    def check(self, output_folder: Path, model_path: str, whole_checkpoints: int, *, resumes: bool) -> None:
        """Looks for what would end the run hours from now: disk, output folder, memory.

        Args:
            output_folder: of the run.
            model_path: folder or hub id of the model.
            whole_checkpoints: how many times the model's size will be written.
            resumes: the run goes on from a point in that folder.

        Raises:
            EnvironmentProblem: there is something.
        """
        if self._surroundings.is_main:
            size = weight_bytes(Path(model_path))
            target = SaveTarget(output_folder, size, whole_checkpoints, {"model_path": model_path}, resumes)
            found = preflight(
                target=target, config_file=self._surroundings.config_file, say=self._surroundings.messages
            )
            stop_on_errors(found, self._log)

    def model_ready(
        self,
        model: nn.Module,
        device: torch.device,
        stores: Stores,
        optimizer: StreamedOptimizer,
        parkable: list[nn.Parameter],
    ) -> None:
        """Tells the guard what a report needs.

        Args:
            model: on its device.
            device: of the training.
            stores: of the run.
            optimizer: its states count.
            parkable: weights that could wait in host memory while the loss works.
        """
        sizes, placement = stores.sizes, stores.placement
        parkable_bytes = sum(weight.numel() * weight.element_size() for weight in parkable)
        self.guard.gpu_candidates = lambda: gpu_candidates(sizes, placement, parkable_bytes=parkable_bytes)
        self.guard.host_candidates = lambda: host_candidates(
            sizes,
            placement,
            gradient_bytes=stores.gradients.host_bytes(),
            parked_bytes=parkable_bytes if stores.parking is not None else 0,
        )
        self.guard.measure = lambda: device_bytes_by_category(
            model,
            device,
            gradients=stores.gradients.device_bytes(),
            states=optimizer.states.device_bytes(),
            allocated=torch.cuda.memory_allocated(device) if device.type == "cuda" else 0,
        )
