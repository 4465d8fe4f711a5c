"""Files that were sharded by rank: every epoch ends in a step, in all processes after as many micro-batches."""

from __future__ import annotations

import itertools
import json
import re

import pytest
from mini import MINI, command_line, make_mini_inputs, write_shards
from ranks import LAYER, RankServer

from moss_tts_patches.runtime.progress import LOG_NAME, read_log

FAMILY = "moss_tts_local"
# 10 records a rank in batches of 2, windows of 2: an epoch has 5 micro-batches, so its third window is half full.
ARGUMENTS = ("--per-device-batch-size", "2", "--gradient-accumulation-steps", "2", "--num-epochs", "2")
UPSTREAM = {**LAYER, "MOSS_LOWMEM_CORRECTIONS": "learning_rate_steps"}


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    root = tmp_path_factory.mktemp("sharded")
    with RankServer() as server:

        def train(name, environment, *arguments, family=FAMILY, sizes=(10, 10), check=True):
            inputs = root / family.replace(".", "_")
            if not inputs.exists():
                make_mini_inputs(inputs, records=24, frames=(6, 10), family=family)
            shards = inputs / "-".join(map(str, sizes))
            if not shards.exists():
                write_shards(shards, divide(inputs, sizes))
            arguments = (*ARGUMENTS, "--train-jsonl", str(shards), *arguments)
            return server.run(
                f"{family}/finetuning/sft.py",
                command_line(inputs, root / name, *arguments),
                root / name,
                folder=MINI,
                environment=environment,
                check=check,
            )

        yield train


def divide(inputs, sizes):
    """Consecutive records of the training file, so many for each rank."""
    lines = iter((inputs / "train.jsonl").read_text(encoding="utf-8").splitlines(keepends=True))
    return [list(itertools.islice(lines, size)) for size in sizes]


def steps_of_epochs(job):
    """Pairs of epoch and step, as the trainer prints them."""
    return [(int(epoch), int(step)) for epoch, step in re.findall(r"epoch=(\d+) step=(\d+)/", job.outputs[0])]


def test_upstreams_window_goes_on_into_the_next_epoch(run):
    """What is corrected: 10 micro-batches make 5 steps where 6 were planned, and the third mixes two epochs."""
    plain = run("plain", {})
    uncorrected = run("uncorrected", UPSTREAM)
    for job in (plain, uncorrected):
        assert steps_of_epochs(job) == [(0, 1), (0, 2), (1, 3), (1, 4), (1, 5)]
        assert "step=5/6" in job.outputs[0]
    assert "correction=sharded_windows" not in uncorrected.outputs[0]


@pytest.mark.parametrize("sizes", [(10, 10), (10, 12)])
def test_an_epoch_ends_in_a_step_in_every_process(run, sizes):
    """Shards of 10 and 12 records have 5 and 6 micro-batches; alone, the second process would wait for the first."""
    job = run(f"closed-{sizes[1]}", LAYER, sizes=sizes)
    assert steps_of_epochs(job) == [(0, 1), (0, 2), (0, 3), (1, 4), (1, 5), (1, 6)]
    assert "correction=sharded_windows micro_batches_per_epoch=5 of_own=5" in job.outputs[0]
    assert job.digests[0] == job.digests[1]
    assert [entry["epoch"] for entry in read_log(job.folder / LOG_NAME).steps] == [0.4, 0.8, 1.0, 1.4, 1.8, 2.0]


def test_v15_cuts_its_epochs_itself(run):
    job = run("v15", LAYER, family="moss_tts_local_v1.5")
    assert "correction=sharded_windows" not in job.outputs[0]


def test_shards_that_would_give_ranks_other_learning_rates_are_refused(run):
    """14 records are 7 micro-batches and 4 steps by the trainer's count, 10 are 3."""
    refused = run("unequal", LAYER, sizes=(10, 14), check=False)
    assert all(refused.statuses)
    for output in refused.outputs:
        assert "the trainer counts 3 to 4 optimizer steps an epoch" in output and "Traceback" not in output
    done = run("given", LAYER, "--max-train-steps", "6", sizes=(10, 14))
    assert len(done.losses) == 6 and done.digests[0] == done.digests[1]
    none = run("none", LAYER, sizes=(1, 4), check=False)
    assert "a process has fewer records than a batch. Expected at least 2" in none.outputs[0]


@pytest.mark.parametrize("environment,sizes", [(LAYER, (10, 12)), (UPSTREAM, (10, 10))], ids=["corrected", "upstream"])
def test_a_training_on_shards_goes_on_to_the_same_weights(run, environment, sizes):
    """From step 3: an epoch's end where that is one, else the window that goes on into the second epoch."""
    name = "on-" + environment.get("MOSS_LOWMEM_CORRECTIONS", "all")
    whole = run(name, {**environment, "MOSS_LOWMEM_SAVE_STEPS": "1", "MOSS_LOWMEM_KEEP": "9"}, sizes=sizes)
    point = whole.folder / "resume" / "step-3"
    going_on = {**environment, "MOSS_LOWMEM_RESUME": str(point)}
    resumed = run(f"{name}-3", going_on, sizes=sizes)
    assert resumed.losses == whole.losses[3:] and resumed.digests == whole.digests
    # Each process's records are its own, and so is their fingerprint.
    assert len({json.loads((point / f"rank-0000{rank}.json").read_text())["records"] for rank in range(2)}) == 2
    other = run(f"{name}-other", going_on, sizes=(sizes[0], sizes[1] + 1), check=False)
    assert "training records or their order are others" in other.outputs[1]
