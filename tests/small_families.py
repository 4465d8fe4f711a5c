"""Small models of our own with the parts and the loss rules of the delay and realtime families, in plain torch.

The real classes are in the checkout that ``MOSS_TTS_REPO`` names (``test_upstream_delay.py``,
``test_upstream_realtime.py``); these need none, so that the offline suite covers the same rules.
"""

from __future__ import annotations

from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn
from transformers.models.qwen3.configuration_qwen3 import Qwen3Config
from transformers.models.qwen3.modeling_qwen3 import Qwen3Model

from moss_tts_patches.families.family import LossOutput

IGNORE_INDEX = -100
# Any size will do: the family shrinks it.
LANGUAGE = {"vocab_size": 61, "hidden_size": 32, "num_hidden_layers": 2, "head_dim": 8}


class SmallConfig(SimpleNamespace):
    """The fields that the two families read."""

    def __init__(self, language_config: dict[str, Any] | None = None) -> None:
        language = Qwen3Config(**(language_config or LANGUAGE))
        local = Qwen3Config(**LANGUAGE)
        super().__init__(language_config=language, local_config=local, vocab_size=61, hidden_size=32)


class SmallModel(nn.Module):
    """What every class of upstream offers to a trainer."""

    @classmethod
    def from_pretrained(cls, *arguments: Any, **options: Any) -> Any:
        """A seam; nothing is loaded here."""
        raise NotImplementedError

    def gradient_checkpointing_enable(self) -> None:
        """A seam."""
        raise NotImplementedError


class SmallDelay(SmallModel):
    """One head per channel on the backbone's output; the last entry of an audio head is masked."""

    def __init__(self, config: Any) -> None:
        super().__init__()
        self.config = config
        width, codes = config.language_config.hidden_size, config.audio_vocab_size + 1
        self.language_model = Qwen3Model(config.language_config)
        self.emb_ext = nn.ModuleList(nn.Embedding(codes, width) for _ in range(config.n_vq))
        sizes = [config.language_config.vocab_size] + [codes] * config.n_vq
        self.lm_heads = nn.ModuleList(nn.Linear(width, size, bias=False) for size in sizes)

    def _compute_input_embeddings(self, input_ids: torch.Tensor) -> torch.Tensor:
        tables = [self.language_model.embed_tokens, *self.emb_ext]
        return sum(table(ids) for table, ids in zip(tables, input_ids.unbind(-1)))

    def forward(
        self,
        input_ids: torch.Tensor,
        attention_mask: torch.Tensor,
        labels: torch.Tensor,
        channelwise_loss_weight: Sequence[float] | None = None,
    ) -> LossOutput:
        embeddings = self._compute_input_embeddings(input_ids)
        hidden = self.language_model(inputs_embeds=embeddings, attention_mask=attention_mask).last_hidden_state
        pairs = zip(self.lm_heads, labels.unbind(-1))
        sums = torch.stack(
            [self.summed(head(hidden), targets, audio=index > 0) for index, (head, targets) in enumerate(pairs)]
        )
        counts = (labels != IGNORE_INDEX).sum(dim=(0, 1))
        if channelwise_loss_weight is None:
            return LossOutput(loss=sums.sum() / counts.sum())
        weights = torch.tensor(channelwise_loss_weight)
        return LossOutput(loss=(weights * sums / counts.clamp(min=1)).sum() / weights.sum())

    @staticmethod
    def summed(logits: torch.Tensor, targets: torch.Tensor, *, audio: bool) -> torch.Tensor:
        if audio:
            logits = logits[..., :-1]
        return F.cross_entropy(logits.flatten(0, 1), targets.flatten(), ignore_index=IGNORE_INDEX, reduction="sum")


class SmallRealtime(SmallModel):
    """A depth transformer with embeddings of its own, on the hidden state before each labelled position."""

    def __init__(self, config: Any) -> None:
        super().__init__()
        self.config = config
        width, codes, pad = config.language_config.hidden_size, config.audio_vocab_size, config.audio_pad_token
        tables = [nn.Embedding(config.language_config.vocab_size, width, config.language_config.pad_token_id)]
        tables += [nn.Embedding(codes, width, pad) for _ in range(config.rvq)]
        self.embed_tokens = nn.ModuleList(tables)
        self.language_model = Qwen3Model(config.language_config)
        self.local_transformer = nn.Module()
        self.local_transformer.model = Qwen3Model(config.local_config)
        self.local_transformer.model.embed_tokens = nn.ModuleList(
            nn.Embedding(codes, width, pad) for _ in range(config.rvq - 1)
        )
        with torch.no_grad():
            for table in self.local_transformer.model.embed_tokens:
                table.weight[pad] = 0.1  # a trained pad code is no zero vector
        self.local_transformer.local_lm_heads = nn.ModuleList(
            nn.Linear(width, codes, bias=False) for _ in range(config.rvq)
        )

    def get_input_embeddings(self, input_ids: torch.Tensor) -> torch.Tensor:
        return sum(table(ids) for table, ids in zip(self.embed_tokens, input_ids.unbind(-1)))

    def forward(self, input_ids: torch.Tensor, attention_mask: torch.Tensor, labels: torch.Tensor) -> LossOutput:
        embeddings = self.get_input_embeddings(input_ids)
        hidden = self.language_model(inputs_embeds=embeddings, attention_mask=attention_mask).last_hidden_state
        codes = labels[..., 1:]
        record, position = (codes != IGNORE_INDEX).any(dim=-1).nonzero(as_tuple=True)
        before, codes = hidden[record, (position - 1).clamp(min=0)], codes[record, position]
        depth = self.local_transformer
        read = codes.masked_fill(codes == IGNORE_INDEX, self.config.audio_pad_token)
        inputs = [before] + [table(ids) for table, ids in zip(depth.model.embed_tokens, read.unbind(-1))]
        outputs = depth.model(inputs_embeds=torch.stack(inputs, dim=1)).last_hidden_state
        logits = torch.stack([head(outputs[:, index]) for index, head in enumerate(depth.local_lm_heads)], dim=1)
        return LossOutput(loss=F.cross_entropy(logits.flatten(0, 1), codes.flatten(), ignore_index=IGNORE_INDEX))
