"""The real, unmodified upstream of moss_tts_local, through its own run_train.sh, with the layer beside it."""

from __future__ import annotations

import pytest
import torch
from safetensors.torch import load_file
from small_models import SCHEDULES, Ours, gradients, pair, relative_errors, train_reference
from test_training_runs import assert_same_weights, weight_differences
from tolerances import TOLERANCES
from upstream_runs import (  # noqa: F401  (fixtures)
    ARGUMENTS,
    EXACT,
    assert_upstream_reloads,
    inputs_fixture,
    train_fixture,
    upstream_classes_fixture,
)

from moss_tts_patches.families.local import LocalFamily

pytestmark = pytest.mark.upstream

FAMILY = "moss_tts_local"
SEEDS = (0, 1)
# Printed by unmodified upstream on the tiny checkpoint of seed 0 (shared notes, section 0).
REFERENCE_LOSSES = [3.9135, 3.8448, 3.9079]

LOAD = """
from transformers import AutoModel
model = AutoModel.from_pretrained(folder, trust_remote_code=True)
"""
GENERATE = """
config = model.config
prompt = torch.full((1, 6, config.n_vq + 1), config.audio_pad_code)
prompt[0, :, 0] = torch.tensor([config.im_start_token_id, 5, 6, 7, 8, config.audio_start_token_id])
torch.manual_seed(0)
[(_, tokens)] = model.eval().generate(prompt, torch.ones(1, 6, dtype=torch.bool), max_new_tokens=8)
assert tokens.shape[1] == config.n_vq + 1 and 1 < len(tokens) <= 9, tokens.shape
assert tokens[0, 0] == config.audio_start_token_id and (tokens[1:, 1:] < config.audio_pad_code).all(), tokens
"""


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


def test_8bit_run_reloads_with_upstreams_code_and_generates(train, inputs, tmp_path, upstream_environment):
    run = train(tmp_path / "output", layer={}, arguments=ARGUMENTS + " --warmup-ratio 0 --gradient_checkpointing")
    before, after = load_file(inputs / "0" / "model.safetensors"), run.weights()
    assert "optimizer=adamw8bit" in run.output
    assert weight_differences(after, before)[1] > 0.5
    unread = "model.language_model.embed_tokens.weight"
    assert torch.equal(after[unread], before[unread])
    assert_upstream_reloads(run.checkpoint, upstream_environment, LOAD, GENERATE)


def files_of(run):
    """Contents by name; the output folder's own name, which the arguments record, is taken out."""
    return {
        path.name: path.read_bytes().replace(str(run.folder).encode(), b"OUTPUT")
        for path in run.checkpoint.iterdir()
        if path.is_file()
    }


def test_switched_off_the_checkpoint_is_byte_identical(train, tmp_path):
    """Off by the switch, and installed but never asked for; against a run with start-up hooks off."""
    plain = train(tmp_path / "plain")
    assert plain.losses == pytest.approx(REFERENCE_LOSSES, abs=TOLERANCES["printed_loss"])
    expected = files_of(plain)
    unset = train(tmp_path / "unset", AUTOWRAPT_BOOTSTRAP="moss_tts_patches")
    assert files_of(unset) == expected
    switched_off = train(tmp_path / "zero", layer={"MOSS_LOWMEM": "0", "AUTOWRAPT_BOOTSTRAP": "moss_tts_patches"})
    assert files_of(switched_off) == expected


def test_upstreams_own_zero3_yaml_on_one_device_runs_plain(train, tmp_path):
    """Eight processes and no offload: on one GPU it would shard nothing and fail for seven missing ones."""
    yaml = f"{FAMILY}/finetuning/configs/accelerate_zero3_1.7b.yaml"
    run = train(tmp_path / "output", layer=EXACT, ACCELERATE_CONFIG_FILE=yaml)
    assert run.losses == pytest.approx(REFERENCE_LOSSES, abs=TOLERANCES["printed_loss"])
    assert "distributed_type=DistributedType.NO num_processes=1" in run.output
    assert any("[lowmem]" in line and "zero3" in line.lower() for line in run.output.splitlines())


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
