#!/usr/bin/env python3
"""Trains the same tiny model with float32 AdamW, with bf16 AdamW as upstream does, and with the layer's optimizer.

    python benchmarks/convergence.py [--steps 1000] [--json FILE] [--png FILE]

Writes benchmarks/results/convergence.json and docs/images/convergence.png in about two minutes on one core. The plot
needs matplotlib (extra `dev`).

The model is the miniature of MOSS-TTS-Local (0.3 M parameters, backbone, depth transformer, 5 heads). In every audio
record each codebook counts up by a step of its own from a random start, so what comes next can be learnt.

What decides between the three is how an update compares with the distance between neighbouring bf16 numbers.
Upstream's rate of 1e-5 meets weights of about 0.02 (its initializer_range); the miniature's weights are N(0, 0.05), so
the rate is 2.5e-5: the same share of a weight in each step. Betas, weight decay, warm-up and decay are upstream's.

Only the *weights* are in bf16 here: loss and gradients are computed in float32 from the stored bf16 values, and the
gradients rounded to bf16, as they arrive in training. So the two bf16 runs differ in nothing but their optimizer, the
float32 run starts from the same numbers, and a CPU without fast bf16 matrices needs minutes instead of hours.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from machine import describe_run
from torch import nn

REPOSITORY = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(REPOSITORY / "examples"))

from mini_moss_tts.make_demo_data import SCALES, SPECIAL_TOKENS, random_model  # noqa: E402

from moss_tts_patches.loss.problem import IGNORE_INDEX  # noqa: E402
from moss_tts_patches.optim import AdamW8bit  # noqa: E402

SIZES = SCALES["tiny"]
LEARNING_RATE = 2.5e-5
OPTIONS: dict[str, Any] = {"lr": LEARNING_RATE, "betas": (0.9, 0.95), "eps": 1e-8, "weight_decay": 0.1}
WARMUP_SHARE = 0.03
PACKAGES = ("torch", "transformers", "moss_tts_patches")

Named = list[tuple[str, nn.Parameter]]
Batch = dict[str, Any]


@dataclass(frozen=True)
class Way:
    """A way to train: the dtype that weights are stored in, and the optimizer."""

    label: str
    dtype: torch.dtype
    build: Callable[[Named], torch.optim.Optimizer]


def torch_adamw(named: Named) -> torch.optim.Optimizer:
    return torch.optim.AdamW([parameter for _, parameter in named], **OPTIONS)


WAYS = {
    "fp32": Way("float32 AdamW", torch.float32, torch_adamw),
    "upstream": Way("bf16 AdamW (upstream)", torch.bfloat16, torch_adamw),
    "ours": Way("bf16 AdamW8bit (this layer)", torch.bfloat16, lambda named: AdamW8bit(named, **OPTIONS)),
}


@dataclass
class Curve:
    """Mean loss over all batches, before the first step and after every so many."""

    steps: list[int] = field(default_factory=list)
    losses: list[float] = field(default_factory=list)
    moved_share: float = 0.0

    @property
    def decrease(self) -> float:
        return self.losses[0] - self.losses[-1]


def counting_batches(count: int = 8, records: int = 2, frames: int = 16, seed: int = 0) -> list[Batch]:
    """Makes the data: a prompt of four random tokens, then ``frames`` of audio in which every codebook counts.

    Returns:
        Micro-batches as the trainer's collate function makes them: ``input_ids`` and ``labels``
        ``[records, 4 + frames, channels]``.
    """
    prompt, generator = 4, torch.Generator().manual_seed(seed)
    strides = 2 * torch.arange(1, SIZES.codebooks + 1) + 1
    time = torch.arange(prompt + frames + 1).view(1, -1, 1)
    batches = []
    for _ in range(count):
        start = torch.randint(SIZES.codes, (records, 1, SIZES.codebooks), generator=generator)
        text = torch.full((records, prompt + frames + 1, 1), len(SPECIAL_TOKENS) + 4)
        text[:, :prompt] = torch.randint(
            len(SPECIAL_TOKENS), SIZES.vocabulary, (records, prompt, 1), generator=generator
        )
        tokens = torch.cat([text, (start + time * strides) % SIZES.codes], dim=-1)
        labels = tokens[:, 1:].clone()
        labels[:, : prompt - 1] = IGNORE_INDEX
        batches.append(
            {
                "input_ids": tokens[:, :-1],
                "attention_mask": torch.ones(records, prompt + frames, dtype=torch.bool),
                "labels": labels,
                "channelwise_loss_weight": [1.0] + [32.0 / SIZES.codebooks] * SIZES.codebooks,
            }
        )
    return batches


class Training:
    """One training: weights stored in ``way.dtype``, a float32 model that computes with their values."""

    def __init__(self, way: Way, steps: int, batches: Sequence[Batch], seed: int) -> None:
        self.model = random_model(SIZES, {name: index for index, name in enumerate(SPECIAL_TOKENS)}, seed).train()
        self.batches, self.steps = batches, steps
        trained = {name: weight for name, weight in self.model.named_parameters() if weight.requires_grad}
        # All ways start from the same numbers, which bf16 can hold.
        self.start = {name: weight.detach().bfloat16() for name, weight in trained.items()}
        self.computing = list(trained.values())
        self.stored = [nn.Parameter(value.to(way.dtype, copy=True)) for value in self.start.values()]
        self.optimizer = way.build(list(zip(trained, self.stored)))
        warmup = max(1, round(WARMUP_SHARE * steps))
        self.schedule = torch.optim.lr_scheduler.LambdaLR(
            self.optimizer,
            lambda step: (step + 1) / warmup if step < warmup else (steps - step) / (steps - warmup),
        )

    @torch.no_grad()
    def load(self) -> None:
        for weight, value in zip(self.computing, self.stored):
            weight.copy_(value)

    def step(self, number: int) -> None:
        self.load()
        self.model.zero_grad()
        self.model(**self.batches[number % len(self.batches)]).loss.backward()
        for weight, value in zip(self.computing, self.stored):
            if weight.grad is not None:
                value.grad = weight.grad.to(value.dtype)
        self.optimizer.step()
        self.schedule.step()

    @torch.no_grad()
    def loss(self) -> float:
        self.load()
        return sum(self.model(**batch).loss.item() for batch in self.batches) / len(self.batches)

    def moved_share(self) -> float:
        """Share of the weights that are not what they started as."""
        pairs = list(zip(self.stored, self.start.values()))
        moved = sum((value.detach().float() != start.float()).sum().item() for value, start in pairs)
        return moved / sum(start.numel() for _, start in pairs)


def train(way: Way, steps: int, batches: Sequence[Batch], every: int, seed: int = 0) -> Curve:
    """Trains and reads the loss before the first step and after every ``every`` steps."""
    training, curve = Training(way, steps, batches, seed), Curve()
    for number in range(steps + 1):
        if number % every == 0 or number == steps:
            curve.steps.append(number)
            curve.losses.append(training.loss())
        if number < steps:
            training.step(number)
    curve.moved_share = training.moved_share()
    return curve


def plot(curves: dict[str, Curve], path: Path) -> None:
    """Draws the curves, 1200 pixels wide."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    # Ours runs on top of float32: a thin dark line over a broad pale one shows both.
    styles: dict[str, dict[str, Any]] = {
        "fp32": {"color": "#9ecae1", "linewidth": 8, "solid_capstyle": "round"},
        "upstream": {"color": "#d95f02", "linewidth": 2.5},
        "ours": {"color": "#08306b", "linewidth": 2, "linestyle": (0, (5, 2))},
    }
    figure, axes = pyplot.subplots(figsize=(8, 4.6), dpi=150, facecolor="white")
    for name, curve in curves.items():
        axes.plot(curve.steps, curve.losses, label=f"{WAYS[name].label}: {curve.losses[-1]:.3f}", **styles[name])
    steps = curves["fp32"].steps[-1]
    lost = 1 - curves["upstream"].decrease / curves["fp32"].decrease
    axes.set_title(
        f"Miniature model: bf16 AdamW loses {lost:.0%} of what float32 learns, the layer keeps it", fontsize=12, pad=12
    )
    axes.set_xlabel("optimizer step (rate 2.5e-5 on weights N(0, 0.05), as upstream's 1e-5 on 0.02)")
    axes.set_ylabel("training loss, mean over all batches")
    axes.set_xlim(0, steps)
    axes.grid(color="#dddddd", linewidth=0.8)
    axes.spines[["top", "right"]].set_visible(False)
    axes.legend(title="final loss", frameon=False, loc="lower left", alignment="left")
    figure.tight_layout()
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=150, metadata={"Software": None})
    pyplot.close(figure)


