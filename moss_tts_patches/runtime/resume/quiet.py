"""Keeps a replay out of the logs: what upstream prints and sends there was printed and sent by the interrupted run."""

from __future__ import annotations

import sys
from typing import Any


class Quiet:
    """A switch; upstream's lines pass through the layer's ``Accelerator``, which asks it.

    wandb is a module of its own, and upstream calls ``wandb.log`` directly: that name is taken away meanwhile.
    """

    def __init__(self) -> None:
        self.on = False
        self._wandb_log: Any = None

    def begin(self) -> None:
        """Upstream's loop has begun; wandb is imported by then if it is used."""
        self.on = True
        wandb = sys.modules.get("wandb")
        if wandb is not None and self._wandb_log is None and hasattr(wandb, "log"):
            self._wandb_log = wandb.log  # type: ignore[attr-defined]
            wandb.log = lambda *args, **options: None  # type: ignore[attr-defined]

    def end(self) -> None:
        """Something is computed again: lines and wandb's values pass."""
        if not self.on:
            return
        self.on = False
        if self._wandb_log is not None:
            sys.modules["wandb"].log = self._wandb_log  # type: ignore[attr-defined]
            self._wandb_log = None
