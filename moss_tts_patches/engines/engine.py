"""The face of an engine; by itself it is one process without any."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager, nullcontext
from typing import Any, ClassVar

import torch
from torch import nn

from ..errors import EnvironmentProblem, SettingsError
from ..loss.module_schedule import ByModule, recompute


def largest_of_all(value: int, device: torch.device) -> int:
    """Returns the largest ``value`` of all processes; each has to ask."""
    shared = torch.tensor([value], dtype=torch.int64, device=device)
    torch.distributed.all_reduce(shared, op=torch.distributed.ReduceOp.MAX)
    return int(shared.item())


class TrainingEngine:
    """What the layer may do on one process, and the base of the engines over several.

    Args:
        accelerator: the trainer's.
    """

    title: ClassVar[str] = "one process"
    #: Why the loss has to be the ``autograd`` schedule; None where every schedule is possible.
    autograd_reason: ClassVar[str | None] = None
    #: Why gradients cannot be accumulated in host memory; None where they can.
    device_gradients_reason: ClassVar[str | None] = None
    #: The engine keeps gradients and optimizer states in its own form: the layer neither steps nor clips.
    owns_optimizer: ClassVar[bool] = False
    #: ... and why.
    optimizer_reason: ClassVar[str] = ""
    #: The loss has to be computed within the forward of the model that the engine wrapped.
    loss_inside_forward: ClassVar[bool] = False
    #: An unread embedding may be replaced by one that stays in host memory.
    parks_embeddings: ClassVar[bool] = True
    #: A forward and backward within the first forward disturb nothing.
    can_try_longest: ClassVar[bool] = True

    def __init__(self, accelerator: Any) -> None:
        self.accelerator = accelerator

    @property
    def by_module(self) -> ByModule | None:
        """How the loss calls modules where weights are whole only while their own module runs; None elsewhere."""
        return None

    @property
    def recompute(self) -> Callable[..., Any]:
        """Calls a layer now and again in the backward."""
        return recompute if self.by_module is None else self.by_module.recompute

    @property
    def several(self) -> bool:
        """Whether gradients of several processes meet: then each process has to have one for every weight."""
        return self.accelerator.num_processes > 1

    def check(self, arguments: Any, method: str) -> None:
        """Compares the engine's own settings with the trainer's arguments before anything is loaded.

        Args:
            arguments: the trainer's, parsed.
            method: ``full``, ``lora`` or ``qlora``.

        Raises:
            LowMemError: they contradict each other.
        """
        found, wanted = self.accelerator.gradient_accumulation_steps, arguments.gradient_accumulation_steps
        if found != wanted:
            raise SettingsError(
                f"gradient accumulation: the accelerate config or its environment says {found}, and accelerate would "
                f"follow it, while --gradient-accumulation-steps is {wanted} and sizes the schedule. Set both to the "
                "same number (in the config: gradient_accumulation_steps, or leave it out there)."
            )

    def settle_clipping(self, arguments: Any, *, corrected: bool) -> str | None:
        """Has an engine that clips by itself do so as the trainer's ``--max-grad-norm`` says.

        Returns:
            What was changed, or None.
        """
        return None

    def check_resume_points(self, wanted: bool) -> None:
        """Compares what a resume point of the layer holds with what the engine leaves to the layer.

        Args:
            wanted: the run writes points, or goes on from one.

        Raises:
            EnvironmentProblem: they would not hold everything.
        """
        if wanted and self.owns_optimizer:
            raise EnvironmentProblem(
                f"engine {self.title}: it owns the optimizer states, which resume points of the layer do not hold. "
                "Unset MOSS_LOWMEM_SAVE_STEPS and MOSS_LOWMEM_SAVE_MINUTES, and set MOSS_LOWMEM_RESUME=off."
            )

    def settle_loading(self, in_parts: bool) -> None:
        """Decides how the model is loaded.

        Args:
            in_parts: its class can be built while an engine takes every weight apart at once.
        """

    def building(self) -> AbstractContextManager[object]:
        """While it is open, a model that is made has whole weights."""
        return nullcontext()

    def loading(self) -> AbstractContextManager[object]:
        """Open while the trainer loads its model."""
        return nullcontext()

    def prepared_optimizer(self, handed_over: Any, prepared: Iterable[Any]) -> Any:
        """Returns accelerate's wrapper of the optimizer that was handed over.

        Args:
            handed_over: what the trainer's ``AdamW(...)`` made.
            prepared: what ``accelerator.prepare`` returned.

        Raises:
            EnvironmentProblem: another update rule stands in its place.
        """
        wrappers = [item for item in prepared if hasattr(item, "zero_grad") and hasattr(item, "optimizer")]
        for item in wrappers:
            if self.steps_as(handed_over, item.optimizer):
                return item
        kinds = ", ".join(type(item.optimizer).__name__ for item in wrappers) or "none"
        raise EnvironmentProblem(
            f"optimizer: accelerate replaced {type(handed_over).__name__} by {kinds}. Its update rule would not be the "
            "one asked for. Run without offload of the optimizer, or set MOSS_LOWMEM=0."
        )

    def steps_as(self, handed_over: Any, optimizer: Any) -> bool:
        """Whether ``optimizer`` follows the rule of the one that was handed over."""
        return optimizer is handed_over

    def check_host_room(self, needed: int) -> None:
        """Called by every process before it takes so many bytes of host memory, or none.

        Raises:
            EnvironmentProblem: all of a machine's processes together need more than it has.
        """

    def before_prepare(self, backbone: nn.Module) -> None:
        """The model is complete, and ``accelerator.prepare`` comes next."""

    def complete(self, weights: dict[str, torch.Tensor], model: nn.Module) -> dict[str, torch.Tensor]:
        """Returns what ``accelerator.get_state_dict`` gave as it has to be saved.

        Args:
            weights: by name; the same tensor for tied weights where they are one.
            model: the trainer's, without accelerate's wrapper.
        """
        return weights

    def gathered(self, parameters: Iterable[nn.Parameter]) -> AbstractContextManager[object]:
        """While it is open, ``parameters`` are whole; every process has to open it."""
        return nullcontext()
