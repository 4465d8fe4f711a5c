"""Finds upstream's own prompt code, so that positions are counted by what trains and not by a copy of it."""

from __future__ import annotations

import contextlib
import importlib.util
import inspect
import json
import sys
import types
from collections.abc import Iterator, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from ..errors import DataError, SeamError

# Modules that define a processor: the speech families' beside their checkpoints, the conversation family's in its repo.
_MODULES = ("processing_moss_tts", "processing_mossttsrealtime")
_PACKAGE = "_moss_lowmem_prompt_code"


def training_processor(trainer: dict[str, Any], arguments: Any) -> Any:
    """Builds the processor that the trainer's ``main()`` will build, without an audio codec.

    Args:
        trainer: the trainer's namespace.
        arguments: its parsed command line.

    Raises:
        SeamError: the trainer's ``build_processor`` wants something that is not known here.
    """
    build = trainer["build_processor"]
    known = {
        "args": arguments,
        "model_path": getattr(arguments, "model_path", None),
        "codec_path": getattr(arguments, "codec_path", None),
        "need_audio_tokenizer": False,
        "audio_tokenizer_device": None,
        "default_audio_tokenizer_device": "cpu",
    }
    wanted = inspect.signature(build).parameters
    unknown = [name for name, one in wanted.items() if name not in known and one.default is one.empty]
    if unknown:
        raise SeamError(
            f"seam sft.py.build_processor: it wants {', '.join(unknown)}, which the layer does not know. Upgrade "
            "moss_tts_patches, or train with MOSS_LOWMEM=0."
        )
    return build(**{name: known[name] for name in wanted if name in known})


def model_config(processor: Any, model_path: str | Path) -> Any:
    """Returns the config that the records have to fit: the processor's, else the checkpoint's ``config.json``."""
    found = getattr(processor, "model_config", None)
    return stored_config(model_path) if found is None else found


def stored_config(model_path: str | Path) -> SimpleNamespace:
    """Reads a checkpoint's ``config.json`` as plain values.

    Args:
        model_path: its folder, or its name on a model hub, whose file is downloaded as the trainer itself would.

    Raises:
        DataError: there is none.
    """
    path = Path(model_path) / "config.json"
    try:
        if not Path(model_path).is_dir():
            from transformers.utils import cached_file

            path = Path(str(cached_file(str(model_path), "config.json")))
        return SimpleNamespace(**json.loads(path.read_text(encoding="utf-8")))
    except (OSError, ValueError, TypeError) as error:
        raise DataError(
            f"data: {path} cannot be read as a model's config ({error}). Expected a checkpoint's folder, or its name "
            "on a model hub."
        ) from None


def load_processor(model_path: str | Path, folders: Sequence[Path]) -> Any:
    """Builds a processor outside a trainer, with the checkpoint's tokenizer and no audio codec.

    Args:
        model_path: the checkpoint's folder.
        folders: where upstream's processor may be defined; the first that has one counts. Its code is run.

    Raises:
        DataError: no folder has one, or it cannot be loaded; says why.
    """
    from transformers import AutoTokenizer

    for folder, name in ((folder, name) for folder in folders for name in _MODULES):
        if (folder / f"{name}.py").is_file():
            break
    else:
        raise DataError(
            f"data: no upstream prompt code in {', '.join(map(str, folders))}. Expected {' or '.join(_MODULES)}.py; "
            "name the MOSS-TTS checkout with --repo."
        )
    try:
        with _importable(folder) as package:
            module = importlib.import_module(f"{package}.{name}")
            options = _config_options(package, model_path)
        tokenizer = AutoTokenizer.from_pretrained(str(model_path), trust_remote_code=True)
        return _processor_class(module)(tokenizer=tokenizer, **options)
    except Exception as error:  # another package's code, import and all
        raise DataError(f"data: {folder / name}.py cannot be used ({type(error).__name__}: {error}).") from error


@contextlib.contextmanager
def _importable(folder: Path) -> Iterator[str]:
    """Lends a package name under which a folder's modules can be imported, whatever the folder is called."""
    package = types.ModuleType(_PACKAGE)
    package.__path__ = [str(folder)]
    sys.modules[_PACKAGE] = package
    without_bytecode, sys.dont_write_bytecode = sys.dont_write_bytecode, True
    try:
        yield _PACKAGE
    finally:
        sys.dont_write_bytecode = without_bytecode
        for name in [name for name in sys.modules if name == _PACKAGE or name.startswith(f"{_PACKAGE}.")]:
            del sys.modules[name]


def _config_options(package: str, model_path: str | Path) -> dict[str, Any]:
    """Returns the model's config for processors that take one."""
    if importlib.util.find_spec(f"{package}.configuration_moss_tts") is None:
        return {}
    module = importlib.import_module(f"{package}.configuration_moss_tts")
    config_class = next(_defined_in(module, "Config"))
    return {"model_config": config_class.from_pretrained(str(model_path)), "audio_tokenizer": None}


def _processor_class(module: types.ModuleType) -> Any:
    return next(_defined_in(module, "Processor"))


def _defined_in(module: types.ModuleType, ending: str) -> Iterator[Any]:
    for name, value in vars(module).items():
        if isinstance(value, type) and name.endswith(ending) and value.__module__ == module.__name__:
            yield value
