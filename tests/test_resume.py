"""A training that was interrupted and goes on: the same records in the same order, and the same weights to the bit."""

from __future__ import annotations

import json
import re
import shutil
import signal
from pathlib import Path

import pytest
import torch
from mini import FAMILIES, MiniServer, inputs_made_once, make_mini_inputs
from safetensors.torch import load_file
from test_training_runs import ON, changed_trainer

# 10 records in batches of 2, windows of 2: an epoch has 5 micro-batches and 3 steps, the last of half a window.
ARGUMENTS = ("--num-epochs", "2")
STEPS, MICRO_BATCHES_OF_EPOCH = 6, 5
LORA = {
    "MOSS_LOWMEM_METHOD": "lora",
    "MOSS_LOWMEM_LORA_RANK": "2",
    "MOSS_LOWMEM_LORA_DROPOUT": "0.3",
    "MOSS_LOWMEM_MERGE": "none",
}
QLORA = {**LORA, "MOSS_LOWMEM_METHOD": "qlora"}
HOST = {"MOSS_LOWMEM_GRADIENTS": "host", "MOSS_LOWMEM_STATES": "host"}
SAVE_ALL = {"MOSS_LOWMEM_SAVE_STEPS": "1", "MOSS_LOWMEM_KEEP": "99"}

# Writes down every record that is fetched and every micro-batch that is trained on, and stops where it is told to.
WATCHED = """
import os as _os
import signal as _signal

_trained = [0]


def _note(kind, *what):
    with open(_os.environ["WATCH_FILE"], "a") as file:
        print(kind, *what, file=file)


class _WatchedDataset(MossTTSSFTDataset):
    def __getitem__(self, index):
        _note("fetch", index)
        return super().__getitem__(index)


_train_micro_batch = train_micro_batch


def train_micro_batch(accelerator, model, batch, *rest):
    if batch["input_ids"].shape[1] > 1:
        _note("train", *batch["input_ids"].double().sum(dim=(1, 2)).tolist())
        _trained[0] += 1
        if _os.environ.get("STOP_AT") == str(_trained[0]):
            _os.kill(_os.getpid(), int(_os.environ["STOP_WITH"]))
    return _train_micro_batch(accelerator, model, batch, *rest)


def main() -> None:
"""


@pytest.fixture(scope="module")
def server():
    with MiniServer() as running:
        yield running


@pytest.fixture(scope="module")
def inputs(tmp_path_factory):
    """A function that makes a family's inputs once."""
    return inputs_made_once(tmp_path_factory.mktemp("inputs"), records=10, frames=(8, 12))


@pytest.fixture(scope="module")
def watched(tmp_path_factory):
    """A miniature of moss_tts_local that writes down what it does."""
    trainer = changed_trainer(tmp_path_factory.mktemp("watched"), "finetuning/sft.py", "def main() -> None:\n", WATCHED)
    script = trainer / "moss_tts_local" / "finetuning" / "sft.py"
    script.write_text(script.read_text().replace("dataset = MossTTSSFTDataset(", "dataset = _WatchedDataset("))
    return trainer


def saved_tensors(folder: Path) -> dict[str, dict[str, torch.Tensor]]:
    """Every checkpoint's tensors, by its name."""
    return {
        path.parent.name: load_file(path)
        for path in sorted(folder.glob("checkpoint-*/*.safetensors"))
        if path.name in ("model.safetensors", "adapter_model.safetensors")
    }


def assert_same_bits(found: dict[str, dict[str, torch.Tensor]], expected: dict[str, dict[str, torch.Tensor]]) -> None:
    assert found.keys() == expected.keys() and expected
    for name, tensors in expected.items():
        assert found[name].keys() == tensors.keys()
        different = [key for key in tensors if not torch.equal(found[name][key], tensors[key])]
        assert not different, (name, different[:5], len(different))


def events(path: Path, kind: str) -> list[str]:
    return [line for line in path.read_text().splitlines() if line.startswith(kind)]


def lines(run, pattern: str) -> list[str]:
    return [line for line in run.output.splitlines() if re.search(pattern, line)]


