"""The real v1.5 upstream in this process: its model class without a checkpoint's cache, and its trainer as a module."""

from __future__ import annotations

import argparse
import importlib
import importlib.util
import sys
import tempfile
import types
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch

from moss_tts_patches.activation import activate
from moss_tts_patches.session import Session

_FOLDER = "moss_tts_local_v1.5"  # a dot: not a package that could be imported by its name
_PACKAGE = "upstream_local_v15"


def import_classes(repository: Path) -> tuple[Any, Any]:
    """Returns upstream's model and config classes."""
    if _PACKAGE not in sys.modules:
        package = types.ModuleType(_PACKAGE)
        package.__path__ = [str(repository / _FOLDER)]
        sys.modules[_PACKAGE] = package
    model = importlib.import_module(f"{_PACKAGE}.modeling_moss_tts").MossTTSLocalModel
    return model, importlib.import_module(f"{_PACKAGE}.configuration_moss_tts").MossTTSLocalConfig


def import_trainer(repository: Path) -> ModuleType:
    """Returns a fresh sft.py; its top-level modules ``common`` and ``dataset`` do not stay behind."""
    path = repository / _FOLDER / "finetuning" / "sft.py"
    before = list(sys.path)
    spec = importlib.util.spec_from_file_location("upstream_local_v15_sft", path)
    assert spec is not None and spec.loader is not None
    trainer = importlib.util.module_from_spec(spec)
    try:
        spec.loader.exec_module(trainer)
    finally:
        sys.path[:] = before
        for name in ("common", "dataset"):
            sys.modules.pop(name, None)
    return trainer


@contextmanager
def active(trainer: ModuleType, patch: pytest.MonkeyPatch, **variables: str) -> Iterator[Session]:
    """The layer on a trainer whose ``main`` has just parsed its arguments."""
    with ExitStack() as stack, patch.context() as environment:
        environment.setenv("MOSS_LOWMEM", "1")
        for name, value in variables.items():
            environment.setenv(f"MOSS_LOWMEM_{name.upper()}", value)
        session = activate(trainer, argparse.ArgumentParser(), [])
        folder = stack.enter_context(tempfile.TemporaryDirectory())
        session.parsed(SimpleNamespace(seed=42, mixed_precision="no", gradient_accumulation_steps=2, output_dir=folder))
        try:
            yield session
        finally:
            session.ledger.undo()


class LocalRun:
    """What the trainer's ``main`` does between loading and saving, with its own functions, on given batches."""

    def __init__(self, trainer: ModuleType, checkpoint: Path, attention: str = "eager") -> None:
        self.trainer = trainer
        self.accelerator = trainer.Accelerator(gradient_accumulation_steps=2, step_scheduler_with_optimizer=False)
        model = trainer.load_training_model(
            accelerator=self.accelerator,
            model_path=str(checkpoint),
            model_dtype=torch.float32,
            attn_implementation=attention,
        )
        # Upstream's own values but for the rate; the decay is what tells a missing gradient from a zero one.
        self.optimizer = trainer.AdamW(
            model.parameters(), lr=1e-3, weight_decay=0.1, betas=(0.9, 0.95), eps=1e-4, foreach=False
        )
        self.model, self.optimizer = self.accelerator.prepare(model.train(), self.optimizer)

    def backward(self, batch: dict[str, Any]) -> float:
        loss = self.trainer.compute_supervised_loss(self.model, **batch)
        self.accelerator.backward(loss)
        return loss.item()

    def train(self, batches: list[dict[str, Any]], max_norm: float = 0.1) -> list[float]:
        losses = []
        for batch in batches:
            with self.accelerator.accumulate(self.model):
                losses.append(self.backward(batch))
                if self.accelerator.sync_gradients:
                    self.accelerator.clip_grad_norm_(self.model.parameters(), max_norm)
                self.optimizer.step()
                self.optimizer.zero_grad()
        return losses

    def weights(self) -> dict[str, torch.Tensor]:
        return {name: parameter.detach().clone() for name, parameter in self.model.named_parameters()}
