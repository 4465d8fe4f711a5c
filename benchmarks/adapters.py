"""LoRA and QLoRA at full size: peak memory of a simulated step, by family. Needs no GPU and no weights.

    MOSS_TTS_REPO=… python benchmarks/adapters.py [--family NAME --size SIZE] --json benchmarks/results/adapters.json

Rank 16 on all projections of backbone and depth model, one record of 600 positions, 350 of them supervised.
"""

from __future__ import annotations

import argparse
import json
import os
from pathlib import Path

import torch
from machine import describe_run

from moss_tts_patches.adapters.plan import AdapterPlan
from moss_tts_patches.adapters.simulated import AdapterShape
from moss_tts_patches.families import FAMILIES
from moss_tts_patches.memory.rungs import MicroBatch, Rung
from moss_tts_patches.memory.simulate import simulate_rung
from moss_tts_patches.memory.upstream_source import SOURCES, load_classes
from moss_tts_patches.units import GIB, TFLOP

SIZES = (
    ("moss_tts_local", "1.7b"),
    ("moss_tts_delay", "8b"),
    ("moss_tts_delay", "1.7b"),
    ("moss_tts_local_v1.5", "4b"),
    ("moss_tts_realtime", "1.7b"),
)
PACKAGES = ("torch", "transformers", "peft", "bitsandbytes")
OPTIONS = {"r": 16, "lora_alpha": 32, "lora_dropout": 0.05}


def main() -> None:
    """Simulates and prints; writes JSON where asked."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--family")
    parser.add_argument("--size")
    parser.add_argument("--positions", type=int, default=600)
    parser.add_argument("--supervised", type=int, default=350)
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    repository = Path(os.environ["MOSS_TTS_REPO"])
    rows = []
    for name, size in SIZES:
        if arguments.family not in (None, name) or arguments.size not in (None, size):
            continue
        family = next(family() for family in FAMILIES if family.name == name)
        source = SOURCES[name]
        model_class, config_class = load_classes(repository / source.folder, source)
        config = family.full_size_config(config_class, size)
        batch = MicroBatch(1, arguments.positions, arguments.supervised)
        for method in ("lora", "qlora"):
            shape = AdapterShape(AdapterPlan(method, options=OPTIONS))
            figures = simulate_rung(family, model_class, config, batch, Rung(method=method), shape)
            rows.append(
                {
                    "family": name,
                    "size": size,
                    "method": method,
                    "positions": batch.positions,
                    "supervised": batch.supervised,
                    "peak_bytes": figures.peak_bytes,
                    "host_bytes": figures.host_bytes,
                    "matmul_flops": figures.matmul_flops,
                }
            )
            peak, flops = figures.peak_bytes / GIB, figures.matmul_flops / TFLOP
            print(f"{name:22} {size:5} {method:6} {peak:6.2f} GiB {flops:6.2f} TFLOP", flush=True)
    if arguments.json:
        arguments.json.write_text(
            json.dumps({**describe_run(PACKAGES, torch.device("cpu"), repository), "rows": rows}, indent=1) + "\n"
        )


if __name__ == "__main__":
    main()
