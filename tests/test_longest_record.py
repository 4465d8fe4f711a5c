"""MOSS_LOWMEM_MAX_POSITIONS=auto: the longest record that any allowed plan has room for, and nothing shorter goes."""

from __future__ import annotations

import json
import types
from pathlib import Path

import pytest
import torch
from small_models import FAMILY, tiny_model
from test_data_check import SPEECH, speech, upstream_loader, write

from moss_tts_patches.data.check import UpperBounds
from moss_tts_patches.data.install import DataOptions
from moss_tts_patches.engines import TrainingEngine
from moss_tts_patches.errors import DataError, EnvironmentProblem, SettingsError
from moss_tts_patches.memory import reserve
from moss_tts_patches.memory.ladder import list_rungs
from moss_tts_patches.memory.longest_record import _search, longest_that_fits
from moss_tts_patches.memory.plan_cache import PlanCache
from moss_tts_patches.memory.planner import choose_plan
from moss_tts_patches.memory.reserve import Limits, assess
from moss_tts_patches.memory.rungs import MicroBatch
from moss_tts_patches.memory.traces import Subject, Tracer
from moss_tts_patches.runtime import training_data
from moss_tts_patches.runtime.decisions import Decisions
from moss_tts_patches.runtime.training_data import TrainingData
from moss_tts_patches.settings import Settings, load_settings

LENGTHS = [40, 52, 52, 64, 76, 130]
# Two rungs to choose from, by where gradients stand: each length costs simulations.
PINNED = {"chunk_frames": 11, "schedule": "staged", "checkpointing": True, "states": "device", "weights": "device"}


def shape_of(longest: int) -> MicroBatch:
    return MicroBatch(1, longest, round(0.8 * longest))


@pytest.fixture(scope="module")
def subject() -> Subject:
    model = tiny_model()
    return Subject(FAMILY, type(model), model.config, shape_of(1))


@pytest.fixture(scope="module")
def cache(tmp_path_factory: pytest.TempPathFactory) -> PlanCache:
    return PlanCache(tmp_path_factory.mktemp("plans"))


@pytest.fixture(autouse=True)
def no_allowance_for_copies(monkeypatch: pytest.MonkeyPatch) -> None:
    """Beside a model of 0.8 MB the 256 MiB under way to the host would decide alone."""
    monkeypatch.setattr(reserve, "IN_FLIGHT_BYTES", 0)


def at(subject: Subject, cache: PlanCache, length: int) -> Tracer:
    return Tracer(Subject(subject.family, subject.model_class, subject.config, shape_of(length)), cache)


def least_card(subject: Subject, cache: PlanCache, length: int) -> float:
    """Bytes of the smallest card on which any rung trains a record of that length."""
    rungs = list_rungs(PINNED, has_depth=True, methods=("full",))
    return min(-assess(at(subject, cache, length).figures(rung), Limits(0)).margin for rung in rungs)


def find(subject: Subject, cache: PlanCache, card: float, **limits: float):
    return longest_that_fits(subject, Limits(card, **limits), PINNED, lengths=LENGTHS, shape_of=shape_of, cache=cache)


@pytest.mark.parametrize("length", [40, 76])
def test_the_longest_fits_and_the_next_one_does_not(subject, cache, length):
    card = least_card(subject, cache, length) + 1
    found = find(subject, cache, card)
    assert found.positions == length
    # The planner itself agrees, on this record and on the next longer one.
    for wanted, fits in ((length, True), (LENGTHS[LENGTHS.index(length) + 1], False)):
        tracer = at(subject, cache, wanted)
        if fits:
            assert choose_plan(tracer.subject, Limits(card), PINNED, cache=cache).assessment.fits
        else:
            with pytest.raises(EnvironmentProblem, match="nothing fits"):
                choose_plan(tracer.subject, Limits(card), PINNED, cache=cache)


def test_nothing_goes_where_everything_fits(subject, cache):
    assert find(subject, cache, least_card(subject, cache, 130) + 1) is None


def test_where_nothing_fits_the_planner_says_what_would(subject, cache):
    with pytest.raises(EnvironmentProblem, match=r"nothing fits .* with 1 x 40 positions"):
        find(subject, cache, least_card(subject, cache, 40) - 1000)


def test_a_small_host_sets_the_limit_too(subject, cache):
    """Gradients in host memory would allow longer records, and have no room there."""
    card = least_card(subject, cache, 76) + 1
    roomy = find(subject, cache, card)
    assert roomy.positions == 76 and roomy.rung.gradients == "host"
    tracer = at(subject, cache, 76)
    device = [r for r in list_rungs(PINNED, has_depth=True, methods=("full",)) if r.gradients == "device"]
    needed = max(reserve.host_needed(tracer.figures(rung)) for rung in device)
    with pytest.raises(EnvironmentProblem):
        find(subject, cache, card, host_bytes=needed)
    wider = min(-assess(at(subject, cache, 76).figures(rung), Limits(0)).margin for rung in device) + 1
    assert find(subject, cache, wider, host_bytes=needed).positions == 76
    assert find(subject, cache, wider) is None  # on a host with room the longest fits this card


