"""From "an upstream trainer is about to parse its arguments" to "every patch is in place"."""

from __future__ import annotations

import functools
import os
from types import ModuleType
from typing import Any

from .errors import EnvironmentProblem, SettingsError
from .families import FAMILIES, recognise_family
from .launch.deepspeed import broken_deepspeed
from .runtime.accelerator import lowmem_accelerator
from .session import Session
from .settings import load_settings, parse_switch

# What upstream's loop passes to the model, and nothing else: any other call is not training and stays upstream's.
TRAINING_ARGUMENTS = frozenset({"input_ids", "attention_mask", "labels", "channelwise_loss_weight"})


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
    session = Session(settings, family, trainer, hyphenate(parser, arguments))
    patch_trainer(session)
    patch_model_class(session, family.model_class(namespace))
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
        return session.make_optimizer(params, options)

    session.ledger.apply(trainer, "AdamW", AdamW, "8-bit states, stochastic rounding, gradient store")


def patch_model_class(session: Session, model_class: Any) -> None:
    """Replaces methods on upstream's model class, as plain functions.

    A wrapt proxy would not do for ``forward``: accelerate's ``prepare`` takes ``model.forward.__func__``, which a proxy
    passes through to the unpatched function.
    """
    upstream_forward = model_class.forward
    upstream_loader = vars(model_class).get("from_pretrained")
    session.remember_forward(upstream_forward)

    @functools.wraps(upstream_forward)
    def forward(self: Any, *args: Any, **batch: Any) -> Any:
        given = {name for name, value in batch.items() if value is not None}
        if args or self is not session.model or "labels" not in given or not given <= TRAINING_ARGUMENTS:
            return upstream_forward(self, *args, **batch)
        return session.forward(self, batch)

    def from_pretrained(cls: Any, *args: Any, **options: Any) -> Any:
        session.before_model_load(cls, args, options)
        inherited = super(model_class, cls).from_pretrained
        model = (upstream_loader.__get__(None, cls) if upstream_loader is not None else inherited)(*args, **options)
        session.model_loaded(model)
        return model

    def gradient_checkpointing_enable(self: Any, *args: Any, **options: Any) -> None:
        session.enable_checkpointing()

    ledger = session.ledger
    ledger.apply(model_class, "forward", forward, "the chunked loss")
    ledger.apply(model_class, "from_pretrained", classmethod(from_pretrained), "checks first, then shapes the model")
    ledger.apply(
        model_class, "gradient_checkpointing_enable", gradient_checkpointing_enable, "backbone layers only, no hook"
    )


def _check_wanted_family(found: str) -> None:
    wanted = os.environ.get("MOSS_LOWMEM_FAMILY")
    if wanted not in (None, found):
        known = ", ".join(family.name for family in FAMILIES)
        raise SettingsError(
            f"MOSS_LOWMEM_FAMILY={wanted!r}, but the trainer that was started is {found}'s. Supported: {known}."
        )
