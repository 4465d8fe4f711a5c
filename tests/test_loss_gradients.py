"""Loss and every parameter's gradient against the trainer's own forward, for each schedule."""

from __future__ import annotations

import math
from unittest import mock

import pytest
import torch
from small_models import (
    DIRECT,
    SCHEDULES,
    Ours,
    gradients,
    pair,
    relative_errors,
    speech_batch,
    tiny_model,
    train_reference,
)
from tolerances import TOLERANCES

from moss_tts_patches.errors import NumericsError
from moss_tts_patches.loss import direct_schedules
from moss_tts_patches.loss.random_state import RandomState
from moss_tts_patches.optim.gradients import DeviceGradients

LOSS, GRADIENT = TOLERANCES["loss_fp32_relative"], TOLERANCES["gradient_fp32_relative"]


def padded_batch():
    """Two records, the first with padding on the left."""
    batch = speech_batch(19, batch=2, seed=3)
    batch["attention_mask"][0, :3] = False
    batch["labels"][0, :9] = -100
    return batch


def sparse_batch():
    """Labels that come and go within frames, as delayed codebooks or dropped codes would."""
    batch = speech_batch(23, seed=4)
    hidden = torch.rand(batch["labels"].shape, generator=torch.Generator().manual_seed(5)) < 0.4
    batch["labels"] = batch["labels"].masked_fill(hidden, -100)
    return batch


BATCHES = {
    "one frame": lambda: speech_batch(1),
    "shorter than a chunk": lambda: speech_batch(4),
    "whole chunks": lambda: speech_batch(13),
    "a partial chunk": lambda: speech_batch(18),
    "padded": padded_batch,
    "sparse labels": sparse_batch,
}


@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.parametrize("name", BATCHES)
def test_loss_and_gradients_equal_the_trainers(schedule, name):
    expected, found = pair(tiny_model())
    batch = BATCHES[name]()
    [reference] = train_reference(expected, [batch])
    [loss] = Ours(schedule).train(found, [batch])
    assert loss == pytest.approx(reference, rel=LOSS)
    errors = relative_errors(gradients(found), gradients(expected))
    assert max(errors.values()) <= GRADIENT, sorted(errors.items(), key=lambda item: -item[1])[:3]


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_accumulated_and_scaled_gradients(schedule):
    expected, found = pair(tiny_model())
    batches = [speech_batch(frames, seed=frames) for frames in (9, 14, 3)]
    train_reference(expected, batches, scale=1 / 3)
    Ours(schedule, scale=1 / 3).train(found, batches)
    assert max(relative_errors(gradients(found), gradients(expected)).values()) <= GRADIENT


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_the_comparison_sees_a_dropped_frame(schedule):
    """Negative control: the last chunk's depth gradient left out, the loss untouched."""
    expected, found = pair(tiny_model())
    batch = speech_batch(15)
    train_reference(expected, [batch])
    batch["labels"] = batch["labels"].clone()
    batch["labels"][:, 5, :] = -100
    Ours(schedule).train(found, [batch])
    assert max(relative_errors(gradients(found), gradients(expected)).values()) > 100 * GRADIENT


@pytest.mark.parametrize("schedule", DIRECT)
def test_the_comparison_sees_a_wrong_gradient_behind_a_right_loss(schedule):
    """Negative control: one adapter's input gradient is lost; the loss alone would not show it."""
    expected, found = pair(tiny_model())
    batch = speech_batch(15)
    [reference] = train_reference(expected, [batch])
    original = direct_schedules.heads.head_gradients

    def forgetful(channel, *arguments, **options):
        loss, gradient = original(channel, *arguments, **options)
        return loss, gradient * 0 if channel.position == 2 else gradient

    with mock.patch.object(direct_schedules.heads, "head_gradients", forgetful):
        [loss] = Ours(schedule).train(found, [batch])
    assert loss == pytest.approx(reference, rel=LOSS)
    assert max(relative_errors(gradients(found), gradients(expected)).values()) > 100 * GRADIENT


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_channel_without_labels(schedule):
    """Upstream prints nan there while its gradients are finite; ours is finite over the others."""
    expected, found = pair(tiny_model())
    batch = speech_batch(11)
    batch["labels"][..., 3] = -100
    [reference] = train_reference(expected, [batch])
    ours = Ours(schedule)
    [loss] = ours.train(found, [batch])
    assert math.isnan(reference)
    assert math.isfinite(loss)
    assert max(relative_errors(gradients(found), gradients(expected)).values()) <= GRADIENT
    assert any("empty_channel_loss" in line for line in ours.said)
    with_correction_off = Ours(schedule, finite_empty_channels=False)
    _, again = pair(tiny_model())
    assert math.isnan(with_correction_off.train(again, [batch])[0])
    assert max(relative_errors(gradients(again), gradients(expected)).values()) <= GRADIENT


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_no_supervised_frame_at_all(schedule):
    model = tiny_model()
    batch = speech_batch(6)
    batch["labels"][:] = -100
    ours = Ours(schedule)
    assert ours.train(model, [batch]) == [0.0]
    assert all(not gradient.any() for gradient in gradients(model).values())


