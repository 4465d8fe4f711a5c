#!/usr/bin/env python3
"""Simulates training steps of full-size MOSS-TTS-Local: upstream as it is beside every way to run the layer.

    MOSS_TTS_REPO=/path/to/MOSS-TTS python benchmarks/memory.py [--positions 600 1500 3000] [--json FILE]

No GPU, no weights, no download. Peaks are bytes of live storages, the optimizer step included; add about 1.5 GiB for
the CUDA context, workspaces and the allocator's rounding.
"""

from __future__ import annotations

import argparse
import importlib
import json
import os
import platform
import sys
import time
from dataclasses import asdict
from datetime import date
from pathlib import Path
from typing import Any

import accelerate
import torch
import transformers

from moss_tts_patches.families.local import LocalFamily
from moss_tts_patches.memory.simulate import MicroBatch, Rung, StepFigures, simulate_rung, simulate_upstream

GIB = 2**30
SUPERVISED_SHARE = 350 / 600  # of the positions: a 7 s reference and prompt before 28 s of speech, as in the design

RUNGS = {
    "fused": Rung("fused"),
    "staged": Rung("staged"),
    "fused, gradients on host": Rung("fused", gradients="host"),
    "staged, gradients on host": Rung("staged", gradients="host"),
    "fused, both on host": Rung("fused", gradients="host", states="host"),
    "staged, both on host": Rung("staged", gradients="host", states="host"),
    "staged, both and idle weights on host": Rung("staged", gradients="host", states="host", weights="host"),
}


def load_upstream(repository: Path) -> tuple[Any, Any]:
    """Returns upstream's model and config classes."""
    sys.path.insert(0, str(repository))
    model = importlib.import_module("moss_tts_local.modeling_moss_tts").MossTTSDelayModel
    return model, importlib.import_module("moss_tts_local.configuration_moss_tts").MossTTSDelayConfig


def measure(repository: Path, positions: list[int], names: list[str]) -> list[dict[str, Any]]:
    """Simulates every row of the table."""
    model_class, config_class = load_upstream(repository)
    family = LocalFamily()
    rows = []
    for count in positions:
        batch = MicroBatch(1, count, round(count * SUPERVISED_SHARE))
        for name in names:
            config = family.full_size_config(config_class, "1.7b")
            began = time.perf_counter()
            if name.startswith("upstream"):
                figures = simulate_upstream(model_class, config, batch, checkpointing="checkpointing" in name)
            else:
                figures = simulate_rung(family, model_class, config, batch, RUNGS[name])
            seconds = time.perf_counter() - began
            rows.append({"name": name, "positions": count, "supervised": batch.supervised, **asdict(figures)})
            print(describe(name, batch, figures) + f"   ({seconds:.0f} s to simulate)", flush=True)
    return rows


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
    parser.add_argument("--positions", type=int, nargs="+", default=[600, 3000])
    parser.add_argument("--only", nargs="+", choices=names, default=names, metavar="NAME", help=", ".join(names))
    parser.add_argument("--json", type=Path, help="also write the figures here")
    arguments = parser.parse_args()
    repository = os.environ.get("MOSS_TTS_REPO")
    if repository is None or not (Path(repository) / "moss_tts_local" / "modeling_moss_tts.py").exists():
        raise SystemExit(
            f"MOSS_TTS_REPO={repository!r}: expected a MOSS-TTS checkout. "
            "Get it with: git clone https://github.com/OpenMOSS/MOSS-TTS"
        )
    versions = {
        "date": date.today().isoformat(),
        "python": platform.python_version(),
        "torch": torch.__version__,
        "transformers": transformers.__version__,
        "accelerate": accelerate.__version__,
    }
    print(" ".join(f"{key}={value}" for key, value in versions.items()))
    rows = measure(Path(repository), arguments.positions, arguments.only)
    if arguments.json:
        arguments.json.write_text(json.dumps({"versions": versions, "rows": rows}, indent=1) + "\n")


if __name__ == "__main__":
    main()
