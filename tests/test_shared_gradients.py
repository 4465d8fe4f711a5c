"""Tied weights: one tensor that is a head and an embedding, and gets its gradient in several contributions."""

from __future__ import annotations

from unittest import mock

import pytest
import torch
from tolerances import TOLERANCES
from torch import nn

from moss_tts_patches.loss.rows import sum_rows_by_id
from moss_tts_patches.optim.gradients import DeviceGradients

ENTRIES, HIDDEN, FRAMES, MICRO_BATCHES = 40, 64, 60, 8


def contributions(micro_batch):
    """A dense gradient and two sets of rows, as a tied table gets them; ids repeat, 0 among them."""
    generator = torch.Generator().manual_seed(micro_batch)
    dense = torch.randn(ENTRIES, HIDDEN, generator=generator).bfloat16()
    rows = []
    for _ in range(2):
        ids = torch.randint(-1, ENTRIES, (FRAMES,), generator=generator)
        ids[ids == -1] = -100
        rows.append(sum_rows_by_id(ids, torch.randn(FRAMES, HIDDEN, generator=generator) * 0.3))
    return dense, rows


def accumulated(dtype, chunked):
    """The gradient of a table after some micro-batches, and the exact one."""
    table = nn.Embedding(ENTRIES, HIDDEN).to(dtype).weight
    store = DeviceGradients()
    store.attach([("table", table)])
    exact = torch.zeros(ENTRIES, HIDDEN, dtype=torch.float64)
    for micro_batch in range(MICRO_BATCHES):
        dense, rows = contributions(micro_batch)
        if chunked:
            with store.chunk_sums([table]):
                store.add_chunk(table, dense)
        else:
            store.add(table, dense)
        exact += dense.double()
        for ids, values in rows:
            store.add_rows(table, ids, values)
            exact.index_add_(0, ids, values.double())
        store.end_micro_batch({table: 3})
    return store, table, exact


def error_over_one_rounding(chunked):
    _, table, exact = accumulated(torch.bfloat16, chunked)
    return ((table.grad.double() - exact).norm() / (exact.bfloat16().double() - exact).norm()).item()


@pytest.mark.parametrize("chunked", [False, True])
def test_a_tied_table_is_rounded_as_if_once(chunked):
    assert error_over_one_rounding(chunked) <= TOLERANCES["chunk_sum_over_one_rounding"]


def test_without_compensation_it_is_not():
    """Negative control: rows that are added in bf16, as to a table that is no head."""
    in_bf16 = lambda total, error, ids, rows: total.index_add_(0, ids, rows.to(total.dtype))  # noqa: E731
    with mock.patch("moss_tts_patches.optim.gradients.add_rows_compensated", in_bf16):
        assert error_over_one_rounding(chunked=False) > 1.5


@pytest.mark.parametrize("chunked", [False, True])
def test_in_float32_nothing_is_carried(chunked):
    store, table, exact = accumulated(torch.float32, chunked)
    assert store.device_bytes() == table.grad.numel() * 4
    assert ((table.grad.double() - exact).norm() / exact.norm()).item() <= TOLERANCES["loss_fp32_relative"]


def test_what_is_carried_goes_with_the_gradient():
    for end in (DeviceGradients.zero, lambda store: store.release(next(iter(store._names)))):
        store, table, _ = accumulated(torch.bfloat16, chunked=False)
        assert store.device_bytes() == table.grad.numel() * 3
        end(store)
        assert store.device_bytes() == 0
    store, table, _ = accumulated(torch.bfloat16, chunked=False)
    store.clip([table], 1.0, store.total_norm([table], 2.0))
    assert store.device_bytes() == table.grad.numel() * 2
