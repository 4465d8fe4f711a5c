"""Chooses the fastest way to run that fits the card and the host."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from ..errors import EnvironmentProblem
from ..units import GIB
from .figures import RungFigures
from .ladder import Pinned, list_rungs
from .methods import SHAPES
from .plan_cache import PlanCache
from .reserve import Assessment, Limits, assess, host_needed
from .rungs import METHODS, MicroBatch, Rung

if TYPE_CHECKING:
    from .traces import Subject, Tracer

FigureOf = Callable[[Any], RungFigures]


@dataclass(frozen=True)
class Choice:
    """The rung that a run gets.

    Attributes:
        rung: its settings.
        assessment: why it fits.
        tried: rungs that were looked at before.
    """

    rung: Rung
    assessment: Assessment
    tried: int

    def describe(self) -> str:
        """One line for the log: the rung, its figures, and how to pin it."""
        figures = self.assessment.figures
        pin = " ".join(f"{name}={value}" for name, value in self.rung.settings().items())
        return (
            f"plan={self.rung.name} simulated_peak={figures.peak_bytes / GIB:.2f}GiB "
            f"reserve={self.assessment.reserve.total / GIB:.2f}GiB margin={self.assessment.margin / GIB:.2f}GiB "
            f"host={figures.host_total() / GIB:.2f}GiB flops={figures.flops / 1e12:.1f}TFLOP pin='{pin}'"
        )

    def planned_bytes(self) -> dict[str, float]:
        """What a run is expected to need at most, by the names of its log's readings."""
        figures = self.assessment.figures
        return {"gpu_peak": figures.peak_bytes, "host": host_needed(figures)}


def choose_plan(
    subject: Subject,
    limits: Limits,
    pinned: Pinned,
    *,
    methods: Iterable[str] = ("full",),
    cache: PlanCache | None = None,
    lengths: Sequence[int] = (),
    simulated: Callable[[], None] = lambda: None,
) -> Choice:
    """Picks the cheapest rung that fits; only rungs that could be chosen are simulated.

    Args:
        subject: family, class, config and the shape of the longest micro-batch.
        limits: of card and host.
        pinned: values of :class:`.rungs.Rung` that the user insists on.
        methods: what may be chosen, the most wanted first: a later one only where no earlier one fits.
        cache: keeps figures between runs.
        lengths: positions of every record of the data, to say how many would have to go.
        simulated: called after every simulation.

    Raises:
        EnvironmentProblem: nothing fits; lists the nearest options with their figures.
        SettingsError: the pinned values contradict each other.
    """
    from .traces import Tracer

    tracer = Tracer(subject, cache, simulated)
    rungs = list_rungs(pinned, has_depth=tracer.has_depth(), methods=methods)
    tried: list[Assessment] = []
    for method in dict.fromkeys(rung.method for rung in rungs):
        able = [rung for rung in rungs if rung.method == method and could_fit(tracer, rung, limits)]
        found = [fit_to_host(tracer.figures, rung, limits, pinned) for rung in able]
        best = cheapest(found, limits.accumulation)
        if best is not None:
            assert isinstance(best.figures.rung, Rung)
            return Choice(best.figures.rung, best, len(tried) + len(found))
        tried += found
    raise EnvironmentProblem(_nothing_fits(tracer, rungs, limits, pinned, lengths))


def assess_ladder(figures: Iterable[RungFigures], limits: Limits) -> list[Assessment]:
    """Holds every rung against the limits; host gradients are in bfloat16 where float32 has no room."""
    return [_assess_narrowing(found, limits) for found in figures]


def _assess_narrowing(figures: RungFigures, limits: Limits) -> Assessment:
    found, rung = assess(figures, limits), figures.rung
    if found.host_margin >= 0 or not isinstance(rung, Rung) or rung.gradients != "host":
        return found
    narrow = assess(replace(figures, rung=replace(rung, host_gradient_dtype="bfloat16")), limits)
    return narrow if narrow.host_margin >= 0 else found


def cheapest(assessments: Iterable[Assessment], accumulation: int) -> Assessment | None:
    """The one of ours that fits and costs least, of the most complete method."""
    able = [found for found in assessments if found.fits and isinstance(found.figures.rung, Rung)]
    return min(able, key=lambda found: _order(found, accumulation), default=None)


def _order(found: Assessment, accumulation: int) -> tuple[int, float]:
    return METHODS.index(found.figures.rung.method), found.figures.cost(accumulation)  # type: ignore[union-attr]


def fit_to_host(figure_of: FigureOf, rung: Rung, limits: Limits, pinned: Pinned) -> Assessment:
    """Assesses a rung; gradients go to bfloat16 in host memory where float32 has no room, unless pinned."""
    figures = figure_of(rung)
    return assess(figures, limits) if "host_gradient_dtype" in pinned else _assess_narrowing(figures, limits)


