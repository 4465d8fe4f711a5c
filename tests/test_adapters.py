"""Adapters on small models: gradients against PEFT under the model's own forward, targets, precision, files."""

from __future__ import annotations

import copy
import json

import pytest
import torch
from peft import LoraConfig, PeftModel, get_peft_model
from safetensors.torch import load_file, save_file
from small_families import SMALL
from small_models import (
    SCHEDULES,
    Ours,
    autocast_to,
    gradients,
    pair,
    relative_errors,
    speech_batch,
    tiny_model,
    train_reference,
)
from tolerances import TOLERANCES
from torch import nn

from moss_tts_patches.adapters.injection import inject
from moss_tts_patches.adapters.plan import AdapterPlan, options_from_file
from moss_tts_patches.adapters.precision import base_precision
from moss_tts_patches.adapters.record import AdapterRecord
from moss_tts_patches.adapters.saving import save_adapter
from moss_tts_patches.adapters.targets import resolve_targets
from moss_tts_patches.adapters.training import AdapterTraining
from moss_tts_patches.errors import NumericsError, SeamError, SettingsError
from moss_tts_patches.families.local import LocalFamily
from moss_tts_patches.loss.random_state import RandomState
from moss_tts_patches.optim.gradients import DeviceGradients
from moss_tts_patches.optim.host_gradients import HostGradients
from moss_tts_patches.runtime.checkpointing import checkpoint_layers

GRADIENT = TOLERANCES["gradient_fp32_relative"]
FAMILIES = {"moss_tts_local": LocalFamily(), **{name: small.family for name, small in SMALL.items()}}
OPTIONS = {"r": 4, "lora_alpha": 8, "lora_dropout": 0.0}


def base_of(name):
    return tiny_model() if name == "moss_tts_local" else SMALL[name].model()


def batches_of(name):
    if name == "moss_tts_local":
        return [speech_batch(frames, batch=batch, seed=frames) for frames, batch in ((17, 2), (5, 1))]
    return [SMALL[name].batch(seed) for seed in (1, 2)]


def train_with_upstreams_forward(model, batches, name="moss_tts_local"):
    if name == "moss_tts_local":
        return train_reference(model, batches)
    return SMALL[name].train_reference(model, batches)


def adapted(model, name="moss_tts_local", *, nonzero=True, **plan):
    """Injects, and gives every B a value: at its initial zero no A has a gradient."""
    made = inject(
        model,
        AdapterPlan("lora", **{"options": OPTIONS, **plan}),
        FAMILIES[name].adapter_groups,
        base_model="base",
        seed=3,
    )
    if nonzero:
        generator = torch.Generator().manual_seed(5)
        for parameter_name, parameter in made.named_parameters():
            if "lora_B" in parameter_name or "lora_embedding" in parameter_name:
                parameter.data.copy_(torch.randn(parameter.shape, generator=generator) * 0.2)
    return made


# -- gradients --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dora", [False, True])
@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.parametrize("name", FAMILIES)
def test_every_gradient_equals_pefts_under_the_models_own_forward(name, schedule, dora):
    """All groups at once, with layer checkpointing, against no checkpointing. (v1.5's heads and tables cannot.)"""
    family, model = FAMILIES[name], base_of(name)
    adapted(model, name, targets=tuple(family.adapter_groups), options=OPTIONS | {"use_dora": dora})
    expected, found = pair(model)
    reference = train_with_upstreams_forward(expected, batches_of(name), name)
    checkpoint_layers(family.backbone(found))
    losses = Ours(schedule, chunk_frames=3, logits_at_once=128, family=family).train(found, batches_of(name))
    assert losses == pytest.approx(reference, rel=TOLERANCES["loss_fp32_relative"])
    names = {n for n, p in found.named_parameters() if p.requires_grad}
    assert gradients(found).keys() == names
    assert all("lora_" in n for n in names)
    assert max(relative_errors(gradients(found), gradients(expected)).values()) <= GRADIENT
    assert all(gradient.norm() > 0 for gradient in gradients(found).values())


