"""One pass over the validation records that leaves the training as it was.

The way is the training's: the trainer's own dataset class and collate function, the model as accelerate prepared it,
the family's loss in chunks. Only gradients are off, and dropout: every module is in evaluation mode meanwhile.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import nn

from ...engines.engine import largest_of_all
from ...errors import SeamError
from ...families.family import Family, TrainingContext
from ...loss.loss_sums import LossSums
from ..longest_probe import generators_restored


@dataclass(frozen=True)
class CallForm:
    """How the trainer calls its loss, learnt from one of its calls.

    Attributes:
        tensors: names of the arguments that come out of the collate function.
        others: all other arguments, the same in every call (weights of channels).
    """

    tensors: tuple[str, ...]
    others: dict[str, Any]

    @classmethod
    def of(cls, batch: Mapping[str, Any]) -> CallForm:
        tensors = tuple(name for name, value in batch.items() if isinstance(value, torch.Tensor))
        return cls(tensors, {name: value for name, value in batch.items() if name not in tensors})

    @classmethod
    def from_values(cls, values: Mapping[str, Any]) -> CallForm:
        """Reads what :meth:`as_values` returned."""
        return cls(tuple(values["tensors"]), dict(values["others"]))

    def as_values(self) -> dict[str, Any]:
        """Returns the form for JSON."""
        return {"tensors": list(self.tensors), "others": self.others}

    def arguments(self, collated: Mapping[str, Any], device: torch.device) -> dict[str, Any]:
        """Returns the arguments of a call on a batch of the collate function."""
        return {**self.others, **{name: collated[name].to(device) for name in self.tensors}}


@dataclass(frozen=True)
class Batches:
    """The records as a process gets them, in a fixed order.

    Attributes:
        dataset: of the trainer's class.
        collate: makes a batch of its items.
        indices: of the records of each batch; the last may be smaller.
        counted: how many of the batches count. The others keep a process in step with those that have more.
    """

    dataset: Any
    collate: Callable[[list[Any]], Mapping[str, Any]]
    indices: tuple[tuple[int, ...], ...]
    counted: int

    def __iter__(self) -> Iterator[tuple[Mapping[str, Any], bool]]:
        for number, group in enumerate(self.indices):
            yield self.collate([self.dataset[index] for index in group]), number < self.counted

    @property
    def records(self) -> int:
        return sum(map(len, self.indices[: self.counted]))


def make_batches(
    dataset: Any,
    collate: Callable[[list[Any]], Mapping[str, Any]],
    records: Sequence[Any],
    batch_size: int,
    *,
    of_all: bool,
    accelerator: Any,
) -> Batches:
    """Deals the records out.

    Args:
        dataset: the trainer's; a copy of it gets the records.
        collate: the loader's.
        records: the same in every process, or each process's own.
        batch_size: as in training, so that no batch is larger than one of those.
        of_all: the records are the same in every process, which then share them.
        accelerator: the trainer's.

    Raises:
        SeamError: the dataset does not hold its records as ``records``.
    """
    own = copy.copy(dataset)
    own.records = list(records)
    if not hasattr(dataset, "records") or len(own) != len(records):
        raise SeamError(
            f"seam {type(dataset).__name__}.records: the data set does not hold its records there, so it cannot be "
            "asked for others. Upgrade moss_tts_patches, or train without MOSS_LOWMEM_VALID_JSONL and _SHARE."
        )
    groups = [
        tuple(range(start, min(start + batch_size, len(records)))) for start in range(0, len(records), batch_size)
    ]
    processes, rank = accelerator.num_processes, accelerator.process_index
    mine = groups[rank::processes] if of_all else groups
    forwards = largest_of_all(len(mine), accelerator.device) if processes > 1 else len(mine)
    return Batches(own, collate, (*mine, *groups[:1] * (forwards - len(mine))), len(mine))


@dataclass(frozen=True)
class Result:
    """What an evaluation found, the same in every process.

    Attributes:
        loss: as if all records had come in one micro-batch.
        by_codebook: mean over the labels of each.
        records: how many.
    """

    loss: float
    by_codebook: dict[str, float]
    records: int


class Evaluation:
    """Evaluates the records with the weights as they are.

    Args:
        family: its loss.
        loss_of_trainer: see :meth:`.family.Family.loss_of_trainer`.
        model: as ``accelerator.prepare`` returned it.
        context: of the training.
        batches: see :func:`make_batches`.
        accelerator: the trainer's.
        divert: while it is open, the forward of a training goes to the function that it is given.
    """

    def __init__(
        self,
        family: Family,
        loss_of_trainer: Callable[..., torch.Tensor],
        model: nn.Module,
        context: TrainingContext,
        batches: Batches,
        accelerator: Any,
        divert: Callable[[Callable[[Any, dict[str, Any]], Any]], Any],
    ) -> None:
        self._family, self._loss_of_trainer, self._model = family, loss_of_trainer, model
        self._batches, self._accelerator, self._divert = batches, accelerator, divert
        self._sums = LossSums()
        self._counted = True
        self._context = replace(
            context,
            engine=context.engine.observed_by(self._observe),
            finite_empty_channels=True,
            say_once=lambda line: None,
            expected_contributions={},
        )

    def run(self, form: CallForm, given_up: Callable[[], bool] = lambda: False) -> Result | None:
        """Evaluates all records.

        Args:
            form: how the trainer calls its loss.
            given_up: asked before each batch; where it says yes, there is no result.
        """
        self._sums = LossSums()
        device = self._accelerator.device
        with torch.no_grad(), generators_restored(), evaluation_mode(self._model), self._divert(self._forward):
            for collated, counts in self._batches:
                if given_up():
                    return None
                self._counted = counts
                self._loss_of_trainer(self._model, **form.arguments(collated, device))
        records = self._batches.records
        if self._accelerator.num_processes > 1:
            records = self._merge()
        return Result(self._sums.loss(), self._sums.by_channel(), records)

    def _forward(self, model: Any, batch: dict[str, Any]) -> Any:
        return self._family.training_output(model, batch, self._context)

    def _observe(self, problem: Any, sums: torch.Tensor) -> None:
        if self._counted:
            self._sums.add(problem, sums)

    def _merge(self) -> int:
        """Adds up what all processes found, in their order, so that every one has the same sums to the bit."""
        from accelerate.utils import gather_object

        found = gather_object([(self._sums.as_values(), self._batches.records)])
        self._sums = LossSums()
        for values, _ in found:
            self._sums.merge(values)
        return sum(records for _, records in found)


@contextmanager
def evaluation_mode(model: nn.Module) -> Iterator[None]:
    """Puts every module into evaluation mode, and each back into the one it was in.

    The flag alone: an engine's own ``eval()`` may do more, and would not know of a module that was frozen before.
    """
    modes = [(module, module.training) for module in model.modules()]
    for module, _ in modes:
        module.training = False
    try:
        yield
    finally:
        for module, training in modes:
            module.training = training
