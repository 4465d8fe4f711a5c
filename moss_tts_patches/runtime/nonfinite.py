"""What becomes of a step whose gradients are not finite: who is to blame, and whether the training goes on."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import torch

from ..errors import NumericsError, first_ten

Policy = Literal["stop", "skip"]


@dataclass(frozen=True)
class Finding:
    """A step whose gradients are not finite.

    Attributes:
        step: its number.
        norm: of all gradients.
        phase: where the first such value was seen, in words.
        parameters: names of those with such a gradient; none where only the norm is too large for float32.
        records: places of the records that may have brought it about.
    """

    step: int
    norm: float
    phase: str
    parameters: list[str]
    records: list[str]

    def describe(self) -> str:
        """One line, ten parameters and records at most."""
        names = first_ten(self.parameters) if self.parameters else "none by itself: their norm is too large for float32"
        return (
            f"step {self.step}: the norm of the gradients is {self.norm}. First seen in: {self.phase}. Parameters: "
            f"{names}. Records: {first_ten(self.records) if self.records else 'not known'}"
        )

    def as_values(self, policy: Policy) -> dict[str, Any]:
        """Returns the finding as a line of the log."""
        return {
            "nonfinite": "stopped" if policy == "stop" else "left out",
            "step": self.step,
            "norm": self.norm,
            "phase": self.phase,
            "parameters": self.parameters[:10],
            "parameters_in_all": len(self.parameters),
            "records": self.records,
        }


class NonFiniteGradients:
    """Remembers the losses and records of a window, for the case that its gradients are not finite.

    Losses stay on the device, and are looked at only then.

    Args:
        policy: ``stop`` the training, or ``skip`` the step.
        name_record: says where the record of an index stands.
    """

    def __init__(self, policy: Policy, name_record: Callable[[int], str]) -> None:
        self.policy = policy
        self._name_record = name_record
        self._window: list[tuple[torch.Tensor, Sequence[int]]] = []

    def micro_batch(self, loss: torch.Tensor, records: Sequence[int]) -> None:
        """A micro-batch's loss is there.

        Args:
            loss: ``[]``.
            records: their indices.
        """
        self._window.append((loss.detach(), records))

    def window_done(self) -> None:
        """The next micro-batch begins a step."""
        self._window.clear()

    def find(self, step: int, norm: torch.Tensor, parameters: list[str]) -> Finding:
        """Works out where it came from; waits for the device.

        Args:
            step: number of the step.
            norm: ``[]``, of all gradients.
            parameters: names of those whose gradients are not finite.
        """
        count = len(self._window)
        bad = [index for index, (loss, _) in enumerate(self._window) if not torch.isfinite(loss).all()]
        if bad:
            numbers = ", ".join(str(index + 1) for index in bad)
            phase = f"forward, the loss of micro-batch {numbers} of {count}"
        else:
            phase = f"backward, every loss of the {count} micro-batches on this process is finite"
        blamed = [index for number in bad or range(count) for index in self._window[number][1]]
        return Finding(step, float(norm), phase, parameters, [self._name_record(index) for index in blamed])

    def stop(self, finding: Finding, saves: bool) -> NumericsError:
        """Returns the error that ends the run.

        Args:
            finding: why.
            saves: the run writes resume points.
        """
        resume = (
            "The last resume point stands as it was, and the same command goes on from it: "
            if saves
            else "Resume points (MOSS_LOWMEM_SAVE_MINUTES) would let it go on: "
        )
        return NumericsError(
            f"gradients are not finite, {finding.describe()}. The weights were not touched, nothing was saved. {resume}"
            "look at those records (moss-lowmem check-data), lower --learning-rate, or set MOSS_LOWMEM_NONFINITE=skip "
            "to leave such steps out."
        )
