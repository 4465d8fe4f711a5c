"""Sums in bfloat16 that keep what rounding left over, one byte an element."""

from __future__ import annotations

import torch

from . import kernel

# Elements worked on at once where float32 temporaries are needed: 2**22 are 16 MiB each.
SLICE_ELEMENTS = 2**22

# 1024 elements for 128 threads, 8 a thread: one 16-byte access in bfloat16.
ELEMENTS_PER_PROGRAM = 1024
# Without fused multiply-add the results are those of the torch operations, to the bit.
COMPILE_OPTIONS = {"num_warps": 4, "enable_fp_fusion": False}


def add_compensated(total: torch.Tensor, error: torch.Tensor, value: torch.Tensor) -> None:
    """Adds ``value`` to ``total`` in place and keeps what rounding left over, one byte an element.

    ``error`` holds the difference between the exact sum and ``total`` in units of 1/256 of the last place of ``total``,
    so the pair carries 8 bits more than bfloat16. 47 chunk sums (1500 frames) then cost a hundredth of the one
    rounding at the end; a second bfloat16 buffer would do no better and take twice the memory.

    Args:
        total: running sum, bfloat16, contiguous.
        error: int8, same shape.
        value: the addend, same shape.

    On CUDA it is one Triton kernel of 9 bytes an element. The torch operations below move 120, which on a card of
    300 GB/s would double the time of a step.

    Source: Kahan, "Further remarks on reducing truncation errors", CACM 8(1), 1965; the sum is formed in float32 and
    split again, so one operation does for every order of magnitude.
    """
    if total.is_cuda and kernel.usable(total.device):
        add_by_kernel(total, error, value)
    else:
        add_by_torch(total, error, value)


def add_rows_compensated(total: torch.Tensor, error: torch.Tensor, ids: torch.Tensor, rows: torch.Tensor) -> None:
    """:func:`add_compensated` on some rows of a table.

    Args:
        total: ``[entries, hidden]`` bfloat16.
        error: int8, same shape.
        ids: ``[n]`` int64; only id 0 may come more than once, all its rows but one being zero.
        rows: ``[n, hidden]`` float32.
    """
    first = (ids == 0).unsqueeze(-1)
    # Every occurrence of id 0 writes its row's sum, so that it does not matter which one is written last.
    values = torch.where(first, (rows * first).sum(dim=0), rows)
    part, part_error = total.index_select(0, ids), error.index_select(0, ids)
    add_compensated(part, part_error, values)
    total.index_copy_(0, ids, part)
    error.index_copy_(0, ids, part_error)


def add_by_torch(total: torch.Tensor, error: torch.Tensor, value: torch.Tensor) -> None:
    """:func:`add_compensated` in torch operations, on any device."""
    flat_total, flat_error, flat_value = total.view(-1), error.view(-1), value.reshape(-1)
    for start in range(0, flat_total.numel(), SLICE_ELEMENTS):
        part = slice(start, start + SLICE_ELEMENTS)
        exact = _last_place(flat_total[part])
        exact *= flat_error[part]
        exact += flat_total[part]
        exact += flat_value[part]
        flat_total[part] = exact
        exact -= flat_total[part]
        exact /= _last_place(flat_total[part])
        flat_error[part] = exact.round_().clamp_(-128, 127)


def add_by_kernel(total: torch.Tensor, error: torch.Tensor, value: torch.Tensor) -> None:
    """:func:`add_compensated` in one launch, the same bits.

    Raises:
        ImportError: triton is not installed.
    """
    from .triton_sum import compensated_add

    numel = total.numel()
    if not numel:
        return
    grid = (-(-numel // ELEMENTS_PER_PROGRAM),)
    # A launch goes to the current device, not to that of its arguments.
    with torch.cuda.device_of(total):
        compensated_add[grid](total, error, value.contiguous(), numel, ELEMENTS=ELEMENTS_PER_PROGRAM, **COMPILE_OPTIONS)


def _last_place(values: torch.Tensor) -> torch.Tensor:
    """Returns 1/256 of the unit in the last place of bfloat16 ``values``, float32.

    bfloat16 has 8 significant bits: the last place of ``2**e * 1.xxxxxxx`` is ``2**(e - 7)``. The exponent bits alone
    are the float ``2**e`` (zero for subnormals, whose error is then lost: below 1e-38).
    """
    exponent = values.view(torch.int16).bitwise_and(0x7F80).view(torch.bfloat16).float()
    return exponent.mul_(2.0**-15).clamp_(min=torch.finfo(torch.float32).tiny)
