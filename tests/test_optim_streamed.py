"""Our optimizers as torch optimizers: bit-equality with torch's AdamW, schedulers, hooks, accelerate, gradients."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from moss_tts_patches.errors import NumericsError, SettingsError
from moss_tts_patches.optim import state_store
from moss_tts_patches.optim.gradients import DeviceGradients
from moss_tts_patches.optim.host_gradients import HostGradients
from moss_tts_patches.optim.optimizers import AdamW, AdamW8bit

BOTH = pytest.mark.parametrize("optimizer_class", [AdamW, AdamW8bit])
SHAPES = {"table": (40, 130), "norm": (130,), "scalar": (), "late": (9, 513), "empty": (0, 4)}


def make_parameters(dtype: torch.dtype = torch.float32) -> dict[str, nn.Parameter]:
    generator = torch.Generator().manual_seed(0)
    return {
        name: nn.Parameter((torch.randn(shape, generator=generator) * 0.02).to(dtype)) for name, shape in SHAPES.items()
    }


def give_gradients(parameters: dict[str, nn.Parameter], step: int) -> None:
    """The same gradients for the same step; one parameter has none at first, another skips a step."""
    generator = torch.Generator().manual_seed(step)
    for name, parameter in parameters.items():
        gradient = torch.randn(parameter.shape, generator=generator)
        skipped = (name == "late" and step < 2) or (name == "norm" and step == 3)
        parameter.grad = None if skipped else gradient.to(parameter.dtype)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("states", ["device", "host"])
def test_adamw_is_torchs_to_the_bit(dtype, states, monkeypatch):
    monkeypatch.setattr(state_store, "PIECE_ELEMENTS", 1024)
    ours, theirs = make_parameters(dtype), make_parameters(dtype)
    first = AdamW(ours.items(), 1e-2, (0.8, 0.95), 1e-6, 0.1, states=states)
    second = torch.optim.AdamW(theirs.values(), 1e-2, (0.8, 0.95), 1e-6, 0.1, foreach=False)
    schedules = [torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.7) for optimizer in (first, second)]
    for step in range(6):
        for parameters, optimizer, schedule in zip((ours, theirs), (first, second), schedules):
            give_gradients(parameters, step)
            optimizer.step()
            schedule.step()
            optimizer.zero_grad()
        assert schedules[0].get_last_lr() == schedules[1].get_last_lr()
        for name in SHAPES:
            assert torch.equal(ours[name], theirs[name]), name
    # The control: a parameter that missed the first steps has its own count, which bias correction shows.
    assert first.steps[ours["late"]] == 4 and first.steps[ours["table"]] == 6
    assert all(not torch.equal(ours[name], make_parameters(dtype)[name]) for name in SHAPES if name != "empty")


@BOTH
def test_a_scheduler_changes_the_step(optimizer_class):
    results = []
    for factor in (1.0, 0.1):
        parameters = make_parameters()
        optimizer = optimizer_class(parameters.items(), 1e-3)
        schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step, factor=factor: factor)
        give_gradients(parameters, 5)
        optimizer.step()
        schedule.step()
        results.append((parameters["table"] - make_parameters()["table"]).abs().mean().item())
    assert 5 < results[0] / results[1] < 20


@BOTH
def test_hooks_and_closure(optimizer_class):
    parameters = make_parameters()
    optimizer = optimizer_class(parameters.items(), 1e-3)
    calls = []
    optimizer.register_step_pre_hook(lambda *_: calls.append("before"))
    optimizer.register_step_post_hook(lambda *_: calls.append("after"))

    def closure():
        assert torch.is_grad_enabled()
        calls.append("closure")
        loss = (parameters["table"] ** 2).sum()
        loss.backward()
        return loss

    assert optimizer.step(closure).item() > 0
    assert calls == ["before", "closure", "after"]
    assert parameters["table"].grad is None  # freed as soon as it was used
    assert "betas: (0.9, 0.999)" in repr(optimizer) and "table" not in repr(optimizer)


@BOTH
def test_zero_grad_frees_gradients(optimizer_class):
    parameters = make_parameters()
    optimizer = optimizer_class(parameters.items())
    give_gradients(parameters, 5)
    optimizer.zero_grad(set_to_none=False)
    assert all(parameter.grad is None for parameter in parameters.values())


@BOTH
@pytest.mark.parametrize("states", ["device", "host"])
def test_tied_is_one_and_frozen_costs_nothing(optimizer_class, states):
    shared, frozen = nn.Parameter(torch.randn(64, 128)), nn.Parameter(torch.randn(512, 512), requires_grad=False)
    pairs = [("embedding", shared), ("head", shared), ("frozen", frozen), ("embedding", shared)]
    optimizer = optimizer_class(pairs, 1e-3, states=states)
    assert [optimizer.names[parameter] for parameter in optimizer.param_groups[0]["params"]] == ["embedding", "frozen"]
    before = frozen.detach().clone()
    shared.grad = torch.ones_like(shared)
    optimizer.step()
    assert list(optimizer.state_dict()["state"]) == ["embedding"]
    held = optimizer.states.device_bytes() + optimizer.states.host_bytes()
    assert 0 < held <= 8 * shared.numel() + 1024 < frozen.numel()
    assert torch.equal(before, frozen)


class CountingGradients:
    """A source that keeps gradients elsewhere and records what it is asked for."""

    def __init__(self, gradients: dict[nn.Parameter, torch.Tensor]) -> None:
        self.gradients, self.calls = gradients, []

    def fetch(self, parameter):
        self.calls.append(("fetch", parameter))
        return self.gradients.get(parameter)

    def release(self, parameter):
        self.calls.append(("release", parameter))

    def zero(self):
        self.gradients.clear()


@BOTH
def test_a_gradient_source_is_asked_one_parameter_at_a_time(optimizer_class):
    ours, plain = make_parameters(), make_parameters()
    give_gradients(plain, 1)
    source = CountingGradients({ours[name]: plain[name].grad for name in SHAPES if plain[name].grad is not None})
    first, second = optimizer_class(ours.items(), gradients=source), optimizer_class(plain.items())
    first.step()
    second.step()
    assert all(torch.equal(ours[name], plain[name]) for name in SHAPES)
    fetched = ["table", "norm", "scalar", "late"]
    expected = [
        (call, name) for name in fetched for call in ("fetch", "release") if (call, name) != ("release", "late")
    ]
    names = {parameter: name for name, parameter in ours.items()}
    assert [(call, names[parameter]) for call, parameter in source.calls] == expected
    first.zero_grad()
    assert not source.gradients
    before = ours["table"].detach().clone()
    first.step()
    assert torch.equal(before, ours["table"])


@BOTH
@pytest.mark.parametrize("store_class", [DeviceGradients, HostGradients])
def test_gradient_stores_are_sources(optimizer_class, store_class, monkeypatch):
    """The package's own stores, the host one fetched in pieces, beside ``parameter.grad``."""
    monkeypatch.setattr(state_store, "PIECE_ELEMENTS", 1024)
    ours, plain = make_parameters(), make_parameters()
    store = store_class()
    store.attach(ours.items())
    first, second = optimizer_class(ours.items(), gradients=store), optimizer_class(plain.items())
    for step in range(3):
        give_gradients(plain, step)
        for name, parameter in plain.items():
            if parameter.grad is not None:
                store.add(ours[name], parameter.grad.clone())
        first.step()
        first.zero_grad()
        second.step()
        assert all(torch.equal(ours[name], plain[name]) for name in SHAPES)
    assert not torch.equal(ours["late"], make_parameters()["late"])