def test_a_lookup_that_forgets_the_adapter_would_be_seen(monkeypatch):
    """Negative control of the test above."""
    from moss_tts_patches.loss import heads

    monkeypatch.setattr(heads, "_through_adapter", lambda lookup, gradient: None)
    model = base_of("moss_tts_local")
    adapted(model, targets=("audio_embeddings",))
    with pytest.raises(NumericsError, match="lora_embedding"):
        Ours("staged").train(model, batches_of("moss_tts_local"))


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_fully_trained_weights_beside_adapters(schedule):
    model = base_of("moss_tts_local")
    adapted(model, targets=("backbone", "depth"), also_train=("norms", "audio_embeddings"))
    expected, found = pair(model)
    train_with_upstreams_forward(expected, batches_of("moss_tts_local"))
    Ours(schedule).train(found, batches_of("moss_tts_local"))
    assert any(name.endswith("norm.weight") for name in gradients(found))
    assert max(relative_errors(gradients(found), gradients(expected)).values()) <= GRADIENT


def descent_error(schedule):
    """How far a small step along the gradient is from lowering the loss by the gradient's norm, with dropout 0.5."""
    model = base_of("moss_tts_local")
    adapted(model, targets=("depth",), options=OPTIONS | {"lora_dropout": 0.5})
    torch.manual_seed(11)
    losses = Ours(schedule, chunk_frames=4).train(model, [speech_batch(9)])
    found = gradients(model)
    step = 1e-4
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if parameter.requires_grad:
                parameter.sub_(step * found[name].float() / sum(g.norm() ** 2 for g in found.values()).sqrt())
    model.zero_grad()
    torch.manual_seed(11)
    [after] = Ours(schedule, chunk_frames=4).train(model, [speech_batch(9)])
    slope = float(sum(g.norm() ** 2 for g in found.values()).sqrt())
    return abs((losses[0] - after) / (step * slope) - 1)


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_dropout_is_drawn_alike_in_both_passes_of_a_chunk(schedule, monkeypatch):
    """The second forward of ``staged`` and ``autograd`` has to repeat the first one's masks."""
    assert descent_error(schedule) <= TOLERANCES["directional_derivative"]
    if schedule != "fused":  # which has only one
        monkeypatch.setattr(RandomState, "restore", lambda self: None)
        assert descent_error(schedule) > 3 * TOLERANCES["directional_derivative"]


@pytest.mark.parametrize("store", [DeviceGradients, HostGradients])
@pytest.mark.parametrize("schedule", SCHEDULES)
def test_float32_adapters_on_a_bf16_base_under_autocast(schedule, store):
    model = tiny_model(torch.bfloat16)
    made = adapted(model, targets=("backbone", "depth", "adapters", "audio_heads", "audio_embeddings"))
    assert {p.dtype for _, p in made.named_parameters()} == {torch.float32}
    assert {p.dtype for p in model.parameters() if not p.requires_grad} == {torch.bfloat16}
    ours = Ours(schedule, store=store() if store is DeviceGradients else HostGradients(torch.float32))
    ours.store.attach(model.named_parameters())
    with autocast_to(torch.bfloat16):
        loss = ours.loss(model, speech_batch(19, batch=2)).float()
    loss.backward()
    ours.store.end_micro_batch(ours.context.expected_contributions)
    for name, parameter in made.named_parameters():
        gradient = ours.store.fetch(parameter)
        assert gradient is not None and gradient.norm() > 0, name


# -- targets ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", FAMILIES)
def test_defaults_are_the_projections_of_all_layers(name):
    model, family = base_of(name), FAMILIES[name]
    found = resolve_targets(model, (), family.adapter_groups)
    depth = family.depth_model(model)
    layers = [*family.backbone(model).layers, *getattr(depth, "layers", getattr(depth, "h", ()))]
    linear = {id(module) for layer in layers for module in layer.modules() if isinstance(module, nn.Linear)}
    assert {id(model.get_submodule(name)) for name in found} == linear
    assert len(found) == len(linear) > 0


