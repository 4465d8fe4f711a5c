"""The miniature's v1.5 model: MOSS-TTS-Local v1.5's mathematics and weight names, for training only.

It returns hidden states; the loss is in the trainer, which reads the depth transformer, the heads and the embeddings
tied to them from here. A checkpoint brings this file along, and the trainer loads it from there.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from transformers import PreTrainedModel
from transformers.utils import ModelOutput

from .configuration_moss_tts import MossTTSLocalConfig
from .gpt2_decoder import DepthTransformer
from .qwen3_decoder import Backbone


@dataclass
class MossTTSLocalOutput(ModelOutput):
    """What a forward pass returns.

    Attributes:
        last_hidden_state: ``[batch, positions, hidden]``, zero on padding.
    """

    last_hidden_state: torch.Tensor | None = None


class MossTTSLocalModel(PreTrainedModel):
    """Backbone, depth transformer, and heads that share their weights with the embeddings.

    Source: parts and weight names as in upstream ``moss_tts_local_v1.5/modeling_moss_tts.py``, ``MossTTSLocalModel``.
    """

    config_class = MossTTSLocalConfig
    base_model_prefix = "transformer"
    supports_gradient_checkpointing = True
    _supports_sdpa = True
    _supports_flash_attn = True

    def __init__(self, config: MossTTSLocalConfig) -> None:
        super().__init__(config)
        tied = {f"audio_lm_heads.{index}.weight": f"audio_embeddings.{index}.weight" for index in range(config.n_vq)}
        self._tied_weights_keys = {"text_lm_head.weight": "transformer.embed_tokens.weight", **tied}
        width, sizes = config.hidden_size, config.audio_codebook_sizes
        self.transformer = Backbone(config.qwen3_config, config.attn_implementation, config.pad_token_id)
        self.local_transformer = DepthTransformer(
            config.gpt2_config,
            getattr(config, "local_transformer_layers", config.gpt2_config.n_layer),
            config.local_transformer_attn_implementation,
        )
        self.audio_embeddings = nn.ModuleList(nn.Embedding(size, width) for size in sizes)
        self.text_lm_head = nn.Linear(width, config.vocab_size, bias=False)
        self.audio_lm_heads = nn.ModuleList(nn.Linear(width, size, bias=False) for size in sizes)
        self.local_text_lm_head = nn.Linear(width, 2, bias=False) if self._use_binary_local_text_head() else None
        self.post_init()
        self.tie_weights()

    def tie_weights(self, *_: Any, **__: Any) -> None:
        self.text_lm_head.weight = self.transformer.embed_tokens.weight
        for table, head in zip(self.audio_embeddings, self.audio_lm_heads):
            head.weight = table.weight

    def get_input_embeddings(self) -> nn.Module:
        return self.transformer.embed_tokens

    def get_output_embeddings(self) -> nn.Module:
        return self.text_lm_head

    def _use_binary_local_text_head(self) -> bool:
        return self.config.local_text_head_mode == "binary"

    def _global_hidden_to_local(self, hidden_states: torch.Tensor) -> torch.Tensor:
        return hidden_states  # both stacks are equally wide

    def _input_embeddings(self, input_ids: torch.Tensor) -> torch.Tensor:
        """Sums the channels' embeddings; a pad code adds nothing."""
        text, *codes = input_ids.unbind(-1)
        summed = self.transformer.embed_tokens(text)
        for table, ids in zip(self.audio_embeddings, codes):
            absent = ids == self.config.audio_pad_token_id
            summed = summed + table(ids.masked_fill(absent, 0)).masked_fill(absent.unsqueeze(-1), 0.0)
        return summed

    def forward(
        self,
        input_ids: torch.Tensor | None = None,
        attention_mask: torch.Tensor | None = None,
        position_ids: torch.Tensor | None = None,
        past_key_values: Any = None,
        inputs_embeds: torch.Tensor | None = None,
        use_cache: bool | None = None,
        output_attentions: bool | None = None,
        output_hidden_states: bool | None = None,
        return_dict: bool | None = True,
        **kwargs: Any,
    ) -> MossTTSLocalOutput:
        """Runs the backbone.

        Args:
            input_ids: ``[batch, positions, 1 + n_vq]`` int64, or ``inputs_embeds`` ``[batch, positions, hidden]``.
            attention_mask: ``[batch, positions]`` bool, False on padding.

        The other arguments are upstream's; training leaves them at their defaults, which is all there is here.
        """
        if inputs_embeds is None:
            inputs_embeds = self._input_embeddings(input_ids)
        return MossTTSLocalOutput(last_hidden_state=self.transformer(inputs_embeds, attention_mask, position_ids))
