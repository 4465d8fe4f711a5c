"""The loss on as many chunks of frames as there are different ones, for simulated steps.

A micro-batch of 1750 supervised frames has 55 chunks, which take the same memory and the same FLOPs: the second one
makes room for the rounding error of the sums, from the third on nothing changes, the last one may be shorter.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from contextlib import AbstractContextManager

import torch

from ..loss.direct_schedules import frame_chunks
from ..loss.engine import EngineOptions, LossEngine
from ..loss.problem import FrameLoss, Stage
from ..optim.gradients import GradientStore
from .flops import FlopCounter

# The first without sums, the second in which their errors are made, one with everything there.
FIRST_CHUNKS = 3


def different_chunks(frames: int, chunk_frames: int) -> list[slice]:
    """The first :data:`FIRST_CHUNKS` chunks and the last one, or all where there are no more than these."""
    every = list(frame_chunks(frames, chunk_frames))
    return every if len(every) <= FIRST_CHUNKS + 1 else [*every[:FIRST_CHUNKS], every[-1]]


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
        super().__init__(dataclasses.replace(options, chunks=different_chunks), store, weights_away)
        self._counter = counter

    def loss(self, problem: FrameLoss, hidden: torch.Tensor, scale: float) -> tuple[torch.Tensor, torch.Tensor]:
        size = (hidden.shape[0], self.options.chunk_frames)
        left_out = len(list(frame_chunks(*size))) - len(different_chunks(*size))
        if problem.depth is None or left_out == 0 or self.options.schedule == "autograd":
            return super().loss(problem, hidden, scale)
        seen: list[tuple[int, int]] = []

        def forward(values: torch.Tensor) -> torch.Tensor:
            seen.append((self._counter.matmul_flops, self._counter.attention_flops))
            return depth(values)

        depth = problem.depth
        observed = dataclasses.replace(problem, depth=Stage(forward, depth.modules))
        result = super().loss(observed, hidden, scale)
        # One pass over the chunks in fused, two in staged; in each, from the second chunk's beginning to the third's.
        for start in range(0, len(seen), FIRST_CHUNKS + 1):
            before, after = seen[start + 1], seen[start + 2]
            self._counter.matmul_flops += left_out * (after[0] - before[0])
            self._counter.attention_flops += left_out * (after[1] - before[1])
        return result
