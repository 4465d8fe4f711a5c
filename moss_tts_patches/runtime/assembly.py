"""Puts together what trains, once the model is loaded: stores, loss engine and loop, out of what the run decided."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from ..errors import SeamError
from ..families.family import TrainingContext, supervised_positions
from ..loss.engine import LossEngine
from ..loss.problem import IGNORE_INDEX
from ..memory.card import StorePlacement
from ..optim import build_optimizer
from .checkpointing import layer_parameters
from .nonfinite import NonFiniteGradients
from .plan import card_memory
from .report import log
from .stores import StoreRequest, Stores, build_stores
from .training_loop import TrainingLoop

if TYPE_CHECKING:
    from ..session import Session


def make_stores(session: Session) -> Stores:
    """Decides where gradients and states live, now that the model's size is known.

    Raises:
        SettingsError: a placement is set that this run cannot have.
    """
    settings, device, chosen = session.settings, session.accelerator.device, session.decisions.placements
    request = StoreRequest(
        StorePlacement(chosen.gradients, chosen.states, chosen.weights),
        host_gradient_dtype=getattr(torch, chosen.host_gradient_dtype),
        optimizer=settings.optimizer,
        schedule=session.decisions.schedule,
        checkpointed_layers=session.checkpointed_layers,
        loss_scaler=session.accelerator.scaler is not None,
        engine_reason=session.parallel.device_gradients_reason,
        four_bit=settings.method == "qlora",
    )
    card = card_memory(device, settings.vram)
    return build_stores(request, session.model, lambda: layer_parameters(session.family.backbone(session.model)), card)


def make_loop(session: Session) -> TrainingLoop:
    """Builds the layer's part in upstream's loop; the session's stores are ready."""
    return TrainingLoop(
        family=session.family,
        accelerator=session.accelerator,
        parallel=session.parallel,
        context=_training_context(session),
        stores=session.stores,
        data=session.data,
        resume=session.resume,
        clock=session.clock,
        record=session.record,
        watch=session.watch,
        adapters=session.adapters,
        before_first=session.ledger.verify,
        tries_longest=session.settings.longest_first == "1",
        nonfinite=NonFiniteGradients(session.settings.nonfinite, session.data.name_record),
        trainer_decides=session.family.decides_on_nonfinite(session.arguments_parsed),
        say=log,
    )


def _training_context(session: Session) -> TrainingContext:
    accelerator, stores = session.accelerator, session.stores

    def loss_scale() -> float:
        scale = accelerator.scaler.get_scale() if accelerator.scaler is not None else 1.0
        return scale / accelerator.gradient_accumulation_steps

    options = session.decisions.engine_options
    return TrainingContext(
        engine=LossEngine(options, stores.gradients, stores.weights_away, session.record.observe),
        direct=session.decisions.schedule != "autograd",
        loss_scale=loss_scale,
        finite_empty_channels=session.corrects("empty_channel_loss"),
        say_once=session.say_once,
        summarise_labels=lambda labels: supervised_positions(labels, IGNORE_INDEX),
        every_weight=session.parallel.several,
        inside_forward=session.parallel.loss_inside_forward,
    )


def make_optimizer(session: Session, parameters: Iterable[nn.Parameter], options: dict[str, Any]) -> Any:
    """Builds the optimizer, the layer's own or the one that an engine asks for, and has the loop know it.

    Args:
        session: its model is loaded.
        parameters: as the trainer gives them to its ``AdamW(...)``.
        options: that call's.

    Raises:
        SeamError: some parameters are not the model's.
    """
    settings, parallel, loop = session.settings, session.parallel, session.loop
    named = name_parameters(session.model, parameters)
    if parallel.owns_optimizer:
        if settings.optimizer != "adamw":
            log(f"optimizer=adamw instead_of={settings.optimizer} reason='{parallel.optimizer_reason}'")
        trained = [parameter for _, parameter in named if parameter.requires_grad]
        loop.optimizer = torch.optim.AdamW(trained, **options)
        return loop.optimizer
    gradients, states = session.stores.gradients, session.stores.placement.states
    optimizer = build_optimizer(settings.optimizer, named, gradients, states, seed=session.seed, **options)
    loop.drive(optimizer)
    return optimizer


def name_parameters(model: nn.Module, given: Iterable[nn.Parameter]) -> list[tuple[str, nn.Parameter]]:
    """Returns the parameters that the trainer gives its optimizer with their names in the model, in its order.

    Raises:
        SeamError: some are not the model's.
    """
    names = {parameter: name for name, parameter in model.named_parameters()}
    parameters = list(given)
    unknown = sum(1 for parameter in parameters if parameter not in names)
    if unknown:
        raise SeamError(
            f"seam sft.py.AdamW: {unknown} of {len(parameters)} parameters do not belong to the loaded model. The "
            "layer needs their names to save and restore optimizer state; upgrade moss_tts_patches, or use "
            "MOSS_LOWMEM=0."
        )
    return [(names[parameter], parameter) for parameter in parameters]