@BOTH
def test_accelerate_can_wrap_it(optimizer_class):
    accelerate = pytest.importorskip("accelerate")
    from accelerate.optimizer import AcceleratedOptimizer
    from accelerate.state import AcceleratorState, GradientState, PartialState

    try:
        accelerator = accelerate.Accelerator(cpu=True, gradient_accumulation_steps=2)
        model = nn.Linear(130, 40)
        optimizer = optimizer_class(model.named_parameters(), 1e-3, seed=7)
        schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1 / (1 + step))
        model, wrapped, schedule = accelerator.prepare(model, optimizer, schedule)
        assert isinstance(wrapped, AcceleratedOptimizer) and wrapped.optimizer is optimizer and optimizer.seed == 7
        start = model.weight.detach().clone()
        for micro_batch in range(2):
            with accelerator.accumulate(model):
                accelerator.backward(model(torch.ones(3, 130)).square().mean())
                accelerator.clip_grad_norm_(model.parameters(), 1.0)
                wrapped.step()
                schedule.step()
                wrapped.zero_grad()
            assert torch.equal(start, model.weight) == (micro_batch == 0)
        assert optimizer.steps[model.weight] == 1
        saved = wrapped.state_dict()
        wrapped.load_state_dict(saved)
        assert optimizer.steps[model.weight] == 1
    finally:
        for state in (AcceleratorState, PartialState, GradientState):
            state._reset_state()


