"""Gradient stores: sums, rows, chunk sums, counts; the host store beside the device store."""

from __future__ import annotations

import gc
import subprocess
import sys
import threading
import time
import weakref

import pytest
import torch
from small_models import DIRECT, Ours, gradients, pair, speech_batch, tiny_model
from tolerances import TOLERANCES
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

from moss_tts_patches.errors import NumericsError
from moss_tts_patches.loss.embedding import summed_embeddings
from moss_tts_patches.loss.rows import masked_lookup, sum_rows_by_id
from moss_tts_patches.optim import host_gradients
from moss_tts_patches.optim.gradients import ChunkSum, DeviceGradients
from moss_tts_patches.optim.host_gradients import PIECE_ELEMENTS, WIDENED_ELEMENTS, HostGradients

TOLERANCE = TOLERANCES["gradient_fp32_relative"]


def test_rows_with_repeated_ignored_and_padding_ids():
    ids = torch.tensor([5, 0, 5, -100, 9, 3, 5, 0, 9])
    rows = torch.randn(9, 4)
    table = nn.Embedding(12, 4, padding_idx=9)
    kept = ids != -100
    table(ids[kept]).backward(rows[kept])
    unique, sums = sum_rows_by_id(ids, rows, padding_idx=9)
    found = torch.zeros(12, 4).index_add_(0, unique, sums)
    assert torch.allclose(found, table.weight.grad, rtol=TOLERANCE, atol=0)
    used = unique[sums.any(dim=1)]
    assert len(used) == len(used.unique()) == 3
    assert not torch.allclose(table.weight.grad, torch.zeros(12, 4).index_add_(0, unique, sums.roll(1, 0)))


def test_masked_lookup_gives_zero_vectors():
    weight = torch.randn(6, 3)
    found = masked_lookup(weight, torch.tensor([2, -100, 0]))
    assert torch.equal(found, torch.stack([weight[2], torch.zeros(3), weight[0]]))


def test_summed_embeddings_equal_autograd():
    tables = [nn.Embedding(9, 5, padding_idx=2), nn.Embedding(7, 5), nn.Embedding(8, 5)]
    tables[1].weight.requires_grad_(False)
    ids = torch.randint(0, 7, (2, 6, 3))
    upstream_gradient = torch.randn(2, 6, 5)
    expected = sum(table(ids[..., channel]) for channel, table in enumerate(tables))
    expected.backward(upstream_gradient)
    wanted = [None if table.weight.grad is None else table.weight.grad.clone() for table in tables]
    for table in tables:
        table.weight.grad = None
    store = DeviceGradients()
    store.attach((str(index), table.weight) for index, table in enumerate(tables))
    found = summed_embeddings(tables, ids, store)
    assert torch.equal(found, expected)
    found.backward(upstream_gradient)
    store.end_micro_batch({})
    assert tables[1].weight.grad is None
    for table, gradient in zip(tables, wanted):
        assert gradient is None or torch.allclose(table.weight.grad, gradient, rtol=TOLERANCE, atol=1e-7)


@pytest.mark.parametrize("chunks", [1, 2, 11, 47])
def test_chunk_sums_in_bf16_cost_one_rounding(chunks):
    """Plain bf16 sums of 47 chunks are five times worse: the negative control."""
    generator = torch.Generator().manual_seed(0)
    spread = torch.randn(20000, generator=generator).exp()  # every order of magnitude
    parts = (torch.randn(chunks, 20000, generator=generator) * spread + 0.3).bfloat16()
    exact = parts.double().sum(0)

    def error(found):
        return ((found.double() - exact).norm() / exact.norm()).item()

    chunk_sum, plain = ChunkSum(None), torch.zeros(20000, dtype=torch.bfloat16)
    for part in parts:
        chunk_sum.add(part.clone())
        plain += part
    best = error(exact.bfloat16())
    assert error(chunk_sum.total) <= max(best * TOLERANCES["chunk_sum_over_one_rounding"], 1e-12)
    if chunks == 47:
        assert error(plain) > 4 * best


def test_chunk_sum_of_values_that_cancel_to_zero():
    chunk_sum = ChunkSum(torch.tensor([1.0, 0.0], dtype=torch.bfloat16))
    for value in (2.0**-12, -1.0, 2.0**-12):
        chunk_sum.add(torch.tensor([value, 0.0], dtype=torch.bfloat16))
    assert chunk_sum.total.tolist() == [2.0**-11, 0.0]


