"""Trainings with validation records: what is found and kept, and that the training itself stays the same to the bit."""

from __future__ import annotations

import functools
import importlib
import json
import random
import shutil
import signal
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from mini import FAMILIES, MINI, MiniServer, command_line, make_mini_inputs, write_shards
from mini_moss_tts.demo_models import family_classes
from ranks import EXACT, LAYER, RankServer
from safetensors.torch import load_file
from small_families import SMALL
from test_resume import HOST, LORA, assert_same_bits, changed_point, lines, saved_tensors
from test_training_runs import ON, changed_trainer
from tolerances import TOLERANCES

from moss_tts_patches.runtime.progress import read_log
from moss_tts_patches.runtime.validation.evaluation import evaluation_mode

# 10 records in batches of 2, windows of 2: an epoch has 3 steps.
EPOCHS = ("--num-epochs", "2")
TRAINED, VALIDATED = 10, 5
# Steps so large that the loss rises: what is best comes early, and is not found again later.
RISING = ("--learning-rate", "0.1", "--warmup-ratio", "0", "--lr-scheduler-type", "constant")
DATASETS = {
    "moss_tts_local": ("SpeechDataset", "FramePrompts"),
    "moss_tts_delay": ("SpeechDataset", "DelayedPrompts"),
    "moss_tts_local_v1.5": ("NamedSpeechDataset", "FramePrompts"),
    "moss_tts_realtime": ("ChatDataset", "ChatPrompts"),
}


@pytest.fixture(scope="module")
def server():
    with MiniServer() as running:
        yield running


@pytest.fixture(scope="module")
def inputs(tmp_path_factory):
    """Each family's checkpoint and both files; the folder's name is the key of transformers' cache of code."""
    root = tmp_path_factory.mktemp("inputs")

    @functools.cache
    def of(family: str) -> Path:
        folder = root / f"{family.replace('.', '_')}_validation"
        make_mini_inputs(folder, records=TRAINED + VALIDATED, frames=(8, 16), family=family)
        text = (folder / "train.jsonl").read_text().splitlines(keepends=True)
        (folder / "train.jsonl").write_text("".join(text[:TRAINED]))
        (folder / "valid.jsonl").write_text("".join(text[TRAINED:]))
        return folder

    return of


@pytest.fixture(scope="module")
def train(server, inputs, tmp_path_factory):
    """Runs a family's trainer, each training once."""
    root = tmp_path_factory.mktemp("runs")

    @functools.cache
    def run(family: str, options: tuple[str, ...] = EPOCHS, **settings: str) -> Any:
        output = root / str(len(list(root.iterdir())))
        environment = {**ON, **{f"MOSS_LOWMEM_{name}": value for name, value in settings.items()}}
        return server.run(family, inputs(family), output, *options, environment=environment)

    return run


def valid(inputs: Path, **settings: str) -> dict[str, str]:
    return {"VALID_JSONL": str(inputs / "valid.jsonl"), **settings}


def evaluations(folder: Path) -> list[dict[str, Any]]:
    found = [json.loads(line) for line in (folder / "lowmem_log.jsonl").read_text().splitlines()]
    return [values for values in found if "valid_loss" in values]


def trainers_loss(family: str, inputs: Path, checkpoint: Path, weights: list[float] | None) -> float:
    """The trainer's own loss in evaluation mode, of all validation records in one batch, without the layer."""
    model = family_classes(family)[0].from_pretrained(checkpoint)
    with_code = [str(MINI)]
    sys.path[:0] = with_code
    try:
        records = importlib.import_module("mini_trainer.records")
        prompts = importlib.import_module("mini_trainer.prompts")
        from transformers import PreTrainedTokenizerFast

        dataset_class, prompts_class = DATASETS[family]
        tokenizer = PreTrainedTokenizerFast.from_pretrained(inputs)
        middle = () if family == "moss_tts_realtime" else (None,)
        processor = getattr(prompts, prompts_class)(tokenizer, *middle, model.config)
        lines = (inputs / "valid.jsonl").read_text().splitlines()
        dataset = getattr(records, dataset_class)([json.loads(line) for line in lines], processor)
        batch = dataset.collate_fn([dataset[index] for index in range(len(lines))])
    finally:
        sys.path.remove(*with_code)
    batch.pop("record_ids", None)
    if family != "moss_tts_realtime":
        batch["channelwise_loss_weight"] = weights
    loss = SMALL[family].loss if family in SMALL else lambda model, **batch: model(**batch).loss
    with torch.no_grad(), evaluation_mode(model):
        return loss(model, **batch).item()


WEIGHTS = [1.0, 8.0, 8.0, 8.0, 8.0]


