"""The doctor: every situation on made-up facts, and the real ones that can be made here."""

from __future__ import annotations

import dataclasses
import json
import sys
from pathlib import Path
from string import Formatter

import pytest
from launcher import make_package

from moss_tts_patches.doctor import Finding, run_checks
from moss_tts_patches.doctor.engine import zero_settings
from moss_tts_patches.doctor.facts import Facts, SaveTarget, TorchFacts
from moss_tts_patches.doctor.machine import has_kernels
from moss_tts_patches.launch.deepspeed import ask_deepspeed
from moss_tts_patches.memory.readings import CgroupReading, GpuProcess, GpuReading, HostReading
from moss_tts_patches.message_texts import TEXTS
from moss_tts_patches.message_texts.doctor import DOCTOR_TEXTS
from moss_tts_patches.message_texts.reports import REPORT_TEXTS
from moss_tts_patches.messages import Messages, language_of
from moss_tts_patches.units import GIB, MIB

# As deepspeed raises it where there is no CUDA toolkit.
MISSING_CUDA = (
    "class MissingCUDAException(Exception):\n    pass\n"
    "print('[WARNING] noise')\n"
    "raise MissingCUDAException('CUDA_HOME does not exist, unable to compile CUDA op(s)')\n"
)

TORCH = TorchFacts(
    "2.13.0+cu130",
    "13.0",
    True,
    "NVIDIA Test",
    (9, 0),
    ("sm_80", "sm_90", "compute_90"),
    24 * GIB,
    23 * GIB + 600 * MIB,
)
GPU = GpuReading("GPU-a", "NVIDIA Test", "580.1", 24 * GIB, 23 * GIB)
HELD = dataclasses.replace(GPU, processes=(GpuProcess(11, "small", MIB), GpuProcess(12, "vllm", 9 * GIB)))
HOST = HostReading(GIB, 64 * GIB, 50 * GIB, 8 * GIB, 8 * GIB)
FACTS = Facts((3, 11), TORCH, HOST, (GPU,), probe_pinned=lambda: None, ask_deepspeed=lambda: None)


def check(**changes: object) -> dict[str, Finding]:
    """Findings by check, on facts of a sound machine with some changes."""
    findings = run_checks(dataclasses.replace(FACTS, **changes), Messages())  # type: ignore[arg-type]
    by_check = {found.check: found for found in findings}
    assert len(by_check) == len(findings)
    assert all(bool(found.advice) == (found.severity != "ok") for found in findings)
    return by_check


def torch_with(**changes: object) -> TorchFacts:
    return dataclasses.replace(TORCH, **changes)  # type: ignore[arg-type]


def host_with(**changes: object) -> HostReading:
    return dataclasses.replace(HOST, **changes)  # type: ignore[arg-type]


def test_a_sound_machine_has_no_complaint(tmp_path: Path) -> None:
    found = check(target=SaveTarget(tmp_path / "output", 1000, 3))
    names = {"python", "torch", "bf16", "vram", "ram", "pinned", "disk", "save", "deepspeed"}
    assert set(found) == names and {finding.severity for finding in found.values()} == {"ok"}
    assert "driver 580.1" in found["torch"].evidence and "23.59 GiB of 24.00 GiB" in found["vram"].evidence
    assert list(tmp_path.iterdir()) == []


# -- machine ----------------------------------------------------------------------------------------------------------

CPU_BUILD = TorchFacts("2.13.0+cpu", None, False)
BLIND_BUILD = TorchFacts("2.13.0+cu130", "13.0", False)


@pytest.mark.parametrize(
    ("changes", "name", "severity", "evidence", "advice"),
    [
        ({"python": (3, 9)}, "python", "error", "3.9", "3.10 or newer"),
        ({"torch": CPU_BUILD, "gpus": ()}, "torch", "warning", "nvidia-smi lists none", "takes a GPU"),
        ({"torch": CPU_BUILD, "gpus": None}, "torch", "warning", "sees no GPU.", "moss-lowmem doctor"),
        ({"torch": CPU_BUILD}, "torch", "error", "built for the CPU only", "built for CUDA"),
        ({"torch": BLIND_BUILD}, "torch", "error", "driver 580.1 sees NVIDIA Test", "CUDA_VISIBLE_DEVICES"),
        ({"torch": torch_with(capability=(12, 0))}, "capability", "ok", "", ""),
        ({"torch": torch_with(capability=(12, 0), architectures=("sm_90",))}, "capability", "error", "12.0", "newer"),
        ({"torch": torch_with(capability=(7, 5), architectures=())}, "bf16", "warning", "7.5", "--mixed-precision no"),
        ({"torch": torch_with(free_bytes=14 * GIB), "gpus": (HELD,)}, "vram", "warning", "vllm (pid 12, 9.00", "Close"),
        ({"torch": torch_with(free_bytes=14 * GIB), "gpus": ()}, "vram", "warning", "Held by: ?", "Close"),
        ({"device_bytes_wanted": 24 * GIB}, "vram", "error", "takes 24.00 GiB", "moss-lowmem plan"),
        ({"device_bytes_wanted": 23 * GIB}, "vram", "ok", "free", ""),
    ],
)
def test_machine(changes: dict[str, object], name: str, severity: str, evidence: str, advice: str) -> None:
    found = check(**changes)
    if severity == "ok" and name not in found:
        return
    assert (found[name].severity, True) == (severity, evidence in found[name].evidence), found[name]
    assert advice in found[name].advice


