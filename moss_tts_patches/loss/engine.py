"""Runs a :class:`~.problem.FrameLoss` forward and backward, chunk by chunk.

Three schedules of the same mathematics (design, section 2), in units of one forward pass of the depth model:

* ``fused``: depth model and heads of one chunk together, 3 units, holds the depth gradients during the forward;
* ``staged``: depth forward for all chunks, heads channel by channel over all frames, then depth recomputed and
  back-propagated chunk by chunk; 4 units, 3 for the last chunk, which is kept; and every head's and adapter's gradient
  is complete after one product;
* ``autograd``: the same pieces as ordinary autograd functions, for engines that own the backward.

``fused`` and ``staged`` back-propagate inside the forward: parameter gradients go to the gradient store at once, the
gradient of the hidden states is kept (frames x hidden) and handed to autograd when the outer backward arrives.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass

import torch
from torch import nn

from ..errors import NumericsError
from ..optim.gradients import GradientStore
from . import autograd_schedule, direct_schedules, heads, module_schedule
from .direct_schedules import frame_chunks
from .module_schedule import ByModule
from .problem import FrameLoss

SCHEDULES = ("fused", "staged", "autograd")


@dataclass(frozen=True)
class EngineOptions:
    """Plain values that shape a run of the engine.

    Attributes:
        schedule: one of :data:`SCHEDULES`.
        chunk_frames: frames of the depth model alive at once.
        logits_at_once: logits alive at once, in elements.
        verify_scale: compare the scale that reaches the loss with the one used (off for fake tensors).
        chunks: what ``fused`` and ``staged`` go through, of so many frames in chunks of so many; a simulation leaves
            out those that are like others.
        by_module: ``autograd`` goes through modules alone, for engines that lend a weight only to its own module.
    """

    schedule: str = "staged"
    chunk_frames: int = 32
    logits_at_once: int = heads.LOGITS_AT_ONCE
    verify_scale: bool = True
    chunks: Callable[[int, int], Iterable[slice]] = frame_chunks
    by_module: ByModule | None = None


class LossEngine:
    """Computes losses for one model; remembers only whether a loss still waits for its backward.

    Args:
        options: plain values.
        store: receives the gradients of ``fused`` and ``staged``.
        weights_away: entered while ``fused`` or ``staged`` work, or a loss without gradients, to take weights off the
            device that they do not use.
        observe: is given every loss's problem and ``sums [channels]``, for the log.
    """

    def __init__(
        self,
        options: EngineOptions,
        store: GradientStore,
        weights_away: Callable[[], AbstractContextManager[None]] = nullcontext,
        observe: Callable[[FrameLoss, torch.Tensor], None] = lambda problem, sums: None,
    ) -> None:
        self.options = options
        self.store = store
        self._weights_away = weights_away
        self._observe = observe
        self._waiting = False

    def loss(self, problem: FrameLoss, hidden: torch.Tensor, scale: float) -> tuple[torch.Tensor, torch.Tensor]:
        """Computes the loss and, when gradients are wanted, everything that its backward needs.

        Args:
            problem: heads, labels and coefficients of this micro-batch.
            hidden: ``[frames, hidden]``, the backbone's output at the supervised positions.
            scale: what the loss will be multiplied with before ``backward``: 1 / accumulation steps, times a loss
                scaler's scale. ``fused`` and ``staged`` need it now.

        Returns:
            ``(loss [] float32, sums [channels] float32)``.

        Raises:
            NumericsError: an earlier loss was never back-propagated although its gradients are in the store.
        """
        if not torch.is_grad_enabled() or not (hidden.requires_grad or _wants_gradients(problem)):
            sums = self._sums_alone(problem, hidden)
            self._observe(problem, sums.detach())
            return (problem.coefficients * sums).sum(), sums
        if self.options.schedule == "autograd":
            schedule = module_schedule if self.options.by_module is not None else autograd_schedule
            sums = schedule.channel_sums(problem, hidden, self.options)
            self._observe(problem, sums.detach())
            return (problem.coefficients * sums).sum(), sums.detach()
        if self._waiting:
            raise NumericsError(
                "loss engine: a second training loss was computed before the first was back-propagated. The "
                f"{self.options.schedule} schedule adds gradients during the forward, so the first one would count "
                "without a backward. Evaluate under torch.no_grad(), or set MOSS_LOWMEM_SCHEDULE=autograd."
            )
        # The anchor makes the loss differentiable even where the backbone is frozen.
        anchor = torch.zeros((), device=hidden.device, requires_grad=True)
        with self._weights_away():
            loss, sums = _DirectLoss.apply(hidden, anchor, self, problem, scale)
        self._waiting = True
        self._observe(problem, sums)
        return loss, sums

    def observed_by(self, observe: Callable[[FrameLoss, torch.Tensor], None]) -> LossEngine:
        """Returns an engine that works in the same way, whose losses another one is given."""
        return LossEngine(self.options, self.store, self._weights_away, observe)

    def _sums_alone(self, problem: FrameLoss, hidden: torch.Tensor) -> torch.Tensor:
        """Returns ``[channels]`` float32 where nobody will ask for a gradient."""
        if self.options.by_module is not None:
            return module_schedule.channel_sums(problem, hidden, self.options)
        with self._weights_away():
            return heads.channel_sums(problem, hidden, self.options.chunk_frames)

    def forget(self) -> None:
        """Drops the note that a loss waits for its backward (after an error that ended the micro-batch)."""
        self._waiting = False

    def expected_contributions(self, problem: FrameLoss) -> dict[nn.Parameter, int]:
        """How often each embedding table's gradient arrives from the depth model's inputs in a micro-batch."""
        counts: dict[nn.Parameter, int] = {}
        if self.options.schedule != "autograd":
            for lookup in problem.lookups:
                for parameter in lookup.trained_parameters():
                    counts[parameter] = counts.get(parameter, 0) + 1
        return counts


class _DirectLoss(torch.autograd.Function):
    """The bridge between a schedule that has done its backward already and autograd."""

    @staticmethod
    def forward(ctx, hidden, anchor, engine, problem, scale):  # type: ignore[no-untyped-def]
        run = direct_schedules.fused if engine.options.schedule == "fused" else direct_schedules.staged
        sums, hidden_gradient = run(problem, hidden.detach(), scale, engine.store, engine.options)
        ctx.save_for_backward(hidden_gradient)
        ctx.engine, ctx.scale = engine, scale
        ctx.mark_non_differentiable(sums)
        return (problem.coefficients * sums).sum(), sums

    @staticmethod
    def backward(ctx, gradient, _):  # type: ignore[no-untyped-def]
        engine, scale = ctx.engine, ctx.scale
        engine.forget()
        if engine.options.verify_scale:
            found = gradient.item()
            # float32 carries 7 digits; a wrong scale is off by a factor of two or more.
            if not abs(found - scale) <= 1e-5 * abs(scale):
                raise NumericsError(
                    f"loss engine: the loss was back-propagated with scale {found:g}, its gradients were computed for "
                    f"{scale:g}. Something between the loss and the backward scales it (another accumulation setting, "
                    "a loss scaler). Set MOSS_LOWMEM_SCHEDULE=autograd, which does not need to know, and report it."
                )
        (hidden_gradient,) = ctx.saved_tensors
        return hidden_gradient, None, None, None, None


def _wants_gradients(problem: FrameLoss) -> bool:
    stages = [problem.depth, *(channel.adapter for channel in problem.channels)]
    if any(next(stage.trainable_parameters(), None) is not None for stage in stages if stage is not None):
        return True
    heads_train = any(p.requires_grad for channel in problem.channels for p in channel.projection.parameters())
    return heads_train or any(lookup.trained_parameters() for lookup in problem.lookups)
