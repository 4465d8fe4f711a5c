"""The longest batch is tried first, and nothing of the run changes by it."""

from __future__ import annotations

import random
from contextlib import nullcontext
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from small_models import FAMILY, Ours, speech_batch, tiny_model
from test_session_checks import make_loop
from tolerances import TOLERANCES
from torch.utils.data import DataLoader, Dataset

from moss_tts_patches.memory.card import StorePlacement
from moss_tts_patches.memory.tracker import StorageTracker
from moss_tts_patches.optim.gradients import DeviceGradients
from moss_tts_patches.optim.host_gradients import HostGradients
from moss_tts_patches.optim.optimizers import AdamW8bit
from moss_tts_patches.runtime.longest_probe import generators_restored, longest_records, probe_longest

LENGTHS = [5, 9, 2, 9, 7, 1]


class Records(Dataset):
    """A record is its length; asking for one draws from every generator, as augmentation would."""

    def __init__(self) -> None:
        self.asked: list[int] = []

    def __len__(self) -> int:
        return len(LENGTHS)

    def __getitem__(self, index: int) -> torch.Tensor:
        self.asked.append(index)
        random.random(), np.random.rand(), torch.rand(3)
        return torch.full((LENGTHS[index],), float(index))


def collate(records: list[torch.Tensor]) -> torch.Tensor:
    return torch.nn.utils.rnn.pad_sequence(records, batch_first=True)


def draws() -> tuple[Any, ...]:
    return random.random(), np.random.rand(2).tolist(), torch.rand(2).tolist(), torch.randn(1).item()


def seed() -> None:
    random.seed(3)
    np.random.seed(3)
    torch.manual_seed(3)
    random.gauss(0, 1)  # keeps a second number back, which is part of the state
    np.random.randn(1)


def run_probe(batch_size: int = 2, error: Exception | None = None) -> tuple[Records, list[Any], torch.nn.Linear]:
    dataset, batches = Records(), []
    layer = torch.nn.utils.skip_init(torch.nn.Linear, 9, 1)  # draws nothing by itself

    def run(batch: torch.Tensor) -> None:
        batches.append(batch)
        if error is not None:
            raise error
        torch.nn.functional.dropout(layer(batch)).sum().backward()

    probe_longest(dataset, collate, LENGTHS, batch_size, run, lambda: layer.zero_grad(set_to_none=True))
    return dataset, batches, layer


def test_the_longest_records_are_tried_together() -> None:
    dataset, batches, layer = run_probe()
    assert dataset.asked == [1, 3]
    assert [batch.shape for batch in batches] == [(2, 9)]
    assert layer.weight.grad is None


@pytest.mark.parametrize(("count", "expected"), [(1, [1]), (3, [1, 3, 4]), (99, [1, 3, 4, 0, 2, 5])])
def test_longest_first_and_never_more_than_there_are(count: int, expected: list[int]) -> None:
    assert longest_records(LENGTHS, count) == expected


def test_every_generator_is_restored() -> None:
    seed()
    expected = draws()
    seed()
    run_probe()
    assert draws() == expected


def test_without_restoring_every_generator_would_differ() -> None:
    seed()
    expected = draws()
    seed()
    [Records()[index] for index in range(2)]
    assert all(found != wanted for found, wanted in zip(draws(), expected))


def test_states_are_the_same_bytes() -> None:
    seed()
    before = random.getstate(), np.random.get_state(), torch.get_rng_state()
    with generators_restored():
        draws()
    assert random.getstate() == before[0]
    for found, wanted in zip(np.random.get_state(), before[1]):
        assert np.array_equal(found, wanted)
    assert torch.equal(torch.get_rng_state(), before[2])


def test_the_data_order_stays() -> None:
    def order(probed: bool) -> list[float]:
        seed()
        if probed:
            run_probe()
        return [batch.item() for batch in DataLoader(torch.arange(20.0), shuffle=True)]  # type: ignore[arg-type]

    assert order(probed=True) == order(probed=False)


def test_an_error_passes_through_and_leaves_nothing() -> None:
    seed()
    expected = draws()
    seed()
    dropped = []
    with pytest.raises(torch.OutOfMemoryError):
        probe_longest(Records(), collate, LENGTHS, 2, lambda batch: _out_of_memory(), lambda: dropped.append(True))
    assert dropped == [True]
    assert draws() == expected


def _out_of_memory() -> None:
    raise torch.OutOfMemoryError("CUDA out of memory")


def test_lengths_of_another_data_set_are_refused() -> None:
    with pytest.raises(ValueError, match="3 lengths for 6 records"):
        probe_longest(Records(), collate, [1, 2, 3], 1, print, print)


@pytest.mark.parametrize(("placement", "accumulation", "runs"), [("device", 2, 2), ("device", 1, 1), ("host", 2, 1)])
def test_the_trial_needs_what_the_steps_to_come_need(placement: str, accumulation: int, runs: int) -> None:
    """Gradients of a step's first micro-batch and states are on the GPU when the longest records come later."""
    model, batch = tiny_model(), speech_batch(24)
    store = DeviceGradients() if placement == "device" else HostGradients()
    ours = Ours("fused", scale=1 / accumulation, store=store)
    optimizer = AdamW8bit(model.named_parameters(), gradients=store)
    forwards = []

    def backward(loss: torch.Tensor) -> None:
        (loss / accumulation).backward()
        store.end_micro_batch(ours.context.expected_contributions)

    def training_output(*arguments: Any) -> Any:
        forwards.append(arguments)
        return FAMILY.training_output(*arguments)

    accelerator = SimpleNamespace(
        gradient_accumulation_steps=accumulation,
        no_sync=lambda model: nullcontext(),
        device=torch.device("cpu"),
        backward=backward,
    )
    loop = make_loop(
        print,
        family=SimpleNamespace(training_output=training_output),
        accelerator=accelerator,
        context=ours.context,
        stores=SimpleNamespace(placement=StorePlacement(placement, "device")),
        data=SimpleNamespace(try_longest=lambda batch, run, drop: (run(batch), drop())),
        watch=SimpleNamespace(guard=SimpleNamespace(phase=lambda name: nullcontext())),
        optimizer=optimizer,
    )
    with StorageTracker() as tracker:
        tracker.watch(model.parameters())
        store.attach(model.named_parameters())
        optimizer.reserve_states()
        tracker.reset_peak()
        loop._try_longest(model, batch)
        tried = tracker.peak_bytes
        assert len(forwards) == runs
        for _ in range(2):
            tracker.reset_peak()
            for _ in range(accumulation):
                backward(ours.loss(model, batch))
            needed = tracker.peak_bytes
            optimizer.step()
            optimizer.zero_grad()
    assert tried == pytest.approx(needed, rel=TOLERANCES["simulated_peak_relative"])
