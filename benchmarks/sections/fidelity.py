"""The part of docs/benchmarks.md about agreement with upstream."""

from __future__ import annotations

from typing import Any

NOTE = """Random shrunken models of upstream's own classes, padding and positions without labels, the loss in several
chunks. `tests/test_fidelity.py` asserts on these figures. Loss: largest relative difference from upstream's in the same
precision. Gradients in float32: the worst tensor's norm of the difference over the norm of upstream's, allowed
{float32:g}. In bfloat16: the worst tensor's error against float32, as a multiple of upstream's own, over {bf16_batches}
batches, allowed {bfloat16:g}.
"""


def fidelity_section(results: dict[str, Any]) -> str:
    """Markdown of benchmarks/results/fidelity.json."""
    allowed = {row["precision"]: row["gradient_allowed"] for row in results["rows"]}
    lines = [NOTE.format(bf16_batches=results["bf16_batches"], **allowed)]
    lines += [
        "| family | trained | precision | schedule | loss | gradients | worst tensor |",
        "|---|---|---|---|---:|---:|---|",
    ]
    lines += [
        f"| {row['family']} | {row['method']} | {row['precision']} | {row['schedule']} | {row['loss_difference']:.1e} "
        f"| {_gradient(row)} | `{row['tensor']}` of {row['tensors']} |"
        for row in results["rows"]
    ]
    return "\n".join(lines)


def _gradient(row: dict[str, Any]) -> str:
    return f"{row['gradient_error']:.1e}" if row["precision"] == "float32" else f"{row['gradient_error']:.3f} ×"
