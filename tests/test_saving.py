"""A checkpoint is whole or not there, with a kill simulated before every single file operation."""

from __future__ import annotations

import inspect
import os
import shutil
import subprocess
import sys
import time
from pathlib import Path

import pytest

from moss_tts_patches.errors import EnvironmentProblem, SeamError
from moss_tts_patches.runtime.saving import check_texts, finish_interrupted_saves, saving_whole, whole_folder

OLD = {"model.safetensors": "old weights", "config.json": "old"}
NEW = {"model.safetensors": "new weights", "config.json": "new", "code.py": "pass"}
NAME = "checkpoint-epoch-0"


class Killed(BaseException):
    """What SIGKILL is to the code: nothing after it has any effect, cleaning up included."""


class Fuse:
    """Lets so many file operations happen and then none."""

    def __init__(self, operations: int) -> None:
        self.left = operations

    def burn(self) -> None:
        if self.left == 0:
            raise Killed
        self.left -= 1


def write(folder: Path, content: dict[str, str], burn=lambda: None) -> None:
    """Writes file by file and half by half, as a large file arrives on a disk."""
    folder.mkdir(parents=True, exist_ok=True)
    for name, text in content.items():
        half = len(text) // 2
        for part in (text[:half], text):
            burn()
            (folder / name).write_text(part)


def read(folder: Path) -> dict[str, str] | None:
    return {path.name: path.read_text() for path in folder.iterdir()} if folder.is_dir() else None


def save(destination: Path, burn=lambda: None) -> None:
    with whole_folder(destination) as folder:
        write(folder, NEW, burn)


@pytest.fixture
def with_fuse(monkeypatch):
    """Makes every file operation of the module burn the fuse first; deletes file by file."""
    replace = os.replace

    def arm(fuse: Fuse) -> None:
        def burning_replace(source, target):
            fuse.burn()
            replace(source, target)

        def burning_rmtree(folder, ignore_errors=False):
            for path in sorted(Path(folder).iterdir()):
                fuse.burn()
                path.unlink()
            fuse.burn()
            os.rmdir(folder)

        monkeypatch.setattr(os, "replace", burning_replace)
        monkeypatch.setattr(shutil, "rmtree", burning_rmtree)
        monkeypatch.setattr(os, "fsync", lambda descriptor: fuse.burn())

    return arm


def killed_after(operations: int, action) -> bool:
    """Runs ``action(fuse)``; returns whether it was killed."""
    try:
        action(Fuse(operations))
    except Killed:
        return True
    return False


def leftovers(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir() if path.name != NAME)


@pytest.mark.parametrize("before", [None, OLD])
def test_killed_before_any_operation_and_again_while_that_is_cleared_up(tmp_path, with_fuse, before):
    def try_save(folder: Path, operations: int, later_operations: int) -> bool:
        """Saves, is killed, clears up, is killed again, clears up; returns whether the save was killed."""
        folder.mkdir()
        if before is not None:
            write(folder / NAME, before)
        killed = killed_after(operations, lambda fuse: (with_fuse(fuse), save(folder / NAME, fuse.burn)))
        check_whole(folder, before, killed)
        killed_after(later_operations, lambda fuse: (with_fuse(fuse), finish_interrupted_saves(folder)))
        check_whole(folder, before, True)
        with_fuse(Fuse(10**6))
        finish_interrupted_saves(folder)
        assert not leftovers(folder)
        return killed

    operations, killed, outcomes = 0, True, []
    while killed:
        for later_operations in range(9):
            folder = tmp_path / f"{operations}-{later_operations}"
            killed = try_save(folder, operations, later_operations)
            outcomes.append(read(folder / NAME))
            assert outcomes[-1] in ((before, NEW) if killed else (NEW,))
        operations += 1
    assert operations > 10
    assert before in outcomes and NEW in outcomes


def check_whole(folder: Path, before: dict[str, str] | None, killed: bool) -> None:
    """What bears the checkpoint's name is whole; where nothing does, a whole one stands beside it."""
    found = read(folder / NAME)
    assert found in (before, NEW) or (found is None and killed)
    if found is None and before is not None:
        [replaced] = [path for path in folder.iterdir() if ".replaced-" in path.name]
        assert read(replaced) == before


def test_control_writing_in_place_leaves_halves(tmp_path):
    halves = 0
    for operations in range(2 * len(NEW)):
        write(tmp_path / NAME, OLD)
        assert killed_after(operations, lambda fuse: write(tmp_path / NAME, NEW, fuse.burn))
        halves += read(tmp_path / NAME) not in (OLD, NEW)
    assert halves > 3


