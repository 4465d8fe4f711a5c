"""What the trainer saves of a model with adapters: the adapters, in the place where it saves the model."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from ..engines import TrainingEngine
from .report import StepClock
from .saving import name_in_the_end

if TYPE_CHECKING:
    from ..adapters.training import AdapterTraining


class AdapterCheckpoints:
    """Gathers and writes the trained weights of a model whose base stays as it is.

    Args:
        adapters: of the run; they are in the model.
        model: the trainer's, without accelerate's wrapper.
        parallel: the engine that holds the weights.
        clock: counts the steps that are done.
    """

    def __init__(self, adapters: AdapterTraining, model: nn.Module, parallel: TrainingEngine, clock: StepClock) -> None:
        self._adapters, self._model, self._parallel, self._clock = adapters, model, parallel, clock

    def state_dict(self) -> dict[str, torch.Tensor]:
        """Returns the trained tensors by name, whole and in host memory; every process has to call it."""
        assert self._adapters.adapters is not None
        trained = [parameter for parameter in self._model.parameters() if parameter.requires_grad]
        with self._parallel.gathered(trained):
            tensors = self._adapters.adapters.state_dict()
            return {name: tensor.detach().to("cpu", copy=True) for name, tensor in tensors.items()}

    def save_pretrained(
        self, save_directory: Any, *_: Any, state_dict: Any = None, is_main_process: bool = True, **__: Any
    ) -> None:
        """Takes the place of the model's own in the trainer's ``save_checkpoint``.

        Upstream passes on what :meth:`state_dict` gave it, so nothing is gathered twice.
        """
        tensors = self.state_dict() if state_dict is None else state_dict
        if is_main_process:
            folder = Path(save_directory)
            self._adapters.save(folder, name_in_the_end(folder), self._clock.steps, tensors)