def test_patterns_are_pefts_and_commas_within_brackets_stay():
    from moss_tts_patches.settings import split_list

    model, groups = tiny_model(), LocalFamily.adapter_groups
    assert split_list(r"q_proj, .*layers\.\d{1,2}\.mlp\.up_proj") == ("q_proj", r".*layers\.\d{1,2}\.mlp\.up_proj")
    for pattern in ("q_proj", "self_attn.q_proj", r".*local_transformer\.layers\.0\.mlp\.(gate|up)_proj"):
        wanted = pattern if "(" in pattern else [pattern]
        reference = get_peft_model(copy.deepcopy(model), LoraConfig(target_modules=wanted)).base_model.model
        names = [n for n, m in reference.named_modules() if hasattr(m, "lora_A")]
        assert resolve_targets(model, (pattern,), groups) == names


@pytest.mark.parametrize(
    ("targets", "message"),
    [
        (("q_porj",), "q_porj.*matches no module.*backbone, depth, adapters"),
        (("norm",), "norm.*Expected linear layers"),
        (("(",), "not a regular expression"),
        (("backbone", "embed_tokens"), "embed_tokens.*matches"),
    ],
)
def test_a_wrong_target_is_named(targets, message):
    model = tiny_model()
    LocalFamily().unread_embeddings(model)
    from moss_tts_patches.runtime.parked import park_embedding

    for parent, attribute in LocalFamily().unread_embeddings(model):
        park_embedding(parent, attribute)
    with pytest.raises(SettingsError, match=message):
        adapted(model, targets=targets)
    assert not any("lora_" in name for name, _ in model.named_parameters())


def test_a_tied_head_or_embedding_is_refused():
    model = tiny_model()
    model.lm_heads[1].weight = model.model.embedding_list[1].weight
    for targets in (("audio_heads",), ("audio_embeddings",)):
        with pytest.raises(SettingsError, match=r"shares its weight with"):
            adapted(model, targets=targets)
    with pytest.raises(SettingsError, match=r"ALSO_TRAIN.*shares its weight with"):
        adapted(model, also_train=("audio_heads",))


def test_also_train_knows_its_groups():
    with pytest.raises(SettingsError, match="expected norms, adapters, audio_heads, audio_embeddings"):
        adapted(tiny_model(), also_train=("backbone",))
    made = adapted(tiny_model(), targets=("backbone",), also_train=("audio_heads",))
    assert {n.split(".")[0] for n in made.fully_trained} == {"lm_heads", "layer_norm_before_lm_heads"}
    assert "lm_heads.0" not in made.fully_trained
    with pytest.raises(SettingsError, match="has an adapter already"):
        adapted(tiny_model(), targets=("audio_heads",), also_train=("audio_heads",))


# -- precision --------------------------------------------------------------------------------------------------------


def test_cards_without_bf16_get_an_fp16_base():
    assert base_precision("bf16", (8, 6), "RTX 3060") == ("bf16", None)
    assert base_precision("bf16", None, "the CPU") == ("bf16", None)
    assert base_precision("no", (7, 5), "T4") == ("no", None)
    chosen, reason = base_precision("bf16", (7, 5), "T4")
    assert chosen == "fp16" and "T4" in reason and "7.5" in reason


def test_no_trained_tensor_is_fp16_and_a_loss_scaler_unscales():
    model = tiny_model(torch.float16)
    made = adapted(model, also_train=("norms", "audio_embeddings"))
    trained = [p for _, p in made.named_parameters()]
    assert {p.dtype for p in trained} == {torch.float32}
    for parameter in trained:
        parameter.grad = torch.ones_like(parameter)
    optimizer = torch.optim.SGD(trained, lr=1.0)
    scaler = torch.amp.GradScaler("cpu", init_scale=4.0)
    scaler.scale(torch.zeros(()))  # makes the scale
    scaler.unscale_(optimizer)
    assert all(torch.equal(p.grad, torch.full_like(p, 0.25)) for p in trained)
    half = nn.Parameter(torch.ones(2, dtype=torch.float16))
    half.grad = torch.ones_like(half)
    with pytest.raises(ValueError, match="Attempting to unscale FP16 gradients"):  # what must be impossible
        scaler.unscale_(torch.optim.SGD([half], lr=1.0))


