"""The real, unmodified upstream of moss_tts_local, through its own run_train.sh, with the layer beside it."""

from __future__ import annotations

import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
from launcher import LAUNCHER
from mini import read_steps
from safetensors.torch import load_file
from small_models import SCHEDULES, Ours, gradients, pair, relative_errors, train_reference
from test_training_runs import assert_same_weights, files_of, weight_differences
from tolerances import TOLERANCES

from moss_tts_patches.families.local import LocalFamily

pytestmark = pytest.mark.upstream

FAMILY = "moss_tts_local"
ARGUMENTS = (
    "--per-device-batch-size 2 --gradient-accumulation-steps 2 --num-epochs 1 --mixed-precision no --learning-rate 1e-3"
)
# Printed by unmodified upstream on the tiny checkpoint of seed 0 (shared notes, section 0).
REFERENCE_LOSSES = [3.9135, 3.8448, 3.9079]
EXACT = {"MOSS_LOWMEM_OPTIMIZER": "adamw", "MOSS_LOWMEM_CORRECTIONS": "none", "MOSS_LOWMEM_CHUNK_FRAMES": "7"}


@dataclass(frozen=True)
class Run:
    """A finished run of upstream's script."""

    output: str
    folder: Path

    @property
    def losses(self):
        return [step.loss for step in read_steps(self.output)]

    @property
    def checkpoint(self):
        return self.folder / "checkpoint-epoch-0"

    def weights(self):
        return load_file(self.checkpoint / "model.safetensors")


@pytest.fixture(scope="module")
def inputs(upstream_repo, torchaudio_stub, tmp_path_factory):
    """Tiny checkpoints and data by seed."""
    folder = tmp_path_factory.mktemp("tiny")
    for seed in (0, 1):
        command = [sys.executable, Path(__file__).with_name("make_tiny.py"), upstream_repo, FAMILY, folder / str(seed)]
        subprocess.run([*command, "--seed", str(seed)], check=True, capture_output=True)
    return folder


@pytest.fixture
def train(upstream_repo, upstream_environment, inputs):
    """Runs upstream's script, through our launcher or by itself."""

    def run(output, seed=0, layer=None, arguments=ARGUMENTS, **variables):
        data = inputs / str(seed)
        environment = {
            **upstream_environment,
            "MODEL_PATH": str(data),
            "TRAIN_JSONL": str(data / "train.jsonl"),
            "OUTPUT_DIR": str(output),
            "SKIP_PREPARE": "1",
            "TRAIN_EXTRA_ARGS_STR": arguments,
            **variables,
        }
        script = f"{FAMILY}/finetuning/run_train.sh"
        if layer is not None:
            environment |= {"MOSS_LOWMEM": "1", "MOSS_TTS_REPO": str(upstream_repo), **layer}
            script = str(LAUNCHER)
        done = subprocess.run(
            ["bash", script], cwd=upstream_repo, env=environment, capture_output=True, text=True, timeout=300
        )
        assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
        return Run(done.stdout + done.stderr, output)

    return run


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_losses_of_every_step(train, tmp_path, schedule):
    run = train(tmp_path / "output", layer={**EXACT, "MOSS_LOWMEM_SCHEDULE": schedule})
    assert run.losses == pytest.approx(REFERENCE_LOSSES, abs=TOLERANCES["printed_loss"])
    assert f"schedule={schedule}" in run.output


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_saved_weights(train, tmp_path, schedule):
    plain = train(tmp_path / "plain", seed=1)
    run = train(tmp_path / "output", seed=1, layer={**EXACT, "MOSS_LOWMEM_SCHEDULE": schedule})
    assert run.losses == pytest.approx(plain.losses, abs=TOLERANCES["printed_loss"])
    assert_same_weights(run.weights(), plain.weights())
    assert {path.name for path in run.checkpoint.iterdir()} == {path.name for path in plain.checkpoint.iterdir()}


def test_host_stores_with_clipping_and_accumulation(train, tmp_path):
    arguments = ARGUMENTS.replace("-steps 2", "-steps 4") + " --max-grad-norm 0.1 --warmup-ratio 0"
    plain = train(tmp_path / "plain", seed=1, arguments=arguments)
    weights = {}
    for place in ("device", "host"):
        layer = {**EXACT, "MOSS_LOWMEM_GRADIENTS": place, "MOSS_LOWMEM_STATES": place}
        weights[place] = train(tmp_path / place, seed=1, layer=layer, arguments=arguments).weights()
    assert all(torch.equal(weights["device"][name], weights["host"][name]) for name in weights["device"])
    assert_same_weights(weights["host"], plain.weights())


