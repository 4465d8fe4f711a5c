"""What a run decides before its model is loaded: how the loss is computed, and where things stand."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..engines import TrainingEngine
from ..errors import SettingsError
from ..families.family import Family
from ..loss.engine import EngineOptions
from ..memory.planner import Choice
from ..settings import Settings
from .plan import card_memory, longest_micro_batch, longest_record, plan_run

if TYPE_CHECKING:
    from ..adapters.plan import AdapterPlan
    from ..data.install import CheckedData


class Decisions:
    """The user's wishes, what the trainer's arguments and the engine allow of them, and the planner's choice.

    Args:
        settings: the user's.
        family: of the model.
        say: logs a line.
        adapters: what adapters the run makes; None where all weights are trained.

    Attributes:
        schedule: of the loss.
        choice: the planner's; None where nothing was planned.
        checkpointing_asked: the trainer's command line asks for checkpointing.
    """

    def __init__(
        self, settings: Settings, family: Family, say: Callable[[str], None], adapters: AdapterPlan | None = None
    ) -> None:
        self._settings, self._family, self._say, self._adapters = settings, family, say, adapters
        self.schedule: str = settings.schedule
        self.choice: Choice | None = None
        self.checkpointing_asked = False
        self._arguments: Any = None
        self._parallel: TrainingEngine

    def arguments_known(self, namespace: Any) -> None:
        """The trainer's arguments are parsed."""
        self._arguments = namespace
        # A trainer whose own parser lacks the flag never calls the model's enabling method.
        self.checkpointing_asked = bool(getattr(namespace, "gradient_checkpointing", False))
        reason = self._family.autograd_reason(namespace)
        if reason is not None and self.schedule != "autograd":
            self._say(f"schedule=autograd instead_of={self.schedule} reason='{reason}'")
            self.schedule = "autograd"

    def engine_known(self, parallel: TrainingEngine) -> None:
        """The engine that trains is known."""
        self._parallel = parallel
        reason = parallel.autograd_reason
        if reason is not None and self.schedule != "autograd":
            self._say(f"schedule=autograd instead_of={self.schedule} engine='{parallel.title}' reason='{reason}'")
            self.schedule = "autograd"

    @property
    def engine_options(self) -> EngineOptions:
        """Of the loss engine."""
        return EngineOptions(
            schedule=self.schedule,
            chunk_frames=self._settings.chunk_frames,
            by_module=self._parallel.by_module,
        )

    def plan(
        self,
        model_class: Any,
        config: Any,
        accelerator: Any,
        checked: CheckedData | None,
        repository: Path,
    ) -> None:
        """Chooses what the user has not set, for this card and these records; without a card, nothing.

        Raises:
            LowMemError: no plan fits.
        """
        card = card_memory(accelerator.device, self._settings.vram)
        plans = self._settings.plan != "off" and self._parallel.autograd_reason is None
        if not plans or card is None or checked is None:
            return
        lengths, arguments = checked.report.positions, self._arguments
        self.choice = plan_run(
            self._family,
            model_class,
            config,
            batch=longest_micro_batch(lengths, checked.report.supervised, arguments.per_device_batch_size),
            card_bytes=card,
            accumulation=accelerator.gradient_accumulation_steps,
            pinned=self._pinned(accelerator),
            method=self._settings.method,
            adapters=self._adapters,
            lengths=lengths,
            repository=repository,
            say=self._say,
        )
        self.schedule = self.choice.rung.schedule

    def _pinned(self, accelerator: Any) -> dict[str, Any]:
        pinned = self._settings.pinned_rung()
        if self.schedule == "autograd":  # asked for, or the only one that can do what was asked for
            pinned["schedule"] = "autograd"
        if accelerator.scaler is not None:
            pinned["gradients"] = "device"
        return pinned

    def longest_record(self, model_class: Any, config: Any, accelerator: Any, checked: CheckedData) -> int | None:
        """Returns how many positions a record may have for the card, None where every one fits.

        Raises:
            LowMemError: there is nothing to plan for, or not even the shortest record fits.
        """
        card = card_memory(accelerator.device, self._settings.vram)
        if card is None:
            raise SettingsError(
                "MOSS_LOWMEM_MAX_POSITIONS=auto: there is no card whose memory could set the limit. Set a number, or "
                "the memory to plan for in GiB (MOSS_LOWMEM_VRAM)."
            )
        if self._parallel.autograd_reason is not None:
            raise SettingsError(
                f"MOSS_LOWMEM_MAX_POSITIONS=auto: the planner knows one process, and this training runs under "
                f"{self._parallel.title}. Set a number; moss-lowmem plan shows what a length needs."
            )
        return longest_record(
            self._family,
            model_class,
            config,
            positions=checked.report.positions,
            supervised=checked.report.supervised,
            records=self._arguments.per_device_batch_size,
            card_bytes=card,
            accumulation=accelerator.gradient_accumulation_steps,
            pinned=self._pinned(accelerator),
            method=self._settings.method,
            adapters=self._adapters,
            say=self._say,
        )

    @property
    def checkpoints_layers(self) -> bool:
        """Whether the backbone's layers are recomputed in the backward."""
        wanted = self._settings.checkpoints_always if self.choice is None else self.choice.rung.checkpointing
        return wanted or self.checkpointing_asked

    @property
    def placements(self) -> Any:
        """What says where gradients, states and weights stand: the planner's rung, or the settings."""
        return self._settings if self.choice is None else self.choice.rung
