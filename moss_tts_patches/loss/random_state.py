"""Runs a piece of the model twice with the same random numbers (dropout of adapters in the depth model)."""

from __future__ import annotations

from dataclasses import dataclass

import torch


@dataclass(frozen=True)
class RandomState:
    """The states of the generators that a forward pass on ``device`` can draw from."""

    device: torch.device
    cpu: torch.Tensor
    accelerator: torch.Tensor | None

    @classmethod
    def capture(cls, device: torch.device) -> RandomState:
        """Reads the states; costs about 5 KB of host memory and no synchronisation."""
        accelerator = torch.cuda.get_rng_state(device) if device.type == "cuda" else None
        return cls(device, torch.get_rng_state(), accelerator)

    def restore(self) -> None:
        """Puts the generators back to where they were."""
        torch.set_rng_state(self.cpu)
        if self.accelerator is not None:
            torch.cuda.set_rng_state(self.accelerator, self.device)
