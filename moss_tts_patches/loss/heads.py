"""The pieces that every schedule is made of: depth inputs, one channel's head, precision contexts."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import cast

import torch
from torch import nn

from ..optim.gradients import GradientStore
from .cross_entropy import (
    LOGITS_AT_ONCE,
    cross_entropy_direct,
    cross_entropy_input_gradient,
    cross_entropy_sum,
    cross_entropy_weight_gradient,
)
from .problem import Channel, FrameLoss, Lookup
from .rows import is_plain_table, masked_embedding, sum_rows_by_id

__all__ = ["LOGITS_AT_ONCE", "DeferredWeight", "channel_sums", "depth_inputs", "head_gradients"]


@contextmanager
def forward_precision(device: torch.device, gradients: bool = True) -> Iterator[None]:
    """Upstream's autocast, gradients on unless told otherwise, and no cache of cast weights.

    The cache would tie chunks together: a cast of a float32 adapter made in one chunk would be part of the next
    chunk's graph, and a cast made without gradients would cut the adapter off from the loss.
    """
    enabled = torch.is_autocast_enabled(device.type)
    dtype = torch.get_autocast_dtype(device.type)
    with (
        torch.set_grad_enabled(gradients),
        torch.autocast(device.type, dtype=dtype, enabled=enabled, cache_enabled=False),
    ):
        yield


@contextmanager
def backward_precision(device: torch.device) -> Iterator[None]:
    """No autocast: the dtypes of a backward were settled by its forward."""
    with torch.autocast(device.type, enabled=False):
        yield


def compute_dtype(device: torch.device, weight: torch.Tensor) -> torch.dtype:
    """The dtype in which ``torch.nn.functional.linear`` would multiply here."""
    return torch.get_autocast_dtype(device.type) if torch.is_autocast_enabled(device.type) else weight.dtype


def is_plain_linear(module: nn.Module) -> bool:
    """Whether the head is nothing but a matrix, so that its gradient may be written by hand."""
    return type(module) is nn.Linear and module.bias is None and len(module._forward_hooks) == 0


def depth_inputs(problem: FrameLoss, hidden: torch.Tensor, rows: slice) -> torch.Tensor:
    """Builds the depth model's input for some frames, without a graph.

    Returns:
        ``[frames in rows, positions, hidden]``: the hidden state, then the embeddings of the teacher-forced codes.

    Source: upstream ``moss_tts_local/modeling_moss_tts.py``, ``MossTTSDelayModel.forward``.
    """
    first = hidden[rows]
    dtype = first.dtype
    for lookup in problem.lookups:
        dtype = torch.promote_types(dtype, lookup.dtype)
    inputs = first.new_zeros((first.shape[0], problem.positions, first.shape[1]), dtype=dtype)
    inputs[:, 0] = first
    for lookup in problem.lookups:
        with torch.no_grad():
            inputs[:, lookup.position] = masked_embedding(lookup.table, lookup.ids[rows])
    return inputs


def add_lookup_gradients(problem: FrameLoss, gradients: torch.Tensor, store: GradientStore) -> None:
    """Hands the gradients of the depth model's inputs ``[frames, positions, hidden]`` to the embedding tables."""
    for lookup in problem.lookups:
        gradient = gradients[:, lookup.position]
        if not is_plain_table(lookup.table):
            _through_adapter(lookup, gradient)
        elif lookup.table.weight.requires_grad:
            ids, rows = sum_rows_by_id(lookup.ids, gradient, lookup.table.padding_idx)
            store.add_rows(cast(nn.Parameter, lookup.table.weight), ids, rows)


def _through_adapter(lookup: Lookup, gradient: torch.Tensor) -> None:
    """A table that is more than a matrix: autograd knows its gradients."""
    with forward_precision(gradient.device):
        found = masked_embedding(lookup.table, lookup.ids)
    if found.requires_grad:
        with backward_precision(gradient.device):
            torch.autograd.backward(found, gradient.to(found.dtype))


@dataclass
class DeferredWeight:
    """A head whose weight gradient is computed after the last frame, over all frames at once.

    Attributes:
        hidden: ``[frames, hidden]`` in the compute dtype, the head's inputs.
        normaliser: ``[frames]`` float32.
    """

    hidden: torch.Tensor
    normaliser: torch.Tensor

    @classmethod
    def empty(cls, frames: int, width: int, dtype: torch.dtype, device: torch.device) -> DeferredWeight:
        return cls(
            torch.empty(frames, width, dtype=dtype, device=device),
            torch.empty(frames, dtype=torch.float32, device=device),
        )


def needs_deferral(channel: Channel, frames: int, logits_at_once: int) -> bool:
    """Whether this head has too many logits to hold them all at once."""
    return (
        is_plain_linear(channel.projection)
        and channel.weight.requires_grad
        and frames * channel.class_count > logits_at_once
    )


