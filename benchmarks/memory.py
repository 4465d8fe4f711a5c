#!/usr/bin/env python3
"""Simulates training steps of a full-size MOSS-TTS model: upstream as it is beside every way to run the layer.

    MOSS_TTS_REPO=/path/to/MOSS-TTS python benchmarks/memory.py [--family moss_tts_delay] [--size 8b]
        [--positions 600 1500 3000] [--json FILE]

Every row is a full simulation, all layers, all chunks and the whole optimizer step: what the planner's short ones
(benchmarks/ladders.py) are compared with. No GPU, no weights, no download. Peaks are bytes of live storages, the
optimizer step included; add about 1.5 GiB for the CUDA context, workspaces and the allocator's rounding.
"""

from __future__ import annotations

import argparse
import json
import os
import time
from pathlib import Path
from typing import Any

import torch
from machine import describe_run

from moss_tts_patches.families import FAMILIES
from moss_tts_patches.families.family import Family
from moss_tts_patches.memory.simulate import MicroBatch, Rung, StepFigures, simulate_rung, simulate_upstream
from moss_tts_patches.memory.upstream_source import SOURCES, load_classes, trainer_options
from moss_tts_patches.units import GIB

SUPERVISED_SHARE = 350 / 600  # of the positions: a 7 s reference and prompt before 28 s of speech, as in the design

PACKAGES = ("torch", "transformers", "accelerate")
FIGURES = ("peak_bytes", "backward_peak_bytes", "host_bytes", "matmul_flops", "attention_flops")

RUNGS = {
    "fused": Rung("fused"),
    "staged": Rung("staged"),
    "fused, gradients on host": Rung("fused", gradients="host"),
    "staged, gradients on host": Rung("staged", gradients="host"),
    "fused, both on host": Rung("fused", gradients="host", states="host"),
    "staged, both on host": Rung("staged", gradients="host", states="host"),
    "staged, both and idle weights on host": Rung("staged", gradients="host", states="host", weights="host"),
}


def measure(
    repository: Path, family: Family, size: str | None, positions: list[int], names: list[str]
) -> list[dict[str, Any]]:
    """Simulates every row of the table; one that upstream's trainer has no flag for is left out."""
    source = SOURCES[family.name]
    model_class, config_class = load_classes(repository / source.folder, source)
    own = trainer_options(repository, source)
    names = [name for name in names if family.upstream_checkpoints or name != "upstream, checkpointing"]
    rows = []
    for count in positions:
        batch = MicroBatch(1, count, round(count * SUPERVISED_SHARE))
        for name in names:
            config = family.full_size_config(config_class, size or source.sizes[0])
            began = time.perf_counter()
            if name.startswith("upstream"):
                checkpointing = "checkpointing" in name
                figures = simulate_upstream(family, model_class, config, batch, checkpointing=checkpointing, **own)
            else:
                figures = simulate_rung(family, model_class, config, batch, RUNGS[name])
            seconds = time.perf_counter() - began
            rows.append({"name": name, "positions": count, "supervised": batch.supervised, **_numbers(figures)})
            print(describe(name, batch, figures) + f"   ({seconds:.0f} s to simulate)", flush=True)
    return rows


def _numbers(figures: StepFigures) -> dict[str, int]:
    return {name: getattr(figures, name) for name in FIGURES}


def describe(name: str, batch: MicroBatch, figures: StepFigures) -> str:
    """One line of the table."""
    return (
        f"{name:28} positions={batch.positions:5} supervised={batch.supervised:5} "
        f"peak={figures.peak_bytes / GIB:6.2f} GiB  until backward={figures.backward_peak_bytes / GIB:6.2f} GiB  "
        f"host={figures.host_bytes / GIB:6.2f} GiB  "
        f"matmul={figures.matmul_flops / 1e12:7.2f} TFLOP  attention={figures.attention_flops / 1e12:5.2f} TFLOP"
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    names = ["upstream", "upstream, checkpointing", *RUNGS]
    families = {family.name: family for family in FAMILIES}
    parser.add_argument("--family", choices=list(SOURCES), default="moss_tts_local")
    parser.add_argument("--size", help="of the backbone, for example 8b; by default the first released one")
    parser.add_argument("--positions", type=int, nargs="+", default=[600, 3000])
    parser.add_argument("--only", nargs="+", choices=names, default=names, metavar="NAME", help=", ".join(names))
    parser.add_argument("--json", type=Path, help="also write the figures here")
    arguments = parser.parse_args()
    repository = os.environ.get("MOSS_TTS_REPO")
    if repository is None or not (Path(repository) / SOURCES[arguments.family].folder).is_dir():
        raise SystemExit(
            f"MOSS_TTS_REPO={repository!r}: expected a MOSS-TTS checkout. "
            "Get it with: git clone https://github.com/OpenMOSS/MOSS-TTS"
        )
    head = describe_run(PACKAGES, torch.device("cpu"), Path(repository))
    print(json.dumps(head))
    family = families[arguments.family]()
    rows = measure(Path(repository), family, arguments.size, arguments.positions, arguments.only)
    if arguments.json:
        arguments.json.write_text(json.dumps({**head, "rows": rows}, indent=1) + "\n")


if __name__ == "__main__":
    main()
