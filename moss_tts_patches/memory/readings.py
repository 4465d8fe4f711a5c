"""What the machine's memory looks like right now: RAM, swap, the container's limit, GPUs and who holds them.

Everything is read from small text files or from one short child process, and every source can be given, so that nothing
here needs torch, a GPU or a container to be tested.
"""

from __future__ import annotations

import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

from ..units import MIB

PROC = Path("/proc")
CGROUP = Path("/sys/fs/cgroup")

# cgroup v1 writes "no limit" as the largest number of pages that fit 63 bits; no machine has an exbibyte of RAM.
_NO_LIMIT_BYTES = 2**60

# It answers in 0.1 s where the driver is up and in some seconds where it has to be loaded first.
_NVIDIA_SMI_SECONDS = 20


@dataclass(frozen=True)
class CgroupReading:
    """The memory limit that binds first, of this process's control group and of all groups above it.

    Attributes:
        folder: of the group that sets the limit.
        limit_bytes: passing it is a kill.
        used_bytes: without file pages that the kernel can drop.
        oom_kills: processes that the kernel has killed in that group so far; None where it does not say.
    """

    folder: str
    limit_bytes: int
    used_bytes: int
    oom_kills: int | None = None

    @property
    def free_bytes(self) -> int:
        return max(0, self.limit_bytes - self.used_bytes)


@dataclass(frozen=True)
class HostReading:
    """Host memory; 0 where the system does not say (Windows, macOS)."""

    process_bytes: int
    total_bytes: int
    available_bytes: int
    swap_total_bytes: int
    swap_free_bytes: int
    cgroup: CgroupReading | None = None
    oom_kills: int | None = None

    @property
    def limit_bytes(self) -> int:
        """What this process may use at most: the RAM, or the container's limit where that is less."""
        return self.total_bytes if self.cgroup is None else min(self.total_bytes, self.cgroup.limit_bytes)

    @property
    def free_bytes(self) -> int:
        """What can still be taken without swapping and without passing the container's limit."""
        if self.cgroup is None:
            return self.available_bytes
        return min(self.available_bytes, self.cgroup.free_bytes)


@dataclass(frozen=True)
class GpuProcess:
    """A process that holds GPU memory; ``used_bytes`` is None where the driver does not tell (WSL2, Windows)."""

    pid: int
    name: str
    used_bytes: int | None


@dataclass(frozen=True)
class GpuReading:
    """One GPU, as ``nvidia-smi`` sees it."""

    uuid: str
    name: str
    driver: str
    total_bytes: int
    free_bytes: int
    processes: tuple[GpuProcess, ...] = ()


@dataclass(frozen=True)
class DeviceReading:
    """GPU memory as the training process sees it: the card's, and what its own allocator holds."""

    total_bytes: int
    free_bytes: int
    allocated_bytes: int
    reserved_bytes: int

    @property
    def is_spilled(self) -> bool:
        """The allocator holds more than the card has: the driver pages into system RAM, silently and slowly."""
        return self.reserved_bytes > self.total_bytes


def read_host(proc: Path = PROC, cgroup: Path = CGROUP, pid: int | str = "self") -> HostReading:
    """Reads the host's memory in about a millisecond.

    Args:
        proc: the proc file system.
        cgroup: where control groups are mounted.
        pid: whose resident set and control group are meant.
    """
    machine = _read_table(proc / "meminfo")
    process = _read_table(proc / str(pid) / "status")
    return HostReading(
        process_bytes=process.get("VmRSS", 0) * 1024,
        total_bytes=machine.get("MemTotal", 0) * 1024,
        available_bytes=machine.get("MemAvailable", 0) * 1024,
        swap_total_bytes=machine.get("SwapTotal", 0) * 1024,
        swap_free_bytes=machine.get("SwapFree", 0) * 1024,
        cgroup=read_cgroup(proc, cgroup, pid),
        oom_kills=_first_number(proc / "vmstat", "oom_kill"),
    )


def read_cgroup(proc: Path = PROC, cgroup: Path = CGROUP, pid: int | str = "self") -> CgroupReading | None:
    """Finds the limit that binds first; None where no group has one.

    Source: Linux ``Documentation/admin-guide/cgroup-v2.rst`` (``memory.max``, ``memory.current``, ``memory.stat``,
    ``memory.events``) and ``cgroup-v1/memory.rst``. A limit of any group above counts as much as one's own.
    """
    readings = [reading for folder in _memory_groups(proc, cgroup, pid) if (reading := _read_group(folder)) is not None]
    # Of two limits the one with less room binds first; that is the smaller one unless a sibling fills the larger one.
    return min(readings, key=lambda reading: (reading.free_bytes, reading.limit_bytes), default=None)


def is_wsl(proc: Path = PROC) -> bool:
    """Whether this is Linux under Windows (WSL), where the driver is Windows's own."""
    return "microsoft" in _read_text(proc / "version").lower()


