"""A training that writes resume points and goes on from one.

The loop is upstream's. It passes the layer at the end of each micro-batch (``accumulate``), and there, after an
optimizer step, the scheduler's step and ``zero_grad``, a point is taken: what changes with every step and is small (the
*mark*) is noted each time, weights and optimizer states are written when a point is due. A signal in the middle of an
accumulation window is answered with the last mark: nothing large has changed since, and the window is run again.

A resumed process lets the loop run to the same place with placeholders and restores the mark there.

Several processes under DDP hold the same weights and states, which the main one writes; each adds what is its own, and
the point gets its name when all of it is there. They agree after every micro-batch whether to save and to stop, so that
a signal to one of them stops all at the same place.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, Protocol

import torch

from ..saving import check_texts
from . import random_states
from .equality import check_equality
from .identity import base_fingerprint, model_fingerprint, records_fingerprint
from .origin import Origin
from .point import FOLDER
from .position import Position
from .quiet import Quiet
from .ranks import Ranks
from .record_order import RecordOrder
from .signals import StopWish
from .tensors import trained_parameters
from .watched import LoopObjects
from .writer import PointWriter, ResumeOptions

# How often several processes ask each other during a replay, in micro-batches: a tenth of a second.
REPLAY_ASKS = 512


class Carried(Protocol):
    """What a point holds for somebody else."""

    def step_done(self, steps: int) -> None:
        """An optimizer step is done, and will be noted next."""

    def values(self) -> dict[str, Any]:
        """Returns JSON values for the point of this step."""

    def restore(self, values: dict[str, Any]) -> None:
        """Goes on from them."""


class ResumableRun:
    """See the module.

    Args:
        options: the user's.
        family: its name.
        settings: the layer's, for the record.
        versions: of the layer and of what it stands on, for the record.
        say: logs a line.
        arrived: is given the steps that are done when a replay ends.

    Attributes:
        position: how far the training has come.
        replaying: finished micro-batches are passing; nothing is computed.
        quiet: upstream's log lines are not to be seen.
        validation: is told of each optimizer step before it is noted, and has its own part of a point.
        order: which records the next micro-batches are made of.
        loader: class of the trainer's data loader.
    """

    device = torch.device("cpu")

    def __init__(
        self,
        options: ResumeOptions,
        family: str,
        *,
        settings: dict[str, Any],
        versions: dict[str, str],
        say: Callable[[str], None],
        arrived: Callable[[int], object] = lambda steps: None,
    ) -> None:
        self._arrived = arrived
        self.options, self._say = options, say
        self._facts: dict[str, Any] = {"family": family, "settings": settings, "versions": versions}
        self._origin = Origin(say)
        self._writer = PointWriter(options, self._facts, say)
        self._objects = LoopObjects(lambda: self.replaying)
        self.position = Position()
        self.replaying = False
        self.quiet = Quiet()
        self.validation: Carried | None = None
        self.order = RecordOrder()
        self.loader: type[Any] = object
        self._stop = StopWish(say)
        self._arguments: dict[str, Any] = {}
        self._ranks = Ranks()
        self._model: Any = None
        self._generator: torch.Generator | None = None
        self._epoch_start: random_states.State = {}
        self._before_rewind: random_states.State = {}
        self._mark: dict[str, Any] | None = None
        self._own: dict[str, Any] = {}
        self._replay_began = 0.0

    # -- before training -----------------------------------------------------------------------------------------

    def started(self, output_folder: Path, arguments: dict[str, Any], *, is_main: bool = True) -> None:
        """The trainer's arguments are known: finds the point to go on from, and checks what can be checked.

        Args:
            output_folder: of the trainer.
            arguments: all of them.
            is_main: this process decides; the others learn from it in :meth:`accelerator_created`.

        Raises:
            StateError: the point is not whole, or belongs to another training.
            EnvironmentProblem: a path could be noted in no point and no checkpoint.
        """
        check_texts({**self._facts["settings"], **arguments})
        self._writer.root, self._arguments = output_folder.resolve() / FOLDER, dict(arguments)
        self._facts["arguments"] = {name: value for name, value in arguments.items() if _is_plain(value)}
        if is_main:
            self._origin.find(self.options.resume, output_folder, self._facts)

    def is_told_to_stop(self) -> bool:
        """Whether a process was told to end, so that all will after this micro-batch; all have to ask together."""
        return self.options.saves and self._ranks.largest([self._stop.number or 0])[0] > 0

    @property
    def goes_on(self) -> bool:
        """Whether the run continues from a point."""
        return self._origin.point is not None

    def note(self, name: str, value: Any) -> None:
        """Has every point hold a value, as JSON knows it."""
        self._facts[name] = value

    def noted(self, name: str) -> Any:
        """What :meth:`note` was given in the run that continues; None where there is nothing."""
        return self._origin.values.get(name) if self.goes_on else None

    def accelerator_created(self, device: torch.device, rank: int, processes: int) -> None:
        """The process knows its place; all learn of the point that the main one has found.

        Raises:
            StateError: this process cannot read it, or it was saved by another number of processes.
        """
        self.device, self._ranks = device, Ranks(rank, processes)
        if self.options.saves:
            self._ranks.open_channel()
        if self.options.resume != "off":
            self._origin.share(self._ranks)

    def records_known(self, records: Any) -> None:
        """The trainer's records, in its order; the first call counts.

        Raises:
            StateError: they are not those of the point.
        """
        if "records" in self._facts or not (self.options.saves or self.goes_on):
            return
        self._facts["records"] = records_fingerprint(records) if records is not None else "unknown"
        self._origin.check_records(self._facts["records"], self._ranks.rank)

    def loader_made(self, loader: Any) -> None:
        """The trainer has built its data loader."""
        self.records_known(getattr(loader.dataset, "records", None))

    def prepared(self, objects: tuple[Any, ...], model: Any, optimizer: Any, scaler: Any) -> None:
        """All that a point holds exists; loads weights and optimizer states of the point to go on from.

        Args:
            objects: what ``Accelerator.prepare`` gives the loop; from here on its calls are watched.
            model: the trained one, on its device.
            optimizer: the layer's.
            scaler: a ``GradScaler``, or None.

        Raises:
            StateError: the point is of another model, of other trained weights, or of another optimizer.
        """
        self._objects.prepared(objects, optimizer, scaler, self.loader)
        if not (self.options.saves or self.goes_on):
            return
        self._model, self._facts["model"] = model, model_fingerprint(model)
        if self._facts["settings"]["method"] == "full":  # adapters begin at random values, not at the base's
            self._facts["base"] = base_fingerprint(model)
        if self.options.saves:
            self._writer.attach(model, optimizer)
        if self.goes_on:
            self._origin.load(trained_parameters(model), optimizer, {**self._facts, "arguments": self._arguments})
            self._objects.keep_forward_out(self.replayed_loss)
            self.replaying = True
            self._replay_began = time.perf_counter()

    # -- upstream's loop -----------------------------------------------------------------------------------------

    def begin_epoch(self, generator: torch.Generator | None) -> int | None:
        """See :class:`.loader.EpochPlan`."""
        self.position.begin_epoch()
        self._generator = generator
        if not self.replaying:
            self.quiet.end()
            if self.options.saves:
                self._stop.listen()
                self._epoch_start = random_states.capture(self.device, generator)
            return 0
        self.quiet.begin()
        if self.options.saves:
            self._stop.listen()
        reached = self._origin.reached
        if self.position.epoch < reached.epoch:
            return None
        self._epoch_start = self._origin.own_values(self._ranks.rank)["epoch_start"]
        return reached.batches

    def rewind(self, generator: torch.Generator | None) -> None:
        """See :class:`.loader.EpochPlan`."""
        self._before_rewind = random_states.capture(self.device, generator)
        random_states.restore(self._epoch_start, self.device, generator)

    def forward_again(self, generator: torch.Generator | None) -> None:
        """See :class:`.loader.EpochPlan`."""
        random_states.restore(self._before_rewind, self.device, generator)

    def micro_batch_begins(self) -> None:
        """The loop has entered ``accumulate``."""
        if not self.replaying:
            self.quiet.end()

    def replayed_loss(self) -> torch.Tensor:
        """Stands for the loss of a finished micro-batch."""
        return self._origin.replayed_loss(self.position.micro_batches)

    def micro_batch_done(self, window_done: bool) -> None:
        """The loop leaves ``accumulate`` without an error.

        Args:
            window_done: the accumulation window ended with this micro-batch.

        Raises:
            SystemExit: the run was asked to stop.
        """
        stepped, at_step = self._objects.step_was_called(), False
        self.position.micro_batch_done()
        if self.replaying:
            if self.position.micro_batches == self._origin.reached.micro_batches:
                self._arrive()
        elif not stepped:
            self.position.skipped.append(self.position.micro_batches - 1)
        elif window_done:
            self.position.steps += 1
            if self.validation is not None:
                self.validation.step_done(self.position.steps)
            at_step = True
        if self.options.saves:
            self._save_or_stop(at_step)

    def _save_or_stop(self, at_step: bool) -> None:
        """Does what is due, in all processes together."""
        if self.replaying and self._ranks.several and self.position.micro_batches % REPLAY_ASKS:
            return
        if at_step:
            self._take_mark()
        due = at_step and self._writer.is_due(self.position.steps)
        stop, due_somewhere = self._ranks.largest([self._stop.number or 0, due])
        if due_somewhere:
            self._save()
        if stop:
            self._stop.number = stop
            self._stop_now()

    def _take_mark(self) -> None:
        self._own = {
            "random": random_states.capture(self.device, self._generator),
            "epoch_start": self._epoch_start,
            "records": self._facts["records"],
        }
        self._mark = {
            "position": self.position.as_values(),
            **self._objects.values(),
            "validation": self.validation.values() if self.validation is not None else {},
        }

    def _save(self) -> bool:
        """Writes a point of the mark; returns whether it stands.

        Raises:
            NumericsError: processes hold other weights or states than the main one.
        """
        assert self._mark is not None
        check_equality(self._ranks, self.position.steps, trained_parameters(self._model), self._objects.optimizer)
        own = self._ranks.gathered(self._own)
        written = self._ranks.of_main(self._ranks.is_main and self._writer.write(self._mark, own))
        if written:
            self._writer.stands_at(self._mark["position"]["steps"])
        else:
            self._writer.waits_anew()
        return written

    def _arrive(self) -> None:
        """The replay has come to the point: the rest of it is restored here, where it was noted."""
        self._origin.check_arrival(self.position)
        self._origin.restore_loop(self._objects, self._arguments)
        own, self.position = self._origin.own_values(self._ranks.rank), self._origin.reached
        self._writer.stands_at(self.position.steps)
        random_states.restore(own["random"], self.device, self._generator)
        self._objects.let_forward_in()
        self.replaying = False
        self._arrived(self.position.steps)
        seconds = max(time.perf_counter() - self._replay_began, 1e-9)
        self._say(
            f"resume replayed={self.position.micro_batches} micro-batches seconds={seconds:.2f} "
            f"next_step={self.position.steps + 1}"
        )
        if self.validation is not None:
            self.validation.restore(self._origin.values.get("validation", {}))
            self.validation.step_done(self.position.steps)  # where the signal to stop came before the evaluation
        if self.options.saves:
            self._take_mark()

    def _stop_now(self) -> None:
        """Ends the process, with a point of the last step unless there is one."""
        steps = self._mark["position"]["steps"] if self._mark is not None else 0
        if self.replaying:
            self._say("stopped before anything was computed: the resume point stands as it was")
        elif self._mark is None:
            self._say("stopped before the first optimizer step: there is nothing to resume")
        elif steps == self._writer.saved_steps or self._save():
            point = self._writer.root / f"step-{steps}"
            # `auto` would find the point by itself; `off`, or the path of an older one, would not.
            self._say(
                f"stopped after step {steps}. To go on, start the same command again with "
                f"MOSS_LOWMEM_RESUME={'auto' if self.options.resume == 'auto' else point} (the point is {point})"
            )
        self._stop.stop_listening()
        raise SystemExit(self._stop.exit_status)


def _is_plain(value: Any) -> bool:
    return value is None or isinstance(value, (str, int, float, bool))