def test_everything_is_on_the_disk_before_the_rename(tmp_path, monkeypatch):
    events = []
    fsync, replace = os.fsync, os.replace
    monkeypatch.setattr(
        os, "fsync", lambda fd: (events.append(os.path.basename(os.readlink(f"/proc/self/fd/{fd}"))), fsync(fd))
    )
    monkeypatch.setattr(os, "replace", lambda old, new: (events.append("rename"), replace(old, new)))
    save(tmp_path / NAME)
    fresh = f"{NAME}.incomplete-{os.getpid()}"
    assert sorted(events[:4]) == sorted([*NEW, fresh])
    assert events[4:] == ["rename", tmp_path.name]


def test_an_error_while_saving_removes_what_was_written(tmp_path):
    write(tmp_path / NAME, OLD)
    with pytest.raises(OSError, match="disk full"), whole_folder(tmp_path / NAME) as folder:
        write(folder, NEW)
        raise OSError("disk full")
    assert read(tmp_path / NAME) == OLD and not leftovers(tmp_path)


def test_other_files_survive_as_with_upstreams_own_saving(tmp_path):
    old = tmp_path / NAME
    write(old, {**OLD, "notes.txt": "mine", "model-00001-of-00002.safetensors": "", "model.safetensors.index.json": ""})
    write(old / "samples", {"one.wav": "sound"})
    (old / "link").symlink_to("notes.txt")
    save(old)
    assert {path.name for path in old.iterdir()} == {*NEW, "notes.txt", "samples", "link"}
    assert (old / "notes.txt").read_text() == "mine" == (old / "link").read_text()
    assert (old / "samples" / "one.wav").read_text() == "sound"
    assert (old / "config.json").read_text() == "new"


def test_an_adapter_does_not_survive_beside_a_whole_model(tmp_path):
    """transformers would load the adapter's base in the place of the new weights."""
    old = tmp_path / NAME
    adapter = ("adapter_config.json", "adapter_model.safetensors", "lowmem.json")
    write(old, {**dict.fromkeys(adapter, "old"), "notes.txt": "mine"})
    save(old)
    assert {path.name for path in old.iterdir()} == {*NEW, "notes.txt"}


def test_names_that_no_checkpoint_can_note_are_refused_at_the_start():
    check_texts({"output_dir": "输出", "path": Path("a b"), "number": 1, "nothing": None})
    with pytest.raises(
        EnvironmentProblem, match=r"train_jsonl=/data/\\udcb2\\udce2\.jsonl: found bytes that are not UTF-8"
    ):
        check_texts({"train_jsonl": os.fsdecode(b"/data/\xb2\xe2.jsonl")})


def test_a_link_stays_a_link(tmp_path):
    write(tmp_path / "disk" / "real", OLD)
    (tmp_path / NAME).symlink_to(tmp_path / "disk" / "real")
    save(tmp_path / NAME)
    assert (tmp_path / NAME).is_symlink()
    assert read(tmp_path / "disk" / "real") == NEW
    assert [path.name for path in (tmp_path / "disk").iterdir()] == ["real"]


def test_a_file_in_the_way_is_refused_and_kept(tmp_path):
    (tmp_path / NAME).write_text("mine")
    with pytest.raises(EnvironmentProblem, match="found a file, expected a folder or nothing"):
        save(tmp_path / NAME)
    assert (tmp_path / NAME).read_text() == "mine"


def test_a_checkpoint_that_cannot_be_renamed_is_kept_and_named(tmp_path, monkeypatch):
    def refuse(source, target):
        raise OSError(95, "Operation not supported")

    monkeypatch.setattr(os, "replace", refuse)
    with pytest.raises(EnvironmentProblem) as caught:
        save(tmp_path / NAME)
    [kept] = leftovers(tmp_path)
    assert kept in str(caught.value) and "Operation not supported" in str(caught.value)
    assert read(tmp_path / kept) == NEW


@pytest.fixture
def dead_process():
    with subprocess.Popen([sys.executable, "-c", ""]) as process:
        process.wait()
    return process.pid