@pytest.mark.parametrize(
    "family,environment",
    # The miniature of delay is wide enough for blocks of 64 in 4 bit.
    [(family, {}) for family in FAMILIES] + [("moss_tts_local", {**LORA, **HOST}), ("moss_tts_delay", QLORA)],
    ids=lambda value: value if isinstance(value, str) else value.get("MOSS_LOWMEM_METHOD", "full"),
)
def test_weights_are_bit_equal_from_every_step(server, inputs, tmp_path, family, environment):
    """Mid-epoch, at the end of an epoch, and at the very end; every checkpoint that is still to come is the same."""
    environment = {**ON, **environment}
    run = [server, family, inputs(family)]
    whole = _run(run, tmp_path / "whole", environment=environment)
    saving = _run(run, tmp_path / "saving", environment={**environment, **SAVE_ALL})
    expected = saved_tensors(whole.folder)
    assert_same_bits(saved_tensors(saving.folder), expected)
    for step in (2, 3, 4, STEPS) if (family, environment) == ("moss_tts_local", ON) else (4,):
        point = saving.folder / "resume" / f"step-{step}"
        resumed = _run(run, tmp_path / f"from-{step}", environment={**environment, "MOSS_LOWMEM_RESUME": str(point)})
        assert [s.number for s in resumed.steps] == list(range(step + 1, STEPS + 1))
        assert resumed.losses == whole.losses[step:]
        assert len(lines(resumed, "had come to its end .*nothing is trained now")) == (step == STEPS)
        assert [s.rate for s in resumed.steps] == [s.rate for s in whole.steps[step:]]
        # A checkpoint of an epoch before the point is not written again.
        left = {name: tensors for name, tensors in expected.items() if step <= 3 or name != sorted(expected)[0]}
        assert_same_bits(saved_tensors(resumed.folder), left)


def test_a_loss_scaler_goes_on_where_it_was(server, inputs, tmp_path):
    """accelerate makes one on GPUs only; here it doubles its scale every second step, which changes no weight."""
    seed, end = "    set_seed(args.seed, device_specific=True)\n", "    say_peak(accelerator)\n"
    scaler = '    accelerator.scaler = torch.amp.GradScaler("cpu", init_scale=1024.0, growth_interval=2)\n'
    trainer = changed_trainer(tmp_path, "finetuning/sft.py", seed, seed + scaler)
    script = trainer / "moss_tts_local" / "finetuning" / "sft.py"
    script.write_text(script.read_text().replace(end, '    print("SCALER", accelerator.scaler.state_dict())\n' + end))
    run = [server, "moss_tts_local", inputs("moss_tts_local")]
    arguments = ("--max-grad-norm", "0")
    environment = {**ON, **LORA, "MOSS_LOWMEM_GRADIENTS": "device"}
    saving = _run(run, tmp_path / "saving", *arguments, environment={**environment, **SAVE_ALL}, trainer=trainer)
    [state] = lines(saving, "SCALER")
    assert "'scale': 8192.0" in state and "'_growth_tracker': 0" in state
    point = saving.folder / "resume" / "step-3"  # in the middle of two steps
    saved = json.loads((point / "point.json").read_text())["scaler"]
    assert (saved["scale"], saved["_growth_tracker"]) == (2048.0, 1)
    forgetful = changed_point(point, tmp_path / "step-3", point=lambda values: values.update(scaler=None))
    for number, origin in enumerate((point, forgetful)):
        going_on = {**environment, "MOSS_LOWMEM_RESUME": str(origin)}
        resumed = _run(run, tmp_path / f"{number}", *arguments, environment=going_on, trainer=trainer)
        assert (lines(resumed, "SCALER") == [state]) == (origin == point)  # the other one is the control
        assert resumed.losses == saving.losses[3:]


def _run(run, output, *arguments, environment, **options):
    server, family, inputs = run
    return server.run(family, inputs, output, *ARGUMENTS, *arguments, environment=environment, **options)


