"""DDP: every process holds the whole model, and torch's reducer averages gradients as they become complete."""

from __future__ import annotations

import os
from typing import Any, ClassVar

from ..memory.placement import check_room
from .engine import TrainingEngine


class DataParallel(TrainingEngine):
    """See :class:`.engine.TrainingEngine`.

    The reducer watches each parameter's gradient node in autograd's graph and counts on one arrival per backward. The
    ``autograd`` schedule gives it that; ``fused`` and ``staged`` hand gradients over during the forward, where no
    reducer sees them. Optimizer states and their stores are each process's own: rounding noise depends on seed, step,
    parameter and element alone, so that weights stay equal on all processes to the bit.
    """

    title: ClassVar[str] = "DDP"
    autograd_reason: ClassVar[str | None] = (
        "DDP averages the gradients that autograd delivers; the other schedules deliver theirs during the forward"
    )
    # Its buckets are as large as all gradients and stay on the GPU from the first step to the last.
    device_gradients_reason: ClassVar[str | None] = (
        "DDP keeps buckets of the gradients' size on every GPU, so moving gradients away frees nothing"
    )

    def __init__(self, accelerator: Any) -> None:
        super().__init__(accelerator)
        handler = accelerator.ddp_handler
        if handler is not None:
            # A gradient then is its place in a bucket instead of a copy of it: half the memory, the same numbers, where
            # every micro-batch ends in a step; those that accumulate before the exchange are tensors of their own.
            handler.gradient_as_bucket_view = True

    def check_host_room(self, needed: int) -> None:
        processes = int(os.environ.get("LOCAL_WORLD_SIZE", self.accelerator.num_processes))
        self.accelerator.wait_for_everyone()  # what was freed on the way here counts
        check_room(needed, processes)
        self.accelerator.wait_for_everyone()  # and what others take does not
