"""Memory readings from made-up and real sources; none of them needs a GPU or a container."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from pathlib import Path

import pytest
from launcher import environment_of, make_program

from moss_tts_patches.memory import readings
from moss_tts_patches.memory.readings import (
    CgroupReading,
    DeviceReading,
    GpuProcess,
    HostReading,
    is_wsl,
    read_cgroup,
    read_device,
    read_gpus,
    read_host,
)
from moss_tts_patches.units import GIB, MIB

KERNEL_OF_WSL = "Linux version 5.15.90.1-microsoft-standard-WSL2 (oe-user@oe-host) (gcc 9.3.0)"


def make_proc(folder: Path, groups: str, version: str = "Linux version 6.1") -> Path:
    (folder / "self").mkdir(parents=True)
    (folder / "self" / "cgroup").write_text(groups)
    (folder / "self" / "status").write_text("Name:\tpython\nVmRSS:\t   2048 kB\n")
    (folder / "meminfo").write_text(
        f"MemTotal: {64 * 2**20} kB\nMemFree: 1 kB\nMemAvailable: {40 * 2**20} kB\n"
        f"SwapTotal: {8 * 2**20} kB\nSwapFree: {2 * 2**20} kB\nHugePages_Total: 0\n"
    )
    (folder / "vmstat").write_text("nr_free_pages 5\noom_kill 3\n")
    (folder / "version").write_text(version)
    return folder


def make_group(folder: Path, limit: int | str, used: int, droppable: int = 0, kills: int = 0) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "memory.max").write_text(f"{limit}\n")
    (folder / "memory.current").write_text(f"{used}\n")
    (folder / "memory.stat").write_text(f"anon 1\ninactive_file {droppable}\n")
    (folder / "memory.events").write_text(f"low 0\noom 9\noom_kill {kills}\n")


def make_old_group(folder: Path, limit: int, used: int, droppable: int = 0, kills: int = 0) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "memory.limit_in_bytes").write_text(f"{limit}\n")
    (folder / "memory.usage_in_bytes").write_text(f"{used}\n")
    (folder / "memory.stat").write_text(f"inactive_file 77\ntotal_inactive_file {droppable}\n")
    (folder / "memory.oom_control").write_text(f"oom_kill_disable 0\nunder_oom 0\noom_kill {kills}\n")


@pytest.fixture
def cgroup(tmp_path: Path) -> Path:
    root = tmp_path / "cgroup"
    root.mkdir()
    (root / "cgroup.controllers").write_text("cpu memory\n")
    return root


# -- the host ---------------------------------------------------------------------------------------------------------


def test_the_host_of_made_up_files(tmp_path: Path, cgroup: Path) -> None:
    host = read_host(make_proc(tmp_path / "proc", "0::/\n"), cgroup)
    assert host == HostReading(2 * MIB, 64 * GIB, 40 * GIB, 8 * GIB, 2 * GIB, None, 3)
    assert (host.limit_bytes, host.free_bytes) == (64 * GIB, 40 * GIB)


def test_this_host() -> None:
    size = 64 * MIB
    before = read_host()
    held = bytearray(os.urandom(1)) * size  # written, so resident
    after = read_host()
    assert 0 < before.process_bytes < before.total_bytes
    assert after.process_bytes - before.process_bytes == pytest.approx(len(held), rel=0.1)
    assert 0 < before.free_bytes <= before.available_bytes <= before.total_bytes


def test_another_process_is_read_too() -> None:
    with subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE) as process:
        time.sleep(0.2)
        assert 0 < read_host(pid=process.pid).process_bytes < read_host().total_bytes
        process.communicate(b"\n")
    assert read_host(pid=process.pid).process_bytes == 0


def test_a_system_that_says_nothing(tmp_path: Path) -> None:
    assert read_host(tmp_path / "none", tmp_path / "none") == HostReading(0, 0, 0, 0, 0, None, None)


# -- control groups ---------------------------------------------------------------------------------------------------


def test_without_a_limit_there_is_no_reading(tmp_path: Path, cgroup: Path) -> None:
    make_group(cgroup / "user", "max", 5 * GIB)
    make_old_group(cgroup / "memory", 9223372036854771712, GIB)
    assert read_cgroup(make_proc(tmp_path / "proc", "4:memory:/\n0::/user\n"), cgroup) is None


def test_a_limit_leaves_out_what_can_be_dropped(tmp_path: Path, cgroup: Path) -> None:
    make_group(cgroup / "user", 16 * GIB, 10 * GIB, droppable=4 * GIB, kills=2)
    proc = make_proc(tmp_path / "proc", "0::/user\n")
    assert read_cgroup(proc, cgroup) == CgroupReading(str(cgroup / "user"), 16 * GIB, 6 * GIB, 2)
    host = read_host(proc, cgroup)
    assert (host.limit_bytes, host.free_bytes) == (16 * GIB, 10 * GIB)


@pytest.mark.parametrize("smallest", ["a", "a/b", "a/b/c"])
def test_the_smallest_limit_up_the_tree_counts(tmp_path: Path, cgroup: Path, smallest: str) -> None:
    for number, name in enumerate(("a", "a/b", "a/b/c")):
        make_group(cgroup / name, (8 if name == smallest else 32 + number) * GIB, GIB)
    found = read_cgroup(make_proc(tmp_path / "proc", "0::/a/b/c\n"), cgroup)
    assert found is not None and (found.folder, found.limit_bytes) == (str(cgroup / smallest), 8 * GIB)


def test_a_larger_limit_that_siblings_fill_binds_first(tmp_path: Path, cgroup: Path) -> None:
    make_group(cgroup / "job", 32 * GIB, 31 * GIB)
    make_group(cgroup / "job" / "ours", 16 * GIB, 2 * GIB)
    found = read_cgroup(make_proc(tmp_path / "proc", "0::/job/ours\n"), cgroup)
    assert found is not None and (found.limit_bytes, found.free_bytes) == (32 * GIB, GIB)


def test_groups_beside_ours_do_not_count(tmp_path: Path, cgroup: Path) -> None:
    make_group(cgroup / "ours", 16 * GIB, GIB)
    make_group(cgroup / "other", GIB, GIB)
    make_group(tmp_path, GIB, GIB)  # above the root of all groups
    found = read_cgroup(make_proc(tmp_path / "proc", "0::/ours\n"), cgroup)
    assert found is not None and found.limit_bytes == 16 * GIB


def test_in_a_container_the_hosts_path_may_not_exist(tmp_path: Path, cgroup: Path) -> None:
    make_group(cgroup, 4 * GIB, GIB)
    found = read_cgroup(make_proc(tmp_path / "proc", "0::/docker/0123abc\n"), cgroup)
    assert found is not None and found.limit_bytes == 4 * GIB


@pytest.mark.parametrize("controllers", ["memory", "cpu,memory"])
def test_version_1(tmp_path: Path, controllers: str) -> None:
    root = tmp_path / "cgroup"
    make_old_group(root / "memory", 24 * GIB, 20 * GIB, droppable=3 * GIB, kills=1)
    make_old_group(root / "memory" / "job" / "step", 9223372036854771712, GIB)
    groups = f"9:cpu:/elsewhere\n5:{controllers}:/job/step\n0::/\n"
    found = read_cgroup(make_proc(tmp_path / "proc", groups), root)
    assert found == CgroupReading(str(root / "memory"), 24 * GIB, 17 * GIB, 1)


# -- WSL --------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("version", "expected"), [(KERNEL_OF_WSL, True), ("Linux version 6.1-Microsoft", True)])
def test_wsl_is_told_by_its_kernel(tmp_path: Path, version: str, expected: bool) -> None:
    assert is_wsl(make_proc(tmp_path, "", version)) is expected


def test_other_kernels_are_not_wsl(tmp_path: Path) -> None:
    assert not is_wsl(make_proc(tmp_path / "proc", "", "Linux version 6.1.0-18-amd64 (debian-kernel@lists.debian.org)"))
    assert not is_wsl(tmp_path / "none")


# -- GPUs -------------------------------------------------------------------------------------------------------------

ANSWERS = {
    "--query-gpu": "GPU-a, NVIDIA GeForce RTX 3060, 550.54.14, 12288, 9000\n"
    "GPU-b, NVIDIA H200, 550.54.14, 143771, 100\n",
    "--query-compute-apps": "GPU-b, 4242, /usr/bin/python3, 143000\nGPU-a, 17, [Not Found], [N/A]\n",
}


def test_gpus_and_who_holds_them() -> None:
    first, second = read_gpus(lambda query: ANSWERS[query.partition("=")[0]])
    assert (first.name, first.driver, first.total_bytes, first.free_bytes) == (
        "NVIDIA GeForce RTX 3060",
        "550.54.14",
        12 * GIB,
        9000 * MIB,
    )
    assert first.processes == (GpuProcess(17, "[Not Found]", None),)
    assert second.processes == (GpuProcess(4242, "/usr/bin/python3", 143000 * MIB),)


@pytest.mark.parametrize(
    ("program", "count"),
    [
        ("echo 'GPU-a, NVIDIA Test, 1.2, 8192, 4096'", 2),
        ("echo 'Failed to initialize NVML: Driver/library version mismatch'", 0),
        ("exit 9", 0),
        (None, 0),
    ],
)
def test_the_drivers_own_program_is_asked(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, program: str | None, count: int
) -> None:
    if program is not None:
        # It answers every query alike: five columns are a GPU, and no process.
        make_program(tmp_path / "nvidia-smi", f"#!/bin/sh\n{program}\n{program}\n")
    monkeypatch.setenv("PATH", f"{tmp_path}:/bin" if program else str(tmp_path))
    assert len(read_gpus()) == count


def test_a_driver_that_does_not_answer_is_given_up(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    make_program(tmp_path / "nvidia-smi", "#!/bin/sh\nexec sleep 30\n")
    monkeypatch.setenv("PATH", f"{tmp_path}:/bin:/usr/bin")
    monkeypatch.setattr(readings, "_NVIDIA_SMI_SECONDS", 0.2)
    started = time.monotonic()
    assert read_gpus() == ()
    assert time.monotonic() - started < 10


def test_a_reading_starts_neither_torch_nor_cuda() -> None:
    code = (
        "import sys; from moss_tts_patches.memory.readings import read_device; first = read_device(0)\n"
        "seen = 'torch' in sys.modules\nimport torch\n"
        "print(first, seen, read_device(0), torch.cuda.is_initialized())"
    )
    done = subprocess.run([sys.executable, "-c", code], env=environment_of(), capture_output=True, text=True)
    assert done.stdout == "None False None False\n", done.stderr


def test_a_device_as_torch_tells_it(monkeypatch: pytest.MonkeyPatch) -> None:
    import torch

    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda index: (GIB, (8 + index) * GIB))
    monkeypatch.setattr(torch.cuda, "memory_allocated", lambda index: (5 + index) * GIB)
    monkeypatch.setattr(torch.cuda, "memory_reserved", lambda index: (6 + index) * GIB)
    assert read_device(0) == DeviceReading(8 * GIB, GIB, 5 * GIB, 6 * GIB)
    assert read_device(3) == DeviceReading(11 * GIB, GIB, 8 * GIB, 9 * GIB)
    assert read_device(None) is None


@pytest.mark.parametrize(("reserved", "expected"), [(8 * GIB, False), (8 * GIB + 1, True)])
def test_more_than_the_card_has_is_spilled(reserved: int, expected: bool) -> None:
    assert DeviceReading(8 * GIB, 0, 7 * GIB, reserved).is_spilled is expected
