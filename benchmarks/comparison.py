"""Every way to train each model, side by side and by length: upstream, a LoRA script, and the layer's whole ladder.

    MOSS_TTS_REPO=/path/to/MOSS-TTS python benchmarks/comparison.py [--models local-1.7b …] [--positions 300 …]

Needs no GPU and no weights; about 15 minutes of one CPU core, less where the planner's cache has some of it. Upstream
and the LoRA script (benchmarks/peer_lora.py) are full simulations: all layers, the whole optimizer step. The layer's
rungs are the planner's composed figures, within 0.013 % of full simulations (tests/test_planner_upstream.py). What
stands in the results file already is replaced row by row.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import os
import time
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from machine import SEED, describe_run
from memory import SUPERVISED_SHARE
from peer_lora import NAME as LORA_SCRIPT
from peer_lora import adapt_simulated, checkpoint_without_hooks

from moss_tts_patches.adapters.shapes import adapter_shapes
from moss_tts_patches.memory.full_ladder import Wanted, make_subject
from moss_tts_patches.memory.ladder import list_rungs
from moss_tts_patches.memory.plan_cache import PlanCache, user_cache_folder
from moss_tts_patches.memory.rungs import MicroBatch, UpstreamRung
from moss_tts_patches.memory.simulate import simulate_upstream
from moss_tts_patches.memory.traces import Subject, Tracer
from moss_tts_patches.units import GIB

ROOT = Path(__file__).resolve().parents[1]
OUTPUT = ROOT / "benchmarks/results/comparison.json"
PACKAGES = ("torch", "transformers", "accelerate", "peft")

MODELS = {
    "local-1.7b": ("moss_tts_local", "1.7b"),
    "delay-8b": ("moss_tts_delay", "8b"),
    "v1.5-4b": ("moss_tts_local_v1.5", "4b"),
    "realtime-1.7b": ("moss_tts_realtime", "1.7b"),
}
POSITIONS = (300, 600, 1500, 3000)


@dataclass(frozen=True)
class Row:
    """One way to train one model at one length; bytes and FLOPs of a micro-batch and the optimizer step.

    Attributes:
        simulation: ``full`` or ``composed``.
        activation_bytes: the most that forward and backward have beside weights, gradients and states; not for composed
            figures, which know what stands at the peak of the step only.
    """

    model: str
    positions: int
    supervised: int
    name: str
    simulation: str
    peak_bytes: float
    host_bytes: float
    matmul_flops: float
    attention_flops: float
    activation_bytes: float | None

    @property
    def key(self) -> tuple[str, int, str]:
        return self.model, self.positions, self.name

    @property
    def flops(self) -> float:
        return self.matmul_flops + self.attention_flops


def upstream_rows(subject: Subject, model: str) -> Iterator[Row]:
    """Simulates what runs upstream's own forward, in full."""
    batch, options = subject.batch, dict(subject.upstream)
    arguments = (subject.family, subject.model_class, subject.config, batch)
    script = checkpoint_without_hooks(options.get("enable_checkpointing"))
    for name, more in (
        (UpstreamRung(False).name, {"checkpointing": False}),
        (UpstreamRung(True).name, {"checkpointing": True}),
        (LORA_SCRIPT, {"checkpointing": True, "shape_model": adapt_simulated, "enable_checkpointing": script}),
    ):
        figures = simulate_upstream(*arguments, **{**options, **more})
        moments = [phase.peak for part, phase in figures.phases.items() if part != "step"]
        yield Row(
            model,
            batch.positions,
            batch.supervised,
            name,
            "full",
            figures.peak_bytes,
            figures.host_bytes,
            figures.matmul_flops,
            figures.attention_flops,
            max(moment.activations + moment.largest_temporary for moment in moments),
        )


def our_rows(subject: Subject, model: str, cache: PlanCache) -> Iterator[Row]:
    """Composes the figures of every rung of the ladder."""
    batch = subject.batch
    tracer = Tracer(dataclasses.replace(subject, shapes=adapter_shapes()), cache)
    for rung in list_rungs({}, has_depth=tracer.has_depth()):
        figures = tracer.figures(rung)
        yield Row(
            model,
            batch.positions,
            batch.supervised,
            rung.name,
            "composed",
            round(figures.peak_bytes),
            round(figures.host_total()),
            round(figures.matmul_flops),
            round(figures.attention_flops),
            None,
        )


def measure(repository: Path, models: list[str], lengths: list[int]) -> Iterator[list[Row]]:
    """Yields the rows of one model at one length after the other."""
    cache = PlanCache(user_cache_folder(os.environ, Path.home()))
    for positions in lengths:
        for model in models:
            began = time.process_time()
            batch = MicroBatch(1, positions, round(positions * SUPERVISED_SHARE))
            subject = make_subject(Wanted(*MODELS[model], None, repository, batch, {}))
            rows = [*upstream_rows(subject, model), *our_rows(subject, model, cache)]
            least = min(rows, key=lambda row: row.peak_bytes)
            print(
                f"{model:14} positions={positions:5} rows={len(rows)} least={least.name} "
                f"{least.peak_bytes / GIB:.2f} GiB ({time.process_time() - began:.0f} s of CPU)",
                flush=True,
            )
            yield rows


def main() -> None:
    """Simulates, prints and writes after every model and length."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", nargs="+", choices=MODELS, default=list(MODELS))
    parser.add_argument("--positions", type=int, nargs="+", default=list(POSITIONS))
    parser.add_argument("--json", type=Path, default=OUTPUT)
    arguments = parser.parse_args()
    repository = Path(os.environ["MOSS_TTS_REPO"])
    torch.manual_seed(SEED)
    known: dict[tuple[str, int, str], Row] = {}
    if arguments.json.exists():
        known = {row.key: row for row in read_rows(json.loads(arguments.json.read_text(encoding="utf-8")))}
    head = describe_run(PACKAGES, torch.device("cpu"), repository)
    for rows in measure(repository, arguments.models, arguments.positions):
        known.update({row.key: row for row in rows})
        ordered = sorted(known.values(), key=lambda row: (list(MODELS).index(row.model), row.positions))
        document: dict[str, Any] = {**head, "rows": [dataclasses.asdict(row) for row in ordered]}
        arguments.json.write_text(json.dumps(document, indent=1) + "\n", encoding="utf-8")


def read_rows(document: dict[str, Any]) -> list[Row]:
    """Returns the rows of a results file."""
    return [Row(**entry) for entry in document["rows"]]


def lengths_of(rows: Iterable[Row]) -> list[int]:
    """The lengths at which every model was simulated, the shortest first."""
    found = {(row.model, row.positions) for row in rows}
    return sorted(count for count in {count for _, count in found} if all((model, count) in found for model in MODELS))


if __name__ == "__main__":
    main()
