"""The start-up hook: standard library only, inert unless MOSS_LOWMEM asks for it.

autowrapt calls :func:`on_argparse_import` when a process imports argparse. The hook waits for the one call that means
"an upstream trainer has defined everything and done nothing yet": ``ArgumentParser.parse_args`` called by code of a
``__main__`` that has the shape of such a trainer. Everything else that runs in the same environment (the launcher, data
preparation, DataLoader workers) sees an argparse that behaves as before.
"""

from __future__ import annotations

import functools
import os
import sys
from types import ModuleType
from typing import Any

# Functions that every upstream sft.py defines and no other training script that we know of combines. A trainer with
# some of them renamed must still be recognised, so that the missing seam can be named instead of silently training
# without the layer.
TRAINER_FUNCTIONS = frozenset(
    {
        "build_processor",
        "configure_torch_backends",
        "copy_inference_assets",
        "copy_support_files",
        "load_jsonl_for_rank",
        "model_init_context",
        "processor_init_context",
        "resolve_attn_implementation",
        "resolve_torch_dtype",
        "resolve_warmup_steps",
        "save_checkpoint",
        "validate_args",
    }
)
RECOGNISED_FROM = 6  # of 12: half may be renamed before we stop looking


def is_trainer(namespace: dict[str, Any]) -> bool:
    """Whether a ``__main__`` has the shape of an upstream sft.py."""
    present = {name for name in TRAINER_FUNCTIONS if callable(namespace.get(name))}
    return len(present) >= RECOGNISED_FROM and callable(namespace.get("main"))


def on_argparse_import(argparse: ModuleType) -> None:
    """Wraps ``ArgumentParser.parse_args`` once, if MOSS_LOWMEM is set to anything but 0."""
    if os.environ.get("MOSS_LOWMEM", "0") == "0":
        return
    original = argparse.ArgumentParser.parse_args
    if getattr(original, "__moss_lowmem__", False):
        return

    @functools.wraps(original)
    def parse_args(self: Any, args: Any = None, namespace: Any = None) -> Any:
        main = sys.modules.get("__main__")
        caller = sys._getframe(1).f_globals
        if main is not None and caller is vars(main) and is_trainer(caller):
            session = _activate(main, self, sys.argv[1:] if args is None else list(args))
            parsed = original(self, session.arguments, namespace)
            return _or_exit(session.parsed, parsed)
        return original(self, args, namespace)

    parse_args.__moss_lowmem__ = True  # type: ignore[attr-defined]
    argparse.ArgumentParser.parse_args = parse_args


def _activate(main: ModuleType, parser: Any, arguments: list[str]) -> Any:
    from .activation import activate

    return _or_exit(activate, main, parser, arguments)


def _or_exit(step: Any, *arguments: Any) -> Any:
    """Runs a step of the activation; the layer's errors end the process with their one message."""
    from .errors import ending_the_run

    with ending_the_run():
        return step(*arguments)
