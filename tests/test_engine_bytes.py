"""The planner's arithmetic for engines over several processes, beside the bytes that they have on CPU ranks."""

from __future__ import annotations

import functools
import json
import os
import subprocess
import sys
from pathlib import Path

import deepspeed_packages
import pytest
from engine_bytes import BUCKET_ELEMENTS, Model
from mini import clean_environment
from tolerances import TOLERANCES

from moss_tts_patches.memory.engine_needs import EngineBytes, ModelParts, buckets, fully_sharded, zero2, zero3

TESTS = Path(__file__).parent
needs_deepspeed = pytest.mark.skipif(not deepspeed_packages.is_there(), reason=deepspeed_packages.REASON)
needs_compiler = pytest.mark.skipif(not deepspeed_packages.can_compile(), reason="DeepSpeedCPUAdam needs g++")


@functools.cache
def parts():
    model = Model()
    total = sum(p.numel() for p in model.parameters())
    unit = sum(p.numel() for p in model.layers[0].parameters())
    return ModelParts(total, total, unit, total - unit * len(model.layers), model.words.weight.numel())


@functools.cache
def run_cases(cases):
    """Counts of the ranks of each case."""
    path = os.pathsep.join(filter(None, [deepspeed_packages.FOLDER, str(TESTS), os.environ.get("PYTHONPATH", "")]))
    done = subprocess.run(
        [sys.executable, str(TESTS / "engine_bytes.py"), *cases],
        env=clean_environment(**{**deepspeed_packages.variables(), "PYTHONPATH": path}),
        capture_output=True,
        text=True,
        timeout=400,
    )
    lines = [line.split(" ", 2)[1:] for line in done.stdout.splitlines() if line.startswith("BYTES ")]
    assert len(lines) == len(cases), done.stderr[-3000:]
    return {case: json.loads(ranks) for case, ranks in lines}


def measured(engine, processes, accumulation=2):
    """The most of all ranks."""
    together = ZERO_CASES if engine in ("zero2", "zero3") else CASES if not engine.startswith("zero") else OFFLOAD_CASES
    ranks = run_cases(tuple(":".join(map(str, case)) for case in together))[f"{engine}:{processes}:{accumulation}"]
    return {name: max(rank[name] for rank in ranks) for name in ranks[0]}


def data_parallel(engine, processes, accumulates):
    """torch's AdamW here: two moments in 16 bit, and a square root of one of them in the step."""
    size = 2 * parts().trained
    extra = buckets(size, accumulates, views=engine == "ddp")
    return EngineBytes(size, size, 2 * size, buffers=extra, step=2 * size + (extra if engine == "ddp-copies" else 0))


FORMULAS = {
    "ddp": functools.partial(data_parallel, "ddp"),
    "ddp-copies": functools.partial(data_parallel, "ddp-copies"),
    "fsdp": lambda *given: fully_sharded(parts(), *given, syncs_always=True),
    "fsdp-no-sync": lambda *given: fully_sharded(parts(), *given, syncs_always=False),
    **{
        name: functools.partial(stage, parts(), offload=name.endswith("offload"), bucket=BUCKET_ELEMENTS)
        for name, stage in (("zero2", zero2), ("zero2-offload", zero2), ("zero3", zero3), ("zero3-offload", zero3))
    },
}


def most_in_backward(found: EngineBytes) -> float:
    return found.weights + found.gradients + found.states + found.buffers + found.gathered + found.host


def most_in_step(found: EngineBytes, engine: str) -> float:
    lasting = found.buffers if engine.startswith("zero3") else 0  # its bucket is never freed
    return found.weights + found.states + lasting + found.step + found.host


def compare(engine, processes, accumulation=2):
    """Relative errors of the formula in the backward and in the step; activations are a few kilobytes."""
    real, formula = measured(engine, processes, accumulation), FORMULAS[engine](processes, accumulation > 1)
    return (
        most_in_backward(formula) / real["backward"] - 1,
        most_in_step(formula, engine) / real["step"] - 1,
    )