@pytest.mark.parametrize("method,workers", [("full", 2), ("lora", 0), ("bf16", 0)])
def test_stopped_in_the_middle_of_a_window(server, inputs, watched, tmp_path, method, workers):
    """A signal in the first half of the second window: it is run again, and no record is fetched that was done."""
    trainer = _bf16_watched(watched, tmp_path) if method == "bf16" else watched
    common = {**ON, **(LORA if method == "lora" else {}), "MOSS_LOWMEM_LONGEST_FIRST": "0"}
    arguments = ("--num-workers", str(workers))
    run = [server, "moss_tts_local", inputs("moss_tts_local")]
    files = {name: tmp_path / f"{name}.txt" for name in ("whole", "stopped", "resumed")}
    whole = _run(
        run, tmp_path / "whole", *arguments, environment={**common, "WATCH_FILE": str(files["whole"])}, trainer=trainer
    )
    saving = {**common, "MOSS_LOWMEM_SAVE_MINUTES": "600"}
    stop = {"STOP_AT": "8", "STOP_WITH": str(int(signal.SIGTERM)), "WATCH_FILE": str(files["stopped"])}
    stopped = _run(run, tmp_path / "out", *arguments, environment={**saving, **stop}, trainer=trainer, check=False)
    assert stopped.status == 143, stopped.output[-2000:]
    [line] = lines(stopped, "stopped after step 4")
    point = stopped.folder.resolve() / "resume" / "step-4"
    assert "MOSS_LOWMEM_RESUME=auto" in line and f"(the point is {point})" in line
    resumed = _run(
        run, tmp_path / "out", *arguments, environment={**saving, "WATCH_FILE": str(files["resumed"])}, trainer=trainer
    )
    assert lines(resumed, "resume replayed=7 micro-batches")
    assert_same_bits(saved_tensors(resumed.folder), saved_tensors(whole.folder))
    # Trained micro-batches 0 to 7, and again from 7 on: the second window of epoch 1 began there.
    done, again, expected = (events(files[name], "train") for name in ("stopped", "resumed", "whole"))
    assert done == expected[:8] and again == expected[7:]
    assert len(set(expected[:5])) == len(set(expected[5:])) == 5 and expected[:5] != expected[5:]
    fetched = events(files["resumed"], "fetch")
    assert len(fetched) == len(set(fetched)) == 2 * len(again)
    if not workers:  # they fetch in no order of their own
        assert fetched == events(files["whole"], "fetch")[14:]


def _bf16_watched(watched: Path, tmp_path: Path) -> Path:
    trainer = tmp_path / "trainer"
    shutil.copytree(watched, trainer)
    script = trainer / "moss_tts_local" / "finetuning" / "sft.py"
    text = script.read_text()
    assert text.count("dtype = resolve_torch_dtype(args.mixed_precision)") == 1
    script.write_text(text.replace("dtype = resolve_torch_dtype(args.mixed_precision)", "dtype = torch.bfloat16"))
    return trainer


@pytest.fixture(scope="module")
def saved(server, inputs, tmp_path_factory):
    """A run of moss_tts_local with LoRA, dropout included, that kept every point."""
    folder = tmp_path_factory.mktemp("saved")
    run = [server, "moss_tts_local", inputs("moss_tts_local")]
    return run, _run(run, folder / "out", environment={**ON, **LORA, **SAVE_ALL})


def changed_point(original: Path, target: Path, **changes) -> Path:
    """A copy of a point with other values in one of its files."""
    shutil.copytree(original, target)
    for name, change in changes.items():
        path = target / f"{name.replace('_', '-')}.json"
        values = json.loads(path.read_text())
        change(values)
        path.write_text(json.dumps(values))
    manifest = json.loads((target / "point.json").read_text())
    manifest["files"] = {name: (target / name).stat().st_size for name in manifest["files"]}
    (target / "point.json").write_text(json.dumps(manifest))
    return target


@pytest.mark.parametrize("what", ["random", "epoch_start", "states", "scheduler", "nothing"])
def test_control_each_part_of_a_point_is_needed(saved, tmp_path, what):
    """With one part of another step the weights differ; with none, they do not."""
    run, whole = saved
    points = {step: whole.folder / "resume" / f"step-{step}" for step in (3, 4)}
    other = json.loads((points[3] / "rank-00000.json").read_text())

    def rank(values):
        values.update({what: other[what]} if what in other else {})

    def manifest(values):
        if what == "scheduler":
            values["scheduler"]["last_epoch"] = 2
        if what == "states":
            values["optimizer"]["steps"] = dict.fromkeys(values["optimizer"]["steps"], 40)

    point = changed_point(points[4], tmp_path / "step-4", rank_00000=rank, point=manifest)
    resumed = _run(run, tmp_path / "out", environment={**ON, **LORA, "MOSS_LOWMEM_RESUME": str(point)})
    last = "checkpoint-epoch-1"
    found, expected = saved_tensors(resumed.folder)[last], saved_tensors(whole.folder)[last]
    assert all(torch.equal(found[name], expected[name]) for name in expected) == (what == "nothing")


