"""The head's hand-written gradients against autograd on plain logits."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from tolerances import TOLERANCES

from moss_tts_patches.loss import cross_entropy as ce

TOLERANCE = TOLERANCES["gradient_fp32_relative"]


def problem(frames, classes, width=24, seed=0):
    generator = torch.Generator().manual_seed(seed)
    hidden = torch.randn(frames, width, generator=generator)
    weight = torch.randn(classes, width, generator=generator) / width**0.5
    labels = torch.randint(0, classes, (frames,), generator=generator)
    labels[:: max(2, frames // 3)] = -100
    return hidden, weight, labels


def reference(hidden, weight, labels, factor):
    hidden, weight = hidden.double().requires_grad_(), weight.double().requires_grad_()
    loss = F.cross_entropy(F.linear(hidden, weight), labels, reduction="sum")
    (loss * factor).backward()
    return loss.detach(), hidden.grad, weight.grad


def relative(found, expected):
    return ((found.double() - expected).norm() / expected.norm()).item()


@pytest.mark.parametrize("frames,classes", [(1, 2), (7, 1025), (50, 33), (33, 3001)])
def test_direct(frames, classes):
    hidden, weight, labels = problem(frames, classes)
    labels[-1] = 0 if frames == 1 else labels[-1]
    factor = torch.tensor(0.37)
    loss, hidden_gradient, weight_gradient = ce.cross_entropy_direct(hidden, weight, labels, factor)
    expected = reference(hidden, weight, labels, 0.37)
    for found, wanted in zip((loss, hidden_gradient, weight_gradient), expected):
        assert relative(found, wanted) <= TOLERANCE


@pytest.mark.parametrize("logits_at_once", [1, 3000, 5001, 10**7])
def test_sliced_in_awkward_blocks(logits_at_once):
    hidden, weight, labels = problem(frames=29, classes=1777)
    factor = torch.tensor(2.5)
    loss, normaliser, hidden_gradient = ce.cross_entropy_input_gradient(hidden, weight, labels, factor, logits_at_once)
    weight_gradient = torch.full_like(weight, float("nan"))
    rows = 0
    for start, end, gradient in ce.cross_entropy_weight_gradient(
        hidden, normaliser, weight, labels, factor, logits_at_once
    ):
        assert start == rows
        weight_gradient[start:end] = gradient
        rows = end
    assert rows == 1777
    expected = reference(hidden, weight, labels, 2.5)
    for found, wanted in zip((loss, hidden_gradient, weight_gradient), expected):
        assert relative(found, wanted) <= TOLERANCE


def test_the_comparison_sees_a_label_lost_at_a_slice_border():
    """Negative control: one label moved into the neighbouring slice."""
    hidden, weight, labels = problem(frames=29, classes=600)
    labels[1] = 256
    factor = torch.tensor(1.0)
    _, normaliser, _ = ce.cross_entropy_input_gradient(hidden, weight, labels, factor)
    moved = labels.clone()
    moved[1] = 255
    parts = ce.cross_entropy_weight_gradient(hidden, normaliser, weight, moved, factor, 256 * 29)
    found = torch.cat([gradient for _, _, gradient in parts])
    assert relative(found, reference(hidden, weight, labels, 1.0)[2]) > 100 * TOLERANCE


def test_all_labels_ignored():
    hidden, weight, labels = problem(frames=6, classes=40)
    labels[:] = -100
    loss, hidden_gradient, weight_gradient = ce.cross_entropy_direct(hidden, weight, labels, torch.tensor(1.0))
    assert loss.item() == 0.0
    assert not hidden_gradient.any()
    assert not weight_gradient.any()


def test_sum_alone():
    hidden, weight, labels = problem(frames=31, classes=90)
    expected = reference(hidden, weight, labels, 1.0)[0]
    assert ce.cross_entropy_sum(hidden, weight, labels).item() == pytest.approx(expected.item(), rel=TOLERANCE)


def test_bf16_logits_are_normalised_in_float32():
    hidden, weight, labels = problem(frames=40, classes=1025)
    hidden, weight = hidden.bfloat16(), weight.bfloat16()
    logits = F.linear(hidden, weight).float()
    expected = F.cross_entropy(logits, labels, reduction="sum").item()
    assert ce.cross_entropy_direct(hidden, weight, labels, torch.tensor(1.0))[0].item() == pytest.approx(
        expected, rel=TOLERANCES["loss_fp32_relative"]
    )
