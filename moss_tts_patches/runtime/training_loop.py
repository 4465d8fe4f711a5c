"""The layer's part in upstream's loop: forward, backward, clipping and step of one micro-batch after another."""

from __future__ import annotations

import functools
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from ..engines import TrainingEngine
from ..errors import NumericsError, ending_the_run, first_ten
from ..families.family import Family, LossOutput, TrainingContext
from .nonfinite import NonFiniteGradients
from .recording import RunRecord
from .report import StepClock
from .resume.run import ResumableRun
from .stores import Stores
from .training_data import TrainingData
from .validation.evaluation import CallForm
from .watch import MachineWatch

if TYPE_CHECKING:
    from ..adapters.training import AdapterTraining


@dataclass
class TrainingLoop:
    """Everything that a micro-batch meets; made once the model is loaded.

    Attributes:
        context: what the family's forward is given.
        before_first: runs before the first micro-batch that is computed.
        tries_longest: the longest records go through forward and backward before the first micro-batch.
        nonfinite: remembers a window for the case that its gradients are not finite.
        trainer_decides: the trainer's own option says what becomes of values that are not finite.
        optimizer: the layer's; None until it is built.
        total_steps: of the training; None where it is not known.
        nonfinite_gradients: names of the parameters whose gradients were not finite when they were clipped last.
        call_form: how the trainer calls its loss; None before it has.
    """

    family: Family
    accelerator: Any
    parallel: TrainingEngine
    context: TrainingContext
    stores: Stores
    data: TrainingData
    resume: ResumableRun
    clock: StepClock
    record: RunRecord
    watch: MachineWatch
    adapters: AdapterTraining | None
    before_first: Callable[[], object]
    tries_longest: bool
    nonfinite: NonFiniteGradients
    trainer_decides: bool
    say: Callable[[str], None]
    optimizer: Any = None
    total_steps: int | None = None
    nonfinite_gradients: list[str] = field(default_factory=list)
    call_form: CallForm | None = None
    _diverted: Callable[[Any, dict[str, Any]], Any] | None = None
    _begun: bool = False
    _losses: int = 0
    _norm_known: bool = False
    _leaves_out: bool = False
    _left_out: int = 0

    def drive(self, optimizer: Any) -> None:
        """Takes part in the steps of the layer's optimizer."""
        self.optimizer = optimizer
        optimizer.register_step_pre_hook(self._before_step)
        optimizer.register_step_post_hook(self._after_step)

    def watch_step(self, wrapper: Any) -> None:
        """Times and guards the step of the optimizer that accelerate made of the layer's, or leaves it out."""
        step = self.record.within("step", self.watch.guard.within(self._name_of_step, wrapper.step))

        @functools.wraps(step)
        def unless_not_finite(*args: Any, **options: Any) -> Any:
            if not self.accelerator.sync_gradients:
                return step(*args, **options)
            if not self._norm_known and self.accelerator.scaler is None:
                with ending_the_run():
                    self._look_at_gradients()
            if self.accelerator.scaler is None:
                # accelerate's mark of a step that a loss scaler left out: schedulers stand still then.
                wrapper._is_overflow = self._leaves_out
            result = None if self._leaves_out else step(*args, **options)
            if wrapper.step_was_skipped:
                self._left_out += 1
                self._window_done(skipped=True)
            return result

        wrapper.step = unless_not_finite

    def _name_of_step(self) -> Any:
        return "optimizer step" if self.clock.steps else "optimizer state creation"

    def forward(self, model: Any, batch: dict[str, Any]) -> Any:
        """One training forward of upstream's loop."""
        if self._diverted is not None:
            return self._diverted(model, batch)
        if self.resume.replaying:
            return LossOutput(loss=self.resume.replayed_loss())
        if not self._begun:
            self._begun = True
            self.call_form = CallForm.of(batch)
            self.before_first()
            if self.tries_longest and torch.is_grad_enabled() and self.parallel.can_try_longest:
                self._try_longest(model, batch)
            self.record.begins(self.clock.steps, self.total_steps)
        self.clock.start(time.perf_counter())
        with self.record.phase("forward"):
            output = self._training_forward(model, batch)
        self.record.micro_batch(output.loss, batch)
        self.nonfinite.micro_batch(output.loss, self.resume.order.next())
        return output

    @contextmanager
    def diverted_to(self, function: Callable[[Any, dict[str, Any]], Any]) -> Iterator[None]:
        """While it is open, forwards are not training's: ``function`` gets them, and nothing here counts them."""
        self._diverted = function
        try:
            yield
        finally:
            self._diverted = None

    def _training_forward(self, model: Any, batch: dict[str, Any]) -> Any:
        with self.watch.guard.phase("forward chunk"):
            output = self.family.training_output(model, batch, self.context)
        self._losses += 1
        return output

    def _try_longest(self, model: Any, batch: dict[str, Any]) -> None:
        """Runs the longest records forward and backward before the first micro-batch; nothing of it stays."""

        # From a step's second micro-batch on, gradients on the GPU are there when the forward begins.
        accumulates = self.accelerator.gradient_accumulation_steps > 1 and self.stores.placement.gradients == "device"

        def run(longest: dict[str, Any]) -> None:
            for _ in range(2 if accumulates else 1):
                # Gradients that nobody keeps need not meet those of other processes.
                with self.accelerator.no_sync(model):
                    loss = self._training_forward(model, longest).loss.float()
                    # The trainer calls backward outside the autocast that the model's forward stands in.
                    with torch.autocast(self.accelerator.device.type, enabled=False):
                        self.accelerator.backward(loss)
                del loss

        self.data.try_longest(batch, run, self.optimizer.zero_grad)

    def before_backward(self) -> None:
        """A loss is about to be back-propagated: it must be ours.

        Raises:
            NumericsError: it is not.
        """
        if not self._losses:
            raise NumericsError(
                "loss: accelerator.backward was called with a loss that did not come through the layer. Something "
                "replaced the model's forward after activation; unset MOSS_LOWMEM, or find what patches it."
            )
        self._losses = 0

    def after_backward(self) -> None:
        """Every gradient of the micro-batch has arrived."""
        self.stores.gradients.end_micro_batch(self.context.expected_contributions)
        if self.parallel.owns_optimizer and self.accelerator.sync_gradients:
            self._after_step()

    def clip_gradients(self, parameters: list[nn.Parameter], max_norm: float, norm_type: float) -> torch.Tensor:
        """Clips by the global norm and returns it, wherever the gradients live; names a gradient that is not finite.

        Upstream would go on with a norm of nan and say nothing; here the cause is named before clipping spreads it to
        every parameter.

        Raises:
            NumericsError: the norm is not finite, and the training is to stop then.
        """
        store = self.stores.gradients
        self.record.gradient_norm = total = store.total_norm(parameters, norm_type)
        self._check_norm(parameters, total)
        if not self._leaves_out:
            store.clip(parameters, max_norm, total)
        return total

    def _look_at_gradients(self) -> None:
        """The trainer does not clip (``--max-grad-norm 0``): one more pass over the gradients."""
        parameters = list(self.optimizer.names)
        self.record.gradient_norm = total = self.stores.gradients.total_norm(parameters, 2.0)
        self._check_norm(parameters, total)

    def _check_norm(self, parameters: list[nn.Parameter], total: torch.Tensor) -> None:
        self._norm_known, self._leaves_out, self.nonfinite_gradients = True, False, []
        if torch.isfinite(total):
            return
        step = self.clock.steps + 1
        self.nonfinite_gradients = names = self.stores.gradients.nonfinite_names(parameters)
        if self.trainer_decides or self.accelerator.scaler is not None:  # a scaler leaves the step out and goes on
            self.say(f"nonfinite_gradient step={step} norm={total.item()} parameters={first_ten(names, ',')}")
            if self.trainer_decides:  # its loop leaves the window out and does not count it
                self.record.window_left_out()
                self.nonfinite.window_done()
            return
        finding = self.nonfinite.find(step, total, names)
        self.record.event(finding.as_values(self.nonfinite.policy))
        if self.nonfinite.policy == "stop":
            self.record.ended()
            raise self.nonfinite.stop(finding, saves=self.resume.options.saves)
        self.say(f"nonfinite=left_out {finding.describe()}")
        self._leaves_out = True

    def _before_step(self, *_: Any) -> None:
        if self.adapters is not None and self.clock.steps == self._left_out:
            self.adapters.check_gradients(self.stores.gradients)

    def _after_step(self, *_: Any) -> None:
        self._window_done()
        if self.stores.parking is not None:
            self.stores.parking.weights_changed()

    def _window_done(self, skipped: bool = False) -> None:
        self.clock.step(time.perf_counter())
        self.record.step(self.clock.steps, self.data.micro_batches, self.optimizer.param_groups[0]["lr"], skipped)
        self.nonfinite.window_done()
        self._norm_known = self._leaves_out = False
