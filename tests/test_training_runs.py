"""Whole runs of the miniature trainer with the layer on, beside runs without it."""

from __future__ import annotations

import json
import re
import shutil

import pytest
import torch
from launcher import make_package
from mini import MINI, make_mini_inputs, run_mini
from tolerances import TOLERANCES

ON = {"MOSS_LOWMEM": "1", "AUTOWRAPT_BOOTSTRAP": "moss_tts_patches"}
# What makes a run comparable with upstream's, number by number.
EXACT = {**ON, "MOSS_LOWMEM_OPTIMIZER": "adamw", "MOSS_LOWMEM_CORRECTIONS": "none", "MOSS_LOWMEM_CHUNK_FRAMES": "7"}
LEARNING_RATE = 1e-3


@pytest.fixture(scope="module")
def inputs(tmp_path_factory):
    return make_mini_inputs(tmp_path_factory.mktemp("inputs"))


@pytest.fixture(scope="module")
def plain(inputs, tmp_path_factory):
    """The miniature alone, with the layer installed and switched off."""
    return run_mini(inputs, tmp_path_factory.mktemp("plain"), "--warmup-ratio", "0")


def weight_differences(found, expected):
    """Largest difference, and the share of elements that differ by more than 1e-6."""
    assert found.keys() == expected.keys()
    largest = max((found[name] - expected[name]).abs().max().item() for name in expected)
    differing = sum(((found[name] - expected[name]).abs() > 1e-6).sum().item() for name in expected)
    return largest, differing / sum(tensor.numel() for tensor in expected.values())


def assert_same_weights(found, expected):
    largest, share = weight_differences(found, expected)
    assert largest <= TOLERANCES["weights_share_of_learning_rate"] * LEARNING_RATE
    assert share <= TOLERANCES["weights_differing_share"]


def test_weights_moved_and_the_comparison_sees_another_learning_rate(inputs, plain, tmp_path):
    """Negative control: one percent more learning rate."""
    run = run_mini(inputs, tmp_path, "--warmup-ratio", "0", "--learning-rate", "1.02e-3", environment=EXACT)
    largest, share = weight_differences(run.weights(), plain.weights())
    assert largest > TOLERANCES["weights_share_of_learning_rate"] * LEARNING_RATE
    assert share > 100 * TOLERANCES["weights_differing_share"]


def test_switched_off_checkpoints_are_byte_identical(inputs, plain, tmp_path):
    """With the layer off, and with start-up hooks off altogether, as if the package were not installed."""
    for name, environment in {
        "zero": {"MOSS_LOWMEM": "0", "AUTOWRAPT_BOOTSTRAP": "moss_tts_patches"},
        "unset": {"AUTOWRAPT_BOOTSTRAP": "moss_tts_patches"},
    }.items():
        run = run_mini(inputs, tmp_path / name, "--warmup-ratio", "0", environment=environment)
        assert run.losses == plain.losses
        assert run.files() == plain.files()


def test_saved_checkpoint_is_complete_and_keeps_the_unread_table(inputs, plain, tmp_path):
    run = run_mini(inputs, tmp_path, "--warmup-ratio", "0", environment=ON)
    assert {path.name for path in run.checkpoint().iterdir()} == {path.name for path in plain.checkpoint().iterdir()}
    unread = "model.language_model.embed_tokens.weight"
    before, after = plain.weights(), run.weights()
    assert torch.equal(after[unread], before[unread])
    assert {name: (t.shape, t.dtype) for name, t in after.items()} == {
        name: (t.shape, t.dtype) for name, t in before.items()
    }
    moved = [name for name in after if name != unread and not torch.equal(after[name], start_weights(inputs)[name])]
    assert len(moved) == len(after) - 1
    saved_arguments = json.loads((run.checkpoint() / "finetune_args.json").read_text())
    assert saved_arguments["learning_rate"] == LEARNING_RATE


def start_weights(inputs):
    from safetensors.torch import load_file

    return load_file(inputs / "model.safetensors")


def test_the_report_reads_the_real_modules(inputs, tmp_path):
    run = run_mini(inputs, tmp_path, "--attn-implementation", "eager", "--gradient-checkpointing", environment=ON)
    # Upstream's flag does not reach the model: it stays sdpa, and the report has to say so.
    assert "backbone_dtype=float32 backbone_attention=sdpa depth_dtype=float32 depth_attention=sdpa" in run.output
    [patched] = re.findall(r"patched=(\S+)", run.output)
    assert {"__main__.Accelerator", "__main__.AdamW", "MossTTSDelayModel.forward"} <= set(patched.split(","))
    assert "checkpointed_layers=3" in run.output
    assert "trainable_parameters=" in run.output
    assert "[lowmem] steps=3 median_step_time=" in run.output


