"""Upstream's classes for a simulation: where they stand in a checkout, and how they are loaded without a checkpoint."""

from __future__ import annotations

import functools
import importlib
import importlib.util
import sys
import types
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ..errors import EnvironmentProblem


@dataclass(frozen=True)
class Source:
    """Where a family's classes stand in the checkout, and the sizes that were released.

    Attributes:
        folder: below the checkout.
        modules: of the model and of its config.
        classes: the same two.
        sizes: of the backbone, the first released one first.
        trainer: the trainer's file where it computes the loss and switches checkpointing on, not the model.
    """

    folder: str
    modules: tuple[str, str]
    classes: tuple[str, str]
    sizes: tuple[str, ...]
    trainer: str | None = None


_DELAY = (("modeling_moss_tts", "configuration_moss_tts"), ("MossTTSDelayModel", "MossTTSDelayConfig"))

SOURCES = {
    "moss_tts_local": Source("moss_tts_local", *_DELAY, ("1.7b",)),
    "moss_tts_delay": Source("moss_tts_delay", *_DELAY, ("8b", "1.7b")),
    "moss_tts_realtime": Source(
        "moss_tts_realtime/mossttsrealtime",
        ("modeling_mossttsrealtime", "configuration_mossttsrealtime"),
        ("MossTTSRealtime", "MossTTSRealtimeConfig"),
        ("1.7b",),
    ),
    "moss_tts_local_v1.5": Source(
        "moss_tts_local_v1.5",
        ("modeling_moss_tts", "configuration_moss_tts"),
        ("MossTTSLocalModel", "MossTTSLocalConfig"),
        ("4b",),
        trainer="finetuning/sft.py",
    ),
}


def check_checkout(repository: Path | None, source: Source) -> Path:
    """Returns the checkout.

    Raises:
        EnvironmentProblem: there is none, or it lacks the family.
    """
    if repository is None or not (repository / source.folder).is_dir():
        raise EnvironmentProblem(
            f"upstream checkout {str(repository) if repository else 'not given'}: expected a MOSS-TTS folder with "
            f"{source.folder}/. Name it with --upstream or MOSS_TTS_REPO; get it with "
            "git clone https://github.com/OpenMOSS/MOSS-TTS"
        )
    return repository


def class_folder(repository: Path, source: Source, checkpoint: Path | None = None) -> Path:
    """Where the classes are read from: the checkpoint's own code where it brings any, else the checkout."""
    if checkpoint is not None and all((checkpoint / f"{name}.py").is_file() for name in source.modules):
        return checkpoint
    return repository / source.folder


def source_files(repository: Path, source: Source, folder: Path) -> list[Path]:
    """The files that a simulation's figures depend on."""
    files = sorted(folder.glob("*.py"))
    return [*files, repository / source.folder / source.trainer] if source.trainer else files


def load_classes(folder: Path, source: Source) -> tuple[Any, Any]:
    """Returns upstream's model and config classes, whatever their folder is called.

    Raises:
        EnvironmentProblem: they cannot be imported.
    """
    name = f"moss_lowmem_upstream_{abs(hash(str(folder)))}"
    if name not in sys.modules:
        package = types.ModuleType(name)
        package.__path__ = [str(folder)]
        sys.modules[name] = package
    try:
        with _without_bytecode():
            model, config = (
                getattr(importlib.import_module(f"{name}.{module}"), attribute)
                for module, attribute in zip(source.modules, source.classes)
            )
    except (ImportError, AttributeError) as error:
        raise EnvironmentProblem(
            f"upstream's model at {folder} cannot be imported: {error}. Install what upstream's README names, or use "
            "the upstream commit named in the README."
        ) from error
    return model, config


def trainer_options(repository: Path, source: Source) -> dict[str, Any]:
    """What :func:`.simulate.simulate_upstream` needs of a trainer that does the model's work; by its own defaults.

    Raises:
        EnvironmentProblem: the trainer cannot be imported.
    """
    if source.trainer is None:
        return {}
    path = repository / source.folder / source.trainer
    spec = importlib.util.spec_from_file_location("moss_lowmem_upstream_trainer", path)
    assert spec is not None and spec.loader is not None
    trainer = importlib.util.module_from_spec(spec)
    known, search = set(sys.modules), list(sys.path)
    try:
        with _without_bytecode():
            spec.loader.exec_module(trainer)
    except ImportError as error:
        raise EnvironmentProblem(
            f"upstream's trainer {path} cannot be imported: {error}. Install what upstream's README names."
        ) from error
    finally:
        sys.path[:] = search
        for name in set(sys.modules) - known:  # its own top-level modules have names such as ``common``
            if Path(getattr(sys.modules[name], "__file__", None) or "/").parent == path.parent:
                del sys.modules[name]
    checkpoint = functools.partial(
        trainer.configure_gradient_checkpointing, scope="global", use_reentrant=False, impl="module_wrapper"
    )
    return {"forward": trainer.compute_supervised_loss, "enable_checkpointing": checkpoint}


class _without_bytecode:
    """A checkout that is not ours gets no ``__pycache__``."""

    def __enter__(self) -> None:
        self._before, sys.dont_write_bytecode = sys.dont_write_bytecode, True

    def __exit__(self, *_: object) -> None:
        sys.dont_write_bytecode = self._before
