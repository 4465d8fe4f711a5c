"""The AdamW step as one Triton kernel. Importing this module needs triton; :mod:`.kernel` does so when it is time.

One pass over memory instead of sixty: 10 bytes an element in bfloat16, no temporaries. The arithmetic is that of
:mod:`.adamw_update` operation by operation, with correctly rounded division and square root and without fused
multiply-add, so that the two can be compared to the bit.
"""

from __future__ import annotations

import triton
import triton.language as tl

BLOCK = tl.constexpr(256)
CALLS = tl.constexpr(32)  # Philox calls in a block of 256 elements, 8 elements each


@triton.jit
def _code_of(values, limits):
    """Counts the limits below each value by eight halvings; nan and the least value give 0."""
    code = tl.zeros_like(values).to(tl.int32)
    for bit in tl.static_range(8):
        limit = tl.load(limits + code + (127 >> bit))
        code = tl.where(limit < values, code + (128 >> bit), code)
    return code


@triton.jit
def _block_absmax(values):
    """Largest magnitude of each row. Magnitudes order like their bits, and nan comes out above everything."""
    bits = values.to(tl.int32, bitcast=True) & 0x7FFFFFFF
    return tl.max(bits, axis=1).to(tl.float32, bitcast=True)


@triton.jit
def _load_state(codes, absmax, table, offsets, rows, mask, row_mask, QUANTIZED: tl.constexpr):
    if QUANTIZED:
        code = tl.load(codes + offsets, mask=mask, other=0).to(tl.int32)
        largest = tl.load(absmax + rows, mask=row_mask, other=0.0)
        # Code 0 of the signed table is -0.993: beyond the end it would pass for the block's largest value.
        return tl.where(mask, tl.load(table + code) * largest[:, None], 0.0)
    else:
        return tl.load(codes + offsets, mask=mask, other=0.0)


@triton.jit
def _store_state(values, codes, absmax, limits, offsets, rows, mask, row_mask, QUANTIZED: tl.constexpr):
    if QUANTIZED:
        largest = _block_absmax(values)
        divisor = tl.where(largest == 0, 1.0, largest)
        code = _code_of(tl.div_rn(values, tl.broadcast_to(divisor[:, None], values.shape)), limits)
        tl.store(codes + offsets, code.to(tl.uint8), mask=mask)
        tl.store(absmax + rows, largest, mask=row_mask)
    else:
        tl.store(codes + offsets, values, mask=mask)


@triton.jit
def _rounding_bits(rows, first_call, key, step_word, name_word, ROWS: tl.constexpr):
    """16 bits for each element of the rows, in the order of :func:`.stochastic_rounding.rounding_bits`."""
    call = first_call + rows[:, None] * CALLS + tl.arange(0, CALLS)[None, :]
    word0 = (call & 0xFFFFFFFF).to(tl.uint32)
    word1 = ((call >> 32) & 0xFFFFFFFF).to(tl.uint32)
    zero = tl.zeros([ROWS, CALLS], dtype=tl.uint32)
    word2 = zero + step_word.to(tl.uint32)
    word3 = zero + name_word.to(tl.uint32)
    a, b, c, d = tl.philox(key, word0, word1, word2, word3)
    words = tl.join(tl.join(a, c), tl.join(b, d))  # [ROWS, CALLS, pair, parity]
    return tl.reshape(tl.join(words & 0xFFFF, words >> 16), [ROWS, BLOCK])


@triton.jit
def _to_float(values):
    """Widens by bits: triton 3.2 has no conversion from or to bfloat16 for cards before 8.0."""
    if values.dtype == tl.bfloat16:
        return (values.to(tl.uint16, bitcast=True).to(tl.uint32) << 16).to(tl.float32, bitcast=True)
    else:
        return values.to(tl.float32)


@triton.jit
def _round_bf16(values, noise):
    """Adds the noise and keeps the high half; 0x40 keeps nan from turning into infinity."""
    bits = values.to(tl.uint32, bitcast=True)
    high = tl.where(values == values, (bits + noise) >> 16, (bits >> 16) | 0x40)
    return high.to(tl.uint16).to(tl.bfloat16, bitcast=True)


# Nothing but pointer alignment, dtypes and the two constants tells compilations apart: not a size, not a rate, not a
# step that happens to be 1.
@triton.jit(do_not_specialize=["numel", "first_call", "key", "step_word", "name_word"])
def adamw_step(
    parameter,
    gradient,
    first_codes,
    first_absmax,
    second_codes,
    second_absmax,
    signed_map,
    signed_limits,
    unsigned_map,
    unsigned_limits,
    numel: tl.int64,
    first_call: tl.int64,
    key: tl.int64,
    step_word: tl.int64,
    name_word: tl.int64,
    decay,
    beta1,
    beta2,
    rest1,
    rest2,
    inverse_correction,
    eps,
    step_size,
    ROWS: tl.constexpr,
    QUANTIZED: tl.constexpr,
):
    """Steps ``ROWS`` blocks of 256 elements; the arguments are those of :func:`.adamw_update.update_parameter`.

    Where states are not quantized, ``*_codes`` are the float32 moments themselves and ``*_absmax`` and the tables are
    not read. ``key`` is both key words in one, high word first.
    """
    rows = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    offsets = rows[:, None] * BLOCK + tl.arange(0, BLOCK)[None, :]
    mask = offsets < numel
    row_mask = rows * BLOCK < numel

    grad = _to_float(tl.load(gradient + offsets, mask=mask, other=0.0))
    first = _load_state(first_codes, first_absmax, signed_map, offsets, rows, mask, row_mask, QUANTIZED)
    second = _load_state(second_codes, second_absmax, unsigned_map, offsets, rows, mask, row_mask, QUANTIZED)
    first = first * beta1 + grad * rest1
    second = second * beta2 + (grad * grad) * rest2
    update = tl.div_rn(first, tl.sqrt_rn(second) * inverse_correction + eps) * step_size

    old = tl.load(parameter + offsets, mask=mask, other=0.0)
    new = _to_float(old) * decay - update
    if old.dtype == tl.bfloat16:
        noise = _rounding_bits(rows, first_call, key, step_word, name_word, ROWS)
        tl.store(parameter + offsets, _round_bf16(new, noise), mask=mask)
    else:
        tl.store(parameter + offsets, new, mask=mask)

    _store_state(first, first_codes, first_absmax, signed_limits, offsets, rows, mask, row_mask, QUANTIZED)
    _store_state(second, second_codes, second_absmax, unsigned_limits, offsets, rows, mask, row_mask, QUANTIZED)