def host_stores():
    return {"inline": lambda: HostGradients(), "worker thread": lambda: HostGradients(threaded=True)}


@pytest.mark.parametrize("schedule", ["fused", "staged", "autograd"])
@pytest.mark.parametrize("kind", host_stores())
def test_host_store_holds_what_the_device_store_holds(schedule, kind):
    on_device, on_host = pair(tiny_model())
    batches = [speech_batch(9, seed=1), speech_batch(16, seed=2)]
    store = host_stores()[kind]()
    Ours(schedule, scale=0.5).train(on_device, batches)
    ours = Ours(schedule, scale=0.5, store=store)
    store.attach(on_host.named_parameters())
    for batch in batches:
        (ours.loss(on_host, batch) * 0.5).backward()
        store.end_micro_batch(ours.context.expected_contributions)
        assert store.device_bytes() == 0
    found = {name: store.fetch(p).double() for name, p in on_host.named_parameters() if store.has(p)}
    exact = gradients(on_device)
    assert found.keys() == exact.keys()
    assert [name for name in found if not torch.equal(found[name], exact[name])] == []


def test_device_store_does_leave_gradients_on_the_device():
    """Negative control of the byte count above."""
    model = tiny_model()
    ours = Ours("staged")
    ours.store.attach(model.named_parameters())
    ours.loss(model, speech_batch(5)).backward()
    trainable = sum(p.numel() for p in model.parameters() if p.requires_grad)
    assert ours.store.device_bytes() == 4 * trainable


@pytest.mark.parametrize("kind", host_stores())
def test_clipping_on_the_host_is_bit_equal(kind):
    parameters = [nn.Parameter(torch.randn(13, 7)), nn.Parameter(torch.randn(5)), nn.Parameter(torch.randn(3, 3))]
    values = [torch.randn_like(p) for p in parameters]
    store = host_stores()[kind]()
    store.attach((str(i), p) for i, p in enumerate(parameters))
    for parameter, value in zip(parameters[:2], values):
        store.add(parameter, value.clone())
        parameter.grad = value.clone()
    expected = nn.utils.clip_grad_norm_(parameters, 0.1, foreach=False)
    total = store.total_norm(parameters, 2.0)
    assert torch.equal(total, expected)
    store.clip(parameters, 0.1, total)
    for parameter in parameters[:2]:
        assert torch.equal(store.fetch(parameter), parameter.grad)
    assert store.fetch(parameters[2]) is None
    store.zero()
    assert store.fetch(parameters[0]) is None


