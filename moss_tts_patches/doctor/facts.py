"""What the checks judge: gathered once, plain values, every one replaceable."""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path

from ..launch.deepspeed import ask_deepspeed
from ..memory.readings import GpuReading, HostReading, is_wsl, read_gpus, read_host


@dataclass(frozen=True)
class TorchFacts:
    """What the installed torch can do.

    Attributes:
        cuda: version that it was built for; None for a CPU build.
        sees_gpu: whether it can start CUDA here.
        capability: compute capability of the GPU that it would use.
        architectures: that it has kernels for, as ``sm_90`` and ``compute_90``.
        free_bytes: GPU memory that is free, of ``total_bytes``.
    """

    version: str
    cuda: str | None
    sees_gpu: bool
    gpu_name: str = ""
    capability: tuple[int, int] | None = None
    architectures: tuple[str, ...] = ()
    total_bytes: int = 0
    free_bytes: int = 0


@dataclass(frozen=True)
class SaveTarget:
    """Where checkpoints go.

    Attributes:
        folder: the output folder; it need not exist.
        checkpoint_bytes: of one checkpoint; None where it is not known.
        checkpoints: that will be written and kept.
        arguments: what tells this run from another: names as in upstream's ``finetune_args.json``, with values.
        resumes: the run continues what stands in the folder.
        sample: content for the trial save, such as the model's smallest weight as a safetensors file.
    """

    folder: Path
    checkpoint_bytes: int | None = None
    checkpoints: int = 1
    arguments: Mapping[str, object] = field(default_factory=dict)
    resumes: bool = False
    sample: bytes = bytes(4096)  # one page: enough to meet a full, read-only or foreign disk


@dataclass(frozen=True)
class Facts:
    """Everything that the checks look at.

    Attributes:
        gpus: by the driver's own program; None where it was not asked.
        host_bytes_wanted: host memory that the chosen plan takes; None where it is not known.
        device_bytes_wanted: GPU memory that the chosen plan takes.
        probe_pinned: page-locks some memory and says what went wrong, or None.
        ask_deepspeed: why an installed deepspeed would end the run at its first checkpoint, or None.
        prepare_device: ``PREP_DEVICE``, or None where the data is prepared already.
    """

    python: tuple[int, int]
    torch: TorchFacts
    host: HostReading
    gpus: tuple[GpuReading, ...] | None = None
    wsl: bool = False
    host_bytes_wanted: int | None = None
    device_bytes_wanted: int | None = None
    probe_pinned: Callable[[], str | None] | None = None
    ask_deepspeed: Callable[[], str | None] | None = None
    config_file: str = ""
    prepare_device: str | None = None
    target: SaveTarget | None = None


def gather_facts(
    *,
    target: SaveTarget | None = None,
    config_file: str = "",
    prepare_device: str | None = None,
    thorough: bool = True,
    host_bytes_wanted: int | None = None,
    device_bytes_wanted: int | None = None,
) -> Facts:
    """Looks at this machine.

    Args:
        thorough: also start programs (``nvidia-smi``, a Python that imports deepspeed): seconds, not milliseconds.
    """
    torch_facts = read_torch()
    return Facts(
        python=sys.version_info[:2],
        torch=torch_facts,
        host=read_host(),
        gpus=read_gpus() if thorough else None,
        wsl=is_wsl(),
        host_bytes_wanted=host_bytes_wanted,
        device_bytes_wanted=device_bytes_wanted,
        probe_pinned=probe_pinned if torch_facts.sees_gpu else None,
        ask_deepspeed=functools.partial(ask_deepspeed, sys.executable) if thorough else None,
        config_file=config_file,
        prepare_device=prepare_device,
        target=target,
    )


def read_torch() -> TorchFacts:
    """Asks torch; it starts CUDA where there is a GPU."""
    import torch

    if not torch.cuda.is_available():
        return TorchFacts(torch.__version__, torch.version.cuda, sees_gpu=False)
    free, total = torch.cuda.mem_get_info()
    return TorchFacts(
        version=torch.__version__,
        cuda=torch.version.cuda,
        sees_gpu=True,
        gpu_name=torch.cuda.get_device_name(),
        capability=torch.cuda.get_device_capability(),
        architectures=tuple(torch.cuda.get_arch_list()),
        total_bytes=total,
        free_bytes=free,
    )


# Enough to meet a limit on locked memory (64 KiB in old systems, 8 MiB in new ones), little enough to be quick.
_PROBE_BYTES = 64 * 2**20


def probe_pinned() -> str | None:
    """Page-locks 64 MiB as the stores do, and lets go; returns what went wrong."""
    import torch

    from ..memory.placement import lock_pages, unlock_pages

    try:
        buffer = torch.empty(_PROBE_BYTES, dtype=torch.uint8)
    except RuntimeError as error:
        return str(error).splitlines()[0]
    if not lock_pages(buffer.data_ptr(), _PROBE_BYTES):
        return f"cudaHostRegister refused {_PROBE_BYTES // 2**20} MiB"
    unlock_pages(buffer.data_ptr())
    return None
