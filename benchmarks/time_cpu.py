#!/usr/bin/env python3
"""Times a micro-batch by upstream's code and by the layer's schedules, and an optimizer step by store, on one CPU core.

    MOSS_TTS_REPO=/path/to/MOSS-TTS python benchmarks/time_cpu.py [--rounds 7] [--steps 5] [--json FILE]

Takes about four minutes and writes benchmarks/results/time-cpu.json.

The model is upstream's own class for moss_tts_local with 107 M random weights (tests/make_tiny.py --scale small), the
record comes through upstream's processor, data set and collate function, everything is float32. In every round each way
computes one micro-batch, forward and backward, from no gradients, one way after the other, so that what disturbs the
machine disturbs all of them. Ratios are of medians over the rounds. CPU seconds are the process's own; others on the
machine lengthen the seconds by the clock only.

Every way's loss is compared with upstream's; the FLOPs of matrix products, counted in a round that is not timed, say
how much of a ratio is less work: on the full-size model they are 0.57 of upstream-checkpointing's for fused and 0.69
for staged (benchmarks/memory.py).

The optimizer works on the weights of the same model's depth transformer in bf16, upstream's dtype. The layer's 8-bit
AdamW is one Triton kernel on CUDA; on a CPU it is the torch reference, which spends its time on random bits.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from machine import SEED, describe_run
from torch import nn
from upstream_local import TESTS, find_upstream, import_trainer, load_batches, load_model, make_checkpoint

sys.path.insert(0, str(TESTS))
from small_models import Ours
from tolerances import TOLERANCES

from moss_tts_patches.memory.flops import FlopCounter
from moss_tts_patches.optim import build_optimizer, build_store
from moss_tts_patches.runtime.checkpointing import checkpoint_layers

RESULT = Path(__file__).resolve().parent / "results" / "time-cpu.json"
PACKAGES = ("torch", "transformers", "moss_tts_patches")
# With 160 frames the third record has 284 positions of which 163 are supervised, 0.57; the memory figures have 0.58.
RECORDS, FRAMES, CHOSEN = 3, 160, 2
CHUNK_FRAMES, LOGITS_AT_ONCE = 32, 2**24  # the layer's defaults
REFERENCE = "upstream, checkpointing"
# Upstream's defaults: moss_tts_local/finetuning/sft.py, parse_args.
OPTIONS: dict[str, Any] = {"lr": 1e-5, "betas": (0.9, 0.95), "eps": 1e-8, "weight_decay": 0.1}


@dataclass(frozen=True)
class Way:
    """A way to compute a micro-batch.

    Attributes:
        schedule: of the layer; None is upstream's own forward.
        checkpointing: whether layers are computed again in the backward, upstream's way or the layer's.
    """

    name: str
    schedule: str | None
    checkpointing: bool


WAYS = (
    Way("upstream", None, False),
    Way(REFERENCE, None, True),
    Way("fused", "fused", True),
    Way("fused, backbone kept", "fused", False),
    Way("staged", "staged", True),
    Way("autograd", "autograd", True),
)


@dataclass(frozen=True)
class Seconds:
    """What a piece of work took."""

    cpu: float
    wall: float


def timed(work: Callable[[], Any]) -> tuple[Any, Seconds]:
    """Returns what ``work`` returned, and its seconds: of this process's CPU, and by the clock."""
    wall, cpu = time.perf_counter(), time.process_time()
    result = work()
    return result, Seconds(time.process_time() - cpu, time.perf_counter() - wall)


# -- micro-batches ----------------------------------------------------------------------------------------------------


@contextmanager
def checkpointing(model: Any, way: Way) -> Iterator[None]:
    """Recomputation as the way wants it, and none afterwards."""
    if way.checkpointing and way.schedule is None:
        model.gradient_checkpointing_enable()
    elif way.checkpointing:
        checkpoint_layers(model.model.language_model)
    try:
        yield
    finally:
        model.disable_input_require_grads()  # upstream's switch puts a hook on the embeddings
        for module in model.modules():
            if hasattr(module, "gradient_checkpointing"):
                module.gradient_checkpointing = False


def upstream_micro_batch(model: Any, batch: dict[str, Any]) -> float:
    loss = model(**batch).loss
    loss.backward()
    return loss.item()


def run_way(
    way: Way, model: Any, batch: dict[str, Any], run: Callable[[Callable[[], float]], tuple[float, Any]]
) -> tuple[float, Any]:
    """Gives ``run`` the micro-batch by that way; no gradient is there before or after."""
    with checkpointing(model, way):
        if way.schedule is None:
            found = run(lambda: upstream_micro_batch(model, batch))
        else:
            ours = Ours(way.schedule, chunk_frames=CHUNK_FRAMES, logits_at_once=LOGITS_AT_ONCE)
            found = run(lambda: ours.train(model, [batch])[0])
    model.zero_grad(set_to_none=True)
    return found


def counted(work: Callable[[], float]) -> tuple[float, int]:
    with FlopCounter() as counter:
        return work(), counter.matmul_flops


def time_ways(model: Any, batch: dict[str, Any], rounds: int) -> list[dict[str, Any]]:
    """Returns a row a way: medians over the rounds, and FLOPs.

    Raises:
        SystemExit: a way's loss is not upstream's.
    """
    flops: dict[Way, int] = {}
    seconds: dict[Way, list[Seconds]] = {way: [] for way in WAYS}
    expected = None
    for number in range(rounds + 1):  # the first, which counts, also does what is done once
        for way in WAYS:
            loss, found = run_way(way, model, batch, timed if number else counted)
            expected = loss if expected is None else expected
            if abs(loss / expected - 1) > TOLERANCES["loss_fp32_relative"]:
                raise SystemExit(f"{way.name}: loss {loss}, upstream's is {expected}; these are not the same work.")
            if isinstance(found, Seconds):
                seconds[way].append(found)
            else:
                flops[way] = found
        print(f"round {number} of {rounds}", flush=True)
    return with_ratios([summary(way.name, seconds[way]) | {"matmul_gflop": flops[way] / 1e9} for way in WAYS])