@pytest.mark.parametrize(
    ("capability", "architectures", "expected"),
    [
        ((8, 6), ("sm_80",), True),  # a later minor version runs it
        ((8, 0), ("sm_86",), False),
        ((12, 0), ("sm_90",), False),
        ((12, 0), ("sm_90", "compute_90"), True),
        ((9, 0), ("sm_90a",), True),
        ((6, 1), ("sm_70", "compute_90"), False),
        ((11, 0), ("gfx1100",), True),
        ((8, 0), (), True),
    ],
)
def test_which_gpus_a_torch_has_kernels_for(
    capability: tuple[int, int], architectures: tuple[str, ...], expected: bool
) -> None:
    assert has_kernels(capability, architectures) is expected


# -- host -------------------------------------------------------------------------------------------------------------

CONTAINER = host_with(cgroup=CgroupReading("/sys/fs/cgroup/job", 16 * GIB, 6 * GIB))


@pytest.mark.parametrize(
    ("changes", "name", "severity", "evidence"),
    [
        ({"host_bytes_wanted": 50 * GIB}, "ram", "ok", "50.00 GiB of 64.00 GiB"),
        ({"host_bytes_wanted": 50 * GIB + 1}, "ram", "error", "takes 50.00 GiB; 50.00 GiB of 64.00 GiB"),
        ({"host": CONTAINER}, "ram", "note", "may use 16.00 GiB of 64.00 GiB; 10.00 GiB are available (/sys/fs/cgroup"),
        ({"host": CONTAINER, "host_bytes_wanted": 11 * GIB}, "ram", "error", "may use 16.00 GiB"),
        ({"host": host_with(available_bytes=3 * GIB)}, "ram", "warning", "only 3.00 GiB"),
        ({"host": HostReading(0, 0, 0, 0, 0)}, "ram", "note", "does not say"),
        ({"host": host_with(swap_free_bytes=GIB)}, "swap", "warning", "7.00 GiB of 8.00 GiB"),
        ({"probe_pinned": lambda: "refused"}, "pinned", "warning", "cannot be page-locked (refused)"),
        ({"wsl": True}, "wsl", "warning", "without a word"),
    ],
)
def test_host(changes: dict[str, object], name: str, severity: str, evidence: str) -> None:
    found = check(**changes)[name]
    assert (found.severity, True) == (severity, evidence in found.evidence), found


def test_nothing_is_said_without_a_reason() -> None:
    found = check(probe_pinned=None)
    assert "wsl" not in found and "swap" not in found and "pinned" not in found


# -- engine -----------------------------------------------------------------------------------------------------------


