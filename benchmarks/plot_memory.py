#!/usr/bin/env python3
"""Draws docs/images/memory.png from the figures that benchmarks/memory.py has written.

python benchmarks/plot_memory.py [benchmarks/results/memory-local.json] [docs/images/memory.png]
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt

ROOT = Path(__file__).resolve().parents[1]
GIB = 2**30
NAMES = {
    "upstream, checkpointing": "official, with its --gradient-checkpointing",
    "staged": "staged",
    "staged, gradients on host": "staged, gradients in RAM",
    "staged, both on host": "staged, gradients and optimizer states in RAM",
    "staged, both and idle weights on host": "the same, idle weights in RAM too",
}
COLOURS = ("#9a3b3b", "#2f5d8a", "#3f7cad", "#5f9ecb", "#8cbcdc")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("figures", type=Path, nargs="?", default=ROOT / "benchmarks/results/memory-local.json")
    parser.add_argument("image", type=Path, nargs="?", default=ROOT / "docs/images/memory.png")
    arguments = parser.parse_args()
    document = json.loads(arguments.figures.read_text())
    rows = {(row["name"], row["positions"]): row["peak_bytes"] / GIB for row in document["rows"]}
    positions = sorted({count for _, count in rows})
    figure, axes = plt.subplots(figsize=(12, 5.2), dpi=100)
    height = 0.8 / len(positions)
    for index, name in enumerate(NAMES):
        for step, count in enumerate(positions):
            value, y = rows[name, count], index + step * height - 0.4 + height / 2
            axes.barh(y, value, height * 0.92, color=COLOURS[index], alpha=1.0 if step == 0 else 0.6)
            axes.text(value + 0.3, y, f"{value:.1f} GiB  ({count} positions)", va="center", fontsize=10)
    axes.set_yticks(range(len(NAMES)), list(NAMES.values()))
    axes.invert_yaxis()
    for card in (8, 12, 16, 24):
        axes.axvline(card, color="#888888", linewidth=0.8, linestyle=":")
        axes.text(card, -0.62, f"{card} GB", ha="center", fontsize=9, color="#555555")
    axes.set_xlabel("peak GPU memory of a training step, all weights trained, batch 1 (GiB, simulated)")
    official, least = (rows[name, positions[0]] for name in (next(iter(NAMES)), list(NAMES)[-1]))
    title = f"All weights of MOSS-TTS-Local 1.7B: from {official:.0f} GiB to {least:.1f} GiB (dotted: cards)"
    axes.set_title(title, loc="left", pad=28, fontsize=14)
    axes.spines[["top", "right"]].set_visible(False)
    figure.tight_layout()
    arguments.image.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(arguments.image)
    print(f"wrote {arguments.image.relative_to(ROOT)} from figures of {document['versions']['date']}")


if __name__ == "__main__":
    main()
