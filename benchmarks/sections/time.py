"""The parts of docs/benchmarks.md about time on a CPU."""

from __future__ import annotations

from typing import Any

NOTE = """One record of {positions} positions, {supervised} of them supervised, on a model of upstream's own class with
{millions:.0f} M random weights, float32, one core: forward and backward, median of {rounds} alternating runs. CPU:
seconds of the process itself; clock: seconds that went by, other programs included. FLOPs: matrix products. The
layer's rows recompute the backbone's layers, but for "backbone kept". Ratios are to upstream with its checkpointing.
"""

WINDOW = 8  # upstream's --gradient-accumulation-steps in run_train.sh

STEP_NOTE = """One optimizer step over {millions:.1f} M weights in bf16, median of {steps}. On a GPU the layer's 8-bit
AdamW is one kernel; on a CPU it is the reference that the kernel is tested against, and makes its random bits
number by number.
"""


def time_section(results: dict[str, Any]) -> str:
    """Markdown of benchmarks/results/time-cpu.json."""
    lines = [NOTE.format(millions=results["parameters"] / 1e6, **results)]
    lines += ["| | CPU, s | ratio | clock, s | ratio | GFLOP | ratio |", "|---|---:|---:|---:|---:|---:|---:|"]
    lines += [
        f"| {row['name']} | {row['cpu_seconds']:.2f} | {row['cpu_ratio']:.2f} | {row['wall_seconds']:.2f} "
        f"| {row['wall_ratio']:.2f} | {row['matmul_gflop']:.0f} | {row['flops_ratio']:.2f} |"
        for row in results["micro_batch"]
    ]
    lines += ["", STEP_NOTE.format(millions=results["step_parameters"] / 1e6, **results)]
    lines += ["| optimizer | CPU, ms | ns a weight | ratio |", "|---|---:|---:|---:|"]
    lines += [
        f"| {row['name']} | {row['cpu_seconds'] * 1e3:.0f} | {row['cpu_nanoseconds_per_weight']:.1f} "
        f"| {row['cpu_ratio']:.1f} |"
        for row in results["step"]
    ]
    return "\n".join([*lines, "", window_line(results)])


def window_line(results: dict[str, Any]) -> str:
    """What an accumulation window takes with the layer's defaults, composed of the two tables."""
    batch = {row["name"]: row["cpu_seconds"] for row in results["micro_batch"]}
    step = {row["name"]: row["cpu_nanoseconds_per_weight"] * results["parameters"] / 1e9 for row in results["step"]}
    theirs = WINDOW * batch["upstream, checkpointing"] + step["torch AdamW (upstream's)"]
    ours = WINDOW * batch["staged"] + step["8-bit AdamW; states device, gradients device"]
    return (
        f"The layer's defaults, composed of both: a window of {WINDOW} micro-batches with `staged` and a step of "
        f"8-bit AdamW over all weights, {ours:.1f} s of CPU; upstream with checkpointing and torch's AdamW, "
        f"{theirs:.1f} s; ratio {ours / theirs:.2f}."
    )