def could_fit(tracer: Tracer, rung: Rung, limits: Limits) -> bool:
    """Whether what stands between steps leaves room; asks for no simulation."""
    if rung.method != "full":
        return _is_known(tracer, rung.method)
    standing = tracer.full_training()
    device = standing.weights - (standing.layer_weights if rung.weights == "host" else 0)
    device += standing.gradients if rung.gradients == "device" else 0
    # 8-bit states take 2.03 bytes an element, others at least that.
    device += 2 * standing.elements if rung.states == "device" else 0
    host = standing.elements * ((2 if rung.gradients == "host" else 0) + (2 if rung.states == "host" else 0))
    return device <= limits.card_bytes and (limits.host_bytes is None or host <= limits.host_bytes)


# -- nothing fits ------------------------------------------------------------------------------------------------------


def _nothing_fits(tracer: Tracer, rungs: Sequence[Rung], limits: Limits, pinned: Pinned, lengths: Sequence[int]) -> str:
    batch = tracer.subject.batch
    lines = [
        f"plan: nothing fits {limits.card_bytes / GIB:.1f} GiB of GPU memory"
        + (f" and {limits.host_bytes / GIB:.1f} GiB of RAM" if limits.host_bytes is not None else "")
        + f" with {batch.records} x {batch.positions} positions, {batch.supervised} supervised. Nearest options:"
    ]
    able = [rung for rung in rungs if _is_known(tracer, rung.method)]
    smallest: Assessment | None = None
    for method in METHODS:
        own = [rung for rung in able if rung.method == method]
        pinned_to_it = {**pinned, "method": method}
        if not own and _is_known(tracer, method):
            own = list_rungs(pinned_to_it, has_depth=tracer.has_depth())
        found = [fit_to_host(tracer.figures, rung, limits, pinned) for rung in _smallest_rungs(own)]
        nearest = max(found, key=lambda item: min(item.margin, item.host_margin), default=None)
        if nearest is not None:
            smallest = smallest or nearest
            lines.append(
                f"- MOSS_LOWMEM_METHOD={method}, {nearest.figures.rung.name}: "
                f"{nearest.figures.peak_bytes / GIB:.2f} GiB and {nearest.reserve.total / GIB:.2f} GiB in reserve "
                f"(fits: {nearest.verdict})"
            )
    if smallest is not None:
        lines.append(_shorter_records(tracer, smallest, limits, lengths))
    if pinned:
        lines.append("- unset " + ", ".join(f"MOSS_LOWMEM_{name.upper()}" for name in pinned) + ": it narrows the plan")
    return "\n".join(lines)


def _is_known(tracer: Tracer, method: str) -> bool:
    """Whether the method can be simulated here."""
    return method in SHAPES or method in tracer.subject.shapes


def _smallest_rungs(own: Sequence[Rung]) -> list[Rung]:
    """Those with the most stores on the host and checkpointing: what else there is needs more of the card."""
    if not own:
        return []

    def saved(rung: Rung) -> int:
        places = (rung.gradients, rung.states, rung.weights)
        return sum(place == "host" for place in places) + (rung.checkpointing) + (rung.schedule == "staged")

    most = max(saved(rung) for rung in own)
    return [rung for rung in own if saved(rung) == most]


def _shorter_records(tracer: Tracer, nearest: Assessment, limits: Limits, lengths: Sequence[int]) -> str:
    """Says how long a record may be, from the same rung on half as many positions: bytes are linear between."""
    batch = tracer.subject.batch
    half = replace(batch, positions=max(1, batch.positions // 2), supervised=max(1, batch.supervised // 2))
    shorter = assess(tracer.at(half).figures(nearest.figures.rung), limits)
    gained = shorter.margin - nearest.margin
    room = batch.positions if nearest.margin >= 0 else 0
    if nearest.margin < 0 < gained:
        room = int(batch.positions + nearest.margin / gained * (batch.positions - half.positions))
    if room <= 0 or nearest.host_margin < 0:
        return "- shorter records do not help: what stands between steps is too large already"
    gone = sum(length > room for length in lengths)
    share = f" ({gone} of {len(lengths)} records would go)" if lengths else ""
    return f"- {nearest.figures.rung.name} with records of at most {room} positions{share}"


# -- what people ask ---------------------------------------------------------------------------------------------------


def largest_batch(tracer: Tracer, chosen: Assessment, limits: Limits) -> int:
    """How many records of this length fit in a micro-batch, from the same rung on twice as many."""
    batch = tracer.subject.batch
    twice = MicroBatch(2 * batch.records, batch.positions, 2 * batch.supervised)
    more = assess(tracer.at(twice).figures(chosen.figures.rung), limits)
    per_record = (chosen.margin - more.margin) / batch.records
    return batch.records if per_record <= 0 else batch.records + int(chosen.margin / per_record)
