"""Small models and micro-batches in this process, and one way to run upstream's forward or ours on them."""

from __future__ import annotations

import copy
import functools
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import mini  # noqa: F401  (puts examples/ on the path)
import torch
from mini_moss_tts.make_demo_data import SCALES, SPECIAL_TOKENS, random_model
from torch import nn

from moss_tts_patches.families.family import Family, TrainingContext, supervised_positions
from moss_tts_patches.families.local import LocalFamily
from moss_tts_patches.loss.engine import EngineOptions, LossEngine
from moss_tts_patches.loss.problem import IGNORE_INDEX
from moss_tts_patches.optim.gradients import DeviceGradients, GradientStore

DIRECT = ("fused", "staged")
SCHEDULES = (*DIRECT, "autograd")
FAMILY = LocalFamily()


def tiny_model(dtype: torch.dtype = torch.float32) -> Any:
    """A fresh copy of the miniature's tiny model (0.3 M parameters, 4 codebooks) in training mode."""
    return copy.deepcopy(_tiny_model()).to(dtype)


@functools.cache
def _tiny_model() -> Any:
    ids = {name: index for index, name in enumerate(SPECIAL_TOKENS)}
    return random_model(SCALES["tiny"], ids, seed=0).train()


def speech_batch(frames: int, *, batch: int = 1, prompt: int = 5, seed: int = 0) -> dict[str, Any]:
    """A micro-batch as the collate function makes it: prompt, ``frames`` of audio, one end frame with text only."""
    generator = torch.Generator().manual_seed(seed)
    sizes, length = SCALES["tiny"], prompt + frames
    text = torch.full((batch, length + 1, 1), 12)  # the slot token, the same in every frame
    text[:, :prompt] = torch.randint(12, sizes.vocabulary, (batch, prompt, 1), generator=generator)
    codes = torch.randint(0, sizes.codes, (batch, length + 1, sizes.codebooks), generator=generator)
    tokens = torch.cat([text, codes], dim=-1)
    labels = tokens[:, 1:].clone()
    labels[:, : prompt - 1] = IGNORE_INDEX
    labels[:, -1, 1:] = IGNORE_INDEX
    return {
        "input_ids": tokens[:, :-1],
        "attention_mask": torch.ones(batch, length, dtype=torch.bool),
        "labels": labels,
        "channelwise_loss_weight": [1.0] + [8.0] * sizes.codebooks,
    }


@dataclass
class Ours:
    """Our loss on one model, as a session would set it up."""

    schedule: str
    chunk_frames: int = 7
    logits_at_once: int = 2000
    store: GradientStore = field(default_factory=DeviceGradients)
    scale: float = 1.0
    finite_empty_channels: bool = True
    said: list[str] = field(default_factory=list)
    family: Family = FAMILY

    def __post_init__(self) -> None:
        options = EngineOptions(self.schedule, self.chunk_frames, self.logits_at_once)
        self.context = TrainingContext(
            engine=LossEngine(options, self.store),
            direct=self.schedule != "autograd",
            loss_scale=lambda: self.scale,
            finite_empty_channels=self.finite_empty_channels,
            say_once=self.said.append,
            summarise_labels=lambda labels: supervised_positions(labels, IGNORE_INDEX),
        )

    def loss(self, model: Any, batch: dict[str, Any]) -> torch.Tensor:
        return self.family.training_output(model, batch, self.context).loss

    def train(self, model: Any, batches: Sequence[dict[str, Any]], autocast: torch.dtype | None = None) -> list[float]:
        """Accumulates the gradients of ``batches`` and returns their losses."""
        self.store.attach(model.named_parameters())
        losses = []
        for batch in batches:
            with autocast_to(autocast):
                loss = self.loss(model, batch).float()
            (loss * self.scale).backward()
            self.store.end_micro_batch(self.context.expected_contributions)
            losses.append(loss.item())
        self.store.detach()
        return losses


def train_reference(
    model: Any, batches: Sequence[dict[str, Any]], scale: float = 1.0, autocast: torch.dtype | None = None
) -> list[float]:
    """The trainer's own forward and autograd on the same batches."""
    losses = []
    for batch in batches:
        with autocast_to(autocast):
            loss = model(**batch).loss
        (loss.float() * scale).backward()
        losses.append(loss.item())
    return losses


@contextmanager
def autocast_to(dtype: torch.dtype | None) -> Iterator[None]:
    """Mixed precision as accelerate sets it up, or none."""
    with torch.autocast("cpu", dtype=dtype or torch.bfloat16, enabled=dtype is not None):
        yield


def gradients(model: nn.Module) -> dict[str, torch.Tensor]:
    """Every gradient there is, in float64."""
    return {name: p.grad.double() for name, p in model.named_parameters() if p.grad is not None}


def relative_errors(found: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> dict[str, float]:
    """``||found - expected|| / ||expected||`` by parameter; the two must name the same parameters."""
    assert found.keys() == expected.keys(), found.keys() ^ expected.keys()
    # A gradient that is exactly zero (a channel without labels) has to be exactly zero on both sides.
    return {
        name: ((found[name] - expected[name]).norm() / expected[name].norm().clamp(min=1e-30)).item()
        for name in expected
    }


def pair(model: Any) -> tuple[Any, Any]:
    """Two copies of a model."""
    return copy.deepcopy(model), copy.deepcopy(model)