def test_the_search_asks_at_few_lengths():
    """2000 lengths, a limit anywhere, bytes with a part that grows with the square: a bisection would need 11."""
    ordered = list(range(100, 6100, 3))

    def bytes_of(length: int) -> float:
        return 1000.0 * length + 0.02 * length**2

    for limit in (100, 101, 1234, 4000, 6096):
        asked: list[int] = []

        def margin_at(index: int, limit: int = limit, asked: list[int] = asked) -> float:
            asked.append(index)
            return bytes_of(limit) - bytes_of(ordered[index])

        known = {index: bytes_of(limit) - bytes_of(ordered[index]) for index in (0, len(ordered) - 1)}
        found = _search(ordered, known, margin_at)
        assert ordered[found] <= limit < ordered[found + 1]
        assert len(asked) <= 5, (limit, asked)


# -- the records ------------------------------------------------------------------------------------------------------


@pytest.fixture
def load(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """A function that reads three records; the planner's answers are given, one after the other."""
    records = [speech(id=str(frames), audio_codes=[[1, 2, 3]] * frames) for frames in (30, 10, 20)]
    path = write(tmp_path / "a.jsonl", *records)

    def run(*answers: int | None, exact: bool = True, max_positions: int | None = None) -> TrainingData:
        counter = UpperBounds(SPEECH)
        counter.exact = exact
        monkeypatch.setattr(training_data, "counting", lambda *_: (SPEECH, counter, None))
        data = TrainingData(DataOptions("stop", max_positions), None, lambda line: None)
        remaining = iter(answers)
        data.load(
            upstream_loader,
            {},
            types.SimpleNamespace(seed=42),
            spec=str(path),
            processes=1,
            rank=0,
            output_folder=tmp_path / "out",
            find_limit=(lambda checked: next(remaining)) if answers else None,
        )
        assert not list(remaining)
        return data

    return run


def skipped(tmp_path: Path) -> list[dict]:
    path = tmp_path / "out" / "skipped_records.jsonl"
    return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []


def test_what_goes_is_what_goes_with_the_number(load, tmp_path):
    every = load(None)
    longest, shortest, middle = every.checked.report.positions
    assert every.most_positions is None and not skipped(tmp_path)
    found = load(middle, None)
    report, listed = found.checked.report, skipped(tmp_path)
    assert [entry["id"] for entry in listed] == ["30"] and found.most_positions == middle
    assert [record["id"] for record in found.checked.loaded[1]] == ["10", "20"]
    named = load(max_positions=middle)
    assert named.checked.report == report and named.checked.loaded == found.checked.loaded
    assert skipped(tmp_path) == listed
    # Where what is left has more labels to a position, the planner is asked again.
    assert [record["id"] for record in load(middle, shortest, None).checked.loaded[1]] == ["10"]
    assert [str(found.checked.report.place(index)).split(":")[-1] for index in (0, 1)] == ["2", "3"]
    assert longest > middle > shortest


def test_upper_bounds_leave_nothing_out(load):
    with pytest.raises(DataError, match="MAX_POSITIONS=auto needs exact positions"):
        load(None, exact=False)


def decisions(**settings: object) -> Decisions:
    made = Decisions(Settings(max_positions="auto", **settings), FAMILY, lambda line: None)
    made.engine_known(TrainingEngine(None))
    return made


def test_without_a_card_there_is_no_limit_to_find():
    accelerator = types.SimpleNamespace(device=torch.device("cpu"))
    with pytest.raises(SettingsError, match=r"no card whose memory .* Set a number, or .*MOSS_LOWMEM_VRAM"):
        decisions().longest_record(None, None, accelerator, None)
    several = decisions(vram=8)
    several._parallel = types.SimpleNamespace(autograd_reason="it averages", title="DDP")
    with pytest.raises(SettingsError, match="the planner knows one process, and this training runs under DDP"):
        several.longest_record(None, None, accelerator, None)


def test_the_planner_must_not_be_off(monkeypatch):
    monkeypatch.setenv("MOSS_LOWMEM_MAX_POSITIONS", "auto")
    assert load_settings().max_positions == "auto" and load_settings().most_positions is None
    monkeypatch.setenv("MOSS_LOWMEM_PLAN", "off")
    with pytest.raises(SettingsError, match="MAX_POSITIONS is auto, but MOSS_LOWMEM_PLAN is off"):
        load_settings()
    monkeypatch.setenv("MOSS_LOWMEM_MAX_POSITIONS", "700")
    assert load_settings().most_positions == 700
    monkeypatch.setenv("MOSS_LOWMEM_MAX_POSITIONS", "0")
    with pytest.raises(SettingsError, match="greater than or equal to 1"):
        load_settings()
