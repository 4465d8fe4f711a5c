"""Sizes of a model that is never built for real: numbers of weights and bytes, from the meta device."""

from __future__ import annotations

from typing import Any

import torch

from ..families.family import Family
from ..runtime.checkpointing import layer_parameters


def measure_model(family: Family, model: Any) -> dict[str, float]:
    """Counts what full training needs between steps, as :class:`.traces.FullTraining` names it, and what there is."""
    backbone: Any = family.backbone(model)
    unread = {getattr(parent, name).weight for parent, name in family.unread_embeddings(model)}
    trained = [parameter for parameter in model.parameters() if parameter not in unread]
    layers = list(layer_parameters(backbone))
    size = sum(parameter.numel() * parameter.element_size() for parameter in trained)
    return {
        "layers": len(backbone.layers),
        "depth": family.depth_model(model) is not None,
        "weights": size,
        "gradients": size,
        "elements": sum(parameter.numel() for parameter in trained),
        "layer_weights": sum(parameter.numel() * parameter.element_size() for parameter in layers),
    }


def measure_parts(family: Family, model: Any) -> dict[str, float]:
    """Numbers of weights, as FSDP and ZeRO-3 see them."""
    backbone: Any = family.backbone(model)
    wrapped = {type(layer) for layer in backbone.layers}
    units = [module for module in model.modules() if type(module) in wrapped]
    inside = {parameter for unit in units for parameter in unit.parameters()}
    every = list(model.parameters())
    return {
        "total": sum(parameter.numel() for parameter in every),
        "unread": sum(getattr(parent, name).weight.numel() for parent, name in family.unread_embeddings(model)),
        "unit": max(sum(parameter.numel() for parameter in unit.parameters()) for unit in units),
        "root": sum(parameter.numel() for parameter in every if parameter not in inside),
        "largest": max(parameter.numel() for parameter in every),
    }


def build_on_meta(model_class: Any, config: Any) -> Any:
    """The whole model in bfloat16; on the meta device it takes no memory."""
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.bfloat16)
    try:
        with torch.device("meta"), torch.random.fork_rng(devices=[]):
            return model_class(config)
    finally:
        torch.set_default_dtype(before)
