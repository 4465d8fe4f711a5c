"""From "an upstream trainer is about to parse its arguments" to "every patch is in place"."""

from __future__ import annotations

import functools
import os
from collections.abc import Mapping
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Any

from .errors import EnvironmentProblem, SettingsError, ending_the_run
from .families import FAMILIES, recognise_family
from .families.family import Family
from .last_words import READINGS_VARIABLE
from .launch.deepspeed import broken_deepspeed
from .messages import Messages, language_of
from .runtime.accelerator import lowmem_accelerator
from .runtime.report import log, process_rank
from .runtime.resume.checkpoints import unless_replaying
from .runtime.resume.loader import loader_class
from .runtime.saving import saving_whole
from .runtime.validation.best import check_signature
from .runtime.watch import Surroundings
from .session import Session
from .settings import Settings, load_settings, parse_switch

if TYPE_CHECKING:
    from .adapters.training import AdapterTraining


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
    session = Session(
        settings,
        family,
        trainer,
        hyphenate(parser, arguments),
        adapter_training(settings, family),
        _surroundings(os.environ),
    )
    patch_trainer(session)
    patch_data(session)
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


def patch_data(session: Session) -> None:
    """Has the trainer's records checked as they are read, and keeps an eye on the loader that it makes of them."""
    trainer = session.trainer
    read, loader = trainer.load_jsonl_for_rank, loader_class(trainer.DataLoader, session.resume)
    session.resume.loader = loader

    @functools.wraps(read)
    def load_jsonl_for_rank(spec: str, world_size: int, rank: int) -> Any:
        return session.load_records(read, spec, world_size, rank)

    @functools.wraps(loader, updated=())
    def DataLoader(*args: Any, **options: Any) -> Any:
        with ending_the_run():
            made = loader(*args, **options)
        return session.loader_made(made)

    session.ledger.apply(trainer, "load_jsonl_for_rank", load_jsonl_for_rank, "records are checked as they are read")
    session.ledger.apply(trainer, "DataLoader", DataLoader, "finished records are skipped, the longest tried first")


def adapter_training(settings: Settings, family: Family) -> AdapterTraining | None:
    """Returns the adapter side of the run, or None where all weights are trained."""
    if settings.method == "full":
        return None
    from .adapters import mute_bitsandbytes

    mute_bitsandbytes()
    from .adapters.plan import AdapterPlan, options_from_file
    from .adapters.training import AdapterTraining

    rarer = options_from_file(settings.lora_config) if settings.lora_config is not None else {}
    plan = AdapterPlan(
        method=settings.method,
        targets=settings.lora_targets,
        also_train=settings.lora_also_train,
        options={**rarer, **settings.adapter_options()},
        start=settings.lora_init,
        start_fixes=settings.chosen_adapter_options(),
    )
    return AdapterTraining(
        plan,
        family.adapter_groups,
        family.name,
        settings=settings.model_dump(mode="json"),
        merge=settings.merge,
        say=log,
    )


def patch_saving(session: Session) -> None:
    """Has the trainer write its checkpoints somewhere else until they are whole."""
    trainer = session.trainer
    save_checkpoint = session.guarded("save", saving_whole(trainer.save_checkpoint, log, session.checkpoint_saved))
    save_checkpoint = unless_replaying(session.resume, session.validation.before_checkpoint(save_checkpoint), log)
    if session.settings.saves_best:
        check_signature(trainer.save_checkpoint)
        session.save_plainly = session.guarded("save", saving_whole(trainer.save_checkpoint, log))
    session.ledger.apply(trainer, "save_checkpoint", save_checkpoint, "a killed run leaves no half checkpoint")


def _surroundings(environment: Mapping[str, str]) -> Surroundings:
    readings = environment.get(READINGS_VARIABLE)
    return Surroundings(
        messages=Messages(language_of(environment)),
        config_file=environment.get("ACCELERATE_CONFIG_FILE", ""),
        readings_folder=Path(readings) if readings else None,
        is_main=process_rank() == 0,
    )


def _check_wanted_family(found: str) -> None:
    wanted = os.environ.get("MOSS_LOWMEM_FAMILY")
    if wanted not in (None, found):
        known = ", ".join(family.name for family in FAMILIES)
        raise SettingsError(
            f"MOSS_LOWMEM_FAMILY={wanted!r}, but the trainer that was started is {found}'s. Supported: {known}."
        )
