"""``autograd``: the chunked loss as ordinary autograd functions, for engines that own the backward.

Every parameter is an input of the functions that use it and receives its gradient exactly once per micro-batch, so a
reducer (DDP) or a partitioner sees what it would see without us. Chunk gradients are still summed compensated.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch.utils.checkpoint import checkpoint

from ..optim.gradients import ChunkSum
from . import heads
from .cross_entropy import (
    cross_entropy_direct,
    cross_entropy_input_gradient,
    cross_entropy_sum,
    cross_entropy_weight_gradient,
)
from .problem import Channel, FrameLoss, Stage
from .random_state import RandomState
from .rows import masked_embedding

if TYPE_CHECKING:
    from .engine import EngineOptions


def channel_sums(problem: FrameLoss, hidden: torch.Tensor, options: EngineOptions) -> torch.Tensor:
    """Returns ``[channels]`` float32 sums that autograd can differentiate.

    Args:
        problem: heads, labels and depth model.
        hidden: ``[frames, hidden]``.
        options: chunk length and logits alive at once.
    """
    features = differentiable_inputs(problem, hidden)
    if problem.depth is not None:
        parameters = list(problem.depth.trainable_parameters())
        features = _ChunkedStage.apply(problem.depth, options.chunk_frames, features, *parameters)
    return torch.stack([_channel_sum(channel, features, options.logits_at_once) for channel in problem.channels])


def differentiable_inputs(problem: FrameLoss, hidden: torch.Tensor) -> torch.Tensor:
    """The depth model's inputs ``[frames, positions, hidden]`` with a graph."""
    by_position = {lookup.position: masked_embedding(lookup.table, lookup.ids) for lookup in problem.lookups}
    parts = [hidden, *(by_position[position] for position in range(1, problem.positions))]
    dtype = parts[0].dtype
    for part in parts[1:]:
        dtype = torch.promote_types(dtype, part.dtype)
    return torch.stack([part.to(dtype) for part in parts], dim=1)


def _channel_sum(channel: Channel, features: torch.Tensor, logits_at_once: int) -> torch.Tensor:
    inputs = features[:, channel.position]
    with heads.forward_precision(inputs.device):
        if channel.adapter is not None:
            inputs = checkpoint(channel.adapter.forward, inputs, use_reentrant=False)
        if heads.is_plain_linear(channel.projection):
            return _LinearCrossEntropy.apply(
                inputs, channel.weight, channel.labels, channel.class_count, logits_at_once
            )
        logits = channel.projection(inputs)[..., : channel.class_count].float()
    return torch.nn.functional.cross_entropy(logits, channel.labels, reduction="sum")


class _ChunkedStage(torch.autograd.Function):
    """A stage over all frames whose activations exist for one chunk at a time, forward and backward."""

    @staticmethod
    def forward(ctx, stage: Stage, chunk_frames: int, inputs, *parameters):  # type: ignore[no-untyped-def]
        ctx.stage, ctx.chunk_frames = stage, chunk_frames
        ctx.autocast = (torch.is_autocast_enabled(inputs.device.type), torch.get_autocast_dtype(inputs.device.type))
        ctx.save_for_backward(inputs, *parameters)
        ctx.states = []
        outputs = []
        for part in inputs.split(chunk_frames):
            ctx.states.append(RandomState.capture(inputs.device))
            with heads.forward_precision(inputs.device), torch.no_grad():
                outputs.append(stage(part))
        return torch.cat(outputs)

    @staticmethod
    def backward(ctx, output_gradient):  # type: ignore[no-untyped-def]
        inputs, *parameters = ctx.saved_tensors
        sums = [ChunkSum(None) for _ in parameters]
        input_gradient = torch.empty_like(inputs)
        after = RandomState.capture(inputs.device)
        enabled, dtype = ctx.autocast
        start = 0
        for part, state in zip(inputs.split(ctx.chunk_frames), ctx.states):
            state.restore()
            rows = slice(start, start + part.shape[0])
            start = rows.stop
            leaf = part.detach().requires_grad_(True)
            with (
                torch.enable_grad(),
                torch.autocast(inputs.device.type, dtype=dtype, enabled=enabled, cache_enabled=False),
            ):
                recomputed = ctx.stage(leaf)
            with heads.backward_precision(inputs.device):
                gradients = torch.autograd.grad(recomputed, [leaf, *parameters], output_gradient[rows])
            input_gradient[rows] = gradients[0]
            for chunk_sum, gradient in zip(sums, gradients[1:]):
                chunk_sum.add(gradient)
        after.restore()
        return None, None, input_gradient, *(chunk_sum.total for chunk_sum in sums)


class _LinearCrossEntropy(torch.autograd.Function):
    """Cross entropy of a plain linear head; logits are computed again in the backward."""

    @staticmethod
    def forward(ctx, inputs, weight, labels, classes, logits_at_once):  # type: ignore[no-untyped-def]
        dtype = heads.compute_dtype(inputs.device, weight)
        ctx.save_for_backward(inputs, weight, labels)
        ctx.classes, ctx.dtype, ctx.logits_at_once = classes, dtype, logits_at_once
        with heads.backward_precision(inputs.device):
            return cross_entropy_sum(inputs.to(dtype), weight[:classes].to(dtype), labels)

    @staticmethod
    def backward(ctx, factor):  # type: ignore[no-untyped-def]
        inputs, weight, labels = ctx.saved_tensors
        hidden, rows = inputs.to(ctx.dtype), weight[: ctx.classes].to(ctx.dtype)
        weight_gradient = None
        with heads.backward_precision(inputs.device):
            if hidden.shape[0] * ctx.classes <= ctx.logits_at_once:
                _, input_gradient, row_gradient = cross_entropy_direct(hidden, rows, labels, factor)
                if ctx.needs_input_grad[1]:
                    missing = weight.shape[0] - ctx.classes
                    weight_gradient = torch.nn.functional.pad(row_gradient, (0, 0, 0, missing)).to(weight.dtype)
            else:
                _, normaliser, input_gradient = cross_entropy_input_gradient(
                    hidden, rows, labels, factor, ctx.logits_at_once
                )
                if ctx.needs_input_grad[1]:
                    weight_gradient = torch.zeros_like(weight)
                    for start, end, gradient in cross_entropy_weight_gradient(
                        hidden, normaliser, rows, labels, factor, ctx.logits_at_once
                    ):
                        weight_gradient[start:end] = gradient
        return input_gradient.to(inputs.dtype), weight_gradient, None, None, None
