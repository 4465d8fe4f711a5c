"""The part of docs/benchmarks.md about real cards: what ``gpu.sh`` measured, or every run that waits for a card."""

from __future__ import annotations

from typing import Any

from gpu import CAPS_GIB, RUNGS, UPSTREAM

from moss_tts_patches.units import GIB


def not_measured() -> str:
    """One row for each run that the prepared script makes."""
    lines = ["| memory cap | run | peak allocated, reserved, s/micro-batch, s/step |", "|---|---|---|"]
    names = [UPSTREAM, *(rung.name for rung in RUNGS)]
    for cap in [*(_cap(cap) for cap in CAPS_GIB), "none"]:
        lines += [f"| {cap} | `{name}` | not yet measured on a GPU |" for name in names]
    return "\n".join(lines) + "\n\nThe script is prepared and tested on a CPU; it needs a card and nothing else."


def write_cuda(document: dict[str, Any]) -> str:
    """Markdown of benchmarks/results/gpu.json."""
    bandwidth = document["memory_bandwidth"]
    lines = [
        f"{document['machine'].get('gpu', 'no GPU')}, {document['family']}, {document['positions']} positions, "
        f"{document['supervised']} supervised, two micro-batches a step."
        + (f" A copy within its memory moves {bandwidth / 1e9:.0f} GB/s." if bandwidth else ""),
        "",
        "| memory cap | run | allocated, GiB | of simulated | reserved, GiB | s/micro-batch | s/step | of bandwidth | "
        "host traffic a step, GiB |",
        "|---|---|---:|---:|---:|---:|---:|---:|---:|",
        *(_row(row) for row in document["rows"]),
    ]
    return "\n".join(lines)


def _row(row: dict[str, Any]) -> str:
    head = f"| {_cap(row['cap_gib'])} | `{row['name']}` "
    if row["outcome"] != "measured":
        return f"{head}| {row['outcome']} | | | | | | |"
    figures = row["figures"]
    off = f"{figures['peak_allocated'] / row['simulated'] - 1:+.1%}" if row["simulated"] else ""
    share = f"{row['of_bandwidth']:.0%}" if row["of_bandwidth"] else ""
    return (
        f"{head}| {figures['peak_allocated'] / GIB:.2f} | {off} | {figures['peak_reserved'] / GIB:.2f} "
        f"| {figures['seconds_micro_batch']:.3f} | {figures['seconds_optimizer_step']:.3f} | {share} "
        f"| {figures['host_traffic_bytes'] / GIB:.2f} |"
    )


def _cap(gib: float | None) -> str:
    return "none" if gib is None else f"{gib:g} GiB"
