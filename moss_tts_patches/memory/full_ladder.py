"""Every rung of a model beside upstream; torch is imported only where the figures are not in the cache."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from ..errors import EnvironmentProblem, SettingsError
from ..hub_cache import cached_config
from .figures import RungFigures
from .ladder import Pinned, list_rungs
from .methods import SHAPES
from .plan_cache import PlanCache, hash_files
from .reserve import Limits, assess
from .rungs import AnyRung, MicroBatch, Rung, UpstreamRung, describe
from .upstream_source import (
    SOURCES,
    check_checkout,
    class_folder,
    load_classes,
    source_files,
    trainer_options,
)

Progress = Callable[[int, int, str], None]  # done, of how many, what comes next


@dataclass(frozen=True)
class Wanted:
    """What is planned for, in terms that need no torch.

    Attributes:
        family: name.
        size: of a released backbone; ignored where there is a checkpoint.
        checkpoint: folder with a config.json, or None.
        upstream: the checkout.
        batch: shape of the micro-batch.
        pinned: values of a rung that the user insists on.
        complete: also the schedule that engines with a backward of their own need.
    """

    family: str
    size: str
    checkpoint: Path | None
    upstream: Path | None
    batch: MicroBatch
    pinned: Pinned
    complete: bool = True

    def key(self) -> str:
        """Names the answer in the cache."""
        source = SOURCES[self.family]
        repository = check_checkout(self.upstream, source)
        folder = class_folder(repository, source, self.checkpoint)
        config = None if self.checkpoint is None else (self.checkpoint / "config.json").read_text(encoding="utf-8")
        return PlanCache.key(
            {
                "ladder": [self.family, self.size, config, asdict(self.batch), dict(self.pinned), self.complete],
                "methods": {name: shape.identity for name, shape in SHAPES.items()},
                "upstream": hash_files(source_files(repository, source, folder)),
            }
        )


@dataclass(frozen=True)
class FullLadder:
    """The rungs' figures, upstream's first, and methods that could not be simulated with the reason."""

    figures: tuple[RungFigures, ...]
    left_out: Mapping[str, str]

    def to_document(self) -> dict[str, Any]:
        return {
            "figures": [figures.to_document() for figures in self.figures],
            "left_out": dict(self.left_out),
        }

    @classmethod
    def from_document(cls, document: Mapping[str, Any]) -> FullLadder:
        figures = tuple(RungFigures.from_document(entry) for entry in document["figures"])
        return cls(figures, document["left_out"])


def simulate_ladder(wanted: Wanted, cache: PlanCache | None, progress: Progress = lambda *_: None) -> FullLadder:
    """Returns the figures of every rung.

    Args:
        wanted: model, micro-batch and pinned values.
        cache: None simulates everything again and keeps nothing.
        progress: told before each rung.

    Raises:
        EnvironmentProblem: upstream's classes cannot be loaded.
        SettingsError: a size that was not released, pinned values that contradict each other.
    """
    key = wanted.key()
    found = None if cache is None else cache.read(key)
    if found is not None:
        return FullLadder.from_document(found)
    ladder = _simulate(wanted, cache, progress)
    if cache is not None:
        cache.write(key, ladder.to_document())
    return ladder


def make_subject(wanted: Wanted) -> Any:
    """Loads upstream's class and the config; returns a :class:`.traces.Subject`."""
    from ..families import FAMILIES
    from .traces import Subject

    source = SOURCES[wanted.family]
    repository = check_checkout(wanted.upstream, source)
    folder = class_folder(repository, source, wanted.checkpoint)
    family = next(known for known in FAMILIES if known.name == wanted.family)()
    model_class, config_class = load_classes(folder, source)
    if wanted.checkpoint is not None:
        config = config_class.from_pretrained(wanted.checkpoint)
    else:
        try:
            config = family.full_size_config(config_class, wanted.size)
        except ValueError as error:
            raise SettingsError(f"plan: {error}") from None
    identity = hash_files(source_files(repository, source, folder))
    options = trainer_options(repository, source)
    if not family.upstream_checkpoints:
        # Upstream's trainer has no flag for it: what it would need if it had one, on the layers that ours checkpoints.
        options["enable_checkpointing"] = functools.partial(_checkpoint_backbone, family)
    return Subject(family, model_class, config, wanted.batch, options, SHAPES, identity)


def _checkpoint_backbone(family: Any, model: Any) -> None:
    family.backbone(model).gradient_checkpointing_enable()


def _simulate(wanted: Wanted, cache: PlanCache | None, progress: Progress) -> FullLadder:
    from .traces import Tracer

    tracer = Tracer(make_subject(wanted), cache)
    ours, left_out = _rungs(wanted, tracer.has_depth())
    rungs: list[AnyRung] = [UpstreamRung(False), UpstreamRung(True), *ours]
    figures = []
    for index, rung in enumerate(rungs):
        progress(index, len(rungs), rung.name)
        figures.append(tracer.figures(rung))
    progress(len(rungs), len(rungs), "")
    return FullLadder(tuple(figures), left_out)


def _rungs(wanted: Wanted, has_depth: bool) -> tuple[list[Rung], dict[str, str]]:
    listed = list_rungs(wanted.pinned, has_depth=has_depth, complete=wanted.complete)
    ours = [rung for rung in listed if rung.method in SHAPES]
    absent = {rung.method: "not available here" for rung in listed if rung.method not in SHAPES}
    if not ours:
        raise SettingsError(f"plan: method {wanted.pinned.get('method')} is not available here.")
    return ours, absent


def records_that_fit(wanted: Wanted, rung: Rung, limits: Limits, cache: PlanCache | None) -> int:
    """How many records of this length a micro-batch can have with that rung; needs a simulation of twice as many."""
    content = {"records": wanted.key(), "rung": describe(rung), "limits": asdict(limits)}
    key = PlanCache.key(content)
    found = None if cache is None else cache.read(key)
    if found is None:
        from .planner import largest_batch
        from .traces import Tracer

        tracer = Tracer(make_subject(wanted), cache)
        found = largest_batch(tracer, assess(tracer.figures(rung), limits), limits)
        if cache is not None:
            cache.write(key, found)
    return int(found)


def find_checkpoint(name: str) -> Path:
    """Returns a checkpoint's folder: a local one, or the cached snapshot of a hub repository.

    Raises:
        EnvironmentProblem: neither is there.
    """
    if (Path(name) / "config.json").is_file():
        return Path(name)
    try:
        found = cached_config(name)
    except (ImportError, ValueError):  # not the form of a repository's name
        found = None
    if found is not None:
        return found.parent
    raise EnvironmentProblem(
        f"model {name}: found no folder with a config.json of that name and no cached hub repository. Correct the "
        "path, download the model (hf download OWNER/NAME), or leave it out (moss-lowmem plan: --family and --size)."
    )
