"""What the simulation says, against a real GPU: peak memory, time and host traffic of full-size training steps.

    MOSS_TTS_REPO=/path/to/MOSS-TTS python benchmarks/gpu.py --json benchmarks/results/gpu.json

Needs a CUDA card and nothing else: weights are random, nothing is downloaded. For each memory cap it runs upstream's
own step (out of memory is a result) and the layer's rungs, two micro-batches an optimizer step, and compares the
allocator's peak with the simulated one. What the card cannot hold is skipped and said. ``--device cpu --tiny`` runs the
same code on a tiny model and counts live storages, which a test does.
"""

from __future__ import annotations

import argparse
import contextlib
import copy
import gc
import json
import os
import statistics
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import torch
from machine import describe_run

from moss_tts_patches.families import FAMILIES
from moss_tts_patches.families.family import Family, TrainingContext, supervised_positions
from moss_tts_patches.loss.engine import EngineOptions, LossEngine
from moss_tts_patches.loss.problem import IGNORE_INDEX
from moss_tts_patches.memory.rungs import MicroBatch, Rung
from moss_tts_patches.memory.simulate import simulate_rung
from moss_tts_patches.memory.tracker import StorageTracker
from moss_tts_patches.memory.upstream_source import SOURCES, load_classes
from moss_tts_patches.memory.weight_parking import WeightParking
from moss_tts_patches.optim import build_optimizer, build_store
from moss_tts_patches.runtime.checkpointing import checkpoint_layers, layer_parameters
from moss_tts_patches.runtime.parked import park_embedding

GIB = 2**30
CAPS_GIB = (8, 12, 16, 24)
RUNGS = (
    Rung("fused"),
    Rung("staged", gradients="host"),
    Rung("staged", gradients="host", states="host"),
    Rung("staged", gradients="host", states="host", weights="host"),
)
MICRO_BATCHES_A_STEP, STEPS = 2, 3  # the first step compiles kernels and makes the states; the others are timed
PACKAGES = ("torch", "triton", "transformers", "accelerate")


@dataclass
class Measured:
    """One real run; bytes and seconds."""

    name: str
    cap_gib: float | None
    fits: bool
    peak_allocated: int = 0
    peak_reserved: int = 0
    simulated: int = 0
    seconds_micro_batch: float = 0.0
    seconds_optimizer_step: float = 0.0


