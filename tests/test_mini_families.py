"""Whole runs of the miniature's four trainers with the layer on, beside runs without it."""

from __future__ import annotations

import functools
import json
import shutil
from pathlib import Path

import pytest
import torch
from mini import FAMILIES, MiniServer, inputs_made_once, run_mini
from mini_moss_tts.demo_models import family_classes
from safetensors.torch import load_file
from small_models import SCHEDULES
from test_training_runs import EXACT, LEARNING_RATE, ON, assert_same_weights, changed_trainer, weight_differences
from tolerances import TOLERANCES

from moss_tts_patches.runtime.progress import LOG_NAME

# Set at start-up and not asked for; MOSS_LOWMEM=0 says so once more.
OFF = {"MOSS_LOWMEM": "0", "AUTOWRAPT_BOOTSTRAP": "moss_tts_patches"}
WINDOWS = "--gradient-accumulation-steps 4 --per-device-batch-size 1"
CLIPPED = f"{WINDOWS} --max-grad-norm 0.1"
# One mean over all codebooks leaves single gradients below AdamW's eps of 1e-8, where noise of 1e-10 shows: 5 to 7 of
# 290,000 weights then differ by up to 3 % of the learning rate (seeds 0, 1, 2); with an eps above them by 1.4e-6.
STEADY = {"moss_tts_realtime": "--adam-eps 1e-6"}
UNREAD = {
    "moss_tts_local": {"model.language_model.embed_tokens.weight"},
    "moss_tts_realtime": {"language_model.embed_tokens.weight"},
}


@pytest.fixture(scope="module")
def server():
    with MiniServer() as running:
        yield running


@pytest.fixture(scope="module")
def inputs(tmp_path_factory):
    """Each family's checkpoint and data; the folder's name is the key of transformers' cache of code."""
    return inputs_made_once(tmp_path_factory.mktemp("inputs"))


def exact_options(family):
    return ("--warmup-ratio", "0", *STEADY.get(family, "").split())


@pytest.fixture(scope="module")
def run(server, inputs, tmp_path_factory):
    """Trainings, each done once: ``plain`` is the trainer alone, another name is a schedule of the layer."""
    root = tmp_path_factory.mktemp("runs")

    @functools.cache
    def training(family, schedule, arguments="", place="device"):
        output = root / f"{family}-{schedule}-{place}-{arguments.replace(' ', '')}"
        environment = {}
        if schedule != "plain":
            environment = {**EXACT, "MOSS_LOWMEM_SCHEDULE": schedule}
            environment |= {f"MOSS_LOWMEM_{what}": place for what in ("GRADIENTS", "STATES", "WEIGHTS")}
        options = (*exact_options(family), *arguments.split())
        return server.run(family, inputs(family), output, *options, environment=environment)

    return training


@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.parametrize("family", FAMILIES)
def test_losses_and_weights_equal_the_plain_run(run, family, schedule):
    plain, ours = run(family, "plain"), run(family, schedule)
    assert len(plain.losses) == 3
    assert ours.losses == pytest.approx(plain.losses, abs=TOLERANCES["printed_loss"])
    assert_same_weights(ours.weights(), plain.weights())
    assert ours.files().keys() == plain.files().keys()
    assert {path.name for path in ours.folder.iterdir()} - {path.name for path in plain.folder.iterdir()} == {LOG_NAME}
    assert f"family={family}\n" in ours.output
    assert f"schedule={schedule}" in ours.output
    assert "[lowmem]" not in plain.output


@pytest.mark.parametrize("family", FAMILIES)
def test_every_weight_that_is_read_moved(run, inputs, family):
    before, after = load_file(inputs(family) / "model.safetensors"), run(family, "plain").weights()
    assert before.keys() == after.keys()
    assert {name for name in before if torch.equal(before[name], after[name])} == UNREAD.get(family, set())
    assert weight_differences(after, before)[1] > 0.5


