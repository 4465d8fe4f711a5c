"""The script for a GPU machine, on the CPU: the same code on a tiny model, real bytes against simulated ones."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from tolerances import TOLERANCES

BENCHMARKS = Path(__file__).resolve().parents[1] / "benchmarks"


@pytest.mark.upstream
@pytest.mark.parametrize("family", ["moss_tts_local", "moss_tts_delay", "moss_tts_local_v1.5", "moss_tts_realtime"])
def test_a_real_step_takes_the_bytes_that_were_simulated(upstream_repo, torchaudio_stub, tmp_path, family):
    """Issue 6, "Must show" 1."""
    result = tmp_path / "gpu.json"
    command = [sys.executable, BENCHMARKS / "gpu.py", "--device", "cpu", "--tiny", "--family", family]
    environment = {**os.environ, "PYTHONPATH": str(torchaudio_stub), "MOSS_TTS_REPO": str(upstream_repo)}
    done = subprocess.run(
        # Few positions: without values transformers cannot see that it needs no attention mask, and makes one. Its
        # positions x positions are nothing at full size (0.7 MB at 600), and 30 % of a model of 40 KB at 400.
        [*command, "--positions", "24", "--supervised", "14", "--json", result],
        env=environment,
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    rows = json.loads(result.read_text())["rows"]
    assert len(rows) == 4
    for row in rows:
        assert row["peak_allocated"] == pytest.approx(row["simulated"], rel=TOLERANCES["simulated_peak_relative"])


def test_without_a_card_it_says_so():
    done = subprocess.run(
        [sys.executable, BENCHMARKS / "gpu.py"],
        capture_output=True,
        text=True,
        env={**os.environ, "CUDA_VISIBLE_DEVICES": ""},
    )
    assert done.returncode == 1 and "no CUDA card here" in done.stderr
