"""Gradients that are not finite: named and stopped, or left out, with the training exact before and after."""

from __future__ import annotations

import json
import re

import pytest
import torch
from mini import FAMILIES, MiniServer, command_line, inputs_made_once
from poisoned import poisoned_trainer
from ranks import RankServer
from test_resume import HOST, LORA, SAVE_ALL, assert_same_bits, saved_tensors
from test_training_runs import ON

from moss_tts_patches.runtime.nonfinite import NonFiniteGradients

# 10 records in batches of 2, windows of 2: an epoch has 5 micro-batches and 3 steps, the last of half a window.
ARGUMENTS = ("--num-epochs", "2", "--lr-scheduler-type", "linear")
STEPS = 6
# Without the longest-record probe the records are fetched in the loop's order alone.
LAYER = {**ON, "MOSS_LOWMEM_LONGEST_FIRST": "0", "MOSS_LOWMEM_SELF_CHECK": "0"}
SKIP = {"MOSS_LOWMEM_NONFINITE": "skip"}


@pytest.fixture(scope="module")
def server():
    with MiniServer() as running:
        yield running


@pytest.fixture(scope="module")
def trainer(tmp_path_factory):
    return poisoned_trainer(tmp_path_factory.mktemp("poisoned"))


@pytest.fixture(scope="module")
def inputs(tmp_path_factory):
    return inputs_made_once(tmp_path_factory.mktemp("inputs"), records=10, frames=(8, 12))


@pytest.fixture(scope="module")
def train(server, trainer, inputs):
    def run(output, *arguments, family=FAMILIES[0], environment, check=True):
        return server.run(
            family,
            inputs(family),
            output,
            *ARGUMENTS,
            *arguments,
            environment={**LAYER, **environment},
            check=check,
            trainer=trainer,
        )

    return run


def log_of(run) -> tuple[dict[int, dict], list[dict]]:
    """The log's steps by number, the last of each, and its events."""
    lines = [json.loads(line) for line in (run.folder / "lowmem_log.jsonl").read_text().splitlines()]
    return {one["step"]: one for one in lines if "loss" in one}, [one for one in lines if "nonfinite" in one]


def error_of(run) -> str:
    assert run.status != 0 and "Traceback" not in run.output, run.output[-3000:]
    [line] = [line for line in run.output.splitlines() if "[lowmem] error:" in line]
    return line


# -- skip ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("environment", [{}, HOST, LORA], ids=["full", "host", "lora"])
def test_a_step_is_left_out_and_the_training_is_exact_around_it(train, tmp_path, environment):
    """Micro-batch 2 begins step 2. Resumed before, at and after it, the weights are the uninterrupted run's."""
    environment = {**SKIP, "POISON": "2", **environment}
    whole = train(tmp_path / "whole", environment={**environment, **SAVE_ALL})
    rates = [step.rate for step in whole.steps]
    assert [step.number for step in whole.steps] == list(range(1, STEPS + 1))
    assert rates[1] == rates[0] and len(set(rates[1:])) == STEPS - 1  # the schedule stood still once
    steps, events = log_of(whole)
    assert [number for number, one in steps.items() if one.get("skipped")] == [2]
    assert steps[2]["nonfinite_losses"] == 1 and steps[2]["loss"] > 0 and steps[2]["grad_norm"] is None
    assert [(one["nonfinite"], one["step"]) for one in events] == [("left out", 2)]
    tensors = saved_tensors(whole.folder)
    assert all(tensor.isfinite().all() for saved in tensors.values() for tensor in saved.values())
    for step in (1, 2, 4) if environment.get("MOSS_LOWMEM_METHOD") is None and HOST.keys() - environment else (2,):
        point = {"MOSS_LOWMEM_RESUME": str(whole.folder / "resume" / f"step-{step}")}
        resumed = train(tmp_path / f"from-{step}", environment={**environment, **point})
        assert [one.rate for one in resumed.steps] == rates[step:]
        left = {name: saved for name, saved in tensors.items() if step <= 3 or name != sorted(tensors)[0]}
        assert_same_bits(saved_tensors(resumed.folder), left)
        assert set(log_of(resumed)[0]) == set(range(step + 1, STEPS + 1))


def test_control_the_left_out_step_counts(train, tmp_path):
    """Without the poison, or with another step left out, the weights are others."""
    runs = [
        train(tmp_path / str(number), environment={**SKIP, "POISON": poison})
        for number, poison in enumerate(("", "2", "0"))
    ]
    weights = [torch.cat([tensor.reshape(-1) for tensor in run.weights(1).values()]) for run in runs]
    assert not any(torch.equal(weights[a], weights[b]) for a, b in ((0, 1), (0, 2), (1, 2)))


def test_the_first_and_the_last_step(train, tmp_path):
    """Nothing has been updated before; nothing is left to go on with. LoRA looks at its first gradients later."""
    run = train(tmp_path / "out", environment={**SKIP, **LORA, **SAVE_ALL, "POISON": "1,9"})
    assert [number for number, one in log_of(run)[0].items() if one.get("skipped")] == [1, 6]
    resumed = train(
        tmp_path / "again",
        environment={**SKIP, **LORA, "POISON": "9", "MOSS_LOWMEM_RESUME": str(run.folder / "resume" / "step-1")},
    )
    assert_same_bits(saved_tensors(resumed.folder), saved_tensors(run.folder))