class Meter:
    """Reads the peak of a device: the allocator's on CUDA, live storages on the CPU."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self._tracker: StorageTracker | None = None

    @contextlib.contextmanager
    def running(self) -> Iterator[None]:
        if self.device.type == "cuda":
            yield
            return
        with StorageTracker() as self._tracker:
            yield

    def watch(self, model: torch.nn.Module) -> None:
        if self._tracker is not None:
            self._tracker.watch(model.parameters())

    def reset(self) -> None:
        if self._tracker is not None:
            self._tracker.reset_peak()
        else:
            torch.cuda.synchronize()
            torch.cuda.reset_peak_memory_stats()

    def peaks(self) -> tuple[int, int]:
        """Returns ``(allocated, reserved)``."""
        if self._tracker is not None:
            return self._tracker.peak_bytes, self._tracker.peak_bytes
        return torch.cuda.max_memory_allocated(), torch.cuda.max_memory_reserved()

    def now(self) -> float:
        if self.device.type == "cuda":
            torch.cuda.synchronize()
        return time.perf_counter()


def real_batch(family: Family, config: Any, batch: MicroBatch, device: torch.device) -> dict[str, Any]:
    """A micro-batch of the wanted shape, the last ``supervised`` positions with labels, without padding."""
    inputs = family.simulated_batch(config, batch.records, batch.positions)
    labels = inputs["labels"]
    labels[:, : batch.positions - batch.supervised // batch.records] = IGNORE_INDEX
    return {name: value.to(device) if isinstance(value, torch.Tensor) else value for name, value in inputs.items()}


def build_model(model_class: Any, config: Any, device: torch.device) -> Any:
    """Random weights in bfloat16, made on the device."""
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.bfloat16)
    try:
        with torch.device(device):
            return model_class(copy.deepcopy(config)).train()
    finally:
        torch.set_default_dtype(before)


def run_layer(family: Family, model_class: Any, config: Any, batch: MicroBatch, rung: Rung, meter: Meter) -> Measured:
    """Trains some steps through the layer's own parts and measures the last ones."""
    device = meter.device
    with meter.running():
        model = build_model(model_class, config, device)
        meter.watch(model)
        for parent, attribute in family.unread_embeddings(model):
            park_embedding(parent, attribute)
        checkpoint_layers(family.backbone(model))
        store = build_store(rung.gradients, getattr(torch, rung.host_gradient_dtype))
        store.attach(model.named_parameters())
        optimizer = build_optimizer(
            rung.optimizer, list(model.named_parameters()), store, rung.states, seed=0, lr=1e-5, betas=(0.9, 0.95)
        )
        optimizer.reserve_states()
        parking = WeightParking(layer_parameters(family.backbone(model))) if rung.weights == "host" else None
        engine = LossEngine(
            EngineOptions(rung.schedule, rung.chunk_frames),
            store,
            parking.away if parking is not None else contextlib.nullcontext,
        )
        scale = 1 / MICRO_BATCHES_A_STEP
        context = TrainingContext(
            engine=engine,
            direct=rung.schedule != "autograd",
            loss_scale=lambda: scale,
            finite_empty_channels=True,
            say_once=lambda line: None,
            summarise_labels=lambda labels: supervised_positions(labels, IGNORE_INDEX),
        )
        inputs = real_batch(family, config, batch, device)
        micro_batches, steps = [], []
        for number in range(STEPS):
            if number == 1:
                meter.reset()
            for _ in range(MICRO_BATCHES_A_STEP):
                began = meter.now()
                with torch.autocast(device.type, torch.bfloat16):
                    loss = family.training_output(model, inputs, context).loss
                (loss.float() * scale).backward()
                store.end_micro_batch(context.expected_contributions)
                micro_batches.append(meter.now() - began)
            began = meter.now()
            optimizer.step()
            if parking is not None:
                parking.weights_changed()
            optimizer.zero_grad()
            steps.append(meter.now() - began)
        allocated, reserved = meter.peaks()
    timed = micro_batches[MICRO_BATCHES_A_STEP:]
    return Measured(
        rung.name, None, True, allocated, reserved, 0, statistics.median(timed), statistics.median(steps[1:])
    )


def run_upstream(model_class: Any, config: Any, family: Family, batch: MicroBatch, meter: Meter) -> Measured:
    """Upstream's own step with its own checkpointing and torch's AdamW, as accelerate runs it."""
    device = meter.device
    model = build_model(model_class, config, device)
    for parent, attribute in family.unread_embeddings(model):
        getattr(parent, attribute).weight.requires_grad_(False)
    model.gradient_checkpointing_enable()
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-5)
    inputs = real_batch(family, config, batch, device)
    micro_batches, steps = [], []
    for number in range(STEPS):
        if number == 1:
            meter.reset()
        for _ in range(MICRO_BATCHES_A_STEP):
            began = meter.now()
            with torch.autocast(device.type, torch.bfloat16):
                loss = model(**inputs).loss
            (loss.float() / MICRO_BATCHES_A_STEP).backward()
            micro_batches.append(meter.now() - began)
        began = meter.now()
        optimizer.step()
        optimizer.zero_grad()
        steps.append(meter.now() - began)
    allocated, reserved = meter.peaks()
    timed = micro_batches[MICRO_BATCHES_A_STEP:]
    return Measured(
        "upstream-checkpointing",
        None,
        True,
        allocated,
        reserved,
        0,
        statistics.median(timed),
        statistics.median(steps[1:]),
    )


