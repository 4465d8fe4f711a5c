#!/usr/bin/env python3
"""Writes docs/benchmarks.md from the files in benchmarks/results: ``python benchmarks/page.py``; a test compares them.

A section is a function of results files. One whose files are not there says what would write them.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from sections.cuda import not_measured, write_cuda
from sections.fidelity import fidelity_section
from sections.learning import learning_section
from sections.memory import write_memory
from sections.resume import resume_section
from sections.time import time_section

ROOT = Path(__file__).resolve().parents[1]
RESULTS = ROOT / "benchmarks/results"
PAGE = ROOT / "docs/benchmarks.md"

Document = dict[str, Any]

INTRODUCTION = """# Benchmarks

Upstream, what people use today and this layer, side by side. Every number comes from a file in `benchmarks/results`;
`MOSS_TTS_REPO=… bash benchmarks/run.sh` writes them all again, then the pictures and this page
(`python benchmarks/page.py`). Tables of every way to train by card: [memory.md](memory.md); several GPUs:
[scaling.md](scaling.md).
"""


@dataclass(frozen=True)
class Section:
    """A part of the page.

    Attributes:
        title: its heading.
        results: names of results files, without ``.json``.
        command: what writes them.
        write: makes Markdown of the documents, in the order of ``results``.
        absent: makes Markdown where one of the files is not there.
    """

    title: str
    results: tuple[str, ...]
    command: str
    write: Callable[..., str]
    absent: Callable[[], str] = lambda: "Not measured yet."

    def text(self, folder: Path) -> str:
        """Returns the section, read from that folder of results."""
        files = [folder / f"{name}.json" for name in self.results]
        heading = f"## {self.title}\n\n"
        if not all(file.exists() for file in files):
            return heading + f"{self.absent()} (`{self.command}`)\n"
        documents = [json.loads(file.read_text(encoding="utf-8")) for file in files]
        return heading + f"{self.write(*documents)}\n\n{origin(self.command, documents)}\n"


def origin(command: str, documents: Iterable[Document]) -> str:
    """One line for each results file: command, date, seed, versions."""
    lines = []
    for document in documents:
        versions = {key: value for key, value in document["versions"].items() if value is not None}
        head = {"seed": document.get("seed"), "upstream": document.get("upstream")}
        known = {**{key: value for key, value in head.items() if value is not None}, **versions}
        date = document.get("date") or known.pop("date")
        known.pop("date", None)
        lines.append(f"{date}: " + ", ".join(f"{key} {value}" for key, value in known.items()))
    return f"`{command}`, " + "; ".join(dict.fromkeys(lines)) + "."


def table(rows: Iterable[Mapping[str, Any]]) -> str:
    """A table of rows that share their keys: column names from the keys, numbers with 4 digits."""
    rows = list(rows)
    columns = list(dict.fromkeys(key for row in rows for key in row))
    lines = ["| " + " | ".join(column.replace("_", " ") for column in columns) + " |", "|---" * len(columns) + "|"]
    lines += ["| " + " | ".join(cell(row.get(column)) for column in columns) + " |" for row in rows]
    return "\n".join(lines)


def cell(value: Any) -> str:
    if value is None:
        return ""
    return f"{value:.4g}" if isinstance(value, float) else str(value)


def write_rows(document: Document) -> str:
    """A section that is the table of its file's ``rows``."""
    return table(document["rows"])


def write_convergence(document: Document) -> str:
    """The bf16 runs of :mod:`convergence` against the float32 one."""
    return (
        "![Loss with bf16 weights, with and without stochastic rounding](images/convergence.png)\n\n"
        "The miniature, all weights, bf16, upstream's rate: final loss as a multiple of float32's, upstream's AdamW "
        f"{document['upstream_final_loss_over_fp32']:.3f}, the layer's {document['ours_final_loss_over_fp32']:.4f}. "
        f"Plain AdamW in bf16 makes {document['upstream_share_of_fp32_decrease']:.0%} of float32's progress."
    )


SECTIONS = (
    Section(
        "Memory and FLOPs", ("comparison", "zero", "memory-local"), "python benchmarks/comparison.py", write_memory
    ),
    Section("Time on a CPU", ("time-cpu",), "python benchmarks/time_cpu.py", time_section),
    Section(
        "Optimizers side by side, CPU", ("optimizers-cpu",), "python benchmarks/optimizers.py --device cpu", write_rows
    ),
    Section("Time and true peak on CUDA", ("gpu",), "bash benchmarks/gpu.sh", write_cuda, not_measured),
    Section(
        "Learning: bf16 weights and rounding", ("convergence",), "python benchmarks/convergence.py", write_convergence
    ),
    Section(
        "Learning: full, LoRA and QLoRA through the trainer",
        ("learning",),
        "python benchmarks/learning.py",
        learning_section,
    ),
    Section("Fidelity", ("fidelity",), "python benchmarks/fidelity.py", fidelity_section),
    Section("Long runs", ("resume",), "python benchmarks/resume.py", resume_section),
)


def text(folder: Path = RESULTS) -> str:
    """Returns the page."""
    return "\n".join([INTRODUCTION, *(section.text(folder) for section in SECTIONS)])


if __name__ == "__main__":
    PAGE.write_text(text(), encoding="utf-8")
