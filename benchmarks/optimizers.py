#!/usr/bin/env python3
"""Runs our optimizer and its peers side by side on the same gradients, in one process, step by step in turn.

    python benchmarks/optimizers.py [--device cpu|cuda] [--steps 100] [--shape 512 512] [--copies 1] [--json FILE]

The weights are matrices of N(0, 0.02) and a vector of ones with each, the gradients N(0, 1e-3), the learning rate 1e-5:
upstream's, as are betas and weight decay. Every optimizer gets the same bfloat16 gradients. A CPU works with one
thread, which other programs disturb least. Needs the extra `dev`.

- bytes per parameter: storages alive after the first step that were not before, counted, not computed; "host" is what
  the layer's stores announce as host memory, which on a CPU is told apart from the device by that alone;
- step / torch: median over the steps, as a multiple of that of torch's fused AdamW on bfloat16 weights. A store's
  transfer of gradients to the host is not in it (in training it overlaps the backward), bringing them back is;
- first step / torch: the same for the very first step, compilation included (caches on disk are empty). What a process
  or a kernel needs once falls on the first row that uses it;
- projection: how much of the float32 update arrived, u . r / r . r; 1 is all of it;
- moved: share of the weights that differ from where they started.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import logging
import os
import statistics
import tempfile
import time
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from live_bytes import LiveBytes
from machine import describe_run
from rich.console import Console
from rich.table import Table
from torch import nn

from moss_tts_patches.optim import build_optimizer, build_store, kernel
from moss_tts_patches.optim.adamw_update import AdamWScalars
from moss_tts_patches.optim.blockwise import CodeTables, block_count
from moss_tts_patches.optim.gradients import GradientStore
from moss_tts_patches.optim.stochastic_rounding import RoundingNoise

RESULTS = Path(__file__).resolve().parent / "results"
PACKAGES = ("torch", "triton", "bitsandbytes", "torchao", "moss_tts_patches")
# Upstream's defaults: moss_tts_local/finetuning/sft.py, parse_args.
OPTIONS: dict[str, Any] = {"lr": 1e-5, "betas": (0.9, 0.95), "eps": 1e-8, "weight_decay": 0.1}
WEIGHT_DEVIATION, GRADIENT_DEVIATION = 0.02, 1e-3
REFERENCE, BASE = "torch AdamW fp32, fused", "torch AdamW bf16, fused"

Named = list[tuple[str, nn.Parameter]]


def torch_adamw(named: Named, **options: Any) -> torch.optim.Optimizer:
    return torch.optim.AdamW([parameter for _, parameter in named], **OPTIONS, **options)


def bitsandbytes_adamw8bit(named: Named) -> torch.optim.Optimizer:
    import bitsandbytes

    return bitsandbytes.optim.AdamW8bit([parameter for _, parameter in named], **OPTIONS)


def torchao_adamw8bit(named: Named) -> torch.optim.Optimizer:
    from torchao.optim import AdamW8bit

    return AdamW8bit([parameter for _, parameter in named], **OPTIONS, bf16_stochastic_round=True)


@dataclass
class Contender:
    """One optimizer with weights of its own.

    Attributes:
        build: makes the optimizer of a peer; None for ours.
        states, gradients: placements, for ours.
        problem: why it could not run.
    """

    name: str
    build: Callable[[Named], torch.optim.Optimizer] | None = None
    dtype: torch.dtype = torch.bfloat16
    states: str = "device"
    gradients: str = "device"
    named: Named = field(default_factory=list)
    store: GradientStore | None = None
    seconds: list[float] = field(default_factory=list)
    figures: dict[str, Any] = field(default_factory=dict)
    problem: str | None = None

    def take(self, weights: list[torch.Tensor]) -> None:
        self.named = [(f"w{number}", nn.Parameter(w.to(self.dtype, copy=True))) for number, w in enumerate(weights)]

    def start(self, seed: int) -> None:
        if self.build is not None:
            self.optimizer = self.build(self.named)
            return
        self.store = build_store(self.gradients, torch.float32)
        self.store.attach(self.named)
        self.optimizer = build_optimizer("adamw8bit", self.named, self.store, self.states, seed=seed, **OPTIONS)

    def receive(self, gradients: list[torch.Tensor]) -> None:
        """Takes gradients ``[weights]`` bfloat16 as a backward would deliver them."""
        for (_, parameter), gradient in zip(self.named, gradients):
            own = gradient.to(parameter.dtype, copy=True)
            if self.store is None:
                parameter.grad = own
            else:
                self.store.add(parameter, own)
        if self.store is not None:
            self.store.end_micro_batch({})
            if self.gradients == "host":
                self.store.wait()  # type: ignore[attr-defined]

    def flat(self) -> torch.Tensor:
        """All weights, ``[n]`` float32."""
        return torch.cat([parameter.detach().float().view(-1) for _, parameter in self.named])


def contenders() -> list[Contender]:
    ours = [
        Contender(f"ours, states {states}, gradients {gradients}", states=states, gradients=gradients)
        for states in ("device", "host")
        for gradients in ("device", "host")
    ]
    return [
        Contender(REFERENCE, lambda named: torch_adamw(named, fused=True), torch.float32),
        Contender(BASE, lambda named: torch_adamw(named, fused=True)),
        Contender("torch AdamW bf16, as upstream calls it", torch_adamw),
        Contender("bitsandbytes AdamW8bit", bitsandbytes_adamw8bit),
        *ours,
        # Last: its compiler's worker processes are still busy for a while after its first step.
        Contender("torchao AdamW8bit, stochastic rounding", torchao_adamw8bit),
    ]


def timed(device: torch.device, action: Callable[[], object]) -> float:
    """Seconds that ``action`` takes on the device."""
    synchronize = torch.cuda.synchronize if device.type == "cuda" else lambda: None
    synchronize()
    began = time.perf_counter()
    action()
    synchronize()
    return time.perf_counter() - began


def first_step(contender: Contender, weights: list[torch.Tensor], gradients: list[torch.Tensor], seed: int) -> None:
    """Makes the optimizer, steps once and counts bytes; a peer that cannot says why, ours may not fail."""
    count = sum(weight.numel() for weight in weights)
    contender.take(weights)
    with LiveBytes() as live:
        bare = live.read()
        try:
            contender.start(seed)
            built = live.read()
            contender.receive(gradients)
            received = live.read()
            contender.seconds.append(timed(weights[0].device, contender.optimizer.step))
        except Exception as error:
            if contender.build is None:
                raise
            contender.problem = f"{type(error).__name__}: {(str(error).strip().splitlines() or [''])[0]}"
            return
        contender.optimizer.zero_grad()
        after = live.read()
    contender.figures = {
        "state_device_bytes_per_parameter": (after.device - bare.device) / count,
        "state_host_bytes_per_parameter": (after.host - received.host) / count,
        "gradient_device_bytes_per_parameter": (received.device - built.device) / count,
        "gradient_host_bytes_per_parameter": (received.host - bare.host) / count,
    }


def compare(device: torch.device, shape: list[int], copies: int, steps: int, seed: int) -> list[Contender]:
    """Steps every optimizer ``steps`` times, each step by all of them in turn."""
    generator = torch.Generator(device).manual_seed(seed)
    torch.manual_seed(seed)  # torchao rounds by the global generator
    shapes = [size for _ in range(copies) for size in (shape, shape[-1:])]

    def random(size: list[int], deviation: float) -> torch.Tensor:
        return torch.randn(size, generator=generator, device=device).mul_(deviation).bfloat16()

    weights = [random(size, WEIGHT_DEVIATION) if len(size) > 1 else _ones(size, device) for size in shapes]
    rivals = contenders()
    for step in range(steps):
        gradients = [random(size, GRADIENT_DEVIATION) for size in shapes]
        if step == 0:
            for rival in rivals:
                first_step(rival, weights, gradients, seed)
            continue
        running = [rival for rival in rivals if rival.problem is None]
        # Another one goes first each time: what the one before leaves in the caches favours nobody.
        for rival in running[step % len(running) :] + running[: step % len(running)]:
            rival.receive(gradients)
            rival.seconds.append(timed(device, rival.optimizer.step))
            rival.optimizer.zero_grad()
    judge(rivals, torch.cat([weight.float().view(-1) for weight in weights]))
    return rivals


def _ones(size: list[int], device: torch.device) -> torch.Tensor:
    """The weight of a norm."""
    return torch.ones(size, dtype=torch.bfloat16, device=device)


def judge(rivals: list[Contender], start: torch.Tensor) -> None:
    """Adds speed and quality of the update to the figures; ``start [n]`` float32."""
    by_name = {rival.name: rival for rival in rivals}
    exact = (by_name[REFERENCE].flat() - start).double()
    base = statistics.median(by_name[BASE].seconds[1:])
    for rival in rivals:
        if rival.problem is not None:
            continue
        update = (rival.flat() - start).double()
        rival.figures |= {
            "step_over_torch": statistics.median(rival.seconds[1:]) / base,
            "first_step_over_torch": rival.seconds[0] / base,
            "projection": (update @ exact / (exact @ exact)).item(),
            "moved_share": (update != 0).double().mean().item(),
        }


def kernel_beside_bandwidth(device: torch.device, elements: int, rounds: int = 50) -> dict[str, float]:
    """Times the Triton kernel alone on one bfloat16 parameter beside a plain copy of the same many bytes.

    The kernel reads and writes weight and states and reads the gradient; a copy reads and writes. Both can only wait
    for memory, so the copy's rate is the bound.
    """
    states = {
        "exp_avg_codes": torch.zeros(elements, dtype=torch.uint8, device=device),
        "exp_avg_absmax": torch.zeros(block_count(elements), device=device),
        "exp_avg_sq_codes": torch.zeros(elements, dtype=torch.uint8, device=device),
        "exp_avg_sq_absmax": torch.zeros(block_count(elements), device=device),
    }
    weight = torch.randn(elements, device=device).mul_(WEIGHT_DEVIATION).bfloat16()
    gradient = torch.randn(elements, device=device).mul_(GRADIENT_DEVIATION).bfloat16()
    tables, noise = CodeTables.build(device), RoundingNoise.of(0, 1, "w", device)
    scalars = AdamWScalars.of(OPTIONS["lr"], OPTIONS["betas"], OPTIONS["eps"], OPTIONS["weight_decay"], 1)
    moved = gradient.nbytes + 2 * sum(tensor.nbytes for tensor in (weight, *states.values()))
    source = torch.empty(moved // 2, dtype=torch.uint8, device=device)
    target = torch.empty_like(source)

    def step() -> None:
        kernel.update_parameter(weight, gradient, states, scalars, noise, tables)

    step()  # compiles
    pairs = [(timed(device, step), timed(device, lambda: target.copy_(source))) for _ in range(rounds)]
    ours, copy = (statistics.median(column) for column in zip(*pairs))
    return {
        "elements": elements,
        "bytes_per_element": moved / elements,
        "kernel_gb_per_second": moved / ours / 1e9,
        "copy_gb_per_second": moved / copy / 1e9,
        "share_of_bandwidth": copy / ours,
    }


def table_of(rivals: list[Contender], title: str) -> Table:
    table = Table(title=title, caption="B/p: bytes per parameter. Times are multiples of torch AdamW bf16, fused.")
    table.add_column("optimizer", overflow="fold")
    for heading in ("state B/p\ndevice", "\nhost", "gradient B/p\ndevice", "\nhost", "step", "first\nstep"):
        table.add_column(heading, justify="right")
    for heading in ("projection\non fp32", "weights\nmoved"):
        table.add_column(heading, justify="right")
    for rival in rivals:
        if rival.problem is not None:
            table.add_row(rival.name, f"does not run here: {rival.problem}")
            continue
        *sizes, step, first, projection, moved = rival.figures.values()
        cells = [f"{size:.2f}" for size in sizes]
        table.add_row(rival.name, *cells, f"{step:.1f}", f"{first:.0f}", f"{projection:.3f}", f"{moved:.1%}")
    return table


@contextlib.contextmanager
def cold_caches() -> Iterator[None]:
    """Gives compilers empty cache folders, so that a first step is everybody's first."""
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as folder:
        os.environ["TORCHINDUCTOR_CACHE_DIR"] = os.path.join(folder, "inductor")
        os.environ["TRITON_CACHE_DIR"] = os.path.join(folder, "triton")
        yield


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", choices=("auto", "cpu", "cuda"), default="auto")
    parser.add_argument("--steps", type=int, default=100)
    # 0.26 M parameters keep 100 steps of nine optimizers under two minutes on two cores, and the projection's noise at
    # 0.2 %; a GPU wants more to be busy.
    parser.add_argument(
        "--shape", type=int, nargs=2, metavar=("ROWS", "COLUMNS"), help="default 512 512; CUDA 8192 4096"
    )
    parser.add_argument("--copies", type=int, help="how many such matrices, default 1; CUDA 4")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--json", type=Path, help="default: benchmarks/results/optimizers-DEVICE.json")
    arguments = parser.parse_args()
    if arguments.device == "auto":
        arguments.device = "cuda" if torch.cuda.is_available() else "cpu"
    if arguments.steps < 2:
        parser.error("--steps: at least 2, the first step is timed apart")
    on_cuda = arguments.device == "cuda"
    arguments.shape = arguments.shape or ([8192, 4096] if on_cuda else [512, 512])
    arguments.copies = arguments.copies or (4 if on_cuda else 1)
    arguments.json = arguments.json or RESULTS / f"optimizers-{arguments.device}.json"
    return arguments


