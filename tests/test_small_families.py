"""The delay and realtime families on small models of our own: loss rules, seams, self check; without upstream."""

from __future__ import annotations

import argparse
from typing import Any
from unittest import mock

import pytest
import torch
from small_families import SmallConfig, SmallDelay, SmallRealtime
from small_models import SCHEDULES, Ours, gradients, pair, relative_errors, train_reference
from tolerances import TOLERANCES

from moss_tts_patches.errors import NumericsError, SeamError
from moss_tts_patches.families import recognise_family
from moss_tts_patches.families.delay import DelayFamily
from moss_tts_patches.families.realtime import RealtimeFamily, predicting_positions
from moss_tts_patches.families.self_check import check_against_upstream
from moss_tts_patches.loss import direct_schedules
from moss_tts_patches.loss.engine import EngineOptions
from moss_tts_patches.optim.host_gradients import HostGradients

LOSS, GRADIENT = TOLERANCES["loss_fp32_relative"], TOLERANCES["gradient_fp32_relative"]
FAMILIES: dict[str, tuple[Any, Any]] = {
    "moss_tts_delay": (DelayFamily(), SmallDelay),
    "moss_tts_realtime": (RealtimeFamily(), SmallRealtime),
}


def small_model(name):
    family, model_class = FAMILIES[name]
    with torch.random.fork_rng():
        torch.manual_seed(0)
        model = model_class(family.shrunken_config(SmallConfig())).train()
    for parent, attribute in family.unread_embeddings(model):
        getattr(parent, attribute).weight.requires_grad_(False)
    return model


def batch_of(name, seed=1):
    family, _ = FAMILIES[name]
    return family.sample_batch(family.shrunken_config(SmallConfig()), torch.Generator().manual_seed(seed))


def sparse(name):
    batch = batch_of(name, seed=2)
    hidden = torch.rand(batch["labels"].shape, generator=torch.Generator().manual_seed(3)) < 0.4
    return batch | {"labels": batch["labels"].masked_fill(hidden, -100)}


def empty_channel(name):
    batch = batch_of(name, seed=4)
    batch["labels"][..., 2] = -100
    return batch


def without_weights(name):
    return {key: value for key, value in batch_of(name, seed=5).items() if key != "channelwise_loss_weight"}


BATCHES = {"as it comes": batch_of, "sparse labels": sparse, "empty channel": empty_channel, "bare": without_weights}


@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.parametrize("batch", BATCHES)
@pytest.mark.parametrize("name", FAMILIES)
def test_loss_and_every_gradient(name, batch, schedule):
    expected, found = pair(small_model(name))
    [reference] = train_reference(expected, [BATCHES[batch](name)])
    [loss] = Ours(schedule, chunk_frames=3, logits_at_once=128, family=FAMILIES[name][0]).train(
        found, [BATCHES[batch](name)]
    )
    assert loss == pytest.approx(reference, rel=LOSS)
    assert max(relative_errors(gradients(found), gradients(expected)).values()) <= GRADIENT


@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.parametrize("name", FAMILIES)
def test_host_store_over_several_micro_batches(name, schedule):
    on_device, on_host = pair(small_model(name))
    batches = [make(name) for make in BATCHES.values()]
    store = HostGradients()
    Ours(schedule, scale=0.25, family=FAMILIES[name][0]).train(on_device, batches)
    ours = Ours(schedule, scale=0.25, store=store, family=FAMILIES[name][0])
    store.attach(on_host.named_parameters())
    for batch in batches:
        (ours.loss(on_host, batch) * 0.25).backward()
        store.end_micro_batch(ours.context.expected_contributions)
    exact = gradients(on_device)
    found = {key: store.fetch(p).double() for key, p in on_host.named_parameters() if store.has(p)}
    assert found.keys() == exact.keys()
    assert [key for key in found if not torch.equal(found[key], exact[key])] == []


class UnmaskedDelay(SmallDelay):
    """An upstream that no longer masks the pad code."""

    @staticmethod
    def summed(logits, targets, *, audio):
        return SmallDelay.summed(logits, targets, audio=False)


class UnshiftedRealtime(SmallRealtime):
    """An upstream that shifts its labels itself."""

    def forward(self, input_ids, attention_mask, labels):
        return super().forward(input_ids, attention_mask, labels.roll(-1, 1))


@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.parametrize("name,changed", [("moss_tts_delay", UnmaskedDelay), ("moss_tts_realtime", UnshiftedRealtime)])
def test_the_self_check_sees_other_mathematics(name, changed, schedule):
    family, model_class = FAMILIES[name]
    check_against_upstream(family, model_class, SmallConfig(), model_class.forward, EngineOptions(schedule))
    with pytest.raises(SeamError, match=f"self check of {name}"):
        check_against_upstream(family, changed, SmallConfig(), changed.forward, EngineOptions(schedule))


def test_a_channel_without_labels_keeps_its_weight():
    """Half of the weight on it halves the loss: 0.0 for it, not nan, and not left out."""
    model, batch = small_model("moss_tts_delay"), empty_channel("moss_tts_delay")
    ours = Ours("staged", family=DelayFamily())
    losses = []
    for weight in (0.0, 3.0):
        batch["channelwise_loss_weight"] = [1.0, 1.0, weight, 1.0]
        losses += ours.train(pair(model)[0], [batch])
    assert losses[1] == pytest.approx(losses[0] / 2, rel=LOSS)


