"""Device bytes by what they are for. Plain numbers: nothing here needs torch."""

from __future__ import annotations

from dataclasses import asdict, dataclass, fields


@dataclass(frozen=True)
class Footprint:
    """What is alive on the device at one moment; the parts add up to the whole.

    Attributes:
        weights: parameters and buffers of the model.
        gradients: accumulated ones, and running sums over chunks.
        states: of the optimizer.
        activations: everything else but the largest piece of it.
        largest_temporary: the largest single storage that is none of the first three.
    """

    weights: float = 0
    gradients: float = 0
    states: float = 0
    activations: float = 0
    largest_temporary: float = 0

    @property
    def device_bytes(self) -> float:
        return self.weights + self.gradients + self.states + self.activations + self.largest_temporary

    def __add__(self, other: Footprint) -> Footprint:
        mine, theirs = asdict(self), asdict(other)
        return Footprint(**{name: mine[name] + theirs[name] for name in mine})

    def __sub__(self, other: Footprint) -> Footprint:
        return self + other * -1

    def __mul__(self, factor: float) -> Footprint:
        return Footprint(**{name: value * factor for name, value in asdict(self).items()})


CATEGORIES = tuple(field.name for field in fields(Footprint))
