"""Every variable is checked before anything happens."""

from __future__ import annotations

import pytest

from moss_tts_patches.errors import SettingsError
from moss_tts_patches.settings import CORRECTIONS, load_settings, parse_switch


def test_defaults(monkeypatch):
    settings = load_settings()
    assert (settings.schedule, settings.chunk_frames, settings.optimizer) == ("staged", 32, "adamw8bit")
    assert (settings.gradients, settings.states) == ("auto", "auto")
    assert settings.corrections == tuple(CORRECTIONS)
    assert settings.checkpoints_always


@pytest.mark.parametrize(
    "name,value,expected",
    [
        ("MOSS_LOWMEM_SCHEDULE", "fast", "'fused', 'staged' or 'autograd'"),
        ("MOSS_LOWMEM_SCHEDULE", "", "'fused', 'staged' or 'autograd'"),
        ("MOSS_LOWMEM_CHUNK_FRAMES", "0", "greater than or equal to 1"),
        ("MOSS_LOWMEM_CHUNK_FRAMES", "many", "integer"),
        ("MOSS_LOWMEM_GRADIENTS", "cpu", "'auto', 'device' or 'host'"),
        ("MOSS_LOWMEM_CORRECTIONS", "everything", "expected all, none, or some of"),
        ("MOSS_LOWMEM_CORRECTIONS", "", "expected all, none, or some of"),
        ("MOSS_LOWMEM_CHECKPOINTING", "yes", "'0' or '1'"),
    ],
)
def test_wrong_values_say_what_is_right(monkeypatch, name, value, expected):
    monkeypatch.setenv(name, value)
    with pytest.raises(SettingsError) as caught:
        load_settings()
    message = str(caught.value)
    assert f"{name}={value!r}" in message
    assert expected in message
    assert "\n" not in message


@pytest.mark.parametrize(
    "name,nearest",
    [
        ("MOSS_LOWMEM_SHEDULE", "MOSS_LOWMEM_SCHEDULE"),
        ("MOSS_LOWMEM_CHUNK", "MOSS_LOWMEM_CHUNK_FRAMES"),
        ("MOSS_LOWMEM_CHUNKFRAMES", "MOSS_LOWMEM_CHUNK_FRAMES"),
        ("MOSS_LOWMEM_OPTIMISER", "MOSS_LOWMEM_OPTIMIZER"),
    ],
)
def test_unknown_names_name_the_nearest(monkeypatch, name, nearest):
    monkeypatch.setenv(name, "1")
    with pytest.raises(SettingsError, match=f"{name} is not a setting; the nearest one is {nearest}"):
        load_settings()


@pytest.mark.parametrize("text,names", [("none", ()), ("all", tuple(CORRECTIONS)), (" empty_channel_loss ,", None)])
def test_corrections(monkeypatch, text, names):
    monkeypatch.setenv("MOSS_LOWMEM_CORRECTIONS", text)
    expected = ("empty_channel_loss",) if names is None else names
    settings = load_settings()
    assert settings.corrections == expected
    assert settings.corrects("empty_channel_loss") == ("empty_channel_loss" in expected)
    with pytest.raises(KeyError):
        settings.corrects("no_such_correction")


def test_variables_of_the_launcher_are_known(monkeypatch):
    monkeypatch.setenv("MOSS_LOWMEM_FAMILY", "moss_tts_local")
    monkeypatch.setenv("MOSS_LOWMEM_ENGINE", "keep")
    load_settings()


@pytest.mark.parametrize("value", ["yes", "2", "", "true", "01"])
def test_the_switch_takes_0_and_1_only(value):
    with pytest.raises(SettingsError, match="use 1 to switch the layer on"):
        parse_switch({"MOSS_LOWMEM": value})


def test_the_switch():
    assert parse_switch({"MOSS_LOWMEM": "1"})
    assert not parse_switch({"MOSS_LOWMEM": "0"})
    assert not parse_switch({})
