"""The real, unmodified upstream of moss_tts_delay, through its own run_train.sh, and its class in this process."""

from __future__ import annotations

import dataclasses
from unittest import mock

import pytest
import torch
from safetensors.torch import load_file
from small_models import SCHEDULES, Ours, gradients, pair, relative_errors, train_reference
from test_training_runs import assert_same_weights, weight_differences
from tolerances import TOLERANCES
from upstream_runs import (  # noqa: F401  (fixtures)
    ARGUMENTS,
    assert_upstream_reloads,
    exact_run_fixture,
    inputs_fixture,
    train_fixture,
    upstream_classes_fixture,
)

from moss_tts_patches.families.delay import DelayFamily
from moss_tts_patches.families.self_check import check_against_upstream
from moss_tts_patches.loss.engine import EngineOptions
from moss_tts_patches.memory.simulate import MicroBatch, Rung, simulate_rung, simulate_upstream
from moss_tts_patches.units import GIB

pytestmark = pytest.mark.upstream

FAMILY = "moss_tts_delay"
# Printed by unmodified upstream on the tiny checkpoint of seed 0 (shared notes, section 0).
REFERENCE_LOSSES = [3.9760, 4.2434, 3.9704]
LOSS, GRADIENT = TOLERANCES["loss_fp32_relative"], TOLERANCES["gradient_fp32_relative"]

# The processor's module first: upstream does not copy one of its imports unless that was resolved.
LOAD = """
from transformers import AutoModel
from transformers.dynamic_module_utils import get_class_from_dynamic_module
get_class_from_dynamic_module("processing_moss_tts.MossTTSDelayProcessor", folder)
model = AutoModel.from_pretrained(folder, trust_remote_code=True)
"""
GENERATE = """
config = model.config
prompt = torch.full((1, 6, config.n_vq + 1), config.audio_pad_code)
prompt[0, :, 0] = torch.tensor([config.im_start_token_id, 5, 6, 7, 8, config.audio_start_token_id])
[(start, tokens)] = model.eval().generate(prompt, torch.ones(1, 6, dtype=torch.bool), max_new_tokens=8)
assert tokens.shape[1] == config.n_vq + 1 and len(tokens) > start, tokens.shape
"""


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_losses_and_weights_equal_upstreams(exact_run, schedule):
    plain, run = exact_run("plain"), exact_run(schedule)
    assert plain.losses == pytest.approx(REFERENCE_LOSSES, abs=TOLERANCES["printed_loss"])
    assert run.losses == pytest.approx(REFERENCE_LOSSES, abs=TOLERANCES["printed_loss"])
    assert_same_weights(run.weights(), plain.weights())
    assert run.files() == plain.files()
    assert f"schedule={schedule}" in run.output
    assert f"family={FAMILY}" in run.output


def test_host_stores_give_the_same_bits(exact_run):
    on_device, on_host = exact_run("staged").weights(), exact_run("host").weights()
    assert on_device.keys() == on_host.keys()
    assert all(torch.equal(on_device[name], on_host[name]) for name in on_device)


def test_8bit_run_reloads_with_upstreams_code_and_generates(train, inputs, exact_run, tmp_path, upstream_environment):
    run = train(tmp_path / "output", layer={}, arguments=ARGUMENTS + " --warmup-ratio 0 --gradient_checkpointing")
    before, after = load_file(inputs / "0" / "model.safetensors"), run.weights()
    assert "optimizer=adamw8bit" in run.output
    assert "checkpointed_layers=3" in run.output
    assert after.keys() == before.keys() == exact_run("plain").weights().keys()
    assert run.files() == exact_run("plain").files()
    assert weight_differences(after, before)[1] > 0.5
    assert_upstream_reloads(run.checkpoint, upstream_environment, LOAD, GENERATE)


# -- upstream's class in this process ---------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def model(upstream_classes, inputs):
    return upstream_classes[0].from_pretrained(inputs / "0").train()


def batch_of(model, seed=5, **changes):
    return DelayFamily().sample_batch(model.config, torch.Generator().manual_seed(seed)) | changes


def one_frame(model):
    """One supervised position, where the last codebook is just ending."""
    batch = batch_of(model)
    batch["labels"][:, :-1] = -100
    batch["labels"][0] = -100
    return batch


def sparse(model):
    batch = batch_of(model, seed=6)
    batch["labels"] = batch["labels"].masked_fill(
        torch.rand(batch["labels"].shape, generator=torch.Generator().manual_seed(7)) < 0.4, -100
    )
    return batch


def empty_channel(model):
    batch = batch_of(model, seed=8)
    batch["labels"][..., 2] = -100
    return batch


