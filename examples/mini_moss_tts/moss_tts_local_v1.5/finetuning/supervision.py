"""What v1.5's trainer learns from: its loss over the model's hidden states, and its looks at what comes out.

The trainer imports these names into its own namespace, where a patch layer replaces them.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F

IGNORE_INDEX = -100


def unwrap_training_model(model: Any) -> Any:
    while hasattr(model, "module"):
        model = model.module
    return model


def compute_supervised_loss(
    model: Any,
    *,
    input_ids: torch.Tensor,
    attention_mask: torch.Tensor,
    labels: torch.Tensor,
    channelwise_loss_weight: Sequence[float] | None,
) -> torch.Tensor:
    """Returns a micro-batch's loss; ids and labels ``[batch, positions, channels]`` int64, labels shifted already.

    The model's forward runs under accelerate's mixed precision, what follows it does not.
    """
    hidden = model(
        input_ids=input_ids, attention_mask=attention_mask, use_cache=False, return_dict=True
    ).last_hidden_state
    return compute_supervised_loss_from_hidden(
        unwrap_training_model(model),
        global_hidden_states=hidden,
        labels=labels,
        channelwise_loss_weight=channelwise_loss_weight,
    )


def compute_supervised_loss_from_hidden(
    base_model: Any,
    *,
    global_hidden_states: torch.Tensor,
    labels: torch.Tensor,
    channelwise_loss_weight: Sequence[float] | None,
) -> torch.Tensor:
    """Weighs the mean cross entropies of those channels that have a label; every position runs the depth transformer.

    Args:
        global_hidden_states: ``[batch, positions, hidden]``.
        labels: ``[batch, positions, channels]`` int64.

    Raises:
        RuntimeError: there is no label to learn from.

    Source: upstream ``moss_tts_local_v1.5/finetuning/sft.py``, the function of this name.
    """
    codebooks = base_model.config.n_vq
    weights = channelwise_loss_weight or [1.0] * (codebooks + 1)
    targets = labels.flatten(0, 1)
    entries = [base_model._global_hidden_to_local(global_hidden_states.flatten(0, 1))]
    for table, ids in zip(list(base_model.audio_embeddings)[:-1], targets[:, 1:].unbind(-1)):
        absent = ids == IGNORE_INDEX
        entries.append(table(ids.masked_fill(absent, 0)).masked_fill(absent.unsqueeze(-1), 0.0))
    dtype = base_model.local_transformer.ln_f.weight.dtype
    rows = torch.stack([entry.to(dtype) for entry in entries], dim=1)
    outputs = base_model.local_transformer(inputs_embeds=rows, use_cache=False, return_dict=True).last_hidden_state

    text_head, text = _text_head(base_model, targets[:, 0])
    channels = [(text_head, outputs[:, 0], text)]
    channels += zip(base_model.audio_lm_heads, outputs.unbind(1), targets[:, 1:].unbind(-1))
    total, total_weight = torch.zeros((), device=rows.device), 0.0
    for weight, (head, features, ids) in zip(weights, channels, strict=True):
        if (ids != IGNORE_INDEX).any():
            total = total + weight * F.cross_entropy(head(features).float(), ids, ignore_index=IGNORE_INDEX)
            total_weight += weight
    if total_weight <= 0:
        raise RuntimeError("no label to learn from in this micro-batch; expected codes or the end of an audio")
    return total / total_weight


def _text_head(base_model: Any, text: torch.Tensor) -> tuple[torch.nn.Module, torch.Tensor]:
    """Returns the head of the text channel and its labels; the binary one only says whether another frame follows."""
    if not base_model._use_binary_local_text_head():
        return base_model.text_lm_head, text
    binary = torch.full_like(text, IGNORE_INDEX)
    binary[text == base_model.config.audio_assistant_slot_token_id] = 0
    binary[text == base_model.config.audio_end_token_id] = 1
    return base_model.local_text_lm_head, binary


def is_finite_scalar(value: torch.Tensor) -> bool:
    return bool(value.detach().isfinite().all())


def first_nonfinite_gradient(model: Any) -> str | None:
    """Returns the name of the first parameter whose gradient has a nan or an infinity."""
    for name, parameter in model.named_parameters():
        if parameter.grad is not None and not is_finite_scalar(parameter.grad):
            return name
    return None