def test_evaluation_computes_the_loss_and_nothing_else():
    model = tiny_model()
    batch = speech_batch(17)
    expected = model(**batch).loss
    for schedule in SCHEDULES:
        ours = Ours(schedule)
        with torch.no_grad():
            assert ours.loss(model.eval(), batch).item() == pytest.approx(expected.item(), rel=LOSS)
        assert not gradients(model)


@pytest.mark.parametrize("schedule", DIRECT)
def test_a_wrong_scale_is_refused(schedule):
    model = tiny_model()
    ours = Ours(schedule, scale=0.5)
    ours.store.attach(model.named_parameters())
    with pytest.raises(NumericsError, match=r"scale 0\.25.*computed for 0\.5"):
        (ours.loss(model, speech_batch(5)) * 0.25).backward()


@pytest.mark.parametrize("schedule", DIRECT)
def test_a_loss_that_is_never_back_propagated_is_noticed(schedule):
    model = tiny_model()
    ours = Ours(schedule)
    ours.store.attach(model.named_parameters())
    ours.loss(model, speech_batch(5))
    with pytest.raises(NumericsError, match="second training loss"):
        ours.loss(model, speech_batch(5))


class LossyStore(DeviceGradients):
    """Loses every contribution to the table of the second channel."""

    def add_rows(self, parameter, ids, rows):
        if self._names[parameter] != "model.embedding_list.1.weight":
            super().add_rows(parameter, ids, rows)


@pytest.mark.parametrize("schedule", DIRECT)
def test_a_lost_contribution_is_noticed_in_its_micro_batch(schedule):
    with pytest.raises(NumericsError, match=r"model\.embedding_list\.1\.weight \(expected 2, got 0\)"):
        Ours(schedule, store=LossyStore()).train(tiny_model(), [speech_batch(5)])


def with_dropout(model, probability=0.5):
    """Puts dropout where an adapter would have it, in the depth model."""
    for layer in model.local_transformer.layers:
        layer.mlp.down_proj = torch.nn.Sequential(torch.nn.Dropout(probability), layer.mlp.down_proj)
    return model


def dropout_gradients(schedule):
    model = with_dropout(tiny_model())
    torch.manual_seed(7)
    Ours(schedule).train(model, [speech_batch(20)])
    return gradients(model)


def test_dropout_in_the_depth_model_draws_the_same_numbers_twice():
    """``fused`` runs the depth model once; ``staged`` and ``autograd`` must repeat its masks chunk by chunk."""
    expected = dropout_gradients("fused")
    for schedule in ("staged", "autograd"):
        assert max(relative_errors(dropout_gradients(schedule), expected).values()) <= GRADIENT
    with mock.patch.object(RandomState, "restore", lambda self: None):
        assert max(relative_errors(dropout_gradients("staged"), expected).values()) > 0.1


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_the_random_stream_goes_on_as_if_the_depth_model_ran_once(schedule):
    after = []
    for name in ("fused", schedule):
        torch.manual_seed(7)
        Ours(name).train(with_dropout(tiny_model()), [speech_batch(20)])
        after.append(torch.rand(3))
    assert torch.equal(*after)
