"""The planner: short simulations equal full ones, the ladder, the choice, the cache. On our own small models."""

from __future__ import annotations

import copy
import dataclasses
import json
from unittest import mock

import pytest
import torch
from small_models import FAMILY, tiny_model
from tolerances import TOLERANCES

from moss_tts_patches.errors import EnvironmentProblem, SettingsError
from moss_tts_patches.memory import few_chunks, reserve, traces
from moss_tts_patches.memory.figures import RungFigures
from moss_tts_patches.memory.ladder import list_rungs
from moss_tts_patches.memory.methods import Shape
from moss_tts_patches.memory.plan_cache import PlanCache, user_cache_folder
from moss_tts_patches.memory.planner import assess_ladder, cheapest, choose_plan, largest_batch
from moss_tts_patches.memory.reserve import Limits, assess
from moss_tts_patches.memory.rungs import MicroBatch, Rung
from moss_tts_patches.memory.simulate import simulate_rung
from moss_tts_patches.memory.traces import Subject, Tracer
from moss_tts_patches.units import GIB

LAYERS = 5
BATCH = MicroBatch(1, 70, 60)  # 6 chunks of 11 frames, the last one shorter


@pytest.fixture(scope="module")
def subject():
    model = tiny_model()
    config = copy.deepcopy(model.config)
    config.language_config.num_hidden_layers = LAYERS
    config.language_config.layer_types = config.language_config.layer_types[:1] * LAYERS
    return Subject(FAMILY, type(model), config, BATCH)


def pinned(**values):
    return {"chunk_frames": 11, "method": "full", **values}


@pytest.fixture(scope="module", name="cache")
def cache_fixture(tmp_path_factory):
    return PlanCache(tmp_path_factory.mktemp("plans"))


@pytest.fixture(scope="module")
def tracer(subject, cache):
    return Tracer(subject, cache)


def full(subject, rung, batch=BATCH, **options):
    return simulate_rung(subject.family, subject.model_class, subject.config, batch, rung, **options)


RUNGS = [  # a sample: a full simulation of this model takes seconds too
    Rung("fused", 11),
    Rung("fused", 11, gradients="host", states="host", weights="host"),
    Rung("staged", 11, checkpointing=False, gradients="host"),
    Rung("autograd", 11, states="host"),
    Rung("staged", 11, optimizer="adamw"),
]


@pytest.mark.parametrize("rung", RUNGS, ids=lambda rung: f"{rung.name}-{rung.optimizer}")
def test_a_composed_figure_is_the_full_simulation(subject, tracer, rung):
    found, expected = tracer.figures(rung), full(subject, rung)
    assert found.peak_bytes == pytest.approx(expected.peak_bytes, rel=TOLERANCES["planner_relative"])
    assert found.host_total() == expected.host_bytes
    assert (found.matmul_flops, found.attention_flops) == (expected.matmul_flops, expected.attention_flops)


def test_the_comparison_sees_a_layer_that_is_not_counted(subject):
    """Negative control of the one above."""
    rung = Rung("staged", 11)
    tracer = Tracer(subject)
    tracer._layers = LAYERS - 1
    found = tracer.figures(rung)
    assert found.peak_bytes < full(subject, rung).peak_bytes * (1 - TOLERANCES["planner_relative"])


@pytest.mark.parametrize("schedule", ["fused", "staged"])
def test_leaving_chunks_out_changes_nothing(subject, schedule):
    rung = Rung(schedule, 11, gradients="host", states="host")
    every = full(subject, rung, step=False)
    with mock.patch.object(few_chunks, "different_chunks", wraps=few_chunks.different_chunks) as chosen:
        few = full(subject, rung, step=False, every_chunk=False)
    assert few == every
    frames, chunk_frames = chosen.call_args.args
    assert len(few_chunks.different_chunks(frames, chunk_frames)) == few_chunks.FIRST_CHUNKS + 1 < frames / chunk_frames


def test_categories_add_up_and_know_their_owners(subject):
    rung = Rung("staged", 11)
    figures = full(subject, rung, step=False)
    categories, standing = figures.categories, figures.standing
    assert categories.device_bytes == figures.peak_bytes
    assert categories.states == standing.device_states
    assert categories.gradients >= standing.gradient_bytes
    assert categories.largest_temporary <= figures.peak_bytes - categories.weights
    on_host = full(subject, dataclasses.replace(rung, gradients="host", states="host"), step=False).categories
    assert on_host.states == 0 and on_host.gradients < standing.gradient_bytes / 2


