"""The real, unmodified upstream of moss_tts_local_v1.5: through its own run_train.sh, and its functions in process."""

from __future__ import annotations

import functools
import json
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from safetensors.torch import load_file, save_file
from small_models import DIRECT, SCHEDULES, Ours, gradients, pair, relative_errors
from test_training_runs import assert_same_weights, weight_differences
from tolerances import TOLERANCES
from upstream_runs import (  # noqa: F401  (fixtures)
    ARGUMENTS,
    EXACT,
    assert_upstream_reloads,
    inputs_fixture,
    train_fixture,
    upstream_variables,
)
from upstream_v15 import import_classes, import_trainer

from moss_tts_patches.errors import NumericsError, SeamError
from moss_tts_patches.families.local_v15 import LocalV15Family
from moss_tts_patches.families.self_check import check_against_upstream
from moss_tts_patches.loss.engine import EngineOptions
from moss_tts_patches.memory.simulate import MicroBatch, Rung, simulate_rung, simulate_upstream
from moss_tts_patches.optim.gradients import DeviceGradients
from moss_tts_patches.runtime.progress import LOG_NAME
from moss_tts_patches.units import GIB

pytestmark = pytest.mark.upstream

FAMILY, SEEDS = "moss_tts_local_v1.5", (0,)
OURS = LocalV15Family()
GRADIENT = TOLERANCES["gradient_fp32_relative"]
# Printed by unmodified upstream on the tiny checkpoint of seed 0 (shared notes, section 0).
REFERENCE_LOSSES = [3.7096, 3.6413, 3.6984]


# -- through run_train.sh ---------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def plain(train, tmp_path_factory):
    """Upstream alone."""
    run = train(tmp_path_factory.mktemp("plain"))
    assert run.losses == REFERENCE_LOSSES
    return run


def last(run):
    return run.folder / "checkpoint-last"


def weights(run):
    return load_file(last(run) / "model.safetensors")


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_losses_and_weights_of_every_step(train, plain, tmp_path, schedule):
    place = "host" if schedule == "staged" else "device"
    layer = {**EXACT, "MOSS_LOWMEM_GRADIENTS": place, "MOSS_LOWMEM_STATES": place, "MOSS_LOWMEM_SCHEDULE": schedule}
    run = train(tmp_path / "output", layer=layer)
    assert f"schedule={schedule}" in run.output
    assert run.losses == pytest.approx(plain.losses, abs=TOLERANCES["printed_loss_unit"])
    assert_same_weights(weights(run), weights(plain))
    folders = {path.name for path in plain.folder.iterdir()}
    assert folders == {path.name for path in run.folder.iterdir()} - {LOG_NAME}
    assert folders == {"checkpoint-epoch-1", "checkpoint-last"}
    for folder in folders:
        names = {path.name for path in (plain.folder / folder).iterdir()}
        assert names == {path.name for path in (run.folder / folder).iterdir()}
    for name in ("config.json", "generation_config.json"):
        assert (last(run) / name).read_text() == (last(plain) / name).read_text()


GENERATE = """
import torch
assert type(model).__module__.startswith("transformers_modules.")
ids = torch.full((1, 6, model.config.n_vq + 1), model.config.audio_pad_token_id)
ids[..., 0] = torch.tensor([[3, 4, 5, 6, 7, model.config.audio_start_token_id]])
torch.manual_seed(0)
[(start, frames)] = model.eval().generate(ids, max_new_frames=8)
assert 1 < len(frames) <= 9 and frames.shape[1] == model.config.n_vq + 1
"""