def test_a_wrong_number_of_channel_weights_is_refused():
    batch = batch_of("moss_tts_delay") | {"channelwise_loss_weight": [1.0, 2.0]}
    with pytest.raises(ValueError, match="2 values, expected 4"):
        Ours("staged", family=DelayFamily()).train(small_model("moss_tts_delay"), [batch])


def test_a_micro_batch_without_audio_labels_is_refused():
    batch = batch_of("moss_tts_realtime")
    batch["labels"][..., 1:] = -100
    with pytest.raises(NumericsError, match="without a single audio label"):
        Ours("staged", family=RealtimeFamily()).train(small_model("moss_tts_realtime"), [batch])


def test_positions_are_predicted_from_the_one_before_within_the_record():
    labels = torch.empty(2, 5, 3)
    assert predicting_positions(torch.tensor([0, 1, 4, 5, 6]), labels).tolist() == [0, 0, 3, 5, 5]


class LocalLookalike(SmallDelay):
    """The delay family's class name with the local family's way to predict codes."""

    def _prepare_shifted_audio_inputs(self, label_ids):
        return label_ids


def test_families_whose_classes_share_a_name_are_told_apart():
    names = {
        "moss_tts_delay": {"MossTTSDelayModel": SmallDelay},
        "moss_tts_local": {"MossTTSDelayModel": LocalLookalike},
        "moss_tts_realtime": {"MossTTSRealtime": SmallRealtime},
    }
    assert {name: recognise_family(namespace).name for name, namespace in names.items()} == {n: n for n in names}


@pytest.mark.parametrize(
    "name,part,length",
    [
        ("moss_tts_delay", "lm_heads", 4),
        ("moss_tts_delay", "emb_ext", 3),
        ("moss_tts_realtime", "embed_tokens", 4),
        ("moss_tts_realtime", "local_transformer.local_lm_heads", 3),
        ("moss_tts_realtime", "local_transformer.model.embed_tokens", 2),
    ],
)
def test_missing_and_shortened_parts_are_named(name, part, length):
    family, model_class = FAMILIES[name]
    model = small_model(name)
    family.check_structure(model)
    parts = model.get_submodule(part)
    del parts[-1]
    with pytest.raises(SeamError, match=rf"{model_class.__name__}\.{part}: found {length - 1} entries, expected"):
        family.check_structure(model)
    parent, _, attribute = part.rpartition(".")
    delattr(model.get_submodule(parent), attribute)
    with pytest.raises(SeamError, match=rf"{model_class.__name__}\.{part}: not found on the model"):
        family.check_structure(model)


def test_the_checkpointing_flag_of_a_trainer_that_has_none():
    parser = argparse.ArgumentParser()
    RealtimeFamily().extend_parser(parser)
    RealtimeFamily().extend_parser(parser)  # as on an upstream that has the flag by now
    assert parser.parse_args(["--gradient-checkpointing"]).gradient_checkpointing is True
    assert not hasattr(parser.parse_args([]), "gradient_checkpointing")  # nothing new in the saved arguments


@pytest.mark.parametrize("name", FAMILIES)
def test_unreleased_sizes_are_refused(name):
    with pytest.raises(ValueError, match=rf"{name} size '70b': expected .*1\.7b"):
        FAMILIES[name][0].full_size_config(SmallConfig, "70b")
    assert FAMILIES[name][0].full_size_config(SmallConfig, "1.7b").language_config.num_hidden_layers == 28


def bf16_error_ratio(name, schedule):
    """Our error against float32 as a multiple of the trainer's own, over the whole model and six micro-batches.

    Single small tensors differ by chance.
    """
    errors = {"ours": 0.0, "theirs": 0.0}
    rounded = small_model(name).bfloat16()
    for seed in range(6):
        batch = batch_of(name, seed)
        exact, theirs, ours = pair(rounded)[0].float(), *pair(rounded)
        train_reference(exact, [batch])
        train_reference(theirs, [batch], autocast=torch.bfloat16)
        Ours(schedule, chunk_frames=3, logits_at_once=128, family=FAMILIES[name][0]).train(
            ours, [batch], autocast=torch.bfloat16
        )
        for key, model in (("ours", ours), ("theirs", theirs)):
            errors[key] += sum(error**2 for error in relative_errors(gradients(model), gradients(exact)).values())
    return (errors["ours"] / errors["theirs"]) ** 0.5


@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.parametrize("name", FAMILIES)
def test_bf16_gradients_are_no_worse_than_the_trainers_own(name, schedule):
    assert bf16_error_ratio(name, schedule) <= TOLERANCES["gradient_bf16_error_ratio"]


@pytest.mark.parametrize("name", FAMILIES)
def test_the_bf16_comparison_sees_three_lost_bits(name):
    """Negative control: the heads' gradients rounded to five significant bits (Dekker's split)."""
    original = direct_schedules.heads.head_gradients

    def coarse(*arguments, **options):
        loss, gradient = original(*arguments, **options)
        return loss, gradient * 9 - (gradient * 9 - gradient)

    with mock.patch.object(direct_schedules.heads, "head_gradients", coarse):
        assert bf16_error_ratio(name, "staged") > TOLERANCES["gradient_bf16_error_ratio"]