BATCHES = {
    "delayed codebooks, padding on the left": batch_of,
    "one frame": one_frame,
    "sparse labels": sparse,
    "a channel without labels": empty_channel,
    "no channel weights": lambda model: batch_of(model, channelwise_loss_weight=None),
}


def compare(model, schedule, batch):
    """Returns both losses and the largest relative gradient error."""
    expected, found = pair(model)
    [reference] = train_reference(expected, [batch])
    [loss] = Ours(schedule, family=DelayFamily()).train(found, [batch])
    return reference, loss, max(relative_errors(gradients(found), gradients(expected)).values())


@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.parametrize("name", BATCHES)
def test_loss_and_every_gradient(model, schedule, name):
    reference, loss, error = compare(model, schedule, BATCHES[name](model))
    assert loss == pytest.approx(reference, rel=LOSS)
    assert error <= GRADIENT


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_accumulation_over_batches_of_several_lengths(model, schedule):
    expected, found = pair(model)
    batches = [BATCHES[name](model) for name in BATCHES]
    for name in ("input_ids", "attention_mask", "labels"):
        batches[0][name] = batches[0][name][:, :9]
    train_reference(expected, batches, scale=0.2)
    Ours(schedule, scale=0.2, family=DelayFamily()).train(found, batches)
    assert max(relative_errors(gradients(found), gradients(expected)).values()) <= GRADIENT


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_no_label_at_all_is_zero_as_upstream_says(model, schedule):
    batch = batch_of(model)
    batch["labels"] = torch.full_like(batch["labels"], -100)
    expected, found = pair(model)
    assert train_reference(expected, [batch]) == Ours(schedule, family=DelayFamily()).train(found, [batch]) == [0.0]
    assert all(not gradient.any() for gradient in gradients(found).values())


def changed_problem(change):
    """Our own description of the loss, with something wrong in it."""
    original = DelayFamily.frame_loss

    def wrong(self, *arguments):
        return change(original(self, *arguments))

    return mock.patch.object(DelayFamily, "frame_loss", wrong)


WRONG = {
    "the pad code takes part": lambda problem: dataclasses.replace(
        problem, channels=tuple(dataclasses.replace(channel, classes=None) for channel in problem.channels)
    ),
    "an empty channel leaves the weights": lambda problem: dataclasses.replace(
        problem, coefficients=problem.coefficients * 7 / 5
    ),
    "a frame is lost": lambda problem: dataclasses.replace(
        problem,
        channels=tuple(
            dataclasses.replace(channel, labels=channel.labels.index_fill(0, torch.tensor([0]), -100))
            for channel in problem.channels
        ),
    ),
}


@pytest.mark.parametrize("name", WRONG)
def test_the_comparison_sees_a_wrong_loss_rule(model, name):
    """Negative controls."""
    with changed_problem(WRONG[name]):
        reference, loss, error = compare(model, "staged", empty_channel(model))
    assert loss != pytest.approx(reference, rel=100 * LOSS)
    assert error > 100 * GRADIENT


def test_the_self_check_covers_the_family(upstream_classes):
    model_class, config_class = upstream_classes
    config = DelayFamily().full_size_config(config_class, "1.7b")
    arguments = (DelayFamily(), model_class, config, model_class.forward, EngineOptions("staged"))
    check_against_upstream(*arguments)
    with changed_problem(WRONG["the pad code takes part"]), pytest.raises(Exception, match="self check of moss_tts_de"):
        check_against_upstream(*arguments)


# -- full size, simulated ---------------------------------------------------------------------------------------------

SHORT = MicroBatch(1, 600, 350)
BOTH_ON_HOST = Rung("staged", gradients="host", states="host")


@pytest.mark.parametrize("size,gib,parameters", [("8b", 18.5, 8_459_432_960), ("1.7b", 5.6, 2_166_088_704)])
def test_full_size_peak(upstream_classes, size, gib, parameters):
    """The 8B needs 15.8 GiB for its weights alone."""
    model_class, config_class = upstream_classes
    config = DelayFamily().full_size_config(config_class, size)
    with torch.device("meta"):
        assert sum(p.numel() for p in model_class(config).parameters()) == parameters
    figures = simulate_rung(DelayFamily(), model_class, config, SHORT, BOTH_ON_HOST)
    upstream = simulate_upstream(DelayFamily(), model_class, config, SHORT, checkpointing=True)
    assert figures.peak_bytes <= gib * GIB
    assert upstream.peak_bytes > 3 * figures.peak_bytes
    assert figures.matmul_flops < upstream.matmul_flops
