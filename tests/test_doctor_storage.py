"""The doctor on the output folder: real disks, real failures; the preflight and the command."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from launcher import BIN, environment_of
from test_doctor import check

from moss_tts_patches.doctor import Finding, preflight, stop_on_errors
from moss_tts_patches.doctor.facts import SaveTarget, gather_facts
from moss_tts_patches.doctor.storage import find_checkpoints, try_to_save
from moss_tts_patches.errors import EnvironmentProblem
from moss_tts_patches.units import GIB, MIB

# -- storage ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("size", "count", "severity"),
    [(0.22, 3, "ok"), (0.22, 6, "warning"), (1.2, 1, "error"), (None, 3, "ok")],
)
def test_disk_space_is_added_up(tmp_path: Path, size: float | None, count: int, severity: str) -> None:
    free = os.statvfs(tmp_path).f_bavail * os.statvfs(tmp_path).f_frsize
    wanted = None if size is None else int(size * free)
    found = check(target=SaveTarget(tmp_path / "a" / "b", wanted, count))["disk"]
    assert found.severity == severity
    if severity == "warning":
        assert "6 checkpoints" in found.evidence and "enough for 4" in found.evidence


@pytest.fixture
def full_disk(tmp_path: Path) -> Iterator[Path]:
    """A real file system of 64 KiB that is nearly full."""
    folder = tmp_path / "small"
    folder.mkdir()
    mounted = subprocess.run(["mount", "-t", "tmpfs", "-o", "size=64k", "tmpfs", str(folder)], capture_output=True)
    if mounted.returncode != 0:
        pytest.skip("mounting a tmpfs takes root; test_a_save_that_fails has the same with a limit on file sizes")
    try:
        (folder / "filling").write_bytes(bytes(48 * 1024))
        yield folder
    finally:
        subprocess.run(["umount", str(folder)], check=True)


def test_a_full_disk(full_disk: Path) -> None:
    before = sorted(full_disk.iterdir())
    small = check(target=SaveTarget(full_disk / "output", sample=bytes(4096)))["save"]
    assert small.severity == "ok"
    found = check(target=SaveTarget(full_disk / "output", 20 * 1024, sample=bytes(20 * 1024)))
    assert found["save"].severity == "error" and "No space left on device" in found["save"].evidence
    assert found["disk"].severity == "error" and sorted(full_disk.iterdir()) == before


@pytest.mark.parametrize("limit", [100, 10**6])
def test_a_save_that_fails(tmp_path: Path, limit: int) -> None:
    script = (
        "import pathlib, resource, signal, sys\nfrom moss_tts_patches.doctor.storage import try_to_save\n"
        "signal.signal(signal.SIGXFSZ, signal.SIG_IGN)\nlimit = int(sys.argv[2])\n"
        "resource.setrlimit(resource.RLIMIT_FSIZE, (limit, limit))\n"
        "try_to_save(pathlib.Path(sys.argv[1]), bytes(5000))"
    )
    command = [sys.executable, "-c", script, str(tmp_path / "new" / "output"), str(limit)]
    done = subprocess.run(command, env=environment_of(), capture_output=True, text=True)
    assert ("File too large" in done.stderr) == (done.returncode != 0) == (limit == 100), done.stderr
    assert list(tmp_path.iterdir()) == []


def test_a_file_in_the_way(tmp_path: Path) -> None:
    (tmp_path / "output").write_text("")
    found = check(target=SaveTarget(tmp_path / "output"))["save"]
    assert found.severity == "error" and "Not a directory" in found.evidence


def test_a_trial_leaves_what_was_there(tmp_path: Path) -> None:
    (tmp_path / "notes").write_text("mine")
    try_to_save(tmp_path, b"content")
    assert [path.name for path in tmp_path.iterdir()] == ["notes"]


def test_an_interrupted_trial_is_cleaned_up_like_a_save(tmp_path: Path) -> None:
    from moss_tts_patches.runtime.saving import finish_interrupted_saves

    script = (
        "import os, pathlib, signal, sys\nfrom moss_tts_patches.doctor import storage\n"
        "storage.os.fsync = lambda _: os.kill(os.getpid(), signal.SIGKILL)\n"
        "storage.try_to_save(pathlib.Path(sys.argv[1]), b'x')"
    )
    done = subprocess.run([sys.executable, "-c", script, str(tmp_path)], env=environment_of())
    assert done.returncode == -9 and len(list(tmp_path.iterdir())) == 1
    finish_interrupted_saves(tmp_path)
    assert list(tmp_path.iterdir()) == []


def make_checkpoint(folder: Path, name: str, **arguments: object) -> None:
    (folder / name).mkdir(parents=True)
    (folder / name / "finetune_args.json").write_text(json.dumps(arguments))


@pytest.mark.parametrize(
    ("saved", "resumes", "severity"),
    [
        ({"model_path": "b", "seed": 42}, False, "error"),
        ({"model_path": "a", "seed": 42}, False, "warning"),
        ({"seed": 42}, False, "warning"),
        ({"model_path": "b"}, True, None),
    ],
)
def test_checkpoints_of_another_run_are_reported(
    tmp_path: Path, saved: dict[str, object], resumes: bool, severity: str | None
) -> None:
    make_checkpoint(tmp_path, "checkpoint-epoch-0", model_path="a")
    make_checkpoint(tmp_path, "checkpoint-epoch-1", **saved)
    target = SaveTarget(tmp_path, arguments={"model_path": "a"}, resumes=resumes)
    found = check(target=target).get("output")
    assert (found and found.severity) == severity
    if found is not None:
        assert "checkpoint-epoch-0, checkpoint-epoch-1" in found.evidence and "OUTPUT_DIR" in found.advice
        assert ("model_path: b / a" in found.evidence) == (severity == "error")


def test_what_is_no_checkpoint_does_not_count(tmp_path: Path) -> None:
    for name in ("checkpoint-epoch-0.incomplete-7", "checkpoint-epoch-0.replaced-7", "logs"):
        (tmp_path / name).mkdir()
    (tmp_path / "checkpoint-last").write_text("a file")
    assert find_checkpoints(tmp_path) == [] and "output" not in check(target=SaveTarget(tmp_path))
    (tmp_path / "checkpoint-epoch-3").mkdir()  # one without finetune_args.json
    assert check(target=SaveTarget(tmp_path, arguments={"model_path": "a"}))["output"].severity == "warning"


# -- preflight --------------------------------------------------------------------------------------------------------


def test_preflight_is_quick_and_starts_no_program(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import torch  # imported by a training anyway

    def must_not(*_: object, **__: object) -> None:
        raise AssertionError("a program was started")

    monkeypatch.setattr(subprocess, "run", must_not)
    monkeypatch.setattr(subprocess, "Popen", must_not)
    started = time.monotonic()
    found = preflight(target=SaveTarget(tmp_path / "output", MIB, 3), host_bytes_wanted=GIB)
    assert time.monotonic() - started < 2
    assert {"python", "torch", "ram", "disk", "save"} <= {finding.check for finding in found}
    assert torch.cuda.is_available() or not any(finding.severity == "error" for finding in found)


def test_errors_stop_and_warnings_are_logged() -> None:
    lines: list[str] = []
    warning, error = Finding("ram", "warning", "little.", "close."), Finding("disk", "error", "full.", "clear.")
    stop_on_errors([Finding("torch", "ok", "fine."), warning], lines.append)
    assert lines == ["preflight=ram severity=warning little. close."]
    second = Finding("save", "error", "refused.", "change.")
    with pytest.raises(EnvironmentProblem, match=r"disk: full\. clear\. \| save: refused\..*MOSS_LOWMEM_PREFLIGHT=0"):
        stop_on_errors([warning, error, second], lines.append)
    assert len(lines) == 2


# -- the command ------------------------------------------------------------------------------------------------------


def run_doctor(*arguments: str, **variables: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [str(BIN / "moss-lowmem"), "doctor", *arguments],
        env=environment_of(COLUMNS="150", PYTHONIOENCODING="utf-8", **variables),
        capture_output=True,
        text=True,
        timeout=60,
    )


def test_the_command_gives_one_json_object(tmp_path: Path) -> None:
    model = tmp_path / "model"
    model.mkdir()
    (model / "config.json").write_text("{}", encoding="utf-8")
    (model / "model-00001-of-00002.safetensors").write_bytes(bytes(3000))
    make_checkpoint(tmp_path / "output", "checkpoint-epoch-0", model_path="another")
    done = run_doctor("--json", "--output-dir", str(tmp_path / "output"), "--model-path", str(model))
    content = json.loads(done.stdout)
    by_check = {found["check"]: found for found in content["findings"]}
    assert (done.returncode, content["ok"]) == (1, False)
    assert by_check["output"]["severity"] == "error" and str(model) in by_check["output"]["evidence"]
    assert by_check["disk"]["severity"] == "ok" and "3 checkpoint(s)" in by_check["disk"]["evidence"]
    assert set(by_check["save"]) == {"check", "severity", "evidence", "advice"}


def test_the_command_refuses_a_model_that_is_not_there(tmp_path: Path) -> None:
    done = run_doctor("--output-dir", str(tmp_path / "output"), "--model-path", str(tmp_path / "nope"))
    assert done.returncode == 2 and "found no folder with a config.json of that name" in done.stderr


def test_the_command_prints_a_table_in_the_users_language(tmp_path: Path) -> None:
    done = run_doctor("--output-dir", str(tmp_path / "output"), LC_ALL="zh_CN.UTF-8")
    assert done.returncode == 0, done.stdout
    assert "内存：" in done.stdout and "Host memory" not in done.stdout
    assert gather_facts(thorough=False).gpus is None
