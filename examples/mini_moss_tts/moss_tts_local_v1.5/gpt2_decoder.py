"""The miniature's v1.5 depth transformer: GPT-2's blocks with rotary embedding over one frame's codebooks."""

from __future__ import annotations

import copy
from typing import Any

import torch
from torch import nn
from transformers.activations import ACT2FN
from transformers.modeling_outputs import BaseModelOutputWithPast

from .qwen3_decoder import attend


class DepthAttention(nn.Module):
    """Causal attention with biases."""

    def __init__(self, config: Any, attn_implementation: str) -> None:
        super().__init__()
        self.attn_implementation = attn_implementation
        self.heads = config.n_head
        self.c_attn = nn.Linear(config.n_embd, 3 * config.n_embd)
        self.c_proj = nn.Linear(config.n_embd, config.n_embd)

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        length = hidden.shape[1]
        query, key, value = (
            part.unflatten(-1, (self.heads, -1)).transpose(1, 2) for part in self.c_attn(hidden).chunk(3, dim=-1)
        )
        causal = torch.ones(length, length, dtype=torch.bool, device=hidden.device).tril()
        attended = attend(rotated(query), rotated(key), value, causal, self.attn_implementation)
        return self.c_proj(attended.transpose(1, 2).flatten(-2))


class DepthMLP(nn.Module):
    """Two linear maps with biases."""

    def __init__(self, config: Any) -> None:
        super().__init__()
        inner = config.n_inner or 4 * config.n_embd
        self.fc_in = nn.Linear(config.n_embd, inner)
        self.fc_out = nn.Linear(inner, config.n_embd)
        self.act = ACT2FN[config.activation_function]

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        return self.fc_out(self.act(self.fc_in(hidden)))


class DepthBlock(nn.Module):
    """Attention and the two maps, each behind a norm."""

    def __init__(self, config: Any, attn_implementation: str) -> None:
        super().__init__()
        self.ln_1 = nn.LayerNorm(config.n_embd, eps=config.layer_norm_epsilon)
        self.attn = DepthAttention(config, attn_implementation)
        self.ln_2 = nn.LayerNorm(config.n_embd, eps=config.layer_norm_epsilon)
        self.mlp = DepthMLP(config)

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        hidden = hidden + self.attn(self.ln_1(hidden))
        return hidden + self.mlp(self.ln_2(hidden))


class DepthTransformer(nn.Module):
    """Runs over ready embeddings; its attention follows the stored config, not the trainer's flag."""

    def __init__(self, config: Any, layers: int, attn_implementation: str) -> None:
        super().__init__()
        self.config = copy.deepcopy(config)
        self.config._attn_implementation = self.attn_implementation = attn_implementation
        self.h = nn.ModuleList(DepthBlock(config, attn_implementation) for _ in range(layers))
        self.ln_f = nn.LayerNorm(config.n_embd, eps=config.layer_norm_epsilon)

    def forward(
        self,
        input_ids: None = None,
        attention_mask: None = None,
        inputs_embeds: torch.Tensor | None = None,
        use_cache: bool | None = None,
        return_dict: bool = True,
        **kwargs: Any,
    ) -> BaseModelOutputWithPast:
        """Maps ``inputs_embeds`` ``[frames, codebooks, hidden]`` to the same shape.

        Raises:
            ValueError: anything else was given: there is no table to look ids up, and rows are never padded.
        """
        if input_ids is not None or attention_mask is not None or inputs_embeds is None:
            raise ValueError("the depth transformer takes inputs_embeds alone, neither input_ids nor attention_mask")
        hidden = inputs_embeds
        for block in self.h:
            hidden = block(hidden)
        return BaseModelOutputWithPast(last_hidden_state=self.ln_f(hidden))


def rotated(features: torch.Tensor, base: float = 10000.0) -> torch.Tensor:
    """Rotary embedding of neighbouring pairs; features ``[rows, heads, positions, head]``.

    Source: Su et al. 2021, equation 34.
    """
    length, width = features.shape[-2:]
    exponents = torch.arange(0, width, 2, dtype=torch.float32, device=features.device) / width
    angles = torch.outer(torch.arange(length, dtype=torch.float32, device=features.device), 1.0 / base**exponents)
    cosine, sine = angles.cos().to(features.dtype), angles.sin().to(features.dtype)
    even, odd = features[..., ::2], features[..., 1::2]
    return torch.stack([even * cosine - odd * sine, odd * cosine + even * sine], dim=-1).flatten(-2)
