"""Times what several processes ask each other after every micro-batch: ``python benchmarks/rank_agreement.py``.

Prints microseconds a question on this machine, for 2 and 4 processes over gloo on the CPU.
"""

from __future__ import annotations

import socket
import time

import torch.distributed as dist
import torch.multiprocessing as mp

from moss_tts_patches.runtime.resume.ranks import Ranks

QUESTIONS = 5000


def ask(rank: int, count: int, port: int) -> None:
    dist.init_process_group("gloo", init_method=f"tcp://127.0.0.1:{port}", rank=rank, world_size=count)
    ranks = Ranks(rank, count)
    ranks.open_channel()
    for _ in range(100):
        ranks.largest([0, 0])
    began = time.perf_counter()
    for _ in range(QUESTIONS):
        ranks.largest([0, 0])
    if ranks.is_main:
        print(f"processes={count} microseconds={(time.perf_counter() - began) / QUESTIONS * 1e6:.0f}", flush=True)
    dist.destroy_process_group()


def main() -> None:
    for count in (2, 4):
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            port = probe.getsockname()[1]
        mp.start_processes(ask, (count, port), nprocs=count, start_method="fork")


if __name__ == "__main__":
    main()