def test_only_our_leftovers_of_dead_processes_are_touched(tmp_path, dead_process):
    kept = [
        f"{NAME}.incomplete-{os.getppid()}",  # alive
        f"{NAME}.replaced-1",
        f"{NAME}.incomplete-{dead_process}x",
        f"{NAME}.incomplete-",
        f".incomplete-{dead_process}",
        f"{NAME}.partial-{dead_process}",
        "checkpoint-epoch-5",
    ]
    for name in kept:
        write(tmp_path / name, OLD)
    (tmp_path / f"file.incomplete-{dead_process}").write_text("a file")
    (tmp_path / f"link.incomplete-{dead_process}").symlink_to("checkpoint-epoch-5")
    gone = [f"{NAME}.incomplete-{dead_process}", f"last.incomplete-{10**18}", f"last.incomplete-{os.getpid()}"]
    for name in gone:
        write(tmp_path / name, OLD)
    lines = []
    finish_interrupted_saves(tmp_path, lines.append)
    found = {path.name for path in tmp_path.iterdir()}
    assert found == {*kept, f"file.incomplete-{dead_process}", f"link.incomplete-{dead_process}"}
    assert len(lines) == 3 and all(line.startswith("removed=") for line in lines)
    finish_interrupted_saves(tmp_path / "absent", lines.append)
    assert len(lines) == 3


def test_a_zombie_is_dead(tmp_path):
    with subprocess.Popen([sys.executable, "-c", ""], stdout=subprocess.PIPE) as process:
        process.stdout.read()  # ends with the process, whose status nobody has asked for yet
        until = time.monotonic() + 20  # it closes its output a while before it has ended, on a crowded machine
        while time.monotonic() < until and Path(f"/proc/{process.pid}/stat").read_text().split()[2] != "Z":
            time.sleep(0.01)
        write(tmp_path / f"{NAME}.incomplete-{process.pid}", OLD)
        finish_interrupted_saves(tmp_path)
        assert not leftovers(tmp_path)


def test_a_newer_checkpoint_that_was_whole_is_finished(tmp_path, dead_process):
    write(tmp_path / f"{NAME}.replaced-{dead_process}", OLD)
    write(tmp_path / f"{NAME}.incomplete-{dead_process}", NEW)
    lines = []
    finish_interrupted_saves(tmp_path, lines.append)
    assert read(tmp_path / NAME) == NEW and not leftovers(tmp_path)
    assert lines == [f"finished={NAME}: a run was killed while it replaced this checkpoint; it is whole"]


def test_a_leftover_that_cannot_be_removed_stops_nothing(tmp_path, dead_process, monkeypatch):
    write(tmp_path / f"other.incomplete-{dead_process}", OLD)
    lines, rmtree = [], shutil.rmtree

    def refuse(folder, ignore_errors=False):
        if "other" in str(folder):
            raise PermissionError(13, "Permission denied")
        rmtree(folder, ignore_errors)

    monkeypatch.setattr(shutil, "rmtree", refuse)
    write(tmp_path / NAME, OLD)
    with whole_folder(tmp_path / NAME, lines.append) as folder:
        write(folder, NEW)
    assert read(tmp_path / NAME) == NEW
    assert lines == [f"could not finish or remove other.incomplete-{dead_process}: Permission denied"]


class Calls:
    """Stands in for an accelerator and records what is asked of it."""

    num_processes, is_main_process = 1, True

    def __init__(self) -> None:
        self.barriers = 0

    def wait_for_everyone(self) -> None:
        self.barriers += 1


def test_a_trainers_function_gets_another_folder_and_keeps_its_signature(tmp_path):
    def save_checkpoint(*, accelerator, output_dir, train_args, epoch):
        """As of moss_tts_local_v1.5, with keywords only."""
        write(output_dir, NEW)
        assert output_dir.parent == tmp_path and output_dir.name != NAME
        return train_args, epoch

    wrapped = saving_whole(save_checkpoint)
    assert inspect.signature(wrapped) == inspect.signature(save_checkpoint)
    accelerator = Calls()
    assert wrapped(accelerator=accelerator, output_dir=tmp_path / NAME, train_args={}, epoch=3) == ({}, 3)
    assert read(tmp_path / NAME) == NEW and not leftovers(tmp_path)
    assert accelerator.barriers == 3

    def positional(accelerator, output_dir):
        write(output_dir, OLD)

    saving_whole(positional)(accelerator, str(tmp_path / NAME))
    assert read(tmp_path / NAME) == {**OLD, "code.py": "pass"}


def test_a_trainer_that_writes_elsewhere_is_noticed(tmp_path):
    def save_checkpoint(accelerator, output_dir):
        write(tmp_path / "elsewhere", NEW)

    with pytest.raises(SeamError, match="did not write into the output_dir"):
        saving_whole(save_checkpoint)(Calls(), tmp_path / NAME)
    assert [path.name for path in tmp_path.iterdir()] == ["elsewhere"]
