"""Kills whole trainings at random moments, and starts some where there is too little host memory."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from mini import make_mini_inputs, run_mini
from safetensors.torch import load_file
from test_training_runs import ON, changed_trainer

from moss_tts_patches.runtime.saving import finish_interrupted_saves

SEED = 20
# Five kills in the middle of a step, eight while saving; then three with the layer's saving taken out, as a control.
KILLS = [("update", False)] * 5 + [("saving", False)] * 6 + [("rename", False)] * 2 + [("saving", True)] * 3
AGAIN = ["saving-6"]  # folders of killed runs to train into once more


@pytest.fixture(scope="module")
def inputs(tmp_path_factory):
    return make_mini_inputs(tmp_path_factory.mktemp("inputs"), records=8, frames=(8, 12))  # two steps an epoch


@pytest.fixture(scope="module")
def dead_process():
    with subprocess.Popen([sys.executable, "-c", ""]) as process:
        process.wait()
    return process.pid


def rehearsing_trainer(folder: Path) -> Path:
    """A miniature whose training loop is run by ``rehearsal.py``, and which saves slowly."""
    trainer = changed_trainer(
        folder,
        "finetuning/sft.py",
        "def parse_args(",
        "from moss_tts_local.finetuning import rehearsal\n\n\ndef parse_args(",
    )
    script = trainer / "moss_tts_local" / "finetuning" / "sft.py"
    text = script.read_text()
    changes = {
        "    clock = StepClock(": "    output_root = rehearsal.rehearse(optimizer, output_root)\n",
        "    accelerator.wait_for_everyone()\n\n\ndef main": "    rehearsal.save_slowly(output_dir)\n",
        '    say(accelerator, f"Finished training:': "    rehearsal.finished()\n",
    }
    for before, inserted in changes.items():
        assert text.count(before) == 1, before
        text = text.replace(before, inserted + before)
    script.write_text(text)
    shutil.copy(Path(__file__).with_name("rehearsal.py"), script.parent)
    plan = {"seed": SEED, "kills": KILLS, "again": AGAIN}
    (script.parent / "plan.json").write_text(json.dumps(plan))
    return trainer


@pytest.fixture(scope="module")
def killed(inputs, tmp_path_factory, dead_process):
    """All killed runs: the output folder and what happened to each."""
    folder = tmp_path_factory.mktemp("killed")
    trainer, output = rehearsing_trainer(folder), folder / "output"
    (output / f"checkpoint-epoch-7.replaced-{dead_process}").mkdir(parents=True)
    (output / f"checkpoint-epoch-8.incomplete-{dead_process}").mkdir()
    environment = {**ON, "MOSS_LOWMEM_GRADIENTS": "host", "MOSS_LOWMEM_STATES": "host"}
    run = run_mini(inputs, output, "--num-epochs", "2", environment=environment, trainer=trainer)
    report = json.loads((trainer / "moss_tts_local" / "finetuning" / "report.json").read_text())
    return run, {entry["folder"]: entry for entry in report}


def contents(checkpoint: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in checkpoint.iterdir()}


@pytest.fixture(scope="module")
def whole(killed):
    """The two checkpoints of the run that was not killed."""
    run, _ = killed
    found = [contents(run.folder / "reference" / f"checkpoint-epoch-{epoch}") for epoch in (0, 1)]
    assert found[0].keys() == found[1].keys() and found[0] != found[1]
    return found


def checkpoints(folder: Path) -> list[Path]:
    return sorted(path for path in folder.glob("checkpoint-*") if path.name.removeprefix("checkpoint-epoch-").isdigit())


def test_every_run_was_killed_at_its_moment(killed):
    _, report = killed
    assert len(report) == 1 + len(KILLS) + len(AGAIN)
    for name, entry in report.items():
        # A delayed kill can come after the end of a short training.
        assert entry["killed"] or entry["status"] == 0, entry
        if name == "reference" or name.endswith("-again"):
            assert not entry["killed"], entry
    assert sum(entry["killed"] for entry in report.values()) >= len(KILLS) - 2


def test_no_checkpoint_is_half_written(killed, whole):
    run, report = killed
    found, left = 0, 0
    for name, entry in report.items():
        if entry["plain"]:
            continue
        for checkpoint in checkpoints(run.folder / name):
            assert contents(checkpoint) in whole, (name, checkpoint)
            assert load_file(checkpoint / "model.safetensors")
            found += 1
        left += len(list((run.folder / name).glob("*.incomplete-*")))
    assert found > 10
    assert left >= 4  # so the kills did come in the middle of saving


def test_control_without_the_layers_saving_halves_are_left(killed, whole):
    run, report = killed
    plain = [run.folder / name for name, entry in report.items() if entry["plain"]]
    halves = [path for folder in plain for path in checkpoints(folder) if contents(path) not in whole]
    assert len(halves) >= 2


def test_what_a_kill_left_is_cleared_up(killed, whole):
    run, report = killed
    for name, entry in report.items():
        (run.folder / name).mkdir(exist_ok=True)  # killed before it saved anything
        before = checkpoints(run.folder / name)
        finish_interrupted_saves(run.folder / name)
        assert not [
            path
            for path in (run.folder / name).iterdir()
            if not path.name.startswith("checkpoint-epoch-") or "." in path.name
        ]
        assert set(before) <= set(checkpoints(run.folder / name))
        if entry["plain"]:
            continue
        assert all(contents(checkpoint) in whole for checkpoint in checkpoints(run.folder / name))


def test_training_again_into_the_folder_of_a_killed_run(killed, whole):
    run, _ = killed
    for name in AGAIN:
        folder = run.folder / f"{name}-again"
        assert [contents(path) for path in checkpoints(folder)] == whole
        assert len(list(folder.iterdir())) == 2
    assert "[lowmem] removed=checkpoint-epoch-" in run.output


def test_a_start_finishes_what_a_kill_left_in_its_output_folder(killed):
    run, _ = killed
    assert "[lowmem] finished=checkpoint-epoch-7:" in run.output
    assert "[lowmem] removed=checkpoint-epoch-8.incomplete-" in run.output
    assert (run.folder / "checkpoint-epoch-7").is_dir()
    assert not list(run.folder.glob("*.*-*"))


def little_memory_trainer(folder: Path) -> Path:
    """A miniature on a machine that has 100 kB of memory left."""
    meminfo = folder / "meminfo"
    meminfo.write_text("MemTotal: 9000 kB\nMemAvailable: 100 kB\n")
    return changed_trainer(
        folder,
        "finetuning/sft.py",
        "def parse_args(",
        f"from moss_tts_patches.memory import placement\n\nplacement._MEMINFO = {str(meminfo)!r}\n\n\ndef parse_args(",
    )


@pytest.mark.parametrize(
    "gradients,states,fits", [("host", "device", False), ("device", "host", False), ("device", "device", True)]
)
def test_too_little_host_memory_is_one_line_before_training(inputs, tmp_path, gradients, states, fits):
    """The last case does what the message advises, and trains."""
    environment = {**ON, "MOSS_LOWMEM_GRADIENTS": gradients, "MOSS_LOWMEM_STATES": states}
    trainer, output = little_memory_trainer(tmp_path), tmp_path / "output"
    run = run_mini(inputs, output, environment=environment, trainer=trainer, check=fits)
    if fits:
        assert run.losses and run.checkpoint().is_dir()
        return
    assert run.status != 0 and "Traceback" not in run.output, run.output
    [line] = [line for line in run.output.splitlines() if "[lowmem] error:" in line]
    assert "of RAM are needed for gradients or optimizer states, 0.00 GiB is available" in line
    assert "MOSS_LOWMEM_STATES=device" in line and "MOSS_LOWMEM_GRADIENTS=device" in line
    assert not run.losses and not output.exists()
