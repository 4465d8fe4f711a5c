"""Block-wise 8-bit numbers: the tables, the nearest code, partial blocks, and what must never become zero."""

from __future__ import annotations

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode

from moss_tts_patches.optim.blockwise import BLOCK_SIZE, CodeTables, block_count, dequantize, dynamic_map, quantize


def coded(values: torch.Tensor, limits: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    codes = torch.empty(values.numel(), dtype=torch.uint8)
    absmax = torch.empty(block_count(values.numel()))
    quantize(values.clone(), limits, codes, absmax)
    return codes, absmax


def wide_values(numel: int, seed: int = 0) -> torch.Tensor:
    """Magnitudes over twelve decades, more than the table has."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(numel, generator=generator) * 10 ** (torch.rand(numel, generator=generator) * 12 - 12)


@pytest.mark.parametrize("signed", [True, False])
def test_maps_are_those_of_bitsandbytes(signed):
    functional = pytest.importorskip("bitsandbytes.functional")
    found = torch.tensor(dynamic_map(signed), dtype=torch.float32)
    assert torch.equal(found, functional.create_dynamic_map(signed))
    assert not torch.equal(found, functional.create_dynamic_map(not signed))


@pytest.mark.parametrize("numel", [1, 255, 256, 257, 1000, 1024])
@pytest.mark.parametrize("signed", [True, False])
def test_every_code_is_the_nearest(numel, signed):
    tables = CodeTables.build("cpu", keep_positive=False)
    table, limits = (
        (tables.signed_map, tables.signed_limits) if signed else (tables.unsigned_map, tables.unsigned_limits)
    )
    values = wide_values(numel) if signed else wide_values(numel).abs()
    codes, absmax = coded(values, limits)
    for block, part in enumerate(values.split(BLOCK_SIZE)):
        assert absmax[block] == part.abs().max()
        quotients = part / absmax[block]
        found = table[codes[block * BLOCK_SIZE : block * BLOCK_SIZE + part.numel()].long()]
        best = (quotients.unsqueeze(1) - table).abs().min(dim=1).values
        assert torch.equal((quotients - found).abs(), best)


def test_a_wrong_code_is_noticed():
    """The negative control of the test above: one code off is not the nearest."""
    tables = CodeTables.build("cpu")
    quotients = wide_values(256)
    codes, absmax = coded(quotients, tables.signed_limits)
    quotients /= absmax
    off = tables.signed_map[(codes.long() + 1).clamp(max=255)]
    best = (quotients.unsqueeze(1) - tables.signed_map).abs().min(dim=1).values
    assert ((quotients - off).abs() > best).float().mean() > 0.9


@pytest.mark.parametrize("numel", [1, 200, 256, 300, 5 * BLOCK_SIZE])
def test_read_back_is_close_to_what_was_stored(numel):
    tables = CodeTables.build("cpu")
    values = wide_values(numel, seed=1)
    codes, absmax = coded(values, tables.signed_limits)
    back = dequantize(codes, absmax, tables.signed_map)
    widest_gap = tables.signed_map.diff().max()
    for block, part in enumerate(values.split(BLOCK_SIZE)):
        error = (back[block * BLOCK_SIZE : block * BLOCK_SIZE + part.numel()] - part).abs().max()
        assert error <= widest_gap * absmax[block]  # half of it, but for -1, whose code is -0.993


def test_zeros_stay_exactly_zero_beside_large_values():
    tables = CodeTables.build("cpu")
    values = torch.zeros(2 * BLOCK_SIZE)
    values[7] = 3.0
    for table, limits in ((tables.signed_map, tables.signed_limits), (tables.unsigned_map, tables.unsigned_limits)):
        assert torch.equal(dequantize(*coded(values, limits), table), values)


@pytest.mark.parametrize("smallest", [1e-3, 1e-7, 1e-12, 1e-30, 1e-44])
def test_a_positive_second_moment_never_becomes_zero(smallest):
    values = torch.full((300,), smallest)
    values[::256] = max(1.0, smallest)
    values[5] = 0.0
    tables = CodeTables.build("cpu")
    back = dequantize(*coded(values, tables.unsigned_limits), tables.unsigned_map)
    assert torch.equal(back == 0, values == 0)
    plain = CodeTables.build("cpu", keep_positive=False)
    unprotected = dequantize(*coded(values, plain.unsigned_limits), plain.unsigned_map)
    assert (unprotected[1] == 0) == (smallest < 1.6e-7)


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), float("-inf")])
def test_a_value_that_is_not_finite_spoils_its_block_and_no_other(bad):
    tables = CodeTables.build("cpu")
    values = wide_values(3 * BLOCK_SIZE)
    values[BLOCK_SIZE + 3] = bad
    back = dequantize(*coded(values, tables.signed_limits), tables.signed_map)
    assert not back[BLOCK_SIZE : 2 * BLOCK_SIZE].isfinite().any()
    assert back[:BLOCK_SIZE].isfinite().all() and back[2 * BLOCK_SIZE :].isfinite().all()


def test_tables_can_be_made_under_fake_tensors():
    with FakeTensorMode():
        tables = CodeTables.build("cpu")
        assert isinstance(tables.signed_map, FakeTensor) and tables.unsigned_limits.shape == (255,)
    assert not isinstance(CodeTables.build("cpu").signed_map, FakeTensor)
