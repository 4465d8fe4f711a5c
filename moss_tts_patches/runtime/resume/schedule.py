"""The learning rate of a resumed training: as it was, or as the changed options say."""

from __future__ import annotations

from typing import Any


def scheduler_values(scheduler: Any) -> dict[str, Any] | None:
    """Returns a scheduler's state, as JSON values."""
    return None if scheduler is None else scheduler.state_dict()


def restore_schedule(scheduler: Any, saved: dict[str, Any] | None) -> None:
    """Goes on exactly where the saved run stood; the optimizer's own rate is part of its state."""
    if scheduler is not None and saved is not None:
        scheduler.load_state_dict(saved)


def move_schedule(scheduler: Any, optimizer: Any, saved: dict[str, Any] | None, groups: list[dict[str, Any]]) -> None:
    """Puts this run's own schedule, whose options have changed, at the saved step.

    Args:
        scheduler: of this run, at its first step.
        optimizer: holds the saved run's values.
        saved: the saved run's scheduler.
        groups: this run's own parameter groups, as they were made.

    Source: torch ``LambdaLR.get_lr``; every schedule of transformers' ``get_scheduler`` that a trainer offers is one.
    """
    rates = getattr(scheduler, "lr_lambdas", None)
    if scheduler is None or saved is None or rates is None:
        restore_schedule(scheduler, saved)
        return
    scheduler.last_epoch, scheduler._step_count = saved["last_epoch"], saved["_step_count"]
    for group, own, base, rate in zip(optimizer.param_groups, groups, scheduler.base_lrs, rates):
        group.update({key: own[key] for key in ("weight_decay", "betas", "eps", "initial_lr") if key in own})
        group["lr"] = base * rate(scheduler.last_epoch)
    scheduler._last_lr = [group["lr"] for group in optimizer.param_groups]
