"""Compares our loss and gradients with upstream's on a shrunken model, before the real one is loaded.

Recorded hashes or names of upstream's code would only say that something changed. This says whether it matters, for
the very classes that are about to train, in about a third of a second.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from ..errors import SeamError
from ..loss.engine import EngineOptions, LossEngine
from ..loss.module_schedule import ByModule
from ..optim.gradients import DeviceGradients
from .family import Family, TrainingContext, supervised_positions

# float32 on some tens of positions: order of summation gives 1e-6 at most, a dropped term or weight 1e-2 and more.
LARGEST_DIFFERENCE = 1e-4


def check_against_upstream(
    family: Family, model_class: Any, config: Any, upstream_forward: Callable[..., Any], options: EngineOptions
) -> None:
    """Runs one random micro-batch both ways.

    Args:
        family: the family whose ``training_output`` is checked.
        model_class: upstream's class.
        config: the real model's config; it is shrunken here.
        upstream_forward: upstream's own forward function.
        options: the schedule that the run will use.

    Raises:
        SeamError: loss or a gradient differs; names the worst parameter.
    """
    with torch.random.fork_rng(devices=[]), torch.autocast("cpu", enabled=False):
        torch.manual_seed(0)
        model = _small_model(family, model_class, config)
        batch = family.sample_batch(model.config, torch.Generator().manual_seed(1))
        expected_loss = family.reference_loss(upstream_forward, model, batch)
        expected_loss.backward()
        expected = _take_gradients(model)
        loss = _our_loss(family, model, batch, options)
        found = _take_gradients(model)
    worst, difference = _worst(expected, found)
    loss_difference = abs(loss - expected_loss.item()) / abs(expected_loss.item())
    if not (loss_difference <= LARGEST_DIFFERENCE and difference <= LARGEST_DIFFERENCE):
        raise SeamError(
            f"self check of {family.name}: our loss and gradients do not equal upstream's on a small random model "
            f"(loss differs by {loss_difference:.1e}, worst gradient {worst} by {difference:.1e}; allowed "
            f"{LARGEST_DIFFERENCE:.0e}). Upstream's mathematics has changed, or another package patches it. Use the "
            "upstream commit named in the README, upgrade moss_tts_patches, or train with MOSS_LOWMEM=0. "
            "MOSS_LOWMEM_SELF_CHECK=0 skips this check at your own risk."
        )


def _small_model(family: Family, model_class: Any, config: Any) -> Any:
    small = family.shrunken_config(config)
    model = model_class(small).float().train()
    for parent, attribute in family.unread_embeddings(model):
        getattr(parent, attribute).weight.requires_grad_(False)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim == 1:  # norms stand at exactly 1, where a forgotten one would not show
                parameter.add_(torch.randn_like(parameter) * 0.1)
    return model


def _our_loss(family: Family, model: nn.Module, batch: dict[str, Any], options: EngineOptions) -> float:
    store = DeviceGradients()
    store.attach(model.named_parameters())
    # Small chunks and few logits at once, so that every seam between chunks is crossed.
    small = dataclasses.replace(
        options, chunk_frames=3, logits_at_once=128, by_module=None if options.by_module is None else ByModule()
    )
    context = TrainingContext(
        engine=LossEngine(small, store),
        direct=options.schedule != "autograd",
        loss_scale=lambda: 1.0,
        finite_empty_channels=True,
        say_once=lambda line: None,
        summarise_labels=lambda labels: supervised_positions(labels, -100),
    )
    try:
        loss = family.training_output(model, batch, context).loss
        loss.backward()
        store.end_micro_batch(context.expected_contributions)
    finally:
        store.detach()
    return loss.item()


def _take_gradients(model: nn.Module) -> dict[str, torch.Tensor]:
    gradients = {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
    for parameter in model.parameters():
        parameter.grad = None
    return gradients


def _worst(expected: dict[str, torch.Tensor], found: dict[str, torch.Tensor]) -> tuple[str, float]:
    """Returns the parameter whose gradient differs most, and by how much relative to its norm."""
    differences = {name: float("inf") for name in expected.keys() ^ found.keys()}
    for name in expected.keys() & found.keys():
        scale = expected[name].norm().clamp(min=1e-12)
        differences[name] = ((found[name] - expected[name]).norm() / scale).item()
    worst = max(differences, key=lambda name: differences[name])
    return worst, differences[worst]