@pytest.mark.parametrize("family", FAMILIES)
def test_the_loss_is_the_trainers_own_and_the_training_stays_as_it_is(train, inputs, family):
    plain = train(family)
    ours = train(family, **valid(inputs(family), VALID_STEPS="2"))
    assert ours.losses == plain.losses
    assert_same_bits(saved_tensors(ours.folder), saved_tensors(plain.folder))
    found = evaluations(ours.folder)
    # Every second step, and before each of the trainer's checkpoints, which come after steps 3 and 6.
    assert [values["step"] for values in found] == [2, 3, 4, 6]
    assert all(values["records"] == VALIDATED and len(values["valid_loss_by_codebook"]) >= 4 for values in found)
    first, last = ours.checkpoint(0 if family != "moss_tts_local_v1.5" else 1), sorted(ours.folder.glob("check*"))[-1]
    for values, checkpoint in ((found[1], first), (found[3], last)):
        expected = trainers_loss(family, inputs(family), checkpoint, WEIGHTS)
        assert values["valid_loss"] == pytest.approx(expected, rel=TOLERANCES["loss_fp32_relative"])
    # Negative control: other weights have another loss.
    assert abs(found[0]["valid_loss"] / found[3]["valid_loss"] - 1) > 100 * TOLERANCES["loss_fp32_relative"]
    assert [values["step"] for values in read_log(ours.folder / "lowmem_log.jsonl").steps] == [1, 2, 3, 4, 5, 6]


@pytest.mark.parametrize("family", FAMILIES)
def test_best_holds_the_weights_with_the_lowest_loss(train, inputs, family):
    ours = train(family, EPOCHS, **valid(inputs(family), VALID_STEPS="2"))
    lowest = min(evaluations(ours.folder), key=lambda values: values["valid_loss"])
    best = ours.folder / "best"
    assert best.is_symlink() and best.resolve().name == f"best-step-{lowest['step']}"
    assert [path.name for path in ours.folder.glob("best-step-*")] == [best.resolve().name]
    checkpoint = sorted(ours.folder.glob("checkpoint-*"))[-1]
    assert {path.name for path in best.iterdir()} == {path.name for path in checkpoint.iterdir()}
    if lowest["step"] == 6:
        assert (best / "model.safetensors").read_bytes() == (checkpoint / "model.safetensors").read_bytes()
    expected = trainers_loss(family, inputs(family), best, WEIGHTS)
    assert lowest["valid_loss"] == pytest.approx(expected, rel=TOLERANCES["loss_fp32_relative"])
    saved = json.loads((best / "finetune_args.json").read_text())
    assert (saved["best_step"], saved["best_validation_loss"]) == (lowest["step"], lowest["valid_loss"])


@pytest.mark.parametrize("family", ["moss_tts_local", "moss_tts_realtime"])
def test_with_dropout_adapters_and_everything_in_host_memory(train, inputs, family):
    """Dropout draws from the generators, so that a number drawn by an evaluation would show in the next step."""
    settings = {name.removeprefix("MOSS_LOWMEM_"): value for name, value in {**LORA, **HOST}.items()}
    settings["WEIGHTS"] = "host"
    plain = train(family, **settings)
    ours = train(family, **settings, **valid(inputs(family), VALID_STEPS="1"))
    assert "weights=host" in ours.output
    assert ours.losses == plain.losses
    assert_same_bits(saved_tensors(ours.folder), saved_tensors(plain.folder))
    best = ours.folder / "best"
    lowest = min(evaluations(ours.folder), key=lambda values: values["valid_loss"])["step"]
    assert best.resolve().name == f"best-step-{lowest}" and (best / "adapter_config.json").exists()
    assert json.loads((best / "lowmem.json").read_text())["steps"] == lowest
    if lowest == 6:
        last = ours.folder / "checkpoint-epoch-1" / "adapter_model.safetensors"
        assert (best / "adapter_model.safetensors").read_bytes() == last.read_bytes()


def test_best_can_be_left_out_and_only_checkpoints_be_evaluated(train, inputs):
    family = FAMILIES[0]
    ours = train(family, **valid(inputs(family), VALID_BEST="0"))
    assert [values["step"] for values in evaluations(ours.folder)] == [3, 6]
    assert not list(ours.folder.glob("best*"))


