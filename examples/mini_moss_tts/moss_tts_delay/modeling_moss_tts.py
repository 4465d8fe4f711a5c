"""The miniature's delay model: MOSS-TTS-Delay's mathematics and weight names, for training only.

There is no depth transformer: codebook c of a frame stands c positions late, so one head per channel on the backbone's
last hidden state predicts them all. Nothing is saved here on purpose: every position goes through every head, all
hidden states and a key-value cache are kept. That is the cost the layer is there to remove.
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

from .configuration_moss_tts import MossTTSDelayConfig

IGNORE_INDEX = -100


@dataclass
class MiniOutput(ModelOutput):
    """What a forward pass returns; training reads ``loss`` alone.

    Attributes:
        loss: scalar.
        channel_losses: ``[channels]``, before weighting; 0 where a channel has no label.
        logits: one ``[batch, positions, entries]`` per channel.
        past_key_values, hidden_states, attentions: the backbone's.
    """

    loss: torch.Tensor | None = None
    channel_losses: torch.Tensor | None = None
    logits: list[torch.Tensor] | None = None
    past_key_values: Any = None
    hidden_states: tuple[torch.Tensor, ...] | None = None
    attentions: tuple[torch.Tensor, ...] | None = None


class MossTTSDelayModel(PreTrainedModel):
    """Backbone, one embedding per codebook beside its own, and one head per channel.

    Source: parts, weight names and loss as in upstream ``moss_tts_delay/modeling_moss_tts.py``, ``MossTTSDelayModel``.
    """

    config_class = MossTTSDelayConfig
    base_model_prefix = "model"
    supports_gradient_checkpointing = True
    _supports_sdpa = True
    _supports_flash_attn = True

    def __init__(self, config: MossTTSDelayConfig) -> None:
        super().__init__(config)
        width, codes = config.hidden_size, config.audio_vocab_size + 1
        self.language_model = Qwen3Model(config.language_config)
        # No padding index: the pad code's row is trained.
        self.emb_ext = nn.ModuleList(nn.Embedding(codes, width) for _ in range(config.n_vq))
        sizes = [config.vocab_size] + [codes] * config.n_vq
        self.lm_heads = nn.ModuleList(nn.Linear(width, size, bias=False) for size in sizes)
        self.post_init()

    def get_input_embeddings(self) -> nn.Module:
        return self.language_model.embed_tokens

    def set_input_embeddings(self, value: nn.Module) -> None:
        self.language_model.embed_tokens = value

    def get_output_embeddings(self) -> nn.Module:
        return self.lm_heads

    def _compute_input_embeddings(self, input_ids: torch.Tensor) -> torch.Tensor:
        """Returns the sum over channels, ``[batch, positions, hidden]``, of ids ``[batch, positions, channels]``."""
        tables = (self.get_input_embeddings(), *self.emb_ext)
        return sum(table(ids) for table, ids in zip(tables, input_ids.unbind(-1)))

    def forward(
        self,
        input_ids: torch.Tensor | None = None,
        attention_mask: torch.Tensor | None = None,
        position_ids: torch.Tensor | None = None,
        past_key_values: Any = None,
        inputs_embeds: torch.Tensor | None = None,
        labels: torch.Tensor | None = None,
        use_cache: bool | None = None,
        output_attentions: bool | None = None,
        cache_position: torch.Tensor | None = None,
        hidden_out_layers: Sequence[int] | None = None,
        channelwise_loss_weight: Sequence[float] | None = None,
        **kwargs: Any,
    ) -> MiniOutput:
        """Computes the loss of one micro-batch.

        Args:
            input_ids: ``[batch, positions, channels]`` int64.
            attention_mask: ``[batch, positions]`` bool, False on padding.
            labels: as ``input_ids``, already shifted by one position; -100 is ignored.
            hidden_out_layers: which hidden state each head reads; the last one if None.
            channelwise_loss_weight: one weight per channel; one mean over all labels if None.

        The other arguments are the backbone's.

        Raises:
            ValueError: a wrong number of channels or of weights.
        """
        channels = len(self.lm_heads)
        if input_ids is None or input_ids.shape[-1] != channels:
            raise ValueError(f"input_ids of shape {getattr(input_ids, 'shape', None)}; expected {channels} channels")
        if inputs_embeds is None:
            inputs_embeds = self._compute_input_embeddings(input_ids)
        backbone = self.language_model(
            inputs_embeds=inputs_embeds,
            attention_mask=attention_mask,
            position_ids=position_ids,
            past_key_values=past_key_values,
            use_cache=use_cache,
            output_attentions=output_attentions,
            output_hidden_states=True,
            cache_position=cache_position,
            **kwargs,
        )
        read = [backbone.last_hidden_state] * channels
        if hidden_out_layers is not None:
            read = [backbone.hidden_states[layer] for layer in hidden_out_layers]
        logits = [head(hidden) for head, hidden in zip(self.lm_heads, read)]
        for scores in logits[1:]:
            scores[..., -1] = float("-inf")  # the pad code is read, and never predicted
        loss, losses = (None, None) if labels is None else weighted_loss(logits, labels, channelwise_loss_weight)
        return MiniOutput(
            loss=loss,
            channel_losses=losses,
            logits=logits,
            past_key_values=backbone.past_key_values,
            hidden_states=backbone.hidden_states,
            attentions=backbone.attentions,
        )


def weighted_loss(
    logits: Sequence[torch.Tensor], labels: torch.Tensor, weights: Sequence[float] | None
) -> tuple[torch.Tensor, torch.Tensor]:
    """Returns the loss and each channel's mean, which is 0 where a channel has no label.

    With weights, an empty channel keeps its weight in the denominator; without, the loss is one mean over all labels.

    Source: upstream ``moss_tts_delay/modeling_moss_tts.py``, ``MossTTSDelayModel.forward``.

    Raises:
        ValueError: another number of weights than channels.
    """
    sums = torch.stack(
        [
            F.cross_entropy(scores.flatten(0, 1), targets.flatten(), ignore_index=IGNORE_INDEX, reduction="sum")
            for scores, targets in zip(logits, labels.unbind(-1))
        ]
    )
    counts = (labels != IGNORE_INDEX).sum(dim=(0, 1))
    means = sums / counts.clamp(min=1)
    if weights is None:
        return sums.sum() / counts.sum().clamp(min=1), means
    if len(weights) != len(sums):
        raise ValueError(f"channelwise_loss_weight: {len(weights)} values, expected {len(sums)}")
    shares = torch.tensor(weights).to(means)
    return (shares * means).sum() / shares.sum(), means
