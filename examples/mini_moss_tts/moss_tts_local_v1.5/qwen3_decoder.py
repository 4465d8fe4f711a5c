"""The miniature's v1.5 backbone: Qwen3's layers with a mask of its own making."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import nn
from transformers.models.qwen3.modeling_qwen3 import (
    Qwen3MLP,
    Qwen3RMSNorm,
    Qwen3RotaryEmbedding,
    apply_rotary_pos_emb,
)


class MaskedAttention(nn.Module):
    """Grouped attention under a mask that this class makes itself.

    A padded query has no key at all in that mask. The softmax of such a row is uniform here and its output is set to
    zero later; CUDA's kernels turn it into nan gradients.
    """

    def __init__(self, config: Any, attn_implementation: str) -> None:
        super().__init__()
        self.attn_implementation = attn_implementation
        self.head_dim = config.head_dim
        width, queries, keys = config.hidden_size, config.num_attention_heads, config.num_key_value_heads
        self.q_proj = nn.Linear(width, queries * self.head_dim, bias=config.attention_bias)
        self.k_proj = nn.Linear(width, keys * self.head_dim, bias=config.attention_bias)
        self.v_proj = nn.Linear(width, keys * self.head_dim, bias=config.attention_bias)
        self.o_proj = nn.Linear(queries * self.head_dim, width, bias=config.attention_bias)
        self.q_norm = Qwen3RMSNorm(self.head_dim, config.rms_norm_eps)
        self.k_norm = Qwen3RMSNorm(self.head_dim, config.rms_norm_eps)
        self.queries_per_key = queries // keys

    def _causal_attention_mask(
        self, attention_mask: torch.Tensor | None, query_length: int, key_length: int, device: torch.device
    ) -> torch.Tensor:
        """Returns ``[batch or 1, 1, query_length, key_length]`` bool, True where a query may look."""
        queries = torch.arange(key_length - query_length, key_length, device=device)
        causal = queries.unsqueeze(-1) >= torch.arange(key_length, device=device)
        return causal[None, None] if attention_mask is None else causal & attention_mask[:, None, None, :]

    def forward(
        self, hidden: torch.Tensor, rotary: tuple[torch.Tensor, torch.Tensor], attention_mask: torch.Tensor
    ) -> torch.Tensor:
        by_head = (*hidden.shape[:-1], -1, self.head_dim)
        query = self.q_norm(self.q_proj(hidden).view(by_head)).transpose(1, 2)
        key = self.k_norm(self.k_proj(hidden).view(by_head)).transpose(1, 2)
        query, key = apply_rotary_pos_emb(query, key, *rotary)
        value = self.v_proj(hidden).view(by_head).transpose(1, 2)
        key, value = (part.repeat_interleave(self.queries_per_key, dim=1) for part in (key, value))
        length = hidden.shape[1]
        mask = self._causal_attention_mask(attention_mask, length, length, hidden.device)
        attended = attend(query, key, value, mask, self.attn_implementation)
        return self.o_proj(attended.transpose(1, 2).flatten(-2))


class BackboneLayer(nn.Module):
    """Attention and a SwiGLU block, each behind a norm."""

    def __init__(self, config: Any, attn_implementation: str) -> None:
        super().__init__()
        self.self_attn = MaskedAttention(config, attn_implementation)
        self.mlp = Qwen3MLP(config)
        self.input_layernorm = Qwen3RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.post_attention_layernorm = Qwen3RMSNorm(config.hidden_size, config.rms_norm_eps)

    def forward(
        self, hidden: torch.Tensor, rotary: tuple[torch.Tensor, torch.Tensor], attention_mask: torch.Tensor
    ) -> torch.Tensor:
        hidden = hidden + self.self_attn(self.input_layernorm(hidden), rotary, attention_mask)
        return hidden + self.mlp(self.post_attention_layernorm(hidden))


class Backbone(nn.Module):
    """Layers between whose outputs padding is set to zero."""

    def __init__(self, config: Any, attn_implementation: str, padding_idx: int | None) -> None:
        super().__init__()
        self.config = config
        config._attn_implementation = attn_implementation  # for whoever asks what runs
        self.embed_tokens = nn.Embedding(config.vocab_size, config.hidden_size, padding_idx)
        self.layers = nn.ModuleList(BackboneLayer(config, attn_implementation) for _ in range(config.num_hidden_layers))
        self.norm = Qwen3RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.rotary_emb = Qwen3RotaryEmbedding(config)

    def forward(
        self,
        hidden: torch.Tensor,
        attention_mask: torch.Tensor | None = None,
        position_ids: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Maps ``[batch, positions, hidden]`` to the same shape."""
        if attention_mask is None:
            attention_mask = torch.ones(hidden.shape[:2], dtype=torch.bool, device=hidden.device)
        if position_ids is None:  # counted from each record's first real position
            position_ids = (attention_mask.long().cumsum(-1) - 1).clamp(min=0)
        present = attention_mask.unsqueeze(-1).to(hidden.dtype)
        hidden = hidden * present
        rotary = self.rotary_emb(hidden, position_ids)
        for layer in self.layers:
            hidden = layer(hidden, rotary, attention_mask) * present
        return self.norm(hidden) * present


def attend(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, mask: torch.Tensor, implementation: str
) -> torch.Tensor:
    """Scaled dot-product attention over ``[batch, heads, positions, head]`` with a bool mask.

    Raises:
        ImportError: flash attention, which the miniature does not have.
    """
    if implementation not in ("sdpa", "eager"):
        raise ImportError(f"attn_implementation {implementation!r}: the miniature has sdpa and eager")
    if implementation == "sdpa":
        return F.scaled_dot_product_attention(query, key, value, attn_mask=mask)
    scores = query @ key.transpose(-1, -2) * query.shape[-1] ** -0.5
    return scores.masked_fill(~mask, torch.finfo(scores.dtype).min).softmax(dim=-1) @ value
