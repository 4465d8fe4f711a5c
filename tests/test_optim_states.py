"""Optimizer states: on the device or in host memory, counted in bytes, simulated at full size."""

from __future__ import annotations

import contextlib

import pytest
import torch
from test_optim_streamed import BOTH, SHAPES, give_gradients, make_parameters
from tolerances import TOLERANCES
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode

from moss_tts_patches.errors import StateError
from moss_tts_patches.memory.placement import register_host_observer
from moss_tts_patches.memory.tracker import StorageTracker
from moss_tts_patches.optim import state_store
from moss_tts_patches.optim.optimizers import AdamW, AdamW8bit

DTYPES = pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
PLACES = pytest.mark.parametrize("states", ["device", "host"])


def train(optimizer, parameters: dict[str, nn.Parameter], steps: range) -> None:
    for step in steps:
        give_gradients(parameters, step)
        optimizer.step()
        optimizer.zero_grad()


def equal(one: dict[str, nn.Parameter], other: dict[str, nn.Parameter]) -> bool:
    return all(torch.equal(one[name], other[name]) for name in SHAPES)


@BOTH
@DTYPES
@pytest.mark.parametrize("piece_elements", [1024, 2**24])
def test_host_states_give_the_same_bits(optimizer_class, dtype, piece_elements, monkeypatch):
    monkeypatch.setattr(state_store, "PIECE_ELEMENTS", piece_elements)
    results = []
    for states, seed in (("device", 3), ("host", 3), ("host", 4)):
        parameters = make_parameters(dtype)
        optimizer = optimizer_class(parameters.items(), 1e-3, seed=seed, states=states)
        train(optimizer, parameters, range(5))
        results.append((parameters, optimizer.state_dict()["state"]))
    (device, device_state), (host, host_state), (other, _) = results
    assert equal(device, host)
    for name, entry in device_state.items():
        assert all(
            torch.equal(torch.as_tensor(value), torch.as_tensor(host_state[name][key])) for key, value in entry.items()
        )
    # The control: another seed rounds differently, but only where there is rounding.
    assert equal(host, other) == (dtype == torch.float32 or optimizer_class is AdamW)


def test_two_pieces_at_most_are_on_the_device(monkeypatch):
    monkeypatch.setattr(state_store, "PIECE_ELEMENTS", 1024)
    parameters = make_parameters(torch.bfloat16)
    optimizer = AdamW8bit(parameters.items(), states="host", small_parameter_elements=0)
    largest_piece = 1024 * 2 + 2 * state_store.ALIGNMENT_BYTES
    seen = []
    update = optimizer.update

    def watched(parameter, values, gradient, states, *rest):
        assert all(state.untyped_storage().nbytes() <= largest_piece for state in states.values())
        seen.append(optimizer.states.device_bytes())
        update(parameter, values, gradient, states, *rest)

    optimizer.update = watched  # type: ignore[method-assign]
    with StorageTracker() as tracker:
        tracker.watch(parameters.values())
        give_gradients(parameters, 5)
        tracker.reset_peak()
        optimizer.reserve_states()
        optimizer.step()
        assert optimizer.states.device_bytes() == 0
        # Nothing but the arena, the weights and the tables of 4 KiB is left over; the arena counts as host memory.
        assert tracker.host_bytes == optimizer.states.host_bytes() > 20_000
    assert max(seen) <= 2 * largest_piece and len(seen) == 6 + 1 + 1 + 5
    assert max(seen) > largest_piece  # the next one was on its way


def test_nothing_stays_on_the_device_when_the_last_parameter_is_passed_over():
    parameters = make_parameters()
    optimizer = AdamW8bit(parameters.items(), states="host")
    give_gradients(parameters, 1)  # "late", the last one with elements, has none
    assert parameters["late"].grad is None
    optimizer.step()
    assert optimizer.states.device_bytes() == 0


class RecordedStream:
    """Stands in for CUDA streams, which this test does not need, and writes down what waits for what."""

    device = torch.device("cpu")

    def __init__(self, name: str, log: list[str]) -> None:
        self.name, self.log = name, log

    def record_event(self) -> str:
        self.log.append(f"{self.name}: record")
        return "event"

    def wait_event(self, event: str) -> None:
        self.log.append(f"{self.name}: wait for event")

    def wait_stream(self, other: RecordedStream) -> None:
        self.log.append(f"{self.name}: wait for {other.name}")