def test_a_deepspeed_without_cuda_is_found_in_a_child(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    packages = make_package(tmp_path, "deepspeed", MISSING_CUDA)
    monkeypatch.setenv("PYTHONPATH", str(packages))
    monkeypatch.syspath_prepend(str(packages))
    found = check(ask_deepspeed=lambda: ask_deepspeed(sys.executable))["deepspeed"]
    assert found.severity == "error" and "MissingCUDAException: CUDA_HOME does not exist" in found.evidence
    assert all(way in found.advice for way in ("pip uninstall deepspeed", "CUDA_HOME", "environment without deepspeed"))
    assert "deepspeed" not in sys.modules


@pytest.mark.parametrize(
    ("code", "expected"),
    [
        ("print('[INFO] ds_accelerator')", None),
        ("import os; os._exit(3)", "ends the process (status 3"),
        ("import os, signal; os.kill(os.getpid(), signal.SIGSEGV)", "ends the process (status -11"),
    ],
)
def test_a_deepspeed_that_crashes_takes_only_the_child(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, code: str, expected: str | None
) -> None:
    packages = make_package(tmp_path, "deepspeed", code)
    monkeypatch.setenv("PYTHONPATH", str(packages))
    monkeypatch.syspath_prepend(str(packages))
    problem = ask_deepspeed(sys.executable)
    assert problem is None if expected is None else expected in (problem or "")


ZERO = "distributed_type: DEEPSPEED\nnum_processes: {processes}\ndeepspeed_config: {{{engine}}}\n"


@pytest.mark.parametrize(
    ("engine", "processes", "expected"),
    [
        ("zero_stage: 3, zero3_save_16bit_model: false", 8, {"error"}),
        ("zero_stage: 3", 8, {"error"}),  # accelerate's own default
        ("zero_stage: 3, zero3_save_16bit_model: true", 8, set()),
        ("zero_stage: 3, zero3_save_16bit_model: true, offload_param_device: none", 1, {"warning"}),
        ("zero_stage: 3, zero3_save_16bit_model: true, offload_optimizer_device: cpu", 1, set()),
        ("zero_stage: 2", 1, set()),
    ],
)
def test_zero_configs(tmp_path: Path, engine: str, processes: int, expected: set[str]) -> None:
    path = tmp_path / "engine.yaml"
    path.write_text(ZERO.format(engine=engine, processes=processes))
    findings = run_checks(dataclasses.replace(FACTS, config_file=str(path), gpus=(GPU, GPU)), Messages())
    found = [finding for finding in findings if finding.check == "engine"]
    assert {finding.severity for finding in found} == expected
    assert all(str(path) in finding.evidence for finding in found)


@pytest.mark.parametrize(("gathers", "expected"), [(True, set()), (False, {"error"})])
def test_deepspeeds_own_file_is_read(tmp_path: Path, gathers: bool, expected: set[str]) -> None:
    own = tmp_path / "ds.json"
    zero = {"stage": 3, "stage3_gather_16bit_weights_on_model_save": gathers, "offload_optimizer": {"device": "cpu"}}
    own.write_text(json.dumps({"zero_optimization": zero}))
    path = tmp_path / "engine.yaml"
    path.write_text(ZERO.format(engine=f"deepspeed_config_file: {own}", processes=1))
    assert zero_settings(str(path)) == {"stage": 3, "gathers_at_save": gathers, "offloads": True}
    findings = run_checks(dataclasses.replace(FACTS, config_file=str(path)), Messages())
    assert {found.severity for found in findings if found.check == "engine"} == expected
    own.write_text("{")
    assert "cannot be read" in check(config_file=str(path))["engine"].evidence


def test_a_config_that_cannot_be_read_is_an_error() -> None:
    assert check(config_file="no/such.yaml")["engine"].severity == "error"


@pytest.mark.upstream
def test_upstreams_own_configs_are_sound(upstream_repo: Path) -> None:
    configs = sorted(upstream_repo.glob("moss_tts_*/finetuning/configs/*.yaml"))
    assert len(configs) >= 4
    for path in configs:
        assert "engine" not in check(config_file=str(path), gpus=(GPU, GPU)), path


# -- preparation ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("device", "free", "severity"),
    [("auto", 23, "note"), ("cuda:0", 6, "warning"), ("cpu", 6, None), (None, 6, None)],
)
def test_the_codec_on_the_gpu(device: str | None, free: int, severity: str | None) -> None:
    found = check(prepare_device=device, torch=torch_with(free_bytes=free * GIB)).get("preparation")
    assert (found and found.severity) == severity
    assert found is None or "PREP_DEVICE=cpu" in found.advice


# -- messages ---------------------------------------------------------------------------------------------------------


def test_every_text_is_there_twice_with_the_same_values() -> None:
    assert len(TEXTS) == len(DOCTOR_TEXTS) + len(REPORT_TEXTS)
    for name, (english, chinese) in TEXTS.items():
        fields = [{field for _, field, _, _ in Formatter().parse(text) if field} for text in (english, chinese)]
        assert fields[0] == fields[1], name
        assert english.isascii() or not english, name
        assert english == chinese or any("\u4e00" <= letter <= "\u9fff" for letter in chinese), name


@pytest.mark.parametrize(
    ("environment", "expected"),
    [
        ({}, "en"),
        ({"LANG": "zh_CN.UTF-8"}, "zh"),
        ({"LANG": "zh_TW", "LC_ALL": "C"}, "en"),
        ({"LANG": "en_US.UTF-8", "LC_ALL": "zh_CN"}, "zh"),
        ({"LANG": "en_US", "LC_MESSAGES": "ZH_cn", "LC_ALL": ""}, "zh"),
        ({"LANGUAGE": "zh", "LANG": "de_DE"}, "en"),
    ],
)
def test_the_language_is_the_locales(environment: dict[str, str], expected: str) -> None:
    assert language_of(environment) == expected


def test_a_config_of_ours_is_known_by_its_name(monkeypatch, tmp_path):
    """As run_train_lowmem.sh takes it: ACCELERATE_CONFIG_FILE=lowmem:NAME."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert check(config_file="lowmem:zero3", gpus=(GPU,))["engine"].severity == "warning"  # splits nothing
    assert "engine" not in check(config_file="lowmem:zero3", gpus=(GPU, GPU))
    unknown = check(config_file="lowmem:zero4", gpus=(GPU, GPU))["engine"]
    assert unknown.severity == "error" and "lowmem:zero4 is not a config" in unknown.evidence