# -- random numbers, the first step -----------------------------------------------------------------------------------


def test_injection_draws_from_no_global_generator():
    torch.manual_seed(7)
    expected = torch.rand(3)
    torch.manual_seed(7)
    adapted(tiny_model(), targets=("backbone",))
    assert torch.equal(torch.rand(3), expected)
    first, second = (dict(adapted(tiny_model(), nonzero=False).named_parameters()) for _ in range(2))
    assert all(torch.equal(first[name], second[name]) for name in first)


def test_an_adapter_without_a_gradient_stops_the_run_by_name():
    training = AdapterTraining(
        AdapterPlan("lora", options=OPTIONS), LocalFamily.adapter_groups, "f", settings={}, merge="none", say=print
    )
    model = tiny_model()
    made = training.model_loaded(model, seed=0)
    names = [name for name, _ in made.named_parameters()]
    store = DeviceGradients()
    store.attach(model.named_parameters())
    for name, parameter in made.named_parameters():
        if "layers.1.mlp.up_proj.lora_A" not in name:
            store.add(parameter, torch.ones_like(parameter))
    missing = [name for name in names if "layers.1.mlp.up_proj.lora_A" in name]
    store.end_micro_batch({dict(made.named_parameters())[name]: 0 for name in missing})
    with pytest.raises(NumericsError, match=f"{len(missing)} trained tensors.*layers.1.mlp.up_proj.lora_A"):
        training.check_gradients(store)
    for name in missing:
        parameter = dict(made.named_parameters())[name]
        store.add(parameter, torch.zeros_like(parameter))
    store.end_micro_batch({p: int(n in missing) for n, p in made.named_parameters()})
    training.check_gradients(store)


# -- files ------------------------------------------------------------------------------------------------------------


def record():
    return AdapterRecord(
        kind="adapter",
        family="moss_tts_local",
        base_model="base",
        base_dtype="float32",
        method="lora",
        rank=4,
        alpha=8,
        targets=("backbone",),
        steps=1,
        epoch=0,
    )


@pytest.mark.parametrize("options", [{}, {"use_dora": True}, {"use_rslora": True, "lora_bias": True}])
def test_peft_loads_what_was_saved(tmp_path, options):
    model = tiny_model()
    made = adapted(
        model,
        # PEFT has no bias for an embedding's adapter.
        targets=("backbone", "depth", "audio_heads", *(() if "lora_bias" in options else ("audio_embeddings",))),
        also_train=("norms",),
        options=OPTIONS | options,
    )
    with torch.no_grad():
        model.model.language_model.norm.weight.add_(0.3)
    save_adapter(made, tmp_path, record())
    assert len(load_file(tmp_path / "adapter_model.safetensors")) == sum(1 for _ in made.named_parameters())
    loaded = PeftModel.from_pretrained(tiny_model(), str(tmp_path)).eval()
    batch = speech_batch(11)
    with torch.no_grad():
        expected, found = model.eval()(**batch).loss, loaded(**batch).loss
        base = tiny_model().eval()(**batch).loss
    assert found.item() == pytest.approx(expected.item(), rel=1e-6)
    assert abs(base - expected) > 1e-3
    config = json.loads((tmp_path / "adapter_config.json").read_text())
    assert config["task_type"] is None and config["inference_mode"] is True
    assert "model.language_model.norm" in config["modules_to_save"]


