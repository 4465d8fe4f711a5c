"""What several processes change: one small file an engine, and the choice between them.

An engine is accelerate's and stays so. These files say what of the layer it leaves possible, what is checked before and
after ``prepare``, and how whole weights are got back from its parts. They know torch and accelerate; no model family,
no environment variable.
"""

from __future__ import annotations

from typing import Any

from accelerate.utils import DistributedType

from ..errors import EnvironmentProblem
from .data_parallel import DataParallel
from .engine import TrainingEngine
from .fully_sharded import FullySharded
from .zero import Zero

__all__ = ["TrainingEngine", "engine_of"]


def engine_of(accelerator: Any) -> TrainingEngine:
    """Returns what the trainer's ``Accelerator`` runs on.

    Raises:
        EnvironmentProblem: an engine that the layer does not know.
    """
    kind, processes = accelerator.distributed_type, accelerator.num_processes
    if kind == DistributedType.DEEPSPEED:
        return Zero(accelerator)
    if kind == DistributedType.FSDP:
        return FullySharded(accelerator)
    # accelerate wraps a model on CPUs even for a single process, one on a GPU only for several.
    if kind == DistributedType.MULTI_CPU or (kind == DistributedType.MULTI_GPU and processes > 1):
        return DataParallel(accelerator)
    if processes == 1 and kind in (DistributedType.NO, DistributedType.MULTI_GPU):
        return TrainingEngine(accelerator)
    raise EnvironmentProblem(
        f"engine: {processes} process(es) under {kind}. The layer knows one process, DDP, FSDP and DeepSpeed ZeRO "
        "(`moss-lowmem configs` lists ready files); choose one of them, or set MOSS_LOWMEM=0."
    )
