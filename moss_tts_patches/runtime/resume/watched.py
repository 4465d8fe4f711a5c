"""What ``Accelerator.prepare`` gave upstream's loop: it changes nothing in a replay, and the layer sees its calls."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable
from types import SimpleNamespace
from typing import Any

import torch
from torch import nn

from .schedule import scheduler_values


class LoopObjects:
    """The loop's optimizer, scheduler, loss scaler and data loader.

    Args:
        is_replaying: whether finished micro-batches are passing.

    Attributes:
        optimizer: the layer's.
        scheduler: torch's own, or None.
        scaler: a ``GradScaler``, or None.
        own_groups: the optimizer's parameter groups as this run's options made them.
    """

    def __init__(self, is_replaying: Callable[[], bool]) -> None:
        self._is_replaying = is_replaying
        self.optimizer: Any = None
        self.scheduler: Any = None
        self.scaler: Any = None
        self.own_groups: list[dict[str, Any]] = []
        self._step_called = False
        self._wrapper: nn.Module | None = None

    def prepared(self, objects: Iterable[Any], optimizer: Any, scaler: Any, loader: type[Any]) -> None:
        """Watches the calls of ``objects`` from here on.

        Args:
            objects: what ``prepare`` returned.
            optimizer: the layer's.
            scaler: a ``GradScaler``, or None.
            loader: class that a data loader gets.
        """
        self.optimizer, self.scaler = optimizer, scaler
        self.own_groups = [dict(group) for group in optimizer.param_groups]
        for item in objects:
            if isinstance(item, nn.Module) and hasattr(item, "module"):
                self._wrapper = item
            elif hasattr(item, "base_dataloader"):
                item.base_dataloader.__class__ = loader  # accelerate built torch's own class from the trainer's parts
            elif hasattr(item, "scheduler") and hasattr(item, "get_last_lr"):
                self.scheduler = item.scheduler
                item.step = self._unless_replayed(item.step)
            elif not isinstance(item, nn.Module) and hasattr(item, "optimizer") and hasattr(item, "zero_grad"):
                # DeepSpeed puts its own in the place of the layer's; its steps are counted all the same.
                item.step, item.zero_grad = self._counted(item.step), self._unless_replayed(item.zero_grad)

    def keep_forward_out(self, loss: Callable[[], torch.Tensor]) -> None:
        """Has the wrapper of several processes answer with ``loss()`` until :meth:`let_forward_in`.

        DDP's own forward makes its reducer wait for a backward. None comes in a replay, so that the next one, which may
        be in the middle of a window, would be reduced at once: the same gradients, but added up in another order.
        """
        if self._wrapper is not None:
            self._wrapper.forward = lambda *_, **__: SimpleNamespace(loss=loss())

    def let_forward_in(self) -> None:
        """Ends :meth:`keep_forward_out`."""
        if self._wrapper is not None:
            vars(self._wrapper).pop("forward", None)

    def _counted(self, step: Callable[..., Any]) -> Callable[..., Any]:
        """Wraps the prepared optimizer's ``step``, which upstream calls for each micro-batch that it does not skip."""

        @functools.wraps(step)
        def counted(*args: Any, **options: Any) -> Any:
            self._step_called = True
            return None if self._is_replaying() else step(*args, **options)

        return counted

    def _unless_replayed(self, call: Callable[..., Any]) -> Callable[..., Any]:
        """Wraps a call of the loop that changes what the point will restore."""

        @functools.wraps(call)
        def unless(*args: Any, **options: Any) -> Any:
            return None if self._is_replaying() else call(*args, **options)

        return unless

    def step_was_called(self) -> bool:
        """Whether the loop called the optimizer's ``step`` since this was asked last."""
        called, self._step_called = self._step_called, False
        return called

    def values(self) -> dict[str, Any]:
        """Returns states of scheduler and loss scaler, as JSON values."""
        return {
            "scheduler": scheduler_values(self.scheduler),
            "scaler": self.scaler.state_dict() if self.scaler is not None else None,
        }
