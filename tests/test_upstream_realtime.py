"""The real, unmodified upstream of moss_tts_realtime, through its own run_train.sh, and its class in this process."""

from __future__ import annotations

import dataclasses
import json
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

from moss_tts_patches.errors import NumericsError
from moss_tts_patches.families import realtime
from moss_tts_patches.families.realtime import RealtimeFamily
from moss_tts_patches.families.self_check import check_against_upstream
from moss_tts_patches.loss.engine import EngineOptions
from moss_tts_patches.memory.simulate import MicroBatch, Rung, simulate_rung, simulate_upstream
from moss_tts_patches.memory.tracker import StorageTracker
from moss_tts_patches.units import GIB

pytestmark = pytest.mark.upstream

FAMILY = "moss_tts_realtime"
# Printed by unmodified upstream on the tiny checkpoint of seed 0 (shared notes, section 0).
REFERENCE_LOSSES = [7.2160, 7.2131, 7.1741]
# The loss is one mean over the codes of all codebooks, so depth embeddings that occur once have gradients near AdamW's
# eps of 1e-8, where noise of 1e-10 shows: with it, one of 3.3 million weights differs by 1 to 2 % of the learning rate
# (seeds 0, 1, 2). With an eps above them the largest difference is 8e-7.
STEADY = ARGUMENTS + " --adam-eps 1e-6"
UNREAD = "language_model.embed_tokens.weight"
LOSS, GRADIENT = TOLERANCES["loss_fp32_relative"], TOLERANCES["gradient_fp32_relative"]

# The checkpoint carries its own package.
LOAD = """
sys.path.insert(0, folder)
from mossttsrealtime.modeling_mossttsrealtime import MossTTSRealtime
model = MossTTSRealtime.from_pretrained(folder)
"""
FORWARD = """
ids = torch.randint(0, 500, (1, 9, 17))
labels = torch.where(torch.arange(9).view(1, 9, 1) > 3, ids, -100)
assert torch.isfinite(model(input_ids=ids, attention_mask=torch.ones(1, 9, dtype=torch.bool), labels=labels).loss)
"""


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_losses_equal_upstreams(exact_run, schedule):
    run = exact_run(schedule)
    assert run.losses == pytest.approx(REFERENCE_LOSSES, abs=TOLERANCES["printed_loss"])
    assert f"schedule={schedule}" in run.output
    assert f"family={FAMILY}" in run.output


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_weights_equal_upstreams(exact_run, schedule):
    plain, run = exact_run("plain", STEADY), exact_run(schedule, STEADY)
    assert run.losses == pytest.approx(plain.losses, abs=TOLERANCES["printed_loss"])
    assert_same_weights(run.weights(), plain.weights())
    assert run.files() == plain.files()


def test_host_stores_give_the_same_bits(exact_run):
    on_device, on_host = exact_run("staged").weights(), exact_run("host").weights()
    assert on_device.keys() == on_host.keys()
    assert all(torch.equal(on_device[name], on_host[name]) for name in on_device)


def test_the_checkpointing_flag_is_accepted_and_means_it(train, inputs, exact_run, tmp_path, upstream_environment):
    """With the layer's own switch off, so that the flag alone decides; 8-bit states; upstream's code reloads it."""
    layer = {"MOSS_LOWMEM_CHECKPOINTING": "0"}
    run = train(tmp_path / "output", layer=layer, arguments=ARGUMENTS + " --warmup-ratio 0 --gradient_checkpointing")
    before, after = load_file(inputs / "0" / "model.safetensors"), run.weights()
    assert "checkpointed_layers=3" in run.output
    assert "optimizer=adamw8bit" in run.output
    assert weight_differences(after, before)[1] > 0.5
    assert torch.equal(after[UNREAD], before[UNREAD])
    assert after.keys() == before.keys() == exact_run("plain", STEADY).weights().keys()
    assert run.files() == exact_run("plain", STEADY).files()
    assert_upstream_reloads(run.checkpoint, upstream_environment, LOAD, FORWARD)


def test_saved_arguments_are_upstreams_without_the_flag(exact_run):
    ours, plain = exact_run("staged", STEADY), exact_run("plain", STEADY)
    saved = [json.loads((run.checkpoint / "finetune_args.json").read_text()) for run in (ours, plain)]
    assert saved[0].keys() == saved[1].keys()
    assert "checkpointed_layers=3" in ours.output


# -- upstream's class in this process ---------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def model(upstream_classes, inputs):
    model = upstream_classes[0].from_pretrained(inputs / "0").train()
    model.language_model.embed_tokens.weight.requires_grad_(False)  # as the trainer does
    return model


def batch_of(model, seed=5):
    """Two records of several lengths, padding on the right, the end of the audio labelled on one codebook only."""
    return RealtimeFamily().sample_batch(model.config, torch.Generator().manual_seed(seed))


def one_frame(model):
    batch = batch_of(model)
    batch["labels"][:, :6] = batch["labels"][:, 7:] = -100
    batch["labels"][1] = -100
    return batch


def sparse(model):
    batch = batch_of(model, seed=6)
    batch["labels"] = batch["labels"].masked_fill(
        torch.rand(batch["labels"].shape, generator=torch.Generator().manual_seed(7)) < 0.4, -100
    )
    return batch


