"""What the simulation says, against a real GPU: peak memory, time and host traffic of full-size training steps.

    MOSS_TTS_REPO=/path/to/MOSS-TTS bash benchmarks/gpu.sh

Weights are random, nothing is downloaded. Under each memory cap it runs upstream's own step (out of memory is a result)
and the layer's rungs, two micro-batches an optimizer step, and compares the allocator's peak with the simulated one.
What the card or the host memory cannot hold is left out and said, and so is what the time (``--minutes``) does not
allow. ``--device cpu --tiny`` runs the same code on a tiny model and counts live storages, which a test does.
"""

from __future__ import annotations

import argparse
import gc
import json
import os
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, field
from pathlib import Path

import psutil  # comes with accelerate
import torch
from gpu_runs import Figures, Meter, memory_bandwidth, run_layer, run_upstream
from machine import describe_run

from moss_tts_patches.families import FAMILIES
from moss_tts_patches.memory.placement import available_host_bytes
from moss_tts_patches.memory.rungs import MicroBatch, Rung
from moss_tts_patches.memory.simulate import simulate_rung
from moss_tts_patches.memory.upstream_source import SOURCES, load_classes
from moss_tts_patches.units import GIB

CAPS_GIB = (16.0, 8.0, 12.0, 24.0)  # what matters most comes first, should time run out
RUNGS = (
    Rung("staged", gradients="host", states="host", weights="host"),
    Rung("fused"),
    Rung("staged", gradients="host"),
    Rung("staged", gradients="host", states="host"),
    Rung("fused", gradients="host", states="host"),
)
UPSTREAM = "upstream-checkpointing"
PACKAGES = ("torch", "triton", "transformers", "accelerate", "moss_tts_patches")
HOST_BESIDE_GIB = 3.0  # this process without its stores
SECONDS_A_RUN = 25.0  # what a run may still take when time is nearly up


@dataclass
class Row:
    """One run under one cap.

    Attributes:
        outcome: ``measured``, ``out of memory``, or why it was left out.
        simulated: peak bytes; 0 where nothing was simulated.
        of_bandwidth: what the optimizer step moves at least, as a share of what the GPU's memory can move in its time.
    """

    name: str
    cap_gib: float | None
    outcome: str
    simulated: int = 0
    of_bandwidth: float | None = None
    figures: Figures = field(default_factory=Figures)


@dataclass
class Job:
    """A run that can be tried under several caps."""

    name: str
    run: Callable[[], Figures]
    simulated: int = 0
    host_bytes: int = 0


def jobs_of(arguments: argparse.Namespace, meter: Meter) -> list[Job]:
    """Upstream's step, where it can checkpoint, and the layer's rungs with their simulated needs."""
    family = next(family() for family in FAMILIES if family.name == arguments.family)
    source = SOURCES[arguments.family]
    model_class, config_class = load_classes(Path(os.environ["MOSS_TTS_REPO"]) / source.folder, source)
    config = family.full_size_config(config_class, arguments.size or source.sizes[0])
    if arguments.tiny:
        config = family.shrunken_config(config)
    batch, jobs = MicroBatch(1, arguments.positions, arguments.supervised), []
    if family.upstream_checkpoints and source.trainer is None:
        jobs.append(Job(UPSTREAM, lambda: run_upstream(family, model_class, config, batch, meter)))
    for rung in RUNGS:
        figures = simulate_rung(family, model_class, config, batch, rung)
        run = lambda rung=rung: run_layer(family, model_class, config, batch, rung, meter)  # noqa: E731
        jobs.append(Job(rung.name, run, figures.peak_bytes, figures.host_bytes))
    return jobs


def why_not(job: Job, cap_gib: float | None, card_gib: float | None, seconds_left: float) -> str | None:
    """Why a run is not even tried."""
    if cap_gib is not None and card_gib is not None and cap_gib > card_gib:
        return f"left out: the card has {card_gib:.1f} GiB"
    wanted = job.host_bytes + HOST_BESIDE_GIB * GIB
    available = available_host_bytes() or psutil.virtual_memory().available  # a container's limit counts
    if card_gib is not None and wanted > available:
        return f"left out: {wanted / GIB:.1f} GiB of RAM are needed, {available / GIB:.1f} available"
    if seconds_left < SECONDS_A_RUN:
        return "left out: time was up"
    return None


