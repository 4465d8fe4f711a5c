"""Chooses how a run trains: the fastest rung that fits its card, its RAM and its longest records."""

from __future__ import annotations

import inspect
import os
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from ..adapters.plan import AdapterPlan
from ..adapters.shapes import adapter_shapes
from ..errors import EnvironmentProblem
from ..families.family import Family
from ..memory.longest_record import longest_that_fits
from ..memory.other_models import models_that_fit
from ..memory.plan_cache import PlanCache, hash_files, user_cache_folder
from ..memory.planner import Choice, choose_plan
from ..memory.readings import read_host
from ..memory.reserve import Limits
from ..memory.rungs import MicroBatch
from ..memory.traces import Subject
from ..units import GIB


def card_memory(device: torch.device, stated_gib: float | None) -> float | None:
    """Returns the bytes of GPU memory to plan for, or None where there is no card.

    Args:
        device: of the training.
        stated_gib: what the user says there is.
    """
    if stated_gib is not None:
        return stated_gib * GIB
    if device.type == "cuda":
        return float(torch.cuda.get_device_properties(device).total_memory)
    return None


def longest_micro_batch(positions: Sequence[int], supervised: int, records: int) -> MicroBatch:
    """The shape of the largest micro-batch that a run can meet.

    Args:
        positions: of every record.
        supervised: positions with labels, of all records together.
        records: of a micro-batch.
    """
    return micro_batch_of(max(positions), positions, supervised, records)


def micro_batch_of(longest: int, positions: Sequence[int], supervised: int, records: int) -> MicroBatch:
    """The shape of a micro-batch whose longest record has so many positions; see :func:`longest_micro_batch`."""
    share = min(1.0, supervised / max(1, sum(positions)))
    return MicroBatch(records, longest, max(1, round(records * longest * share)))


def make_subject(
    family: Family, model_class: Any, config: Any, batch: MicroBatch, adapters: AdapterPlan | None
) -> Subject:
    """Describes a run's model to the planner; arguments as of :func:`plan_run`."""
    identity = hash_files([Path(inspect.getfile(model_class))])
    return Subject(family, model_class, config, batch, shapes=adapter_shapes(adapters), identity=identity)


def longest_record(
    family: Family,
    model_class: Any,
    config: Any,
    *,
    positions: Sequence[int],
    supervised: int,
    records: int,
    card_bytes: float,
    accumulation: int,
    pinned: Mapping[str, Any],
    method: str,
    adapters: AdapterPlan | None,
    say: Callable[[str], None],
) -> int | None:
    """Finds how long a record may be for the card; returns None where every one fits.

    Args:
        positions: of every record.
        supervised: positions with labels, of all records together.
        records: of a micro-batch.
        family, model_class, config, card_bytes, accumulation, pinned, method, adapters, say: as of :func:`plan_run`.

    Raises:
        EnvironmentProblem: not even the shortest record fits.
        SettingsError: the pinned values contradict each other.
    """

    def shape_of(longest: int) -> MicroBatch:
        return micro_batch_of(longest, positions, supervised, records)

    found = longest_that_fits(
        make_subject(family, model_class, config, shape_of(max(positions)), adapters),
        Limits(card_bytes, read_host().free_bytes or None, accumulation),
        pinned,
        lengths=positions,
        shape_of=shape_of,
        methods=(method,),
        cache=PlanCache(user_cache_folder(os.environ, Path.home())),
    )
    if found is None:
        return None
    gone = sum(length > found.positions for length in positions)
    say(
        f"data max_positions=auto found={found.positions} plan={found.rung.name} longest={max(positions)} "
        f"left_out={gone} of {len(positions)}"
    )
    return found.positions


def plan_run(
    family: Family,
    model_class: Any,
    config: Any,
    *,
    batch: MicroBatch,
    card_bytes: float,
    accumulation: int,
    pinned: Mapping[str, Any],
    method: str,
    adapters: AdapterPlan | None,
    lengths: Sequence[int],
    repository: Path,
    say: Callable[[str], None],
) -> Choice:
    """Simulates what could be chosen, takes the cheapest that fits, and says so.

    Args:
        family: of the model.
        model_class: upstream's class, unpatched.
        config: the model's.
        batch: the largest micro-batch.
        card_bytes: of GPU memory.
        accumulation: micro-batches an optimizer step.
        pinned: what the user has set, by field of :class:`..memory.rungs.Rung`.
        method: ``full``, ``lora`` or ``qlora``.
        adapters: how they will be made; None where all weights are trained.
        lengths: positions of every record, to say how many are too long if nothing fits.
        repository: the trainer's checkout, to say which other model would fit.
        say: logs a line.

    Raises:
        EnvironmentProblem: nothing fits; names the nearest options.
        SettingsError: the pinned values contradict each other.
    """
    cache = PlanCache(user_cache_folder(os.environ, Path.home()))
    limits = Limits(card_bytes, read_host().free_bytes or None, accumulation)
    subject = make_subject(family, model_class, config, batch, adapters)
    try:
        choice = choose_plan(subject, limits, pinned, methods=(method,), cache=cache, lengths=lengths)
    except EnvironmentProblem as error:
        others = models_that_fit(repository, family.name, batch, limits, subject.shapes, cache)
        raise EnvironmentProblem("\n".join([str(error), *others])) from None
    say(choice.describe())
    return choice
