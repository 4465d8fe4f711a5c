"""The miniature's realtime model: MOSS-TTS-Realtime's mathematics and weight names, for training only.

A backbone reads the sum of a position's text and code embeddings. The hidden state of position t - 1, followed by the
codes of position t in embeddings of their own, goes through a depth transformer; its output at entry c predicts
codebook c of position t. The text is given, never predicted.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn
from transformers import PreTrainedModel
from transformers.models.qwen3.modeling_qwen3 import Qwen3Model
from transformers.utils import ModelOutput

from .configuration_mossttsrealtime import MossTTSRealtimeConfig

IGNORE_INDEX = -100


@dataclass
class MiniOutput(ModelOutput):
    """What a forward pass returns; training reads ``loss`` alone.

    Attributes:
        loss: scalar.
        last_hidden_state: the backbone's, ``[batch, positions, hidden]``.
        local_logits: ``[frames, rvq, codes]``.
        past_key_values, hidden_states, attentions: the backbone's.
    """

    loss: torch.Tensor | None = None
    last_hidden_state: torch.Tensor | None = None
    local_logits: torch.Tensor | None = None
    past_key_values: Any = None
    hidden_states: tuple[torch.Tensor, ...] | None = None
    attentions: tuple[torch.Tensor, ...] | None = None


class DepthTransformer(nn.Module):
    """Qwen3's layers over one frame's codebooks, with one embedding and one head for each."""

    def __init__(self, config: Any) -> None:
        super().__init__()
        width, codes, pad = config.hidden_size, config.audio_vocab_size, config.audio_pad_token
        self.model = Qwen3Model(config)
        self.model.embed_tokens = nn.ModuleList(nn.Embedding(codes, width, pad) for _ in range(config.rvq - 1))
        self.local_lm_heads = nn.ModuleList(nn.Linear(width, codes, bias=False) for _ in range(config.rvq))
        self.pad = pad

    def forward(self, first: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        """Returns logits ``[frames, rvq, codes]``.

        Args:
            first: ``[frames, hidden]``, the hidden state before each frame.
            labels: ``[frames, rvq]`` int64; where there is none (-100), the pad code is read.
        """
        codes = labels.masked_fill(labels == IGNORE_INDEX, self.pad)
        entries = [first] + [table(ids) for table, ids in zip(self.model.embed_tokens, codes.unbind(-1))]
        outputs = self.model(inputs_embeds=torch.stack(entries, dim=1), use_cache=False).last_hidden_state
        return torch.stack([head(x) for head, x in zip(self.local_lm_heads, outputs.unbind(1))], dim=1)


class MossTTSRealtime(PreTrainedModel):
    """Backbone and depth transformer.

    Source: parts, weight names and loss as in upstream ``mossttsrealtime/modeling_mossttsrealtime.py`` and
    ``modeling_mossttsrealtime_local.py``.
    """

    config_class = MossTTSRealtimeConfig
    base_model_prefix = "model"
    supports_gradient_checkpointing = True
    _supports_sdpa = True
    _supports_flash_attn = True

    def __init__(self, config: MossTTSRealtimeConfig) -> None:
        super().__init__(config)
        language = config.language_config
        for part in (language, config.local_config):  # unlike the other families, both follow the trainer's flag
            part._attn_implementation = config._attn_implementation
        tables = [nn.Embedding(language.vocab_size, language.hidden_size, language.pad_token_id)]
        tables += [
            nn.Embedding(config.audio_vocab_size, language.hidden_size, config.audio_pad_token)
            for _ in range(config.rvq)
        ]
        self.embed_tokens = nn.ModuleList(tables)
        self.language_model = Qwen3Model(language)
        self.local_transformer = DepthTransformer(config.local_config)
        self.post_init()

    def get_input_embeddings(self, input_ids: torch.Tensor) -> torch.Tensor:  # type: ignore[override]
        """Returns the sum over channels, as upstream's method of this name does: it is no module that it returns.

        Args:
            input_ids: ``[batch, positions, 1 + rvq]`` int64.
        """
        return sum(table(ids) for table, ids in zip(self.embed_tokens, input_ids.unbind(-1)))

    def forward(
        self,
        input_ids: torch.Tensor | None = None,
        attention_mask: torch.Tensor | None = None,
        position_ids: torch.Tensor | None = None,
        past_key_values: Any = None,
        inputs_embeds: torch.Tensor | None = None,
        labels: torch.Tensor | None = None,
        use_cache: bool | None = False,
        output_attentions: bool | None = None,
        output_hidden_states: bool | None = None,
        return_dict: bool | None = None,
        cache_position: torch.Tensor | None = None,
        hidden_out_layers: Sequence[int] | None = None,
        **kwargs: Any,
    ) -> MiniOutput:
        """Computes the loss of one micro-batch: one mean over every label of every codebook.

        Args:
            input_ids: ``[batch, positions, 1 + rvq]`` int64.
            attention_mask: ``[batch, positions]`` bool, False on padding.
            labels: as ``input_ids``, not shifted; -100 is ignored, and so is the text's channel.

        The other arguments are the backbone's; the last two of them are accepted and not used.
        """
        if inputs_embeds is None:
            inputs_embeds = self.get_input_embeddings(input_ids)
        backbone = self.language_model(
            inputs_embeds=inputs_embeds,
            attention_mask=attention_mask,
            position_ids=position_ids,
            past_key_values=past_key_values,
            use_cache=use_cache,
            output_attentions=output_attentions,
            output_hidden_states=output_hidden_states,
            cache_position=cache_position,
            **kwargs,
        )
        scored = {} if labels is None else self._scored(backbone.last_hidden_state, labels[..., 1:])
        return MiniOutput(
            **scored,
            last_hidden_state=backbone.last_hidden_state,
            past_key_values=backbone.past_key_values,
            hidden_states=backbone.hidden_states,
            attentions=backbone.attentions,
        )

    def _scored(self, hidden: torch.Tensor, codes: torch.Tensor) -> dict[str, torch.Tensor]:
        """Returns the fields of the output that need labels; codes ``[batch, positions, rvq]``."""
        record, position = (codes != IGNORE_INDEX).any(dim=-1).nonzero(as_tuple=True)
        before, frames = hidden[record, (position - 1).clamp(min=0)], codes[record, position]
        logits = self.local_transformer(before, frames)
        loss = F.cross_entropy(logits.flatten(0, 1).float(), frames.flatten(), ignore_index=IGNORE_INDEX)
        return {"loss": loss, "local_logits": logits}
