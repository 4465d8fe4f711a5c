"""The parts of a resume point by themselves: generators, the loader's order, tensors, identity, the learning rate."""

from __future__ import annotations

import json
import random
import signal
from itertools import chain

import numpy
import pytest
import torch
from accelerate.data_loader import BatchSamplerShard, DataLoaderShard
from torch import nn
from torch.utils.data import BatchSampler, DataLoader
from transformers import get_scheduler

from moss_tts_patches.errors import StateError
from moss_tts_patches.optim import build_optimizer, build_store
from moss_tts_patches.runtime.resume import random_states, signals
from moss_tts_patches.runtime.resume.equality import checksum
from moss_tts_patches.runtime.resume.identity import model_fingerprint, records_fingerprint
from moss_tts_patches.runtime.resume.loader import loader_class, loader_generator
from moss_tts_patches.runtime.resume.origin import Origin
from moss_tts_patches.runtime.resume.point import write_point
from moss_tts_patches.runtime.resume.quiet import Quiet
from moss_tts_patches.runtime.resume.record_order import RecordOrder
from moss_tts_patches.runtime.resume.run import ResumableRun
from moss_tts_patches.runtime.resume.schedule import move_schedule
from moss_tts_patches.runtime.resume.tensors import (
    check_weights,
    optimizer_scalars,
    read_states,
    read_weights,
    trained_parameters,
    write_states,
    write_weights,
)
from moss_tts_patches.runtime.resume.writer import ResumeOptions

CPU = torch.device("cpu")


def draws():
    return random.random(), numpy.random.rand(), torch.rand(1).item(), random.gauss(0, 1), numpy.random.randn()


def test_generators_go_on_where_they_were_through_json():
    generator = torch.Generator().manual_seed(3)
    random.gauss(0, 1), numpy.random.randn()  # each leaves a second value behind
    state = json.loads(json.dumps(random_states.capture(CPU, generator)))
    expected = (*draws(), torch.rand(2, generator=generator).tolist())
    assert (*draws(), torch.rand(2, generator=generator).tolist()) != expected
    random_states.restore(state, CPU, generator)
    assert (*draws(), torch.rand(2, generator=generator).tolist()) == expected


class Plan:
    """Answers a loader: ``finished`` micro-batches of the epoch are done, and its generators stood at ``start``."""

    device = CPU

    def __init__(self, finished=0):
        self.finished, self.start, self.order = finished, None, RecordOrder()

    def loader_made(self, loader):
        pass

    def begin_epoch(self, generator):
        if self.start is None:
            self.start = random_states.capture(CPU, generator)
        return self.finished

    def rewind(self, generator):
        self.now = random_states.capture(CPU, generator)
        random_states.restore(self.start, CPU, generator)

    def forward_again(self, generator):
        random_states.restore(self.now, CPU, generator)


class Counting(torch.utils.data.Dataset):
    def __init__(self):
        self.fetched = []

    def __len__(self):
        return 11

    def __getitem__(self, index):
        self.fetched.append(index)
        return {"input_ids": torch.full((2, 2), index)}


def order(batches):
    return [batch["input_ids"][:, 0, 0].tolist() for batch in batches]


@pytest.mark.parametrize("own_generator", [False, True])
@pytest.mark.parametrize("finished", [1, 4, 5, 6, None])
def test_the_rest_of_an_epoch_comes_in_the_order_of_the_whole(finished, own_generator):
    plan, dataset = Plan(), Counting()
    generator = torch.Generator().manual_seed(1) if own_generator else None
    loader = loader_class(DataLoader, plan)(dataset, batch_size=2, shuffle=True, generator=generator)
    torch.manual_seed(5)
    whole = order(loader)
    assert sorted(chain(*whole)) == list(range(11)) and len(whole) == 6
    dataset.fetched.clear()
    torch.manual_seed(99)  # anything else has been drawn meanwhile
    plan.finished = finished
    before = torch.get_rng_state()
    again = list(loader)
    done = 6 if finished is None else finished
    assert order(again[done:]) == whole[done:] and len(again) == 6
    assert dataset.fetched == list(chain(*whole[done:]))
    assert torch.equal(torch.get_rng_state(), before)
    assert isinstance(loader.batch_sampler, BatchSampler)  # the detour is gone


@pytest.mark.parametrize("workers", [0, 2])
def test_the_records_of_each_batch_are_known(workers):
    """Also where workers and accelerate's look at the next batch run ahead; twice, the second time from batch 2 on."""
    plan = Plan()
    loader = loader_class(DataLoader, plan)(Counting(), batch_size=2, shuffle=True, num_workers=workers)
    ahead = DataLoaderShard(loader.dataset, batch_sampler=loader.batch_sampler, num_workers=workers)
    ahead.base_dataloader.__class__ = type(loader)
    for finished in (0, 2):
        plan.finished, plan.start = finished, None
        for number, batch in enumerate(ahead):
            if number >= finished:
                assert plan.order.next() == order([batch])[0]
        assert number == 5 and plan.order.next() == []


