"""The miniature's model: MOSS-TTS-Local's mathematics and weight names, for training only.

One position of a sequence is one text token plus ``n_vq`` audio codes. A backbone reads the sum of their embeddings and
yields one hidden vector a position. A small depth transformer then runs over the ``channels = 1 + n_vq`` entries of a
single position: it reads that hidden vector followed by the embeddings of the position's own labels, and its output at
entry c goes through an adapter and a head of its own to predict channel c.

Nothing is saved here on purpose: every position runs the depth transformer, labelled or not, every channel's logits
are kept and returned, and the backbone fills a key-value cache. That is the cost the layer is there to remove.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn
from transformers import PreTrainedModel
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.modeling_outputs import BaseModelOutputWithPast
from transformers.models.qwen3.configuration_qwen3 import Qwen3Config
from transformers.models.qwen3.modeling_qwen3 import Qwen3Attention, Qwen3Model
from transformers.utils import ModelOutput

from .configuration_moss_tts import MossTTSDelayConfig

IGNORE_INDEX = -100


@dataclass
class MiniOutput(ModelOutput):
    """What a forward pass returns; training reads ``loss`` alone.

    Attributes:
        loss: scalar.
        loss_all: ``[channels]`` float32, before weighting.
        logits: ``[batch, positions, vocabulary]`` of the text channel.
        logits_all: one such tensor per channel.
        past_key_values, hidden_states, attentions: the backbone's.
    """

    loss: torch.Tensor | None = None
    logits: torch.Tensor | None = None
    loss_all: torch.Tensor | None = None
    logits_all: list[torch.Tensor] | None = None
    past_key_values: Any = None
    hidden_states: tuple[torch.Tensor, ...] | None = None
    attentions: tuple[torch.Tensor, ...] | None = None


class ChannelNorm(nn.Module):
    """Scales vectors to unit mean square, in the input's own dtype.

    Source: Zhang and Sennrich 2019, equation 4, with the 1e-6 of upstream's ``MossTTSRMSNorm``.
    """

    epsilon = 1e-6

    def __init__(self, width: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(width))

    def forward(self, features: torch.Tensor) -> torch.Tensor:
        inverse = torch.rsqrt(features.pow(2).mean(-1, keepdim=True) + self.epsilon)
        return features * inverse * self.weight


class Adapter(nn.Module):
    """A SwiGLU block that changes the width (Shazeer 2020, equation 6)."""

    def __init__(self, width_in: int, width_inner: int, width_out: int) -> None:
        super().__init__()
        self.gate_proj = nn.Linear(width_in, width_inner, bias=False)
        self.up_proj = nn.Linear(width_in, width_inner, bias=False)
        self.down_proj = nn.Linear(width_inner, width_out, bias=False)

    def forward(self, features: torch.Tensor) -> torch.Tensor:
        return self.down_proj(F.silu(self.gate_proj(features)) * self.up_proj(features))


class DepthAttention(Qwen3Attention):
    """Causal attention over the channels of one position: their order is told by causality alone."""

    def forward(self, hidden_states: torch.Tensor, **_from_the_layer: Any) -> tuple[torch.Tensor, None]:  # type: ignore[override]
        by_head = (*hidden_states.shape[:-1], -1, self.head_dim)
        attended, _ = sdpa_attention_forward(
            self,
            self.q_norm(self.q_proj(hidden_states).view(by_head)).transpose(1, 2),
            self.k_norm(self.k_proj(hidden_states).view(by_head)).transpose(1, 2),
            self.v_proj(hidden_states).view(by_head).transpose(1, 2),
            attention_mask=None,
            is_causal=True,
            scaling=self.scaling,
            dropout=(self.attention_dropout or 0.0) if self.training else 0.0,
        )
        return self.o_proj(attended.flatten(-2)), None


class DepthTransformer(Qwen3Model):
    """Qwen3 layers without a table of tokens and without rotary embedding."""

    def __init__(self, config: Qwen3Config) -> None:
        super().__init__(config)
        del self.embed_tokens, self.rotary_emb
        for index, layer in enumerate(self.layers):
            layer.self_attn = DepthAttention(config, index)
        self.post_init()

    def forward(  # type: ignore[override]
        self, input_ids: None = None, attention_mask: None = None, inputs_embeds: torch.Tensor | None = None
    ) -> BaseModelOutputWithPast:
        """Runs over ``inputs_embeds`` ``[rows, channels, local hidden]``; a row is one position of one sequence.

        Raises:
            ValueError: anything else was given: there is no table to look ids up, and rows are never padded.
        """
        if input_ids is not None or attention_mask is not None or inputs_embeds is None:
            raise ValueError("the depth transformer takes inputs_embeds alone, neither input_ids nor attention_mask")
        hidden = inputs_embeds
        for layer in self.layers:
            hidden = layer(hidden, use_cache=False)
        return BaseModelOutputWithPast(last_hidden_state=self.norm(hidden))


class MiniPreTrainedModel(PreTrainedModel):
    """What transformers wants to know of both classes below."""

    config_class = MossTTSDelayConfig
    base_model_prefix = "model"
    supports_gradient_checkpointing = True
    _supports_sdpa = True
    _supports_flash_attn = True


class MiniBackbone(MiniPreTrainedModel):
    """Sums the channels' embeddings and runs the backbone over the sequence."""

    def __init__(self, config: MossTTSDelayConfig) -> None:
        super().__init__(config)
        width, codes = config.hidden_size, config.audio_vocab_size + 1
        tables = [nn.Embedding(config.vocab_size, width, config.pad_token_id)]
        tables += [nn.Embedding(codes, width, config.audio_pad_code) for _ in range(config.n_vq)]
        self.embedding_list = nn.ModuleList(tables)
        self.language_model = Qwen3Model(config.language_config)
        self.post_init()

    def get_input_embeddings(self) -> nn.Module:
        return self.embedding_list[0]

    def set_input_embeddings(self, value: nn.Module) -> None:
        self.embedding_list[0] = value

    def forward(
        self, input_ids: torch.Tensor | None = None, inputs_embeds: torch.Tensor | None = None, **backbone: Any
    ) -> BaseModelOutputWithPast:
        """Runs over ``input_ids`` ``[batch, positions, channels]`` or ready ``[batch, positions, hidden]`` sums.

        Raises:
            ValueError: both or neither of the two inputs, or another number of channels than the config says.
        """
        if (input_ids is None) == (inputs_embeds is None):
            raise ValueError("exactly one of input_ids and inputs_embeds is needed")
        if input_ids is not None:
            if input_ids.shape[-1] != len(self.embedding_list):
                raise ValueError(f"input_ids has {input_ids.shape[-1]} channels, expected {len(self.embedding_list)}")
            inputs_embeds = sum(table(ids) for table, ids in zip(self.embedding_list, input_ids.unbind(-1)))
        return self.language_model(inputs_embeds=inputs_embeds, **backbone)


