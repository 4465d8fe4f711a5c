"""Trainings of the real, unmodified upstream that are interrupted and go on: the same weights to the bit."""

from __future__ import annotations

import os
import re
import signal
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch
from launcher import LAUNCHER
from mini import read_steps
from safetensors.torch import load_file
from upstream_runs import layer_variables, make_tiny, run_script, upstream_variables

pytestmark = pytest.mark.upstream

# 12 records in batches of 2, windows of 4: an epoch has 6 micro-batches and 2 steps, the second of half a window.
ARGUMENTS = (
    "--per-device-batch-size 2 --gradient-accumulation-steps 4 --num-epochs 3 --mixed-precision no --learning-rate 1e-3"
)
STEPS = 6
LORA = {"MOSS_LOWMEM_METHOD": "lora", "MOSS_LOWMEM_LORA_RANK": "2", "MOSS_LOWMEM_MERGE": "none"}
# Sends the trainer a signal while it is at a micro-batch, and makes the losses of some nan, by the layer's own count.
STOPPER = """
import os, signal
import wrapt

def watch(run):
    begin = run.micro_batch_begins

    def micro_batch_begins():
        begin()
        if not run.replaying and run.position.micro_batches == int(os.environ["STOP_IN"]):
            os.kill(os.getpid(), getattr(signal, os.environ["STOP_WITH"]))

    run.micro_batch_begins = micro_batch_begins

def hook(module):
    made = module.ResumableRun.__init__

    def __init__(run, *args, **options):
        made(run, *args, **options)
        watch(run)

    module.ResumableRun.__init__ = __init__

def spoil(module):
    forward = module.Session.forward

    def spoilt(session, model, batch):
        output = forward(session, model, batch)
        if str(session.resume.position.micro_batches) in os.environ["NAN_IN"].split(","):
            output.loss = output.loss * float("nan")
        return output

    module.Session.forward = spoilt

if "STOP_IN" in os.environ:
    wrapt.register_post_import_hook(hook, "moss_tts_patches.runtime.resume.run")
if "NAN_IN" in os.environ:
    wrapt.register_post_import_hook(spoil, "moss_tts_patches.session")
"""


@dataclass(frozen=True)
class Run:
    """An ended training."""

    status: int
    output: str
    folder: Path

    def weights(self) -> dict[str, dict[str, torch.Tensor]]:
        paths = [*self.folder.glob("checkpoint-*/model.safetensors"), *self.folder.glob("checkpoint-*/adapter_m*rs")]
        return {path.parent.name: load_file(path) for path in sorted(paths)}


@pytest.fixture(scope="module")
def train(upstream_repo: Path, torchaudio_stub: Path, tmp_path_factory: Any) -> Any:
    """Runs a family's trainer through our launcher; makes its tiny inputs at the first time."""
    tiny = tmp_path_factory.mktemp("tiny")
    site = tmp_path_factory.mktemp("site")
    (site / "sitecustomize.py").write_text(STOPPER, encoding="utf-8")

    def run(family: str, output: Path, arguments: str = "", **layer: str) -> Run:
        data = make_tiny(upstream_repo, family, tiny / family)
        variables = upstream_variables(torchaudio_stub, tmp_path_factory.mktemp("hf_modules"))
        variables |= layer_variables(upstream_repo, family) | layer
        variables["PYTHONPATH"] = os.pathsep.join([str(site), variables["PYTHONPATH"]])
        status, printed = run_script(LAUNCHER, upstream_repo, data, output, f"{ARGUMENTS} {arguments}", variables)
        return Run(status, printed, output)

    return run


CASES = [
    # family, settings, options, signal, in which micro-batch, steps done by then, steps in all
    ("moss_tts_local", {}, "--num-workers 2", "SIGTERM", 7, 2, 6),  # mid-window, second epoch
    ("moss_tts_local", LORA, "", "SIGINT", 9, 3, 6),  # the last of an epoch's first window
    ("moss_tts_delay", {}, "", "SIGTERM", 6, 2, 6),  # right after an epoch's end
    # Upstream leaves out micro-batch 1, and with 3 the whole first window, which then is no step.
    ("moss_tts_local_v1.5", {"NAN_IN": "1,3"}, "--skip-nonfinite-batches", "SIGTERM", 8, 1, 5),
    ("moss_tts_realtime", {}, "", "SIGTERM", 5, 2, 6),  # the last micro-batch of the first epoch
]


@pytest.mark.parametrize("family,layer,options,stop_with,stop_in,done,steps", CASES)
def test_stopped_and_resumed(train, tmp_path, family, layer, options, stop_with, stop_in, done, steps):
    whole = train(family, tmp_path / "whole", options, **layer)
    assert whole.status == 0, whole.output[-3000:]
    saving = {**layer, "MOSS_LOWMEM_SAVE_MINUTES": "600"}
    stopped = train(family, tmp_path / "out", options, **saving, STOP_IN=str(stop_in), STOP_WITH=stop_with)
    assert stopped.status in (128 + getattr(signal, stop_with), 1), (stopped.status, stopped.output[-3000:])
    assert f"stopped after step {done}." in stopped.output, stopped.output[-3000:]
    resumed = train(family, tmp_path / "out", options, **saving)
    assert resumed.status == 0, resumed.output[-3000:]
    assert [step.number for step in read_steps(resumed.output)] == list(range(done + 1, steps + 1))
    assert [step.loss for step in read_steps(resumed.output)] == [s.loss for s in read_steps(whole.output)[done:]]
    found, expected = resumed.weights(), whole.weights()
    assert found.keys() == expected.keys() and expected
    for name, tensors in expected.items():
        assert all(torch.equal(found[name][key], tensors[key]) for key in tensors), name
    assert not re.search(r"Warning: .*lr_scheduler", resumed.output)
    # Control: another run's weights are other weights.
    first, last = sorted(expected)[0], sorted(expected)[-1]
    assert any(not torch.equal(expected[first][key], expected[last][key]) for key in expected[first])


def test_killed_and_resumed(train, tmp_path):
    """kill -9 in a save, or right after one: nothing is printed, nothing is torn."""
    family = "moss_tts_local"
    whole = train(family, tmp_path / "whole")
    root = tmp_path / "out" / "resume"
    pid = os.fork()
    if pid == 0:
        _kill_when_saved(root, os.getppid())
        os._exit(0)
    killed = train(family, tmp_path / "out", MOSS_LOWMEM_SAVE_STEPS="1")
    os.waitpid(pid, 0)
    assert killed.status != 0 and len(read_steps(killed.output)) < STEPS
    resumed = train(family, tmp_path / "out", MOSS_LOWMEM_SAVE_STEPS="1")
    assert resumed.status == 0 and "resume replayed=" in resumed.output, resumed.output[-3000:]
    found, expected = resumed.weights(), whole.weights()
    for name, tensors in expected.items():
        assert all(torch.equal(found[name][key], tensors[key]) for key in tensors), name


def _kill_when_saved(root: Path, above: int) -> None:
    """Waits for a second point to be written, and kills the trainer in the middle of that."""
    end = time.monotonic() + 120
    while time.monotonic() < end and not list(root.glob("step-2.incomplete-*")):
        time.sleep(0.001)
    for leftover in root.glob("step-2.incomplete-*"):
        writer = int(leftover.name.rpartition("-")[2])
        assert above in [parent.pid for parent in psutil.Process(writer).parents()]
        os.kill(writer, signal.SIGKILL)