def summary(name: str, seconds: list[Seconds]) -> dict[str, Any]:
    return {
        "name": name,
        "cpu_seconds": statistics.median(each.cpu for each in seconds),
        "wall_seconds": statistics.median(each.wall for each in seconds),
    }


def with_ratios(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Adds every figure's ratio to upstream-checkpointing's."""
    reference = next(row for row in rows if row["name"] == REFERENCE)
    ratios = {"cpu_ratio": "cpu_seconds", "wall_ratio": "wall_seconds", "flops_ratio": "matmul_gflop"}
    return [row | {ratio: row[figure] / reference[figure] for ratio, figure in ratios.items()} for row in rows]


# -- the optimizer step -----------------------------------------------------------------------------------------------

Named = list[tuple[str, nn.Parameter]]


class Step:
    """An optimizer with weights of its own, and their gradients where it wants them."""

    def __init__(self, weights: dict[str, torch.Tensor], kind: str, states: str = "", gradients: str = "") -> None:
        self.named: Named = [(name, nn.Parameter(weight.bfloat16())) for name, weight in weights.items()]
        self.store = build_store(gradients, torch.float32) if gradients else None
        self.optimizer: torch.optim.Optimizer
        if self.store is None:
            self.optimizer = torch.optim.AdamW([weight for _, weight in self.named], **OPTIONS)
            self.name = "torch AdamW (upstream's)"
        else:
            self.store.attach(self.named)
            self.optimizer = build_optimizer(kind, self.named, self.store, states, seed=SEED, **OPTIONS)
            label = "8-bit AdamW" if kind == "adamw8bit" else "AdamW, fp32 states"
            self.name = f"{label}; states {states}, gradients {gradients}"

    def time(self, gradients: list[torch.Tensor]) -> Seconds:
        for (_, weight), gradient in zip(self.named, gradients):
            if self.store is None:
                weight.grad = gradient.clone()
            else:
                self.store.add(weight, gradient.clone())
        _, seconds = timed(self.optimizer.step)
        self.optimizer.zero_grad()
        return seconds


def time_steps(weights: dict[str, torch.Tensor], steps: int) -> list[dict[str, Any]]:
    """Returns a row an optimizer: median seconds of its steps, and as a multiple of torch's."""
    places = [(states, gradients) for states in ("device", "host") for gradients in ("device", "host")]
    contenders = [Step(weights, "torch")]
    contenders += [Step(weights, kind, *place) for kind in ("adamw", "adamw8bit") for place in places]
    seconds: dict[str, list[Seconds]] = {contender.name: [] for contender in contenders}
    generator = torch.Generator().manual_seed(SEED)
    for number in range(steps + 1):
        gradients = [torch.randn(w.shape, generator=generator).mul_(1e-3).bfloat16() for w in weights.values()]
        for contender in contenders:
            found = contender.time(gradients)
            if number:  # the first makes the states
                seconds[contender.name].append(found)
    count = sum(weight.numel() for weight in weights.values())
    rows = [summary(name, found) for name, found in seconds.items()]
    return [
        row
        | {
            "cpu_nanoseconds_per_weight": row["cpu_seconds"] / count * 1e9,
            "cpu_ratio": row["cpu_seconds"] / rows[0]["cpu_seconds"],
        }
        for row in rows
    ]


def measure(upstream: Path, folder: Path, rounds: int, steps: int, scale: str = "small") -> dict[str, Any]:
    """Makes the model and the record and times everything; returns the results file's figures."""
    options = ["--scale", scale, "--records", str(RECORDS), "--frames", str(FRAMES), str(FRAMES), "--seed", str(SEED)]
    make_checkpoint(upstream, folder, *options)
    trainer = import_trainer(upstream)
    model = load_model(trainer, folder)
    batch = load_batches(trainer, folder, model.config.n_vq)[CHOSEN]
    weights = {name: weight.detach().clone() for name, weight in model.local_transformer.named_parameters()}
    supervised = (batch["labels"] != -100).any(dim=-1).sum().item()
    return {
        "scale": scale,
        "parameters": sum(weight.numel() for weight in model.parameters()),
        "positions": batch["input_ids"].shape[1],
        "supervised": supervised,
        "rounds": rounds,
        "micro_batch": time_ways(model, batch, rounds),
        "step_parameters": sum(weight.numel() for weight in weights.values()),
        "steps": steps,
        "step": time_steps(weights, steps),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=7, help="micro-batches that each way is timed on")
    parser.add_argument("--steps", type=int, default=5, help="optimizer steps that are timed")
    parser.add_argument("--json", type=Path, default=RESULT)
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    upstream = find_upstream()
    with tempfile.TemporaryDirectory() as folder:
        figures = measure(upstream, Path(folder) / "model", arguments.rounds, arguments.steps)
    head = describe_run(PACKAGES, torch.device("cpu"), upstream)
    result = {**head, "command": "python benchmarks/time_cpu.py", **figures}
    for row in [*figures["micro_batch"], *figures["step"]]:
        print(f"{row['name']:48} cpu={row['cpu_seconds']:.3f} s ratio={row['cpu_ratio']:.3f}")
    arguments.json.parent.mkdir(parents=True, exist_ok=True)
    arguments.json.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