class MossTTSDelayModel(MiniPreTrainedModel):
    """Backbone, depth transformer and one head per channel.

    Source: parts, weight names and loss as in upstream ``moss_tts_local/modeling_moss_tts.py``, ``MossTTSDelayModel``.
    """

    def __init__(self, config: MossTTSDelayConfig) -> None:
        super().__init__(config)
        self.channels = 1 + config.n_vq
        self.weights = [1] * self.channels
        width, local, inner = config.hidden_size, config.local_hidden_size, config.additional_mlp_ffn_hidden_size
        sizes = [config.vocab_size] + [config.audio_vocab_size + 1] * config.n_vq
        self.model = MiniBackbone(config)
        self.local_transformer = DepthTransformer(config.depth_config())
        self.speech_embedding_to_local_mlp = Adapter(width, inner, local)
        self.local_to_speech_embedding_mlps = nn.ModuleList(Adapter(local, inner, width) for _ in sizes)
        self.layer_norm_before_lm_heads = nn.ModuleList(ChannelNorm(width) for _ in sizes)
        self.lm_heads = nn.ModuleList(nn.Linear(width, size, bias=False) for size in sizes)
        self.post_init()
        self._freeze_unused_qwen_embeddings()
        self.register_load_state_dict_post_hook(_freeze_after_loading)

    @classmethod
    def from_pretrained(cls, *args: Any, **kwargs: Any) -> MossTTSDelayModel:
        model = super().from_pretrained(*args, **kwargs)
        model._freeze_unused_qwen_embeddings()
        return model

    def _freeze_unused_qwen_embeddings(self) -> None:
        """The backbone is fed sums of ``embedding_list``; its own table is in the file and never read."""
        self.model.language_model.embed_tokens.requires_grad_(False)

    def get_input_embeddings(self) -> nn.Module:
        return self.model.get_input_embeddings()

    def set_input_embeddings(self, value: nn.Module) -> None:
        self.model.set_input_embeddings(value)

    def get_output_embeddings(self) -> nn.Module:
        return self.lm_heads[0]

    def set_output_embeddings(self, new_embeddings: nn.Module) -> None:
        self.lm_heads[0] = new_embeddings

    def _prepare_shifted_audio_inputs(self, label_ids: torch.Tensor) -> torch.Tensor:
        """Returns the depth transformer's inputs after the first: ``[n_vq, batch, positions, hidden]``.

        Entry c + 1 reads the label of channel c, so the last codebook's label is never read.
        """
        tables = self.model.embedding_list
        return torch.stack([embed_labels(tables[c], label_ids[..., c]) for c in range(self.channels - 1)])

    def forward(
        self,
        input_ids: torch.Tensor | None = None,
        attention_mask: torch.Tensor | None = None,
        position_ids: torch.Tensor | None = None,
        past_key_values: Any = None,
        inputs_embeds: torch.Tensor | None = None,
        labels: torch.Tensor | None = None,
        channelwise_loss_weight: Sequence[float] | None = None,
        use_cache: bool | None = None,
        output_attentions: bool | None = None,
        output_hidden_states: bool | None = None,
        return_dict: bool | None = None,
        cache_position: torch.Tensor | None = None,
        **kwargs: Any,
    ) -> MiniOutput:
        """Computes the loss of one micro-batch.

        Args:
            input_ids: ``[batch, positions, channels]`` int64.
            attention_mask: ``[batch, positions]`` bool, False on padding.
            labels: as ``input_ids``, already shifted by one position; -100 is ignored.
            channelwise_loss_weight: one weight per channel, equal ones if None.

        The other arguments are the backbone's; ``return_dict`` is accepted and the result is always a ModelOutput.

        Raises:
            ValueError: a wrong number of weights, or weights without a positive sum.
        """
        backbone = self.model(
            input_ids=input_ids,
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
        scored = {} if labels is None else self._scored(backbone.last_hidden_state, labels, channelwise_loss_weight)
        return MiniOutput(
            **scored,
            past_key_values=backbone.past_key_values,
            hidden_states=backbone.hidden_states,
            attentions=backbone.attentions,
        )

    def _scored(self, hidden: torch.Tensor, labels: torch.Tensor, weights: Sequence[float] | None) -> dict[str, Any]:
        """Returns the fields of the output that need labels; hidden ``[batch, positions, hidden]``."""
        logits = self._channel_logits(hidden, labels)
        losses = channel_losses(logits, labels)
        loss = (self._shares(weights).to(losses) * losses).sum()
        return {"loss": loss, "loss_all": losses, "logits": logits[0], "logits_all": logits}

    def _channel_logits(self, hidden: torch.Tensor, labels: torch.Tensor) -> list[torch.Tensor]:
        """Runs the depth transformer over every position; hidden ``[batch, positions, hidden]``."""
        entries = torch.cat([hidden.unsqueeze(0), self._prepare_shifted_audio_inputs(labels)])
        rows = self.speech_embedding_to_local_mlp(entries).flatten(1, 2).transpose(0, 1)  # [rows, channels, local]
        by_channel = self.local_transformer(inputs_embeds=rows).last_hidden_state.unbind(1)
        parts = zip(by_channel, self.local_to_speech_embedding_mlps, self.layer_norm_before_lm_heads, self.lm_heads)
        return [head(norm(adapter(x))).view(*labels.shape[:2], -1) for x, adapter, norm, head in parts]

    def _shares(self, weights: Sequence[float] | None) -> torch.Tensor:
        values = torch.tensor(self.weights if weights is None else weights, dtype=torch.float64)
        if len(values) != self.channels or values.sum() <= 0:
            raise ValueError(
                f"channelwise_loss_weight: got {values.tolist()}, expected {self.channels} values with a positive sum"
            )
        return values / values.sum()


def _freeze_after_loading(model: MossTTSDelayModel, _incompatible_keys: Any) -> None:
    model._freeze_unused_qwen_embeddings()


def embed_labels(table: nn.Embedding, labels: torch.Tensor) -> torch.Tensor:
    """Looks labels up, with a zero vector where there is none; labels ``[...]`` int64, result ``[..., hidden]``."""
    ignored = labels == IGNORE_INDEX
    return table(labels.masked_fill(ignored, 0)).masked_fill(ignored.unsqueeze(-1), 0.0)


def channel_losses(logits: Sequence[torch.Tensor], labels: torch.Tensor) -> torch.Tensor:
    """Returns each channel's mean cross entropy over its labels, ``[channels]`` float32; nan where it has none.

    Source: upstream ``moss_tts_local/modeling_moss_tts.py``, ``MossTTSDelayModel.forward``.
    """
    losses = [
        F.cross_entropy(scores.flatten(0, 1).float(), targets.flatten(), ignore_index=IGNORE_INDEX)
        for scores, targets in zip(logits, labels.unbind(-1))
    ]
    return torch.stack(losses)
