"""Reads what an out-of-memory error says about itself.

The numbers exist nowhere else: when the error arrives, the allocation that failed is gone.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Literal

_UNITS = {"bytes": 1, "KiB": 2**10, "MiB": 2**20, "GiB": 2**30, "TiB": 2**40}
_SIZE = r"(\d+(?:\.\d+)?) (bytes|KiB|MiB|GiB|TiB)"

# Source: torch c10/cuda/CUDACachingAllocator.cpp (malloc, the OutOfMemoryError branch), 2.0 to 2.13.
_GPU_FIELDS = {
    "wanted_bytes": re.compile(rf"[Tt]ried to allocate {_SIZE}"),
    "total_bytes": re.compile(rf"total capacity of {_SIZE}"),
    "free_bytes": re.compile(rf"of which {_SIZE} is free"),
    "process_bytes": re.compile(rf"this process has {_SIZE} memory in use"),
    "allocated_bytes": re.compile(rf"{_SIZE} is allocated by PyTorch"),
    "reserved_unused_bytes": re.compile(rf"{_SIZE} is reserved by PyTorch but unallocated"),
}

# Source: torch c10/core/impl/alloc_cpu.cpp, alloc_cpu, on Linux and on Windows.
_HOST = re.compile(r"(?:can't allocate memory|not enough memory): you tried to allocate (\d+) bytes")

_GPU_MARKS = ("CUDA out of memory", "CUDA error: out of memory", "CUBLAS_STATUS_ALLOC_FAILED", "HIP out of memory")


@dataclass(frozen=True)
class Failure:
    """An allocation that failed; a size is None where the error does not name it.

    Attributes:
        place: which memory ran out.
        wanted_bytes: size of the allocation.
        total_bytes: of the GPU.
        free_bytes: on the GPU, by the driver.
        process_bytes: GPU memory of this process, context included.
        allocated_bytes: by torch, for live tensors.
        reserved_unused_bytes: by torch, in pieces that were too small: fragmentation.
    """

    place: Literal["gpu", "host"]
    wanted_bytes: int | None = None
    total_bytes: int | None = None
    free_bytes: int | None = None
    process_bytes: int | None = None
    allocated_bytes: int | None = None
    reserved_unused_bytes: int | None = None


def read_failure(error: BaseException) -> Failure | None:
    """Tells an out-of-memory error from every other one, and reads its numbers.

    Returns:
        None where ``error`` is something else.
    """
    message = str(error)
    host = _HOST.search(message)
    if host:
        return Failure("host", int(host[1]))
    if isinstance(error, MemoryError):
        return Failure("host")
    if type(error).__name__ == "OutOfMemoryError" or any(mark in message for mark in _GPU_MARKS):
        found = {name: pattern.search(message) for name, pattern in _GPU_FIELDS.items()}
        sizes = {name: round(float(match[1]) * _UNITS[match[2]]) for name, match in found.items() if match}
        return Failure("gpu", **sizes)
    return None
