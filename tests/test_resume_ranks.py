"""Two processes under DDP that are interrupted and go on: the same records in the same order, the same weights."""

from __future__ import annotations

import functools
import json
import os
import re
import signal
import subprocess
import sys
import time

import pytest
from mini import MINI, clean_environment, command_line, make_mini_inputs
from ranks import LAYER, RankServer
from test_resume import LORA, WATCHED, assert_same_bits, changed_point, events, saved_tensors
from test_training_runs import changed_trainer

from moss_tts_patches.runtime.progress import LOG_NAME, read_log
from moss_tts_patches.runtime.resume.point import points_in

FAMILY = "moss_tts_local"
# 12 records one by one on two ranks, windows of 2: an epoch has 6 micro-batches a rank and 3 steps.
ARGUMENTS = ("--per-device-batch-size", "1", "--num-epochs", "2", "--adam-eps", "1e-6")
RECORDS, MICRO_BATCHES, STEPS = 12, 12, 6
# Where tests run in the background SIGINT is ignored, by what they start too.
AS_IN_A_TERMINAL = """
import runpy, signal
signal.signal(signal.SIGINT, signal.default_int_handler)
runpy.run_module("torch.distributed.run", run_name="__main__")
"""
SAVING = {"MOSS_LOWMEM_SAVE_MINUTES": "600"}

# Per rank: a file of what it does, and a signal to itself only.
RANKED = WATCHED.replace('_os.environ["WATCH_FILE"]', '_os.environ["WATCH_FILE"] + _os.environ["RANK"]').replace(
    '_os.environ.get("STOP_AT")', '_os.environ.get("STOP_AT_" + _os.environ["RANK"])'
)
# While step KILL_AT is saved, rank KILL_RANK dies; and rank 1 changes a weight of its own.
SABOTAGE = """
import pathlib as _pathlib

_signal.signal(_signal.SIGINT, _signal.default_int_handler)  # ignored where the tests run in the background
_folder = _pathlib.Path(_os.environ["WATCH_FILE"])


def _write_pid():
    _folder.with_name(_folder.name + "pid" + _os.environ["RANK"]).write_text(str(_os.getpid()))


if "KILL_AT" in _os.environ:
    import moss_tts_patches.runtime.resume.writer as _writer

    _write_pid()
    _write_states = _writer.write_states

    def write_states(folder, optimizer):
        if folder.name.startswith("step-" + _os.environ["KILL_AT"] + "."):
            victim = _folder.with_name(_folder.name + "pid" + _os.environ["KILL_RANK"])
            _os.kill(int(victim.read_text()), _signal.SIGKILL)
        return _write_states(folder, optimizer)

    _writer.write_states = write_states

if _os.environ.get("SPOIL_RANK") == _os.environ["RANK"]:
    _spoilt = train_micro_batch

    def train_micro_batch(accelerator, model, *rest):
        if _trained[0] == 2:
            with torch.no_grad():
                next(parameter for parameter in model.parameters() if parameter.requires_grad).view(-1)[0] += 1
        return _spoilt(accelerator, model, *rest)


def main() -> None:
"""


@pytest.fixture(scope="module")
def trainer(tmp_path_factory):
    text = RANKED.replace("\n\ndef main() -> None:\n", SABOTAGE)
    folder = changed_trainer(tmp_path_factory.mktemp("ranked"), "finetuning/sft.py", "def main() -> None:\n", text)
    script = folder / FAMILY / "finetuning" / "sft.py"
    script.write_text(
        script.read_text()
        .replace("dataset = MossTTSSFTDataset(", "dataset = _WatchedDataset(")
        .replace(
            "dtype = resolve_torch_dtype(args.mixed_precision)",
            'dtype = getattr(torch, _os.environ.get("WEIGHTS", "float32"))',
        )
    )
    return folder


@pytest.fixture(scope="module")
def run(trainer, tmp_path_factory):
    root = tmp_path_factory.mktemp("jobs")
    inputs = make_mini_inputs(root / "inputs", records=RECORDS, frames=(8, 12))
    with RankServer() as server:

        def train(name, environment, *arguments, processes=2, check=True):
            output = root / name
            watch = root / f"{name}-{sum(1 for _ in root.iterdir())}.watch"
            variables = {**LAYER, "MOSS_LOWMEM_LONGEST_FIRST": "0", "WATCH_FILE": str(watch), **environment}
            job = server.run(
                f"{FAMILY}/finetuning/sft.py",
                command_line(inputs, output, *ARGUMENTS, *arguments),
                output,
                folder=trainer,
                processes=processes,
                environment=variables,
                check=check,
            )
            return job, [watch.with_name(f"{watch.name}{rank}") for rank in range(processes)]

        yield train


METHODS = {"full": {}, "lora": LORA, "bf16": {"WEIGHTS": "bfloat16"}}


@pytest.fixture(scope="module")
def whole(run):
    """The uninterrupted training of each method, once."""
    return functools.cache(lambda method: run(f"whole-{method}", METHODS[method]))