def test_8bit_optimizer_trains_and_upstream_reloads_the_checkpoint(train, inputs, tmp_path, upstream_environment):
    run = train(tmp_path / "output", layer={}, arguments=ARGUMENTS + " --warmup-ratio 0 --gradient_checkpointing")
    before, after = load_file(inputs / "0" / "model.safetensors"), run.weights()
    assert "optimizer=adamw8bit" in run.output
    assert weight_differences(after, before)[1] > 0.5
    unread = "model.language_model.embed_tokens.weight"
    assert torch.equal(after[unread], before[unread])
    code = (
        "import sys, torch\n"
        "from safetensors.torch import load_file\n"
        "from transformers import AutoModel\n"
        "model = AutoModel.from_pretrained(sys.argv[1], trust_remote_code=True)\n"
        "saved = load_file(sys.argv[1] + '/model.safetensors')\n"
        "state = model.state_dict()\n"
        "assert state.keys() == saved.keys()\n"
        "assert all(torch.equal(state[name], saved[name]) for name in saved)\n"
        "assert not any(name.startswith('moss_tts_patches') for name in sys.modules)\n"
    )
    subprocess.run([sys.executable, "-c", code, str(run.checkpoint)], env=upstream_environment, check=True)


def test_switched_off_the_checkpoint_is_byte_identical(train, tmp_path):
    """Off by the switch, and installed but never asked for; against a run with start-up hooks off."""
    plain = train(tmp_path / "plain")
    assert plain.losses == pytest.approx(REFERENCE_LOSSES, abs=TOLERANCES["printed_loss"])
    expected = files_of(plain.checkpoint, plain.folder)
    unset = train(tmp_path / "unset", AUTOWRAPT_BOOTSTRAP="moss_tts_patches")
    assert files_of(unset.checkpoint, unset.folder) == expected
    switched_off = train(tmp_path / "zero", layer={"MOSS_LOWMEM": "0", "AUTOWRAPT_BOOTSTRAP": "moss_tts_patches"})
    assert files_of(switched_off.checkpoint, switched_off.folder) == expected


def test_upstreams_own_zero3_yaml_on_one_device_runs_plain(train, tmp_path):
    """Eight processes and no offload: on one GPU it would shard nothing and fail for seven missing ones."""
    yaml = f"{FAMILY}/finetuning/configs/accelerate_zero3_1.7b.yaml"
    run = train(tmp_path / "output", layer=EXACT, ACCELERATE_CONFIG_FILE=yaml)
    assert run.losses == pytest.approx(REFERENCE_LOSSES, abs=TOLERANCES["printed_loss"])
    assert "distributed_type=DistributedType.NO num_processes=1" in run.output
    assert any("[lowmem]" in line and "zero3" in line.lower() for line in run.output.splitlines())


@pytest.fixture(scope="module")
def upstream_classes(upstream_repo):
    """Upstream's model and config classes, in this process."""
    sys.path.insert(0, str(upstream_repo))
    sys.dont_write_bytecode = True
    try:
        from moss_tts_local.configuration_moss_tts import MossTTSDelayConfig
        from moss_tts_local.modeling_moss_tts import MossTTSDelayModel

        yield MossTTSDelayModel, MossTTSDelayConfig
    finally:
        sys.path.remove(str(upstream_repo))


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_every_gradient_in_float32(upstream_classes, inputs, schedule):
    model_class, _ = upstream_classes
    model = model_class.from_pretrained(inputs / "0").train()
    LocalFamily().check_structure(model)
    batch = LocalFamily().sample_batch(model.config, torch.Generator().manual_seed(5))
    expected, found = pair(model)
    [reference] = train_reference(expected, [batch])
    [loss] = Ours(schedule).train(found, [batch])
    assert loss == pytest.approx(reference, rel=TOLERANCES["loss_fp32_relative"])
    errors = relative_errors(gradients(found), gradients(expected))
    assert max(errors.values()) <= TOLERANCES["gradient_fp32_relative"], max(errors, key=errors.get)
