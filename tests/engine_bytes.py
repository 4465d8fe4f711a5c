"""Bytes alive in each rank while an engine trains a small model, counted at every operation.

``engine_bytes.py ENGINE:PROCESSES:ACCUMULATION ...`` forks so many ranks for each case, since loading torch takes
longer than all the rest, and prints a JSON list of one object a rank: ``rest`` between steps, and the most in the
micro-batches (``backward``) and the ``step`` of the last window.
"""

from __future__ import annotations

import functools
import gc
import json
import os
import sys
import tempfile
import time
import traceback
import weakref
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

WIDTH, LAYERS, WORDS = 256, 6, 2000
BUCKET_ELEMENTS = 100_000  # ZeRO's own is 5e8, larger than this model


class Layer(nn.Module):
    """What FSDP is told to wrap."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, 4 * WIDTH, bias=False), nn.Linear(4 * WIDTH, WIDTH, bias=False)

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        return hidden + self.down(torch.relu(self.up(hidden)))


class Model(nn.Module):
    """Layers, and as much again beside them that no layer holds."""

    def __init__(self) -> None:
        super().__init__()
        self.words = nn.Embedding(WORDS, WIDTH)
        self.layers = nn.ModuleList(Layer() for _ in range(LAYERS))
        self.head = nn.Linear(WIDTH, WORDS, bias=False)

    def forward(self, words: torch.Tensor) -> torch.Tensor:
        hidden = self.words(words)
        for layer in self.layers:
            hidden = layer(hidden)
        return self.head(hidden).float().logsumexp(-1).mean()


class LiveBytes(TorchDispatchMode):
    """The sum of all storages at every operation: FSDP empties its own without letting go of them."""

    def __init__(self, tensors: Any) -> None:
        super().__init__()
        self._known: dict[int, weakref.ref] = {}
        self.peak = 0
        self.watches = False
        for tensor in tensors:
            self._add(tensor)

    def _add(self, tensor: torch.Tensor) -> None:
        if tensor.is_meta:
            return
        storage = getattr(tensor, "_local_tensor", tensor).untyped_storage()
        self._known[id(storage)] = weakref.ref(storage)

    def now(self) -> int:
        alive = {key: storage for key, reference in self._known.items() if (storage := reference()) is not None}
        self._known = {key: self._known[key] for key in alive}
        return sum(storage.nbytes() for storage in alive.values())

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        for value in tree_leaves(result):
            if isinstance(value, torch.Tensor):
                self._add(value)
        if self.watches and self.now() > self.peak:
            self.peak = max(self.peak, self.settled())
        return result

    def most(self) -> int:
        found, self.peak = self.peak, 0
        return found

    def settled(self, times: int = 5, seconds: float = 0.002) -> int:
        """Bytes once nothing is let go of any more: gloo's threads keep what they exchanged a moment too long."""
        found, same = self.now(), 0
        while same < times:
            time.sleep(seconds)
            before, found = found, self.now()
            same = same + 1 if found == before else 0
        return found


def torchs_own(model: nn.Module, wrap: Any, *, syncs_always: bool) -> Any:
    """A window as accelerate runs it: gradients meet at its last micro-batch, or at each."""
    wrapped = wrap(model)
    optimizer = torch.optim.AdamW(wrapped.parameters(), foreach=True)

    def micro_batch(words: torch.Tensor, last: bool) -> None:
        if last or syncs_always:
            wrapped(words).backward()
        else:
            with wrapped.no_sync():
                wrapped(words).backward()

    return micro_batch, optimizer.step, optimizer.zero_grad


def data_parallel(model: nn.Module, accumulation: int, *, views: bool) -> Any:
    wrap = functools.partial(nn.parallel.DistributedDataParallel, gradient_as_bucket_view=views)
    return torchs_own(model, wrap, syncs_always=False)


def fully_sharded(model: nn.Module, accumulation: int, *, always: bool) -> Any:
    """accelerate keeps the split weights in float32 and computes in bfloat16."""
    from torch.distributed.fsdp import FullyShardedDataParallel, MixedPrecision
    from torch.distributed.fsdp.wrap import transformer_auto_wrap_policy

    def wrap(whole: nn.Module) -> nn.Module:
        half = torch.bfloat16
        return FullyShardedDataParallel(
            whole.float(),
            auto_wrap_policy=functools.partial(transformer_auto_wrap_policy, transformer_layer_cls={Layer}),
            use_orig_params=True,
            mixed_precision=MixedPrecision(param_dtype=half, reduce_dtype=half),
            device_id=torch.device("cpu"),
        )

    return torchs_own(model, wrap, syncs_always=always)


