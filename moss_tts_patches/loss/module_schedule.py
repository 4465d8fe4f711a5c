"""``autograd`` through modules alone, for engines that lend a weight only while its own module runs.

ZeRO-3 gathers a weight before its module's forward and lets go of it afterwards; FSDP's wrapped layers do the same. A
function that takes weights as its inputs, as :mod:`.autograd_schedule` has them, would be given empty ones. Here every
piece calls modules, and torch recomputes it in the backward: the same memory, one depth forward more, and gradients
that the engine collects where it expects them. Chunk gradients are added up by autograd, in the weights' own dtype.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import torch
import torch.nn.functional as F
from torch.utils.checkpoint import checkpoint

from . import heads
from .autograd_schedule import differentiable_inputs
from .problem import IGNORE_INDEX, Channel, FrameLoss

if TYPE_CHECKING:
    from .engine import EngineOptions


def own_frames(frames: int) -> int:
    """Where a process need not keep step with others."""
    return frames


def recompute(function: Callable[..., Any], *inputs: Any, **options: Any) -> Any:
    """Calls ``function`` now and again in the backward, where autograd's graph stays one."""
    return checkpoint(function, *inputs, use_reentrant=False, **options)


def keep(function: Callable[..., Any], *inputs: Any) -> Any:
    """Calls ``function`` once and keeps its activations.

    For the loss beside frozen weights: its chunks share their adapters, of which ZeRO-3 takes one gradient a backward.
    """
    return function(*inputs)


@dataclass(frozen=True)
class ByModule:
    """What an engine asks of calls to modules.

    Attributes:
        frames_of_all: the most frames that any process has, given this one's: weights are gathered at every call, so
            that all processes have to make the same ones.
        recompute: calls a function now and again in the backward.
    """

    frames_of_all: Callable[[int], int] = own_frames
    recompute: Callable[..., Any] = recompute


def channel_sums(problem: FrameLoss, hidden: torch.Tensor, options: EngineOptions) -> torch.Tensor:
    """Returns ``[channels]`` float32 sums that autograd can differentiate, where it is on.

    Args:
        problem: heads, labels and depth model.
        hidden: ``[frames, hidden]``.
        options: chunk length and logits alive at once.
    """
    by_module = options.by_module
    assert by_module is not None  # what this schedule is chosen by
    missing = by_module.frames_of_all(hidden.shape[0]) - hidden.shape[0]
    if missing:
        problem, hidden = _padded(problem, missing), F.pad(hidden, (0, 0, 0, missing))
    features = differentiable_inputs(problem, hidden)
    with heads.forward_precision(hidden.device, torch.is_grad_enabled()):
        if problem.depth is not None:
            parts = features.split(options.chunk_frames)
            features = torch.cat([by_module.recompute(problem.depth, part) for part in parts])
        sums = [_channel_sum(channel, features, options.logits_at_once, by_module) for channel in problem.channels]
    return torch.stack(sums)


def _padded(problem: FrameLoss, missing: int) -> FrameLoss:
    """Adds frames without labels, which change nothing, so that every process makes as many chunks."""

    def pad(ids: torch.Tensor) -> torch.Tensor:
        return F.pad(ids, (0, missing), value=IGNORE_INDEX)

    return replace(
        problem,
        lookups=tuple(replace(lookup, ids=pad(lookup.ids)) for lookup in problem.lookups),
        channels=tuple(replace(channel, labels=pad(channel.labels)) for channel in problem.channels),
    )


def _channel_sum(channel: Channel, features: torch.Tensor, logits_at_once: int, by_module: ByModule) -> torch.Tensor:
    rows_at_once = max(1, logits_at_once // channel.projection.out_features)  # type: ignore[operator]
    inputs = features[:, channel.position]
    total = torch.zeros((), dtype=torch.float32, device=inputs.device)
    for rows, labels in zip(inputs.split(rows_at_once), channel.labels.split(rows_at_once)):
        total = total + by_module.recompute(_piece(channel), rows, labels)
    return total


def _piece(channel: Channel) -> Callable[[torch.Tensor, torch.Tensor], torch.Tensor]:
    def loss(rows: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        adapted = rows if channel.adapter is None else channel.adapter(rows)
        logits = channel.projection(adapted)
        # The weight may not be there to count its rows by.
        return F.cross_entropy(logits[..., : channel.classes].float(), labels, reduction="sum")

    return loss