def test_an_epoch_that_was_left_leaves_nothing_behind():
    plan = Plan()
    loader = loader_class(DataLoader, plan)(Counting(), batch_size=2, shuffle=True, num_workers=2)
    next(iter(loader))
    for batch in loader:
        assert plan.order.next() == order([batch])[0]


def test_control_without_rewinding_the_order_is_another():
    plan, dataset = Plan(), Counting()
    loader = loader_class(DataLoader, plan)(dataset, batch_size=2, shuffle=True)
    whole = order(loader)
    plan.finished = 2
    plan.rewind = lambda generator: setattr(plan, "now", random_states.capture(CPU))
    assert order(list(loader)[2:]) != whole[2:]


def test_several_processes_each_leave_out_their_own():
    """accelerate gives process 1 every second batch; after two of its own, four batches are used up."""
    plan, dataset = Plan(), Counting()
    source = loader_class(DataLoader, plan)(dataset, batch_size=2, shuffle=True, generator=torch.Generator())
    shard = BatchSamplerShard(source.batch_sampler, num_processes=2, process_index=1)
    loader = loader_class(DataLoader, plan)(dataset, batch_sampler=shard)
    assert loader_generator(loader) is source.sampler.generator
    whole = order(loader)
    plan.finished = 2
    assert order(list(loader)[2:]) == whole[2:] and len(whole) == 3


def model_and_optimizer(states="device", kind="adamw8bit", steps=3, dtype=torch.bfloat16):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(64, 80), nn.LayerNorm(80), nn.Embedding(3, 5)).to(dtype)
    model[2].requires_grad_(False)
    store = build_store("device", torch.float32)
    named = list(model.named_parameters())
    optimizer = build_optimizer(kind, named, store, states, seed=7, lr=1e-2)
    optimizer.reserve_states()
    for step in range(steps):
        take_step(model, optimizer, step)
    return model, optimizer


def take_step(model, optimizer, step):
    generator = torch.Generator().manual_seed(step)
    for parameter in trained_parameters(model).values():
        parameter.grad = torch.randn(parameter.shape, generator=generator).to(parameter.dtype)
    optimizer.step()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("saved,loaded", [("device", "host"), ("host", "device")])
@pytest.mark.parametrize("kind", ["adamw8bit", "adamw"])
def test_weights_and_states_come_back_bit_by_bit(tmp_path, saved, loaded, kind, dtype):
    model, optimizer = model_and_optimizer(saved, kind, dtype=dtype)
    write_weights(tmp_path, trained_parameters(model))
    write_states(tmp_path, optimizer)
    scalars = json.loads(json.dumps(optimizer_scalars(optimizer)))
    take_step(model, optimizer, 9)
    other, its_optimizer = model_and_optimizer(loaded, kind, steps=0, dtype=dtype)
    check_weights(tmp_path, trained_parameters(other))
    read_weights(tmp_path, trained_parameters(other))
    read_states(tmp_path, its_optimizer, scalars)
    take_step(other, its_optimizer, 9)
    for mine, theirs in zip(model.parameters(), other.parameters()):
        assert torch.equal(mine, theirs)
    # Control: without the states the step is another.
    bare, bare_optimizer = model_and_optimizer(loaded, kind, steps=0, dtype=dtype)
    read_weights(tmp_path, trained_parameters(bare))
    take_step(bare, bare_optimizer, 9)
    assert not torch.equal(bare[0].weight, model[0].weight)


