#!/usr/bin/env python3
"""Draws docs/images/data-flow.png: what a micro-batch and an optimizer step move, and where it stands.

python docs/draw_data_flow.py
"""

from __future__ import annotations

from pathlib import Path

import matplotlib

matplotlib.use("Agg")
from matplotlib import pyplot as plt
from matplotlib.axes import Axes
from matplotlib.patches import FancyArrowPatch, FancyBboxPatch

PATH = Path(__file__).parent / "images" / "data-flow.png"

GPU, HOST, WORK, CHUNK = "#eaf2fb", "#f3efe6", "#ffffff", "#dcebd8"
INK, GREY = "#1f2933", "#5b6770"


def box(axes: Axes, x: float, y: float, width: float, height: float, text: str, colour: str = WORK) -> None:
    """A labelled box; the first line of its text is its name."""
    patch = FancyBboxPatch(
        (x, y), width, height, boxstyle="round,pad=0,rounding_size=0.12", facecolor=colour, edgecolor=INK, linewidth=1
    )
    axes.add_patch(patch)
    name, *rest = text.split("\n")
    line = 0.25
    top = y + height / 2 + line * len(rest) / 2
    axes.text(x + width / 2, top, name, ha="center", va="center", fontsize=9.5, color=INK, weight="bold")
    for number, words in enumerate(rest, 1):
        axes.text(x + width / 2, top - line * number, words, ha="center", va="center", fontsize=8, color=GREY)


def area(axes: Axes, y: float, height: float, text: str, colour: str) -> None:
    """A background that says where things stand."""
    axes.add_patch(
        FancyBboxPatch(
            (0, y), 15.4, height, boxstyle="round,pad=0,rounding_size=0.2", facecolor=colour, edgecolor="none"
        )
    )
    axes.text(0.2, y + height - 0.25, text, ha="left", va="center", fontsize=10, color=GREY, style="italic")


def arrow(axes: Axes, start: tuple[float, float], end: tuple[float, float], text: str = "", **look: str) -> None:
    """From box to box, with what moves."""
    axes.add_patch(
        FancyArrowPatch(start, end, **{"arrowstyle": "-|>", **look}, mutation_scale=12, color=INK, linewidth=1.2)
    )
    if text:
        x, y = (start[0] + end[0]) / 2, (start[1] + end[1]) / 2
        across = start[0] == end[0]
        axes.text(
            x + (0.1 if across else 0),
            y + (0 if across else 0.18),
            text,
            ha="left" if across else "center",
            va="center",
            fontsize=8,
            color=INK,
        )


def draw() -> plt.Figure:
    """The whole picture."""
    figure, axes = plt.subplots(figsize=(15.4, 6.7), dpi=110)
    axes.set_xlim(0, 15.4)
    axes.set_ylim(0, 6.7)
    axes.axis("off")
    area(axes, 2.6, 4.1, "GPU", GPU)
    area(axes, 0, 2.4, "host memory", HOST)

    box(axes, 0.3, 4.6, 2.5, 1.3, "backbone, forward\nlayers keep their input only\nno logits, no key-value cache")
    box(axes, 3.9, 4.6, 2.2, 1.3, "supervised positions\nhidden states with a label:\nabout half of a record")
    box(axes, 7.2, 3.0, 4.1, 2.9, "", CHUNK)
    axes.text(9.25, 5.65, "one chunk of 32 frames, then the next", ha="center", fontsize=9.5, color=INK, weight="bold")
    box(axes, 7.4, 4.55, 1.2, 0.8, "depth\nforward")
    box(axes, 8.75, 4.55, 1.1, 0.8, "heads\nloss")
    box(axes, 10.0, 4.55, 1.1, 0.8, "backward\nat once")
    arrow(axes, (8.6, 4.95), (8.75, 4.95))
    arrow(axes, (9.85, 4.95), (10.0, 4.95))
    axes.text(8.9, 4.25, "graph and logits are gone before the next", ha="center", fontsize=8, color=GREY)
    box(axes, 7.4, 3.2, 3.7, 0.75, "gradient of the hidden states\nfills up chunk by chunk")
    arrow(axes, (10.55, 4.55), (10.55, 3.95))
    box(axes, 12.4, 4.6, 2.7, 1.3, "backbone, backward\nlayer by layer: computed again,\nthen back-propagated")
    box(axes, 12.4, 3.0, 2.7, 1.0, "AdamW8bit\none weight group after another,\nstochastic rounding to bf16")

    arrow(axes, (2.8, 5.25), (3.9, 5.25), "hidden")
    arrow(axes, (6.1, 5.25), (7.2, 5.25), "chunks")
    arrow(axes, (11.1, 3.6), (12.4, 5.2))

    box(axes, 0.3, 0.3, 2.8, 1.4, "idle weights\nbackbone layers, while the depth\nmodel and the heads work")
    box(axes, 3.6, 0.3, 2.8, 1.4, "unread embedding\noff the GPU,\nin every checkpoint all the same")
    box(axes, 7.4, 0.3, 3.7, 1.4, "gradients\nfloat32 or bf16 sums over the\naccumulation window; norm and clip")
    box(axes, 12.4, 0.3, 2.7, 1.4, "optimizer states\n8 bit, block-wise:\n2.03 bytes a parameter")

    arrow(axes, (9.25, 3.0), (9.25, 1.7), "depth and heads")
    arrow(axes, (1.6, 4.6), (1.6, 1.7), "out, and back in", arrowstyle="<|-|>")
    arrow(axes, (12.5, 4.6), (11.1, 1.5))
    axes.text(11.65, 2.3, "each layer", fontsize=8, color=INK)
    arrow(axes, (13.75, 3.0), (13.75, 1.7), "a group at a time", arrowstyle="<|-|>")
    return figure


def main() -> None:
    PATH.parent.mkdir(exist_ok=True)
    draw().savefig(PATH, bbox_inches="tight", metadata={"Software": None})
    print(PATH.relative_to(Path(__file__).parents[1]))


if __name__ == "__main__":
    main()