def summary(curves: dict[str, Curve]) -> dict[str, float]:
    exact = curves["fp32"]
    return {
        f"{name}_{what}": value
        for name in ("upstream", "ours")
        for what, value in (
            ("final_loss_over_fp32", curves[name].losses[-1] / exact.losses[-1]),
            ("share_of_fp32_decrease", curves[name].decrease / exact.decrease),
        )
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=1000)
    parser.add_argument("--every", type=int, default=20, help="steps between two readings of the loss")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--json", type=Path, default=REPOSITORY / "benchmarks" / "results" / "convergence.json")
    parser.add_argument("--png", type=Path, default=REPOSITORY / "docs" / "images" / "convergence.png")
    arguments = parser.parse_args()
    torch.set_num_threads(1)  # tensors this small gain nothing from a second one
    batches, curves = counting_batches(seed=arguments.seed), {}
    for name, way in WAYS.items():
        curves[name] = train(way, arguments.steps, batches, arguments.every, arguments.seed)
        first, last, moved = curves[name].losses[0], curves[name].losses[-1], curves[name].moved_share
        print(f"{way.label:28} loss {first:.4f} -> {last:.4f}, {moved:.1%} of the weights moved", flush=True)
    figures = summary(curves)
    print(" ".join(f"{name}={value:.4f}" for name, value in figures.items()))
    result = {
        **describe_run(PACKAGES, torch.device("cpu")),
        "command": "python benchmarks/convergence.py",
        "seed": arguments.seed,
        "options": OPTIONS,
        **figures,
        "curves": {name: {"label": WAYS[name].label, **vars(curve)} for name, curve in curves.items()},
    }
    arguments.json.parent.mkdir(parents=True, exist_ok=True)
    arguments.json.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")
    plot(curves, arguments.png)


if __name__ == "__main__":
    main()