def test_a_share_is_held_out_of_the_training(train, inputs, server, tmp_path):
    """As if the records that are left had been the file, and the others the validation file."""
    family = FAMILIES[0]
    shared = train(family, VALID_SHARE="0.2")
    assert lines(shared, "held_out=2 for validation, trained_on=8")
    [one, two] = [values["records"] for values in evaluations(shared.folder)]
    assert one == two == 2
    data = Path(shutil.copytree(inputs(family), tmp_path / "local_share"))
    records = (data / "train.jsonl").read_text().splitlines(keepends=True)
    held = sorted(random.Random("validation 42").sample(range(TRAINED), 2))
    (data / "train.jsonl").write_text("".join(line for index, line in enumerate(records) if index not in held))
    (data / "valid.jsonl").write_text("".join(records[index] for index in held))
    environment = {**ON, "MOSS_LOWMEM_VALID_JSONL": str(data / "valid.jsonl")}
    apart = server.run(family, data, tmp_path / "out", *EPOCHS, environment=environment)
    assert apart.losses == shared.losses
    found, expected = evaluations(apart.folder), evaluations(shared.folder)
    assert [values["valid_loss"] for values in found] == [values["valid_loss"] for values in expected]


@pytest.mark.parametrize("settings,message", [
    ({"VALID_JSONL": "none.jsonl"}, "none.jsonl not found"),
    ({"VALID_JSONL": "FAULTY"}, r"faulty.jsonl:2 id=demo-\d+ shape"),
    ({"VALID_STEPS": "3"}, "no records to evaluate"),
])  # fmt: skip
def test_what_cannot_be_evaluated_stops_the_run_before_the_model_loads(inputs, server, tmp_path, settings, message):
    faulty = tmp_path / "faulty.jsonl"
    records = [json.loads(line) for line in (inputs(FAMILIES[0]) / "valid.jsonl").read_text().splitlines()]
    records[1]["audio_codes"][0] = [1]
    faulty.write_text("".join(json.dumps(record) + "\n" for record in records))
    environment = {f"MOSS_LOWMEM_{n}": str(faulty) if v == "FAULTY" else v for n, v in settings.items()}
    refused = server.run(
        FAMILIES[0], inputs(FAMILIES[0]), tmp_path / "out", environment={**ON, **environment}, check=False
    )
    assert refused.status != 0 and "Loading weights" not in refused.output and "Traceback" not in refused.output
    assert lines(refused, message), refused.output[-2000:]


# -- resume -----------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def rising(server, inputs, tmp_path_factory):
    """A training whose validation loss is lowest early, with a point at every step; and what goes on from a point."""
    family, root = FAMILIES[0], tmp_path_factory.mktemp("rising")
    settings = {"MOSS_LOWMEM_SAVE_STEPS": "1", "MOSS_LOWMEM_KEEP": "99", "MOSS_LOWMEM_VALID_STEPS": "1"}
    environment = {**ON, **settings, "MOSS_LOWMEM_VALID_JSONL": str(inputs(family) / "valid.jsonl")}
    whole = server.run(family, inputs(family), root / "whole", *EPOCHS, *RISING, environment=environment)

    def go_on(point: Path, output: Path) -> Any:
        return server.run(
            family,
            inputs(family),
            output,
            *EPOCHS,
            *RISING,
            environment={**environment, "MOSS_LOWMEM_RESUME": str(point)},
        )

    return whole, go_on


@pytest.mark.parametrize("step", [1, 3, 4])
def test_a_resumed_run_decides_as_the_uninterrupted_one(rising, tmp_path, step):
    whole, go_on = rising
    found = evaluations(whole.folder)
    lowest = min(found, key=lambda values: values["valid_loss"])["step"]
    assert lowest < 4
    resumed = go_on(whole.folder / "resume" / f"step-{step}", tmp_path / "out")
    again = evaluations(resumed.folder)
    # Nothing is evaluated while finished steps pass.
    assert [values["step"] for values in again] == list(range(step + 1, 7))
    assert [values["valid_loss"] for values in again] == [values["valid_loss"] for values in found[step:]]
    best = resumed.folder / "best"
    assert best.exists() == (lowest > step)
    if lowest > step:
        assert best.resolve().name == f"best-step-{lowest}"
        assert (best / "model.safetensors").read_bytes() == (whole.folder / "best/model.safetensors").read_bytes()
    else:
        assert lines(resumed, f"best weights at step {lowest}, and the output folder has none")


def test_control_a_point_that_does_not_know_takes_another_for_the_best(rising, tmp_path):
    whole, go_on = rising
    point = changed_point(
        whole.folder / "resume" / "step-4", tmp_path / "step-4", point=lambda values: values.pop("validation")
    )
    resumed = go_on(point, tmp_path / "out")
    assert [values["step"] for values in evaluations(resumed.folder)] == [5, 6]
    assert (resumed.folder / "best").exists()  # which the run that knew did not write