@pytest.mark.parametrize("family", FAMILIES)
def test_the_comparison_sees_another_learning_rate(run, family):
    """Negative control: two percent more."""
    largest, share = weight_differences(
        run(family, "staged", "--learning-rate 1.02e-3").weights(), run(family, "plain").weights()
    )
    assert largest > TOLERANCES["weights_share_of_learning_rate"] * LEARNING_RATE
    assert share > 100 * TOLERANCES["weights_differing_share"]


@pytest.mark.parametrize("family", FAMILIES)
def test_host_stores_give_the_same_bits(run, family):
    on_device, on_host = (run(family, "staged", CLIPPED, place).weights() for place in ("device", "host"))
    plain = run(family, "plain", CLIPPED).weights()
    assert on_device.keys() == on_host.keys()
    assert [name for name in on_device if not torch.equal(on_device[name], on_host[name])] == []
    assert "gradients=host states=host weights=host" in run(family, "staged", CLIPPED, "host").output
    assert_same_weights(on_host, plain)
    unclipped = run(family, "plain", f"{WINDOWS} --max-grad-norm 1000").weights()
    assert weight_differences(unclipped, plain)[0] > 0.01 * LEARNING_RATE  # so clipping did bite


@pytest.mark.parametrize("family", FAMILIES)
def test_run_train_sh_starts_the_same_training(run, inputs, tmp_path, family):
    """The official way, with the start-up hook where it belongs: before anything is imported."""
    ours = run(family, "staged")
    environment = {**EXACT, **{f"MOSS_LOWMEM_{what}": "device" for what in ("GRADIENTS", "STATES", "WEIGHTS")}}
    options = exact_options(family)
    launched = run_mini(
        inputs(family), tmp_path / "out", *options, launcher=True, environment=environment, family=family
    )
    assert launched.losses == ours.losses
    assert launched.files().keys() == ours.files().keys()
    assert all(torch.equal(launched.weights()[name], tensor) for name, tensor in ours.weights().items())


@pytest.mark.parametrize("family", FAMILIES[1:])
def test_switched_off_checkpoints_are_byte_identical(run, inputs, tmp_path, family):
    """moss_tts_local's are compared in ``test_training_runs.py``."""
    off = run_mini(inputs(family), tmp_path / "out", *exact_options(family), environment=OFF, family=family)
    assert off.losses == run(family, "plain").losses
    assert off.files() == run(family, "plain").files()
    assert off.files() != run(family, "staged").files()  # negative control: the last bits tell the two apart


@pytest.mark.parametrize("family", FAMILIES)
def test_defaults_train_and_the_checkpoint_reloads(server, inputs, run, tmp_path, family):
    """8-bit states and the flag for checkpointing, which the realtime family's own parser does not know."""
    layer = {**ON, "MOSS_LOWMEM_CHECKPOINTING": "0"}
    options = ("--warmup-ratio", "0", "--gradient_checkpointing")
    ours = server.run(family, inputs(family), tmp_path / "out", *options, environment=layer)
    assert "optimizer=adamw8bit" in ours.output
    assert "checkpointed_layers=3" in ours.output
    assert ours.files().keys() == run(family, "plain").files().keys()
    saved, before = ours.weights(), load_file(inputs(family) / "model.safetensors")
    assert weight_differences(saved, before)[1] > 0.5
    model = family_classes(family)[0].from_pretrained(ours.checkpoint())
    state = model.state_dict()
    assert all(torch.equal(state[name], saved[name]) for name in saved)
    tied = {name for name in state.keys() - saved.keys() if name == "text_lm_head.weight" or "audio_lm_heads" in name}
    assert state.keys() - saved.keys() == tied


