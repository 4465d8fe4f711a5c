"""The real, unmodified upstream on two processes under DDP, with the layer and without, all four families."""

from __future__ import annotations

import functools
import re

import pytest
from mini import FAMILIES, write_shards
from ranks import EXACT, LAYER, RankServer, layer
from test_training_runs import assert_same_weights
from tolerances import TOLERANCES
from upstream_runs import make_tiny

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
        return make_tiny(upstream_repo, family, root / f"{family.replace('.', '_')}_ddp")

    @functools.cache
    def training(family, layer=(), options=(), shards=None):
        data, output = inputs(family), root / f"job{len(list(root.glob('job*')))}"
        records = data / "train.jsonl" if shards is None else first_records(data, shards)
        arguments = ["--model-path", str(data), "--train-jsonl", str(records), *ARGUMENTS, *options]
        return server.run(
            f"{family}/finetuning/sft.py", arguments, output, folder=upstream_repo, environment=dict(layer)
        )

    return training


def first_records(data, sizes):
    """A file for each rank, with so many of the first records."""
    lines = (data / "train.jsonl").read_text(encoding="utf-8").splitlines(keepends=True)
    return write_shards(data / "-".join(map(str, sizes)), [lines[:size] for size in sizes])


@pytest.mark.parametrize("family", FAMILIES)
def test_losses_and_weights_equal_upstreams_own_two_processes(run, family):
    plain, ours = run(family), run(family, layer(EXACT))
    assert len(plain.losses) == 4
    assert ours.losses == pytest.approx(plain.losses, abs=TOLERANCES["printed_loss_unit"])
    assert ours.rates == plain.rates
    assert ours.digests[0] == ours.digests[1]
    assert plain.digests[0] == plain.digests[1]
    assert (plain.writers, ours.writers) == ({"0", "1"}, {"0"})  # upstream's ranks write one file, all of them
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


@pytest.mark.parametrize(
    "family,method",
    [
        ("moss_tts_local", {}),
        ("moss_tts_delay", {**LORA, "MOSS_LOWMEM_LORA_DROPOUT": "0.3"}),
        ("moss_tts_local_v1.5", {}),
    ],
    ids=["local", "delay-lora", "v1.5"],
)
def test_a_resumed_training_ends_with_the_same_weights(run, family, method):
    """From step 3, in the middle of the second epoch: 12 records on two ranks are 3 micro-batches and 2 steps."""
    whole = run(family, layer(LAYER, method))
    saved = run(family, layer(LAYER, method, MOSS_LOWMEM_SAVE_STEPS="1", MOSS_LOWMEM_KEEP="9"))
    point = saved.folder / "resume" / "step-3"
    resumed = run(family, layer(LAYER, method, MOSS_LOWMEM_RESUME=str(point)))
    assert "resume replayed=5 micro-batches" in resumed.outputs[0]
    assert resumed.losses == whole.losses[3:] and resumed.rates == whole.rates[3:]
    assert {*resumed.digests} == {*saved.digests} == {*whole.digests} and len({*whole.digests}) == 1


def test_a_window_goes_on_into_the_next_epoch_of_sharded_files_unless_that_is_corrected(run):
    """5 micro-batches an epoch and windows of 2: upstream does 5 steps of 6, and the third is of two epochs."""
    family, sizes = "moss_tts_local", (10, 10)
    plain = run(family, shards=sizes)
    closed = run(family, layer(LAYER), shards=(10, 12))
    steps = [
        [(int(epoch), int(step)) for epoch, step in re.findall(r"epoch=(\d+) step=(\d+)/6 ", job.outputs[0])]
        for job in (plain, closed)
    ]
    assert steps[0] == [(0, 1), (0, 2), (1, 3), (1, 4), (1, 5)]
    assert steps[1] == [(0, 1), (0, 2), (0, 3), (1, 4), (1, 5), (1, 6)]
    assert closed.digests[0] == closed.digests[1]
    assert run(family, layer(EXACT), shards=sizes).losses == pytest.approx(
        plain.losses, abs=TOLERANCES["printed_loss_unit"]
    )
