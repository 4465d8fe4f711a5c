"""Weights that are away while the loss works, and back bit for bit."""

from __future__ import annotations

import pytest
import torch
from small_models import DIRECT, FAMILY, Ours, gradients, pair, relative_errors, speech_batch, tiny_model
from tolerances import TOLERANCES

from moss_tts_patches.loss.engine import EngineOptions, LossEngine
from moss_tts_patches.memory.tracker import StorageTracker
from moss_tts_patches.memory.weight_parking import WeightParking
from moss_tts_patches.runtime.checkpointing import checkpoint_layers, layer_parameters


def test_weights_leave_their_device_and_come_back():
    model = tiny_model(torch.bfloat16)
    parameters = list(layer_parameters(FAMILY.backbone(model)))
    before = [parameter.detach().clone() for parameter in parameters]
    size = sum(parameter.numel() * 2 for parameter in parameters)
    with StorageTracker() as tracker:
        tracker.watch(model.parameters())
        parking = WeightParking(parameters)
        there = tracker.live_bytes
        with parking.away():
            assert there - tracker.live_bytes == size
            assert tracker.host_bytes == parking.host_bytes() == size
        assert tracker.live_bytes == there
    assert all(torch.equal(parameter, old) for parameter, old in zip(parameters, before))


def test_an_optimizer_step_between_two_trips_is_not_lost():
    parameter = torch.nn.Parameter(torch.ones(5))
    parking = WeightParking([parameter, parameter])
    with parking.away():
        pass
    parameter.data.add_(1)
    parking.weights_changed()
    with parking.away():
        pass
    assert parameter.tolist() == [2.0] * 5
    parameter.data.add_(1)  # negative control: nobody said so
    with parking.away():
        pass
    assert parameter.tolist() == [2.0] * 5


def test_weights_come_back_after_an_error():
    parameter = torch.nn.Parameter(torch.arange(4.0))
    with pytest.raises(KeyError), WeightParking([parameter]).away():
        raise KeyError
    assert parameter.tolist() == [0.0, 1.0, 2.0, 3.0]


@pytest.mark.parametrize("schedule", DIRECT)
def test_gradients_are_the_same(schedule):
    there, away = pair(tiny_model())
    batches = [speech_batch(9, seed=1), speech_batch(16, seed=2)]
    for model in (there, away):
        checkpoint_layers(FAMILY.backbone(model))
    Ours(schedule).train(there, batches)
    ours = Ours(schedule)
    parking = WeightParking(layer_parameters(FAMILY.backbone(away)))
    ours.context.engine = LossEngine(EngineOptions(schedule, 7, 2000), ours.store, parking.away)
    ours.train(away, batches)
    errors = relative_errors(gradients(away), gradients(there))
    assert max(errors.values()) <= TOLERANCES["gradient_fp32_relative"]
    assert all(torch.equal(p, q) for p, q in zip(there.parameters(), away.parameters()))
