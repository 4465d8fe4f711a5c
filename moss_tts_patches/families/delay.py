"""MOSS-TTS-Delay (8B, and 1.7B as MOSS-VoiceGenerator): a Qwen3 backbone with one head per channel on its output.

There is no depth model: codebook c of a frame is predicted c positions later, so every head reads the backbone's last
hidden state. Facts about upstream in this file are from ``moss_tts_delay/modeling_moss_tts.py`` and
``moss_tts_delay/finetuning/`` at commit 58b20a0.
"""

from __future__ import annotations

import copy
from collections.abc import Sequence
from typing import Any, ClassVar

import torch
from torch import nn

from ..data.rules import RecordRules
from ..loss.embedding import summed_embeddings
from ..loss.problem import IGNORE_INDEX, Channel, FrameLoss
from .family import (
    QWEN3_PROJECTIONS,
    TRAINER_SEAMS,
    Family,
    LossOutput,
    Seam,
    TrainingContext,
    check_parts,
    shrink_qwen3,
)

# The backbones of the two released sizes, as the model cards of Qwen3-8B and Qwen3-1.7B say.
_SIZES: dict[str, dict[str, int]] = {
    "8b": {
        "hidden_size": 4096,
        "intermediate_size": 12288,
        "num_hidden_layers": 36,
        "num_attention_heads": 32,
    },
    "1.7b": {
        "hidden_size": 2048,
        "intermediate_size": 6144,
        "num_hidden_layers": 28,
        "num_attention_heads": 16,
    },
}


