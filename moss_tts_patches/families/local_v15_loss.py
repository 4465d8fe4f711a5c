"""The pieces of MOSS-TTS-Local v1.5's loss: which labels are learned, what each channel counts, who trains what.

Facts about upstream in this file are from ``moss_tts_local_v1.5/`` at commit 58b20a0.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, cast

import torch
from torch import nn

from ..errors import NumericsError
from ..loss.problem import IGNORE_INDEX, FrameLoss
from .family import TrainingContext


def embedding_tables(model: Any) -> list[nn.Embedding]:
    """The text table and one table a codebook, in the order of ``input_ids``' channels."""
    return [model.transformer.embed_tokens, *model.audio_embeddings]


def _is_binary(model: Any) -> bool:
    return model._use_binary_local_text_head() and getattr(model, "local_text_lm_head", None) is not None


def text_head(model: Any) -> nn.Module:
    """What channel 0 is read with: the binary head where the checkpoint has one."""
    return model.local_text_lm_head if _is_binary(model) else model.text_lm_head


def _is_idle(model: Any, problem: FrameLoss) -> bool:
    """Whether the binary text head has no label in this micro-batch; nothing else trains it."""
    return _is_binary(model) and not any(channel.projection is text_head(model) for channel in problem.channels)


def depth_output(model: Any, inputs: torch.Tensor) -> torch.Tensor:
    """Maps ``[frames, codebooks, hidden]`` to the same shape."""
    return model.local_transformer(
        input_ids=None, attention_mask=None, inputs_embeds=inputs, use_cache=False, return_dict=True
    ).last_hidden_state


def learned_labels(model: Any, labels: torch.Tensor) -> torch.Tensor:
    """Labels as the heads see them: a binary text head knows "one more frame" (0) and "the end" (1), nothing else.

    Args:
        labels: ``[batch, positions, channels]`` int64, text in channel 0.

    Raises:
        ValueError: as upstream does, on another number of channels.

    Source: upstream ``sft.py``, ``compute_supervised_loss_from_hidden``.
    """
    if labels.shape[-1] != model.config.n_vq + 1:
        raise ValueError(f"labels: {labels.shape[-1]} channels, expected {model.config.n_vq + 1} (text + codebooks).")
    if not _is_binary(model):
        return labels
    text = labels[..., :1]
    binary = torch.full_like(text, IGNORE_INDEX)
    binary = binary.masked_fill(text == model.config.audio_assistant_slot_token_id, 0)
    binary = binary.masked_fill(text == model.config.audio_end_token_id, 1)
    return torch.cat([binary, labels[..., 1:]], dim=-1)


def channel_shares(weights: Sequence[float] | None, channels: int, empty: Sequence[int]) -> list[float | None]:
    """Each channel's weight over the sum of the weights of channels that have a label; None for the others.

    Raises:
        ValueError: as upstream does, on a wrong number of weights.
        NumericsError: as upstream raises RuntimeError, where nothing is left to learn from.

    Source: upstream ``sft.py``, ``compute_supervised_loss_from_hidden``.
    """
    given = [1.0] * channels if not weights else [float(weight) for weight in weights]
    if len(given) != channels:
        raise ValueError(f"channelwise_loss_weight: {len(given)} values, expected {channels} (text + codebooks).")
    kept = [None if index in empty else weight for index, weight in enumerate(given)]
    total = sum(weight for weight in kept if weight is not None)
    if total <= 0:
        raise NumericsError(
            "loss: all labels of a micro-batch are ignored, or belong to channels of weight 0. Expected at least one "
            "codebook or end-of-audio label; check the prepared records and --channelwise-loss-weight."
        )
    return [None if weight is None else weight / total for weight in kept]


def channel_weights(weights: Sequence[float] | None, shares: Sequence[float | None]) -> list[float]:
    """Each channel's weight as it was given, 0 where it has no label in the micro-batch."""
    given = [1.0] * len(shares) if not weights else [float(weight) for weight in weights]
    return [weight if share else 0.0 for weight, share in zip(given, shares)]


def expected_contributions(model: Any, problem: FrameLoss, context: TrainingContext) -> dict[nn.Parameter, int]:
    """A tied tensor is one parameter: the backbone reads it, the depth model may, a head with labels multiplies it."""
    expected: dict[nn.Parameter, int] = {}
    if context.direct:
        expected = dict(context.engine.expected_contributions(problem))
        used = (*(table.weight for table in embedding_tables(model)), *(channel.weight for channel in problem.channels))
        for weight in used:
            if weight.requires_grad:
                expected[cast(nn.Parameter, weight)] = expected.get(cast(nn.Parameter, weight), 0) + 1
    if _is_idle(model, problem):
        expected.update(dict.fromkeys(model.local_text_lm_head.parameters(), 0))
    return expected
