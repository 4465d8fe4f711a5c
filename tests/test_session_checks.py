"""What a session refuses before anything expensive, and what it chooses by the card."""

from __future__ import annotations

import dataclasses
import types

import pytest
import torch
from accelerate.utils import DistributedType

from moss_tts_patches.engines import TrainingEngine
from moss_tts_patches.errors import EnvironmentProblem, SeamError, SettingsError
from moss_tts_patches.families.local import LocalFamily
from moss_tts_patches.memory.card import StorePlacement, StoreSizes, choose_placement
from moss_tts_patches.optim.gradients import DeviceGradients
from moss_tts_patches.runtime.assembly import name_parameters
from moss_tts_patches.runtime.precision import settle_precision
from moss_tts_patches.runtime.recording import RunRecord
from moss_tts_patches.runtime.report import StepClock
from moss_tts_patches.runtime.stores import StoreRequest, build_stores
from moss_tts_patches.runtime.training_loop import TrainingLoop
from moss_tts_patches.session import Session
from moss_tts_patches.settings import load_settings
from moss_tts_patches.units import GIB


def make_session():
    return Session(load_settings(), LocalFamily(), types.ModuleType("trainer"), [])


def arguments(mixed_precision):
    return types.SimpleNamespace(seed=42, mixed_precision=mixed_precision)


def fake_card(monkeypatch, capability, name="Tesla T4"):
    monkeypatch.setenv("MOSS_LOWMEM_PREFLIGHT", "0")  # it would ask the card for its memory
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda *_: capability)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda *_: name)


@pytest.mark.parametrize("capability", [(7, 0), (7, 5)])
def test_bf16_on_a_card_without_it_is_refused_before_the_model_loads(monkeypatch, capability):
    fake_card(monkeypatch, capability)
    with pytest.raises(EnvironmentProblem, match=r"Tesla T4 has compute capability 7\.\d .*--mixed-precision no"):
        make_session().parsed(arguments("bf16"))
    make_session().parsed(arguments("no"))


def test_fp16_weights_are_refused_on_any_card(monkeypatch):
    fake_card(monkeypatch, (8, 9), "RTX 4060")
    with pytest.raises(EnvironmentProblem, match="cannot unscale fp16 gradients"):
        make_session().parsed(arguments("fp16"))
    make_session().parsed(arguments("bf16"))


def test_the_output_folder_is_ours_before_a_resume_point_is_looked_for(monkeypatch):
    """A training that is just ending may still write one."""
    events = []
    monkeypatch.setenv("MOSS_LOWMEM_PREFLIGHT", "0")
    monkeypatch.setattr("moss_tts_patches.session.claim", lambda folder, **_: events.append(str(folder)))
    session = make_session()
    monkeypatch.setattr(session.resume, "started", lambda *_, **__: events.append("looked"))
    session.parsed(types.SimpleNamespace(seed=42, mixed_precision="no", output_dir="out"))
    assert events == ["out", "looked"]


def test_an_engine_that_the_layer_does_not_know_is_refused_in_one_line():
    accelerator = types.SimpleNamespace(num_processes=2, distributed_type=DistributedType.MULTI_XPU)
    with pytest.raises(SystemExit, match="The layer knows one process, DDP, FSDP and DeepSpeed ZeRO"):
        make_session().accelerator_created(accelerator)


LOCAL = StoreSizes(weights=int(5.08 * GIB), gradients=int(5.08 * GIB), states=int(5.16 * GIB))


@pytest.mark.parametrize(
    "card_gib,expected",
    [
        (None, ("device", "device", "device")),
        (7.8, ("host", "host", "host")),
        (11.9, ("host", "host", "device")),
        (15.9, ("host", "device", "device")),
        (23.9, ("device", "device", "device")),
    ],
)
def test_placement_by_card_and_model(card_gib, expected):
    card = None if card_gib is None else int(card_gib * GIB)
    assert choose_placement(StorePlacement("auto", "auto", "auto"), card, LOCAL) == StorePlacement(*expected)
    pinned = StorePlacement("device", "host", "host")
    assert choose_placement(pinned, card, LOCAL) == pinned


def test_store_sizes_count_what_trains():
    parameters = [torch.nn.Parameter(torch.ones(100, dtype=torch.bfloat16)), torch.nn.Parameter(torch.ones(50))]
    parameters[1].requires_grad_(False)
    assert StoreSizes.of(parameters, "adamw8bit") == StoreSizes(weights=400, gradients=200, states=203)
    assert StoreSizes.of(parameters, "adamw").states == 400


def test_an_optimizer_that_accelerate_replaced_is_noticed():
    session = make_session()
    session.optimizer = object()
    session.parallel = TrainingEngine(None)
    replaced = types.SimpleNamespace(optimizer=torch.optim.Adam([torch.nn.Parameter(torch.ones(1))]), zero_grad=None)
    with pytest.raises(EnvironmentProblem, match="accelerate replaced object by Adam"):
        session.after_prepare((replaced,))


