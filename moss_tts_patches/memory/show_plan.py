"""A plan as a table for people and as one object for programs."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

from ..units import GIB
from .planner import assess_ladder, cheapest
from .reserve import Assessment, Limits
from .rungs import Rung, UpstreamRung

if TYPE_CHECKING:
    from .full_ladder import FullLadder, Wanted

REFERENCE = UpstreamRung(True).name

# Columns that the table takes with the categories; a narrower terminal gets it without them.
WIDE = 140


def as_document(ladder: FullLadder, limits: Limits, answers: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the plan for JSON; ``choice`` is a rung's name, or None where nothing fits."""
    assessed = assess_ladder(ladder.figures, limits)
    chosen = cheapest(assessed, limits.accumulation)
    return {
        "rungs": [_entry(found) for found in assessed],
        "choice": None if chosen is None else chosen.figures.rung.name,
        "settings": {} if chosen is None else _settings(chosen),
        "why": explain(assessed, chosen, limits),
        "left_out": dict(ladder.left_out),
        "answers": dict(answers),
    }


def _entry(found: Assessment) -> dict[str, Any]:
    figures = found.figures
    return {
        "name": figures.rung.name,
        "peak_gib": round(figures.peak_bytes / GIB, 3),
        "host_gib": round(figures.host_total() / GIB, 3),
        "tflop": round(figures.flops / 1e12, 3),
        "fits": found.fits,
        "categories": {name: round(size / GIB, 3) for name, size in asdict(figures.categories).items()},
        "phase": figures.phase,
        "margin_gib": round(found.margin / GIB, 3),
        "reserve_gib": {name: round(size / GIB, 3) for name, size in asdict(found.reserve).items()},
    }


def explain(assessed: list[Assessment], chosen: Assessment | None, limits: Limits) -> str:
    """Says why a rung was chosen, or what the nearest one lacks."""
    if chosen is None:
        ours = [found for found in assessed if isinstance(found.figures.rung, Rung)]
        nearest = max(ours, key=lambda found: min(found.margin, found.host_margin))
        return f"nothing fits; nearest is {nearest.figures.rung.name}: {nearest.verdict}"
    figures = chosen.figures
    others = sum(found.fits for found in assessed if isinstance(found.figures.rung, Rung)) - 1
    traffic = figures.traffic_bytes(limits.accumulation) / GIB
    return (
        f"fewest FLOPs and least host traffic of the {others + 1} rungs that fit: {figures.flops / 1e12:.1f} TFLOP and "
        f"{traffic:.2f} GiB over the bus a micro-batch ({limits.accumulation} of them an optimizer step); "
        f"{chosen.margin / GIB:.2f} GiB stay free beside a reserve of {chosen.reserve.total / GIB:.2f} GiB "
        f"({chosen.reserve.describe()})"
    )


def _settings(chosen: Assessment) -> dict[str, str]:
    assert isinstance(chosen.figures.rung, Rung)
    return chosen.figures.rung.settings()


def print_plan(wanted: Wanted, ladder: FullLadder, limits: Limits, answers: Mapping[str, Any]) -> None:
    """Prints the table, the choice and what people ask next."""
    from rich.console import Console

    console = Console(soft_wrap=True)
    if not console.is_terminal:
        console = Console(soft_wrap=True, width=WIDE)
    assessed = assess_ladder(ladder.figures, limits)
    chosen = cheapest(assessed, limits.accumulation)
    console.print(_table(wanted, assessed, chosen, limits, categories=console.width >= WIDE), soft_wrap=False)
    for name, reason in ladder.left_out.items():
        console.print(f"not simulated: {name} ({reason})")
    if chosen is None:
        console.print(f"[bold]choice:[/] none. {explain(assessed, None, limits)}")
    else:
        console.print(f"[bold]choice: {chosen.figures.rung.name}[/]: {explain(assessed, chosen, limits)}")
        console.print("pin it: " + " ".join(f"{name}={value}" for name, value in _settings(chosen).items()))
    for line in answer_lines(answers):
        console.print(line)


def _table(
    wanted: Wanted, assessed: list[Assessment], chosen: Assessment | None, limits: Limits, *, categories: bool
) -> Any:
    from rich import box
    from rich.table import Table

    batch = wanted.batch
    host = "" if limits.host_bytes is None else f", {limits.host_bytes / GIB:.0f} GiB of RAM"
    table = Table(
        box=box.SIMPLE,
        title=f"{wanted.family} {wanted.checkpoint.name if wanted.checkpoint else wanted.size}: "
        f"{batch.records} x {batch.positions} positions, {batch.supervised} supervised; "
        f"{limits.card_bytes / GIB:.1f} GiB GPU{host}. GiB at the peak:",
    )
    parts = ("weights", "gradients", "states", "activations", "largest temp.") if categories else ()
    table.add_column("rung", no_wrap=True)
    for name in ("GPU peak", *parts, "RAM", "FLOPs"):
        table.add_column(name, justify="right")
    table.add_column("fits", no_wrap=True)
    for found in assessed:
        style = "bold green" if found is chosen else ("" if found.fits else "dim")
        table.add_row(*_row(found, _reference(assessed), categories), style=style)
    return table


def _row(found: Assessment, reference: float, categories: bool) -> list[str]:
    figures = found.figures
    parts = asdict(figures.categories).values() if categories else ()
    sizes = [figures.peak_bytes, *parts, figures.host_total()]
    return [
        figures.rung.name,
        *(f"{size / GIB:.2f}" for size in sizes),
        f"{figures.flops / reference:.2f}",
        found.verdict,
    ]


def _reference(assessed: list[Assessment]) -> float:
    return next(found.figures.flops for found in assessed if found.figures.rung.name == REFERENCE)


def answer_lines(answers: Mapping[str, Any]) -> list[str]:
    """What people ask, answered for this model."""
    lines = [
        f"FLOPs are relative to {REFERENCE}.",
        "More accumulation does not need more or less memory: gradients of earlier micro-batches are counted already.",
    ]
    if "largest_batch" in answers:
        lines.append(
            f"Records of this length in a micro-batch that fit with the chosen rung: about {answers['largest_batch']}. "
            "A larger batch is not the same training as more accumulation: upstream averages within a micro-batch."
        )
    lines.append(
        "More GPUs: --gpus 2 shows what each engine needs on every one of them. DDP keeps every byte of this on each, "
        "and ZeRO-3 on one GPU splits nothing."
    )
    return lines