def zero(model: nn.Module, accumulation: int, *, stage: int, offload: bool) -> Any:
    import deepspeed
    import deepspeed_packages

    deepspeed_packages.without_shared_memory()
    place = {"device": "cpu"}
    engine, *_ = deepspeed.initialize(
        model=model,
        optimizer=None if offload else torch.optim.AdamW(model.parameters(), foreach=True),
        model_parameters=model.parameters(),
        config={
            "train_micro_batch_size_per_gpu": 1,
            "gradient_accumulation_steps": accumulation,
            "bf16": {"enabled": True},
            "zero_allow_untested_optimizer": True,
            **({"optimizer": {"type": "AdamW", "params": {}}} if offload else {}),
            "zero_optimization": {
                "stage": stage,
                "reduce_bucket_size": BUCKET_ELEMENTS,
                "allgather_bucket_size": BUCKET_ELEMENTS,
                "stage3_param_persistence_threshold": 0,
                **({"offload_optimizer": place} if offload else {}),
                **({"offload_param": place} if offload and stage == 3 else {}),
            },
        },
    )

    def micro_batch(words: torch.Tensor, last: bool) -> None:
        engine.backward(engine(words))

    return micro_batch, engine.step, lambda: None


ENGINES = {
    "ddp": functools.partial(data_parallel, views=True),
    "ddp-copies": functools.partial(data_parallel, views=False),
    "fsdp": functools.partial(fully_sharded, always=True),
    "fsdp-no-sync": functools.partial(fully_sharded, always=False),
    "zero2": functools.partial(zero, stage=2, offload=False),
    "zero2-offload": functools.partial(zero, stage=2, offload=True),
    "zero3": functools.partial(zero, stage=3, offload=False),
    "zero3-offload": functools.partial(zero, stage=3, offload=True),
}


def measure(engine: str, accumulation: int) -> list[Any]:
    """What every rank counts, in the first one; the process group is there."""
    torch.manual_seed(0)
    model = Model().bfloat16()
    micro_batch, step, zero_grad = ENGINES[engine](model, accumulation)
    gc.collect()
    # Not asking an object for more than its type: some have properties that build things.
    live = LiveBytes([found for found in gc.get_objects() if issubclass(type(found), torch.Tensor)])
    words = torch.arange(2)[None]
    result: dict[str, int] = {}
    with live:
        for live.watches in (False, True):  # the first window makes the states
            for index in range(accumulation):
                micro_batch(words, index == accumulation - 1)
                if engine.startswith("zero") and index < accumulation - 1:
                    step()  # DeepSpeed counts the micro-batches itself
            result["backward"] = live.most()
            step()
            result["step"] = live.most()
            zero_grad()
            gc.collect()
            result["rest"] = live.now()
    every: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(every, result)
    return every


def run_rank(case: str, rank: int, meeting_point: Path) -> None:
    """A forked rank; the first one prints."""
    engine, processes, accumulation = case.split(":")
    os.environ |= {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": processes}
    store = dist.FileStore(str(meeting_point), int(processes))
    dist.init_process_group("gloo", store=store, rank=rank, world_size=int(processes))
    every = measure(engine, int(accumulation))
    if rank == 0:
        print(f"BYTES {case} {json.dumps(every)}", flush=True)
    dist.barrier()  # the store goes with the first rank


def run_case(case: str, folder: Path) -> bool:
    """Forks the ranks of a case; whether all went well."""
    children = []
    for rank in range(int(case.split(":")[1])):
        child = os.fork()
        if child == 0:
            try:
                run_rank(case, rank, folder / case)
            except BaseException:
                traceback.print_exc()
                os._exit(1)
            os._exit(0)
        children.append(child)
    ended = [os.waitpid(child, 0)[1] for child in children]
    return not any(ended)


def main(cases: list[str]) -> int:
    torch.set_num_threads(1)
    if any(case.startswith("zero") for case in cases):
        import deepspeed  # noqa: F401  (once, for all)
    with tempfile.TemporaryDirectory() as folder:
        return 0 if all(run_case(case, Path(folder)) for case in cases) else 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
