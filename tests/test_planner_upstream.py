"""The planner on upstream's real classes: short simulations against the full ones in benchmarks/results, the choice."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path

import pytest
from tolerances import TOLERANCES

from moss_tts_patches.adapters.shapes import adapter_shapes
from moss_tts_patches.memory import other_models
from moss_tts_patches.memory.full_ladder import Wanted, make_subject
from moss_tts_patches.memory.ladder import list_rungs
from moss_tts_patches.memory.other_models import models_that_fit
from moss_tts_patches.memory.plan_cache import PlanCache
from moss_tts_patches.memory.planner import choose_plan
from moss_tts_patches.memory.reserve import Limits
from moss_tts_patches.memory.rungs import METHODS, MicroBatch, Rung, UpstreamRung
from moss_tts_patches.memory.traces import Tracer
from moss_tts_patches.memory.upstream_source import SOURCES
from moss_tts_patches.units import GIB

pytestmark = pytest.mark.upstream

RESULTS = Path(__file__).resolve().parents[1] / "benchmarks/results"
BATCH = MicroBatch(1, 600, 350)
ON_HOST = Rung("staged", gradients="host", states="host")
ROWS = {"staged, both on host": ON_HOST, "upstream": UpstreamRung(False)}
MODELS = {
    "local": ("moss_tts_local", "1.7b"),
    "delay-8b": ("moss_tts_delay", "8b"),
    "delay-1.7b": ("moss_tts_delay", "1.7b"),
    "local-v1.5": ("moss_tts_local_v1.5", "4b"),
    "realtime-1.7b": ("moss_tts_realtime", "1.7b"),
}


@pytest.mark.parametrize("model", MODELS)
def test_short_simulations_are_the_full_ones(upstream_repo, model):
    """The files hold full simulations: python benchmarks/memory.py --family … --json …"""
    tracer = Tracer(make_subject(Wanted(*MODELS[model], None, upstream_repo, BATCH, {})))
    rows = {row["name"]: row for row in json.loads((RESULTS / f"memory-{model}.json").read_text())["rows"]
            if row["positions"] == BATCH.positions}  # fmt: skip
    for name, rung in ROWS.items():
        found, expected = tracer.figures(rung), rows[name]
        assert found.peak_bytes == pytest.approx(expected["peak_bytes"], rel=TOLERANCES["planner_relative"])
        assert found.host_total() == expected["host_bytes"]
        assert (found.matmul_flops, found.attention_flops) == (expected["matmul_flops"], expected["attention_flops"])


def test_what_is_chosen_on_a_card(upstream_repo, tmp_path):
    """Issue 6, "Must show" 4."""
    subject, cache = make_subject(Wanted("moss_tts_local", "1.7b", None, upstream_repo, BATCH, {})), PlanCache(tmp_path)
    reference = Tracer(subject, cache).figures(UpstreamRung(True)).flops
    sixteen = choose_plan(subject, Limits(16 * GIB, 32 * GIB, 8), {}, cache=cache)
    assert sixteen.rung.method == "full"
    assert sixteen.assessment.figures.flops <= 0.60 * reference
    eight = choose_plan(subject, Limits(8 * GIB, 32 * GIB, 8), {}, cache=cache)
    assert eight.rung.method == "full" and eight.rung in list_rungs({}, has_depth=True)
    with_adapters = dataclasses.replace(subject, shapes=adapter_shapes())
    six = choose_plan(with_adapters, Limits(6 * GIB, 32 * GIB, 8), {}, methods=METHODS, cache=cache)
    assert six.rung.method == "qlora"


def test_adapters_are_extrapolated_to_the_full_simulation(upstream_repo):
    """The file holds full simulations: python benchmarks/adapters.py --json …"""
    rows = json.loads((RESULTS / "adapters.json").read_text())["rows"]
    subject = make_subject(Wanted("moss_tts_realtime", "1.7b", None, upstream_repo, BATCH, {}))
    tracer = Tracer(dataclasses.replace(subject, shapes=adapter_shapes()))
    for method in ("lora", "qlora"):
        [expected] = [row for row in rows if (row["family"], row["method"]) == ("moss_tts_realtime", method)]
        found = tracer.figures(Rung(method=method))
        assert found.peak_bytes == pytest.approx(expected["peak_bytes"], rel=TOLERANCES["planner_relative"])
        assert found.matmul_flops == pytest.approx(expected["matmul_flops"], rel=TOLERANCES["planner_relative"])


def test_another_model_that_fits_is_named_with_its_figures(upstream_repo, tmp_path, monkeypatch):
    realtime = {"moss_tts_realtime": SOURCES["moss_tts_realtime"], "moss_tts_delay": SOURCES["moss_tts_delay"]}
    monkeypatch.setattr(other_models, "SOURCES", realtime)
    arguments = (
        upstream_repo,
        "moss_tts_delay",
        BATCH,
        Limits(6 * GIB, 32 * GIB, 8),
        adapter_shapes(),
        PlanCache(tmp_path),
    )
    [line] = models_that_fit(*arguments)
    assert line.startswith("- another model, moss_tts_realtime 1.7b, full-staged-host-gradients+states+weights: 3.9")
    small = (*arguments[:3], Limits(1 * GIB, 32 * GIB, 8), *arguments[4:])
    assert not list(models_that_fit(*small))
