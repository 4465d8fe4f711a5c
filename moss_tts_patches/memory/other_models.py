"""Which other released model would fit where the wanted one does not, with its figures."""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path

from ..units import GIB
from .full_ladder import Wanted, make_subject
from .methods import Shape
from .plan_cache import PlanCache
from .reserve import Limits, assess
from .rungs import MicroBatch, Rung
from .traces import Tracer
from .upstream_source import SOURCES

# What asks for least of the card, the most complete training first.
_SMALLEST = (Rung("staged", gradients="host", states="host", weights="host"), Rung("staged", method="qlora"))


@contextlib.contextmanager
def _without_torchs_comments() -> Iterator[None]:
    """torch logs a traceback of its own for an operation that fails on tensors without values."""
    logger = logging.getLogger("torch._subclasses.fake_tensor")
    before = logger.level
    logger.setLevel(logging.CRITICAL)
    try:
        yield
    finally:
        logger.setLevel(before)


def models_that_fit(
    repository: Path,
    without: str,
    batch: MicroBatch,
    limits: Limits,
    shapes: Mapping[str, Shape],
    cache: PlanCache | None,
) -> Iterator[str]:
    """Yields a line for each released model of another family that the card can train on such a micro-batch.

    Args:
        repository: the checkout that the training runs from; a family that it lacks is left out.
        without: the family that does not fit.
        batch: shape of the micro-batch.
        limits: of card and host.
        shapes: what adapters do to a model.
        cache: keeps figures between runs.
    """
    for name, source in SOURCES.items():
        for size in source.sizes if name != without else ():
            wanted = Wanted(name, size, None, repository, batch, {})
            try:
                with _without_torchs_comments():
                    tracer = Tracer(replace(make_subject(wanted), shapes=shapes), cache)
                    found = [assess(tracer.figures(rung), limits) for rung in _SMALLEST]
            except Exception:  # another family's code, which this run does not need: no figure, and no second error
                continue
            best = next((one for one in found if one.fits), None)
            if best is not None:
                peak, reserve = best.figures.peak_bytes / GIB, best.reserve.total / GIB
                needs = f"{peak:.2f} GiB and {reserve:.2f} GiB in reserve (fits: {best.verdict})"
                yield f"- another model, {name} {size}, {best.figures.rung.name}: {needs}"
