"""From "an upstream trainer is about to parse its arguments" to "every patch is in place"."""

from __future__ import annotations

import os
from types import ModuleType
from typing import Any

from .errors import EnvironmentProblem, SettingsError, ending_the_run
from .families import FAMILIES, recognise_family
from .launch.deepspeed import broken_deepspeed
from .runtime.accelerator import lowmem_accelerator
from .runtime.report import log
from .runtime.saving import saving_whole
from .session import Session
from .settings import load_settings, parse_switch


def activate(trainer: ModuleType, parser: Any, arguments: list[str]) -> Session:
    """Checks settings, seams and machine, then patches.

    Args:
        trainer: the ``__main__`` module, complete, whose ``main()`` has only reached its argument parser.
        parser: upstream's ``argparse.ArgumentParser``.
        arguments: the command line.

    Returns:
        The session; its ``arguments`` are what upstream's parser should see.

    Raises:
        LowMemError: something does not fit; nothing has been patched.
    """
    parse_switch(os.environ)
    settings = load_settings()
    namespace = vars(trainer)
    family = recognise_family(namespace)
    _check_wanted_family(family.name)
    family.check_trainer(namespace)
    problem = broken_deepspeed()
    if problem is not None:
        raise EnvironmentProblem(problem)
    family.extend_parser(parser)
    session = Session(settings, family, trainer, hyphenate(parser, arguments))
    patch_trainer(session)
    family.install(session)
    patch_saving(session)
    return session


def hyphenate(parser: Any, arguments: list[str]) -> list[str]:
    """Turns ``--gradient_checkpointing`` into the option that upstream's parser knows."""
    known = parser._option_string_actions
    changed = []
    for argument in arguments:
        flag, equals, value = argument.partition("=")
        hyphenated = flag.replace("_", "-")
        if flag.startswith("--") and flag not in known and hyphenated in known:
            argument = hyphenated + equals + value
        changed.append(argument)
    return changed


def patch_trainer(session: Session) -> None:
    """Rebinds names in the trainer's own namespace; torch and accelerate stay as they are for everybody else."""
    trainer = session.trainer
    session.ledger.apply(
        trainer, "Accelerator", lowmem_accelerator(trainer.Accelerator, session), "knows scale, clip and prepare"
    )

    def AdamW(params: Any, **options: Any) -> Any:
        with ending_the_run():
            return session.make_optimizer(params, options)

    session.ledger.apply(trainer, "AdamW", AdamW, "8-bit states, stochastic rounding, gradient store")


def patch_saving(session: Session) -> None:
    """Has the trainer write its checkpoints somewhere else until they are whole."""
    trainer = session.trainer
    save_checkpoint = saving_whole(trainer.save_checkpoint, log)
    session.ledger.apply(trainer, "save_checkpoint", save_checkpoint, "a killed run leaves no half checkpoint")


def _check_wanted_family(found: str) -> None:
    wanted = os.environ.get("MOSS_LOWMEM_FAMILY")
    if wanted not in (None, found):
        known = ", ".join(family.name for family in FAMILIES)
        raise SettingsError(
            f"MOSS_LOWMEM_FAMILY={wanted!r}, but the trainer that was started is {found}'s. Supported: {known}."
        )
