"""How much a run will write to its output folder, so that a full disk is found before the training and not by it."""

from __future__ import annotations

from typing import Any

from ..families.family import Family
from ..settings import Settings


def whole_checkpoints(settings: Settings, family: Family, arguments: Any) -> int:
    """Returns how many times the model's size the run writes to its output folder; adapters are small.

    Args:
        settings: the user's.
        family: of the model.
        arguments: the trainer's command line, parsed.
    """
    saves = getattr(arguments, "num_epochs", 1) + family.extra_checkpoints
    if settings.method != "full":
        return {"none": 0, "last": 1, "all": saves}[settings.merge]
    # A point holds bf16 weights and 8-bit states: twice the weights. One more than are kept while it is written.
    points = 2 * (settings.keep + 1) if settings.save_steps or settings.save_minutes else 0
    return saves + points + 2 * settings.saves_best  # a new best stands beside the former until it is whole
