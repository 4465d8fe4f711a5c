"""``moss-lowmem plan``: what fits the card, beside what upstream needs, before anything is downloaded or loaded."""

from __future__ import annotations

import contextlib
import json
import os
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from ..launch.families import SUPPORTED, family_of_config, family_problem
from .refusal import refuse

if TYPE_CHECKING:
    from ..memory.full_ladder import FullLadder, Wanted
    from ..memory.plan_cache import PlanCache
    from ..memory.reserve import Limits
    from ..memory.rungs import MicroBatch

# Where no record is given: a 7 s reference and a prompt before 28 s of speech.
POSITIONS, SUPERVISED_SHARE = 600, 350 / 600


def plan(
    model_path: Annotated[
        str | None, typer.Argument(help="Checkpoint: a folder, or a hub repository that is in the cache.")
    ] = None,
    family: Annotated[str | None, typer.Option(help=f"Without a checkpoint: {', '.join(SUPPORTED)}.")] = None,
    size: Annotated[str | None, typer.Option(help="Of its backbone: 1.7b, 4b or 8b.")] = None,
    upstream: Annotated[Path | None, typer.Option(envvar="MOSS_TTS_REPO", help="The MOSS-TTS checkout.")] = None,
    train_jsonl: Annotated[
        list[str] | None, typer.Option(help="Prepared training data: plan for its longest record.")
    ] = None,
    positions: Annotated[int | None, typer.Option(min=1, help=f"Of the longest record (default {POSITIONS}).")] = None,
    supervised: Annotated[
        int | None, typer.Option(min=1, help="Positions with labels among them (default 7 of 12).")
    ] = None,
    batch: Annotated[int, typer.Option(min=1, help="Records in a micro-batch.")] = 1,
    accumulation: Annotated[int, typer.Option(min=1, help="Micro-batches an optimizer step.")] = 8,
    vram: Annotated[
        float | None, typer.Option(min=0.1, help="GPU memory in GiB; by default of the card found.")
    ] = None,
    ram: Annotated[float | None, typer.Option(min=0.1, help="Free RAM in GiB; by default what is free now.")] = None,
    method: Annotated[str | None, typer.Option(help="full, lora or qlora alone.")] = None,
    chunk_frames: Annotated[int | None, typer.Option(min=1, help="Pins MOSS_LOWMEM_CHUNK_FRAMES.")] = None,
    gpus: Annotated[
        int | None, typer.Option(min=1, help="Of this machine: what each engine needs on every one of them.")
    ] = None,
    engine: Annotated[str | None, typer.Option(help="With --gpus: one engine alone.")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
    no_cache: Annotated[bool, typer.Option("--no-cache", help="Simulate again, keep nothing.")] = False,
) -> None:
    """Show what each way of training needs, and which one is chosen for your card.

    The real model classes run one training step at full size on tensors without memory: no weights, no GPU. The first
    time takes two minutes, afterwards the figures come from a cache.
    """
    from ..adapters import mute_bitsandbytes
    from ..adapters.shapes import adapter_shapes
    from ..errors import LowMemError
    from ..memory.methods import SHAPES
    from ..memory.plan_cache import PlanCache, user_cache_folder

    mute_bitsandbytes()
    SHAPES.update(adapter_shapes())
    pinned = {key: value for key, value in (("method", method), ("chunk_frames", chunk_frames)) if value is not None}
    try:
        limits = _limits(vram, ram, accumulation)
        wanted = _wanted(model_path, family, size, upstream, train_jsonl, (positions, supervised, batch), pinned)
        cache = None if no_cache else PlanCache(user_cache_folder(os.environ, Path.home()))
        if gpus is not None or engine is not None:
            _show_engines(wanted, gpus or 1, engine, limits, cache, as_json=as_json)
        else:
            _show_ladder(wanted, limits, cache, as_json=as_json)
    except LowMemError as error:
        refuse(error)


def _show_engines(
    wanted: Wanted, gpus: int, engine: str | None, limits: Limits, cache: PlanCache | None, *, as_json: bool
) -> None:
    from ..memory.engine_ladder import show_engines

    with _progress_bar() as progress:
        shown = show_engines(wanted, gpus, engine, limits, cache, progress, as_json=as_json)
    typer.echo(shown)


def _show_ladder(wanted: Wanted, limits: Limits, cache: PlanCache | None, *, as_json: bool) -> None:
    from ..memory.full_ladder import simulate_ladder
    from ..memory.show_plan import as_document, print_plan

    with _progress_bar() as progress:
        ladder = simulate_ladder(wanted, cache, progress)
    answers = _answers(wanted, ladder, limits, cache)
    if as_json:
        typer.echo(json.dumps(as_document(ladder, limits, answers), ensure_ascii=False, indent=1))
    else:
        print_plan(wanted, ladder, limits, answers)


def _limits(vram: float | None, ram: float | None, accumulation: int) -> Limits:
    """Reads what the user does not say from the machine.

    Raises:
        EnvironmentProblem: no card is found and none is named.
    """
    from ..errors import EnvironmentProblem
    from ..memory.readings import read_gpus, read_host
    from ..memory.reserve import Limits
    from ..units import GIB

    card = None if vram is None else vram * GIB
    if card is None:
        gpus = read_gpus()
        if not gpus:
            raise EnvironmentProblem("plan: no GPU was found here. Name the memory to plan for: --vram 16.")
        card = gpus[0].total_bytes
    host: float | None = None if ram is None else ram * GIB
    if host is None:
        host = read_host().free_bytes or None
    return Limits(card, host, accumulation)


def _wanted(
    model_path: str | None,
    family: str | None,
    size: str | None,
    upstream: Path | None,
    train_jsonl: list[str] | None,
    shape: tuple[int | None, int | None, int],
    pinned: dict[str, Any],
) -> Wanted:
    from ..errors import SettingsError
    from ..memory.full_ladder import Wanted, find_checkpoint
    from ..memory.rungs import METHODS
    from ..memory.upstream_source import SOURCES

    checkpoint = None if model_path is None else find_checkpoint(model_path)
    if checkpoint is not None and family is None:
        family = _family_of(checkpoint)
    if family is None:
        raise SettingsError("plan: for which model? Name a checkpoint, or --family and --size.")
    problem = family_problem(family)
    if problem is not None:
        raise SettingsError(problem.replace("MOSS_LOWMEM_FAMILY=", "--family "))
    sizes = SOURCES[family].sizes
    if size is not None and size not in sizes:
        raise SettingsError(f"plan: --size {size}: {family} was released with {', '.join(sizes)}.")
    if pinned.get("method", METHODS[0]) not in METHODS:
        raise SettingsError(f"plan: --method {pinned['method']}: expected one of {', '.join(METHODS)}.")
    micro_batch = _longest_of(train_jsonl, checkpoint, family, upstream, shape[2]) if train_jsonl else _shape(*shape)
    return Wanted(family, size or sizes[0], checkpoint, upstream, micro_batch, pinned)


def _family_of(checkpoint: Path) -> str:
    from ..data.processors import stored_config
    from ..errors import EnvironmentProblem

    family = family_of_config(vars(stored_config(checkpoint)))
    if family is None:
        raise EnvironmentProblem(
            f"model {checkpoint}: its config.json is none of a MOSS-TTS family; name it with --family."
        )
    return family


def _shape(positions: int | None, supervised: int | None, records: int) -> MicroBatch:
    """Raises SettingsError where more positions are supervised than there are."""
    from ..errors import SettingsError
    from ..memory.rungs import MicroBatch

    positions = POSITIONS if positions is None else positions
    each = max(1, round(positions * SUPERVISED_SHARE)) if supervised is None else supervised
    if each > positions:
        raise SettingsError(f"plan: --supervised {each} of --positions {positions}: expected at most as many.")
    return MicroBatch(records, positions, records * each)


def _longest_of(
    files: list[str], checkpoint: Path | None, family: str, upstream: Path | None, records: int
) -> MicroBatch:
    """The micro-batch of the longest record, with the data's own share of supervised positions.

    Raises:
        DataError: a file cannot be read, or holds no record that can be trained on.
    """
    from ..data.check import check_files
    from ..data.files import find_files
    from ..errors import DataError
    from ..memory.rungs import MicroBatch
    from .counting import rules_and_counter

    rules, counter, note = rules_and_counter(checkpoint, family, upstream)
    report = check_files(find_files(files), rules, counter)
    if not report.kept:
        raise DataError(f"plan: {', '.join(files)}: no record can be trained on. See moss-lowmem check-data.")
    longest = max(report.positions)
    typer.echo(
        f"records={report.kept} median={report.quantile(0.5)} p95={report.quantile(0.95)} longest={longest} "
        f"supervised={report.supervised_share:.0%}" + (f" ({note})" if note else ""),
        err=True,
    )
    return MicroBatch(records, longest, records * max(1, round(longest * report.supervised_share)))


def _answers(wanted: Wanted, ladder: FullLadder, limits: Limits, cache: PlanCache | None) -> dict[str, Any]:
    from ..memory.full_ladder import records_that_fit
    from ..memory.planner import assess_ladder, cheapest
    from ..memory.rungs import Rung

    assessed = assess_ladder(ladder.figures, limits)
    chosen = cheapest(assessed, limits.accumulation)
    if chosen is None:
        return {}
    rung = chosen.figures.rung
    assert isinstance(rung, Rung)
    return {"largest_batch": records_that_fit(wanted, rung, limits, cache)}


@contextlib.contextmanager
def _progress_bar() -> Iterator[Callable[[int, int, str], None]]:
    """A bar on a terminal; nothing where the output is read by a program."""
    if not sys.stderr.isatty():
        yield lambda done, total, name: None
        return
    from rich.console import Console
    from rich.progress import Progress

    with Progress(console=Console(stderr=True), transient=True) as bar:
        task = bar.add_task("simulating", total=None)
        yield lambda done, total, name: bar.update(task, completed=done, total=total, description=name or "done")