def test_the_first_step_of_a_run_needs_no_more(subject):
    """Its backward has no earlier gradients, its step has the same states: the simulated one is the second."""
    rung = Rung("staged", 11)
    second = full(subject, rung)
    with mock.patch("moss_tts_patches.memory.simulate.bring_about_second_micro_batch"):
        first = full(subject, rung)
    assert first.backward_peak_bytes < second.backward_peak_bytes
    assert first.peak_bytes <= second.peak_bytes


def test_another_number_of_layers_is_another_figure(subject):
    other = copy.deepcopy(subject.config)
    other.language_config.num_hidden_layers = 6
    other.language_config.layer_types = other.language_config.layer_types[:1] * 6
    changed = dataclasses.replace(subject, config=other)
    rung = Rung("fused", 11)
    found = Tracer(changed).figures(rung)
    assert found.peak_bytes == pytest.approx(full(changed, rung).peak_bytes, rel=TOLERANCES["planner_relative"])


# -- ladder ------------------------------------------------------------------------------------------------------------


def test_the_ladder_is_narrowed_by_what_is_pinned():
    every = list_rungs({}, has_depth=True)
    assert len({rung.name for rung in every}) == len(every)
    assert {rung.method for rung in every} == {"full", "lora", "qlora"}
    assert {rung.schedule for rung in list_rungs({}, has_depth=False)} == {"staged"}
    for name, value in (("gradients", "host"), ("schedule", "autograd"), ("checkpointing", False), ("weights", "host")):
        narrowed = list_rungs({name: value}, has_depth=True)
        assert narrowed and {getattr(rung, name) for rung in narrowed} == {value}
    assert all(rung.checkpointing for rung in every if rung.weights == "host")
    with pytest.raises(SettingsError, match="checkpointing=False"):
        list_rungs({"weights": "host", "checkpointing": False}, has_depth=True)


def test_a_rung_says_how_to_pin_itself():
    settings = Rung("fused", gradients="host", checkpointing=False).settings()
    assert settings["MOSS_LOWMEM_SCHEDULE"] == "fused" and settings["MOSS_LOWMEM_CHECKPOINTING"] == "0"
    assert Rung("fused", gradients="host", states="host").name == "full-fused-host-gradients+states"


# -- choice ------------------------------------------------------------------------------------------------------------


def limits_for(figures, **options):
    """A card on which exactly this rung has no byte left."""
    exact = assess(figures, Limits(0))
    return Limits(-exact.margin, **options)


def test_the_cheapest_that_fits_is_chosen(subject, tracer, cache):
    rungs = list_rungs(pinned(), has_depth=True)
    figures = [tracer.figures(rung) for rung in rungs]
    plenty = choose_plan(subject, Limits(GIB * 100), pinned(), cache=cache)
    assert (plenty.rung.schedule, plenty.rung.checkpointing, plenty.rung.gradients) == ("fused", False, "device")
    for found in figures:
        limits = limits_for(found)
        choice = choose_plan(subject, limits, pinned(), cache=cache)
        assert choice.assessment.fits and choice.assessment.figures.cost(1) <= found.cost(1)
        assert choice.assessment == cheapest(assess_ladder(figures, limits), 1)


def test_only_what_could_be_chosen_is_simulated(subject):
    def simulations(limits, **values):
        count = mock.Mock()
        with mock.patch.object(traces, "simulate_rung", wraps=simulate_rung) as simulated:
            choose_plan(subject, limits, pinned(**values), simulated=count)
        return [call.args[4] for call in simulated.call_args_list]

    everything = simulations(Limits(GIB * 100))
    assert {rung.gradients for rung in everything} == {"device", "host"}
    assert {rung.gradients for rung in simulations(Limits(GIB * 100), gradients="device")} == {"device"}
    assert len(everything) == 10  # 2 places of gradients x (4 of the backbone and 1 of the other schedule)


def test_gradients_in_ram_become_bfloat16_where_float32_has_no_room(subject, cache):
    values = pinned(gradients="host", states="host", weights="device", schedule="staged", checkpointing=True)
    rung = choose_plan(subject, Limits(GIB * 100), values, cache=cache).rung
    wide = Tracer(subject, cache).figures(rung)
    needed = Limits(GIB * 100).card_bytes
    room = 3 * GIB + wide.host_total() - 1
    narrow = choose_plan(subject, Limits(needed, room), values, cache=cache)
    assert narrow.rung.host_gradient_dtype == "bfloat16"
    with pytest.raises(EnvironmentProblem, match="of RAM"):
        choose_plan(subject, Limits(needed, room), {**values, "host_gradient_dtype": "float32"}, cache=cache)


