"""MOSS_LOWMEM_PLAN=auto in whole runs of the miniature, on a card that is stated, and ``moss-lowmem plan``."""

from __future__ import annotations

import json
import re
import subprocess

import pytest
from launcher import BIN
from mini import clean_environment, make_mini_inputs, run_mini
from test_training_runs import EXACT
from tolerances import TOLERANCES
from upstream_runs import make_tiny

from moss_tts_patches.runtime.plan import longest_micro_batch
from moss_tts_patches.settings import load_settings


@pytest.fixture(scope="module")
def inputs(tmp_path_factory):
    return make_mini_inputs(tmp_path_factory.mktemp("inputs") / "tiny")


@pytest.fixture(scope="module")
def cache(tmp_path_factory):
    """The user's cache, so that one simulation serves every run here."""
    return {"XDG_CACHE_HOME": str(tmp_path_factory.mktemp("cache"))}


@pytest.fixture(scope="module")
def plain(inputs, tmp_path_factory):
    return run_mini(inputs, tmp_path_factory.mktemp("plain"))


def plan_of(run):
    [line] = re.findall(r"\[lowmem\] plan=(\S+) .*pin='([^']*)'", run.output)
    return line


def test_the_run_takes_the_cheapest_rung_and_learns_the_same(inputs, cache, plain, tmp_path):
    run = run_mini(inputs, tmp_path, environment={**EXACT, **cache, "MOSS_LOWMEM_VRAM": "24"})
    name, pin = plan_of(run)
    assert name == "full-fused-stored"  # everything fits a tiny model: nothing is recomputed, nothing moved
    assert "plan schedule=fused" in run.output and "checkpointed_layers=0" in run.output
    assert run.losses == pytest.approx(plain.losses, abs=TOLERANCES["printed_loss"])
    # What the line says is enough to have the same run without a plan.
    pinned = dict(item.split("=") for item in pin.split())
    again = run_mini(inputs, tmp_path / "again", environment={**EXACT, **pinned, "MOSS_LOWMEM_PLAN": "off"})
    assert "plan schedule=fused" in again.output and "checkpointed_layers=0" in again.output


@pytest.mark.parametrize("gib,place", [("24", "device"), ("1", "host")])
def test_without_a_plan_stores_go_where_the_stated_card_has_room(inputs, tmp_path, gib, place):
    run = run_mini(inputs, tmp_path, environment={**EXACT, "MOSS_LOWMEM_PLAN": "off", "MOSS_LOWMEM_VRAM": gib})
    assert re.search(rf"plan schedule=staged .*gradients={place} states={place} weights={place}", run.output)


def test_what_is_set_is_kept(inputs, cache, tmp_path):
    wanted = {"MOSS_LOWMEM_SCHEDULE": "staged", "MOSS_LOWMEM_CHECKPOINTING": "1", "MOSS_LOWMEM_STATES": "host"}
    run = run_mini(inputs, tmp_path, environment={**EXACT, **cache, **wanted, "MOSS_LOWMEM_VRAM": "24"})
    assert plan_of(run)[0] == "full-staged-host-states"
    assert re.search(r"plan schedule=staged .*gradients=device states=host", run.output)


def test_nothing_fits_stops_before_the_model_loads(inputs, cache, tmp_path):
    environment = {**EXACT, **cache, "MOSS_LOWMEM_VRAM": "0.9"}
    run = run_mini(inputs, tmp_path / "output", environment=environment, check=False)
    assert run.status != 0
    assert "plan: nothing fits 0.9 GiB of GPU memory" in run.output
    assert "MOSS_LOWMEM_METHOD=qlora" in run.output  # the nearest options, adapters among them
    assert "Traceback" not in run.output
    assert "another model" not in run.output  # 1.7 billion parameters fit no card of 0.9 GiB
    assert not list(tmp_path.glob("output/checkpoint-*"))


@pytest.mark.upstream
def test_the_command_plans_for_a_checkpoint_and_its_data(upstream_repo, torchaudio_stub, cache, tmp_path):
    """Issue 6: the shape of ``--json``, with upstream's two rungs always in it."""
    base = make_tiny(upstream_repo, "moss_tts_local", tmp_path / "tiny_local")
    command = [str(BIN / "moss-lowmem"), "plan", str(base), "--train-jsonl", str(base / "train.jsonl")]
    environment = clean_environment(PYTHONPATH=str(torchaudio_stub), MOSS_TTS_REPO=str(upstream_repo), **cache)
    done = subprocess.run(
        [*command, "--vram", "8", "--ram", "16", "--json"], env=environment, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr[-2000:]
    answer = json.loads(done.stdout)
    names = [rung["name"] for rung in answer["rungs"]]
    assert names[:2] == ["upstream", "upstream-checkpointing"]
    assert {"lora-staged", "qlora-staged", "full-staged-host-gradients+states+weights"} <= set(names)
    for rung in answer["rungs"]:
        assert {"name", "peak_gib", "host_gib", "tflop", "fits", "categories"} <= rung.keys()
    assert "full-fused-stored" in json.dumps(answer["choice"])
    refused = subprocess.run([*command[:2], "--family", "nobody"], env=environment, capture_output=True, text=True)
    assert refused.returncode == 2 and "Traceback" not in refused.stderr


def test_the_longest_micro_batch_is_planned_for():
    batch = longest_micro_batch([10, 100, 40], supervised=75, records=2)
    assert (batch.records, batch.positions, batch.supervised) == (2, 100, 100)
    assert longest_micro_batch([3], supervised=0, records=1).supervised == 1


def test_only_what_the_user_set_is_pinned(monkeypatch):
    assert set(load_settings().pinned_rung()) == {"chunk_frames", "optimizer"}
    monkeypatch.setenv("MOSS_LOWMEM_CHECKPOINTING", "0")
    monkeypatch.setenv("MOSS_LOWMEM_STATES", "host")
    monkeypatch.setenv("MOSS_LOWMEM_WEIGHTS", "auto")
    pinned = load_settings().pinned_rung()
    assert pinned["checkpointing"] is False and pinned["states"] == "host" and "weights" not in pinned
