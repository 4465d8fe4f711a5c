"""How long a record may be for a card: the planner's own figures, asked at several lengths."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from .ladder import Pinned, list_rungs
from .planner import choose_plan, could_fit, fit_to_host
from .reserve import Limits
from .rungs import MicroBatch, Rung

if TYPE_CHECKING:
    from .plan_cache import PlanCache
    from .reserve import Assessment
    from .traces import Subject


@dataclass(frozen=True)
class LongestRecord:
    """What fits.

    Attributes:
        positions: of the longest record that does.
        rung: in which it does.
    """

    positions: int
    rung: Rung


def longest_that_fits(
    subject: Subject,
    limits: Limits,
    pinned: Pinned,
    *,
    lengths: Sequence[int],
    shape_of: Callable[[int], MicroBatch],
    methods: Iterable[str] = ("full",),
    cache: PlanCache | None = None,
) -> LongestRecord | None:
    """Finds the longest record that any allowed rung can train on; returns None where that is the longest there is.

    Bytes are nearly linear in the length, so the search goes where the line between two known lengths meets the limit,
    and needs three or four lengths instead of a bisection's eleven for 2000 different ones.

    Args:
        subject: whose micro-batch does not matter.
        limits: of card and host.
        pinned: what the user insists on.
        lengths: positions of every record.
        shape_of: the micro-batch whose longest record has so many positions.
        methods: what may be chosen.
        cache: keeps figures between runs.

    Raises:
        EnvironmentProblem: not even the shortest record fits.
        SettingsError: the pinned values contradict each other.
    """
    from .traces import Tracer

    ordered = sorted(set(lengths))
    first = Tracer(replace(subject, batch=shape_of(ordered[-1])), cache)
    rungs = list_rungs(pinned, has_depth=first.has_depth(), methods=methods)
    able = [rung for rung in rungs if could_fit(first, rung, limits)]

    def at(rung: Rung, index: int) -> Assessment:
        return fit_to_host(first.at(shape_of(ordered[index])).figures, rung, limits, pinned)

    def margin_at(rung: Rung, index: int) -> float:
        return _margin(at(rung, index))

    last = len(ordered) - 1
    at_longest = {rung: at(rung, last) for rung in able}
    if any(found.fits for found in at_longest.values()):
        return None
    at_shortest = {rung: found for rung, found in ((rung, at(rung, 0)) for rung in able) if found.fits}
    if not at_shortest:
        shortest = replace(subject, batch=shape_of(ordered[0]))
        choose_plan(shortest, limits, pinned, methods=methods, cache=cache, lengths=lengths)  # says what is nearest
    reach = {
        rung: _meets_zero(ordered[0], _margin(found), ordered[last], _margin(at_longest[rung]))
        for rung, found in at_shortest.items()
    }
    best, chosen = -1, None
    for rung in sorted(reach, key=lambda rung: -reach[rung]):
        if best >= 0 and (reach[rung] < ordered[best + 1] or not at(rung, best + 1).fits):
            continue  # no longer than what another rung can do
        known = {0: _margin(at_shortest[rung]), last: _margin(at_longest[rung])}
        best, chosen = _search(ordered, known, functools.partial(margin_at, rung)), rung
    assert chosen is not None
    return LongestRecord(ordered[best], chosen)


def _search(ordered: Sequence[int], known: dict[int, float], margin_at: Callable[[int], float]) -> int:
    """Returns the last index with a margin of at least zero, between one that has and one that has not."""
    low, high = min(known), max(known)
    while high - low > 1:
        meets = _meets_zero(ordered[low], known[low], ordered[high], known[high])
        guess = max((index for index in range(low + 1, high) if ordered[index] <= meets), default=low + 1)
        known[guess] = margin_at(guess)
        low, high = (guess, high) if known[guess] >= 0 else (low, guess)
    return low


def _meets_zero(short: int, margin: float, long: int, shortage: float) -> float:
    """Where a line from a margin to a shortage (negative) crosses zero."""
    return short + (long - short) * margin / (margin - shortage)


def _margin(found: Assessment) -> float:
    return min(found.margin, found.host_margin)
