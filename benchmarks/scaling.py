#!/usr/bin/env python3
"""Writes benchmarks/results/scaling.json and docs/scaling.md: each GPU's memory under every engine, beside upstream's.

    MOSS_TTS_REPO=/path/to/MOSS-TTS python benchmarks/scaling.py          # simulates, then writes both
    python benchmarks/scaling.py --page                                   # writes the page from the results

No GPU, no weights, no download; about three minutes the first time, then from the planner's cache.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
from pathlib import Path
from typing import Any

import torch
from machine import describe_run

from moss_tts_patches.adapters.shapes import adapter_shapes
from moss_tts_patches.memory.engine_ladder import engine_rungs, simulate_engines
from moss_tts_patches.memory.full_ladder import Wanted
from moss_tts_patches.memory.methods import SHAPES
from moss_tts_patches.memory.plan_cache import PlanCache, user_cache_folder
from moss_tts_patches.memory.rungs import ENGINES, EngineRung, MicroBatch
from moss_tts_patches.units import GIB

ROOT = Path(__file__).resolve().parents[1]
RESULTS, PAGE = ROOT / "benchmarks/results/scaling.json", ROOT / "docs/scaling.md"
MODELS = (("moss_tts_local", "1.7b"), ("moss_tts_delay", "8b"))
BATCH = MicroBatch(1, 600, 350)  # a 7 s reference and prompt before 28 s of speech
GPUS = (1, 2, 4, 8)
ACCUMULATION = 8

PAGE_HEAD = """# What each GPU needs under every engine

One machine with 1, 2, 4 or 8 GPUs; {positions} positions on each GPU, {supervised} of them supervised, {accumulation}
micro-batches an optimizer step. GiB at the peak on each GPU, and in brackets what the stores take in the memory of the
machine for all of them. Add about 1.3 GiB on a GPU for the CUDA context, NCCL's buffers not included, and 3 GiB of RAM
for each process. `upstream` is its trainer with its own config of that engine, without the layer; `-checkpointing` with
its gradient checkpointing.

Modelled, not run on GPUs: activations and the loss are simulated at full size with the schedule that the engine uses;
weights, gradients, states and buffers are formulas (`moss_tts_patches/memory/engine_needs.py`), each with its source.
Run: those formulas against the bytes that are alive on two and four real processes of a small model, on CPUs, for DDP,
FSDP and DeepSpeed's engine (`tests/test_engine_bytes.py`): within {step:.0%} in the optimizer step, and in the backward
at most {missing:.0%} above the formula, gradients on their way being the simulation's part. On CPUs both memories are
one, so that offload is checked as their sum. Weights that ZeRO-3 holds whole are a bound (1e9 elements), reached or
not.

For your own records: `moss-lowmem plan MODEL --gpus 4`. Written by `python benchmarks/scaling.py` on {date}:
{versions}.
"""

PAGE_NOTES = """## What follows

- **DDP saves nothing by more GPUs**, and needs buckets of the gradients' size beside the gradients when it accumulates.
  It is the engine for LoRA and QLoRA.
- **ZeRO keeps float32 weights and two float32 moments**: 12 bytes a weight, where the layer on one GPU has 2 (8-bit
  states, stochastic rounding). With few GPUs it therefore needs more than one process without it; full training under
  ZeRO-2 needs less than DDP from 4 GPUs on.
- **With offload the host holds it all**: 20 bytes a weight for the machine, whatever the number of GPUs.
- **LoRA under ZeRO-3** keeps the activations of the local model's loss, which cannot be recomputed there: DDP is
  better.
- **FSDP** exchanges gradients at every micro-batch with the layer on: with upstream's config they are whole on every
  GPU while they accumulate, 16 GiB of the 8B model.
"""


def simulate() -> list[dict[str, Any]]:
    SHAPES.update(adapter_shapes())
    cache = PlanCache(user_cache_folder(os.environ, Path.home()))
    rungs = [rung for engine in ENGINES for processes in GPUS for rung in engine_rungs(engine, processes)]
    rows = []
    for family, size in MODELS:
        print(f"{family} {size}", file=sys.stderr, flush=True)
        wanted = Wanted(family, size, None, Path(os.environ["MOSS_TTS_REPO"]), BATCH, {})
        for figures in simulate_engines(wanted, rungs, ACCUMULATION, cache):
            assert isinstance(figures.rung, EngineRung)
            rows.append(
                {
                    "family": family,
                    "size": size,
                    "engine": figures.rung.engine,
                    "way": way_of(figures.rung),
                    "gpus": figures.rung.processes,
                    "peak_gib": round(figures.peak_bytes / GIB, 2),
                    "host_gib": round(figures.host_total() / GIB, 2),
                }
            )
    return rows


def way_of(rung: EngineRung) -> str:
    return rung.upstream or rung.method + ("" if rung.states == "device" else ", states on the host")


def page(results: dict[str, Any]) -> str:
    sys.path.insert(0, str(ROOT / "tests"))
    from tolerances import TOLERANCES

    versions = ", ".join(f"{name} {number}" for name, number in results["versions"].items())
    head = PAGE_HEAD.format(
        positions=BATCH.positions,
        supervised=BATCH.supervised,
        accumulation=ACCUMULATION,
        step=TOLERANCES["engine_step_bytes"],
        missing=TOLERANCES["engine_backward_missing"],
        date=results["date"],
        versions=versions,
    )
    return "\n".join([head, *(table(results["rows"], *model) for model in MODELS), PAGE_NOTES])


def table(rows: list[dict[str, Any]], family: str, size: str) -> str:
    lines = [f"## {family}, {size}", "", "| engine | trained | " + " | ".join(f"{n} GPU" for n in GPUS) + " |"]
    lines.append("|---|---|" + "---:|" * len(GPUS))
    own = [row for row in rows if (row["family"], row["size"]) == (family, size)]
    for engine, way in dict.fromkeys((row["engine"], row["way"]) for row in own):
        cells = []
        for gpus in GPUS:
            (row,) = [r for r in own if (r["engine"], r["way"], r["gpus"]) == (engine, way, gpus)]
            cells.append(f"{row['peak_gib']:.1f}" + (f" ({row['host_gib']:.0f})" if row["host_gib"] >= 1 else ""))
        lines.append(f"| {engine} | {way} | " + " | ".join(cells) + " |")
    return "\n".join([*lines, ""])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--page", action="store_true", help="write the page from the results that are there")
    if not parser.parse_args().page:
        results = describe_run(("torch", "transformers", "accelerate"), torch.device("cpu"))
        results["rows"] = simulate()
        RESULTS.write_text(json.dumps(results, indent=1) + "\n", encoding="utf-8")
    PAGE.write_text(page(json.loads(RESULTS.read_text(encoding="utf-8"))), encoding="utf-8")


if __name__ == "__main__":
    main()