def read_gpus(ask: Callable[[str], str | None] | None = None) -> tuple[GpuReading, ...]:
    """Asks the driver's own program for every GPU, the driver's version and who holds memory.

    Args:
        ask: given an ``nvidia-smi`` query, returns its CSV answer, or None where there is none.
    """
    ask = ask or _ask_nvidia_smi
    gpus = ask("--query-gpu=uuid,name,driver_version,memory.total,memory.free")
    if gpus is None:
        return ()
    holders = _gpu_processes(ask("--query-compute-apps=gpu_uuid,pid,process_name,used_memory") or "")
    found = []
    for fields in _csv_rows(gpus, 5):
        total, free = _mib(fields[3]), _mib(fields[4])
        if total is not None:
            processes = tuple(process for uuid, process in holders if uuid == fields[0])
            found.append(GpuReading(fields[0], fields[1], fields[2], total, free or 0, processes))
    return tuple(found)


def read_device(index: int | None) -> DeviceReading | None:
    """Reads this process's GPU through torch, in microseconds; None where torch has not set one up.

    It never starts CUDA by itself: that would cost 0.3 GiB and, in a forked worker, the worker.

    Args:
        index: of the GPU; None where it is not known. Never torch's current one: every thread begins with the first
            GPU, and asking for its memory takes those 0.3 GiB there, for each process that trains on another.
    """
    torch = sys.modules.get("torch")
    if index is None or torch is None or not torch.cuda.is_initialized():
        return None
    free, total = torch.cuda.mem_get_info(index)
    return DeviceReading(total, free, torch.cuda.memory_allocated(index), torch.cuda.memory_reserved(index))


def _memory_groups(proc: Path, cgroup: Path, pid: int | str) -> Iterator[Path]:
    """Yields the process's memory group and every group above it, of version 2 and of version 1."""
    for line in _read_text(proc / str(pid) / "cgroup").splitlines():
        _, _, rest = line.partition(":")
        controllers, _, path = rest.partition(":")
        if controllers == "":
            roots = [root for root in (cgroup, cgroup / "unified") if (root / "cgroup.controllers").exists()]
        elif "memory" in controllers.split(","):
            roots = [cgroup / "memory"]
        else:
            continue
        for root in roots:
            # In a container the path may be the host's, of which only the container's own root is mounted.
            group = root / path.strip("/")
            yield from (folder for folder in (group, *group.parents) if folder == root or root in folder.parents)


def _read_group(folder: Path) -> CgroupReading | None:
    for limit_name, used_name, droppable_name, kills_name in (
        ("memory.max", "memory.current", "inactive_file", "memory.events"),
        ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file", "memory.oom_control"),
    ):
        limit, used = _read_text(folder / limit_name).strip(), _read_text(folder / used_name).strip()
        if not limit.isdigit() or not used.isdigit() or int(limit) >= _NO_LIMIT_BYTES:  # "max" is no limit
            continue
        droppable = _first_number(folder / "memory.stat", droppable_name) or 0
        kills = _first_number(folder / kills_name, "oom_kill")
        return CgroupReading(str(folder), int(limit), max(0, int(used) - droppable), kills)
    return None


def _first_number(path: Path, name: str) -> int | None:
    for line in _read_text(path).splitlines():
        fields = line.split()
        if len(fields) == 2 and fields[0] == name and fields[1].isdigit():
            return int(fields[1])
    return None


def _read_table(path: Path) -> dict[str, int]:
    """Reads ``Name:   123 kB`` lines."""
    table = {}
    for line in _read_text(path).splitlines():
        name, _, rest = line.partition(":")
        fields = rest.split()
        if fields and fields[0].isdigit():
            table[name] = int(fields[0])
    return table


def _read_text(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8", errors="replace")
    except OSError:
        return ""


def _gpu_processes(answer: str) -> list[tuple[str, GpuProcess]]:
    return [
        (uuid, GpuProcess(int(pid), name, _mib(used)))
        for uuid, pid, name, used in _csv_rows(answer, 4)
        if pid.isdigit()
    ]


def _csv_rows(answer: str, columns: int) -> Iterator[list[str]]:
    for line in answer.splitlines():
        fields = [field.strip() for field in line.split(",")]
        if len(fields) == columns:
            yield fields


def _mib(field: str) -> int | None:
    return int(field) * MIB if field.isdigit() else None  # "[N/A]" on WSL2 and on some cards


def _ask_nvidia_smi(query: str) -> str | None:
    program = shutil.which("nvidia-smi")
    if program is None:
        return None
    try:
        done = subprocess.run(
            [program, query, "--format=csv,noheader,nounits"],
            capture_output=True,
            text=True,
            timeout=_NVIDIA_SMI_SECONDS,
        )
    except (OSError, subprocess.TimeoutExpired):
        return None
    return done.stdout if done.returncode == 0 else None
