"""The instruments: live storages, FLOPs, and that a simulated step needs what a real one needs."""

from __future__ import annotations

import copy
import sys
from pathlib import Path
from unittest import mock

import pytest
import torch
import torch.nn.functional as F
from small_models import FAMILY, Ours, speech_batch, tiny_model
from tolerances import TOLERANCES
from torch import nn

from moss_tts_patches.memory import simulate
from moss_tts_patches.memory.flops import FlopCounter
from moss_tts_patches.memory.placement import announce_host, empty_host
from moss_tts_patches.memory.simulate import MicroBatch, Rung, simulate_rung
from moss_tts_patches.memory.tracker import StorageTracker
from moss_tts_patches.optim.gradients import DeviceGradients
from moss_tts_patches.units import KIB

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "benchmarks"))
from live_bytes import LiveBytes


def test_storages_are_counted_once_and_while_they_live():
    with StorageTracker() as tracker:
        kept = torch.zeros(KIB, dtype=torch.uint8)
        views = [kept[10:], kept.view(32, 32), kept.t() if kept.ndim == 2 else kept.unsqueeze(0)]
        assert tracker.live_bytes == KIB
        temporary = torch.zeros(3 * KIB, dtype=torch.uint8)
        del temporary
        assert (tracker.live_bytes, tracker.peak_bytes) == (KIB, 4 * KIB)
        del kept
        assert tracker.live_bytes == KIB  # the views hold it
        del views
        assert tracker.live_bytes == 0
        tracker.reset_peak()
        assert tracker.peak_bytes == 0


def test_host_buffers_are_told_apart():
    with StorageTracker() as tracker:
        buffer = empty_host(5 * KIB, torch.uint8)
        parked = torch.zeros(2 * KIB, dtype=torch.uint8)
        announce_host(parked)
        assert (tracker.live_bytes, tracker.host_bytes) == (0, 7 * KIB)
        assert tracker.peak_bytes <= 2 * KIB
        del buffer, parked
        assert tracker.host_bytes == 0


def test_flops_of_products_and_attention():
    with FlopCounter() as counter:
        nn.Linear(8, 16, bias=False)(torch.randn(3, 8)).sum().backward()
        # Forward, and only the weight's gradient: the input wants none.
        assert counter.matmul_flops == 2 * (2 * 3 * 8 * 16)
        query = torch.randn(2, 4, 10, 8, requires_grad=True)
        F.scaled_dot_product_attention(query, query, query, is_causal=True).sum().backward()
        forward = 2 * (2 * 4 * 10 * 10 * 8 * 2)
        assert counter.attention_flops == pytest.approx(forward * 3.5)  # the backward recomputes the scores


RUNGS = [Rung(schedule, chunk_frames=7, gradients=place, states=place) for schedule in ("fused", "staged", "autograd")
         for place in ("device", "host")]  # fmt: skip


def real_step(rung, frames):
    """A real step of the tiny model in bf16 under the tracker, arranged as the simulation arranges it."""
    model = tiny_model(torch.bfloat16)
    with StorageTracker() as tracker:
        tracker.watch(model.parameters())
        for parent, attribute in FAMILY.unread_embeddings(model):
            simulate.park_embedding(parent, attribute)
        simulate.checkpoint_layers(FAMILY.backbone(model))
        store = simulate.build_store(rung.gradients, torch.float32)
        store.attach(model.named_parameters())
        optimizer = simulate.build_optimizer(
            rung.optimizer, list(model.named_parameters()), store, rung.states, seed=0, lr=1e-5, betas=(0.9, 0.95)
        )
        simulate.bring_about_second_micro_batch(model, optimizer, rung, tracker)
        ours = Ours(rung.schedule, chunk_frames=7, logits_at_once=2**24, store=store, scale=0.5)
        batch = speech_batch(frames)
        batch["labels"][:, :4] = -100
        del batch["attention_mask"]
        tracker.reset_peak()
        with torch.autocast("cpu", torch.bfloat16):
            loss = ours.loss(model, {**batch, "attention_mask": None})
        (loss.float() * 0.5).backward()
        store.end_micro_batch(ours.context.expected_contributions)
        optimizer.step()
        return tracker.peak_bytes, tracker.host_bytes


@pytest.mark.parametrize("rung", RUNGS, ids=lambda rung: f"{rung.schedule}-{rung.gradients}")
def test_a_simulated_step_needs_what_a_real_one_needs(rung):
    frames = 20
    model = tiny_model()
    batch = MicroBatch(1, frames + 5, frames + 1)
    simulated = simulate_rung(FAMILY, type(model), copy.deepcopy(model.config), batch, rung)
    peak, host = real_step(rung, frames)
    assert simulated.host_bytes == host
    # The real run also holds the batch, the labels found in it and the rotary tables: 30 KB beside 1 to 3 MB.
    assert simulated.peak_bytes == pytest.approx(peak, rel=0.02)


def test_the_figures_see_one_gradient_that_stays():
    """Negative control: a store that keeps one more copy of the text head's gradient."""

    class Hoarder(DeviceGradients):
        def add(self, parameter, gradient):
            super().add(parameter, gradient)
            self.__dict__.setdefault("kept", []).append(gradient.clone())

    model = tiny_model()
    arguments = (FAMILY, type(model), model.config, MicroBatch(1, 25, 21), Rung("staged", chunk_frames=7))
    clean = simulate_rung(*arguments).peak_bytes
    with mock.patch.object(simulate, "build_store", lambda *_: Hoarder()):
        hoarded = simulate_rung(*arguments).peak_bytes
    text_head = model.lm_heads[0].weight.numel() * 2
    assert hoarded - clean >= text_head


@pytest.mark.parametrize("extra", [0, 1])
def test_the_tracker_counts_what_is_really_alive(extra):
    """In a real step; with one gradient that something else keeps, both see it."""
    kept = []
    model = tiny_model(torch.bfloat16)
    with LiveBytes() as alive:
        before = alive.read().device - sum(p.numel() * p.element_size() for p in model.parameters())
        with StorageTracker() as tracker:
            tracker.watch([*model.parameters(), *model.buffers()])
            ours = Ours("staged", chunk_frames=7)
            ours.store.attach(model.named_parameters())
            loss = ours.loss(model, speech_batch(20))
            loss.backward()
            ours.store.end_micro_batch(ours.context.expected_contributions)
            kept += [model.lm_heads[0].weight.grad.clone()] * extra
            found, counted = alive.read().device - before, tracker.live_bytes
    assert counted == pytest.approx(found, rel=TOLERANCES["tracker_relative"])
    gradients = sum(p.grad.numel() * p.grad.element_size() for p in model.parameters() if p.grad is not None)
    weights = sum(p.numel() * p.element_size() for p in model.parameters())
    hoarded = counted > (weights + gradients) * (1 + TOLERANCES["tracker_relative"])
    assert hoarded == bool(extra)