def under_cap(cap_gib: float | None, meter: Meter, run: Any) -> Measured | None:
    """Runs with so much GPU memory; None where it was not enough."""
    if meter.device.type == "cuda":
        total = torch.cuda.get_device_properties(meter.device).total_memory / GIB
        torch.cuda.set_per_process_memory_fraction(1.0 if cap_gib is None else min(1.0, cap_gib / total))
    try:
        return run()
    except torch.OutOfMemoryError:
        return None
    finally:
        gc.collect()
        if meter.device.type == "cuda":
            torch.cuda.empty_cache()


def main() -> None:
    """Measures, prints and writes."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--family", default="moss_tts_local", choices=sorted(SOURCES))
    parser.add_argument("--size")
    parser.add_argument("--positions", type=int, default=600)
    parser.add_argument("--supervised", type=int, default=350)
    parser.add_argument("--caps", type=float, nargs="*", default=list(CAPS_GIB), help="GiB")
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--tiny", action="store_true", help="a shrunken model, for trying this script")
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    device = torch.device(arguments.device)
    if device.type == "cuda" and not torch.cuda.is_available():
        raise SystemExit("benchmarks/gpu.py: no CUDA card here. Expected one, or --device cpu --tiny.")
    rows = measure(arguments, device)
    if arguments.json:
        document = {**describe_run(PACKAGES, device), "rows": [asdict(row) for row in rows]}
        arguments.json.write_text(json.dumps(document, indent=1) + "\n", encoding="utf-8")


def measure(arguments: argparse.Namespace, device: torch.device) -> list[Measured]:
    """Returns a row for each run that fits under its cap, and one without figures for each that does not."""
    family = next(family() for family in FAMILIES if family.name == arguments.family)
    source = SOURCES[arguments.family]
    model_class, config_class = load_classes(Path(os.environ["MOSS_TTS_REPO"]) / source.folder, source)
    config = family.full_size_config(config_class, arguments.size or source.sizes[0])
    if arguments.tiny:
        config = family.shrunken_config(config)
    batch, meter, rows = MicroBatch(1, arguments.positions, arguments.supervised), Meter(device), []
    simulated = {rung: simulate_rung(family, model_class, config, batch, rung).peak_bytes for rung in RUNGS}
    for cap in [*arguments.caps, None] if device.type == "cuda" else [None]:
        runs: dict[str, Any] = {
            rung.name: (lambda rung=rung: run_layer(family, model_class, config, batch, rung, meter)) for rung in RUNGS
        }
        if device.type == "cuda" and family.upstream_checkpoints and source.trainer is None:
            runs["upstream-checkpointing"] = lambda: run_upstream(model_class, config, family, batch, meter)
        for name, run in runs.items():
            found = under_cap(cap, meter, run)
            peak = next((simulated[rung] for rung in RUNGS if rung.name == name), 0)
            row = Measured(name, cap, False) if found is None else replace(found, cap_gib=cap)
            rows.append(replace(row, simulated=peak))
            print(describe(rows[-1]), flush=True)
    return rows


def describe(row: Measured) -> str:
    """One line of the table."""
    cap = "no cap" if row.cap_gib is None else f"{row.cap_gib:g} GiB"
    if not row.fits:
        return f"{cap:>8}  {row.name:44} out of memory"
    off = f"{row.peak_allocated / row.simulated - 1:+.1%} of simulated" if row.simulated else ""
    return (
        f"{cap:>8}  {row.name:44} allocated {row.peak_allocated / GIB:.2f} GiB, reserved "
        f"{row.peak_reserved / GIB:.2f} GiB {off}; micro-batch {row.seconds_micro_batch:.3f} s, optimizer step "
        f"{row.seconds_optimizer_step:.3f} s"
    )


if __name__ == "__main__":
    main()
