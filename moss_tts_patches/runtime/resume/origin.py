"""The point that a run goes on from: found, compared with the training that has just started, and loaded."""

from __future__ import annotations

import functools
import socket
from collections.abc import Callable
from pathlib import Path
from typing import Any, NoReturn

import torch

from ...errors import StateError
from .identity import LEARNING, MENTIONED, MENTIONED_SETTINGS, describe, differing, why_not
from .point import Point, find_point, read_point
from .position import Position
from .ranks import Ranks
from .schedule import move_schedule, restore_schedule
from .tensors import check_weights, read_states, read_weights
from .watched import LoopObjects

# Losses of a replay: made once, since a new tensor each time would be a tenth of its cost.
_ZERO, _NOT_FINITE = torch.zeros(()), torch.tensor(float("nan"))


class Origin:
    """Where a run starts: at a point, or at the beginning.

    Args:
        say: logs a line.

    Attributes:
        point: to go on from, or None.
    """

    def __init__(self, say: Callable[[str], None]) -> None:
        self.point: Point | None = None
        self._say = say

    def find(self, wanted: str, output_folder: Path, facts: dict[str, Any]) -> None:
        """Looks for the point that the user wants.

        Args:
            wanted: ``auto``, ``off``, or a path.
            output_folder: of the trainer.
            facts: of this training: ``family``, ``settings`` and ``arguments``.

        Raises:
            StateError: the point is not whole, or belongs to another training.
        """
        self.point = find_point(wanted, output_folder, self._say)
        if self.point is not None:
            reason = why_not(self.point.values, facts)
            if reason is not None:
                self.refuse(reason)

    def share(self, ranks: Ranks) -> None:
        """All processes go on from the point that the main one has found.

        Raises:
            StateError: this process cannot read it, or it was saved by another number of processes.
        """
        found = ranks.of_main(None if self.point is None else (str(self.point.folder.resolve()), self.point.serial))
        if found is None:
            self.point = None
            return
        folder, serial = found
        if not ranks.is_main:
            self.point = self._read_shared(Path(folder), serial, ranks.rank)
        assert self.point is not None
        processes = self.point.values["processes"]
        if processes != ranks.count:
            self.refuse(
                f"it was saved by {processes} process(es), and {ranks.count} train now; records are dealt out by their "
                f"number, and each has random numbers of its own. Expected {processes}"
            )

    def _read_shared(self, folder: Path, serial: int, rank: int) -> Point:
        try:
            point = read_point(folder)
        except StateError as error:
            problem = str(error)
        else:
            if point.serial == serial:
                return point
            problem = f"its serial number is {point.serial}, and the main process's is {serial}"
        raise StateError(
            f"process {rank} on {socket.gethostname()} cannot go on from {folder}, which the main process has found: "
            f"{problem} Expected the same folder on every machine: put --output-dir on a disk that they share, or copy "
            "it there; MOSS_LOWMEM_RESUME=off starts anew."
        )

    def refuse(self, what: str) -> NoReturn:
        """Ends the run because the point is of another training.

        Raises:
            StateError: always.
        """
        assert self.point is not None
        raise StateError(
            f"resume point {self.point.folder} does not belong to this training: {what}. Start with what it was saved "
            "with, set MOSS_LOWMEM_RESUME=off to start anew, or use another --output-dir."
        )

    def own_values(self, rank: int) -> dict[str, Any]:
        """Returns what the point holds for this process alone."""
        assert self.point is not None
        return self.point.rank_values(rank)

    def check_records(self, fingerprint: str, rank: int) -> None:
        """Compares the records of this process, which has its own where files were sharded beforehand.

        Raises:
            StateError: they are not those of the point.
        """
        if self.point is None:
            return
        if self.own_values(rank).get("records", self.point.values["records"]) != fingerprint:
            self.refuse("the training records or their order are others (--train-jsonl, skipped records)")

    def load(self, parameters: dict[str, Any], optimizer: Any, facts: dict[str, Any]) -> None:
        """Puts weights and optimizer states in place.

        Args:
            parameters: the trained ones, by name, on their device.
            optimizer: the layer's.
            facts: of this training, with ``model``.

        Raises:
            StateError: the point is of another model, of other trained weights, or of another optimizer.
        """
        assert self.point is not None
        values, folder = self.point.values, self.point.folder
        check_weights(folder, parameters)
        if values["model"] != facts["model"]:
            self.refuse("its model's config or frozen weights are others (--model-path)")
        if "base" in values and values["base"] != facts["base"]:
            self.refuse(
                "it began with other weights (--model-path), which it would put in the place of those loaded now"
            )
        if "adapter" in values and (scaled := differing(values["adapter"], facts["adapter"], tuple(values["adapter"]))):
            self.refuse(f"its adapters' values count by another factor ({describe(scaled)})")
        read_weights(folder, parameters)
        read_states(folder, optimizer, values["optimizer"])
        changed = differing(values["arguments"], facts["arguments"], (*LEARNING, *MENTIONED))
        changed |= differing(values["settings"], facts["settings"], MENTIONED_SETTINGS)
        if changed:
            self._say(
                f"warning: options have changed since the resume point, and count from now on: {describe(changed)}"
            )
        position = values["position"]
        self._say(
            f"resume={folder} step={position['steps']} epoch={position['epoch']} "
            f"micro_batches_of_epoch={position['batches']}"
        )

    @property
    def values(self) -> dict[str, Any]:
        """What the point holds for all processes."""
        assert self.point is not None
        return self.point.values

    @property
    def reached(self) -> Position:
        """How far the point is."""
        assert self.point is not None
        return Position(**self.point.values["position"])

    def replayed_loss(self, micro_batch: int) -> torch.Tensor:
        """A loss that nobody looks at; not finite where upstream left the micro-batch out for that."""
        return _NOT_FINITE if micro_batch in self._skipped else _ZERO

    @functools.cached_property
    def _skipped(self) -> frozenset[int]:
        return frozenset(self.reached.skipped)

    def check_arrival(self, position: Position) -> None:
        """The replay has come to the point's number of micro-batches: it has to stand in the same place.

        Raises:
            StateError: it does not.
        """
        assert self.point is not None
        reached = self.reached
        if (position.epoch, position.batches) != (reached.epoch, reached.batches):
            raise StateError(
                f"resume point {self.point.folder}: after {reached.micro_batches} micro-batches this run is at epoch "
                f"{position.epoch}, batch {position.batches}; expected epoch {reached.epoch}, batch "
                f"{reached.batches}. The number of records or processes has changed."
            )

    def restore_loop(self, objects: LoopObjects, arguments: dict[str, Any]) -> None:
        """Puts scheduler and loss scaler where they stood, or where changed options would have brought them."""
        assert self.point is not None
        values = self.point.values
        if differing(values["arguments"], arguments, LEARNING):
            move_schedule(objects.scheduler, objects.optimizer, values["scheduler"], objects.own_groups)
        else:
            restore_schedule(objects.scheduler, values["scheduler"])
        if objects.scaler is not None and values["scaler"] is not None:
            objects.scaler.load_state_dict(values["scaler"])
