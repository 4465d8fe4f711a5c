"""The committed figures of long runs: present, plausible, and what issue and amendments ask for."""

from __future__ import annotations

import copy
import json
import sys
from pathlib import Path
from typing import Any

import pytest

BENCHMARKS = Path(__file__).resolve().parents[1] / "benchmarks"
sys.path.insert(0, str(BENCHMARKS))

from sections.resume import resume_section  # noqa: E402

REPLAY_MINIMUM = 5000  # micro-batches a CPU second
CHECK_MINIMUM = 2000  # records of 300 frames of 32 codes, by the CPU of one process, positions as upper bounds


@pytest.fixture(scope="module")
def results() -> dict[str, Any]:
    """Reproduce with ``MOSS_TTS_REPO=… python benchmarks/resume.py --json benchmarks/results/resume.json``."""
    return json.loads((BENCHMARKS / "results" / "resume.json").read_text(encoding="utf-8"))


def problems(results: dict[str, Any]) -> list[str]:
    found = []
    replay, kills, save = results["replay"], results["kills"], results["save"]
    if replay["micro_batches"] / replay["cpu_seconds"] < REPLAY_MINIMUM:
        found.append("replay")
    if kills["resumable"] + kills["before_the_first_save_was_done"] != kills["kills"] or kills["kills"] < 50:
        found.append("kills")
    if kills["in_the_middle_of_a_save"] < 5:
        found.append("moments of the kills")
    if not 0 < save["cpu_seconds"] <= save["seconds"] * 2:
        found.append("save")
    for row in results["check"]:
        fast = row["records_a_cpu_second_of_this_process"]
        if (row["frames"], row["workers"], row["keeps_records"], row["exact_positions"]) == (300, 1, False, False):
            found += [] if fast >= CHECK_MINIMUM else ["check"]
    for row in results["sizes"]:
        # Weights in 16 bit with two states of 8 bit and their scales; adapters in 32 bit.
        share = row["state_bytes"] / row["weight_bytes"]
        if not (1.0 < share < 1.1 if row["method"] == "full" else 0.5 <= share < 0.6):
            found.append(f"size of {row['family']} {row['method']}")
    return found


def test_the_figures_are_what_was_asked_for(results: dict[str, Any]) -> None:
    assert problems(results) == []
    assert {(row["family"], row["method"]) for row in results["sizes"]} == {
        (family, method)
        for family in ("moss_tts_local", "moss_tts_delay", "moss_tts_local_v1.5", "moss_tts_realtime")
        for method in ("full", "lora")
    }


def test_other_figures_are_noticed(results: dict[str, Any]) -> None:
    """Control."""
    worse = copy.deepcopy(results)
    worse["replay"]["cpu_seconds"] *= 20
    worse["kills"]["resumable"] -= 1
    worse["sizes"][0]["state_bytes"] *= 2
    assert problems(worse) == ["replay", "kills", "size of moss_tts_local full"]


def test_the_section_says_them(results: dict[str, Any]) -> None:
    section = resume_section(results)
    assert f"{results['replay']['micro_batches_a_cpu_second']:,} micro-batches a CPU second" in section
    assert section.count("\n| ") == len(results["check"]) + len(results["sizes"]) + 2
    assert "| moss_tts_local 1.7b, full | 5.08 GiB | 5.16 GiB | 10.24 GiB |" in section
