"""MOSS-TTS-Realtime: a Qwen3 backbone and a depth transformer with its own embeddings over 16 codebooks.

Facts about upstream in this file are from ``moss_tts_realtime/mossttsrealtime/`` and ``moss_tts_realtime/finetuning/``
at commit 58b20a0.
"""

from __future__ import annotations

import argparse
import copy
import dataclasses
from collections.abc import Callable, Sequence
from typing import Any, ClassVar

import torch
from torch import nn

from ..data.rules import RecordRules
from ..errors import NumericsError
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


class RealtimeFamily(Family):
    """See :class:`.family.Family`."""

    name: ClassVar[str] = "moss_tts_realtime"
    trainer_seams: ClassVar[tuple[Seam, ...]] = (
        *TRAINER_SEAMS,
        Seam("MossTTSRealtime"),
    )
    class_seams: ClassVar[tuple[Seam, ...]] = (
        Seam("from_pretrained"),
        Seam("gradient_checkpointing_enable"),
        Seam("get_input_embeddings", ("input_ids",)),
        Seam("forward", ("input_ids", "attention_mask", "labels")),
    )
    training_arguments: ClassVar[frozenset[str]] = frozenset({"input_ids", "attention_mask", "labels"})
    upstream_checkpoints: ClassVar[bool] = False
    loads_in_parts: ClassVar[bool] = False  # its initialisation indexes weights by padding_idx, and a part is empty
    adapter_groups: ClassVar[dict[str, str]] = {
        "backbone": r"language_model\.layers\.\d+\." + QWEN3_PROJECTIONS,
        "depth": r"local_transformer\.model\.layers\.\d+\." + QWEN3_PROJECTIONS,
        "audio_heads": r"local_transformer\.local_lm_heads\.\d+",
        "audio_embeddings": r"embed_tokens\.[1-9]\d*|local_transformer\.model\.embed_tokens\.\d+",
    }

    @classmethod
    def recognises(cls, namespace: dict[str, Any]) -> bool:
        return isinstance(namespace.get("MossTTSRealtime"), type)

    def model_class(self, namespace: dict[str, Any]) -> type[nn.Module]:
        return namespace["MossTTSRealtime"]

    def extend_parser(self, parser: Any) -> None:
        if "--gradient-checkpointing" in parser._option_string_actions:
            return  # an upstream that has it by now
        # Without a default, so that the saved arguments stay upstream's unless the flag is given.
        parser.add_argument(
            "--gradient-checkpointing",
            action="store_true",
            default=argparse.SUPPRESS,
            help="Recompute backbone layers in the backward (moss_tts_patches; on by default with the layer).",
        )

    def check_structure(self, model: Any) -> None:
        codebooks = model.config.rvq
        expected = {
            "embed_tokens": codebooks + 1,
            "language_model.layers": model.config.language_config.num_hidden_layers,
            "language_model.embed_tokens": None,
            "local_transformer.model.layers": model.config.local_config.num_hidden_layers,
            "local_transformer.model.embed_tokens": codebooks - 1,
            "local_transformer.local_lm_heads": codebooks,
        }
        check_parts(self.name, model, expected)

    def backbone(self, model: Any) -> nn.Module:
        return model.language_model

    def depth_model(self, model: Any) -> nn.Module | None:
        return model.local_transformer.model

    def unread_embeddings(self, model: Any) -> Sequence[tuple[nn.Module, str]]:
        # The backbone is always called with inputs_embeds; its own table only has to be in the checkpoint.
        return ((model.language_model, "embed_tokens"),)

    def record_rules(self, config: Any) -> RecordRules:
        # Codes from the pad code on are the family's own marks. System and voice prompt are
        # 430 bytes; the processor can be given another.
        return RecordRules(
            layout="conversation",
            code_limits=(getattr(config, "audio_pad_token", 1024),) * getattr(config, "rvq", 16),
            template_bytes=600,
            loose_shape=True,
        )

    def training_output(self, model: Any, batch: dict[str, Any], context: TrainingContext) -> LossOutput:
        labels = batch["labels"][..., 1:]
        summary = context.summarise_labels(labels)
        if len(summary.empty_channels) == labels.shape[-1]:
            raise NumericsError(
                "micro-batch without a single audio label: upstream's loss is a mean over labels and fails here too. "
                "Remove records that end before an assistant turn has audio_codes."
            )
        hidden = self._backbone_hidden(model, batch, context)
        rows = hidden.reshape(-1, hidden.shape[-1]).index_select(0, predicting_positions(summary.positions, labels))
        frame_labels = labels.reshape(-1, labels.shape[-1]).index_select(0, summary.positions)
        problem = self.frame_loss(model, frame_labels)
        loss, _ = context.engine.loss(problem, rows, context.loss_scale())
        context.expected_contributions = context.engine.expected_contributions(problem)
        return LossOutput(loss=loss)

    def _backbone_hidden(self, model: Any, batch: dict[str, Any], context: TrainingContext) -> torch.Tensor:
        """Returns ``[batch, positions, hidden]``."""
        ids = batch["input_ids"]
        if context.direct and torch.is_grad_enabled():
            embeddings = summed_embeddings(list(model.embed_tokens), ids, context.engine.store)
        else:
            embeddings = model.get_input_embeddings(ids)
        return model.language_model(
            inputs_embeds=embeddings, attention_mask=batch["attention_mask"], use_cache=False
        ).last_hidden_state

    def frame_loss(self, model: Any, labels: torch.Tensor) -> FrameLoss:
        """Describes the loss over the frames with audio labels.

        Args:
            model: an instance of the model class.
            labels: ``[frames, codebooks]`` int64.

        Source: upstream ``MossTTSRealtime.forward`` and ``MossTTSRealtimeLocalTransformerForCausalLM.forward``: one
        mean over all labels of all codebooks; a code without a label (all but the first codebook of the frame that
        ends the audio) enters the depth model as the pad code.
        """
        depth, heads = model.local_transformer.model, model.local_transformer.local_lm_heads
        present = labels != IGNORE_INDEX
        codes = torch.where(present, labels, model.config.audio_pad_token)
        codebooks = model.config.rvq
        return FrameLoss(
            depth=Stage(
                lambda inputs: depth(inputs_embeds=inputs, use_cache=False).last_hidden_state,
                (depth.layers, depth.norm),  # not its embeddings: they are looked up before it
            ),
            lookups=tuple(
                Lookup(depth.embed_tokens[index], codes[:, index], position=index + 1) for index in range(codebooks - 1)
            ),
            channels=tuple(
                Channel(
                    name=f"codebook {index + 1}",
                    position=index,
                    adapter=None,
                    projection=heads[index],
                    labels=labels[:, index],
                )
                for index in range(codebooks)
            ),
            coefficients=(1.0 / present.sum().clamp(min=1)).expand(codebooks),
            positions=codebooks,
        )

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
        small.rvq, small.audio_pad_token, small.audio_vocab_size = 3, 10, 13
        shrink_qwen3(small.language_config)
        local = small.local_config
        shrink_qwen3(local)
        local.rvq, local.audio_pad_token, local.audio_vocab_size, local.pad_token_id = 3, 10, 13, 10
        return small

    def sample_batch(self, config: Any, generator: torch.Generator) -> dict[str, Any]:
        batch, positions, prompt, codebooks = 2, 12, 4, config.rvq
        pad = config.audio_pad_token
        text = torch.randint(1, config.language_config.vocab_size, (batch, positions, 1), generator=generator)
        codes = torch.randint(0, pad, (batch, positions, codebooks), generator=generator)
        attention_mask = torch.ones(batch, positions, dtype=torch.bool)
        labels = torch.full((batch, positions, codebooks + 1), IGNORE_INDEX)
        codes[:, :prompt] = pad
        for record, end in enumerate((positions - 1, positions - 4)):
            codes[record, end:] = pad
            codes[record, end, 0] = pad + 2  # the end of the audio is a label of the first codebook alone
            labels[record, prompt : end + 1, 1:] = codes[record, prompt : end + 1]
            labels[record, end, 2:] = IGNORE_INDEX
            attention_mask[record, end + 1 :] = False
        labels[1, 0, 1:] = codes[1, prompt]  # a first position with labels has no position before it
        return {"input_ids": torch.cat([text, codes], dim=-1), "attention_mask": attention_mask, "labels": labels}

    def simulated_batch(self, config: Any, records: int, positions: int) -> dict[str, Any]:
        ids = torch.zeros((records, positions, config.rvq + 1), dtype=torch.int64)
        return {"input_ids": ids, "attention_mask": None, "labels": torch.zeros_like(ids)}

    def simulated_upstream_output(
        self, upstream_forward: Callable[..., Any], model: Any, batch: dict[str, Any], supervised: int
    ) -> Any:
        """Upstream's modules on ``supervised`` frames; its own forward looks for them, which needs values.

        Source: upstream ``MossTTSRealtime.forward``: what it computes and what its output keeps alive.
        """
        outputs = upstream_forward(model, input_ids=batch["input_ids"], attention_mask=batch["attention_mask"])
        labels = torch.zeros((supervised, model.config.rvq), dtype=torch.int64)
        tables = model.local_transformer.model.embed_tokens
        first = outputs.last_hidden_state.reshape(-1, outputs.last_hidden_state.shape[-1])[labels[:, 0]]
        inputs = torch.stack([tables[max(0, index - 1)](labels[:, index]) for index in range(model.config.rvq)], dim=1)
        inputs[:, 0] = first
        depth = model.local_transformer(inputs_embeds=inputs, labels=labels, use_cache=False)
        return dataclasses.replace(outputs, loss=depth.loss, local_logits=depth.logits)


def predicting_positions(positions: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    """Returns the flat index of the position whose hidden state predicts each labelled one.

    Args:
        positions: ``[frames]`` int64, flat indices into batch x positions.
        labels: ``[batch, positions, codebooks]``.

    Source: upstream ``MossTTSRealtime.forward``: labels are not shifted, position t is predicted from ``max(t - 1, 0)``
    of the same record.
    """
    return positions - (positions % labels.shape[1] > 0).to(positions.dtype)
