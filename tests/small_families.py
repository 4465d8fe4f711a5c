"""The miniature's models of the three families beside moss_tts_local, shrunk as the layer's self check shrinks them."""

from __future__ import annotations

import contextlib
import importlib.util
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from mini import MINI
from mini_moss_tts.demo_models import family_classes
from small_models import autocast_to

from moss_tts_patches.families.delay import DelayFamily
from moss_tts_patches.families.family import Family
from moss_tts_patches.families.local_v15 import LocalV15Family
from moss_tts_patches.families.realtime import RealtimeFamily


def _loss_of_output(model: Any, **batch: Any) -> torch.Tensor:
    return model(**batch).loss


def _loss_of_trainer() -> Callable[..., torch.Tensor]:
    """Returns v1.5's loss, which its trainer imports from the file beside it."""
    path = MINI / "moss_tts_local_v1.5" / "finetuning" / "supervision.py"
    spec = importlib.util.spec_from_file_location("mini_v15_supervision", path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module.compute_supervised_loss


@dataclass(frozen=True)
class SmallFamily:
    """A family of the layer, and its miniature.

    Attributes:
        loss: the trainer's own, of a model and a batch.
        upstream_forward: what the layer remembers of the trainer before it patches it.
        size: a released size.
    """

    family: Family
    model_class: Any
    config_class: Any
    loss: Callable[..., torch.Tensor]
    upstream_forward: Callable[..., Any]
    size: str

    def model(self) -> Any:
        """A fresh model in training mode, frozen as the trainer freezes it."""
        with torch.random.fork_rng():
            torch.manual_seed(0)
            model = self.model_class(self.family.shrunken_config(self.config_class())).train()
        with torch.no_grad():
            for parameter in model.parameters():
                if parameter.ndim == 1:  # norms stand at exactly 1, where a forgotten one would not show
                    parameter.add_(torch.randn(parameter.shape, generator=torch.Generator().manual_seed(1)) * 0.1)
            if self.family.name == "moss_tts_realtime":
                for table in model.local_transformer.model.embed_tokens:
                    table.weight[model.config.audio_pad_token] = 0.1  # a trained pad code is no zero vector
        for parent, attribute in self.family.unread_embeddings(model):
            getattr(parent, attribute).weight.requires_grad_(False)
        return model

    def batch(self, seed: int = 1) -> dict[str, Any]:
        """Two records with a prompt and padding, as the trainer would pass them."""
        config = self.family.shrunken_config(self.config_class())
        return self.family.sample_batch(config, torch.Generator().manual_seed(seed))

    def train_reference(
        self, model: Any, batches: Sequence[dict[str, Any]], autocast: torch.dtype | None = None
    ) -> list[float]:
        """The trainer's own loss and autograd on the batches; returns the losses."""
        losses = []
        for batch in batches:
            with autocast_to(autocast) if autocast else contextlib.nullcontext():
                loss = self.loss(model, **batch)
            loss.float().backward()
            losses.append(loss.item())
        return losses


def _named_class(family: Family, size: str) -> SmallFamily:
    model_class, config_class = family_classes(family.name)
    return SmallFamily(family, model_class, config_class, _loss_of_output, model_class.forward, size)


def _v15() -> SmallFamily:
    model_class, config_class = family_classes("moss_tts_local_v1.5")
    loss = _loss_of_trainer()
    return SmallFamily(LocalV15Family(), model_class, config_class, loss, loss, "4b")


SMALL = {
    "moss_tts_delay": _named_class(DelayFamily(), "1.7b"),
    "moss_tts_realtime": _named_class(RealtimeFamily(), "1.7b"),
    "moss_tts_local_v1.5": _v15(),
}
