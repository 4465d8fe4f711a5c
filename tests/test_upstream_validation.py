"""The real, unmodified upstream with validation records: its own loss in evaluation mode, and the best weights."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from launcher import LAUNCHER
from mini import FAMILIES
from safetensors.torch import load_file
from tolerances import TOLERANCES
from upstream_runs import SECONDS_ALLOWED, layer_variables, make_tiny, run_script, upstream_variables

pytestmark = pytest.mark.upstream

# 12 records, 4 of them held out; batches of 2, windows of 2: 2 steps.
ARGUMENTS = (
    "--per-device-batch-size 2 --gradient-accumulation-steps 2 --num-epochs 1 --mixed-precision no --learning-rate 1e-3"
)
TRAINED = 8
# The trainer itself, stopped before its loop: its data set and loss on the checkpoint that it is started with.
EVALUATE = """
import json, os, runpy, sys
import torch

script, checkpoint = sys.argv[1], sys.argv[2]
sys.argv[1:] = sys.argv[3:]
sys.path.insert(0, os.path.dirname(os.path.abspath(script)))
trainer = runpy.run_path(script)
scope = trainer["main"].__globals__
dataset_class = next(value for name, value in trainer.items() if name.endswith("SFTDataset"))
found = {}


class Loader(torch.utils.data.DataLoader):
    def __init__(self, dataset, **options):
        found["batch"] = dataset.collate_fn([dataset[index] for index in range(len(dataset))])
        super().__init__(dataset, **options)


def prepare_and_stop(self, model, *rest):
    model.eval()
    batch = {name: found["batch"][name] for name in ("input_ids", "attention_mask", "labels")}
    if "channelwise_loss_weight" in json.loads(sys.argv[-1]):
        batch["channelwise_loss_weight"] = json.loads(sys.argv[-1])["channelwise_loss_weight"]
    with torch.no_grad():
        if "compute_supervised_loss" in trainer:
            loss = trainer["compute_supervised_loss"](model, **batch)
        else:
            loss = model(**batch).loss
    print("LOSS", loss.item())
    raise SystemExit(0)


extra = sys.argv.pop()
scope["DataLoader"] = Loader
accelerator = scope["Accelerator"]
scope["Accelerator"] = type("Accelerator", (accelerator,), {"prepare": prepare_and_stop})
sys.argv.append(extra)
parse = scope["parse_args"]


def parse_args():
    kept = sys.argv.pop()
    try:
        return parse()
    finally:
        sys.argv.append(kept)


scope["parse_args"] = parse_args
trainer["main"]()
"""


@pytest.mark.parametrize("family", FAMILIES)
def test_validation_on_upstream(upstream_repo: Path, torchaudio_stub: Path, tmp_path: Path, family: str) -> None:
    data = make_tiny(upstream_repo, family, tmp_path / f"{family.replace('.', '_')}_validation")
    records = (data / "train.jsonl").read_text().splitlines(keepends=True)
    (data / "train.jsonl").write_text("".join(records[:TRAINED]))
    (data / "valid.jsonl").write_text("".join(records[TRAINED:]))
    variables = upstream_variables(torchaudio_stub, tmp_path / "hf_modules")
    plain, ours = (
        _train(upstream_repo, data, tmp_path / name, variables | layer_variables(upstream_repo, family) | settings)
        for name, settings in (
            ("plain", {}),
            ("ours", {"MOSS_LOWMEM_VALID_JSONL": str(data / "valid.jsonl"), "MOSS_LOWMEM_VALID_STEPS": "1"}),
        )
    )
    last = sorted(ours.glob("checkpoint-*"))[-1].name
    expected, found = (load_file(folder / last / "model.safetensors") for folder in (plain, ours))
    assert all(torch.equal(found[name], expected[name]) for name in expected)

    lines = [json.loads(line) for line in (ours / "lowmem_log.jsonl").read_text().splitlines()]
    evaluations = [values for values in lines if "valid_loss" in values]
    assert [values["step"] for values in evaluations] == [1, 2]
    lowest = min(evaluations, key=lambda values: values["valid_loss"])
    best = ours / "best"
    assert best.resolve().name == f"best-step-{lowest['step']}"
    saved = json.loads((best / "finetune_args.json").read_text())
    assert saved["best_validation_loss"] == lowest["valid_loss"]
    assert {path.name for path in best.iterdir()} == {path.name for path in (ours / last).iterdir()}
    # Its own code loads the best weights, and finds the same loss with them.
    full = json.loads((ours / last / "finetune_args.json").read_text())
    loss = _upstream_loss(upstream_repo, variables, family, best, data, full)
    assert loss == pytest.approx(lowest["valid_loss"], rel=TOLERANCES["loss_fp32_relative"])
    before = _upstream_loss(upstream_repo, variables, family, data, data, full)
    assert (
        abs(before / loss - 1) > 100 * TOLERANCES["loss_fp32_relative"]
    )  # negative control: the weights it began with


def _train(upstream_repo: Path, data: Path, output: Path, variables: dict[str, str]) -> Path:
    status, printed = run_script(LAUNCHER, upstream_repo, data, output, ARGUMENTS, variables)
    assert status == 0, printed[-3000:]
    return output


def _upstream_loss(
    upstream_repo: Path, variables: dict[str, str], family: str, weights: Path, data: Path, saved: dict[str, Any]
) -> float:
    """Upstream's loss of all validation records in one batch, in a process without the layer."""
    model = data.parent / f"{weights.name}_{family.replace('.', '_')}_model"
    shutil.copytree(data, model)  # its processor and code
    shutil.copy2(weights / "model.safetensors", model / "model.safetensors")
    given = {}
    if "resolved_channelwise_loss_weight" in saved:
        given["channelwise_loss_weight"] = saved["resolved_channelwise_loss_weight"]
    command = [sys.executable, "-c", EVALUATE, f"{family}/finetuning/sft.py", str(model), "--model-path", str(model)]
    command += ["--train-jsonl", str(data / "valid.jsonl"), "--output-dir", str(data.parent / "none")]
    command += ["--mixed-precision", "no", json.dumps(given)]
    output = _run(command, upstream_repo, {**variables, "ACCELERATE_USE_CPU": "true"})
    return float(next(line.split()[1] for line in output.splitlines() if line.startswith("LOSS ")))


def _run(command: list[str], folder: Path, environment: dict[str, str]) -> str:
    done = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, timeout=SECONDS_ALLOWED)
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    return done.stdout