def under_cap(cap_gib: float | None, card_gib: float | None, run: Callable[[], Figures]) -> Figures | None:
    """Runs with so much GPU memory; None where it was not enough."""
    if card_gib is not None:
        torch.cuda.set_per_process_memory_fraction(1.0 if cap_gib is None else cap_gib / card_gib)
    try:
        return run()
    except torch.OutOfMemoryError:
        return None
    finally:
        gc.collect()
        if card_gib is not None:
            torch.cuda.empty_cache()


def measure(arguments: argparse.Namespace, device: torch.device, bandwidth: float | None) -> Iterator[Row]:
    """Yields a row for each run under each cap, and one without a cap."""
    began, meter = time.monotonic(), Meter(device)
    card = torch.cuda.get_device_properties(device).total_memory / GIB if device.type == "cuda" else None
    jobs = jobs_of(arguments, meter)
    for cap in [*arguments.caps, None] if card is not None else [None]:
        for job in jobs:
            left = arguments.minutes * 60 - (time.monotonic() - began)
            row = Row(job.name, cap, why_not(job, cap, card, left) or "measured", job.simulated)
            if row.outcome == "measured":
                found = under_cap(cap, card, job.run)
                row.outcome = "out of memory" if found is None else row.outcome
                row.figures = found or row.figures
            if bandwidth and row.figures.optimizer_bytes:
                row.of_bandwidth = row.figures.optimizer_bytes / row.figures.optimizer_kernel_seconds / bandwidth
            yield row


def describe(row: Row) -> str:
    """One line of the table."""
    head = f"{'no cap' if row.cap_gib is None else f'{row.cap_gib:g} GiB':>8}  {row.name:44} "
    if row.outcome != "measured":
        return head + row.outcome
    figures = row.figures
    off = f" ({figures.peak_allocated / row.simulated - 1:+.1%} of simulated)" if row.simulated else ""
    share = f" at {row.of_bandwidth:.0%} of the memory's bandwidth" if row.of_bandwidth else ""
    times = f"micro-batch {figures.seconds_micro_batch:.3f} s, optimizer step {figures.seconds_optimizer_step:.3f} s"
    return (
        f"{head}allocated {figures.peak_allocated / GIB:.2f} GiB{off}, reserved {figures.peak_reserved / GIB:.2f} GiB; "
        f"{times}{share}; host traffic {figures.host_traffic_bytes / GIB:.2f} GiB a step"
    )


def main() -> None:
    """Measures, prints and writes."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--family", default="moss_tts_local", choices=sorted(SOURCES))
    parser.add_argument("--size")
    parser.add_argument("--positions", type=int, default=600)
    parser.add_argument("--supervised", type=int, default=350)
    parser.add_argument("--caps", type=float, nargs="*", default=list(CAPS_GIB), help="GiB")
    parser.add_argument("--minutes", type=float, default=60.0, help="after which no run is started")
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--tiny", action="store_true", help="a shrunken model, for trying this script")
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    device = torch.device(arguments.device)
    if device.type == "cuda":
        if not torch.cuda.is_available():
            raise SystemExit("benchmarks/gpu.py: no CUDA card here. Expected one, or --device cpu --tiny.")
        if torch.cuda.get_device_capability(device) < (8, 0):
            raise SystemExit(
                f"benchmarks/gpu.py: {torch.cuda.get_device_name(device)} has no bf16 arithmetic, in which upstream "
                "trains all weights. Expected compute capability 8.0 or more."
            )
    if not os.environ.get("MOSS_TTS_REPO"):
        raise SystemExit("benchmarks/gpu.py: MOSS_TTS_REPO is not set. Expected a checkout of OpenMOSS/MOSS-TTS.")
    bandwidth = memory_bandwidth(device)
    shape = {name: getattr(arguments, name) for name in ("family", "size", "positions", "supervised", "tiny")}
    document = {**describe_run(PACKAGES, device), **shape, "memory_bandwidth": bandwidth, "rows": []}
    for row in measure(arguments, device, bandwidth):
        print(describe(row), flush=True)
        document["rows"].append(asdict(row))
        if arguments.json:  # each time: an error of CUDA's ends the process
            arguments.json.write_text(json.dumps(document, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