def test_eight_bit_states_stay_eight_bit_and_frozen_weights_stay_out(tmp_path):
    model, optimizer = model_and_optimizer()
    write_weights(tmp_path, trained_parameters(model))
    write_states(tmp_path, optimizer)
    elements = 64 * 80
    small = 80 + 80 + 80
    assert (tmp_path / "weights.safetensors").stat().st_size - 2 * (elements + small) < 1000  # the header
    states = elements * 2 + 2 * 4 * (elements // 256) + small * 8
    assert 0 < (tmp_path / "optimizer.safetensors").stat().st_size - states < 2000


def test_other_weights_are_refused_before_anything_is_changed(tmp_path):
    model, _ = model_and_optimizer(steps=0)
    write_weights(tmp_path, trained_parameters(model))
    other = nn.Sequential(nn.Linear(64, 80, bias=False), nn.LayerNorm(80), nn.Linear(2, 2))
    with pytest.raises(StateError) as error:
        check_weights(tmp_path, trained_parameters(other))
    message = str(error.value)
    assert "2 missing in the point: 2.weight, 2.bias" in message
    assert "1 not trained in this run: 0.bias" in message
    assert "3 of another shape or dtype: 0.weight (saved (80, 64) torch.bfloat16, expected (80, 64)" in message


def test_fingerprints_see_what_matters():
    records = [{"id": "a", "text": "x", "audio_codes": [[1, 2], [3, 4]] * 50}, {"id": "b", "text": "y"}]
    print_of = records_fingerprint(records)
    assert print_of == records_fingerprint(json.loads(json.dumps(records)))
    assert print_of != records_fingerprint(records[::-1]) != records_fingerprint(records[:1])
    changed = json.loads(json.dumps(records))
    changed[0]["audio_codes"][-1][1] = 5
    assert print_of != records_fingerprint(changed)
    model, _ = model_and_optimizer(steps=0)
    before = model_fingerprint(model)
    model[0].weight.data += 1  # trained: the point brings it
    assert model_fingerprint(model) == before
    model[2].weight.data += 1
    assert model_fingerprint(model) != before


@pytest.mark.parametrize("kind", ["linear", "cosine", "constant_with_warmup", "inverse_sqrt", "polynomial"])
def test_a_changed_schedule_stands_where_it_would_have_come_to(kind):
    def made(lr, steps):
        optimizer = torch.optim.SGD([nn.Parameter(torch.zeros(1))], lr=lr)
        return optimizer, get_scheduler(kind, optimizer=optimizer, num_warmup_steps=2, num_training_steps=steps)

    (first, saved), (reference, going), (resumed, moved) = made(1e-3, 10), made(3e-3, 20), made(3e-3, 20)
    groups = [dict(group) for group in resumed.param_groups]
    for optimizer, scheduler in ((first, saved), (reference, going)):
        for _ in range(5):
            optimizer.step()
            scheduler.step()
    move_schedule(moved, resumed, saved.state_dict(), groups)
    for _ in range(3):
        assert moved.get_last_lr() == going.get_last_lr() == [resumed.param_groups[0]["lr"]]
        resumed.step(), reference.step()
        moved.step(), going.step()


def test_quiet_takes_wandb_log_away_and_gives_it_back(monkeypatch):
    logged = []
    wandb = type("wandb", (), {"log": staticmethod(logged.append)})
    monkeypatch.setitem(__import__("sys").modules, "wandb", wandb)
    quiet = Quiet()
    wandb.log(1)
    quiet.begin()
    wandb.log(2)
    quiet.end()
    wandb.log(3)
    assert logged == [1, 3]


def test_the_echo_of_a_signal_is_not_a_second_one(monkeypatch):
    """torchrun passes Ctrl-C on to processes that the terminal has told already."""
    clock = [100.0]
    monkeypatch.setattr(signals.time, "monotonic", lambda: clock[0])
    second = []
    before = signal.signal(signal.SIGTERM, lambda number, frame: second.append(number))
    try:
        wish = signals.StopWish(lambda line: None)
        wish.listen()
        for later, heard in ((0.0, []), (0.5, []), (0.4, []), (0.2, [signal.SIGTERM])):
            clock[0] += later
            signal.raise_signal(signal.SIGTERM)
            assert second == heard and wish.number == signal.SIGTERM
    finally:
        wish.stop_listening()
        signal.signal(signal.SIGTERM, before)


def test_a_checksum_sees_one_bit_of_weights_states_and_steps():
    def number(change=lambda model, optimizer: None):
        model, optimizer = model_and_optimizer()
        change(model, optimizer)
        return checksum(trained_parameters(model), optimizer)

    def weight(model, optimizer):
        model[0].weight.data.view(torch.int16)[3, 5] ^= 1

    def state(model, optimizer):
        states = optimizer.states.read(model[0].weight)
        next(iter(states.values())).view(torch.uint8).reshape(-1)[7] ^= 1

    def step(model, optimizer):
        optimizer.steps[model[0].weight] += 1

    assert number() == number()
    assert len({number(), number(weight), number(state), number(step)}) == 4


def test_a_point_that_could_not_be_written_is_not_tried_again_at_every_step(monkeypatch):
    """A disk that is full takes gigabytes each time before it says so."""
    run = ResumableRun(ResumeOptions(save_minutes=1), "family", settings={}, versions={}, say=lambda line: None)
    run._model, run._objects.optimizer = model_and_optimizer(steps=0)
    run._mark = {"position": {"steps": 1}}
    run._writer._saved_time -= 61
    for written in (False, True):
        assert run._writer.is_due(1)
        monkeypatch.setattr(run._writer, "write", lambda *_, written=written: written)
        assert run._save() == written and not run._writer.is_due(2)
        run._writer._saved_time -= 61


def test_a_point_that_only_the_main_process_sees_is_refused(tmp_path):
    class Others:
        rank, count, is_main = 1, 2, False

        @staticmethod
        def of_main(value):
            return str(tmp_path / "step-3"), 7

    with pytest.raises(StateError, match=r"process 1 on .* cannot go on from .*step-3.*put --output-dir on a disk"):
        Origin(print).share(Others())
    write_point(tmp_path, {"position": {"steps": 3}, "processes": 2}, {0: {}, 1: {}}, lambda folder: None, print)
    with pytest.raises(StateError, match="its serial number is 1, and the main process's is 7"):
        Origin(print).share(Others())
