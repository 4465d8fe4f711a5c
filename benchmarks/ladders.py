#!/usr/bin/env python3
"""Every way to train each family beside upstream, simulated at full size; writes docs/memory.md from it.

    MOSS_TTS_REPO=/path/to/MOSS-TTS python benchmarks/ladders.py [--positions 600]
    python benchmarks/ladders.py --page-only    # from benchmarks/results/ladders.json

No GPU, no weights, no download; about a minute and a half a model the first time, then from the planner's cache.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from machine import describe_run
from memory import SUPERVISED_SHARE

from moss_tts_patches.adapters.shapes import adapter_shapes
from moss_tts_patches.memory.figures import RungFigures
from moss_tts_patches.memory.footprint import CATEGORIES
from moss_tts_patches.memory.full_ladder import FullLadder, Wanted, simulate_ladder
from moss_tts_patches.memory.methods import SHAPES
from moss_tts_patches.memory.plan_cache import PlanCache, user_cache_folder
from moss_tts_patches.memory.reserve import Limits
from moss_tts_patches.memory.rungs import MicroBatch
from moss_tts_patches.memory.show_plan import REFERENCE, assess_ladder, cheapest
from moss_tts_patches.memory.upstream_source import SOURCES
from moss_tts_patches.units import GIB

ROOT = Path(__file__).resolve().parents[1]
RESULTS, PAGE = ROOT / "benchmarks/results/ladders.json", ROOT / "docs/memory.md"
PACKAGES = ("torch", "transformers", "accelerate")
CARDS_GIB = (6, 8, 12, 16, 24, 48, 80)
HOST_GIB = 64
ACCUMULATION = 8

INTRODUCTION = """# What each way to train needs

Simulated at full size, one micro-batch in the middle of an accumulation window and the optimizer step:
{batch}. GiB at the peak of live tensors; a card also needs about 1.3 GiB for the
CUDA context, workspaces, a desktop and the allocator's rounding, which the lines "fits" count. FLOPs are relative to
`{reference}`.

Written by `python benchmarks/ladders.py` on {date}: {versions}. For your own records and card: `moss-lowmem plan`.
"""


def section(name: str, size: str, ladder: FullLadder) -> str:
    """One model's table, and what is chosen on each card."""
    reference = next(found.flops for found in ladder.figures if found.rung.name == REFERENCE)
    header = ["rung", "GPU peak", *(name.replace("_", " ") for name in CATEGORIES), "RAM", "FLOPs"]
    lines = [f"## {name}, {size}", "", "| " + " | ".join(header) + " |", "|---|" + "---:|" * (len(header) - 1)]
    lines += [row(figures, reference) for figures in ladder.figures]
    lines += [
        "",
        f"Chosen by size of the card, with {HOST_GIB} GiB of RAM and {ACCUMULATION} micro-batches a step:",
        "",
    ]
    lines += [f"- {card} GiB: {choice(ladder, card)}" for card in CARDS_GIB]
    lines += [f"- not simulated: {method} ({reason})" for method, reason in ladder.left_out.items()]
    return "\n".join(lines)


def row(figures: RungFigures, reference: float) -> str:
    sizes = [figures.peak_bytes, *asdict(figures.categories).values(), figures.host_total()]
    cells = [f"`{figures.rung.name}`", *(f"{size / GIB:.2f}" for size in sizes), f"{figures.flops / reference:.2f}"]
    return "| " + " | ".join(cells) + " |"


def choice(ladder: FullLadder, card_gib: int) -> str:
    limits = Limits(card_gib * GIB, HOST_GIB * GIB, ACCUMULATION)
    found = cheapest(assess_ladder(ladder.figures, limits), ACCUMULATION)
    return "nothing fits" if found is None else f"`{found.figures.rung.name}`, {found.margin / GIB:.1f} GiB free"


def measure(repository: Path | None, batch: MicroBatch) -> dict[str, Any]:
    """Simulates every released model; returns what belongs into the results file."""
    SHAPES.update(adapter_shapes())
    cache = PlanCache(user_cache_folder(os.environ, Path.home()))
    models = []
    for name, source in SOURCES.items():
        for size in source.sizes:
            print(f"{name} {size}", file=sys.stderr, flush=True)
            ladder = simulate_ladder(Wanted(name, size, None, repository, batch, {}), cache)
            models.append({"family": name, "size": size, **ladder.to_document()})
    head = describe_run(PACKAGES, torch.device("cpu"), repository)
    return {**head, "batch": asdict(batch), "models": models}


def page(document: dict[str, Any]) -> str:
    """Returns docs/memory.md."""
    batch = MicroBatch(**document["batch"])
    introduction = INTRODUCTION.format(
        batch=f"1 record of {batch.positions} positions, {batch.supervised} supervised",
        reference=REFERENCE,
        date=document["date"],
        versions=", ".join(f"{name} {number}" for name, number in document["versions"].items()),
    )
    models = document["models"]
    sections = (section(entry["family"], entry["size"], FullLadder.from_document(entry)) + "\n" for entry in models)
    return "\n".join([introduction, *sections])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--positions", type=int, default=600)
    parser.add_argument("--page-only", action="store_true")
    arguments = parser.parse_args()
    if not arguments.page_only:
        batch = MicroBatch(1, arguments.positions, round(arguments.positions * SUPERVISED_SHARE))
        repository = Path(os.environ["MOSS_TTS_REPO"]) if "MOSS_TTS_REPO" in os.environ else None
        RESULTS.write_text(json.dumps(measure(repository, batch), indent=1) + "\n", encoding="utf-8")
    PAGE.write_text(page(json.loads(RESULTS.read_text(encoding="utf-8"))), encoding="utf-8")


if __name__ == "__main__":
    main()