def test_host_store_takes_slices_and_pieces():
    """A parameter larger than one staging buffer, and rows that come slice by slice."""
    parameter = nn.Parameter(torch.empty(PIECE_ELEMENTS // 64 + 3, 64))
    store = HostGradients(threaded=True)
    store.attach([("big", parameter)])
    gradient = torch.randn_like(parameter)
    store.add(parameter, gradient)
    store.add_slice(parameter, 1000, 1003, torch.ones(3, 64))
    expected = gradient.clone()
    expected[1000:1003] += 1
    assert torch.equal(store.fetch(parameter), expected)
    store.zero()
    store.add_slice(parameter, 2, 4, torch.ones(2, 64))
    found = store.fetch(parameter)
    assert found.sum().item() == 128
    assert store.host_bytes() == 4 * parameter.numel()


def test_a_failed_addition_stops_the_step():
    parameter = nn.Parameter(torch.empty(4, 4))
    store = HostGradients(threaded=True)
    store.attach([("p", parameter)])
    store.add_rows(parameter, torch.tensor([7]), torch.ones(1, 4))
    with pytest.raises(NumericsError, match="the weights were not touched"):
        store.wait()


@pytest.mark.parametrize("schedule", DIRECT)
def test_bf16_arena(schedule):
    """Two bytes of RAM a parameter: the sum of two micro-batches rounds as it would on the GPU."""
    model = tiny_model(torch.bfloat16)
    store = HostGradients(torch.bfloat16)
    Ours(schedule, scale=0.5, store=store).train(model, [speech_batch(9)], autocast=torch.bfloat16)
    assert store.host_bytes() == 2 * sum(p.numel() for p in model.parameters() if p.requires_grad)
    assert all(store.fetch(p).dtype == torch.bfloat16 for p in model.parameters() if store.has(p))


@pytest.mark.parametrize("kind", ["device", *host_stores()])
def test_a_nonfinite_gradient_is_named(kind):
    parameters = [nn.Parameter(torch.randn(4)), nn.Parameter(torch.randn(3)), nn.Parameter(torch.randn(2))]
    store = DeviceGradients() if kind == "device" else host_stores()[kind]()
    store.attach(zip("abc", parameters))
    for parameter, value in zip(parameters, (1.0, float("inf"), float("nan"))):
        store.add(parameter, torch.full_like(parameter, value))
    assert not torch.isfinite(store.total_norm(parameters, 2.0))
    assert store.nonfinite_names(parameters) == ["b", "c"]
    assert store.nonfinite_names(parameters[:1]) == []


class _AdditionsOfTwoDtypes(TorchDispatchMode):
    """Counts in-place additions that torch does element by element."""

    def __init__(self):
        super().__init__()
        self.count = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if func is torch.ops.aten.add_.Tensor:
            self.count += args[0].dtype != args[1].dtype
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("gradient_dtype", [torch.float32, torch.bfloat16])
def test_host_store_adds_as_torch_does_but_never_bf16_to_float32(dtype, gradient_dtype):
    """On one core torch's mixed addition takes 2.3 ns an element: 7 s a micro-batch for 1.7B; widened first, 0.4."""
    weight = nn.Parameter(torch.zeros(3, WIDENED_ELEMENTS // 2 + 5, dtype=gradient_dtype))
    parts = [torch.randn(weight.shape, generator=torch.Generator().manual_seed(n)).to(gradient_dtype) for n in range(3)]
    expected = torch.zeros(weight.shape, dtype=dtype)
    with _AdditionsOfTwoDtypes() as by_torch:
        for part in parts:
            expected.add_(part)
    store = HostGradients(dtype)
    store.attach([("weight", weight)])
    with _AdditionsOfTwoDtypes() as ours:
        for part in parts:
            store.add(weight, part)
    assert torch.equal(store.fetch(weight), expected) and not torch.equal(expected, parts[0].to(dtype))
    widens = dtype == torch.float32 and gradient_dtype == torch.bfloat16
    assert ours.count == (0 if widens else by_torch.count - (dtype != gradient_dtype))
    assert by_torch.count == (3 if dtype != gradient_dtype else 0)


def test_a_store_that_is_done_with_gives_its_memory_back():
    """benchmarks/gpu.py makes one after the other, of 12 GiB each."""
    weight = nn.Parameter(torch.ones(7))
    store = HostGradients(threaded=True)
    store.attach([("weight", weight)])
    (weight * 2).sum().backward()
    store.wait()
    arena = weakref.ref(store._arena.untyped_storage())
    before = threading.active_count()
    store.detach()
    del store
    gc.collect()
    assert arena() is None
    deadline = time.monotonic() + 30
    while threading.active_count() == before and time.monotonic() < deadline:
        time.sleep(0.01)
    assert threading.active_count() == before - 1


IN_FLIGHT = """
import sys, torch
from moss_tts_patches.optim.host_gradients import TransferLane
total = torch.zeros(2**26)
lane = TransferLane(torch.device("cpu"))
lane.run(lambda: total.add_(1.0))  # 50 ms, many times what Python needs from here to its end
lane.run(lambda: print(int(total[-1]), flush=True))
sys.exit(3)
"""


def test_a_process_that_ends_while_gradients_are_added_keeps_its_status():
    """As at Ctrl-C, or when the GPU is full in a backward: it was abort()."""
    ended = subprocess.run([sys.executable, "-c", IN_FLIGHT], capture_output=True, text=True)
    assert (ended.returncode, ended.stdout, ended.stderr) == (3, "1\n", "")


def test_a_store_that_stops_watching_has_added_everything():
    weight = nn.Parameter(torch.zeros(2**21))
    store = HostGradients(threaded=True)
    store.attach([("weight", weight)])
    for _ in range(4):
        store.add(weight, torch.ones_like(weight))
    store.detach()
    assert store._view(weight).eq(4.0).all()


def test_the_worker_is_not_held_to_the_launchers_one_thread(monkeypatch):
    """accelerate launch sets OMP_NUM_THREADS=1 for a training on a GPU."""
    monkeypatch.setattr(host_gradients, "cores", lambda: 3)
    own, found = torch.get_num_threads(), []
    lane = host_gradients.TransferLane(torch.device("cpu"))
    lane.run(lambda: found.append(torch.get_num_threads()))
    lane.wait()
    lane.close()
    assert found == [max(own, 3)] and torch.get_num_threads() == own
