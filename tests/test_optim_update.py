"""The AdamW step on tensors: its formula, what bf16 keeps of an update, and what 8-bit states do to it."""

from __future__ import annotations

import pytest
import torch
from tolerances import TOLERANCES
from torch import nn

from moss_tts_patches.errors import NumericsError
from moss_tts_patches.memory.tracker import StorageTracker
from moss_tts_patches.optim.adamw_update import AdamWScalars, update_parameter
from moss_tts_patches.optim.blockwise import BLOCK_SIZE, CodeTables, block_count, dequantize
from moss_tts_patches.optim.optimizers import AdamW8bit
from moss_tts_patches.optim.stochastic_rounding import RoundingNoise

CPU = torch.device("cpu")


def empty_states(numel: int) -> dict[str, torch.Tensor]:
    return {
        "exp_avg_codes": torch.zeros(numel, dtype=torch.uint8),
        "exp_avg_absmax": torch.zeros(block_count(numel)),
        "exp_avg_sq_codes": torch.zeros(numel, dtype=torch.uint8),
        "exp_avg_sq_absmax": torch.zeros(block_count(numel)),
    }


def scalars(step: int = 1, lr: float = 1e-3) -> AdamWScalars:
    return AdamWScalars.of(lr, (0.9, 0.999), 1e-8, 0.01, step)


@pytest.mark.parametrize("reference, agrees", [(torch.optim.AdamW, True), (torch.optim.Adam, False)])
def test_formula_is_that_of_torch(reference, agrees):
    """With float32 states there is nothing but the formula; Adam, whose decay goes into the moments, is the control."""
    torch.manual_seed(0)
    lr, start = 1e-3, torch.randn(1000) * 0.02
    ours, theirs = nn.Parameter(start.clone()), nn.Parameter(start.clone())
    first = AdamW8bit([("w", ours)], lr, (0.9, 0.99), 1e-8, 0.1)
    second = reference([theirs], lr, (0.9, 0.99), 1e-8, 0.1)
    for _ in range(10):
        gradient = torch.randn(1000) * 1e-3
        ours.grad, theirs.grad = gradient.clone(), gradient.clone()
        first.step()
        second.step()
    error = (ours - theirs).abs().max().item() / lr
    assert (error <= TOLERANCES["optimizer_formula_over_lr"]) == agrees


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("numel", [1, 700, 1024, 4 * 768 + 5])
def test_slices_do_not_change_a_bit(dtype, numel):
    torch.manual_seed(0)
    start = (torch.randn(numel) * 0.02).to(dtype)
    results = []
    for slice_elements in (2**22, 3 * BLOCK_SIZE):
        weight, states = start.clone(), empty_states(numel)
        for step in (1, 2, 3):
            gradient = torch.randn(numel, generator=torch.Generator().manual_seed(step)).to(dtype)
            noise = RoundingNoise.of(1, step, "w", CPU)
            tables = CodeTables.build("cpu")
            update_parameter(weight, gradient, states, scalars(step), noise, tables, 0, slice_elements)
        results.append([weight, *states.values()])
    assert all(torch.equal(one, other) for one, other in zip(*results))
    assert not torch.equal(results[0][0], start)


def projection(update: torch.Tensor, reference: torch.Tensor) -> float:
    update, reference = update.double(), reference.double()
    return (update @ reference / (reference @ reference)).item()


def test_bf16_weights_receive_the_update():
    """100 steps at upstream's learning rate; torch's AdamW in bf16, upstream's way, is the negative control."""
    count, lr = 256 * 256, 1e-5
    generator = torch.Generator().manual_seed(0)
    start = (torch.randn(count, generator=generator) * 0.02).bfloat16()
    ours, plain, exact = (nn.Parameter(value) for value in (start.clone(), start.clone(), start.float()))
    optimizers = [
        AdamW8bit([("w", ours)], lr, seed=1),
        torch.optim.AdamW([plain], lr),
        torch.optim.AdamW([exact], lr),
    ]
    for _ in range(100):
        gradient = torch.randn(count, generator=generator) * 1e-3
        for parameter, optimizer in zip((ours, plain, exact), optimizers):
            parameter.grad = gradient.to(parameter.dtype)
            optimizer.step()
    moved = [(parameter.detach().float() - start.float()) for parameter in (ours, plain, exact)]
    found = projection(moved[0], moved[2])
    assert TOLERANCES["optimizer_projection"] <= found <= 2 - TOLERANCES["optimizer_projection"]
    assert projection(moved[1], moved[2]) < TOLERANCES["optimizer_projection_plain_bf16"]
    assert moved[0].count_nonzero() > 3 * moved[1].count_nonzero()


