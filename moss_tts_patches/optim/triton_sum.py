"""The compensated bfloat16 addition as one Triton kernel. Importing this module needs triton."""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def _last_place(values):
    """1/256 of the unit in the last place of bfloat16 values, float32: see :mod:`.compensated_sum`."""
    exponent = values.to(tl.int16, bitcast=True) & 0x7F80
    unit = exponent.to(tl.bfloat16, bitcast=True).to(tl.float32) * 0.000030517578125
    return tl.maximum(unit, 1.1754943508222875e-38)


@triton.jit
def _rounded_to_bf16(values):
    """Nearest, ties to even, as float32. By hand: Triton's interpreter cuts the digits off instead."""
    bits = values.to(tl.int32, bitcast=True)
    rounded = (bits + 0x7FFF + ((bits >> 16) & 1)) & -65536
    finite = (bits & 0x7F800000) != 0x7F800000
    not_a_number = tl.full(bits.shape, 0x7FC00000, tl.int32)
    others = tl.where((bits & 0x007FFFFF) == 0, bits, not_a_number)
    return tl.where(finite, rounded, others).to(tl.float32, bitcast=True)


@triton.jit(do_not_specialize=["numel"])
def compensated_add(total, error, value, numel, ELEMENTS: tl.constexpr):
    """Adds ``value`` to the pair ``total`` (bfloat16) and ``error`` (int8) in place."""
    offsets = tl.program_id(0).to(tl.int64) * ELEMENTS + tl.arange(0, ELEMENTS)
    mask = offsets < numel
    old = tl.load(total + offsets, mask=mask, other=0.0)
    exact = _last_place(old) * tl.load(error + offsets, mask=mask, other=0).to(tl.float32)
    exact = exact + old.to(tl.float32)
    exact = exact + tl.load(value + offsets, mask=mask, other=0.0).to(tl.float32)
    new = _rounded_to_bf16(exact)
    left = tl.div_rn(exact - new, _last_place(new.to(tl.bfloat16)))
    # Half away from zero is not half to even: adding and taking away 1.5 * 2**23 rounds to even, as torch does.
    rounded = (left + 12582912.0) - 12582912.0
    rounded = tl.minimum(tl.maximum(rounded, -128.0), 127.0)
    tl.store(total + offsets, new.to(tl.bfloat16), mask=mask)
    tl.store(error + offsets, rounded.to(tl.int8), mask=mask)
