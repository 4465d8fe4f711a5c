"""What one micro-batch's loss is made of, in terms that hold for every model family."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import cast

import torch
from torch import nn

IGNORE_INDEX = -100  # torch's and upstream's mark for "no label here"


@dataclass(frozen=True)
class Stage:
    """A piece of the model that the engine runs by itself.

    Attributes:
        forward: maps ``[frames, ...]`` to ``[frames, ...]``; frames are independent of each other.
        modules: the modules whose parameters ``forward`` uses, so that their gradients can be accumulated.
    """

    forward: Callable[[torch.Tensor], torch.Tensor]
    modules: tuple[nn.Module, ...]

    def __call__(self, values: torch.Tensor) -> torch.Tensor:
        return self.forward(values)

    def trainable_parameters(self) -> Iterator[nn.Parameter]:
        """Yields every parameter that wants a gradient, once."""
        seen: set[int] = set()
        for module in self.modules:
            for parameter in module.parameters():
                if parameter.requires_grad and id(parameter) not in seen:
                    seen.add(id(parameter))
                    yield parameter


@dataclass(frozen=True)
class Lookup:
    """One codebook's embedding as an input position of the depth model.

    Attributes:
        table: the embedding, weight ``[entries, hidden]``, or what PEFT made of it.
        ids: ``[frames]`` int64; ``IGNORE_INDEX`` gives a zero vector.
        position: where in the depth model's input it stands (position 0 is the backbone's hidden state).
    """

    table: nn.Embedding
    ids: torch.Tensor
    position: int

    @property
    def dtype(self) -> torch.dtype:
        return self.table.weight.dtype

    def trained_parameters(self) -> list[nn.Parameter]:
        """Returns what is trained of the table: its weight, or an adapter's."""
        return [parameter for parameter in self.table.parameters() if parameter.requires_grad]


@dataclass(frozen=True)
class Channel:
    """One head and its labels.

    Attributes:
        name: for messages, for example ``text`` or ``codebook 3``.
        position: the depth model's output position that feeds it (0 where there is no depth model).
        adapter: what stands between that output and the head, or None.
        projection: the head, ``[hidden] -> [classes]``.
        labels: ``[frames]`` int64, ``IGNORE_INDEX`` where nothing is supervised.
        classes: how many of the head's first rows take part; None means all (delay masks its last one).
    """

    name: str
    position: int
    adapter: Stage | None
    projection: nn.Module
    labels: torch.Tensor
    classes: int | None = None

    @property
    def weight(self) -> nn.Parameter:
        return cast(nn.Parameter, self.projection.weight)

    @property
    def class_count(self) -> int:
        return self.weight.shape[0] if self.classes is None else self.classes


@dataclass(frozen=True)
class FrameLoss:
    """The loss over the supervised frames of one micro-batch: ``sum_c coefficients[c] * cross_entropy_sum[c]``.

    Attributes:
        depth: the depth model, ``[frames, positions, hidden] -> [frames, positions, depth hidden]``; None where
            the heads sit on the backbone itself.
        lookups: its inputs beside the hidden state.
        channels: the heads.
        coefficients: ``[channels]`` float32; the family's loss rule, weights and means, is all in here, which is
            possible because every rule is linear in the sums once the labels are counted.
        positions: how many input positions the depth model has.
        weights: one per channel, for a loss over several micro-batches: how much the channel's mean counts, in any
            unit; None where every label of every channel counts alike.
    """

    depth: Stage | None
    lookups: tuple[Lookup, ...]
    channels: tuple[Channel, ...]
    coefficients: torch.Tensor
    positions: int = field(default=1)
    weights: tuple[float, ...] | None = None