def test_a_replay_is_silent_and_rewrites_nothing(saved, tmp_path):
    run, whole = saved
    shutil.copytree(whole.folder, tmp_path / "out")
    before = (tmp_path / "out" / "checkpoint-epoch-0" / "adapter_model.safetensors").stat()
    resumed = _run(
        run, tmp_path / "out", environment={**ON, **LORA, "MOSS_LOWMEM_RESUME": str(whole.folder / "resume" / "step-5")}
    )
    after = (tmp_path / "out" / "checkpoint-epoch-0" / "adapter_model.safetensors").stat()
    assert (before.st_ino, before.st_mtime_ns) == (after.st_ino, after.st_mtime_ns)
    assert [step.number for step in resumed.steps] == [6]
    assert not lines(resumed, "Warning|is not there")
    # Without the folder, that is said.
    resumed = _run(
        run, tmp_path / "other", environment={**ON, **LORA, "MOSS_LOWMEM_RESUME": str(whole.folder / "resume")}
    )
    assert lines(resumed, "checkpoint-epoch-0 is not there and cannot be written")


def test_the_newest_is_found_and_off_starts_anew(saved, tmp_path):
    run, whole = saved
    shutil.copytree(whole.folder / "resume", tmp_path / "out" / "resume")
    (tmp_path / "out" / "resume" / "step-6" / "weights.safetensors").write_bytes(b"torn")
    resumed = _run(run, tmp_path / "out", environment={**ON, **LORA})
    assert lines(resumed, r"passed_over: .*step-6: weights.safetensors has 4 bytes, expected \d+")
    assert [step.number for step in resumed.steps] == [6]
    anew = _run(run, tmp_path / "out", environment={**ON, **LORA, "MOSS_LOWMEM_RESUME": "off"})
    assert anew.losses == whole.losses


@pytest.mark.parametrize(
    "environment,arguments,message",
    [
        ({}, (), "method: saved lora, now full"),
        ({**LORA, "MOSS_LOWMEM_LORA_RANK": "3"}, (), "of another shape or dtype: .*expected \\(3, "),
        ({**LORA, "MOSS_LOWMEM_LORA_ALPHA": "64"}, (), "count by another factor .lora_alpha: saved 32, now 64"),
        ({**LORA, "MOSS_LOWMEM_LORA_RSLORA": "1"}, (), "use_rslora: saved False, now True"),
        ({**LORA, "MOSS_LOWMEM_OPTIMIZER": "adamw"}, (), "states are AdamW8bit's, and this run uses AdamW"),
        (LORA, ("--per-device-batch-size", "1"), "per_device_batch_size: saved 2, now 1"),
        (LORA, ("--max-train-steps", "3"), "after the end that --max-train-steps 3"),
        (LORA, ("--train-jsonl", "OTHER"), "training records or their order are others"),
        (LORA, ("--model-path", "OTHER"), "config or frozen weights are others"),
    ],
)
def test_a_point_of_another_training_is_refused(saved, inputs, tmp_path, environment, arguments, message):
    run, whole = saved
    other = make_mini_inputs(tmp_path / "inputs", records=10, frames=(8, 12), seed=1)
    places = {"--train-jsonl": str(other / "train.jsonl"), "--model-path": str(other)}
    arguments = [
        places.get(before, value) if value == "OTHER" else value for before, value in zip(("", *arguments), arguments)
    ]
    point = str(whole.folder / "resume" / "step-4")
    refused = _run(
        run, tmp_path / "out", *arguments, environment={**ON, **environment, "MOSS_LOWMEM_RESUME": point}, check=False
    )
    assert refused.status != 0 and "Traceback" not in refused.output
    [line] = lines(refused, r"\[lowmem\] error: ")
    assert re.search(message, line) and "MOSS_LOWMEM_RESUME=off" in line, line
    assert not refused.steps


