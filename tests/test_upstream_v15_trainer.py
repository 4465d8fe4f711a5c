"""The functions of the real v1.5 trainer in this process: loading, checkpointing, checks, with the layer on them."""

from __future__ import annotations

import json
import re
import shutil
from pathlib import Path
from types import SimpleNamespace
from unittest import mock

import pytest
import torch
from launcher import PROJECT
from small_models import gradients, relative_errors
from test_training_runs import assert_same_weights, weight_differences
from tolerances import TOLERANCES
from upstream_runs import inputs_fixture  # noqa: F401  (a fixture)
from upstream_v15 import LocalRun, active, import_trainer

from moss_tts_patches.errors import SeamError
from moss_tts_patches.families.local_v15 import LocalV15Family
from moss_tts_patches.families.local_v15_patches import ATTENTION_MASK

pytestmark = pytest.mark.upstream

FAMILY, SEEDS = "moss_tts_local_v1.5", (0,)
OURS = LocalV15Family()
GRADIENT = TOLERANCES["gradient_fp32_relative"]


@pytest.fixture
def trainer(upstream_repo):
    return import_trainer(upstream_repo)


@pytest.fixture(scope="module")
def checkpoint(inputs, tmp_path_factory):
    """The tiny checkpoint under a name of its own: transformers keys the code it caches by the folder's name."""
    return Path(shutil.copytree(inputs / "0", tmp_path_factory.mktemp("v15") / "tiny_local_v15"))


def batches(checkpoint):
    numbers = json.loads((checkpoint / "config.json").read_text())
    config = SimpleNamespace(**numbers)
    made = [OURS.sample_batch(config, torch.Generator().manual_seed(seed)) for seed in range(4)]
    made[1]["labels"][..., 2] = -100
    made[2]["labels"][..., 0] = -100
    return made


def test_stores_give_the_same_bits_and_upstreams_weights(trainer, checkpoint, monkeypatch):
    """Two windows of two micro-batches, clipped hard."""
    alone = LocalRun(trainer, checkpoint)
    reference = alone.train(batches(checkpoint))
    found = {}
    for place in ("device", "host"):
        variables = {"gradients": place, "states": place, "optimizer": "adamw", "corrections": "none"}
        with active(trainer, monkeypatch, **variables):
            run = LocalRun(trainer, checkpoint)
            assert run.train(batches(checkpoint)) == pytest.approx(reference, rel=TOLERANCES["loss_fp32_relative"])
            found[place] = run.weights()
    assert all(torch.equal(found["device"][name], found["host"][name]) for name in found["device"])
    assert_same_weights(found["host"], alone.weights())
    unclipped = LocalRun(trainer, checkpoint)
    unclipped.train(batches(checkpoint), max_norm=1000.0)
    assert weight_differences(unclipped.weights(), alone.weights())[0] > 1e-5  # so clipping did bite


@pytest.mark.parametrize("place", ["device", "host"])
def test_a_nonfinite_gradient_is_named(trainer, checkpoint, monkeypatch, place):
    bad = "transformer.layers.1.mlp.up_proj.weight"

    def poisoned_norm(run):
        hook = run.model.get_parameter(bad).register_hook(lambda gradient: gradient * float("nan"))
        run.backward(batches(checkpoint)[0])
        hook.remove()
        return run.accelerator.clip_grad_norm_(run.model.parameters(), 1.0)

    with active(trainer, monkeypatch, gradients=place, states=place) as session:
        run = LocalRun(trainer, checkpoint)
        with pytest.raises(SystemExit, match=f"gradients are not finite, step 1: .*Parameters: {re.escape(bad)}"):
            poisoned_norm(run)
        run.optimizer.zero_grad()
        session.loop.trainer_decides = True  # what --skip-nonfinite-batches says
        assert not trainer.is_finite_scalar(poisoned_norm(run))
        assert trainer.first_nonfinite_gradient(run.model) == bad
        run.optimizer.zero_grad()
        run.backward(batches(checkpoint)[1])
        assert trainer.is_finite_scalar(run.accelerator.clip_grad_norm_(run.model.parameters(), 1.0))
        assert trainer.first_nonfinite_gradient(run.model) is None
    # Negative control: after clipping upstream blames whatever comes first.
    run = LocalRun(trainer, checkpoint)
    assert not trainer.is_finite_scalar(poisoned_norm(run))
    assert trainer.first_nonfinite_gradient(run.model).startswith("transformer.embed_tokens.weight")


def checkpointed_gradients(trainer, checkpoint, configure):
    run = LocalRun(trainer, checkpoint)
    configure(run.model)
    run.backward(batches(checkpoint)[0])
    return {name.replace("_checkpoint_wrapped_module.", ""): value for name, value in gradients(run.model).items()}