@pytest.mark.parametrize(
    "method,rank,stop_at,number,done",
    [
        ("full", 1, 9, signal.SIGTERM, 4),  # in the first half of a window, in the middle of the second epoch
        ("lora", 0, 8, signal.SIGINT, 4),  # at a step in the middle of an epoch
        ("bf16", 1, 6, signal.SIGTERM, 3),  # at the end of an epoch
    ],
)
def test_a_signal_to_one_rank_stops_all_and_they_go_on(run, whole, method, rank, stop_at, number, done):
    expected, files = whole(method)
    environment, out = {**METHODS[method], **SAVING}, f"out-{method}"
    stop = {f"STOP_AT_{rank}": str(stop_at), "STOP_WITH": str(int(number))}
    stopped, first = run(out, {**environment, **stop}, check=False)
    assert list(stopped.statuses) == [128 + number] * 2, stopped.outputs
    assert len(re.findall(f"stopped after step {done}.*MOSS_LOWMEM_RESUME=auto", stopped.outputs[0])) == 1
    assert "[lowmem]" not in stopped.outputs[1]
    resumed, second = run(out, environment)
    again = 2 * done  # micro-batches that are not computed again
    assert f"resume replayed={again} micro-batches" in resumed.outputs[0]
    assert resumed.losses == expected.losses[done:] and len(expected.losses) == STEPS
    assert_same_bits(saved_tensors(resumed.folder), saved_tensors(expected.folder))
    assert {*resumed.digests} == {*expected.digests} and len({*expected.digests}) == 1
    # Both halves of the log count epochs as a training of one process does.
    epochs = [entry["epoch"] for entry in read_log(resumed.folder / LOG_NAME).steps]
    assert epochs == pytest.approx([step / 3 for step in range(1, STEPS + 1)], abs=1e-4)
    seen: list[str] = []
    for watched, before, after in zip(files, first, second):
        order = events(watched, "train")
        assert events(before, "train") == order[:stop_at] and events(after, "train") == order[again:]
        assert events(after, "fetch") == events(watched, "fetch")[again:]  # nothing finished is tokenized again
        seen += order[: MICRO_BATCHES // 2]
    assert len(seen) == len({*seen}) == RECORDS  # every record once an epoch, over both ranks
    if method == "lora":
        _assert_ranks_need_their_own(run, stopped.folder / "resume" / f"step-{done}", expected)


def _assert_ranks_need_their_own(run, point, expected):
    """Negative control: with rank 0's random numbers for both, dropout is another."""
    main = json.loads((point / "rank-00000.json").read_text())
    other = changed_point(point, point.with_name("other") / point.name, rank_00001=lambda values: values.update(main))
    wrong, _ = run("wrong", {**LORA, "MOSS_LOWMEM_RESUME": str(other)})
    assert wrong.digests[0] == wrong.digests[1] != expected.digests[0]


@pytest.mark.parametrize("victim", [0, 1])
def test_a_rank_that_is_killed_during_a_save_leaves_something_to_go_on_from(run, whole, victim):
    expected, _ = whole("full")
    saving = {"MOSS_LOWMEM_SAVE_STEPS": "2"}
    killed, _ = run(f"killed-{victim}", {**saving, "KILL_AT": "4", "KILL_RANK": str(victim)}, check=False)
    assert killed.statuses[victim] == -signal.SIGKILL and killed.statuses[1 - victim] != 0
    newest = points_in(killed.folder / "resume")[0].step
    assert newest == 2 if victim == 0 else newest in (2, 4)
    resumed, _ = run(f"killed-{victim}", saving)
    assert f"resume replayed={2 * newest} micro-batches" in resumed.outputs[0]
    assert resumed.digests == expected.digests
    assert sorted(path.name for path in (resumed.folder / "resume").iterdir()) == ["step-4", "step-6"]


def test_ctrl_c_under_torchrun_leaves_one_point_of_all(tmp_path):
    """As a terminal sends it, to launcher and trainers alike; its echo: test_resume_pieces.py."""
    inputs, output = make_mini_inputs(tmp_path / "inputs", records=RECORDS, frames=(8, 12)), tmp_path / "output"
    command = [
        *(sys.executable, "-c", AS_IN_A_TERMINAL, "--nproc-per-node", "2", "--master-port", "0"),
        *("--rdzv-backend", "c10d", "--rdzv-endpoint", "127.0.0.1:0", f"{FAMILY}/finetuning/sft.py"),
        *command_line(inputs, output, *ARGUMENTS, "--num-epochs", "10000"),
    ]
    environment = clean_environment(**LAYER, **SAVING, ACCELERATE_USE_CPU="true")
    with open(tmp_path / "log", "w") as log:
        job = subprocess.Popen(
            command, cwd=MINI, env=environment, stdout=log, stderr=subprocess.STDOUT, start_new_session=True
        )
    try:
        end = time.monotonic() + 120
        while time.monotonic() < end and " step=2/" not in (tmp_path / "log").read_text():
            time.sleep(0.1)
        os.killpg(job.pid, signal.SIGINT)
        assert job.wait(timeout=60) != 0
    finally:
        if job.poll() is None:
            os.killpg(job.pid, signal.SIGKILL)
    text = (tmp_path / "log").read_text()
    [done] = re.findall(r"stopped after step (\d+)\..*MOSS_LOWMEM_RESUME=auto", text)
    assert [point.step for point in points_in(output / "resume")] == [int(done)], text[-3000:]
    assert points_in(output / "resume")[0].values["processes"] == 2


def test_another_number_of_processes_is_refused(run):
    run("four", {"MOSS_LOWMEM_SAVE_STEPS": "2"}, "--max-train-steps", "2")
    refused, _ = run("four", SAVING, processes=1, check=False)
    assert refused.statuses[0] == 1 and "Traceback" not in refused.outputs[0]
    assert "it was saved by 2 process(es), and 1 train now" in refused.outputs[0]
    anew, _ = run("four", {"MOSS_LOWMEM_RESUME": "off"}, "--max-train-steps", "1", processes=1)
    assert len(anew.losses) == 1


def test_ranks_that_have_come_apart_get_no_point(run):
    apart, _ = run("apart", {"MOSS_LOWMEM_SAVE_STEPS": "2", "SPOIL_RANK": "1"}, check=False)
    assert all(apart.statuses)
    for output in apart.outputs:
        assert "after step 2 the 2 processes hold different weights or optimizer states" in output
    assert not points_in(apart.folder / "resume")
