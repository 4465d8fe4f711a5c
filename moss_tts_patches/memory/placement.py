"""Host memory for gradients and optimizer states: the one place where it is allocated.

A buffer here is gigabytes, so three things matter that do not for small ones. It has to be *there*: running out in the
middle of a step kills the process without a word, so the room is checked first. It should be *page-locked*, or copies
to the GPU neither overlap nor reach full speed; PyTorch's own pinned allocator rounds every buffer up to a power of two
(5.2 GiB of states would take 8), so ordinary memory is registered with the driver instead. And whoever measures memory
has to know that the storage is *on the host*, since under ``FakeTensorMode`` every tensor looks alike.
"""

from __future__ import annotations

import contextlib
import ctypes
import itertools
import mmap
import os
import warnings
import weakref
from collections.abc import Callable

import torch
from torch._subclasses.fake_tensor import FakeTensor

from ..errors import EnvironmentProblem
from ..units import GIB

_MEMINFO = "/proc/meminfo"
_CGROUP = "/sys/fs/cgroup"

_observers: dict[int, Callable[[torch.UntypedStorage], object]] = {}
_observer_ids = itertools.count()
_warned_unpinned = False
# Page-locked buffers by address, and what keeps them in a forked process.
_locked: weakref.WeakValueDictionary[int, torch.UntypedStorage] = weakref.WeakValueDictionary()
_kept_after_fork: list[torch.UntypedStorage] = []


class ObserverHandle:
    """Undoes one :func:`register_host_observer`."""

    def __init__(self, identity: int) -> None:
        self._identity = identity

    def remove(self) -> None:
        """Stops the notifications; a second call does nothing."""
        _observers.pop(self._identity, None)


def register_host_observer(observer: Callable[[torch.UntypedStorage], object]) -> ObserverHandle:
    """Has ``observer`` told about every buffer that :func:`empty_host` hands out from now on."""
    identity = next(_observer_ids)
    _observers[identity] = observer
    return ObserverHandle(identity)


def empty_host(numel: int, dtype: torch.dtype, *, pinned: bool | None = None) -> torch.Tensor:
    """Allocates an uninitialised host buffer, page-locked where that helps and can be had.

    Args:
        numel: elements; a Python int, so it does not overflow.
        dtype: of the elements.
        pinned: page-lock the buffer; by default where a CUDA device is there to copy to.

    Returns:
        ``[numel]`` on the CPU; a fake tensor, with no memory behind it, under ``FakeTensorMode``.

    Raises:
        EnvironmentProblem: the machine does not have that much memory available.
    """
    needed = numel * dtype.itemsize
    simulated = isinstance(torch.empty(0, device="cpu"), FakeTensor)
    if not simulated:
        check_room(needed)
    locked = not simulated and needed > 0 and (torch.cuda.is_available() if pinned is None else pinned)
    try:
        buffer = _page_locked(needed).view(dtype) if locked else torch.empty(numel, dtype=dtype, device="cpu")
    except (RuntimeError, MemoryError) as error:
        raise _shortage(needed, available_host_bytes()) from error
    announce_host(buffer)
    return buffer


def announce_host(tensor: torch.Tensor) -> None:
    """Tells the observers that ``tensor``, allocated elsewhere, stays in host memory."""
    for observer in list(_observers.values()):
        observer(tensor.untyped_storage())


def available_host_bytes() -> int | None:
    """Returns how much memory can still be taken without swapping, or None where the system does not say.

    A container's own limit counts too: ``MemAvailable`` is the whole machine's, and passing the limit is a kill.
    """
    known = [value for value in (_machine_available(), _container_available()) if value is not None]
    return min(known) if known else None


def _machine_available() -> int | None:
    for line in _read_lines(_MEMINFO):
        if line.startswith("MemAvailable:"):
            return int(line.split()[1]) * 1024
    try:
        return os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    except (AttributeError, ValueError, OSError):  # Windows, macOS
        return None


def _container_available() -> int | None:
    """Reads cgroup v2; file pages that can be dropped do not count as used."""
    limit, used = _read_lines(f"{_CGROUP}/memory.max"), _read_lines(f"{_CGROUP}/memory.current")
    if not limit or not used or not limit[0].isdigit():  # no limit reads "max"
        return None
    droppable = 0
    for line in _read_lines(f"{_CGROUP}/memory.stat"):
        if line.startswith("inactive_file "):
            droppable = int(line.split()[1])
    return max(0, int(limit[0]) - int(used[0]) + droppable)


