#!/usr/bin/env python3
"""Draws docs/images/memory.png, peak memory by length, from the figures of benchmarks/comparison.py.

python benchmarks/plot_memory.py [benchmarks/results/comparison.json] [docs/images/memory.png]
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt
from comparison import LORA_SCRIPT, MODELS, OUTPUT, ROOT, Row, lengths_of, read_rows

from moss_tts_patches.units import GIB

TITLES = {
    "local-1.7b": "MOSS-TTS-Local 1.7B",
    "delay-8b": "MOSS-TTS (delay) 8B",
    "v1.5-4b": "MOSS-TTS-Local v1.5 4B",
    "realtime-1.7b": "MOSS-TTS-Realtime 1.7B",
}
# Name of a row, or of the one that stands for it where there is no depth model; label, colour, form of the line.
LINES = (
    (("upstream",), "official, all weights", "#d08a8a", "-"),
    (("upstream-checkpointing",), "official, checkpointing", "#9a3b3b", "-"),
    ((LORA_SCRIPT,), "LoRA script (PEFT, checkpointing)", "#c7812b", "--"),
    (("full-fused", "full-staged"), "ours, all weights, all on the GPU", "#1f4468", "-"),
    (("full-staged-host-gradients+states",), "ours, all weights, stores in RAM", "#3f7cad", "-"),
    (("full-staged-host-gradients+states+weights",), "ours, idle weights in RAM too", "#8cbcdc", "-"),
    (("qlora-fused", "qlora-staged"), "ours, QLoRA", "#3d8a5f", "--"),
)
CARDS_GIB = (8, 16, 24, 48, 80)


def draw(axes: Any, model: str, rows: dict[tuple[str, int, str], Row], *, large: bool) -> None:
    """Draws one model's lines."""
    lengths = lengths_of(rows.values())
    for names, label, colour, form in LINES:
        name = next(name for name in names if (model, lengths[0], name) in rows)
        peaks = [rows[model, count, name].peak_bytes / GIB for count in lengths]
        axes.plot(lengths, peaks, form, color=colour, marker="o", markersize=4, linewidth=2, label=label)
        if large:
            axes.text(lengths[-1] + 40, peaks[-1], f"{peaks[-1]:.1f}", color=colour, va="center", fontsize=9)
            axes.text(lengths[1], peaks[1] * 1.03, f"{peaks[1]:.1f}", color=colour, ha="center", fontsize=9)
    axes.set_yscale("log", base=2)
    top = axes.get_ylim()[1]
    for card in CARDS_GIB:
        if card < top:
            axes.axhline(card, color="#999999", linewidth=0.7, linestyle=":", zorder=0)
    axes.set_yticks([2, 4, *(card for card in CARDS_GIB if card < top)])
    axes.get_yaxis().set_major_formatter(plt.FuncFormatter(lambda value, _: f"{value:g}"))
    axes.minorticks_off()
    axes.set_xticks(lengths if large else lengths[1:])
    axes.set_title(TITLES[model], loc="left", fontsize=13 if large else 11)
    axes.spines[["top", "right"]].set_visible(False)


def main() -> None:
    """Reads, draws, writes."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("figures", type=Path, nargs="?", default=OUTPUT)
    parser.add_argument("image", type=Path, nargs="?", default=ROOT / "docs/images/memory.png")
    arguments = parser.parse_args()
    document = json.loads(arguments.figures.read_text(encoding="utf-8"))
    rows = {row.key: row for row in read_rows(document)}
    first, *others = MODELS
    figure = plt.figure(figsize=(12, 6.2), dpi=100)
    grid = figure.add_gridspec(len(others), 2, width_ratios=(2.1, 1), hspace=0.5, wspace=0.14)
    large = figure.add_subplot(grid[:, 0])
    draw(large, first, rows, large=True)
    large.set_xlabel("positions of the record (600: about 28 s of speech)")
    large.set_ylabel("peak GPU memory of a training step, batch 1 (GiB, simulated)")
    large.legend(loc="upper left", fontsize=9, frameon=False, ncol=2)
    large.set_ylim(top=large.get_ylim()[1] * 1.9)
    for place, model in enumerate(others):
        draw(figure.add_subplot(grid[place, 1]), model, rows, large=False)
    arguments.image.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(arguments.image, bbox_inches="tight")
    print(f"wrote {arguments.image} from figures of {document['date']}")


if __name__ == "__main__":
    main()
