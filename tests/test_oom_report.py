"""Out-of-memory reports: read from real messages, made by a process that really runs out."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from moss_tts_patches.memory.candidates import Candidate, gpu_candidates, host_candidates
from moss_tts_patches.memory.card import StorePlacement, StoreSizes
from moss_tts_patches.memory.oom_message import Failure, read_failure
from moss_tts_patches.memory.oom_report import (
    FILE_NAME,
    OutOfMemoryReport,
    Situation,
    write_report,
)
from moss_tts_patches.memory.readings import DeviceReading, HostReading
from moss_tts_patches.messages import Messages
from moss_tts_patches.units import GIB, MIB

# As torch 2.6 to 2.13 write them.
GPU_MESSAGE = (
    "CUDA out of memory. Tried to allocate 594.00 MiB. GPU 0 has a total capacity of 15.50 GiB of which 250.00 MiB is "
    "free. Including non-PyTorch memory, this process has 15.25 GiB memory in use. Of the allocated memory 14.50 GiB "
    "is allocated by PyTorch, and 310.50 MiB is reserved by PyTorch but unallocated. If reserved but unallocated "
    "memory is large try setting PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True to avoid fragmentation."
)
HOST_MESSAGE = (
    "[enforce fail at alloc_cpu.cpp:133] err == 0. DefaultCPUAllocator: can't allocate memory: you tried to allocate "
    "5368709120 bytes. Error code 12 (Cannot allocate memory)"
)
WINDOWS_MESSAGE = (
    "[enforce fail at alloc_cpu.cpp:121] data. DefaultCPUAllocator: not enough memory: you tried to allocate 7 bytes."
)

SIZES = StoreSizes(weights=6 * GIB, gradients=5 * GIB, states=5 * GIB + MIB)
ON_GPU = StorePlacement("device", "device")


# -- messages ---------------------------------------------------------------------------------------------------------


def test_a_gpus_message_is_read() -> None:
    assert read_failure(torch.OutOfMemoryError(GPU_MESSAGE)) == Failure(
        place="gpu",
        wanted_bytes=594 * MIB,
        total_bytes=round(15.5 * GIB),
        free_bytes=250 * MIB,
        process_bytes=round(15.25 * GIB),
        allocated_bytes=round(14.5 * GIB),
        reserved_unused_bytes=round(310.5 * MIB),
    )


@pytest.mark.parametrize(
    ("error", "expected"),
    [
        (RuntimeError(HOST_MESSAGE), Failure("host", 5 * GIB)),
        (RuntimeError(WINDOWS_MESSAGE), Failure("host", 7)),
        (MemoryError(), Failure("host")),
        (RuntimeError("CUDA error: out of memory\nCUDA kernel errors might be …"), Failure("gpu")),
        (RuntimeError("CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling cublasCreate"), Failure("gpu")),
        (torch.OutOfMemoryError("HIP out of memory. Tried to allocate 512 bytes."), Failure("gpu", 512)),
        (RuntimeError("The size of tensor a (3) must match the size of tensor b (4)"), None),
        (ValueError("memory"), None),
        (KeyboardInterrupt(), None),
    ],
)
def test_other_messages(error: BaseException, expected: Failure | None) -> None:
    assert read_failure(error) == expected


def test_the_hosts_message_is_still_torchs() -> None:
    with pytest.raises(RuntimeError) as caught:
        torch.empty(2**62, dtype=torch.uint8)
    assert read_failure(caught.value) == Failure("host", 2**62)


# -- what to change ---------------------------------------------------------------------------------------------------


def test_candidates_on_the_gpu_are_what_stands_on_it() -> None:
    found = gpu_candidates(SIZES, ON_GPU, parkable_bytes=3 * GIB, chunk_bytes=400 * MIB, chunk_frames=32)
    assert found == [
        Candidate("MOSS_LOWMEM_STATES", "host", 5 * GIB + MIB),
        Candidate("MOSS_LOWMEM_GRADIENTS", "host", 5 * GIB),
        Candidate("MOSS_LOWMEM_WEIGHTS", "host", 3 * GIB),
        Candidate("MOSS_LOWMEM_CHUNK_FRAMES", "16", 200 * MIB),
    ]


def test_what_is_on_the_host_already_saves_nothing() -> None:
    assert gpu_candidates(SIZES, StorePlacement("host", "host", "host"), parkable_bytes=3 * GIB) == []
    assert gpu_candidates(SIZES, ON_GPU, chunk_bytes=MIB, chunk_frames=1)[-1].variable == "MOSS_LOWMEM_GRADIENTS"


def test_candidates_on_the_host() -> None:
    placement = StorePlacement("host", "host", "host")
    assert host_candidates(SIZES, placement, gradient_bytes=10 * GIB, parked_bytes=3 * GIB) == [
        Candidate("MOSS_LOWMEM_GRADIENTS", "device", 10 * GIB),
        Candidate("MOSS_LOWMEM_STATES", "device", 5 * GIB + MIB),
        Candidate("MOSS_LOWMEM_HOST_GRADIENT_DTYPE", "bfloat16", 5 * GIB),
        Candidate("MOSS_LOWMEM_WEIGHTS", "device", 3 * GIB),
    ]
    halved = host_candidates(SIZES, placement, gradient_bytes=5 * GIB)
    assert "MOSS_LOWMEM_HOST_GRADIENT_DTYPE" not in [candidate.variable for candidate in halved]
    assert host_candidates(SIZES, ON_GPU, gradient_bytes=0) == []


# -- the report -------------------------------------------------------------------------------------------------------


def full_situation() -> Situation:
    return Situation(
        plan={"weights": 5 * GIB, "activations": GIB},
        reality={"weights": 5 * GIB, "other": 3 * GIB},
        records=[(f"utt-{number}", 600 + number) for number in range(10)],
        gpu_candidates=gpu_candidates(SIZES, ON_GPU, parkable_bytes=3 * GIB),
        host_candidates=[Candidate("MOSS_LOWMEM_STATES", "device", GIB)],
        device=DeviceReading(round(15.5 * GIB), 250 * MIB, round(14.5 * GIB), round(14.8 * GIB)),
        host=HostReading(20 * GIB, 32 * GIB, GIB, 0, 0),
    )


def report(message: str = GPU_MESSAGE, situation: Situation | None = None) -> OutOfMemoryReport:
    failure = read_failure(torch.OutOfMemoryError(message) if "CUDA" in message else RuntimeError(message))
    assert failure is not None
    situation = full_situation() if situation is None else situation
    return OutOfMemoryReport("optimizer state creation", failure, situation, message)


def test_the_text_has_what_one_needs() -> None:
    text = report().text(Messages())
    assert "GPU memory ran out during the creation of optimizer states (first step): 0.58 GiB were wanted." in text
    assert "15.50 GiB, 0.24 GiB of it free; tensors take 14.50 GiB" in text
    assert "weights: planned 5.00 GiB, found 5.00 GiB" in text
    assert "activations: planned 1.00 GiB, found ?" in text and "other: planned ?, found 3.00 GiB" in text
    assert "utt-0 (600), " in text and "utt-7 (607), +2." in text and "utt-8" not in text
    assert "MOSS_LOWMEM_STATES=host would save 5.00 GiB" in text and "MOSS_LOWMEM_GRADIENTS=host" in text
    assert "MOSS_LOWMEM_WEIGHTS" not in text  # the third
    assert "spilled" not in text and "in pieces" not in text


def test_the_same_in_chinese() -> None:
    text = report().text(Messages("zh"))
    assert "显存不足，发生在创建优化器状态（第一步）：需要 0.58 GiB。" in text
    assert "MOSS_LOWMEM_STATES=host 可节省 5.00 GiB。" in text
    assert "ran out" not in text


def test_host_memory_has_its_own_words_and_candidates() -> None:
    text = report(HOST_MESSAGE).text(Messages())
    assert "Host memory ran out" in text and "5.00 GiB were wanted" in text
    assert "32.00 GiB, 1.00 GiB are available; it takes 20.00 GiB" in text
    assert "MOSS_LOWMEM_STATES=device would save 1.00 GiB" in text and "=host" not in text


def test_a_situation_that_is_not_known_leaves_the_rest() -> None:
    text = report(situation=Situation()).text(Messages())
    assert "0.58 GiB were wanted" in text and "moss-lowmem plan" in text
    assert "planned" not in text and "Records" not in text


@pytest.mark.parametrize(
    ("message", "device", "expected"),
    [
        (GPU_MESSAGE, None, False),
        (GPU_MESSAGE.replace("14.50 GiB", "19.00 GiB"), None, True),
        ("CUDA error: out of memory", DeviceReading(8 * GIB, 0, 8 * GIB, 9 * GIB), True),
        ("CUDA error: out of memory", DeviceReading(8 * GIB, 0, 7 * GIB, 8 * GIB), False),
    ],
)
def test_what_the_driver_spilled_is_said(message: str, device: DeviceReading | None, expected: bool) -> None:
    found = report(message, Situation(device=device))
    assert found.is_spilled is expected and found.to_dict()["spilled_to_host"] is expected
    assert ("spilled into system RAM" in found.text(Messages())) is expected


def test_fragmentation_is_said() -> None:
    text = report(GPU_MESSAGE.replace("310.50 MiB", "2.00 GiB")).text(Messages())
    assert "2.00 GiB are reserved in pieces" in text and "expandable_segments:True" in text


def test_the_file_says_the_same(tmp_path: Path) -> None:
    path = write_report(report(), tmp_path / "new" / "output")
    content = json.loads(path.read_text(encoding="utf-8"))
    assert path.name == FILE_NAME and [entry.name for entry in path.parent.iterdir()] == [FILE_NAME]
    assert (content["phase"], content["place"], content["wanted_bytes"]) == (
        "optimizer state creation",
        "gpu",
        594 * MIB,
    )
    assert content["records"][9] == {"id": "utt-9", "positions": 609}
    assert [candidate["value"] for candidate in content["candidates"]] == ["host", "host"]
    assert content["plan"]["activations"] == GIB and content["error"] == GPU_MESSAGE


def test_a_report_that_cannot_be_written_leaves_the_old_one_whole(tmp_path: Path) -> None:
    path = write_report(report(), tmp_path)
    before = path.read_bytes()
    script = (
        "import pathlib, resource, signal, sys\nfrom moss_tts_patches.memory.oom_report import write_whole\n"
        "signal.signal(signal.SIGXFSZ, signal.SIG_IGN)\nresource.setrlimit(resource.RLIMIT_FSIZE, (100, 100))\n"
        "write_whole(pathlib.Path(sys.argv[1]), 'x' * 5000)"
    )
    done = subprocess.run([sys.executable, "-c", script, str(path)], capture_output=True, text=True)
    assert "File too large" in done.stderr
    assert path.read_bytes() == before and len(list(tmp_path.iterdir())) == 1
