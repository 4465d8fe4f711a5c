"""``fused`` and ``staged``: forward and backward together, gradients into the store, nothing kept for autograd."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

import torch
from torch import nn

from ..optim.gradients import GradientStore
from . import heads
from .problem import Channel, FrameLoss
from .random_state import RandomState

if TYPE_CHECKING:
    from .engine import EngineOptions


def fused(
    problem: FrameLoss, hidden: torch.Tensor, scale: float, store: GradientStore, options: EngineOptions
) -> tuple[torch.Tensor, torch.Tensor]:
    """Takes each chunk of frames through depth model, heads and back before the next one starts.

    Without a depth model there is nothing to fuse the heads with, and ``staged`` does the same work in one product per
    head.

    Returns:
        ``(sums [channels] float32, gradient of hidden [frames, hidden])``, the gradient times ``scale``.
    """
    if problem.depth is None:
        return staged(problem, hidden, scale, store, options)
    frames = hidden.shape[0]
    sums = torch.zeros(len(problem.channels), dtype=torch.float32, device=hidden.device)
    factors = problem.coefficients * scale
    deferred = _deferred_heads(problem, hidden, options.logits_at_once)
    gradients = _input_gradient_buffer(problem, hidden)
    with store.chunk_sums(_chunked_parameters(problem, deferred)):
        for rows in options.chunks(frames, options.chunk_frames):
            inputs, outputs = _depth_forward(problem, hidden, rows)
            output_gradient = torch.zeros_like(outputs)
            for index, channel in enumerate(problem.channels):
                loss, gradient = heads.head_gradients(
                    channel,
                    outputs[:, channel.position],
                    rows,
                    factors[index],
                    store,
                    logits_at_once=options.logits_at_once,
                    deferred=deferred.get(index),
                    chunked=True,
                )
                sums[index] += loss
                output_gradient[:, channel.position] += gradient
            gradients[rows] = _depth_backward(inputs, outputs, output_gradient)
            del inputs, outputs, output_gradient
    for index, kept in deferred.items():
        heads.finish_deferred(problem.channels[index], kept, factors[index], store, options.logits_at_once)
    return sums, _distribute(problem, gradients, store)


def staged(
    problem: FrameLoss, hidden: torch.Tensor, scale: float, store: GradientStore, options: EngineOptions
) -> tuple[torch.Tensor, torch.Tensor]:
    """Depth model forward for all frames, heads one by one over all frames, then the depth model back by chunks.

    The buffer of depth outputs is overwritten, position by position, with their gradients: the outputs are computed
    again anyway, except those of the last chunk, whose graph is kept.

    Returns:
        ``(sums [channels] float32, gradient of hidden [frames, hidden])``, the gradient times ``scale``.
    """
    chunks = list(options.chunks(hidden.shape[0], options.chunk_frames))
    outputs, states, kept = _all_depth_outputs(problem, hidden, chunks)
    sums = _heads_over_all_frames(problem, outputs, problem.coefficients * scale, store, options.logits_at_once)
    if problem.depth is None:
        return sums, _distribute(problem, outputs, store)
    after = RandomState.capture(hidden.device)
    gradients = _input_gradient_buffer(problem, hidden)
    with store.chunk_sums(problem.depth.trainable_parameters()):
        gradients[chunks[-1]] = _depth_backward(*kept.pop(), outputs[chunks[-1]])
        for rows, state in zip(chunks, states):
            state.restore()
            inputs, recomputed = _depth_forward(problem, hidden, rows)
            gradients[rows] = _depth_backward(inputs, recomputed, outputs[rows])
            del inputs, recomputed
    after.restore()
    return sums, _distribute(problem, gradients, store)


def _all_depth_outputs(
    problem: FrameLoss, hidden: torch.Tensor, chunks: list[slice]
) -> tuple[torch.Tensor, list[RandomState], list[tuple[torch.Tensor, torch.Tensor]]]:
    """Runs the depth model over all frames.

    Returns:
        Its outputs ``[frames, positions, depth hidden]``; the random state of each chunk that will be computed again;
        and, in a list that the caller can empty, inputs and outputs of the last chunk with their graph.
    """
    if problem.depth is None:
        return heads.depth_inputs(problem, hidden, slice(None)), [], []
    *others, last = chunks  # a family passes at least one frame
    outputs: torch.Tensor | None = None
    states = []
    for rows in others:
        states.append(RandomState.capture(hidden.device))
        with heads.forward_precision(hidden.device), torch.no_grad():
            part = problem.depth(heads.depth_inputs(problem, hidden, rows))
        outputs = _buffer_like(part, hidden.shape[0]) if outputs is None else outputs
        outputs[rows] = part
    kept = _depth_forward(problem, hidden, last)
    outputs = _buffer_like(kept[1], hidden.shape[0]) if outputs is None else outputs
    outputs[last] = kept[1].detach()
    return outputs, states, [kept]


def _buffer_like(part: torch.Tensor, frames: int) -> torch.Tensor:
    return part.new_empty((frames, *part.shape[1:]))


def _heads_over_all_frames(
    problem: FrameLoss, outputs: torch.Tensor, factors: torch.Tensor, store: GradientStore, logits_at_once: int
) -> torch.Tensor:
    """Runs every head over all frames; leaves in ``outputs`` the gradient by it."""
    sums = torch.zeros(len(problem.channels), dtype=torch.float32, device=outputs.device)
    everything = slice(0, outputs.shape[0])
    for position in range(outputs.shape[1]):
        features = outputs[:, position].clone()
        # Without a depth model 33 heads read the same position: a bf16 sum would round 33 times.
        total = torch.zeros_like(features, dtype=torch.float32)
        for index, channel in enumerate(problem.channels):
            if channel.position != position:
                continue
            deferred = _deferred_head(channel, features, logits_at_once)
            sums[index], gradient = heads.head_gradients(
                channel,
                features,
                everything,
                factors[index],
                store,
                logits_at_once=logits_at_once,
                deferred=deferred,
                chunked=False,
            )
            total += gradient
            if deferred is not None:
                heads.finish_deferred(channel, deferred, factors[index], store, logits_at_once)
        outputs[:, position] = total
    return sums


def _depth_forward(problem: FrameLoss, hidden: torch.Tensor, rows: slice) -> tuple[torch.Tensor, torch.Tensor]:
    assert problem.depth is not None
    inputs = heads.depth_inputs(problem, hidden, rows)
    inputs.requires_grad_(True)
    with heads.forward_precision(hidden.device):
        return inputs, problem.depth(inputs)


def _depth_backward(inputs: torch.Tensor, outputs: torch.Tensor, output_gradient: torch.Tensor) -> torch.Tensor:
    with heads.backward_precision(inputs.device):
        torch.autograd.backward(outputs, output_gradient.to(outputs.dtype))
    gradient, inputs.grad = inputs.grad, None
    return torch.zeros_like(inputs) if gradient is None else gradient


def _distribute(problem: FrameLoss, gradients: torch.Tensor, store: GradientStore) -> torch.Tensor:
    """Gives the embedding tables their rows; returns the hidden states' gradient as a tensor of its own."""
    heads.add_lookup_gradients(problem, gradients, store)
    return gradients[:, 0].clone()


