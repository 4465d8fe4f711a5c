"""Block-wise 8-bit numbers for optimizer states: one byte a value and one float32 for every 256 of them.

Each block of 256 values is divided by its largest magnitude, and every quotient becomes the index of the nearest entry
of a fixed table of 256 numbers in [-1, 1] (or [0, 1]) whose spacing follows the logarithm of the magnitude: seven
decades, with more fraction bits the larger the number. The tables are those of bitsandbytes, so states can be compared.

Source: Dettmers, Lewis, Shleifer, Zettlemoyer, "8-bit Optimizers via Block-wise Quantization", ICLR 2022, sections 1.3
(dynamic tree quantization), 2.1 (block-wise) and 2.2 (dynamic quantization, unsigned for the second moment).
"""

from __future__ import annotations

import functools
import itertools
import struct
from collections.abc import Iterator
from dataclasses import dataclass

import torch

# Of the reference implementation: small enough that one outlier spoils few values, large enough that the absmax costs
# only 4 / 256 = 1.6 % on top of the codes.
BLOCK_SIZE = 256

_DECADES = 7  # the non-sign bits of a byte can spell exponents 0 to -6


def block_count(numel: int) -> int:
    """Returns how many blocks ``numel`` values take; the last one may be partial."""
    return -(-numel // BLOCK_SIZE)


def _f32(value: float) -> float:
    """Rounds a Python float to float32."""
    return float(struct.unpack("f", struct.pack("f", value))[0])


def _boundaries(intervals: int) -> list[float]:
    """Divides [0.1, 1] evenly, rounded as float32 arithmetic with one rounding per boundary does it.

    Counted from the nearer end, as ``torch.linspace`` does, since the tables of bitsandbytes come from there.
    """
    start, end = _f32(0.1), 1.0
    width = _f32(_f32(end - start) / intervals)
    middle = (intervals + 1) // 2
    return [
        _f32(start + width * i) if i < middle else _f32(end - width * (intervals - i)) for i in range(intervals + 1)
    ]


@functools.cache
def dynamic_map(signed: bool) -> tuple[float, ...]:
    """Returns the 256 representable quotients, ascending: -0.993 to 1 with a zero in the middle, or 0 to 1.

    Plain numbers, each exact in float32, so that the tables can be made under ``FakeTensorMode`` as well.

    Args:
        signed: for the first moment; the second moment has no sign and spends that bit on its fraction.
    """
    values = [0.0, 1.0]
    for decade in range(_DECADES):
        # One more exponent bit is one fraction bit less; without a sign there is one bit more.
        edges = _boundaries(2**decade if signed else 2 ** (decade + 1))
        scale = _f32(10.0 ** (decade - _DECADES + 1))
        means = [_f32(scale * _f32((low + high) / 2)) for low, high in itertools.pairwise(edges)]
        values += means
        if signed:
            values += [-mean for mean in means]
    return tuple(sorted(values))


@dataclass(frozen=True)
class CodeTables:
    """The tables on one device: ``*_map [256]`` and the limits between neighbours ``*_limits [255]``, float32."""

    signed_map: torch.Tensor
    signed_limits: torch.Tensor
    unsigned_map: torch.Tensor
    unsigned_limits: torch.Tensor

    @classmethod
    def build(cls, device: torch.device | str, *, keep_positive: bool = True) -> CodeTables:
        """Makes the tables on ``device``.

        Args:
            device: where the values are that will be coded.
            keep_positive: never code a positive second moment as zero; False is for the test that shows why.

        The smallest positive code of the second moment is 3.25e-7 of the block's largest value, so rounding to nearest
        turns v into 0 for every element whose gradients are below 4e-4 of the largest in the block. The first moment
        goes with the gradient, not its square, and survives there. In the step in which that happens nothing is wrong:
        the update uses the exact v. But when the next gradient is zero (the row of a token that is not in the batch),
        v stays 0 and the update is lr * m / eps. With gradients of 3e-6 beside one of 1e-2, eps = 1e-8, that is a step
        of 127 lr; beside one of 1, 12,700 lr. The nearest rounding in bitsandbytes 0.50.2 steps by just as much.
        Rounding *up* makes v too large and the step too small there, which is harmless.
        """
        signed, unsigned = dynamic_map(True), dynamic_map(False)
        unsigned_limits = _midpoints(unsigned)
        if keep_positive:
            unsigned_limits[0] = 0.0  # a code is the number of limits below the value, so v > 0 has at least code 1
        tables = (signed, _midpoints(signed), unsigned, unsigned_limits)
        return cls(*(torch.tensor(table, dtype=torch.float32, device=device) for table in tables))


def _midpoints(values: tuple[float, ...]) -> list[float]:
    return [(low + high) / 2 for low, high in itertools.pairwise(values)]


def _blocks(values: torch.Tensor, absmax: torch.Tensor) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """Yields views ``(rows [b, 256], absmax [b])``, then the partial block ``(row [1, r], absmax [1])`` if any."""
    whole = values.numel() // BLOCK_SIZE
    rest = values.numel() % BLOCK_SIZE
    if not rest:
        yield values.view(-1, BLOCK_SIZE), absmax
        return
    if whole:
        yield values[: whole * BLOCK_SIZE].view(-1, BLOCK_SIZE), absmax[:whole]
    yield values[whole * BLOCK_SIZE :].view(1, -1), absmax[whole:]


def quantize(values: torch.Tensor, limits: torch.Tensor, codes: torch.Tensor, absmax: torch.Tensor) -> None:
    """Writes the nearest codes of ``values``, which serve as work space and are lost.

    A block with a value that is not finite has no usable codes: all of it reads back as nan, as a weight does that
    met such a gradient.

    Args:
        values: ``[n]`` float32, starts at a block; overwritten.
        limits: ``[255]`` float32, of the table to code with.
        codes: ``[n]`` uint8, written.
        absmax: ``[blocks]`` float32, written.
    """
    for rows, largest in _blocks(values, absmax):
        largest.copy_(torch.linalg.vector_norm(rows, float("inf"), dim=1))
        rows.div_(largest.masked_fill(largest == 0, 1.0).unsqueeze(1))
    codes.copy_(torch.bucketize(values, limits, out_int32=True))


def dequantize(codes: torch.Tensor, absmax: torch.Tensor, table: torch.Tensor) -> torch.Tensor:
    """Reads coded values back.

    Args:
        codes: ``[n]`` uint8.
        absmax: ``[blocks]`` float32.
        table: ``[256]`` float32, the table that they were coded with.

    Returns:
        ``[n]`` float32.
    """
    values = table.index_select(0, codes.int())
    for rows, largest in _blocks(values, absmax):
        rows.mul_(largest.unsqueeze(1))
    return values