@pytest.mark.parametrize("keep_positive", [True, False])
def test_a_gradient_that_becomes_zero_does_not_explode(keep_positive):
    """Gradients of 3e-4 of the block's largest, then none: without the protection v reads back as 0 and m does not."""
    lr = 1e-4
    weight = nn.Parameter(torch.zeros(4096))
    optimizer = AdamW8bit([("w", weight)], lr, weight_decay=0)
    tables = CodeTables.build("cpu", keep_positive=keep_positive)
    optimizer._tables_for = lambda parameter: tables  # type: ignore[method-assign]
    largest = []
    for step in range(6):
        before = weight.detach().clone()
        weight.grad = torch.full((4096,), 3e-6 if step == 0 else 0.0)
        weight.grad[::BLOCK_SIZE] = 1e-2 if step == 0 else 0.0
        optimizer.step()
        largest.append(((weight.detach() - before).abs().max() / lr).item())
    bounded = max(largest) <= TOLERANCES["optimizer_step_after_zero_gradient"]
    assert bounded == keep_positive
    assert keep_positive or max(largest) > 100


def test_rows_without_gradient_change_by_weight_decay_alone():
    torch.manual_seed(0)
    lr, decay = 1e-3, 0.1
    table = nn.Parameter(torch.randn(64, 192))  # rows are not aligned with blocks
    start = table.detach().clone()
    optimizer = AdamW8bit([("table", table)], lr, weight_decay=decay)
    touched = torch.tensor([3, 4, 63])
    expected = start.clone()
    for _ in range(5):
        table.grad = torch.zeros_like(table)
        table.grad[touched] = torch.randn(3, 192)
        optimizer.step()
        expected.mul_(1 - lr * decay)
    still = torch.ones(64, dtype=torch.bool)
    still[touched] = False
    assert torch.equal(table.detach()[still], expected[still])
    assert ((table.detach() - expected)[touched].abs() > lr).float().mean() > 0.5


def test_states_agree_with_bitsandbytes():
    """Distance between the two within the quantisation error that each has against exact moments."""
    bitsandbytes = pytest.importorskip("bitsandbytes")
    count = 256 * 40
    generator = torch.Generator().manual_seed(0)
    start = torch.randn(count, generator=generator) * 0.02
    ours, theirs = nn.Parameter(start.clone()), nn.Parameter(start.clone())
    first = AdamW8bit([("w", ours)], 1e-4)
    second = bitsandbytes.optim.AdamW8bit([theirs], lr=1e-4, min_8bit_size=0)
    exact = [torch.zeros(count), torch.zeros(count)]
    tables = CodeTables.build("cpu")
    for _ in range(20):
        scale = 10 ** (torch.randn(count, generator=generator) * 0.3 - 3)
        gradient = torch.randn(count, generator=generator) * scale
        ours.grad, theirs.grad = gradient.clone(), gradient.clone()
        first.step()
        second.step()
        exact[0].mul_(0.9).add_(gradient, alpha=0.1)
        exact[1].mul_(0.999).addcmul_(gradient, gradient, value=0.001)
        mine, other = first.states.read(ours), second.state[theirs]
        for index, (name, table) in enumerate((("exp_avg", tables.signed_map), ("exp_avg_sq", tables.unsigned_map))):
            found = dequantize(mine[f"{name}_codes"], mine[f"{name}_absmax"], table)
            number = index + 1
            reference = dequantize(other[f"state{number}"].view(-1), other[f"absmax{number}"], other[f"qmap{number}"])
            error = (reference - exact[index]).norm()
            assert (found - reference).norm() <= TOLERANCES["optimizer_states_over_quantisation_error"] * error
            # Control: the states of a run that saw other gradients are farther away.
            assert (found.roll(1) - reference).norm() > 2 * error


def test_float16_is_refused():
    weight = nn.Parameter(torch.zeros(8, dtype=torch.float16))
    with pytest.raises(NumericsError, match=r"layer\.w is torch\.float16.*GradScaler refuses"):
        AdamW8bit([("layer.w", weight)])
    AdamW8bit([("layer.w", weight.requires_grad_(False))])  # frozen: nobody will step it
    with pytest.raises(NumericsError, match="float64"):
        AdamW8bit([("w", nn.Parameter(torch.zeros(8, dtype=torch.float64)))])


def test_no_tensor_of_the_parameters_size_is_made():
    numel, slice_elements = 2**20, 2**13
    weight, gradient, states = (
        torch.zeros(numel, dtype=torch.bfloat16),
        torch.ones(numel).bfloat16(),
        empty_states(numel),
    )
    tables, noise = CodeTables.build("cpu"), RoundingNoise.of(1, 1, "w", CPU)
    with StorageTracker() as tracker:
        tracker.watch([weight, gradient, *states.values()])
        before = tracker.live_bytes
        tracker.reset_peak()
        update_parameter(weight, gradient, states, scalars(), noise, tables, 0, slice_elements)
        sliced = tracker.peak_bytes - before
        tracker.reset_peak()
        update_parameter(weight, gradient, states, scalars(), noise, tables, 0, numel)
        whole = tracker.peak_bytes - before
    assert sliced < numel < whole  # the weight alone has 2 * numel bytes
    assert sliced <= 10 * 4 * slice_elements  # ten float32 temporaries