def test_resume_points_need_an_optimizer_of_the_layer():
    engine = TrainingEngine(None)
    engine.check_resume_points(wanted=True)
    engine.owns_optimizer = True
    engine.check_resume_points(wanted=False)
    with pytest.raises(EnvironmentProblem, match=r"it owns the optimizer states.*MOSS_LOWMEM_RESUME=off"):
        engine.check_resume_points(wanted=True)


def test_a_parameter_of_another_model_has_no_name():
    model, other = torch.nn.Linear(2, 2), torch.nn.Parameter(torch.ones(1))
    assert name_parameters(model, [model.bias]) == [("bias", model.bias)]
    with pytest.raises(SeamError, match="1 of 2 parameters do not belong to the loaded model"):
        name_parameters(model, [model.bias, other])


def make_loop(say, **members):
    """A loop with just the members that a test needs."""
    names = [field.name for field in dataclasses.fields(TrainingLoop) if field.default is field.default_factory]
    return TrainingLoop(**{**dict.fromkeys(names), "clock": StepClock(), "record": RunRecord(), "say": say, **members})


def test_a_nonfinite_gradient_is_named_before_clipping():
    lines = []
    store = DeviceGradients()
    scaling = types.SimpleNamespace(scaler=object())  # its own step leaves such gradients out, and that is no error
    loop = make_loop(lines.append, stores=types.SimpleNamespace(gradients=store), accelerator=scaling)
    parameters = [torch.nn.Parameter(torch.ones(3)), torch.nn.Parameter(torch.ones(2))]
    store.attach([("good", parameters[0]), ("bad", parameters[1])])
    parameters[0].grad, parameters[1].grad = torch.ones(3), torch.tensor([1.0, float("inf")])
    loop.clip_gradients(parameters, 1.0, 2.0)
    assert lines == ["nonfinite_gradient step=1 norm=inf parameters=bad"]
    assert loop.nonfinite_gradients == ["bad"]
    parameters[1].grad = torch.ones(2)
    loop.clip_gradients(parameters, 1.0, 2.0)
    assert len(lines) == 1


def request(**changes):
    values = {
        "placement": StorePlacement("host", "host", "auto"),
        "host_gradient_dtype": torch.float32,
        "optimizer": "adamw8bit",
        "schedule": "staged",
        "checkpointed_layers": 3,
        "loss_scaler": False,
        "four_bit": False,
    }
    return StoreRequest(**{**values, **changes})


def stores_for(small_card=True, **changes):
    model = torch.nn.Linear(4, 4)
    return build_stores(request(**changes), model, lambda: iter(model.parameters()), 1 if small_card else None)


def test_idle_weights_wait_on_the_host_where_nothing_else_fits():
    assert stores_for().placement == StorePlacement("host", "host", "host")
    assert stores_for().parking is not None
    assert stores_for(small_card=False).parking is None


@pytest.mark.parametrize("schedule,layers", [("autograd", 3), ("staged", 0)])
def test_idle_weights_on_the_host_need_checkpointed_layers_and_a_direct_schedule(schedule, layers):
    pinned = {"placement": StorePlacement("host", "host", "host"), "schedule": schedule, "checkpointed_layers": layers}
    with pytest.raises(SettingsError, match="Expected schedule fused or staged, and MOSS_LOWMEM_CHECKPOINTING=1"):
        stores_for(**pinned)
    # With auto it is our choice to make, and not to make.
    chosen = stores_for(schedule=schedule, checkpointed_layers=layers)
    assert chosen.parking is None and chosen.placement.weights == "device"


def test_a_loss_scaler_keeps_gradients_on_the_gpu():
    auto = StorePlacement("auto", "auto", "device")
    assert stores_for(placement=auto, loss_scaler=True).placement.gradients == "device"
    assert stores_for(placement=auto).placement.gradients == "host"
    with pytest.raises(SettingsError, match="looks for infinities in gradients on the GPU"):
        stores_for(placement=StorePlacement("host", "host", "device"), loss_scaler=True)


def test_weights_in_4_bit_stay_on_the_gpu():
    assert stores_for(four_bit=True).parking is None
    with pytest.raises(SettingsError, match="weights in 4 bit stay on the GPU"):
        stores_for(four_bit=True, placement=StorePlacement("host", "host", "host"))


def test_adapters_may_train_where_all_weights_may_not(monkeypatch):
    fake_card(monkeypatch, (7, 5))
    lines = []
    wanted = arguments("bf16")
    settle_precision(wanted, full=False, log=lines.append)
    assert wanted.mixed_precision == "fp16" and "Tesla T4" in lines[0]