def main() -> None:
    arguments = parse_arguments()
    device = torch.device(arguments.device)
    torch.set_num_threads(1)
    logging.disable(logging.WARNING)  # torchao and the compiler talk about themselves
    warnings.filterwarnings("ignore", module="torch")
    with cold_caches():
        rivals = compare(device, arguments.shape, arguments.copies, arguments.steps, arguments.seed)
        bandwidth = kernel_beside_bandwidth(device, 2**27) if device.type == "cuda" else None
    console = Console(width=140)
    shapes = f"{arguments.copies} x {arguments.shape} and as many vectors"
    console.print(table_of(rivals, f"{arguments.steps} steps on {device.type}, bf16 weights {shapes}"))
    if bandwidth is not None:
        console.print(f"Triton kernel alone: {json.dumps(bandwidth)}")
    result = {
        **describe_run(PACKAGES, device),
        "command": f"python benchmarks/optimizers.py --device {device.type}",
        "seed": arguments.seed,
        "steps": arguments.steps,
        "shapes": shapes,
        "options": OPTIONS,
        "rows": [{"name": r.name, **(r.figures if r.problem is None else {"problem": r.problem})} for r in rivals],
        "kernel_beside_bandwidth": bandwidth,
    }
    arguments.json.parent.mkdir(parents=True, exist_ok=True)
    arguments.json.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")
    console.print(f"written: {arguments.json.name}")


if __name__ == "__main__":
    main()