class DelayFamily(Family):
    """See :class:`.family.Family`."""

    name: ClassVar[str] = "moss_tts_delay"
    trainer_seams: ClassVar[tuple[Seam, ...]] = (
        *TRAINER_SEAMS,
        Seam("MossTTSDelayModel"),
    )
    class_seams: ClassVar[tuple[Seam, ...]] = (
        Seam("from_pretrained"),
        Seam("gradient_checkpointing_enable"),
        Seam("_compute_input_embeddings", ("input_ids",)),
        Seam("forward", ("input_ids", "attention_mask", "labels", "channelwise_loss_weight")),
    )
    training_arguments: ClassVar[frozenset[str]] = frozenset(
        {"input_ids", "attention_mask", "labels", "channelwise_loss_weight"}
    )
    adapter_groups: ClassVar[dict[str, str]] = {
        "backbone": r"language_model\.layers\.\d+\." + QWEN3_PROJECTIONS,
        "audio_heads": r"lm_heads\.[1-9]\d*",
        "audio_embeddings": r"emb_ext\.\d+",
    }

    @classmethod
    def recognises(cls, namespace: dict[str, Any]) -> bool:
        # moss_tts_local's class has the same name and model_type; it predicts codes within a frame, this one does not.
        model_class = namespace.get("MossTTSDelayModel")
        return isinstance(model_class, type) and not hasattr(model_class, "_prepare_shifted_audio_inputs")

    def model_class(self, namespace: dict[str, Any]) -> type[nn.Module]:
        return namespace["MossTTSDelayModel"]

    def check_structure(self, model: Any) -> None:
        expected = {
            "language_model.layers": model.config.language_config.num_hidden_layers,
            "language_model.embed_tokens": None,
            "emb_ext": model.config.n_vq,
            "lm_heads": model.config.n_vq + 1,
        }
        check_parts(self.name, model, expected)

    def backbone(self, model: Any) -> nn.Module:
        return model.language_model

    def depth_model(self, model: Any) -> nn.Module | None:
        return None

    def unread_embeddings(self, model: Any) -> Sequence[tuple[nn.Module, str]]:
        return ()  # the backbone's own table embeds the text channel

    def record_rules(self, config: Any) -> RecordRules:
        codebooks = getattr(config, "n_vq", 32)
        # Prompt as moss_tts_local's. This family cleans texts: a line break or two ASCII characters can become one of
        # three bytes.
        return RecordRules(
            layout="speech",
            code_limits=(getattr(config, "audio_vocab_size", 1024),) * codebooks,
            block_extra=codebooks - 1,
            audio_start=getattr(config, "audio_start_token_id", 151652),
            audio_end=getattr(config, "audio_end_token_id", 151653),
            template_bytes=400,
            text_growth=3,
        )

    def training_output(self, model: Any, batch: dict[str, Any], context: TrainingContext) -> LossOutput:
        labels = batch["labels"]
        summary = context.summarise_labels(labels)
        hidden = self._backbone_hidden(model, batch, context)
        rows = hidden.reshape(-1, hidden.shape[-1]).index_select(0, summary.positions)
        frame_labels = labels.reshape(-1, labels.shape[-1]).index_select(0, summary.positions)
        problem = self.frame_loss(model, frame_labels, batch.get("channelwise_loss_weight"))
        loss, _ = context.engine.loss(problem, rows, context.loss_scale())
        context.expected_contributions = context.engine.expected_contributions(problem)
        return LossOutput(loss=loss)

    def _backbone_hidden(self, model: Any, batch: dict[str, Any], context: TrainingContext) -> torch.Tensor:
        """Returns ``[batch, positions, hidden]``; no key-value cache and none of the other 36 hidden states."""
        ids = batch["input_ids"]
        if context.direct and torch.is_grad_enabled():
            tables = [model.language_model.embed_tokens, *model.emb_ext]
            embeddings = summed_embeddings(tables, ids, context.engine.store)
        else:
            embeddings = model._compute_input_embeddings(ids)
        return model.language_model(
            inputs_embeds=embeddings, attention_mask=batch["attention_mask"], use_cache=False
        ).last_hidden_state

    def frame_loss(self, model: Any, labels: torch.Tensor, weights: Sequence[float] | None) -> FrameLoss:
        """Describes the loss over the supervised positions.

        Args:
            model: an instance of the model class.
            labels: ``[frames, channels]`` int64.
            weights: one per channel, or None for one mean over all labels.

        Raises:
            ValueError: as upstream does, on a wrong number of weights.

        Source: upstream ``MossTTSDelayModel.forward``: ``sum_c w_c * sum_c(losses) / max(1, labels_c) / sum(w)``, so a
        channel without labels adds nothing and keeps its weight; without weights the sum of all losses over the number
        of all labels. The last entry of an audio head is the pad code, which upstream masks with -inf.
        """
        channels = model.config.n_vq + 1
        counts = (labels != IGNORE_INDEX).sum(dim=0)
        if weights is None:
            coefficients = (1.0 / counts.sum().clamp(min=1)).expand(channels)
        elif len(weights) != channels:
            raise ValueError(f"channelwise_loss_weight: {len(weights)} values, expected {channels} (text + codebooks).")
        else:
            shares = torch.tensor(weights, dtype=torch.float32, device=labels.device)
            coefficients = shares / shares.sum() / counts.clamp(min=1)
        return FrameLoss(
            depth=None,
            lookups=(),
            channels=tuple(
                Channel(
                    name="text" if index == 0 else f"codebook {index}",
                    position=0,
                    adapter=None,
                    projection=head,
                    labels=labels[:, index],
                    classes=None if index == 0 else model.config.audio_vocab_size,
                )
                for index, head in enumerate(model.lm_heads)
            ),
            coefficients=coefficients,
            weights=None if weights is None else tuple(map(float, weights)),
        )

    def full_size_config(self, config_class: Any, size: str) -> Any:
        if size not in _SIZES:
            raise ValueError(f"{self.name} size {size!r}: expected one of {', '.join(_SIZES)}.")
        return config_class(
            language_config={
                "vocab_size": 151936,
                "num_key_value_heads": 8,
                "head_dim": 128,
                "max_position_embeddings": 40960,
                **_SIZES[size],
            }
        )

    def shrunken_config(self, config: Any) -> Any:
        small = copy.deepcopy(config)
        shrink_qwen3(small.language_config)
        small.hidden_size, small.vocab_size = small.language_config.hidden_size, small.language_config.vocab_size
        small.n_vq, small.audio_vocab_size, small.audio_pad_code, small.pad_token_id = 3, 11, 11, 0
        return small

    def sample_batch(self, config: Any, generator: torch.Generator) -> dict[str, Any]:
        batch, positions, prompt, codebooks = 2, 14, 4, config.n_vq
        text = torch.randint(1, config.vocab_size, (batch, positions + 1, 1), generator=generator)
        codes = torch.randint(0, config.audio_vocab_size, (batch, positions + 1, codebooks), generator=generator)
        frame = (
            torch.arange(positions + 1).unsqueeze(-1) - prompt - torch.arange(codebooks)
        )  # each codebook starts late
        codes = codes.masked_fill((frame < 0) | (frame > positions - prompt - codebooks), config.audio_pad_code)
        tokens = torch.cat([text, codes], dim=-1)
        attention_mask = torch.ones(batch, positions, dtype=torch.bool)
        attention_mask[0, :2] = False
        labels = tokens[:, 1:].clone()
        labels[:, : prompt - 1] = IGNORE_INDEX
        labels[..., 1:] = labels[..., 1:].masked_fill(labels[..., 1:] == config.audio_pad_code, IGNORE_INDEX)
        return {
            "input_ids": tokens[:, :-1],
            "attention_mask": attention_mask,
            "labels": labels,
            "channelwise_loss_weight": [1.0 + 0.5 * index for index in range(codebooks + 1)],
        }