def test_a_save_that_would_lose_tensors_fails_and_writes_nothing(tmp_path):
    model = tiny_model()
    made = adapted(model, targets=("backbone",))

    class Wrapper(nn.Module):  # as upstream's checkpoint wrapper: one more word in every name
        def __init__(self, inner):
            super().__init__()
            self.wrapped = inner

    stranger = nn.Parameter(torch.ones(1))
    model.register_parameter("stranger", stranger)
    with pytest.raises(SeamError, match="tensors to save for"):
        save_adapter(made, tmp_path / "out", record())
    assert not (tmp_path / "out").exists()


def test_training_starts_from_a_given_adapter(tmp_path):
    source = tiny_model()
    made = adapted(source, targets=(r"model\.language_model.*q_proj",))
    save_adapter(made, tmp_path, record())
    file = load_file(tmp_path / "adapter_model.safetensors")
    for targets in ((), ("backbone", "depth")):
        model = tiny_model()
        adapted(model, targets=targets, start=tmp_path, nonzero=False)
        own = dict(model.named_parameters())
        for name, tensor in file.items():
            place = name.removeprefix("base_model.model.").replace(".weight", ".default.weight")
            assert torch.equal(own[place], tensor)
        assert any("local_transformer" in n for n in own if "lora" in n) == bool(targets)


def test_a_start_that_does_not_fit_is_named(tmp_path):
    made = adapted(tiny_model(), targets=(r"model\.language_model.*q_proj",))
    save_adapter(made, tmp_path, record())
    with pytest.raises(SettingsError, match="r=4, and 16 is set"):
        adapted(tiny_model(), start=tmp_path, options=OPTIONS | {"r": 16}, start_fixes=frozenset({"r"}))
    with pytest.raises(SettingsError, match="expected a folder with"):
        adapted(tiny_model(), start=tmp_path / "nowhere")
    config = json.loads((tmp_path / "adapter_config.json").read_text())
    for option, value in (("init_lora_weights", "pissa"), ("use_qalora", True)):
        (tmp_path / "adapter_config.json").write_text(json.dumps({**config, option: value}))
        with pytest.raises(SettingsError, match=f"{option}=.*cannot be carried over"):
            adapted(tiny_model(), start=tmp_path)
    (tmp_path / "adapter_config.json").write_text(json.dumps(config))
    tensors = load_file(tmp_path / "adapter_model.safetensors")
    name = next(iter(tensors))
    save_file({**tensors, name: tensors[name][:, :3].contiguous()}, tmp_path / "adapter_model.safetensors")
    with pytest.raises(SettingsError, match="1 of its tensors do not fit"):
        adapted(tiny_model(), start=tmp_path)
    save_file({"base_model.model.other.q_proj.lora_A.weight": torch.ones(4, 4)}, tmp_path / "adapter_model.safetensors")
    with pytest.raises(SettingsError, match=r"not in this model, other\.q_proj"):
        adapted(tiny_model(), start=tmp_path)


def test_rarer_options_come_from_a_file(tmp_path):
    path = tmp_path / "lora.json"
    path.write_text(json.dumps({"rank_pattern": {"down_proj": 2}}))
    model = tiny_model()
    adapted(model, options=OPTIONS | options_from_file(path))
    ranks = {n.split(".")[-4]: p.shape[0] for n, p in model.named_parameters() if "lora_A" in n}
    assert ranks["down_proj"] == 2 and ranks["up_proj"] == 4
    for content, message in (
        ({"r": 4}, "set MOSS_LOWMEM_LORA_RANK"),
        ({"rank_patern": {}}, "did you mean rank_pattern"),
        ({"init_lora_weights": "pissa"}, "changes the base weights"),
        ([1], "expected one JSON object"),
    ):
        path.write_text(json.dumps(content))
        with pytest.raises(SettingsError, match=message):
            options_from_file(path)
    path.write_text("{")
    with pytest.raises(SettingsError, match="not JSON"):
        options_from_file(path)


def test_what_peft_refuses_is_one_message():
    with pytest.raises(SettingsError, match=r"PEFT refuses these options.*lora_bias"):
        adapted(tiny_model(), targets=("audio_embeddings",), options=OPTIONS | {"lora_bias": True})
