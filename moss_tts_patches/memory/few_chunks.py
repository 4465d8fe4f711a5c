"""The loss on as many chunks of frames as there are different ones, for simulated steps.

A micro-batch of 1750 supervised frames has 55 chunks, which take the same memory and the same FLOPs: the second one
makes room for the rounding error of the sums, from the third on nothing changes, the last one may be shorter.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager

import torch

from ..loss import direct_schedules
from ..loss.engine import EngineOptions, LossEngine
from ..loss.problem import FrameLoss, Stage
from ..optim.gradients import GradientStore
from .flops import FlopCounter

# The first without sums, the second in which their errors are made, one with everything there.
FIRST_CHUNKS = 3


class FewChunksEngine(LossEngine):
    """Leaves chunks out and counts their FLOPs.

    Args:
        options: as for the base.
        store: as for the base.
        weights_away: as for the base.
        counter: gets the FLOPs of what was left out.
    """

    def __init__(
        self,
        options: EngineOptions,
        store: GradientStore,
        weights_away: Callable[[], AbstractContextManager[None]],
        counter: FlopCounter,
    ) -> None:
        super().__init__(options, store, weights_away)
        self._counter = counter

    def loss(self, problem: FrameLoss, hidden: torch.Tensor, scale: float) -> tuple[torch.Tensor, torch.Tensor]:
        chunks = list(direct_schedules._chunks(hidden.shape[0], self.options.chunk_frames))
        left_out = len(chunks) - FIRST_CHUNKS - 1
        if problem.depth is None or left_out <= 0 or self.options.schedule == "autograd":
            return super().loss(problem, hidden, scale)
        seen: list[tuple[int, int]] = []

        def forward(values: torch.Tensor) -> torch.Tensor:
            seen.append((self._counter.matmul_flops, self._counter.attention_flops))
            return depth(values)

        depth = problem.depth
        observed = dataclasses.replace(problem, depth=Stage(forward, depth.modules))
        with _only([*chunks[:FIRST_CHUNKS], chunks[-1]]):
            result = super().loss(observed, hidden, scale)
        # One pass over the chunks in fused, two in staged; in each, from the second chunk's beginning to the third's.
        for start in range(0, len(seen), FIRST_CHUNKS + 1):
            before, after = seen[start + 1], seen[start + 2]
            self._counter.matmul_flops += left_out * (after[0] - before[0])
            self._counter.attention_flops += left_out * (after[1] - before[1])
        return result


@contextmanager
def _only(chunks: list[slice]) -> Iterator[None]:
    """Has the schedules go through ``chunks`` alone."""
    every = direct_schedules._chunks
    direct_schedules._chunks = lambda frames, chunk_frames: iter(chunks)
    try:
        yield
    finally:
        direct_schedules._chunks = every
