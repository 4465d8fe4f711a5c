"""Simulates a training step of the full-size model without weights, without a GPU and in seconds.

The real model class is built under ``FakeTensorMode`` and the layer's real code runs one micro-batch in the middle of
an accumulation window and the optimizer step after it, with gradients of earlier micro-batches and optimizer states
already there: that is where a long run has its peak.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode

from ..families.family import Family, LabelSummary, TrainingContext
from ..loss.engine import EngineOptions, LossEngine
from ..optim import build_optimizer, build_store
from ..optim.streamed import StreamedOptimizer
from ..runtime.checkpointing import checkpoint_layers, layer_parameters
from ..runtime.parked import park_embedding
from .flops import FlopCounter
from .tracker import StorageTracker
from .weight_parking import WeightParking


@dataclass(frozen=True)
class MicroBatch:
    """Shape of a micro-batch: records in it, positions of the longest, supervised positions of all."""

    records: int
    positions: int
    supervised: int


@dataclass(frozen=True)
class Rung:
    """One way to run the layer, in the terms of the settings."""

    schedule: str = "staged"
    chunk_frames: int = 32
    checkpointing: bool = True
    optimizer: str = "adamw8bit"
    gradients: str = "device"
    states: str = "device"
    host_gradient_dtype: torch.dtype = torch.float32
    weights: str = "device"


@dataclass(frozen=True)
class StepFigures:
    """What a simulated step needs.

    Attributes:
        peak_bytes: largest sum of live device storages, optimizer step included.
        backward_peak_bytes: the same up to the end of the backward.
        host_bytes: host buffers of the stores and parked weights.
        matmul_flops: of the matrix products of one micro-batch.
        attention_flops: of its attention kernels.
    """

    peak_bytes: int
    backward_peak_bytes: int
    host_bytes: int
    matmul_flops: int
    attention_flops: int


def simulate_rung(family: Family, model_class: Any, config: Any, batch: MicroBatch, rung: Rung) -> StepFigures:
    """Simulates the layer.

    Args:
        family: whose forward runs.
        model_class: upstream's class.
        config: at full size.
        batch: the micro-batch's shape.
        rung: the settings.
    """
    with _simulation() as (tracker, counter):
        model = _build(model_class, config, tracker)
        for parent, attribute in family.unread_embeddings(model):
            park_embedding(parent, attribute)
        if rung.checkpointing:
            checkpoint_layers(family.backbone(model))
        store = build_store(rung.gradients, rung.host_gradient_dtype)
        store.attach(model.named_parameters())
        optimizer = build_optimizer(
            rung.optimizer, list(model.named_parameters()), store, rung.states, seed=0, lr=1e-5, betas=(0.9, 0.95)
        )
        _bring_about_second_micro_batch(model, optimizer, rung)
        parking = WeightParking(layer_parameters(family.backbone(model)))
        context = TrainingContext(
            engine=LossEngine(
                EngineOptions(rung.schedule, rung.chunk_frames, verify_scale=False),
                store,
                parking.away if rung.weights == "host" else contextlib.nullcontext,
            ),
            direct=rung.schedule != "autograd",
            loss_scale=lambda: 0.5,
            finite_empty_channels=True,
            say_once=lambda line: None,
            summarise_labels=lambda labels: LabelSummary(torch.zeros(batch.supervised, dtype=torch.int64)),
        )
        tracker.reset_peak()
        with family.simulated_precision(model):
            inputs = family.simulated_batch(config, batch.records, batch.positions)
            loss = family.training_output(model, inputs, context).loss
        (loss.float() * 0.5).backward()
        store.end_micro_batch(context.expected_contributions)
        matmul, attention, backward_peak = counter.matmul_flops, counter.attention_flops, tracker.peak_bytes
        optimizer.step()
        return StepFigures(tracker.peak_bytes, backward_peak, tracker.host_bytes, matmul, attention)


def simulate_upstream(
    family: Family,
    model_class: Any,
    config: Any,
    batch: MicroBatch,
    *,
    checkpointing: bool,
    forward: Any = None,
    enable_checkpointing: Callable[[Any], None] = lambda model: model.gradient_checkpointing_enable(),
) -> StepFigures:
    """Simulates upstream's own step as accelerate runs it: autocast, outputs converted to float32, torch's AdamW.

    Args:
        family: whose trainer's inputs and frozen parts they are.
        model_class: upstream's class.
        config: at full size.
        batch: the micro-batch's shape.
        checkpointing: upstream's own, where it has any.
        forward: upstream's forward where the class has been patched, or where the trainer computes the loss; by default
            the class's own.
        enable_checkpointing: what upstream's trainer does to the model for it.
    """
    from accelerate.utils.operations import convert_to_fp32

    with _simulation() as (tracker, counter):
        model = _build(model_class, config, tracker)
        for parent, attribute in family.unread_embeddings(model):
            getattr(parent, attribute).weight.requires_grad_(False)  # upstream freezes what it never reads
        if checkpointing:
            enable_checkpointing(model)
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-5, foreach=False)
        _allocate_gradients(model)
        optimizer.step()
        tracker.reset_peak()
        inputs = family.simulated_batch(config, batch.records, batch.positions)
        with family.simulated_precision(model):
            output = family.simulated_upstream_output(forward or model_class.forward, model, inputs, batch.supervised)
        output = convert_to_fp32(output)
        (output.loss * 0.5).backward()
        matmul, attention, backward_peak = counter.matmul_flops, counter.attention_flops, tracker.peak_bytes
        optimizer.step()
        return StepFigures(tracker.peak_bytes, backward_peak, tracker.host_bytes, matmul, attention)


@contextlib.contextmanager
def _simulation() -> Iterator[tuple[StorageTracker, FlopCounter]]:
    with FakeTensorMode(allow_non_fake_inputs=True), StorageTracker() as tracker, FlopCounter() as counter:
        yield tracker, counter


def _build(model_class: Any, config: Any, tracker: StorageTracker) -> Any:
    """Builds the class in bfloat16, in training mode."""
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.bfloat16)
    try:
        model = model_class(config).train()
    finally:
        torch.set_default_dtype(before)
    tracker.watch(model.parameters())
    return model


def _bring_about_second_micro_batch(model: nn.Module, optimizer: StreamedOptimizer, rung: Rung) -> None:
    if rung.gradients == "device":
        _allocate_gradients(model)
    optimizer.reserve_states()
    if rung.states == "device":
        for parameter in model.parameters():
            if parameter.requires_grad:
                optimizer.states.read(parameter)


def _allocate_gradients(model: nn.Module) -> None:
    for parameter in model.parameters():
        if parameter.requires_grad:
            parameter.grad = torch.zeros_like(parameter)
