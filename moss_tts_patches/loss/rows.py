"""Embedding gradients as rows instead of whole tables.

A table of 151,936 entries takes 0.58 GiB as a dense bf16 gradient, of which a micro-batch of 600 positions touches
at most 600 rows. Repeated ids are summed in float32 before they meet the table: in a speech record almost every
text label is the same slot token, and a bf16 sum of 350 equal-sized terms loses two thirds of its digits.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import nn

from .problem import IGNORE_INDEX


def is_plain_table(table: nn.Module) -> bool:
    """Whether the embedding is nothing but a matrix, so that its gradient may be written as rows."""
    return type(table) is nn.Embedding and len(table._forward_hooks) == 0


def masked_embedding(table: nn.Module, ids: torch.Tensor) -> torch.Tensor:
    """Embeds ``ids`` through the module itself, adapter included; a zero vector where nothing is supervised.

    Args:
        table: an embedding, or what PEFT made of it.
        ids: ``[frames]`` int64, may hold ``IGNORE_INDEX``.

    Returns:
        ``[frames, hidden]``, differentiable by whatever the module trains.
    """
    present = ids != IGNORE_INDEX
    return table(torch.where(present, ids, 0)).masked_fill(~present.unsqueeze(-1), 0)


def masked_lookup(weight: torch.Tensor, ids: torch.Tensor, padding_idx: int | None = None) -> torch.Tensor:
    """Embeds ``ids``, a zero vector where nothing is supervised.

    Args:
        weight: ``[entries, hidden]``.
        ids: ``[frames]`` int64, may hold ``IGNORE_INDEX``.
        padding_idx: the entry that ``torch.nn.Embedding`` keeps without gradient; its values are looked up too.

    Returns:
        ``[frames, hidden]``, dtype of ``weight``.

    Source: upstream ``moss_tts_local/modeling_moss_tts.py``, ``moss_tts_masked_embedding``.
    """
    present = ids != IGNORE_INDEX
    rows = F.embedding(torch.where(present, ids, 0), weight, padding_idx)
    return rows.masked_fill(~present.unsqueeze(-1), 0)


def sum_rows_by_id(
    ids: torch.Tensor, rows: torch.Tensor, padding_idx: int | None = None
) -> tuple[torch.Tensor, torch.Tensor]:
    """Adds up the rows that belong to the same table entry, in float32.

    All shapes are static, so that the planner can run it on fake tensors: the unused tail of the result has id 0
    and zero rows, which is harmless to add.

    Args:
        ids: ``[frames]`` int64; entries equal to ``IGNORE_INDEX`` or ``padding_idx`` contribute nothing.
        rows: ``[frames, hidden]`` gradients.
        padding_idx: the table entry that ``torch.nn.Embedding`` keeps without gradient.

    Returns:
        ``(ids [frames] int64, sums [frames, hidden] float32)``.
    """
    kept = ids != IGNORE_INDEX
    if padding_idx is not None:
        kept = kept & (ids != padding_idx)
    safe = torch.where(kept, ids, 0)
    order = torch.argsort(safe, stable=True)
    ordered = safe.index_select(0, order)
    starts = torch.ones_like(ordered)
    starts[1:] = (ordered[1:] != ordered[:-1]).to(starts.dtype)
    segment = starts.cumsum(0) - 1
    sums = torch.zeros(rows.shape, dtype=torch.float32, device=rows.device)
    values = rows.index_select(0, order).float().masked_fill(~kept.index_select(0, order).unsqueeze(-1), 0)
    sums.index_add_(0, segment, values)
    return torch.zeros_like(ids).scatter_(0, segment, ordered), sums
