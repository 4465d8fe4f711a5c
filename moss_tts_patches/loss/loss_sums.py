"""One loss over many micro-batches: as if all their frames had come together in one."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

import torch

from .problem import IGNORE_INDEX, FrameLoss


@dataclass
class _Channel:
    total: float = 0.0
    labels: int = 0
    weight: float | None = None


class LossSums:
    """Adds up what every channel lost, and combines it by the family's rule at the end.

    Each channel's mean is over all its labels, then the channels are combined as a micro-batch's are. A mean of
    micro-batches' losses would depend on which records share one, and a short record would count as much as a long one.
    """

    def __init__(self) -> None:
        self._channels: dict[str, _Channel] = {}

    def add(self, problem: FrameLoss, sums: torch.Tensor) -> None:
        """Adds a micro-batch; waits for the device once.

        Args:
            problem: of the micro-batch.
            sums: ``[channels]`` float32, each channel's sum of losses.
        """
        labels = torch.stack([channel.labels for channel in problem.channels])
        counts = (labels != IGNORE_INDEX).sum(dim=1)
        pairs = torch.stack([sums.detach().double().cpu(), counts.double().cpu()], dim=1).tolist()
        for index, (channel, (total, count)) in enumerate(zip(problem.channels, pairs)):
            weight = None if problem.weights is None else problem.weights[index]
            self._add(channel.name, total, int(count), weight)

    def _add(self, name: str, total: float, labels: int, weight: float | None) -> None:
        channel = self._channels.setdefault(name, _Channel(weight=weight))
        channel.labels += labels
        if labels:  # a sum over none may be anything
            channel.total += total
        if weight is not None:  # 0 in a micro-batch where the family leaves the channel out
            channel.weight = max(weight, channel.weight or 0.0)

    def merge(self, values: Mapping[str, tuple[float, int, float | None]]) -> None:
        """Adds what another process has added up, as its :meth:`as_values` gave it."""
        for name, (total, labels, weight) in values.items():
            self._add(name, total, labels, weight)

    def as_values(self) -> dict[str, tuple[float, int, float | None]]:
        """Returns sum, labels and weight by channel."""
        return {name: (one.total, one.labels, one.weight) for name, one in self._channels.items()}

    def loss(self) -> float:
        """Returns the loss; nan where there is no label at all.

        Source: the rules of the four families, see their ``frame_loss``: ``sum_c w_c * mean_c / sum_c w_c``, or without
        weights the mean over all labels of all channels.
        """
        channels = list(self._channels.values())
        labels = sum(one.labels for one in channels)
        if not labels:
            return math.nan
        if any(one.weight is None for one in channels):
            return sum(one.total for one in channels) / labels
        weights = sum(one.weight or 0.0 for one in channels)
        return sum((one.weight or 0.0) * one.total / max(one.labels, 1) for one in channels) / weights

    def by_channel(self) -> dict[str, float]:
        """Returns the mean of each channel that has a label."""
        return {name: one.total / one.labels for name, one in self._channels.items() if one.labels}
