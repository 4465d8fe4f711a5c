"""MOSS-TTS-Local: a Qwen3 backbone, a depth transformer over one frame's codebooks, an adapter and a head for each.

Facts about upstream in this file are from ``moss_tts_local/modeling_moss_tts.py`` and ``moss_tts_local/finetuning/``
at commit 58b20a0.
"""

from __future__ import annotations

import copy
from collections.abc import Sequence
from typing import Any, ClassVar

import torch
from torch import nn

from ..data.rules import RecordRules
from ..loss.embedding import summed_embeddings
from ..loss.problem import IGNORE_INDEX, Channel, FrameLoss, Lookup, Stage
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


class LocalFamily(Family):
    """See :class:`.family.Family`."""

    name: ClassVar[str] = "moss_tts_local"
    trainer_seams: ClassVar[tuple[Seam, ...]] = (
        *TRAINER_SEAMS,
        Seam("MossTTSDelayModel"),
    )
    class_seams: ClassVar[tuple[Seam, ...]] = (
        Seam("from_pretrained"),
        Seam("gradient_checkpointing_enable"),
        Seam("_prepare_shifted_audio_inputs", ("label_ids",)),
        Seam("_freeze_unused_qwen_embeddings"),
        Seam("forward", ("input_ids", "attention_mask", "labels", "channelwise_loss_weight")),
    )

    training_arguments: ClassVar[frozenset[str]] = frozenset(
        {"input_ids", "attention_mask", "labels", "channelwise_loss_weight"}
    )
    adapter_groups: ClassVar[dict[str, str]] = {
        "backbone": r"model\.language_model\.layers\.\d+\." + QWEN3_PROJECTIONS,
        "depth": r"local_transformer\.layers\.\d+\." + QWEN3_PROJECTIONS,
        "adapters": r"(speech_embedding_to_local_mlp|local_to_speech_embedding_mlps\.\d+)\.(gate|up|down)_proj",
        "audio_heads": r"lm_heads\.[1-9]\d*",
        "audio_embeddings": r"model\.embedding_list\.[1-9]\d*",
    }

    @classmethod
    def recognises(cls, namespace: dict[str, Any]) -> bool:
        # The delay family's class has the same name and model_type; only this one predicts codes within a frame.
        model_class = namespace.get("MossTTSDelayModel")
        return isinstance(model_class, type) and hasattr(model_class, "_prepare_shifted_audio_inputs")

    def model_class(self, namespace: dict[str, Any]) -> type[nn.Module]:
        return namespace["MossTTSDelayModel"]

    def check_structure(self, model: Any) -> None:
        channels = model.config.n_vq + 1
        expected = {
            "model.embedding_list": channels,
            "model.language_model.layers": model.config.language_config.num_hidden_layers,
            "model.language_model.embed_tokens": None,
            "local_transformer.layers": model.config.local_num_layers,
            "speech_embedding_to_local_mlp": None,
            "local_to_speech_embedding_mlps": channels,
            "layer_norm_before_lm_heads": channels,
            "lm_heads": channels,
        }
        check_parts(self.name, model, expected)

    def backbone(self, model: Any) -> nn.Module:
        return model.model.language_model

    def depth_model(self, model: Any) -> nn.Module | None:
        return model.local_transformer

    def unread_embeddings(self, model: Any) -> Sequence[tuple[nn.Module, str]]:
        # The backbone is always called with inputs_embeds; its own table only has to be in the checkpoint.
        return ((model.model.language_model, "embed_tokens"),)

    def record_rules(self, config: Any) -> RecordRules:
        # Both turns of a record without any field are 259 bytes; a checkpoint's chat template may add to that.
        return RecordRules(
            layout="speech",
            code_limits=(getattr(config, "audio_vocab_size", 1024),) * getattr(config, "n_vq", 32),
            audio_start=getattr(config, "audio_start_token_id", 151652),
            audio_end=getattr(config, "audio_end_token_id", 151653),
            template_bytes=400,
        )

    def training_output(self, model: Any, batch: dict[str, Any], context: TrainingContext) -> LossOutput:
        labels = batch["labels"]
        summary = context.summarise_labels(labels)
        hidden = self._backbone_hidden(model, batch, context)
        rows = hidden.reshape(-1, hidden.shape[-1]).index_select(0, summary.positions)
        frame_labels = labels.reshape(-1, labels.shape[-1]).index_select(0, summary.positions)
        weights = batch.get("channelwise_loss_weight")
        problem = self.frame_loss(model, frame_labels, model.weights if weights is None else weights)
        loss, _ = context.engine.loss(problem, rows, context.loss_scale())
        context.expected_contributions = self._expected_contributions(model, problem, context)
        return LossOutput(loss=self._with_empty_channels(loss, summary.empty_channels, context))

    def _backbone_hidden(self, model: Any, batch: dict[str, Any], context: TrainingContext) -> torch.Tensor:
        """Returns ``[batch, positions, hidden]``; no key-value cache, nothing else kept."""
        if context.direct and torch.is_grad_enabled():
            embeddings = summed_embeddings(list(model.model.embedding_list), batch["input_ids"], context.engine.store)
            inputs = {"input_ids": None, "inputs_embeds": embeddings}
        else:
            inputs = {"input_ids": batch["input_ids"], "inputs_embeds": None}
        return model.model(**inputs, attention_mask=batch["attention_mask"], use_cache=False).last_hidden_state

    def frame_loss(self, model: Any, labels: torch.Tensor, weights: Sequence[float]) -> FrameLoss:
        """Describes the loss over the supervised frames.

        Args:
            model: an instance of the model class.
            labels: ``[frames, channels]`` int64.
            weights: one per channel.

        Raises:
            ValueError: as upstream does, on a wrong number of weights or a sum that is not positive.

        Source: upstream ``MossTTSDelayModel.forward``: per channel the mean over its labels, then
        ``sum_c w_c / sum(w) * mean_c``; the text head reads position 0, codebook c position c.
        """
        channels = model.config.n_vq + 1
        if len(weights) != channels:
            raise ValueError(f"channelwise_loss_weight: {len(weights)} values, expected {channels} (text + codebooks).")
        if sum(weights) <= 0:
            raise ValueError("channelwise_loss_weight: the values must have a positive sum.")
        shares = torch.tensor([float(w) / float(sum(weights)) for w in weights], device=labels.device)
        counts = (labels != IGNORE_INDEX).sum(dim=0).clamp(min=1)
        return FrameLoss(
            depth=Stage(
                lambda inputs: model.local_transformer(
                    input_ids=None, attention_mask=None, inputs_embeds=model.speech_embedding_to_local_mlp(inputs)
                )[0],
                (model.speech_embedding_to_local_mlp, model.local_transformer),
            ),
            lookups=tuple(
                Lookup(model.model.embedding_list[channel], labels[:, channel], position=channel + 1)
                for channel in range(channels - 1)
            ),
            channels=tuple(self._channel(model, index, labels[:, index]) for index in range(channels)),
            coefficients=shares / counts,
            positions=channels,
            weights=tuple(map(float, weights)),
        )

    @staticmethod
    def _channel(model: Any, index: int, labels: torch.Tensor) -> Channel:
        adapter, norm = model.local_to_speech_embedding_mlps[index], model.layer_norm_before_lm_heads[index]
        return Channel(
            name="text" if index == 0 else f"codebook {index}",
            position=index,
            adapter=Stage(lambda features: norm(adapter(features)), (adapter, norm)),
            projection=model.lm_heads[index],
            labels=labels,
        )

    @staticmethod
    def _expected_contributions(model: Any, problem: FrameLoss, context: TrainingContext) -> dict[nn.Parameter, int]:
        """Tables are read by the backbone and, all but the last, by the depth model: one contribution each."""
        expected = context.engine.expected_contributions(problem)
        if not context.direct:
            return expected
        return {
            parameter: 1 + expected.get(parameter, 0)
            for parameter in model.model.embedding_list.parameters()
            if parameter.requires_grad
        }

    @staticmethod
    def _with_empty_channels(
        loss: torch.Tensor, empty_channels: tuple[int, ...], context: TrainingContext
    ) -> torch.Tensor:
        """Upstream's mean over no label is nan; its gradients are finite and equal to ours either way."""
        if not empty_channels:
            return loss
        if not context.finite_empty_channels:
            return loss + torch.full_like(loss, float("nan")).detach()
        context.say_once(
            f"correction=empty_channel_loss channels={','.join(map(str, empty_channels))} have no label in a "
            "micro-batch: left out of the printed loss (upstream prints nan), gradients are upstream's"
        )
        return loss

    def full_size_config(self, config_class: Any, size: str) -> Any:
        # Qwen3-1.7B as its model card says; everything else is the config class's own default.
        if size != "1.7b":
            raise ValueError(f"{self.name} size {size!r}: expected 1.7b.")
        return config_class(
            language_config={
                "vocab_size": 151936,
                "hidden_size": 2048,
                "intermediate_size": 6144,
                "num_hidden_layers": 28,
                "num_attention_heads": 16,
                "num_key_value_heads": 8,
                "head_dim": 128,
                "max_position_embeddings": 40960,
            }
        )

    def shrunken_config(self, config: Any) -> Any:
        small = copy.deepcopy(config)
        shrink_qwen3(small.language_config)
        small.hidden_size, small.vocab_size = small.language_config.hidden_size, small.language_config.vocab_size
        small.n_vq, small.audio_vocab_size, small.audio_pad_code, small.pad_token_id = 3, 11, 11, 0
        small.additional_mlp_ffn_hidden_size, small.local_ffn_hidden_size = 24, 40
        small.local_hidden_size, small.local_num_layers = 24, 2
        return small

    def sample_batch(self, config: Any, generator: torch.Generator) -> dict[str, Any]:
        batch, positions, prompt = 2, 12, 4
        text = torch.randint(1, config.vocab_size, (batch, positions + 1, 1), generator=generator)
        codes = torch.randint(0, config.audio_vocab_size, (batch, positions + 1, config.n_vq), generator=generator)
        tokens = torch.cat([text, codes], dim=-1)
        attention_mask = torch.ones(batch, positions, dtype=torch.bool)
        attention_mask[0, :2] = False
        labels = tokens[:, 1:].clone()
        labels[:, :prompt] = IGNORE_INDEX
        labels[:, -1, 1:] = IGNORE_INDEX  # the frame that ends the audio has a text label only
        weights = [1.0 + 0.5 * index for index in range(config.n_vq + 1)]
        return {
            "input_ids": tokens[:, :-1],
            "attention_mask": attention_mask,
            "labels": labels,
            "channelwise_loss_weight": weights,
        }
