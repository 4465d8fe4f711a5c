"""Saved optimizer states: by name, strict in both directions, resumed bit for bit."""

from __future__ import annotations

import copy

import pytest
import torch
from test_optim_states import DTYPES, PLACES, equal, train
from test_optim_streamed import BOTH, SHAPES, make_parameters
from torch import nn

from moss_tts_patches.errors import StateError
from moss_tts_patches.optim import state_store
from moss_tts_patches.optim.optimizers import AdamW, AdamW8bit


@BOTH
@DTYPES
@pytest.mark.parametrize("places", [("device", "device"), ("host", "host"), ("device", "host"), ("host", "device")])
def test_a_resumed_run_is_the_uninterrupted_one(optimizer_class, dtype, places, tmp_path, monkeypatch):
    monkeypatch.setattr(state_store, "PIECE_ELEMENTS", 1024)
    whole = make_parameters(dtype)
    train(optimizer_class(whole.items(), 1e-3, seed=11), whole, range(8))

    first = make_parameters(dtype)
    optimizer = optimizer_class(first.items(), 1e-3, seed=11, states=places[0])
    train(optimizer, first, range(4))
    torch.save(optimizer.state_dict(), tmp_path / "state.pt")
    saved = torch.load(tmp_path / "state.pt", weights_only=True)

    second = {name: nn.Parameter(parameter.detach().clone()) for name, parameter in first.items()}
    resumed = optimizer_class(second.items(), 9.0, seed=0, states=places[1])
    resumed.load_state_dict(saved)
    assert resumed.seed == 11 and resumed.param_groups[0]["lr"] == 1e-3
    train(resumed, second, range(4, 8))
    assert equal(whole, second)

    # The control: without the states the weights are others.
    third = {name: nn.Parameter(parameter.detach().clone()) for name, parameter in first.items()}
    train(optimizer_class(third.items(), 1e-3, seed=11), third, range(4, 8))
    assert not equal(whole, third)


@PLACES
def test_loading_copies_and_keeps_uint8(states):
    parameters = make_parameters(torch.bfloat16)
    optimizer = AdamW8bit(parameters.items(), states=states)
    train(optimizer, parameters, range(3))
    saved = copy.deepcopy(optimizer.state_dict())
    assert saved["state"]["table"]["step"] == 3
    other = AdamW8bit(make_parameters(torch.bfloat16).items(), states=states)
    other.load_state_dict(saved)
    loaded = other.state_dict()["state"]["table"]
    assert loaded["exp_avg_codes"].dtype == torch.uint8 and loaded["exp_avg_absmax"].dtype == torch.float32
    assert torch.equal(loaded["exp_avg_codes"], saved["state"]["table"]["exp_avg_codes"])
    saved["state"]["table"]["exp_avg_codes"].fill_(1)
    assert not (loaded["exp_avg_codes"] == 1).all()


@BOTH
@PLACES
def test_an_empty_state_is_legal_and_forgets(optimizer_class, states):
    parameters = make_parameters()
    optimizer = optimizer_class(parameters.items(), states=states)
    empty = copy.deepcopy(optimizer.state_dict())
    assert empty["state"] == {} and empty["param_groups"][0]["params"] == list(SHAPES)
    optimizer.load_state_dict(empty)
    train(optimizer, parameters, range(3))
    optimizer.load_state_dict(empty)
    assert not optimizer.steps and optimizer.state_dict()["state"] == {}
    fresh, again = (
        make_parameters(),
        {name: nn.Parameter(value.detach().clone()) for name, value in make_parameters().items()},
    )
    with torch.no_grad():
        for name in SHAPES:
            parameters[name].copy_(fresh[name])
    train(optimizer, parameters, range(3))
    train(optimizer_class(again.items()), again, range(3))
    assert equal(parameters, again)


def saved_state() -> dict:
    parameters = make_parameters()
    optimizer = AdamW8bit(parameters.items())
    train(optimizer, parameters, range(4))
    return copy.deepcopy(optimizer.state_dict())


def drop_entry(state):
    del state["state"]["norm"]


def add_entry(state):
    state["state"]["adapter"] = {"step": 1}


def rename_parameter(state):
    state["param_groups"][0]["params"][1] = "other"
    state["state"]["other"] = state["state"].pop("norm")


def drop_tensor(state):
    del state["state"]["table"]["exp_avg_absmax"]


def add_tensor(state):
    state["state"]["table"]["max_exp_avg"] = torch.zeros(1)


def drop_step(state):
    del state["state"]["table"]["step"]


def wrong_shape(state):
    state["state"]["table"]["exp_avg_codes"] = torch.zeros(7, dtype=torch.uint8)


def wrong_dtype(state):
    state["state"]["table"]["exp_avg_codes"] = state["state"]["table"]["exp_avg_codes"].float()


def other_order(state):
    state["param_groups"][0]["params"].reverse()


def other_optimizer(state):
    state.clear()
    state.update(torch.optim.AdamW([nn.Parameter(torch.zeros(3))]).state_dict())


@PLACES
@pytest.mark.parametrize(
    "damage, message",
    [
        (drop_entry, r"missing \(1\): norm\."),
        (add_entry, r"unexpected \(1\): adapter\."),
        (rename_parameter, r"missing \(1\): norm; unexpected \(1\): other\."),
        (drop_tensor, r"missing \(1\): table\.exp_avg_absmax"),
        (add_tensor, r"unexpected \(1\): table\.max_exp_avg"),
        (drop_step, r"missing \(1\): table\.step"),
        (wrong_shape, r"wrong shape \(1\): table\.exp_avg_codes \(found \(7,\), expected \(5200,\)\)"),
        (wrong_dtype, r"wrong dtype \(1\): table\.exp_avg_codes \(found torch\.float32, expected torch\.uint8\)"),
        (other_order, "another order"),
        (other_optimizer, "seed not found"),
    ],
)
def test_a_state_of_other_parameters_is_refused_whole(damage, message, states):
    state = saved_state()
    damage(state)
    parameters = make_parameters()
    optimizer = AdamW8bit(parameters.items(), 0.5, seed=99, states=states)
    train(optimizer, parameters, range(2))
    before = copy.deepcopy(optimizer.state_dict())
    with pytest.raises(StateError, match=message):
        optimizer.load_state_dict(state)
    after = optimizer.state_dict()
    assert after["seed"] == 99 and after["param_groups"][0]["lr"] == 0.5
    for name, entry in before["state"].items():
        assert all(
            torch.equal(torch.as_tensor(value), torch.as_tensor(after["state"][name][key]))
            for key, value in entry.items()
        )
    optimizer.load_state_dict(saved_state())  # the control: undamaged, it loads
    assert optimizer.seed == 0


def test_ten_of_each_kind_are_listed():
    def optimizer(prefix):
        return AdamW([(f"{prefix}.{index}", nn.Parameter(torch.zeros(4))) for index in range(14)])

    with pytest.raises(StateError) as caught:
        optimizer("ours").load_state_dict(optimizer("theirs").state_dict())
    message = str(caught.value)
    assert "missing (14): ours.0, " in message and "ours.9 and 4 more; unexpected (14): theirs.0" in message
    assert "ours.10" not in message
