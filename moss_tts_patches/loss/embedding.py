"""The backbone's input, a sum of embeddings, whose gradients go to the gradient store row by row."""

from __future__ import annotations

from collections.abc import Sequence
from typing import cast

import torch
from torch import nn

from ..optim.gradients import GradientStore
from .rows import is_plain_table, masked_embedding, masked_lookup, sum_rows_by_id


def summed_embeddings(tables: Sequence[nn.Module], ids: torch.Tensor, store: GradientStore) -> torch.Tensor:
    """Adds up one embedding per channel, keeping nothing but the ids for the backward.

    Autograd would hold a dense gradient per table from the depth model's backward to the end of the backbone's:
    0.58 GiB for MOSS-TTS-Local's text table alone. Here a table's gradient is the rows that were looked up.

    Args:
        tables: one embedding per channel, weights ``[entries, hidden]``. Those that carry an adapter go through
            autograd, which keeps little of them: an adapter's gradient is ``rank`` wide.
        ids: ``[batch, positions, channels]`` int64; ``IGNORE_INDEX`` adds nothing.
        store: receives the rows when the backward arrives.

    Returns:
        ``[batch, positions, hidden]`` in the tables' dtype, added up channel by channel in that dtype as upstream
        does, so that bf16 rounds alike.

    Source: upstream ``moss_tts_local/modeling_moss_tts.py``, ``MosiTTSModel._prepare_multi_modal_inputs``.
    """
    plain = [channel for channel, table in enumerate(tables) if is_plain_table(table)]
    total = _summed_plain([cast(nn.Embedding, tables[c]) for c in plain], ids[..., plain], store) if plain else None
    for channel, table in enumerate(tables):
        if channel not in plain:
            found = masked_embedding(table, ids[..., channel].reshape(-1)).view(*ids.shape[:-1], -1)
            total = found if total is None else total + found
    assert total is not None  # a family passes at least one table
    return total


def _summed_plain(tables: Sequence[nn.Embedding], ids: torch.Tensor, store: GradientStore) -> torch.Tensor:
    trainable = any(table.weight.requires_grad for table in tables)
    # The tables are no inputs of the function: autograd would announce an (undefined) gradient for each of them. The
    # anchor is what makes the result differentiable.
    anchor = torch.zeros((), device=ids.device, requires_grad=trainable)
    return _SummedEmbeddings.apply(anchor, ids, store, tables)


class _SummedEmbeddings(torch.autograd.Function):
    @staticmethod
    def forward(ctx, anchor, ids, store, tables):  # type: ignore[no-untyped-def]
        ctx.store, ctx.tables = store, tables
        ctx.save_for_backward(ids)
        first = tables[0].weight
        total = first.new_zeros((*ids.shape[:-1], first.shape[1]))
        for channel, table in enumerate(tables):
            found = masked_lookup(table.weight, ids[..., channel].reshape(-1))
            total += found.view(total.shape)
        return total

    @staticmethod
    def backward(ctx, gradient):  # type: ignore[no-untyped-def]
        (ids,) = ctx.saved_tensors
        rows = gradient.reshape(-1, gradient.shape[-1])
        for channel, table in enumerate(ctx.tables):
            if table.weight.requires_grad:
                found = sum_rows_by_id(ids[..., channel].reshape(-1), rows, table.padding_idx)
                ctx.store.add_rows(table.weight, *found)
        return None, None, None, None
