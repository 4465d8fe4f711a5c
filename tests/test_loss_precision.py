"""bf16: our gradients are no worse than upstream's own bf16 gradients, measured against float32."""

from __future__ import annotations

import copy

import pytest
import torch
from peft import LoraConfig, inject_adapter_in_model
from small_models import SCHEDULES, Ours, gradients, relative_errors, speech_batch, tiny_model, train_reference
from tolerances import TOLERANCES

SEEDS = (0, 1, 2)


def squared_errors(schedule, frames, accumulation):
    """Mean squared relative error by parameter over a few seeds, ours and the trainer's own, against float32.

    One seed is not enough for small tensors: 64 norm weights rounded once more or less by chance differ by 10 %.
    """
    ours, theirs = {}, {}
    rounded = tiny_model(torch.bfloat16)
    for seed in SEEDS:
        batches = [speech_batch(frames, seed=100 * seed + index) for index in range(accumulation)]
        exact = copy.deepcopy(rounded).float()
        train_reference(exact, batches, scale=1 / accumulation)
        upstream, patched = copy.deepcopy(rounded), copy.deepcopy(rounded)
        train_reference(upstream, batches, scale=1 / accumulation, autocast=torch.bfloat16)
        options = {"chunk_frames": 32, "logits_at_once": 2**15, "scale": 1 / accumulation}
        Ours(schedule, **options).train(patched, batches, autocast=torch.bfloat16)
        for total, model in ((ours, patched), (theirs, upstream)):
            for name, error in relative_errors(gradients(model), gradients(exact)).items():
                total[name] = total.get(name, 0.0) + error**2 / len(SEEDS)
    return ours, theirs


@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.parametrize("frames,accumulation", [(350, 1), (350, 8), (1500, 1)])
def test_error_against_float32(schedule, frames, accumulation):
    ours, theirs = squared_errors(schedule, frames, accumulation)
    ratios = {name: (ours[name] / theirs[name]) ** 0.5 for name in ours}
    worst = max(ratios, key=ratios.get)
    print(f"{schedule} frames={frames} accumulation={accumulation} worst={worst} ratio={ratios[worst]:.3f}")
    assert ratios[worst] <= TOLERANCES["gradient_bf16_error_ratio"], (worst, ratios[worst])


def with_lora(model, dropout=0.0):
    """float32 adapters on the depth model's projections of a bf16 model, as the adapters feature trains them."""
    model.requires_grad_(False)
    config = LoraConfig(r=4, target_modules=r"local_transformer\.layers\.\d+\..*proj", lora_dropout=dropout)
    with torch.random.fork_rng():
        torch.manual_seed(3)
        inject_adapter_in_model(config, model)
        for name, parameter in model.named_parameters():
            if "lora_" in name:
                parameter.data = torch.randn(parameter.shape) * 0.05
    return model.train()


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_float32_adapters_under_autocast(schedule):
    """A cached cast made in the pass without gradients would cut the adapters off: every gradient must be there."""
    batch = speech_batch(40)
    exact, upstream, patched = (with_lora(tiny_model(torch.bfloat16)) for _ in range(3))
    train_reference(exact.float(), [batch])
    train_reference(upstream, [batch], autocast=torch.bfloat16)
    Ours(schedule).train(patched, [batch], autocast=torch.bfloat16)
    assert len(gradients(patched)) == 2 * 2 * 7  # A and B of seven projections in two layers
    assert all(gradient.any() for gradient in gradients(patched).values())
    ours, theirs = (relative_errors(gradients(model), gradients(exact)) for model in (patched, upstream))
    total_ratio = (sum(e**2 for e in ours.values()) / sum(e**2 for e in theirs.values())) ** 0.5
    assert total_ratio <= TOLERANCES["gradient_bf16_error_ratio"]