def _input_gradient_buffer(problem: FrameLoss, hidden: torch.Tensor) -> torch.Tensor:
    return hidden.new_empty((hidden.shape[0], problem.positions, hidden.shape[1]))


def frame_chunks(frames: int, chunk_frames: int) -> Iterator[slice]:
    """Cuts ``frames`` frames into chunks of ``chunk_frames``; the last one may be shorter."""
    for start in range(0, frames, chunk_frames):
        yield slice(start, min(start + chunk_frames, frames))


def _deferred_head(channel: Channel, features: torch.Tensor, logits_at_once: int) -> heads.DeferredWeight | None:
    if not heads.needs_deferral(channel, features.shape[0], logits_at_once):
        return None
    weight = channel.weight
    dtype = heads.compute_dtype(features.device, weight)
    return heads.DeferredWeight.empty(features.shape[0], weight.shape[1], dtype, features.device)


def _deferred_heads(problem: FrameLoss, hidden: torch.Tensor, logits_at_once: int) -> dict[int, heads.DeferredWeight]:
    found = {}
    for index, channel in enumerate(problem.channels):
        deferred = _deferred_head(channel, hidden, logits_at_once)
        if deferred is not None:
            found[index] = deferred
    return found


def _chunked_parameters(problem: FrameLoss, deferred: dict[int, heads.DeferredWeight]) -> list[nn.Parameter]:
    """Everything that receives one partial gradient per chunk in ``fused``."""
    found: dict[int, nn.Parameter] = {}
    stages = [problem.depth, *(channel.adapter for channel in problem.channels)]
    for stage in stages:
        if stage is not None:
            found.update((id(parameter), parameter) for parameter in stage.trainable_parameters())
    for index, channel in enumerate(problem.channels):
        if index not in deferred:
            found.update((id(p), p) for p in channel.projection.parameters() if p.requires_grad)
    return list(found.values())
