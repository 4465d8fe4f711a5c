"""Run under torchrun: every family's loss and gradients with weights split by FSDP, beside the whole model.

``sharded_ranks.py VERSION [control]`` prints one line a family and a case: ``family case loss_error gradient_error``.
"""

from __future__ import annotations

import copy
import functools
import sys
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from small_families import SMALL
from small_models import relative_errors, speech_batch, tiny_model
from torch import nn
from torch.distributed.fsdp import FullyShardedDataParallel, fully_shard
from torch.distributed.fsdp.wrap import transformer_auto_wrap_policy

from moss_tts_patches.engines.engine import largest_of_all
from moss_tts_patches.families.family import Family, TrainingContext, supervised_positions
from moss_tts_patches.families.local import LocalFamily
from moss_tts_patches.loss.engine import EngineOptions, LossEngine
from moss_tts_patches.loss.module_schedule import ByModule
from moss_tts_patches.optim.gradients import DeviceGradients
from moss_tts_patches.runtime.checkpointing import checkpoint_layers

FAMILIES: dict[str, tuple[Family, Callable[[], Any], Callable[[int], dict[str, Any]]]] = {
    "moss_tts_local": (LocalFamily(), tiny_model, lambda seed: speech_batch(9, batch=2, seed=seed)),
    **{name: (small.family, small.model, small.batch) for name, small in SMALL.items()},
}


class WithLoss(nn.Module):
    """What accelerate and the layer's patches make of a model: the loss is computed within its forward."""

    def __init__(self, family: Family, model: nn.Module, options: EngineOptions) -> None:
        super().__init__()
        self.model, self.family = model, family
        self.context = TrainingContext(
            engine=LossEngine(options, DeviceGradients()),
            direct=False,
            loss_scale=lambda: 1.0,
            finite_empty_channels=True,
            say_once=lambda line: None,
            summarise_labels=lambda labels: supervised_positions(labels, -100),
            every_weight=True,
            inside_forward=True,
        )

    def forward(self, **batch: Any) -> torch.Tensor:
        return self.family.training_output(self.model, batch, self.context).loss


def sharded(module: nn.Module, layers: set[type], version: str) -> nn.Module:
    """Splits ``module`` as accelerate does with upstream's config: each layer by itself, the rest together."""
    if version == "1":
        policy = functools.partial(transformer_auto_wrap_policy, transformer_layer_cls=layers)
        return FullyShardedDataParallel(
            module, auto_wrap_policy=policy, use_orig_params=True, device_id=torch.device("cpu")
        )
    for layer in [found for found in module.modules() if type(found) in layers]:
        fully_shard(layer)
    return fully_shard(module)  # type: ignore[return-value]


def whole_gradients(module: nn.Module, version: str) -> dict[str, torch.Tensor]:
    if version == "1":
        with FullyShardedDataParallel.summon_full_params(module, with_grads=True):
            # A frozen weight beside trained ones in one flat tensor has a gradient of zero.
            found = {n: p.grad.double().clone() for n, p in module.named_parameters() if p.requires_grad}  # type: ignore[union-attr]
        return {name.replace("_fsdp_wrapped_module.", ""): gradient for name, gradient in found.items()}
    return {n: p.grad.full_tensor().double() for n, p in module.named_parameters() if p.grad is not None}  # type: ignore[union-attr]


def averaged(gradients: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    for gradient in gradients.values():
        dist.all_reduce(gradient)
        gradient /= dist.get_world_size()
    return gradients


def compare(name: str, version: str, *, wrap_depth: bool, checkpointing: bool, by_module: bool) -> tuple[float, float]:
    """Returns how far loss and gradients are from those of the whole model, averaged over the ranks' batches."""
    family, make_model, make_batch = FAMILIES[name]
    batch = make_batch(5 + dist.get_rank())
    if dist.get_rank() and by_module:  # fewer supervised frames, so that ranks would make another number of chunks
        batch["labels"][0] = -100
    whole = make_model()
    for parent, attribute in family.unread_embeddings(whole):
        getattr(parent, attribute).requires_grad_(False)
    parts = copy.deepcopy(whole)
    expected_loss = WithLoss(family, whole, EngineOptions("autograd", chunk_frames=4))(**batch)
    expected_loss.backward()
    expected = averaged({n: p.grad.double() for n, p in whole.named_parameters() if p.grad is not None})

    if checkpointing:
        checkpoint_layers(family.backbone(parts))
    layers = {type(layer) for layer in family.backbone(parts).layers}  # type: ignore[union-attr]
    depth = family.depth_model(parts)
    if wrap_depth and depth is not None:
        layers |= {type(layer) for layer in getattr(depth, "layers", None) or depth.h}  # type: ignore[union-attr]
    options = EngineOptions(
        "autograd",
        chunk_frames=4,
        logits_at_once=128,
        by_module=ByModule(lambda frames: largest_of_all(frames, torch.device("cpu"))) if by_module else None,
    )
    wrapped = sharded(WithLoss(family, parts, options), layers, version)
    loss = wrapped(**batch)
    loss.backward()
    found = {n.removeprefix("model."): g for n, g in whole_gradients(wrapped, version).items()}
    error = max(relative_errors(found, expected).values())
    return abs(loss.item() - expected_loss.item()) / abs(expected_loss.item()), error


def report(name: str, version: str, case: str, **options: bool) -> None:
    try:
        loss, gradient = compare(name, version, **options)
        line = f"{loss:.1e} {gradient:.1e}"
    except (RuntimeError, AssertionError) as error:  # what a negative control may end with
        line = f"failed {type(error).__name__} {' '.join(str(error).split())[:200]}"
    if dist.get_rank() == 0:
        print(f"{name} {case} {line}", flush=True)


def main(version: str, control: bool) -> None:
    dist.init_process_group("gloo")
    torch.set_num_threads(1)
    if control:
        report("moss_tts_local", version, "control", wrap_depth=True, checkpointing=True, by_module=False)
    for name in () if control else FAMILIES:
        for wrap_depth, checkpointing in ((True, True), (True, False), (False, True)):
            case = f"depth={'split' if wrap_depth else 'whole'},checkpointing={int(checkpointing)}"
            report(name, version, case, wrap_depth=wrap_depth, checkpointing=checkpointing, by_module=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    main(sys.argv[1], control="control" in sys.argv)