def test_defaults_train_and_upstream_reloads_and_generates(train, inputs, tmp_path, torchaudio_stub, monkeypatch):
    """A checkpoint whose depth model asks for a package that is not there, and the checkpointing that is broken."""
    config = inputs / "0" / "config.json"
    before = config.read_text()
    stored = {**json.loads(before), "local_transformer_attn_implementation": "flash_attention_2"}
    config.write_text(json.dumps(stored))
    flags = " --gradient_checkpointing --gradient-checkpointing-impl model_internal"
    try:
        run = train(tmp_path / "output", layer={}, arguments=ARGUMENTS + flags)
    finally:
        config.write_text(before)
    assert "optimizer=adamw8bit" in run.output and "checkpointed_layers=3" in run.output
    assert "correction=depth_attention depth=eager" in run.output
    assert "correction=wrapped_checkpointing" in run.output
    start = load_file(inputs / "0" / "model.safetensors")
    assert weight_differences(weights(run), start)[1] > 0.5
    saved = json.loads((last(run) / "config.json").read_text())
    assert saved["local_transformer_attn_implementation"] == "flash_attention_2"  # the user's file, not our choice
    load = (
        "from transformers import AutoModel\n"
        "import transformers_modules\n"
        "model = AutoModel.from_pretrained(folder, trust_remote_code=True, attn_implementation='eager',\n"
        "    local_transformer_attn_implementation='eager')\n"
        "tied = {name for name in model.state_dict() if name.endswith('lm_head.weight') or 'audio_lm_heads' in name}\n"
        "tied -= {'local_text_lm_head.weight'}\n"
        "model.state_dict = lambda own=model.state_dict(): {n: t for n, t in own.items() if n not in tied}\n"
    )
    load = load.replace("import transformers_modules\n", "")
    environment = upstream_variables(torchaudio_stub, tmp_path / "hf_modules")
    assert_upstream_reloads(last(run), environment, load, GENERATE)


def test_skipped_batches_are_upstreams(train, inputs, tmp_path):
    """One record's embedding is nan: its micro-batches are dropped, with their gradients, and nothing else."""
    path = inputs / "0" / "model.safetensors"
    before, tensors = path.read_bytes(), load_file(path)
    tensors["transformer.embed_tokens.weight"][rare_token(inputs / "0")] = float("nan")
    save_file(tensors, path, metadata={"format": "pt"})
    arguments = ARGUMENTS + " --skip-nonfinite-batches"
    try:
        alone = train(tmp_path / "plain", arguments=arguments)
        run = train(tmp_path / "output", layer={**EXACT, "MOSS_LOWMEM_SCHEDULE": "fused"}, arguments=arguments)
    finally:
        path.write_bytes(before)
    assert alone.output.count("; skipped") == run.output.count("; skipped") == 1
    assert "schedule=autograd instead_of=fused" in run.output
    assert run.losses == pytest.approx(alone.losses, abs=TOLERANCES["printed_loss_unit"])
    expected, found = ({name: tensor.nan_to_num(7.0) for name, tensor in weights(one).items()} for one in (alone, run))
    assert_same_weights(found, expected)


def rare_token(folder: Path) -> int:
    """A token that one record's text has and no other's."""
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(folder)
    texts = [json.loads(line)["text"] for line in (folder / "train.jsonl").read_text().splitlines()]
    ids = [set(tokenizer.encode(text)) for text in texts]
    return next(
        token
        for index, own in enumerate(ids)
        for token in sorted(own)
        if not any(token in x for x in ids[:index] + ids[index + 1 :])
    )


# -- one micro-batch in process ---------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def upstream(upstream_repo):
    """Upstream's model and config classes, and its loss."""
    model_class, config_class = import_classes(upstream_repo)
    trainer = import_trainer(upstream_repo)
    return SimpleNamespace(
        model=model_class,
        config=config_class,
        loss=trainer.compute_supervised_loss,
        configure_gradient_checkpointing=trainer.configure_gradient_checkpointing,
    )


def small_model(upstream, **options):
    config = OURS.shrunken_config(upstream.config(**options))
    torch.manual_seed(0)
    model = upstream.model(config).train()
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim == 1:
                parameter.add_(torch.randn_like(parameter) * 0.1)
    OURS.check_structure(model)
    return model


def sample(model, seed=5):
    return OURS.sample_batch(model.config, torch.Generator().manual_seed(seed))


def without(*channels):
    def change(batch):
        batch["labels"][..., list(channels)] = -100

    return change


def one_frame(batch):
    batch["labels"][:, :-2] = -100
    batch["labels"][1] = -100


def some_codes(batch):
    hidden = torch.rand(batch["labels"].shape, generator=torch.Generator().manual_seed(6)) < 0.4
    batch["labels"] = batch["labels"].masked_fill(hidden, -100)


CHANGES = {
    "padded": lambda batch: None,
    "one frame": one_frame,
    "sparse labels": some_codes,
    "codebook without labels": without(2),
    "last codebook without labels": without(3),
    "no binary text label": without(0),
    "text only": without(1, 2, 3),
    "no weights": lambda batch: batch.update(channelwise_loss_weight=None),
}


def compare(upstream, model, batch, ours, found_batch=None):
    """Losses and relative errors of every gradient, upstream's first."""
    expected, found = pair(model)
    reference = upstream.loss(expected, **batch)
    reference.backward()
    [loss] = ours.train(found, [batch if found_batch is None else found_batch])
    return loss, reference.item(), relative_errors(gradients(found), gradients(expected))