def head_gradients(
    channel: Channel,
    features: torch.Tensor,
    rows: slice,
    factor: torch.Tensor,
    store: GradientStore,
    *,
    logits_at_once: int,
    deferred: DeferredWeight | None,
    chunked: bool,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Runs one channel's adapter and head over some frames, forward and backward.

    Args:
        features: ``[frames in rows, depth hidden]``, the depth model's output at the channel's position.
        factor: scalar float32, derivative of the scaled loss by the channel's sum.
        deferred: where the head's inputs are kept when its weight gradient comes later.
        chunked: whether the head's gradient is one of several partial sums (the store holds a chunk sum for it).

    Returns:
        ``(sum of losses [] float32, gradient of features)``.
    """
    device = features.device
    leaf = features.detach().requires_grad_(True)
    with forward_precision(device):
        adapted = leaf if channel.adapter is None else channel.adapter(leaf)
        if not is_plain_linear(channel.projection):
            return _autograd_head(channel, adapted, leaf, rows, factor)
        dtype = compute_dtype(device, channel.weight)
    labels, parameter = channel.labels[rows], channel.weight
    weight = parameter.detach()[: channel.class_count].to(dtype)
    inputs = adapted.detach().to(dtype)
    with backward_precision(device):
        if deferred is not None:
            loss, normaliser, gradient = cross_entropy_input_gradient(inputs, weight, labels, factor, logits_at_once)
            deferred.hidden[rows], deferred.normaliser[rows] = inputs, normaliser
        elif not parameter.requires_grad:
            loss, _, gradient = cross_entropy_input_gradient(inputs, weight, labels, factor, logits_at_once)
        else:
            loss, gradient, weight_gradient = cross_entropy_direct(inputs, weight, labels, factor)
            _deliver(store, parameter, weight_gradient, chunked)
        return loss, _back_to_leaf(adapted, leaf, gradient)


def finish_deferred(
    channel: Channel, deferred: DeferredWeight, factor: torch.Tensor, store: GradientStore, logits_at_once: int
) -> None:
    """Computes a deferred weight gradient slice by slice; every slice leaves at once and is final."""
    parameter = channel.weight
    weight = parameter.detach()[: channel.class_count]
    with backward_precision(weight.device):
        slices = cross_entropy_weight_gradient(
            deferred.hidden,
            deferred.normaliser,
            weight.to(deferred.hidden.dtype),
            channel.labels,
            factor,
            logits_at_once,
        )
        for start, end, gradient in slices:
            store.add_slice(parameter, start, end, gradient)
    store.count(parameter)


def channel_sums(problem: FrameLoss, hidden: torch.Tensor, chunk_frames: int) -> torch.Tensor:
    """The losses alone: ``[channels]`` float32, nothing kept for a backward."""
    sums = torch.zeros(len(problem.channels), dtype=torch.float32, device=hidden.device)
    for start in range(0, hidden.shape[0], chunk_frames):
        rows = slice(start, start + chunk_frames)
        inputs = depth_inputs(problem, hidden, rows)
        outputs = inputs if problem.depth is None else problem.depth(inputs)
        for index, channel in enumerate(problem.channels):
            features = outputs[:, channel.position]
            adapted = features if channel.adapter is None else channel.adapter(features)
            sums[index] += _loss_sum(channel, adapted, rows)
    return sums


def _loss_sum(channel: Channel, adapted: torch.Tensor, rows: slice) -> torch.Tensor:
    if is_plain_linear(channel.projection):
        weight = channel.weight[: channel.class_count]
        return cross_entropy_sum(adapted, weight, channel.labels[rows])
    logits = channel.projection(adapted)[..., : channel.class_count].float()
    return nn.functional.cross_entropy(logits, channel.labels[rows], reduction="sum")


def _autograd_head(
    channel: Channel, adapted: torch.Tensor, leaf: torch.Tensor, rows: slice, factor: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """A head that is more than a matrix (an adapter inside it): autograd knows its gradients."""
    loss = _loss_sum(channel, adapted, rows)
    with backward_precision(leaf.device):
        loss.backward(factor.to(loss.dtype))
    return loss.detach(), _taken_gradient(leaf)


def _back_to_leaf(adapted: torch.Tensor, leaf: torch.Tensor, gradient: torch.Tensor) -> torch.Tensor:
    if adapted is leaf:
        return gradient
    torch.autograd.backward(adapted, gradient.to(adapted.dtype))
    return _taken_gradient(leaf)


def _taken_gradient(leaf: torch.Tensor) -> torch.Tensor:
    gradient, leaf.grad = leaf.grad, None
    return torch.zeros_like(leaf) if gradient is None else gradient


def _deliver(store: GradientStore, parameter: nn.Parameter, gradient: torch.Tensor, chunked: bool) -> None:
    missing = parameter.shape[0] - gradient.shape[0]
    if chunked:
        padded = nn.functional.pad(gradient, (0, 0, 0, missing)) if missing else gradient
        store.add_chunk(parameter, padded)
    elif missing:
        store.add_slice(parameter, 0, gradient.shape[0], gradient)
        store.count(parameter)
    else:
        store.add(parameter, gradient)