STOPPING = """
import os as _os
import signal as _signal

_collate = MossTTSSFTDataset.collate_fn


def _count(self, items):
    with open(_os.environ["WATCH_FILE"], "a") as file:
        print(len(self.records), file=file)
    with open(_os.environ["WATCH_FILE"]) as file:
        if len(file.readlines()) == int(_os.environ.get("STOP_AT", "0")):
            _os.kill(_os.getpid(), _signal.SIGTERM)
    return _collate(self, items)


MossTTSSFTDataset.collate_fn = _count


def main() -> None:
"""


def test_a_signal_during_an_evaluation_ends_it_and_the_resumed_run_makes_it_up(server, inputs, tmp_path):
    family = FAMILIES[0]
    trainer = changed_trainer(tmp_path, "finetuning/sft.py", "def main() -> None:\n", STOPPING)
    common = {
        **ON,
        "MOSS_LOWMEM_VALID_JSONL": str(inputs(family) / "valid.jsonl"),
        "MOSS_LOWMEM_VALID_STEPS": "2",
        "MOSS_LOWMEM_SAVE_MINUTES": "600",
        "MOSS_LOWMEM_LONGEST_FIRST": "0",
    }

    def run(name: str, output: str, **more: str) -> Any:
        environment = {**common, "WATCH_FILE": str(tmp_path / f"{name}.txt"), **more}
        return server.run(
            family, inputs(family), tmp_path / output, *EPOCHS, environment=environment, trainer=trainer, check=False
        )

    whole = run("whole", "whole")
    # Batches 1 to 4 are trained on, with one more fetched ahead; the evaluation at step 2 has batches 6 to 8.
    stopped = run("stopped", "out", STOP_AT="6")
    assert stopped.status == 128 + signal.SIGTERM and lines(stopped, "stopped after step 2"), stopped.output[-2000:]
    assert evaluations(tmp_path / "out") == []
    resumed = run("resumed", "out")
    assert resumed.status == 0, resumed.output[-2000:]
    found, expected = evaluations(tmp_path / "out"), evaluations(tmp_path / "whole")
    pick = [(values["step"], values["valid_loss"]) for values in found]
    assert pick == [(values["step"], values["valid_loss"]) for values in expected] and len(pick) == 4
    assert_same_bits(saved_tensors(resumed.folder), saved_tensors(whole.folder))


# -- several processes ------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def ranks():
    with RankServer() as running:
        yield running


@pytest.mark.parametrize("family", FAMILIES)
def test_two_processes_share_an_odd_number_of_batches(ranks, inputs, tmp_path, family):
    """5 records in batches of 2: two batches for one process, one for the other."""
    settings = {**LAYER, **EXACT, "MOSS_LOWMEM_VALID_JSONL": str(inputs(family) / "valid.jsonl")}
    arguments = command_line(inputs(family), tmp_path / "out", *EPOCHS)
    done = ranks.run(
        f"{family}/finetuning/sft.py",
        arguments,
        tmp_path / "out",
        folder=MINI,
        environment={**settings, "MOSS_LOWMEM_VALID_STEPS": "1"},
    )
    assert done.digests[0] == done.digests[1]
    found = evaluations(done.folder)
    assert [values["records"] for values in found] == [VALIDATED] * len(found)
    last = sorted(done.folder.glob("checkpoint-*"))[-1]
    expected = trainers_loss(family, inputs(family), last, WEIGHTS)
    assert found[-1]["valid_loss"] == pytest.approx(expected, rel=TOLERANCES["loss_fp32_relative"])
    lowest = min(found, key=lambda values: values["valid_loss"])["step"]
    assert (done.folder / "best").resolve().name == f"best-step-{lowest}"
    assert {path.name for path in done.folder.glob("best*")} == {"best", f"best-step-{lowest}"}


def test_shards_give_each_process_records_of_its_own(ranks, inputs, tmp_path):
    family = FAMILIES[0]
    data = Path(shutil.copytree(inputs(family), tmp_path / "local_shards"))
    records = (data / "train.jsonl").read_text().splitlines(keepends=True)
    shards = write_shards(tmp_path / "shards", (records[:4], records[4:]))
    arguments = [*command_line(data, tmp_path / "out"), "--train-jsonl", str(shards)]
    # One process has a batch less, so that the number of steps has to be said.
    arguments += ["--gradient-accumulation-steps", "1", "--max-train-steps", "1"]
    done = ranks.run(
        f"{family}/finetuning/sft.py",
        arguments,
        tmp_path / "out",
        folder=MINI,
        environment={**LAYER, "MOSS_LOWMEM_VALID_SHARE": "0.5", "MOSS_LOWMEM_VALID_STEPS": "1"},
    )
    # 2 of the 4 records of one, 3 of the 6 of the other; the one with a batch less repeats one that does not count.
    assert {values["records"] for values in evaluations(done.folder)} == {5}
    assert load_file(done.folder / "best" / "model.safetensors")
