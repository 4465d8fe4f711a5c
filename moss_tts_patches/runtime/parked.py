"""Keeps an embedding that training never reads out of the GPU, and in every checkpoint."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from ..memory.placement import announce_host


class ParkedEmbedding(nn.Module):
    """Stands in for an embedding that is never looked up.

    It owns no parameter, so that ``.to(device)`` moves nothing and no optimizer sees it, but its state dict holds the
    weight under the embedding's own name, unchanged. Upstream's hooks may still freeze or load it.
    """

    def __init__(self, weight: torch.Tensor) -> None:
        super().__init__()
        # In a list, since nn.Module would register a bare tensor attribute that is a Parameter.
        self._parked = [weight.detach()]

    @property
    def weight(self) -> torch.Tensor:
        """``[entries, hidden]``, on the host."""
        return self._parked[0]

    def forward(self, *_: Any, **__: Any) -> torch.Tensor:
        raise RuntimeError(
            "an embedding that training never reads was read: the backbone was called with input_ids. Set "
            "MOSS_LOWMEM=0 for this run, and report it."
        )

    def _save_to_state_dict(self, destination: Any, prefix: str, keep_vars: bool) -> None:
        destination[prefix + "weight"] = self._parked[0]

    def _load_from_state_dict(
        self,
        state_dict: dict[str, torch.Tensor],
        prefix: str,
        local_metadata: Any,
        strict: bool,
        missing_keys: list[str],
        unexpected_keys: list[str],
        error_msgs: list[str],
    ) -> None:
        key = prefix + "weight"
        if key in state_dict:
            self._parked[0] = state_dict[key].detach().to("cpu", self._parked[0].dtype, copy=True)
        elif strict:
            missing_keys.append(key)


def park_embedding(parent: nn.Module, attribute: str) -> int:
    """Replaces ``parent.attribute`` by a :class:`ParkedEmbedding`; returns the bytes that stay off the GPU."""
    embedding = getattr(parent, attribute)
    if isinstance(embedding, ParkedEmbedding):
        return 0
    weight = embedding.weight.detach().to("cpu")
    announce_host(weight)
    setattr(parent, attribute, ParkedEmbedding(weight))
    return weight.numel() * weight.element_size()