def test_a_depth_model_that_asks_for_a_package_that_is_missing(server, inputs, tmp_path):
    """v1.5's trainer leaves the stored choice alone; the layer has it follow the flag, and keeps the stored one."""
    family = "moss_tts_local_v1.5"
    changed = Path(shutil.copytree(inputs(family), tmp_path / "stored_flash"))
    config = json.loads((changed / "config.json").read_text())
    config["local_transformer_attn_implementation"] = "flash_attention_2"
    (changed / "config.json").write_text(json.dumps(config))
    alone = server.run(family, changed, tmp_path / "alone", check=False)
    assert alone.status != 0 and "the miniature has sdpa and eager" in alone.output
    ours = server.run(family, changed, tmp_path / "ours", environment=ON)
    assert "correction=depth_attention depth=eager" in ours.output
    assert len(ours.losses) == 3
    saved = json.loads((ours.checkpoint() / "config.json").read_text())
    assert saved["local_transformer_attn_implementation"] == "flash_attention_2"


MOVED_ON = {
    "a method of the model": (
        "moss_tts_delay",
        "modeling_moss_tts.py",
        "_compute_input_embeddings",
        "_embeddings",
        "seam MossTTSDelayModel._compute_input_embeddings: not found",
    ),
    "the pad code is predicted": (
        "moss_tts_delay",
        "modeling_moss_tts.py",
        'scores[..., -1] = float("-inf")',
        "pass",
        "self check of moss_tts_delay",
    ),
    "the number of heads": (
        "moss_tts_realtime",
        "mossttsrealtime/modeling_mossttsrealtime.py",
        "for _ in range(config.rvq))\n        self.pad",
        "for _ in range(config.rvq + 1))\n        self.pad",
        "seam MossTTSRealtime.local_transformer.local_lm_heads: found 5 entries, expected 4",
    ),
    "the position that predicts": (
        "moss_tts_realtime",
        "mossttsrealtime/modeling_mossttsrealtime.py",
        "(position - 1)",
        "(position - 2)",
        "self check of moss_tts_realtime",
    ),
    "a function of the trainer": (
        "moss_tts_local_v1.5",
        "finetuning/sft.py",
        "    first_nonfinite_gradient,\n",
        "    first_nonfinite_gradient as nonfinite_gradient,\n",
        "seam sft.py.first_nonfinite_gradient: not found",
    ),
    "an argument of the loss": (
        "moss_tts_local_v1.5",
        "finetuning/supervision.py",
        "channelwise_loss_weight",
        "weights_of_channels",
        "seam sft.py.compute_supervised_loss: its signature has changed",
    ),
    "the weight of an empty channel": (
        "moss_tts_local_v1.5",
        "finetuning/supervision.py",
        "total_weight += weight",
        "total_weight += 1.0",
        "self check of moss_tts_local_v1.5",
    ),
    "a method in the checkpoint's code": (
        "moss_tts_local_v1.5",
        "qwen3_decoder.py",
        "_causal_attention_mask",
        "_mask",
        "seam MaskedAttention._causal_attention_mask: not found",
    ),
}


@pytest.mark.parametrize("what", MOVED_ON)
def test_an_upstream_that_moved_on_is_refused_before_loading(server, inputs, tmp_path, what):
    family, file, old, new, expected = MOVED_ON[what]
    trainer = changed_trainer(tmp_path, file, old, new, family=family)
    data = inputs(family)
    if family == "moss_tts_local_v1.5":  # whose model is in the checkpoint
        data = Path(shutil.copytree(data, tmp_path / f"moved_{len(what)}_{Path(file).stem}"))
        for path in (trainer / family).glob("*.py"):
            shutil.copy2(path, data / path.name)
    refused = server.run(family, data, tmp_path / "out", environment=ON, check=False, trainer=trainer)
    assert refused.status != 0
    lines = [line for line in refused.output.splitlines() if "[lowmem] error:" in line]
    assert len(lines) == 1 and expected in lines[0], refused.output
    assert "Traceback" not in refused.output
    assert "Loading weights" not in refused.output
    assert not refused.folder.exists()