def test_side_stream_copies_are_ordered_with_the_update(monkeypatch):
    log: list[str] = []
    side, main = RecordedStream("side", log), RecordedStream("main", log)
    monkeypatch.setattr(torch.cuda, "stream", lambda stream: contextlib.nullcontext())
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device=None: main)
    parameters = {name: nn.Parameter(torch.zeros(8)) for name in ("first", "second")}
    optimizer = AdamW(parameters.items(), states="host")
    monkeypatch.setattr(optimizer.states, "_stream", lambda parameter: side)
    monkeypatch.setattr(optimizer, "update", lambda parameter, *_: log.append(f"update {optimizer.names[parameter]}"))
    for parameter in parameters.values():
        parameter.grad = torch.ones(8)
    optimizer.step()
    assert log == [
        "side: record",  # first on its way
        "main: wait for event",
        "side: record",  # second sent ahead, before the update that it overlaps with
        "update first",
        "side: wait for main",  # before first goes home
        "main: wait for event",
        "update second",
        "side: wait for main",
    ]


def counted_bytes(optimizer) -> int:
    storages = {}
    for parameter in optimizer.names:
        for state in optimizer.states.read(parameter).values():
            storages[state.untyped_storage().data_ptr()] = state.untyped_storage().nbytes()
    return sum(storages.values())


@PLACES
@pytest.mark.parametrize("numel", [4096, 100_000, 256 * 1000 + 1])
def test_bytes_of_an_element(states, numel):
    weight = nn.Parameter(torch.zeros(numel, dtype=torch.bfloat16))
    optimizer = AdamW8bit([("w", weight)], states=states)
    weight.grad = torch.ones_like(weight)
    optimizer.step()
    found = counted_bytes(optimizer)
    exact = 2 * numel + 2 * 4 * -(-numel // 256)
    if states == "device":
        assert found == exact == optimizer.states.device_bytes() and optimizer.states.host_bytes() == 0
    else:
        assert exact <= found <= exact * (1 + TOLERANCES["host_arena_overhead"])
        assert found == optimizer.states.host_bytes() and optimizer.states.device_bytes() == 0
    assert found / numel <= TOLERANCES["optimizer_bytes_per_element"] * (1 + TOLERANCES["host_arena_overhead"])
    assert AdamW8bit([("w", nn.Parameter(torch.zeros(4095)))]).layout_of(torch.zeros(4095))["exp_avg"].size(1) == 4


def test_host_memory_is_one_buffer_and_announced():
    seen = []
    handle = register_host_observer(lambda storage: seen.append(storage.nbytes()))
    parameters = make_parameters()
    optimizer = AdamW8bit(parameters.items(), states="host")
    assert not seen  # nothing before the first step
    train(optimizer, parameters, range(3))
    handle.remove()
    assert seen == [optimizer.states.host_bytes()]
    assert optimizer.state_dict()["state"]["table"]["exp_avg_codes"].dtype == torch.uint8


def test_host_states_refuse_a_parameter_that_comes_late():
    parameters = make_parameters()
    parameters["table"].requires_grad_(False)
    optimizer = AdamW8bit(parameters.items(), states="host")
    optimizer.step()
    parameters["table"].requires_grad_(True)
    with pytest.raises(StateError, match=r"1 parameters became trainable.*\(40, 130\).*MOSS_LOWMEM_STATES=device"):
        optimizer.step()


class MovingParameter:
    """What a store looks at of a parameter; "meta" stands in for the GPU that a CPU build of torch does not have."""

    device = torch.device("cpu")

    def numel(self) -> int:
        return 8


def test_states_loaded_before_the_model_moved_follow_it():
    parameter = MovingParameter()
    store = state_store.DeviceStates(lambda _: {"exp_avg": state_store.StateSpec(torch.float32)})
    store.write(parameter, {"exp_avg": torch.ones(8)})
    assert store.read(parameter)["exp_avg"].sum() == 8
    parameter.device = torch.device("meta")
    assert store.read(parameter)["exp_avg"].device.type == "meta"


@BOTH
@PLACES
def test_a_full_size_table_is_stepped_under_fake_tensors(optimizer_class, states):
    """The text embedding of moss_tts_local: what the planner will count, without a byte of it."""
    with FakeTensorMode(), StorageTracker() as tracker:
        table = nn.Parameter(torch.empty(151_936, 2048, dtype=torch.bfloat16))
        norm = nn.Parameter(torch.empty(2048, dtype=torch.bfloat16))
        optimizer = optimizer_class([("table", table), ("norm", norm)], states=states)
        for _ in range(2):
            table.grad, norm.grad = torch.empty_like(table), torch.empty_like(norm)
            tracker.reset_peak()
            before = tracker.live_bytes
            optimizer.step()
            extra = tracker.peak_bytes - before
        numel = table.numel() + norm.numel()
        per_element = 2 * 2 if optimizer_class is AdamW else TOLERANCES["optimizer_bytes_per_element"]
        weights = 2 * numel
        state_bytes = tracker.live_bytes - weights if states == "device" else tracker.host_bytes
        assert 2 * numel < state_bytes <= per_element * numel * 1.001
        assert extra <= 256 * 2**20 < table.numel()
        if states == "host":
            assert tracker.live_bytes <= weights + 2**16  # the code tables
        assert optimizer.steps[table] == 2