def empty_channel(model):
    batch = batch_of(model, seed=8)
    batch["labels"][..., 3] = -100
    return batch


BATCHES = {
    "padding on the right": batch_of,
    "one frame": one_frame,
    "sparse labels": sparse,
    "a codebook without labels": empty_channel,
}


def compare(model, schedule, batch):
    """Returns both losses and the largest relative gradient error."""
    expected, found = pair(model)
    [reference] = train_reference(expected, [batch])
    [loss] = Ours(schedule, family=RealtimeFamily()).train(found, [batch])
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
        batches[0][name] = batches[0][name][:, :8]
    train_reference(expected, batches, scale=0.25)
    Ours(schedule, scale=0.25, family=RealtimeFamily()).train(found, batches)
    assert max(relative_errors(gradients(found), gradients(expected)).values()) <= GRADIENT


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_no_audio_label_at_all_is_an_error_as_upstream_says(model, schedule):
    batch = batch_of(model)
    batch["labels"] = torch.full_like(batch["labels"], -100)
    batch["labels"][0, 5, 0] = 7  # a text label is none
    with pytest.raises(RuntimeError, match="0 elements"):
        model(**batch)
    with pytest.raises(NumericsError, match="without a single audio label"):
        Ours(schedule, family=RealtimeFamily()).train(model, [batch])


def changed_problem(change):
    """Our own description of the loss, with something wrong in it."""
    original = RealtimeFamily.frame_loss

    def wrong(self, *arguments):
        return change(original(self, *arguments))

    return mock.patch.object(RealtimeFamily, "frame_loss", wrong)


def mean_of_codebook_means(problem):
    counts = torch.stack([(channel.labels != -100).sum() for channel in problem.channels])
    return dataclasses.replace(problem, coefficients=1 / (counts.clamp(min=1) * len(counts)))


WRONG = {
    "a mean for every codebook": lambda: changed_problem(mean_of_codebook_means),
    "zero vectors for missing codes": lambda: changed_problem(
        lambda problem: dataclasses.replace(
            problem,
            lookups=tuple(
                dataclasses.replace(lookup, ids=lookup.ids.masked_fill(lookup.ids == 1024, -100))
                for lookup in problem.lookups
            ),
        )
    ),
    "the hidden state of its own position": lambda: mock.patch.object(
        realtime, "predicting_positions", lambda positions, labels: positions
    ),
    "the position before crosses records": lambda: mock.patch.object(
        realtime, "predicting_positions", lambda positions, labels: (positions - 1).clamp(min=0)
    ),
}


@pytest.mark.parametrize("name", WRONG)
def test_the_comparison_sees_a_wrong_loss_rule(model, name):
    """Negative controls."""
    other = pair(model)[0]
    with torch.no_grad():
        for table in other.local_transformer.model.embed_tokens:
            table.weight[1024] += 0.5  # a trained pad code is no zero vector
    with WRONG[name]():
        reference, loss, error = compare(other, "staged", sparse(other))
    assert loss != pytest.approx(reference, rel=LOSS)
    assert error > 100 * GRADIENT


def test_the_self_check_covers_the_family(upstream_classes):
    model_class, config_class = upstream_classes
    config = RealtimeFamily().full_size_config(config_class, "1.7b")
    arguments = (RealtimeFamily(), model_class, config, model_class.forward, EngineOptions("staged"))
    check_against_upstream(*arguments)
    for name in ("a mean for every codebook", "the position before crosses records"):
        with WRONG[name](), pytest.raises(Exception, match="self check of moss_tts_realtime"):
            check_against_upstream(*arguments)


# -- full size, simulated ---------------------------------------------------------------------------------------------


def peak_of(step):
    with StorageTracker() as tracker:
        step().loss.backward()
    return tracker.peak_bytes


def test_simulated_upstream_needs_what_upstream_needs(model):
    """Upstream's forward looks for labels, which tensors without values do not have; this is what stands in for it."""
    family = RealtimeFamily()
    batch = family.simulated_batch(model.config, 1, 60)
    batch["labels"][:, :20] = -100

    def stand_in(supervised):
        other = pair(model)[0]
        return peak_of(lambda: family.simulated_upstream_output(type(model).forward, other, batch, supervised))

    upstream = pair(model)[0]
    real = peak_of(lambda: upstream(**batch))
    assert stand_in(40) == pytest.approx(real, rel=TOLERANCES["stand_in_peak_relative"])
    assert stand_in(20) != pytest.approx(real, rel=TOLERANCES["stand_in_peak_relative"])


def test_full_size_peak(upstream_classes):
    model_class, config_class = upstream_classes
    config = RealtimeFamily().full_size_config(config_class, "1.7b")
    with torch.device("meta"):
        assert sum(p.numel() for p in model_class(config).parameters()) == 2_331_940_864
    batch, rung = MicroBatch(1, 600, 350), Rung("staged", gradients="host", states="host")
    figures = simulate_rung(RealtimeFamily(), model_class, config, batch, rung)
    upstream = simulate_upstream(RealtimeFamily(), model_class, config, batch, checkpointing=False)
    assert figures.peak_bytes <= 5.5 * GIB
    assert upstream.peak_bytes > 3 * figures.peak_bytes