CASES = [("ddp", 2, 2), ("ddp", 2, 1), ("ddp-copies", 2, 1), ("fsdp", 2, 2), ("fsdp", 4, 2), ("fsdp-no-sync", 4, 2)]
OFFLOAD_CASES = [("zero2-offload", 2, 2), ("zero3-offload", 2, 2)]
ZERO_CASES = [("zero2", 2, 1), ("zero2", 2, 2), ("zero2", 4, 2), ("zero3", 2, 2), ("zero3", 4, 2)]


def assert_close(engine, processes, accumulation):
    backward, step = compare(engine, processes, accumulation)
    assert -TOLERANCES["engine_backward_missing"] <= backward <= TOLERANCES["engine_backward_excess"]
    assert abs(step) <= TOLERANCES["engine_step_bytes"]


@pytest.mark.parametrize("engine,processes,accumulation", CASES)
def test_bytes_of_torchs_engines(engine, processes, accumulation):
    assert_close(engine, processes, accumulation)


@needs_deepspeed
@pytest.mark.parametrize("engine,processes,accumulation", ZERO_CASES)
def test_bytes_of_zero(engine, processes, accumulation):
    assert_close(engine, processes, accumulation)


@needs_deepspeed
@needs_compiler
@pytest.mark.parametrize("engine", ["zero2-offload", "zero3-offload"])
def test_bytes_of_zero_with_offload(engine):
    """On a CPU both memories are one: the sum is compared."""
    real, formula = measured(engine, 2), FORMULAS[engine](2, True)
    missing = 1 - most_in_backward(formula) / real["backward"]
    assert -TOLERANCES["engine_backward_excess"] <= missing <= TOLERANCES["engine_backward_missing"]


def test_the_comparison_sees_another_number_of_processes():
    """Negative control."""
    real, formula = measured("fsdp", 4, 2), FORMULAS["fsdp"](2, True)
    assert most_in_step(formula, "fsdp") > 1.5 * real["step"]


def test_the_comparison_sees_gradients_that_are_not_exchanged():
    """Negative control: what FSDP keeps whole on every process without an exchange at every micro-batch."""
    real, formula = measured("fsdp-no-sync", 4, 2), FORMULAS["fsdp"](4, True)
    assert most_in_backward(formula) < 0.9 * real["backward"]


@needs_deepspeed
def test_zero_has_what_deepspeeds_own_estimate_has():
    """Its estimates leave out buffers and activations."""
    command = (
        "from deepspeed.runtime.zero.stage3 import estimate_zero3_model_states_mem_needs as three\n"
        "from deepspeed.runtime.zero.stage_1_and_2 import estimate_zero2_model_states_mem_needs as two\n"
        "n, layer = 8_459_432_960, 622_329_856\n"
        "print(two(n, 16, 1, cpu_offload=False)[1], three(n, layer, 16, 1, False, False)[1])\n"
    )
    path = os.pathsep.join(filter(None, [deepspeed_packages.FOLDER, os.environ.get("PYTHONPATH", "")]))
    environment = clean_environment(**{**deepspeed_packages.variables(), "PYTHONPATH": path})
    done = subprocess.run([sys.executable, "-c", command], env=environment, capture_output=True, text=True, check=True)
    theirs = [int(number) for number in done.stdout.split()[-2:]]
    whole = ModelParts(8_459_432_960, 8_459_432_960, 192_946_432, 1_513_361_408, 622_329_856)
    for stage, estimate in zip((zero2, zero3), theirs):
        ours = stage(whole, 16, True, offload=False, bucket=0)
        # Without the square root, and with the one layer that ZeRO-3's estimate has whole; that lacks split weights.
        states = ours.weights + ours.states + ours.step - 4 * whole.trained / 16 + (stage is zero2) * ours.gradients
        missing = 2 * whole.total / 16 if stage is zero3 else 0
        layer = 4 * whole.largest if stage is zero3 else 0
        assert states + layer == pytest.approx(estimate + missing, rel=1e-3)