# -- stop ------------------------------------------------------------------------------------------------------------


def test_a_stop_names_all_and_leaves_the_last_point(train, tmp_path):
    """After it the same command, without what went wrong, ends where an undisturbed run ends."""
    whole = train(tmp_path / "whole", environment={})
    watch = tmp_path / "watch.txt"
    stopped = train(tmp_path / "out", environment={**SAVE_ALL, "POISON": "3", "WATCH_FILE": str(watch)}, check=False)
    line = error_of(stopped)
    fetched = [int(index) for index in watch.read_text().split()][6:8]  # of micro-batch 3
    places = [f"train.jsonl:{index + 1} id=demo-{index:04d}" for index in fetched]
    assert re.search(r"step 2: .*the loss of micro-batch 2 of 2\. Parameters: .+ and \d+ more\. Records: ", line)
    records = line.split("Records: ")[1].split(". The weights")[0]
    assert [record.split("/")[-1] for record in records.split(", ")] == places
    assert "MOSS_LOWMEM_NONFINITE=skip" in line and "goes on from it" in line
    steps, [event] = log_of(stopped)
    assert list(steps) == [1] and (event["nonfinite"], event["step"]) == ("stopped", 2)
    assert len(event["parameters"]) == 10 < event["parameters_in_all"]
    assert {path.name for path in (tmp_path / "out" / "resume").iterdir()} == {"step-1"}
    assert not list(stopped.folder.glob("checkpoint-*"))
    resumed = train(tmp_path / "out", environment=SAVE_ALL)
    assert [step.number for step in resumed.steps] == list(range(2, STEPS + 1))
    assert_same_bits(saved_tensors(resumed.folder), saved_tensors(whole.folder))


@pytest.mark.parametrize("family", FAMILIES[1:])
def test_every_family_stops_and_skips(train, tmp_path, family):
    """v1.5 looks at its loss by itself: the layer speaks first, and knows more."""
    stopped = train(tmp_path / "stopped", family=family, environment={"POISON": "0"}, check=False)
    assert "the loss of micro-batch 1 of 2" in error_of(stopped) and not stopped.steps
    run = train(tmp_path / "out", family=family, environment={**SKIP, "POISON": "0"})
    assert [step.number for step in run.steps] == list(range(1, STEPS + 1))
    assert run.steps[0].rate != run.steps[1].rate
    assert [number for number, one in log_of(run)[0].items() if one.get("skipped")] == [1]


@pytest.mark.parametrize("clipping", ["1.0", "0"])
def test_a_gradient_that_goes_wrong_in_the_backward(train, tmp_path, clipping):
    """Every loss is good. Without clipping the gradients are looked at all the same."""
    environment = {"POISON": "2", "POISON_WHERE": "backward"}
    stopped = train(tmp_path / "out", "--max-grad-norm", clipping, environment=environment, check=False)
    line = error_of(stopped)
    assert "backward, every loss of the 2 micro-batches on this process is finite" in line
    assert len(line.split("Records: ")[1].split(". The weights")[0].split(", ")) == 4
    assert [step.number for step in stopped.steps] == [1]
    run = train(tmp_path / "skip", "--max-grad-norm", clipping, environment={**SKIP, **environment})
    steps, _ = log_of(run)
    assert steps[2]["skipped"] and "nonfinite_losses" not in steps[2] and steps[1]["grad_norm"] > 0


def test_all_processes_decide_alike(trainer, inputs, tmp_path):
    """Only process 1 sees a bad loss: both leave the step out, and stop by themselves."""
    family = FAMILIES[0]
    environment = {**LAYER, "POISON": "1", "POISON_RANK": "1"}
    arguments = (*command_line(inputs(family), tmp_path / "unused"), *ARGUMENTS)
    with RankServer() as ranks:

        def run(name, **variables):
            return ranks.run(
                f"{family}/finetuning/sft.py",
                arguments,
                tmp_path / name,
                folder=trainer,
                environment={**environment, **variables},
                check=False,
            )

        skipped, stopped, plain = run("skip", **SKIP), run("stop"), run("plain", **SKIP, POISON="")
    assert list(skipped.statuses) == [0, 0], skipped.outputs
    assert skipped.digests[0] == skipped.digests[1] != plain.digests[0]
    assert "nonfinite=left_out step 1" in skipped.outputs[0] and skipped.rates[0] != skipped.rates[1]
    assert all(stopped.statuses) and "the loss of micro-batch 2 of 2" in stopped.outputs[1]
    assert "every loss of the 2 micro-batches on this process is finite" in stopped.outputs[0]


# -- pieces ----------------------------------------------------------------------------------------------------------


def test_a_norm_may_be_too_large_by_itself():
    watch = NonFiniteGradients("stop", str)
    watch.micro_batch(torch.tensor(1.0), [3])
    finding = watch.find(7, torch.tensor(float("inf")), [])
    assert "none by itself: their norm is too large for float32. Records: 3" in finding.describe()
    watch.window_done()
    assert watch.find(8, torch.tensor(float("inf")), ["a"]).records == []
    assert "would let it go on" in str(watch.stop(finding, saves=False))
