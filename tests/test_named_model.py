"""What ``--model-path`` names, looked at before anything is read: no folder, no checkpoint, another family's."""

from __future__ import annotations

import json
import types
from pathlib import Path

import pytest

from moss_tts_patches.data.processors import stored_config
from moss_tts_patches.errors import DataError, SettingsError
from moss_tts_patches.families import FAMILIES
from moss_tts_patches.launch.families import SUPPORTED
from moss_tts_patches.runtime.named_model import check_named_model
from moss_tts_patches.session import Session
from moss_tts_patches.settings import load_settings

CONFIGS = {
    "moss_tts_local": {"n_vq": 32, "local_num_layers": 4},
    "moss_tts_delay": {"n_vq": 32},
    "moss_tts_local_v1.5": {"n_vq": 12, "gpt2_config": {}},
    "moss_tts_realtime": {"rvq": 16},
}
COMMIT = "0123456789abcdef0123456789abcdef01234567"


def write_config(folder: Path, family: str) -> Path:
    folder.mkdir(parents=True)
    (folder / "config.json").write_text(json.dumps(CONFIGS[family]), encoding="utf-8")
    return folder


@pytest.fixture
def hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty cache of a model hub that nothing can be downloaded into."""
    cache = tmp_path / "hub"
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(cache))
    monkeypatch.setattr("huggingface_hub.file_download.HF_HUB_CACHE", str(cache), raising=False)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    return cache


def cache_config(hub: Path, name: str, family: str) -> None:
    folder = hub / f"models--{name.replace('/', '--')}"
    write_config(folder / "snapshots" / COMMIT, family)
    (folder / "refs").mkdir()
    (folder / "refs/main").write_text(COMMIT, encoding="utf-8")


@pytest.mark.parametrize("stored", SUPPORTED)
@pytest.mark.parametrize("family", SUPPORTED)
def test_a_checkpoint_of_another_family_is_refused(tmp_path: Path, stored: str, family: str) -> None:
    folder = str(write_config(tmp_path / "model", stored))
    if stored == family:
        check_named_model(folder, family)
        return
    with pytest.raises(SettingsError, match=f"is a checkpoint of {stored}, .*MOSS_LOWMEM_FAMILY={stored}\\)"):
        check_named_model(folder, family)


def test_a_cached_model_of_a_hub_is_looked_at(hub: Path) -> None:
    check_named_model("owner/not-downloaded-yet", "moss_tts_local")
    cache_config(hub, "owner/a-model", "moss_tts_delay")
    check_named_model("owner/a-model", "moss_tts_delay")
    with pytest.raises(SettingsError, match="is a checkpoint of moss_tts_delay"):
        check_named_model("owner/a-model", "moss_tts_local")


@pytest.mark.parametrize(
    "name", ["/data/nope", "./nope", "~/models/nope", "a/b/c", "my model", "C:\\models\\nope", "run--1/nope", "a/nope-"]
)
def test_a_path_that_is_not_there_is_called_so(name: str) -> None:
    with pytest.raises(SettingsError, match="no such folder, and not the form of a name on a model hub"):
        check_named_model(name, "moss_tts_local")


@pytest.mark.parametrize(
    ("file", "problem"),
    [
        ("adapter_config.json", "is an adapter; .*moss-lowmem merge"),
        ("lowmem_log.jsonl", "has no config.json; .*-epoch-N"),
    ],
)
def test_a_folder_that_is_no_checkpoint_is_called_what_it_is(tmp_path: Path, file: str, problem: str) -> None:
    (tmp_path / file).write_text("{}", encoding="utf-8")
    with pytest.raises(SettingsError, match=problem):
        check_named_model(str(tmp_path), "moss_tts_local")


def test_a_run_asks_when_its_arguments_are_known(tmp_path: Path) -> None:
    folder = write_config(tmp_path / "model", "moss_tts_delay")
    arguments = types.SimpleNamespace(seed=42, mixed_precision="no", model_path=str(folder), output_dir=str(tmp_path))
    local = next(family for family in FAMILIES if family.name == "moss_tts_local")
    with pytest.raises(SettingsError, match="is a checkpoint of moss_tts_delay"):
        Session(load_settings(), local(), types.ModuleType("trainer"), []).parsed(arguments)


def test_the_config_of_a_model_named_by_its_hub_name_is_read(hub: Path) -> None:
    """moss_tts_realtime's processor holds none, and its run_train.sh names the model so."""
    cache_config(hub, "owner/realtime", "moss_tts_realtime")
    assert stored_config("owner/realtime").rvq == 16
    with pytest.raises(DataError, match="Expected a checkpoint's folder, or its name on a model hub"):
        stored_config("owner/nothing")