def test_another_base_under_the_same_config_is_refused(server, inputs, tmp_path):
    """With all weights trained the point would replace them, and go on with the old base without a word."""
    run = [server, "moss_tts_local", inputs("moss_tts_local")]
    one_step = ("--max-train-steps", "1", "--warmup-ratio", "0")
    environment = {**ON, "MOSS_LOWMEM_SAVE_STEPS": "1"}
    whole = server.run(*run[1:], tmp_path / "out", *one_step, environment=environment)
    other = shutil.copytree(run[2], tmp_path / "other")
    shutil.copy(whole.checkpoint() / "model.safetensors", other)
    refused, moved = (
        server.run(*run[1:], tmp_path / "out", "--model-path", str(path), environment=environment, check=False)
        for path in (other, shutil.copytree(run[2], tmp_path / "moved"))
    )
    assert refused.status != 0 and not refused.steps
    assert lines(refused, r"error: resume point .*it began with other weights \(--model-path\)")
    assert moved.status == 0 and [step.number for step in moved.steps] == [2, 3]


def test_settings_that_change_the_numbers_are_mentioned(saved, tmp_path):
    run, whole = saved
    changed = {"MOSS_LOWMEM_LORA_DROPOUT": "0.1", "MOSS_LOWMEM_CORRECTIONS": "none"}
    point = {"MOSS_LOWMEM_RESUME": str(whole.folder / "resume" / "step-5")}
    resumed = _run(run, tmp_path / "out", environment={**ON, **LORA, **changed, **point})
    assert lines(
        resumed, r"warning: options have changed .*corrections: .*, now \[\], lora_dropout: saved 0.3, now 0.1"
    )


def test_a_point_behind_a_link_is_found_and_what_it_leads_to_stays(saved, tmp_path):
    run, whole = saved
    moved = shutil.copytree(whole.folder / "resume" / "step-4", tmp_path / "disk" / "step-4")
    (tmp_path / "out" / "resume").mkdir(parents=True)
    (tmp_path / "out" / "resume" / "step-4").symlink_to(moved)
    environment = {**ON, **LORA, "MOSS_LOWMEM_SAVE_STEPS": "1", "MOSS_LOWMEM_KEEP": "1"}
    resumed = _run(run, tmp_path / "out", environment=environment)
    assert [step.number for step in resumed.steps] == [5, 6]
    assert [path.name for path in (tmp_path / "out" / "resume").iterdir()] == ["step-6"]
    assert (moved / "weights.safetensors").is_file()


def test_a_changed_learning_rate_counts_from_then_on(saved, tmp_path):
    run, whole = saved
    environment = {**ON, **LORA, "MOSS_LOWMEM_RESUME": str(whole.folder / "resume" / "step-4")}
    resumed = _run(run, tmp_path / "out", "--learning-rate", "3e-3", environment=environment)
    assert lines(resumed, "warning: options have changed .*learning_rate: saved 0.001, now 0.003")
    assert [f"{step.rate:.2e}" for step in resumed.steps] == [f"{3 * step.rate:.2e}" for step in whole.steps[4:]]
    assert resumed.losses[0] == whole.losses[4] and resumed.losses[1] != whole.losses[5]


def test_only_the_last_points_stay(server, inputs, tmp_path):
    run = [server, "moss_tts_local", inputs("moss_tts_local")]
    own = tmp_path / "out" / "resume" / "step-1-of-mine"
    own.mkdir(parents=True)
    saved = _run(run, tmp_path / "out", environment={**ON, "MOSS_LOWMEM_SAVE_STEPS": "2", "MOSS_LOWMEM_KEEP": "2"})
    assert {path.name for path in own.parent.iterdir()} == {"step-4", "step-6", own.name}
    assert len(lines(saved, "resume_point=step-")) == 3


@pytest.mark.parametrize("number,status", [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_signals_before_the_first_step_and_without_saving(server, inputs, watched, tmp_path, number, status):
    run = [server, "moss_tts_local", inputs("moss_tts_local")]
    stop = {**ON, "STOP_AT": "1", "STOP_WITH": str(int(number)), "WATCH_FILE": str(tmp_path / "watch.txt")}
    saving = {**stop, "MOSS_LOWMEM_SAVE_STEPS": "3"}
    stopped = _run(run, tmp_path / "out", environment=saving, trainer=watched, check=False)
    assert stopped.status == status and lines(stopped, "stopped before the first optimizer step")
    assert not (tmp_path / "out" / "resume").exists()
    # Without resume points a signal does what it does without the layer.
    plain = _run(run, tmp_path / "plain", environment=stop, trainer=watched, check=False)
    assert not lines(plain, "stopped") and plain.status in (-number, 1, status)