@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.parametrize("change", CHANGES)
def test_loss_and_every_gradient(upstream, schedule, change):
    model = small_model(upstream)
    batch = sample(model)
    CHANGES[change](batch)
    ours = Ours(schedule, chunk_frames=3, logits_at_once=60, family=OURS)
    loss, reference, errors = compare(upstream, model, batch, ours)
    assert loss == pytest.approx(reference, rel=TOLERANCES["loss_fp32_relative"])
    assert max(errors.values()) <= GRADIENT, max(errors, key=errors.get)
    # Without a binary label upstream's text head has no gradient at all, and AdamW must not decay it.
    assert ("local_text_lm_head.weight" in errors) == (change != "no binary text label")


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_a_text_head_over_the_whole_vocabulary(upstream, schedule):
    """The config's other mode: the tied input embedding is a head as well."""
    model = small_model(upstream, local_text_head_mode="full_vocab")
    ours = Ours(schedule, chunk_frames=3, logits_at_once=200, family=OURS)
    loss, reference, errors = compare(upstream, model, sample(model), ours)
    assert loss == pytest.approx(reference, rel=TOLERANCES["loss_fp32_relative"])
    assert max(errors.values()) <= GRADIENT, max(errors, key=errors.get)


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_the_comparison_sees_a_dropped_frame(upstream, schedule):
    """Negative control."""
    model = small_model(upstream)
    batch = sample(model)
    shorter = {**batch, "labels": batch["labels"].clone()}
    shorter["labels"][1, 6] = -100
    _, _, errors = compare(upstream, model, batch, Ours(schedule, family=OURS), shorter)
    assert max(errors.values()) > 100 * GRADIENT


class ForgetfulStore(DeviceGradients):
    """Loses what the depth model's inputs and the backbone's owe to one tied table."""

    def add_rows(self, parameter, ids, rows):
        if self._names[parameter] != "audio_embeddings.1.weight":
            super().add_rows(parameter, ids, rows)


@pytest.mark.parametrize("schedule", DIRECT)
def test_a_tied_table_owes_three_contributions(upstream, schedule):
    model = small_model(upstream)
    with pytest.raises(NumericsError, match=r"audio_embeddings\.1\.weight \(expected 3, got 1\)"):
        Ours(schedule, store=ForgetfulStore(), family=OURS).train(model, [sample(model)])


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_all_labels_ignored(upstream, schedule):
    model = small_model(upstream)
    batch = sample(model)
    batch["labels"][..., 1:] = -100
    batch["labels"][..., 0] = 12  # neither "one more frame" nor "the end"
    with pytest.raises(RuntimeError):
        upstream.loss(model, **batch)
    with pytest.raises(RuntimeError, match="all labels of a micro-batch are ignored"):
        Ours(schedule, family=OURS).train(model, [batch])
    assert not gradients(model)


def test_full_size_peak(upstream):
    """4.1 B parameters, 7.7 GiB of weights; upstream's default checkpointing beside it."""
    config = OURS.full_size_config(upstream.config, "4b")
    with torch.device("meta"):
        assert sum(p.numel() for p in upstream.model(config).parameters()) == 4_129_990_144
    batch = MicroBatch(1, 600, 350)
    figures = simulate_rung(OURS, upstream.model, config, batch, Rung("staged", gradients="host", states="host"))
    options = {"scope": "global", "use_reentrant": False, "impl": "module_wrapper"}
    reference = simulate_upstream(
        OURS,
        upstream.model,
        config,
        batch,
        checkpointing=True,
        forward=upstream.loss,
        enable_checkpointing=functools.partial(upstream.configure_gradient_checkpointing, **options),
    )
    assert figures.peak_bytes <= 9.8 * GIB
    assert reference.peak_bytes > 3 * figures.peak_bytes
    assert figures.matmul_flops < reference.matmul_flops


def test_self_check_sees_other_mathematics(upstream):
    config = upstream.config()
    for schedule in SCHEDULES:
        check_against_upstream(OURS, upstream.model, config, upstream.loss, EngineOptions(schedule))

    def unweighted(model, **batch):
        return upstream.loss(model, **{**batch, "channelwise_loss_weight": None})

    with pytest.raises(SeamError, match=r"self check of moss_tts_local_v1\.5"):
        check_against_upstream(OURS, upstream.model, config, unweighted, EngineOptions("staged"))
