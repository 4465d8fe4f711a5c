"""Tells the planner what LoRA and QLoRA do to a model; imports torch only when one is simulated."""

from __future__ import annotations

from typing import Any

from ..memory.methods import Shape
from .plan import AdapterPlan

#: PEFT's options of a run whose settings say nothing else; the settings' own defaults.
USUAL_OPTIONS: dict[str, Any] = {"r": 16, "lora_alpha": 32, "lora_dropout": 0.05}


def adapter_shapes(plan: AdapterPlan | None = None) -> dict[str, Shape]:
    """Returns a shape for each method.

    Args:
        plan: what the run's adapters are; by default rank 16 on all projections.
    """
    wanted = plan if plan is not None else AdapterPlan("lora", options=USUAL_OPTIONS)
    shapes = {}
    for method in ("lora", "qlora"):
        own = AdapterPlan(method, wanted.targets, wanted.also_train, wanted.options)
        shapes[method] = Shape(_shape_of(own), repr((own.targets, own.also_train, sorted(own.options.items()))))
    return shapes


def _shape_of(plan: AdapterPlan) -> Any:
    def shape_model(family: Any, model: Any) -> None:
        from .simulated import AdapterShape

        AdapterShape(plan)(family, model)

    return shape_model
