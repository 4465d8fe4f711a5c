"""The real, unmodified upstream on two processes under DDP, with the layer and without, all four families."""

from __future__ import annotations

import functools
import subprocess
import sys
from pathlib import Path

import pytest
from mini import FAMILIES
from ranks import EXACT, LAYER, RankServer
from test_training_runs import assert_same_weights
from tolerances import TOLERANCES

pytestmark = pytest.mark.upstream

ARGUMENTS = (
    *("--per-device-batch-size", "2", "--gradient-accumulation-steps", "2", "--num-epochs", "2", "--adam-eps", "1e-6"),
    *("--mixed-precision", "no", "--learning-rate", "1e-3", "--warmup-ratio", "0", "--lr-scheduler-type", "linear"),
)
LORA = {"MOSS_LOWMEM_METHOD": "lora", "MOSS_LOWMEM_LORA_DROPOUT": "0", "MOSS_LOWMEM_MERGE": "none"}


@pytest.fixture(scope="module")
def server(torchaudio_stub, tmp_path_factory):
    with RankServer(
        PYTHONPATH=str(torchaudio_stub), HF_MODULES_CACHE=str(tmp_path_factory.mktemp("hf_modules"))
    ) as running:
        yield running


@pytest.fixture(scope="module")
def run(server, upstream_repo, tmp_path_factory):
    root = tmp_path_factory.mktemp("ddp")

    @functools.cache
    def inputs(family):
        folder = root / f"{family.replace('.', '_')}_ddp"
        script = Path(__file__).with_name("make_tiny.py")
        subprocess.run([sys.executable, script, upstream_repo, family, folder], check=True, capture_output=True)
        return folder

    @functools.cache
    def training(family, layer=(), options=()):
        data, output = inputs(family), root / f"job{len(list(root.glob('job*')))}"
        arguments = ["--model-path", str(data), "--train-jsonl", str(data / "train.jsonl"), *ARGUMENTS, *options]
        return server.run(
            f"{family}/finetuning/sft.py", arguments, output, folder=upstream_repo, environment=dict(layer)
        )

    return training


def layer(*settings, **named):
    merged = {}
    for one in settings:
        merged |= one
    return tuple(sorted({**merged, **named}.items()))


@pytest.mark.parametrize("family", FAMILIES)
def test_losses_and_weights_equal_upstreams_own_two_processes(run, family):
    plain, ours = run(family), run(family, layer(EXACT))
    assert len(plain.losses) == 4
    assert ours.losses == pytest.approx(plain.losses, abs=TOLERANCES["printed_loss_unit"])
    assert ours.rates == plain.rates
    assert ours.digests[0] == ours.digests[1]
    assert plain.digests[0] == plain.digests[1]
    assert_same_weights(ours.weights(), plain.weights())
    assert "[lowmem]" not in plain.outputs[0]


@pytest.mark.parametrize("family", FAMILIES)
def test_adapters_start_from_upstreams_loss_and_stay_equal(run, family):
    """A fresh adapter adds nothing, so that the first loss is upstream's own."""
    plain, ours = run(family), run(family, layer(EXACT, LORA))
    assert ours.losses[0] == pytest.approx(plain.losses[0], abs=TOLERANCES["printed_loss_unit"])
    assert ours.losses[-1] != plain.losses[-1]
    assert ours.digests[0] == ours.digests[1]


@pytest.mark.parametrize("family", FAMILIES)
def test_the_learning_rate_and_everything_else_with_the_layers_defaults(run, family):
    ours = run(family, layer(LAYER))
    assert ours.rates == [7.5e-4, 5e-4, 2.5e-4, 0.0]
    assert ours.digests[0] == ours.digests[1]
    assert "longest_first positions=" in ours.outputs[0] and "optimizer=adamw8bit" in ours.outputs[0]
    upstream = run(family)
    assert upstream.rates == (ours.rates if family == "moss_tts_local_v1.5" else [5e-4, 0.0, 0.0, 0.0])
