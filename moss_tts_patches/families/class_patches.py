"""Patches on a model class that the trainer names: its forward, its loader, its checkpointing switch."""

from __future__ import annotations

import functools
from contextlib import AbstractContextManager
from types import ModuleType
from typing import TYPE_CHECKING, Any, Protocol

if TYPE_CHECKING:
    from ..ledger import Ledger


class RunHooks(Protocol):
    """What a patch may tell the run; :class:`moss_tts_patches.session.Session` is one."""

    ledger: Ledger
    trainer: ModuleType
    model: Any

    @property
    def nonfinite_gradients(self) -> list[str]:
        """Names of the parameters whose gradients were not finite when they were clipped last."""

    @property
    def checks_gradients(self) -> bool:
        """Whether the layer decides what becomes of gradients that are not finite, and not the trainer."""

    @property
    def loss_inside_forward(self) -> bool:
        """Whether the engine needs the whole loss within the forward of the model that it wrapped."""

    def corrects(self, name: str) -> bool:
        """Whether a departure from upstream's numbers is wanted."""

    def say_once(self, line: str) -> None:
        """Logs a line the first time it is said."""

    def remember_forward(self, forward: Any) -> None:
        """Upstream's own forward, before it is replaced."""

    def before_model_load(self, model_class: Any, config: Any) -> None:
        """The trainer is about to load its model."""

    def guarded(self, phase: Any, function: Any) -> Any:
        """Returns ``function`` as a phase whose memory is reported when it runs out."""

    def loading_options(self) -> dict[str, Any]:
        """What ``from_pretrained`` is given besides the trainer's own arguments."""

    def loading(self) -> AbstractContextManager[object]:
        """Open while the trainer's loader runs."""

    def model_loaded(self, model: Any) -> None:
        """The trainer's model, still in host memory."""

    def enable_checkpointing(self) -> None:
        """The trainer asked for gradient checkpointing."""

    def forward(self, model: Any, batch: dict[str, Any]) -> Any:
        """One training forward of the trainer's loop."""


def patch_model_class(session: RunHooks, model_class: Any, training_arguments: frozenset[str]) -> None:
    """Replaces methods on upstream's model class, as plain functions.

    A wrapt proxy would not do for ``forward``: accelerate's ``prepare`` takes ``model.forward.__func__``, which a proxy
    passes through to the unpatched function.

    Args:
        session: the run.
        model_class: upstream's class.
        training_arguments: what upstream's loop passes to the model; a call with any other argument is not training
            and stays upstream's.
    """
    upstream_forward = model_class.forward
    upstream_loader = vars(model_class).get("from_pretrained")
    session.remember_forward(upstream_forward)

    @functools.wraps(upstream_forward)
    def forward(self: Any, *args: Any, **batch: Any) -> Any:
        given = {name for name, value in batch.items() if value is not None}
        if args or self is not session.model or "labels" not in given or not given <= training_arguments:
            return upstream_forward(self, *args, **batch)
        return session.forward(self, batch)

    def from_pretrained(cls: Any, *args: Any, **options: Any) -> Any:
        path = args[0] if args else options.get("pretrained_model_name_or_path")
        session.before_model_load(cls, cls.config_class.from_pretrained(path))
        inherited = super(model_class, cls).from_pretrained
        load = upstream_loader.__get__(None, cls) if upstream_loader is not None else inherited
        with session.loading():
            model = session.guarded("load", load)(*args, **{**options, **session.loading_options()})
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
