"""What a simulated training step needs, as read from the instruments at its end."""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
from torch import nn

from ..families.family import Family
from ..optim.streamed import StreamedOptimizer
from ..runtime.checkpointing import layer_parameters
from .flops import FlopCounter
from .footprint import Footprint
from .tracker import Phase, StorageTracker


@dataclass(frozen=True)
class Standing:
    """What there is between steps, wherever a rung keeps it.

    Attributes:
        device_states: bytes of optimizer states on the device.
        host_states: bytes of the arena that they take in host memory.
        gradient_bytes: of all trained parameters, in their own dtype.
        trained_elements: of all trained parameters.
        layer_weights: bytes of the backbone's layers.
        largest_trained: elements of the largest trained parameter.
        after_largest: elements of the one that is stepped after it, whose states are on their way by then.
        trained_dtype: its dtype, by name.
    """

    device_states: int = 0
    host_states: int = 0
    gradient_bytes: int = 0
    trained_elements: int = 0
    layer_weights: int = 0
    largest_trained: int = 0
    after_largest: int = 0
    trained_dtype: str = "bfloat16"

    @classmethod
    def of(cls, family: Family, model: nn.Module, optimizer: StreamedOptimizer) -> Standing:
        """Adds up what a model and its optimizer hold."""
        trained = list(dict.fromkeys(parameter for parameter in model.parameters() if parameter.requires_grad))
        largest = max(trained, key=torch.numel)
        following = trained[([id(p) for p in trained].index(id(largest)) + 1) % len(trained)]
        layers = dict.fromkeys(layer_parameters(family.backbone(model)))
        return cls(
            device_states=sum(
                spec.size(parameter.numel())
                for parameter in trained
                for spec in optimizer.layout_of(parameter).values()
            ),
            host_states=optimizer.states.host_bytes(),
            gradient_bytes=sum(parameter.numel() * parameter.element_size() for parameter in trained),
            trained_elements=sum(parameter.numel() for parameter in trained),
            layer_weights=sum(parameter.numel() * parameter.element_size() for parameter in layers),
            largest_trained=largest.numel(),
            after_largest=following.numel(),
            trained_dtype=str(largest.dtype).removeprefix("torch."),
        )


@dataclass(frozen=True)
class StepFigures:
    """What a simulated step needs.

    Attributes:
        peak_bytes: largest sum of live device storages, optimizer step included.
        backward_peak_bytes: the same up to the end of the backward.
        host_bytes: host buffers of the stores and parked weights.
        matmul_flops: of the matrix products of one micro-batch.
        attention_flops: of its attention kernels.
        phases: what was alive in the ``forward``, the ``loss`` (schedules that back-propagate in it), the ``backward``
            and the ``step``.
        standing: what there is between steps.
    """

    peak_bytes: int
    backward_peak_bytes: int
    host_bytes: int
    matmul_flops: int
    attention_flops: int
    phases: dict[str, Phase] = field(default_factory=dict, compare=False, repr=False)
    standing: Standing = field(default=Standing(), compare=False, repr=False)

    @classmethod
    def of(cls, tracker: StorageTracker, counter: FlopCounter, standing: Standing = Standing()) -> StepFigures:
        """Reads the instruments at the end of a step."""
        before = [phase.peak.device_bytes for name, phase in tracker.phases.items() if name != "step"]
        return cls(
            tracker.peak_bytes,
            round(max(before)),
            tracker.host_bytes,
            counter.matmul_flops,
            counter.attention_flops,
            dict(tracker.phases),
            standing,
        )

    @property
    def categories(self) -> Footprint:
        """What the peak is made of."""
        return max((phase.peak for phase in self.phases.values()), key=lambda peak: peak.device_bytes)
