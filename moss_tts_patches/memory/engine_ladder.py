"""Every engine over several processes for one model, as figures and as a table."""

from __future__ import annotations

import json
from collections.abc import Callable

from ..errors import SettingsError
from ..units import GIB
from .figures import RungFigures
from .full_ladder import Wanted, make_subject
from .methods import SHAPES
from .plan_cache import PlanCache
from .reserve import Assessment, Limits, assess
from .rungs import ENGINES, UPSTREAM_ENGINES, EngineRung, UpstreamRung

# What each engine refuses, or cannot do: see engines/.
_METHODS = {"ddp": ("full", "lora", "qlora"), "fsdp": ("full",)}
_OTHERS = ("full", "lora")


def engine_rungs(engine: str, processes: int, method: str | None = None) -> list[EngineRung]:
    """What can run on an engine, and upstream's own where it has a config.

    Args:
        engine: one of :data:`.rungs.ENGINES`.
        processes: one on each GPU.
        method: only this one.
    """
    methods = [known for known in _METHODS.get(engine, _OTHERS) if known in SHAPES and method in (None, known)]
    rungs = [EngineRung(engine, processes, known) for known in methods]
    if engine == "ddp" and "full" in methods:
        rungs.insert(1, EngineRung(engine, processes, states="host"))
    if engine in UPSTREAM_ENGINES and method in (None, "full"):
        plain = [UpstreamRung(False).name, UpstreamRung(True).name]
        rungs = [EngineRung(engine, processes, upstream=name) for name in plain] + rungs
    return rungs


def simulate_engines(
    wanted: Wanted,
    rungs: list[EngineRung],
    accumulation: int,
    cache: PlanCache | None,
    progress: Callable[[int, int, str], None] = lambda *_: None,
) -> list[RungFigures]:
    """Returns the figures of ``rungs``.

    Args:
        wanted: model and micro-batch.
        rungs: see :func:`engine_rungs`.
        accumulation: micro-batches an optimizer step.
        cache: keeps what was simulated.
        progress: told before each rung.
    """
    from .engine_needs import engine_figures
    from .traces import Tracer

    tracer = Tracer(make_subject(wanted), cache)
    found = []
    for index, rung in enumerate(rungs):
        progress(index, len(rungs), rung.name)
        found.append(engine_figures(tracer, rung, accumulation))
    return found


def show_engines(
    wanted: Wanted,
    processes: int,
    engine: str | None,
    limits: Limits,
    cache: PlanCache | None,
    progress: Callable[[int, int, str], None],
    *,
    as_json: bool,
) -> str:
    """Answers ``moss-lowmem plan --gpus``.

    Args:
        wanted: model and micro-batch.
        processes: GPUs of the machine.
        engine: one of :data:`.rungs.ENGINES`, or None for all.
        limits: of each card and of the machine.
        cache: keeps what was simulated.
        progress: told before each rung.
        as_json: one JSON object instead of a table.

    Raises:
        SettingsError: there is no such engine.
    """
    if engine not in (None, *ENGINES):
        raise SettingsError(f"plan: --engine {engine}: expected one of {', '.join(ENGINES)}.")
    method = wanted.pinned.get("method")
    rungs = [rung for name in ENGINES if engine in (None, name) for rung in engine_rungs(name, processes, method)]
    if not rungs:
        raise SettingsError(f"plan: --method {method} cannot run on {engine}; lowmem:ddp does it.")
    figures = simulate_engines(wanted, rungs, limits.accumulation, cache, progress)
    assessed = [assess(found, limits) for found in figures]
    if as_json:
        return json.dumps({"gpus": processes, "engines": [_entry(found) for found in assessed]}, indent=1)
    return "\n".join([_title(wanted, processes, limits), *map(_line, assessed), _EXPLANATION])


_EXPLANATION = (
    "Activations are simulated; what an engine keeps is arithmetic, checked on CPU processes (docs/scaling.md). Start "
    "one with ACCELERATE_CONFIG_FILE=lowmem:NAME."
)


def _title(wanted: Wanted, processes: int, limits: Limits) -> str:
    batch = wanted.batch
    return (
        f"{wanted.family} {wanted.checkpoint.name if wanted.checkpoint else wanted.size} on {processes} GPUs of "
        f"{limits.card_bytes / GIB:.1f} GiB: {batch.records} x {batch.positions} positions on each, "
        f"{limits.accumulation} micro-batches a step\n"
        f"{'':36}{'each GPU':>9} {'RAM of all':>11}  fits"
    )


def _line(found: Assessment) -> str:
    figures = found.figures
    return f"{figures.rung.name:36}{figures.peak_bytes / GIB:9.2f} {figures.host_total() / GIB:11.2f}  {found.verdict}"


def _entry(found: Assessment) -> dict[str, object]:
    figures = found.figures
    assert isinstance(figures.rung, EngineRung)
    return {
        "name": figures.rung.name,
        "engine": figures.rung.engine,
        "peak_gib": round(figures.peak_bytes / GIB, 3),
        "host_gib": round(figures.host_total() / GIB, 3),
        "phase": figures.phase,
        "fits": found.fits,
    }
