"""The committed figures of time, learning and fidelity: what the project promises holds in them, the page says them."""

from __future__ import annotations

import json
import sys

import mini
import pytest
from tolerances import TOLERANCES

BENCHMARKS = mini.REPOSITORY / "benchmarks"
if str(BENCHMARKS) not in sys.path:
    sys.path.insert(0, str(BENCHMARKS))

import learning  # noqa: E402
from sections.fidelity import fidelity_section  # noqa: E402
from sections.learning import learning_section  # noqa: E402
from sections.time import time_section, window_line  # noqa: E402

SECTIONS = {"time-cpu": time_section, "learning": learning_section, "fidelity": fidelity_section}


def results(name):
    return json.loads((BENCHMARKS / "results" / f"{name}.json").read_text(encoding="utf-8"))


def rows(name, table="rows"):
    return {row["name"]: row for row in results(name)[table]}


def test_fused_takes_less_cpu_time_than_upstream_with_checkpointing():
    found = rows("time-cpu", "micro_batch")
    reference, fused = found["upstream, checkpointing"], found["fused"]
    assert fused["cpu_seconds"] / reference["cpu_seconds"] <= TOLERANCES["fused_cpu_time"]
    assert fused["cpu_ratio"] == fused["cpu_seconds"] / reference["cpu_seconds"]
    assert found["upstream"]["cpu_ratio"] > TOLERANCES["fused_cpu_time"]  # the bound is not met by just anything


def test_the_layer_learns_what_float32_learns_through_the_trainer():
    found = rows("learning")
    assert abs(found["full"]["share_of_fp32_decrease"] - 1) <= TOLERANCES["convergence_decrease_relative"]
    assert found["upstream_bf16"]["share_of_fp32_decrease"] < TOLERANCES["trainer_decrease_left_behind"]
    for name in ("lora", "qlora"):
        assert found[name]["share_of_fp32_decrease"] > TOLERANCES["trainer_decrease_of_adapters"]


def test_learning_is_of_the_same_data_from_the_same_weights():
    found = rows("learning")
    curves = results("learning")["curves"]
    assert len({len(losses) for losses in curves.values()}) == 1
    assert found["full"]["first_loss"] == pytest.approx(found["upstream_bf16"]["first_loss"], abs=1e-4)
    assert found["lora"]["first_loss"] == pytest.approx(found["upstream_bf16"]["first_loss"], abs=1e-4)


def test_upstreams_lines_are_read():
    """In the form in which its trainer prints a step."""
    line = "[2026-01-01 00:00:00] epoch=0 step={}/150 loss={:.4f} lr=5.00e-05 step_time=0.10s eta=0:00:01"
    text = "\n".join(["loading", line.format(1, 4.0), "Finished training: global_step=150", line.format(2, 3.5)])
    assert learning.printed_losses(text) == [4.0, 3.5]


def test_curves_are_compared_by_the_mean_of_their_last_steps():
    exact, other = [4.0] * 10 + [2.0] * 20, [4.0] * 10 + [3.0] * 20
    [first, second] = learning.compare({learning.EXACT: exact, "full": other})
    assert (first["distance_to_fp32"], first["share_of_fp32_decrease"]) == (0, 1)
    assert (second["distance_to_fp32"], second["share_of_fp32_decrease"]) == (1, 0.5)
    assert learning.running_mean([4.0, 2.0, 0.0]) == [4.0, 3.0, 2.0]


def test_fidelity_is_within_what_the_tests_allow():
    found = results("fidelity")["rows"]
    assert {row["family"] for row in found} == set(mini.FAMILIES)
    assert all(row["gradient_error"] <= row["gradient_allowed"] for row in found)
    assert all(row["loss_difference"] <= row["loss_allowed"] for row in found)
    allowed = {(row["precision"], row["loss_allowed"], row["gradient_allowed"]) for row in found}
    assert allowed == {
        ("float32", TOLERANCES["loss_fp32_relative"], TOLERANCES["gradient_fp32_relative"]),
        ("bfloat16", TOLERANCES["loss_bf16_relative"], TOLERANCES["gradient_bf16_error_ratio"]),
    }


@pytest.mark.parametrize("name", SECTIONS)
def test_a_section_has_a_line_for_every_row(name):
    document = results(name)
    text = SECTIONS[name](document)
    listed = [row for key in ("rows", "micro_batch", "step") for row in document.get(key, [])]
    assert sum(line.startswith("| ") for line in text.splitlines()) == len(listed) + (2 if name == "time-cpu" else 1)
    assert all(row.get("label", row.get("tensor", row.get("name"))) in text for row in listed)
    assert "{" not in text


def test_a_section_says_what_the_file_says():
    document = results("time-cpu")
    changed = json.loads(json.dumps(document))
    changed["micro_batch"][2]["cpu_ratio"] = 0.123
    assert "| 0.12 |" in time_section(changed)
    assert "| 0.12 |" not in time_section(document)


def test_the_window_is_composed_of_both_tables():
    micro_batch = [{"name": "upstream, checkpointing", "cpu_seconds": 2.0}, {"name": "staged", "cpu_seconds": 1.0}]
    step = [
        {"name": "torch AdamW (upstream's)", "cpu_nanoseconds_per_weight": 2.0},
        {"name": "8-bit AdamW; states device, gradients device", "cpu_nanoseconds_per_weight": 100.0},
    ]
    line = window_line({"parameters": 10**8, "micro_batch": micro_batch, "step": step})
    assert "18.0 s of CPU" in line and "16.2 s; ratio 1.11" in line