def test_parameters_that_become_trainable_or_lose_their_gradient_are_followed():
    parameters = make_parameters()
    parameters["table"].requires_grad_(False)
    optimizer = AdamW8bit(parameters.items(), 1e-3)
    give_gradients({name: p for name, p in parameters.items() if name != "table"}, 5)
    optimizer.step()
    parameters["table"].requires_grad_(True)
    give_gradients(parameters, 6)
    optimizer.step()
    assert optimizer.steps[parameters["table"]] == 1 and optimizer.steps[parameters["norm"]] == 2


def test_another_group_can_be_added():
    first, second = nn.Parameter(torch.zeros(8)), nn.Parameter(torch.zeros(8))
    optimizer = AdamW([("a", first)], 1e-3)
    optimizer.add_param_group({"params": [("b", second)], "lr": 1e-1, "weight_decay": 0.0})
    first.grad, second.grad = torch.ones(8), torch.ones(8)
    optimizer.step()
    assert abs(second.detach()[0].item() / first.detach()[0].item() - 100) < 1
    with pytest.raises(SettingsError, match="two different parameters are named a"):
        optimizer.add_param_group({"params": [("a", nn.Parameter(torch.zeros(2)))]})


@pytest.mark.parametrize(
    "values, message",
    [
        ({"lr": -1.0}, "lr=-1.0, expected a finite number of at least 0"),
        ({"lr": float("nan")}, "lr=nan"),
        ({"betas": (0.9, 1.0)}, r"betas=\(0.9, 1.0\), expected two numbers"),
        ({"eps": 0.0}, "eps=0.0"),
        ({"weight_decay": -0.1}, "weight_decay=-0.1"),
        ({"seed": -1}, "seed=-1"),
        ({"states": "disk"}, "states='disk', expected device or host"),
    ],
)
def test_values_out_of_range_are_refused(values, message):
    with pytest.raises(SettingsError, match=message):
        AdamW8bit([("w", nn.Parameter(torch.zeros(4)))], **values)


@BOTH
def test_what_cannot_be_stepped_is_refused(optimizer_class):
    with pytest.raises(SettingsError, match="no parameter to optimize"):
        optimizer_class([])
    with pytest.raises(SettingsError, match="expected \\(name, parameter\\) pairs"):
        optimizer_class([nn.Parameter(torch.zeros(4))])
    with pytest.raises(NumericsError, match="strides"):
        optimizer_class([("w", nn.Parameter(torch.zeros(4, 6).t()))])
    table = nn.Embedding(10, 4, sparse=True)
    optimizer = optimizer_class(table.named_parameters())
    table(torch.tensor([1, 2])).sum().backward()
    with pytest.raises(NumericsError, match="sparse=False"):
        optimizer.step()