def test_underscored_flags_mean_the_hyphenated_ones(inputs, plain, tmp_path):
    flags = ("--warmup_ratio", "0", "--gradient_checkpointing", "--max_grad_norm=1.0")
    run = run_mini(inputs, tmp_path, *flags, environment=EXACT)
    assert run.losses == pytest.approx(plain.losses, abs=TOLERANCES["printed_loss"])
    saved = json.loads((run.checkpoint() / "finetune_args.json").read_text())
    assert saved["gradient_checkpointing"] is True


def refused(inputs, output, environment, *arguments, trainer=MINI):
    """Runs a trainer that must stop; returns its one line."""
    run = run_mini(inputs, output, *arguments, environment={**ON, **environment}, check=False, trainer=trainer)
    assert run.status != 0
    assert "Traceback" not in run.output, run.output
    lines = [line for line in run.output.splitlines() if "[lowmem] error:" in line]
    assert len(lines) == 1, run.output
    assert "Loading weights" not in run.output
    assert not list(output.glob("*"))
    return lines[0]


@pytest.mark.parametrize(
    "environment,expected",
    [
        ({"MOSS_LOWMEM": "yes"}, "MOSS_LOWMEM='yes' is not a value"),
        ({"MOSS_LOWMEM": "2"}, "MOSS_LOWMEM='2' is not a value"),
        ({"MOSS_LOWMEM": ""}, "MOSS_LOWMEM='' is not a value"),
        ({"MOSS_LOWMEM_SCHEDUL": "fused"}, "the nearest one is MOSS_LOWMEM_SCHEDULE"),
        ({"MOSS_LOWMEM_OPTIMIZER": "sgd"}, "MOSS_LOWMEM_OPTIMIZER='sgd'"),
        ({"MOSS_LOWMEM_FAMILY": "moss_tts_delay"}, "the trainer that was started is moss_tts_local's"),
    ],
)
def test_bad_settings_stop_before_the_model_loads(inputs, tmp_path, environment, expected):
    assert expected in refused(inputs, tmp_path / "output", environment)


def changed_trainer(folder, file, old, new, family="moss_tts_local"):
    """A copy of the miniature in which upstream has 'moved on'."""
    copy = folder / "trainer"
    shutil.copytree(MINI, copy, ignore=shutil.ignore_patterns("__pycache__"))
    path = copy / family / file
    text = path.read_text(encoding="utf-8")
    assert old in text, old
    path.write_text(text.replace(old, new), encoding="utf-8")
    return copy


@pytest.mark.parametrize(
    "file,old,new,expected",
    [
        ("finetuning/sft.py", "save_checkpoint(", "store_checkpoint(", "seam sft.py.save_checkpoint: not found"),
        ("finetuning/sft.py", "codec_path", "codec", "seam sft.py.save_checkpoint: its signature has changed"),
        ("finetuning/sft.py", "AdamW", "Adam", "seam sft.py.AdamW: not found"),
        (
            "modeling_moss_tts.py",
            "channelwise_loss_weight",
            "channel_weights",
            "seam MossTTSDelayModel.forward: its signature has changed",
        ),
        (
            "modeling_moss_tts.py",
            "layer_norm_before_lm_heads",
            "norms",
            "seam MossTTSDelayModel.layer_norm_before_lm_heads: not found on the model",
        ),
        ("modeling_moss_tts.py", "losses).sum()", "losses**2).sum()", "self check of moss_tts_local"),
        ("modeling_moss_tts.py", "F.silu(", "F.gelu(", None),
    ],
)
def test_an_upstream_that_moved_on(inputs, tmp_path, file, old, new, expected):
    """Renamed, re-signed, restructured, other mathematics; and a change inside a module, which we run as it is."""
    trainer = changed_trainer(tmp_path, file, old, new)
    if expected is None:
        assert run_mini(inputs, tmp_path / "output", environment=ON, trainer=trainer).losses
    else:
        assert expected in refused(inputs, tmp_path / "output", {}, trainer=trainer)


def test_a_broken_deepspeed_is_found_before_the_epoch(inputs, tmp_path):
    broken = make_package(tmp_path / "site", "deepspeed", "raise RuntimeError('CUDA_HOME does not exist')")
    message = refused(inputs, tmp_path / "output", {"PYTHONPATH": str(broken)})
    assert "deepspeed 9.9 is installed but cannot be imported (RuntimeError: CUDA_HOME does not exist)" in message


def test_a_patch_that_was_overwritten_stops_the_run(inputs, tmp_path):
    """Another package that patches the model after us would train without the chunked loss, unnoticed."""
    trainer = changed_trainer(
        tmp_path,
        "finetuning/sft.py",
        "    loader = DataLoader(",
        "    MossTTSDelayModel.gradient_checkpointing_enable = print\n    loader = DataLoader(",
    )
    run = run_mini(inputs, tmp_path / "output", environment=ON, check=False, trainer=trainer)
    assert run.status != 0
    assert "MossTTSDelayModel.gradient_checkpointing_enable no longer holds the layer's patch" in run.output
    assert run.losses == []
