"""How closely the layer's loss and gradients agree with upstream's own code, by family, method, precision, schedule.

``tests/test_fidelity.py`` asserts on these figures and ``benchmarks/fidelity.py`` writes them down, so that the table
in docs/benchmarks.md cannot say anything else than the tests. Models are random and of upstream's own classes, shrunken
as the layer's self check shrinks them; batches have a prompt, padding and positions without labels.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from peft import LoraConfig, inject_adapter_in_model
from small_models import SCHEDULES, Ours, autocast_to, gradients, relative_errors
from tolerances import TOLERANCES

from moss_tts_patches.families import FAMILIES
from moss_tts_patches.families.family import Family
from moss_tts_patches.memory.upstream_source import SOURCES, class_folder, load_classes, trainer_options

METHODS = ("full", "lora")
PRECISIONS = ("float32", "bfloat16")
# bf16 errors are chance: small tensors rounded once more or less differ by 10 % in one batch.
BF16_SEEDS = 12
# Upstream's N(0, 0.02) suits thousands of channels: a model of 24 attends to everything alike, and the gradients of its
# queries are so small that float32 noise is 1.3e-5 of them. At 0.1 they are gradients like others.
WEIGHT_SCALE = 5.0
CHUNK_FRAMES, LOGITS_AT_ONCE = 5, 60  # several chunks and blocks of logits, the last ones partial


@dataclass(frozen=True)
class Case:
    """What is compared."""

    family: str
    method: str
    precision: str
    schedule: str

    def __str__(self) -> str:
        return "-".join((self.family, self.method, self.precision, self.schedule))


@dataclass(frozen=True)
class Agreement:
    """How far the layer is from upstream.

    Attributes:
        loss_difference: largest relative difference from upstream's loss in the same precision.
        gradient_error: the worst tensor's. float32: ``||ours - upstream's|| / ||upstream's||``. bfloat16: the layer's
            error against float32 as a multiple of upstream's own, mean squares over :data:`BF16_SEEDS` batches.
        tensor: its name.
        tensors: how many gradients were compared.
    """

    loss_difference: float
    gradient_error: float
    tensor: str
    tensors: int


def cases() -> Iterator[Case]:
    """Every family, method, precision and schedule."""
    for family in SOURCES:
        for method in METHODS:
            for precision in PRECISIONS:
                for schedule in SCHEDULES:
                    yield Case(family, method, precision, schedule)


class Upstream:
    """A family's classes and loss, from a checkout; neither checkpoint nor patch."""

    def __init__(self, repository: Path, family: str) -> None:
        source = SOURCES[family]
        self.family: Family = next(each for each in FAMILIES if each.name == family)()
        self.model_class, self.config_class = load_classes(class_folder(repository, source), source)
        options = trainer_options(repository, source)
        self._loss: Callable[..., torch.Tensor] = options.get("forward", lambda model, **batch: model(**batch).loss)

    def model(self, method: str) -> Any:
        """A fresh random model in float32 training mode, frozen as the trainer or as an adapter's training does."""
        torch.manual_seed(0)
        model = self.model_class(self.family.shrunken_config(self.config_class())).train()
        with torch.no_grad():
            for parameter in model.parameters():
                if parameter.ndim == 1:  # norms stand at exactly 1, where a forgotten one would not show
                    parameter.add_(torch.randn_like(parameter) * 0.1)
                else:
                    parameter.mul_(WEIGHT_SCALE)
        for parent, attribute in self.family.unread_embeddings(model):
            getattr(parent, attribute).weight.requires_grad_(False)
        if method == "lora":
            self._inject(model)
        return model

    def _inject(self, model: Any) -> None:
        """Adapters on backbone and depth model, both halves random: a fresh one hides half of its gradients."""
        groups = (
            self.family.adapter_groups[name] for name in ("backbone", "depth") if name in self.family.adapter_groups
        )
        model.requires_grad_(False)
        inject_adapter_in_model(LoraConfig(r=4, target_modules="|".join(f"(?:{group})" for group in groups)), model)
        with torch.no_grad():
            for name, parameter in model.named_parameters():
                if "lora_" in name:
                    parameter.copy_(torch.randn_like(parameter) * 0.05)

    def batch(self, model: Any, seed: int) -> dict[str, Any]:
        generator = torch.Generator().manual_seed(seed)
        batch = self.family.sample_batch(model.config, generator)
        hidden = torch.rand(batch["labels"].shape, generator=generator) < 0.2
        batch["labels"] = batch["labels"].masked_fill(hidden, -100)
        return batch

    def train(self, model: Any, batch: dict[str, Any], autocast: torch.dtype | None = None) -> float:
        """Upstream's loss and autograd."""
        with autocast_to(autocast):
            loss = self._loss(model, **batch)
        loss.float().backward()
        return loss.item()

    def compare(self, case: Case, ours: Ours | None = None) -> Agreement:
        """Measures a case; ``ours`` is what stands in for the layer in a negative control."""
        ours = ours or Ours(case.schedule, CHUNK_FRAMES, LOGITS_AT_ONCE, family=self.family)
        return self._float32(case, ours) if case.precision == "float32" else self._bfloat16(case, ours)

    def _float32(self, case: Case, ours: Ours) -> Agreement:
        model = self.model(case.method)
        batch, found = self.batch(model, seed=5), copy.deepcopy(model)
        reference = self.train(model, batch)
        [loss] = ours.train(found, [batch])
        errors = relative_errors(gradients(found), gradients(model))
        worst = max(errors, key=lambda name: errors[name])
        return Agreement(abs(loss / reference - 1), errors[worst], worst, len(errors))

    def _bfloat16(self, case: Case, ours: Ours) -> Agreement:
        """Weights in bf16, adapters in float32, autocast; the exact gradients are float32's of the same weights."""
        rounded = self.model(case.method)
        for parameter in rounded.parameters():
            if case.method == "full" or not parameter.requires_grad:
                parameter.data = parameter.data.bfloat16()
        differences: list[float] = []
        ours_squares: dict[str, float] = {}
        squares: dict[str, float] = {}
        for seed in range(BF16_SEEDS):
            exact, theirs, found = copy.deepcopy(rounded).float(), copy.deepcopy(rounded), copy.deepcopy(rounded)
            batch = self.batch(rounded, seed)
            self.train(exact, batch)
            reference = self.train(theirs, batch, torch.bfloat16)
            [loss] = ours.train(found, [batch], torch.bfloat16)
            differences.append(abs(loss / reference - 1))
            for total, model in ((ours_squares, found), (squares, theirs)):
                for name, error in relative_errors(gradients(model), gradients(exact)).items():
                    total[name] = total.get(name, 0.0) + error**2
        ratios = {name: (ours_squares[name] / squares[name]) ** 0.5 for name in squares}
        worst = max(ratios, key=lambda name: ratios[name])
        return Agreement(max(differences), ratios[worst], worst, len(ratios))


def allowed(case: Case) -> tuple[float, float]:
    """Bounds of the loss difference and of the gradient error."""
    if case.precision == "float32":
        return TOLERANCES["loss_fp32_relative"], TOLERANCES["gradient_fp32_relative"]
    return TOLERANCES["loss_bf16_relative"], TOLERANCES["gradient_bf16_error_ratio"]


def is_close(case: Case, found: Agreement) -> bool:
    """Whether the layer agrees with upstream as closely as the tests ask for."""
    loss, gradient = allowed(case)
    return found.loss_difference <= loss and found.gradient_error <= gradient
