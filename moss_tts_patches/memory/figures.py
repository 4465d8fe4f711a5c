"""What a rung needs, as numbers. Nothing here needs torch, so that a cached plan is shown at once."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

from .footprint import Footprint
from .rungs import AnyRung, EngineRung, Rung, UpstreamRung, describe

# What a bus costs beside arithmetic: a card that does 40 TFLOP/s of bf16 in practice (RTX 3090 to 4080) waits as long
# for one byte over 12 GB/s (PCIe 4.0 x8, or x16 with pageable memory) as for 3300 FLOP. Copies overlap with the
# backward to a part that differs by card; they are counted in full, as the sum on the host costs about as much again.
FLOP_PER_HOST_BYTE = 3300


@dataclass(frozen=True)
class RungFigures:
    """What a rung needs for one micro-batch and the optimizer step.

    Attributes:
        rung: which one.
        phase: in which part of the step the peak is.
        categories: what the peak on the device is made of.
        host_bytes: in host memory, accumulated gradients left out.
        host_gradient_elements: of accumulated gradients in host memory, 2 or 4 bytes each.
        matmul_flops: of one micro-batch.
        attention_flops: of one micro-batch.
        gradient_bytes: what leaves the device a micro-batch where gradients are on the host.
        state_bytes: what goes back and forth in a step where states are on the host.
        layer_weight_bytes: what comes back a micro-batch where idle weights are parked.
        model_bytes: weights on the device; they pass through host memory once, when the model is loaded.
    """

    rung: AnyRung
    phase: str
    categories: Footprint
    host_bytes: float
    matmul_flops: float
    attention_flops: float
    host_gradient_elements: float = 0
    gradient_bytes: float = 0
    state_bytes: float = 0
    layer_weight_bytes: float = 0
    model_bytes: float = 0

    @property
    def peak_bytes(self) -> float:
        return self.categories.device_bytes

    @property
    def flops(self) -> float:
        return self.matmul_flops + self.attention_flops

    def host_total(self, gradient_dtype: str | None = None) -> float:
        """Bytes in host memory with gradients in that dtype; by default the rung's own."""
        dtype = gradient_dtype or getattr(self.rung, "host_gradient_dtype", "float32")
        return self.host_bytes + self.host_gradient_elements * (2 if dtype == "bfloat16" else 4)

    def traffic_bytes(self, accumulation: int) -> float:
        """Bytes over the bus for a micro-batch, an optimizer step's share included."""
        rung, total = self.rung, 0.0
        if not isinstance(rung, Rung):
            return total
        if rung.gradients == "host":
            size = 2 if rung.host_gradient_dtype == "bfloat16" else 4
            total += self.gradient_bytes + self.host_gradient_elements * size / accumulation
        if rung.states == "host":
            total += 2 * self.state_bytes / accumulation
        if rung.weights == "host":
            total += self.layer_weight_bytes * (1 + 1 / accumulation)
        return total

    def cost(self, accumulation: int) -> float:
        """FLOPs of a micro-batch, host traffic counted as the FLOPs that it holds up."""
        return self.flops + FLOP_PER_HOST_BYTE * self.traffic_bytes(accumulation)

    def to_document(self) -> dict[str, Any]:
        return {**asdict(self), "rung": describe(self.rung)}

    @classmethod
    def from_document(cls, document: Mapping[str, Any]) -> RungFigures:
        fields = dict(document["rung"])
        kinds: dict[str, type] = {"Rung": Rung, "UpstreamRung": UpstreamRung, "EngineRung": EngineRung}
        rung = kinds[fields.pop("kind")](**fields)
        return cls(**{**document, "rung": rung, "categories": Footprint(**document["categories"])})
