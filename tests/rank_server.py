"""Run as a script: as ``mini_server.py``, but forks a trainer for each rank of a job and looks after them.

A job is what torchrun would start: ``WORLD_SIZE`` processes that meet over gloo. When one fails, the others are ended.
Each prints a digest of its weights at the end, which is how tests know that ranks hold the same ones.
"""

from __future__ import annotations

import atexit
import gc
import hashlib
import json
import os
import signal
import socket
import sys
import time
from typing import Any

import mini_server
import torch
from accelerate.state import DistributedType, PartialState
from torch.nn.parallel import DistributedDataParallel
from transformers import modeling_utils

SECONDS_TO_END = 5.0  # for a rank whose job has failed
wrapped: list[DistributedDataParallel] = []


def remember_wrapped_models() -> None:
    original = DistributedDataParallel.__init__

    def __init__(self: Any, *args: Any, **options: Any) -> None:
        original(self, *args, **options)
        wrapped.append(self)

    DistributedDataParallel.__init__ = __init__  # type: ignore[method-assign]


def say_who_writes(rank: int) -> None:
    """Each file of weights that transformers writes is a line of the rank's output."""
    original = modeling_utils.safe_save_file

    def save_file(tensors: Any, filename: str, *args: Any, **options: Any) -> Any:
        print(f"rank={rank} writes={os.path.basename(filename)}", flush=True)
        return original(tensors, filename, *args, **options)

    modeling_utils.safe_save_file = save_file


def let_accelerate_see_ranks() -> None:
    """On CPUs accelerate takes a DeepSpeed job for one process, whatever its size; on GPUs it asks the backend."""
    PartialState._prepare_backend = lambda *_: ("gloo", DistributedType.MULTI_CPU)  # type: ignore[method-assign]


def digest(model: torch.nn.Module) -> str:
    found = hashlib.sha256()
    for name, parameter in model.named_parameters():
        found.update(name.encode() + parameter.detach().contiguous().view(torch.uint8).numpy().tobytes())
    return found.hexdigest()[:16]


def train_rank(request: dict[str, Any], rank: int, port: int) -> None:
    variables = {
        "RANK": rank,
        "LOCAL_RANK": rank,
        "WORLD_SIZE": request["processes"],
        "LOCAL_WORLD_SIZE": request["processes"],
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": port,
    }
    environment = {**request["environment"], **{name: str(value) for name, value in variables.items()}}
    if request["environment"].get("ACCELERATE_USE_DEEPSPEED") == "true":
        let_accelerate_see_ranks()
    else:
        environment["ACCELERATE_USE_CPU"] = "true"
    remember_wrapped_models()
    say_who_writes(rank)
    mini_server.train({**request, "environment": environment, "log": f"{request['log']}.rank{rank}"})
    for model in wrapped:
        print(f"rank={rank} weights={digest(model.module)}", flush=True)
    if torch.distributed.is_initialized():
        torch.distributed.destroy_process_group()


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def run_job(request: dict[str, Any]) -> list[int] | None:
    """Returns the status of every rank, or None in a rank that has come to its end."""
    port = free_port()
    ranks: dict[int, int] = {}
    for rank in range(request["processes"]):
        child = os.fork()
        if child == 0:
            train_rank(request, rank, port)
            return None
        ranks[child] = rank
    statuses = [0] * request["processes"]
    failed_at = None
    while ranks:
        pid, status = os.waitpid(-1, os.WNOHANG)
        if pid in ranks:
            statuses[ranks.pop(pid)] = os.waitstatus_to_exitcode(status)
            if status and failed_at is None:
                failed_at = time.monotonic()
        elif failed_at is not None and time.monotonic() - failed_at > SECONDS_TO_END:
            for other in ranks:
                os.kill(other, signal.SIGKILL)
            failed_at = float("inf")
        else:
            time.sleep(0.02)
    return statuses


def main() -> None:
    answers = os.fdopen(os.dup(1), "w")
    atexit.register(mini_server.fall_silent)
    gc.freeze()
    for line in sys.stdin:
        statuses = run_job(json.loads(line))
        if statuses is None:
            return
        print(json.dumps(statuses), file=answers, flush=True)


if __name__ == "__main__":
    main()
