"""The part of docs/benchmarks.md about learning through the real trainer."""

from __future__ import annotations

from typing import Any

NOTE = """![Training loss of upstream and of the layer](images/learning.png)

A small model, fine-tuned by upstream's own `run_train.sh` and `sft.py` for {steps} steps from the same checkpoint on
the same records in the same order; final loss: mean of the last {mean_steps} steps. Adapters have ten times the rate of
a full training, as is usual, which is why they come further in so few steps. Progress: how far the loss
came down, float32's being 100 %.
"""


def learning_section(results: dict[str, Any]) -> str:
    """Markdown of benchmarks/results/learning.json."""
    lines = [NOTE.format(**results)]
    lines += ["| | rate | final loss | distance to float32 | progress |", "|---|---:|---:|---:|---:|"]
    lines += [
        f"| {row['label']} | {row['learning_rate']:g} | {row['final_loss']:.4f} | {row['distance_to_fp32']:+.4f} "
        f"| {row['share_of_fp32_decrease']:.0%} |"
        for row in results["rows"]
    ]
    return "\n".join(lines)
