"""docs/scaling.md and `moss-lowmem plan --gpus`: written from the results, and the results from the planner."""

from __future__ import annotations

import importlib.util
import json
import os
import sys
from pathlib import Path

import pytest
from typer.testing import CliRunner

from moss_tts_patches.cli import app
from moss_tts_patches.errors import SettingsError
from moss_tts_patches.memory.engine_ladder import engine_rungs, show_engines
from moss_tts_patches.memory.figures import RungFigures
from moss_tts_patches.memory.footprint import Footprint
from moss_tts_patches.memory.full_ladder import Wanted
from moss_tts_patches.memory.reserve import HOST_PROCESS_BYTES, Limits, assess
from moss_tts_patches.memory.rungs import ENGINES, EngineRung, MicroBatch
from moss_tts_patches.units import GIB

ROOT = Path(__file__).resolve().parents[1]


@pytest.fixture(scope="module")
def scaling():
    sys.path.insert(0, str(ROOT / "benchmarks"))
    spec = importlib.util.spec_from_file_location("scaling", ROOT / "benchmarks/scaling.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="module")
def results(scaling):
    return json.loads(scaling.RESULTS.read_text(encoding="utf-8"))


def test_the_page_is_what_the_results_say(scaling, results):
    assert scaling.PAGE.read_text(encoding="utf-8") == scaling.page(results)


def test_every_engine_is_there_for_every_number_of_gpus(scaling, results):
    found = {(row["family"], row["engine"], row["gpus"]) for row in results["rows"]}
    assert found == {(model, e, n) for model, _ in scaling.MODELS for e in ENGINES for n in scaling.GPUS}


def test_what_the_page_concludes(results):
    """A sentence of the page is an inequality between its figures."""

    def peak(engine, way, gpus):
        rows = [r for r in results["rows"] if (r["engine"], r["way"], r["gpus"]) == (engine, way, gpus)]
        return {row["family"]: row["peak_gib"] for row in rows}

    for family in ("moss_tts_local", "moss_tts_delay"):
        assert peak("ddp", "full", 8)[family] == peak("ddp", "full", 2)[family]
        assert peak("zero2", "full", 2)[family] > peak("ddp", "full", 2)[family]
        assert peak("zero2", "full", 4)[family] < peak("ddp", "full", 4)[family]
        assert peak("fsdp", "full", 8)[family] < peak("fsdp", "upstream-checkpointing", 8)[family]
    assert peak("zero3", "lora", 8)["moss_tts_local"] > peak("ddp", "lora", 8)["moss_tts_local"]


def test_processes_share_the_memory_of_the_machine():
    figures = RungFigures(EngineRung("ddp", 4), "step", Footprint(weights=GIB), 8 * GIB, 0, 0)
    assert assess(figures, Limits(80 * GIB, 100 * GIB)).host_margin == 100 * GIB - 4 * HOST_PROCESS_BYTES - 8 * GIB


def test_rungs_are_those_that_the_engines_run():
    assert [r.method for r in engine_rungs("fsdp", 2, None) if not r.upstream] == ["full"]
    assert engine_rungs("zero3", 2, "qlora") == []
    assert any(r.states == "host" for r in engine_rungs("ddp", 2, None))


def test_an_unknown_engine_is_refused_with_those_that_there_are():
    wanted = Wanted("moss_tts_local", "1.7b", None, None, MicroBatch(1, 600, 350), {})
    with pytest.raises(SettingsError, match="--engine zero9: expected one of ddp, zero2"):
        show_engines(wanted, 2, "zero9", Limits(GIB), None, lambda *_: None, as_json=False)


@pytest.mark.upstream
def test_the_planner_answers_what_the_page_says(results):
    options = ["--family", "moss_tts_delay", "--gpus", "4", "--engine", "zero3", "--vram", "80", "--ram", "500"]
    done = CliRunner().invoke(app, ["plan", *options, "--upstream", os.environ["MOSS_TTS_REPO"], "--json"])
    assert done.exit_code == 0, done.output
    answered = json.loads(done.stdout[done.stdout.index("{") :])["engines"]
    expected = {
        f"{row['way']}-zero3-x4": row["peak_gib"]
        for row in results["rows"]
        if (row["family"], row["engine"], row["gpus"]) == ("moss_tts_delay", "zero3", 4)
    }
    assert {entry["name"]: entry["peak_gib"] for entry in answered} == pytest.approx(expected, abs=0.01)
