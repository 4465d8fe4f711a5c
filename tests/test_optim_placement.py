"""Host memory: room is checked, observers are told, page-locking may be refused."""

from __future__ import annotations

import gc
import mmap
import os
import warnings
from pathlib import Path

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode

from moss_tts_patches.errors import EnvironmentProblem
from moss_tts_patches.memory import placement
from moss_tts_patches.memory.placement import available_host_bytes, check_room, empty_host, register_host_observer


def test_observers_are_told_until_they_are_removed():
    seen = []
    handle = register_host_observer(seen.append)
    buffer = empty_host(1000, torch.float32)
    assert buffer.shape == (1000,) and buffer.dtype == torch.float32 and buffer.device.type == "cpu"
    assert [storage.data_ptr() for storage in seen] == [buffer.untyped_storage().data_ptr()]
    assert seen[0].nbytes() == 4000
    handle.remove()
    handle.remove()
    empty_host(10, torch.uint8)
    assert len(seen) == 1


@pytest.mark.parametrize("available", [0, 2**30, 3 * 2**30 - 1])
def test_too_little_memory_is_an_error_with_both_figures(available, monkeypatch):
    monkeypatch.setattr(placement, "available_host_bytes", lambda: available)
    with pytest.raises(EnvironmentProblem) as caught:
        empty_host(3 * 2**28, torch.float32)
    message = str(caught.value)
    assert "3.00 GiB of RAM are needed" in message and f"{available / 2**30:.2f} GiB is available" in message
    assert "MOSS_LOWMEM_STATES=device" in message and "MOSS_LOWMEM_GRADIENTS=device" in message


def test_the_processes_of_a_machine_share_its_memory(monkeypatch):
    monkeypatch.setattr(placement, "available_host_bytes", lambda: 12 * 2**30)
    check_room(3 * 2**30, processes=4)
    with pytest.raises(
        EnvironmentProblem, match=r"15.00 GiB .* \(5 processes with 3.00 GiB each\), 12.00 GiB is available"
    ):
        check_room(3 * 2**30, processes=5)


def test_an_allocation_that_fails_is_the_same_error(monkeypatch):
    monkeypatch.setattr(placement, "available_host_bytes", lambda: None)
    with pytest.raises(EnvironmentProblem, match="an unknown amount is available"):
        empty_host(2**60, torch.float32)


def test_fake_memory_needs_no_room(monkeypatch):
    monkeypatch.setattr(placement, "available_host_bytes", lambda: 0)
    seen = []
    handle = register_host_observer(lambda storage: seen.append(storage.nbytes()))
    with FakeTensorMode():
        buffer = empty_host(2**40, torch.uint8, pinned=True)
        assert isinstance(buffer, FakeTensor)
    handle.remove()
    assert seen == [2**40]


def test_the_machine_and_the_container_are_both_asked(tmp_path, monkeypatch):
    meminfo = tmp_path / "meminfo"
    meminfo.write_text("MemTotal: 9000 kB\nMemAvailable:    5000 kB\n")
    monkeypatch.setattr(placement, "_MEMINFO", str(meminfo))
    monkeypatch.setattr(placement, "_CGROUP", str(tmp_path))
    assert available_host_bytes() == 5000 * 1024
    (tmp_path / "memory.current").write_text("1000000\n")
    (tmp_path / "memory.max").write_text("max\n")
    assert available_host_bytes() == 5000 * 1024
    (tmp_path / "memory.max").write_text("3000000\n")
    assert available_host_bytes() == 2_000_000
    (tmp_path / "memory.stat").write_text("anon 5\ninactive_file 400000\n")
    assert available_host_bytes() == 2_400_000


def test_without_meminfo_the_system_is_asked_otherwise(tmp_path, monkeypatch):
    monkeypatch.setattr(placement, "_MEMINFO", str(tmp_path / "absent"))
    monkeypatch.setattr(placement, "_CGROUP", str(tmp_path))
    assert available_host_bytes() > 2**20

    def unknown(name):
        raise ValueError(name)

    monkeypatch.setattr(placement.os, "sysconf", unknown)
    assert available_host_bytes() is None
    assert empty_host(8, torch.uint8).numel() == 8


def test_memory_that_cannot_be_page_locked_is_one_warning(monkeypatch):
    monkeypatch.setattr(placement, "lock_pages", lambda address, size: False)
    monkeypatch.setattr(placement, "_warned_unpinned", False)
    with pytest.warns(RuntimeWarning, match="pageable memory: the same numbers"):
        empty_host(100, torch.uint8, pinned=True)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert empty_host(100, torch.uint8, pinned=True).fill_(3).sum() == 300


def test_page_locked_memory_is_released_with_its_storage_and_not_before(monkeypatch):
    locked, released = [], []
    monkeypatch.setattr(placement, "lock_pages", lambda address, size: locked.append((address, size)) or True)
    monkeypatch.setattr(placement, "unlock_pages", released.append)
    buffer = empty_host(100, torch.float32, pinned=True)
    assert locked == [(buffer.data_ptr(), mmap.PAGESIZE)]
    view = buffer[10:20]
    del buffer
    gc.collect()
    assert not released
    del view
    gc.collect()
    assert released == [locked[0][0]]


def test_nothing_is_page_locked_without_a_device(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(placement, "lock_pages", lambda address, size: pytest.fail("registered"))
    empty_host(100, torch.uint8)


@pytest.mark.skipif(not Path("/proc/self/maps").exists(), reason="only Linux says which pages a process has")
@pytest.mark.parametrize("numel", [10, 2**20 + 7])
@pytest.mark.parametrize("accepted", [True, False])
def test_forked_processes_do_not_have_page_locked_memory(monkeypatch, numel, accepted):
    """Linux would copy every page of it for each data loading worker."""
    monkeypatch.setattr(placement, "lock_pages", lambda address, size: accepted)
    monkeypatch.setattr(placement, "unlock_pages", lambda address: None)
    monkeypatch.setattr(placement, "_warned_unpinned", True)
    buffer = empty_host(numel, torch.float32, pinned=True)
    assert buffer.fill_(1).sum() == numel and buffer.shape == (numel,)
    first, last = buffer.data_ptr(), buffer.data_ptr() + 4 * numel - 1
    assert has_pages(first) and has_pages(last)
    child = os.fork()
    if not child:
        os._exit(10 * has_pages(first) + has_pages(last))
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == (0 if accepted else 11)


@pytest.mark.skipif(not hasattr(os, "fork"), reason="nothing is forked there")
def test_a_forked_process_cannot_free_memory_that_it_does_not_have(monkeypatch):
    """It was a segmentation fault: malloc took the place for the next buffer of about that size."""
    monkeypatch.setattr(placement, "lock_pages", lambda address, size: True)
    monkeypatch.setattr(placement, "unlock_pages", lambda address: None)
    torch.empty(30 * 2**20, dtype=torch.uint8)  # once it is freed, glibc takes blocks of this size from its heap
    buffers = [empty_host(2**20, torch.uint8, pinned=True) for _ in range(3)]
    child = os.fork()
    buffers.clear()
    if not child:
        os._exit(sum(int(torch.ones(2**19, dtype=torch.uint8).sum()) != 2**19 for _ in range(8)))
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    assert not placement._locked and not placement._kept_after_fork  # the one that has them gives them back


def has_pages(address: int) -> bool:
    ranges = (line.split()[0].split("-") for line in Path("/proc/self/maps").read_text().splitlines())
    return any(int(start, 16) <= address < int(end, 16) for start, end in ranges)