def test_nothing_fits_lists_the_nearest_options(subject, tracer, cache, monkeypatch):
    monkeypatch.setattr(reserve, "IN_FLIGHT_BYTES", 0)  # beside a model of 0.8 MB it would decide alone
    figures = [tracer.figures(rung) for rung in list_rungs(pinned(), has_depth=True)]
    limits = Limits(min(limits_for(found).card_bytes for found in figures) - 1000)
    with pytest.raises(EnvironmentProblem) as stopped:
        choose_plan(subject, limits, pinned(), cache=cache, lengths=[1, 70, 70])
    message = str(stopped.value)
    assert "nothing fits" in message and "unset MOSS_LOWMEM_CHUNK_FRAMES" in message
    assert "GiB short" in message
    assert "with records of at most" in message and "(2 of 3 records would go)" in message


def test_a_method_is_simulated_once_it_is_registered(subject, cache):
    def freeze(family, model):
        for name, parameter in model.named_parameters():
            parameter.requires_grad_("lm_heads" in name)

    shapes = {"lora": Shape(freeze, "heads alone")}
    tracer = Tracer(dataclasses.replace(subject, shapes=shapes), cache)
    found = tracer.figures(Rung("staged", 11, method="lora"))
    assert found.categories.states < Tracer(subject, cache).figures(Rung("staged", 11)).categories.states
    with pytest.raises(SettingsError, match="method qlora cannot be simulated"):
        tracer.figures(Rung("staged", 11, method="qlora"))
    assert (
        "lora"
        in choose_plan(tracer.subject, limits_for(found), {"chunk_frames": 11}, methods=("full", "lora")).rung.method
    )


def test_the_largest_batch_fits_and_one_more_does_not(subject, tracer):
    rung = Rung("staged", 10)  # whole chunks: `staged` keeps the last one, whose size would change with the batch
    three = dataclasses.replace(BATCH, records=3, supervised=3 * BATCH.supervised)
    limits = limits_for(Tracer(dataclasses.replace(subject, batch=three)).figures(rung))
    limits = dataclasses.replace(limits, card_bytes=limits.card_bytes + 1000)
    assert largest_batch(tracer, assess(tracer.figures(rung), limits), limits) == 3


NARROW = {"schedule": "staged", "gradients": "host", "checkpointing": True}


# -- cache -------------------------------------------------------------------------------------------------------------


def test_figures_are_kept_by_content(subject, tmp_path):
    count = mock.Mock()
    cache = PlanCache(tmp_path / "plans")
    first = choose_plan(subject, Limits(GIB * 100), {**pinned(), **NARROW}, cache=cache, simulated=count)
    simulated = count.call_count
    assert simulated > 0
    assert choose_plan(subject, Limits(GIB * 100), {**pinned(), **NARROW}, cache=cache, simulated=count) == first
    assert count.call_count == simulated
    other = dataclasses.replace(subject, batch=MicroBatch(1, 71, 60))
    choose_plan(other, Limits(GIB * 100), {**pinned(), **NARROW}, cache=cache, simulated=count)
    assert count.call_count > simulated
    for file in cache.folder.iterdir():
        file.write_text("{")
    assert (
        choose_plan(subject, Limits(GIB * 100), {**pinned(), **NARROW}, cache=cache, simulated=count).rung == first.rung
    )


def test_a_cache_that_cannot_be_written_is_no_error(tmp_path):
    (tmp_path / "file").write_text("")
    cache = PlanCache(tmp_path / "file" / "plans")
    cache.write("key", {})
    assert cache.read("key") is None


def test_the_cache_stands_in_the_users_folder(tmp_path):
    assert user_cache_folder({}, tmp_path) == tmp_path / ".cache/moss_tts_patches/plans"
    assert user_cache_folder({"XDG_CACHE_HOME": str(tmp_path)}, tmp_path) == tmp_path / "moss_tts_patches/plans"
    assert user_cache_folder({"XDG_CACHE_HOME": "relative"}, tmp_path) == tmp_path / ".cache/moss_tts_patches/plans"


def test_figures_survive_json(tracer):
    figures = tracer.figures(Rung("fused", 11))
    assert RungFigures.from_document(json.loads(json.dumps(figures.to_document()))) == figures


def test_random_state_is_left_alone(subject):
    torch.manual_seed(1)
    expected = torch.rand(3)
    torch.manual_seed(1)
    choose_plan(subject, Limits(GIB * 100), pinned(schedule="staged", gradients="host"))
    assert torch.equal(torch.rand(3), expected)