def test_layers_are_wrapped_whatever_is_asked_for(trainer, checkpoint, monkeypatch):
    def ask(model):
        trainer.configure_gradient_checkpointing(model, scope="all", use_reentrant=False, impl="model_internal")

    expected = checkpointed_gradients(trainer, checkpoint, lambda model: None)
    upstreams = checkpointed_gradients(trainer, checkpoint, ask)
    with active(trainer, monkeypatch, checkpointing="0") as session:
        found = checkpointed_gradients(trainer, checkpoint, ask)
        assert all("forward" in vars(layer) for layer in session.model.transformer.layers)
        assert not session.model.transformer.gradient_checkpointing
    with active(trainer, monkeypatch, checkpointing="0", corrections="none"):
        uncorrected = checkpointed_gradients(trainer, checkpoint, ask)
    assert max(relative_errors(found, expected).values()) <= GRADIENT
    assert max(relative_errors(upstreams, expected).values()) > 0.1  # the fault is there
    assert max(relative_errors(uncorrected, upstreams).values()) <= GRADIENT


def test_recomputation_happens_in_training_only(trainer, checkpoint, monkeypatch):
    with active(trainer, monkeypatch) as session:
        run = LocalRun(trainer, checkpoint)
        layer = session.model.transformer.layers[0]
        with mock.patch.object(type(layer), "forward", autospec=True, side_effect=type(layer).forward) as forward:
            run.backward(batches(checkpoint)[0])
            assert forward.call_count == 2 * len(session.model.transformer.layers)
            forward.reset_mock()
            with torch.no_grad():
                trainer.compute_supervised_loss(run.model, **batches(checkpoint)[0])
            assert forward.call_count == len(session.model.transformer.layers)


def test_no_row_of_the_mask_is_empty(trainer, checkpoint, monkeypatch):
    """Looks at the masks that attention really gets, in a batch with padding on the left."""
    batch = batches(checkpoint)[0]
    padded = ~batch["attention_mask"]
    assert padded.any()

    def masks_and_hidden(**variables):
        with active(trainer, monkeypatch, **variables):
            model = LocalRun(trainer, checkpoint, attention="sdpa").model
            seen = []
            attention = torch.nn.functional.scaled_dot_product_attention
            with mock.patch.object(torch.nn.functional, "scaled_dot_product_attention") as patched:
                patched.side_effect = lambda *a, **o: (seen.append(o["attn_mask"]), attention(*a, **o))[1]
                hidden = model(
                    input_ids=batch["input_ids"], attention_mask=batch["attention_mask"], return_dict=True
                ).last_hidden_state
            return [mask for mask in seen if mask is not None], hidden

    masks, hidden = masks_and_hidden()
    uncorrected, expected = masks_and_hidden(corrections="none")
    assert len(masks) == len(uncorrected) == 3  # one a layer
    assert all(mask.any(dim=-1).all() for mask in masks)
    assert not any(mask.any(dim=-1).all() for mask in uncorrected)  # the fault is there
    real = batch["attention_mask"]
    for mask, before in zip(masks, uncorrected):
        rows = mask.expand(len(real), -1, -1, -1)[:, 0][real], before.expand(len(real), -1, -1, -1)[:, 0][real]
        assert torch.equal(*rows)
    assert torch.equal(hidden[real], expected[real])
    assert hidden[padded].abs().max() == 0


def test_the_class_of_the_checkpoint_is_whole_again_afterwards(trainer, checkpoint, monkeypatch):
    with active(trainer, monkeypatch) as session:
        attention = type(LocalRun(trainer, checkpoint).model.transformer.layers[0].self_attn)
        assert any(patch.owner is attention for patch in session.ledger)
        patched = vars(attention)[ATTENTION_MASK.name]
    assert vars(attention)[ATTENTION_MASK.name] is not patched


@pytest.mark.parametrize(
    "name,value,message",
    [
        ("load_training_model", lambda *, accelerator, path: None, "load_training_model: its signature has changed"),
        ("first_nonfinite_gradient", None, "seam sft.py.first_nonfinite_gradient: not found"),
        ("compute_supervised_loss", None, "seam sft.py.compute_supervised_loss: not found"),
    ],
)
def test_a_seam_that_moved_is_named(trainer, monkeypatch, name, value, message):
    monkeypatch.setattr(trainer, name, value)
    with pytest.raises(SeamError, match=message), active(trainer, monkeypatch):
        pass


def test_a_changed_structure_stops_before_the_model_is_loaded(trainer, checkpoint, monkeypatch, tmp_path):
    changed = Path(shutil.copytree(checkpoint, tmp_path / "tiny_local_v15_renamed"))
    source = changed / "qwen3_decoder.py"
    source.write_text(source.read_text().replace("_causal_attention_mask", "_mask_for_attention"))
    with active(trainer, monkeypatch), pytest.raises(SystemExit, match=r"MossQwen3Attention\._causal_attention_mask"):
        LocalRun(trainer, changed)


def test_the_project_owns_none_of_the_trainers_top_level_modules():
    """Upstream imports ``common`` and ``dataset`` from the path: a file of ours by that name would be taken for it."""
    roots = (PROJECT, PROJECT / "tests", PROJECT / "examples", PROJECT / "moss_tts_patches", PROJECT / "benchmarks")
    assert not [path for root in roots for name in ("common", "dataset") for path in root.glob(f"{name}*")]