def _read_lines(path: str) -> list[str]:
    try:
        with open(path, encoding="ascii", errors="replace") as file:
            return file.read().splitlines()
    except OSError:
        return []


def check_room(needed: int, processes: int = 1) -> None:
    """Compares what is about to be taken with what is there.

    Args:
        needed: bytes, of each process.
        processes: how many of this machine take as much at the same time.

    Raises:
        EnvironmentProblem: the machine does not have that much memory available.
    """
    available = available_host_bytes()
    if available is not None and needed * processes > available:
        raise _shortage(needed, available, processes)


def _shortage(needed: int, available: int | None, processes: int = 1) -> EnvironmentProblem:
    found = "an unknown amount" if available is None else f"{available / GIB:.2f} GiB"
    each = f" ({processes} processes with {needed / GIB:.2f} GiB each)" if processes > 1 else ""
    return EnvironmentProblem(
        f"host memory: {needed * processes / GIB:.2f} GiB of RAM are needed for gradients or optimizer states{each}, "
        f"{found} is available. Close other programs, or keep more on the GPU: MOSS_LOWMEM_STATES=device or "
        "MOSS_LOWMEM_GRADIENTS=device."
    )


def _page_locked(size: int) -> torch.Tensor:
    """Returns ``[size]`` uint8, page-locked for as long as its storage lives; says once when that cannot be had.

    The buffer begins with a page and no page of it holds anything else: what is done to its pages is done to it alone.
    """
    global _warned_unpinned
    whole = -(-size // mmap.PAGESIZE) * mmap.PAGESIZE
    memory = torch.empty(whole + mmap.PAGESIZE, dtype=torch.uint8, device="cpu")
    address = -(-memory.data_ptr() // mmap.PAGESIZE) * mmap.PAGESIZE
    if lock_pages(address, whole):
        _inherit(address, whole, False)
        _locked[address] = memory.untyped_storage()
        weakref.finalize(_locked[address], _release, address, whole).atexit = False
    elif not _warned_unpinned:
        _warned_unpinned = True
        warnings.warn(
            "host memory: the driver would not page-lock the buffers (WSL2 and container limits cap it). Training "
            "goes on with pageable memory: the same numbers, slower copies.",
            RuntimeWarning,
            stacklevel=3,
        )
    start = address - memory.data_ptr()
    return memory[start : start + size]


def _release(address: int, size: int) -> None:
    _inherit(address, size, True)
    unlock_pages(address)


def _inherit(address: int, size: int, inherited: bool) -> None:
    """Says whether forked processes, such as data loading workers, have these pages too.

    They do not need them, and page-locked memory cannot be shared: Linux copies it for each (512 MiB took 1.9 s and
    512 MiB of RAM; gradients and states of 1.7B are 18 GiB), and before 5.9 it may be this process that gets the copy,
    while the GPU goes on with pages that are no longer its own.

    Source: Linux, madvise(2), ``MADV_DONTFORK``; commit 70e806e4e645, "mm: do early cow for pinned pages during fork()
    for ptes".
    """
    if not hasattr(mmap, "MADV_DONTFORK"):  # not Linux: nothing is forked there
        return
    advice = mmap.MADV_DOFORK if inherited else mmap.MADV_DONTFORK
    ctypes.CDLL(None).madvise(ctypes.c_void_p(address), ctypes.c_size_t(size), advice)


def _keep_after_fork() -> None:
    """Has a forked process free no buffer: without its pages, malloc would hand out what is not there."""
    _kept_after_fork.extend(_locked.values())


if hasattr(os, "register_at_fork"):  # not Windows
    os.register_at_fork(after_in_child=_keep_after_fork)


def lock_pages(address: int, size: int) -> bool:
    """Registers ``size`` bytes at ``address`` with the CUDA driver; False where it refuses."""
    try:
        cudart = torch.cuda.cudart()
        if cudart.cudaHostRegister(address, size, 0) == cudart.cudaError.success:
            return True
    except (RuntimeError, AssertionError, AttributeError):  # torch without CUDA, no driver
        return False
    # The refused call leaves its error pending, and the next kernel launch would report it as its own.
    with contextlib.suppress(RuntimeError):
        torch.zeros((), device="cuda")
    return False


def unlock_pages(address: int) -> None:
    """Undoes :func:`lock_pages`."""
    torch.cuda.cudart().cudaHostUnregister(address)
