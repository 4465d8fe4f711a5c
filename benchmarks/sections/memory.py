"""The part of docs/benchmarks.md about memory and FLOPs."""

from __future__ import annotations

from typing import Any

from comparison import LORA_SCRIPT, MODELS, Row, lengths_of, read_rows

from moss_tts_patches.memory.rungs import UpstreamRung
from moss_tts_patches.units import GIB, TFLOP

UPSTREAM, REFERENCE = UpstreamRung(False).name, UpstreamRung(True).name
SHORT, LONG = 600, 3000
NAMES = {
    UPSTREAM: "upstream",
    REFERENCE: "upstream, checkpointing",
    LORA_SCRIPT: "LoRA script (PEFT, AdamW, checkpointing)",
}
WITHOUT_FLAG = ("realtime-1.7b",)  # upstream's trainer has no flag for checkpointing there

MEMORY = """![Peak memory by length](images/memory.png)

One record in the middle of an accumulation window and the optimizer step, built at full size from upstream's own
classes without weights and without a GPU. Seven of twelve positions are supervised. GPU: peak of live tensors, GiB; a
card also needs about 1.5 GiB for the CUDA context, workspaces and the allocator's rounding. FLOPs: matrix products and
attention of one micro-batch. Ratios are to upstream with its checkpointing, at 600 positions.

- **Upstream and the LoRA script are full simulations**: every layer, the whole optimizer step.
- The LoRA script is what people write today: `get_peft_model` on the backbone's attention and MLP projections, rank 16,
  upstream's forward and loss, its checkpointing, torch's AdamW. On moss_tts_local it does not run as it is: with
  transformers 5 checkpointing makes the frozen embeddings' outputs require gradients and upstream writes to them in
  place; `disable_input_require_grads()` after it is what the script simulated here does. It adapts the backbone only;
  `lora-…` and `qlora-…` adapt the depth model too.
- **The layer's rungs are composed** by the planner from short simulations, within 0.013 % of full ones
  (`tests/test_planner_upstream.py`). RAM does not depend on the length.
"""

ZERO = """### ZeRO on one GPU, by DeepSpeed's own estimators

**Model states only** (weights, gradients, fp32 master weights and moments): the estimators leave out activations and
communication buffers. The columns "with activations" add the most that upstream's forward and backward with
checkpointing hold beside them (full simulations). On one GPU ZeRO shards nothing; offloaded states are all in RAM.
"""


def write_memory(comparison: dict[str, Any], zero: dict[str, Any], local: dict[str, Any]) -> str:
    """All tables.

    Args:
        comparison: results of :mod:`comparison`.
        zero: results of :mod:`zero`.
        local: full simulations of moss_tts_local by :mod:`memory`.
    """
    rows = {row.key: row for row in read_rows(comparison)}
    parts = [MEMORY]
    for model, (family, size) in MODELS.items():
        parts += [f"### {family}, {size}\n", model_table(model, rows), ""]
    parts += [ZERO, zero_table(zero["rows"], rows), "", targets(local["rows"])]
    return "\n".join(parts)


def model_table(model: str, rows: dict[tuple[str, int, str], Row]) -> str:
    """One line for each way to train one model."""
    lengths = lengths_of(rows.values())
    header = [
        "",
        *(f"GPU {count}" for count in lengths),
        "ratio",
        "RAM",
        *(f"TFLOP {count}" for count in lengths),
        "ratio",
    ]
    lines = ["| " + " | ".join(header) + " |", "|---|" + "---:|" * (len(header) - 1)]
    reference = rows[model, SHORT, REFERENCE]
    names = [name for kept, count, name in rows if kept == model and count == SHORT]
    for name in names:
        found = [rows[model, count, name] for count in lengths]
        short = rows[model, SHORT, name]
        cells = [
            *(f"{row.peak_bytes / GIB:.2f}" for row in found),
            f"{short.peak_bytes / reference.peak_bytes:.2f}",
            f"{short.host_bytes / GIB:.2f}",
            *(f"{row.flops / TFLOP:.1f}" for row in found),
            f"{short.flops / reference.flops:.2f}",
        ]
        lines.append(f"| {label(model, name)} | " + " | ".join(cells) + " |")
    return "\n".join(lines)


def label(model: str, name: str) -> str:
    if name == REFERENCE and model in WITHOUT_FLAG:
        return "upstream, if its trainer had a flag for checkpointing"
    return NAMES.get(name, f"`{name}`")


def zero_table(estimates: list[dict[str, Any]], rows: dict[tuple[str, int, str], Row]) -> str:
    """One line for each estimate."""
    lines = [
        f"| model | engine (estimate) | states, GPU | RAM | with activations, {SHORT} | {LONG} |",
        "|---|---|---:|---:|---:|---:|",
    ]
    for entry in estimates:
        model, states = entry["model"], entry["state_bytes"]
        sums = [states + rows[model, count, REFERENCE].activation_bytes for count in (SHORT, LONG)]
        cells = [f"{size / GIB:.2f}" for size in (states, entry["host_bytes"], *sums)]
        lines.append(f"| {model} | {entry['name']}, states only | " + " | ".join(cells) + " |")
    return "\n".join(lines)


TARGETS = ("staged, both on host", "fused")


def ratios(rows: list[dict[str, Any]], name: str) -> tuple[float, float]:
    """Returns peak and FLOPs (of matrix products) relative to upstream with checkpointing, at 600 positions.

    Args:
        rows: full simulations, by :mod:`memory`.
        name: the row.
    """
    short = {row["name"]: row for row in rows if row["positions"] == SHORT}
    found, reference = short[name], short["upstream, checkpointing"]
    return tuple(found[key] / reference[key] for key in ("peak_bytes", "matmul_flops"))  # type: ignore[return-value]


def targets(rows: list[dict[str, Any]]) -> str:
    """What the project promised, from full simulations."""
    lines = [
        "Full simulations of moss_tts_local, 600 positions, 350 supervised, relative to upstream with checkpointing:",
        "",
    ]
    for name in TARGETS:
        peak, flops = ratios(rows, name)
        lines.append(f"- {name}: {peak:.3f} of the memory, {flops:.3f} of the matrix products")
    return "\n".join(lines)
