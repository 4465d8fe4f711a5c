"""What an installation brings, and that the project's own commands are what the documents say."""

from __future__ import annotations

import configparser
import importlib.metadata
import re
import shutil
import subprocess
import sys
import zipfile

import pytest
from launcher import PROJECT, environment_of

import moss_tts_patches


@pytest.fixture(scope="module")
def metadata() -> configparser.ConfigParser:
    parser = configparser.ConfigParser()
    parser.read(PROJECT / "setup.cfg", encoding="utf-8")
    return parser


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> zipfile.ZipFile:
    """The package as pip builds it, from a copy: a build writes beside its sources."""
    folder = tmp_path_factory.mktemp("wheel")
    ignored = shutil.ignore_patterns("__pycache__")
    shutil.copytree(PROJECT / "moss_tts_patches", folder / "moss_tts_patches", ignore=ignored)
    for name in ("setup.cfg", "pyproject.toml", "LICENSE", "README.md"):
        shutil.copy2(PROJECT / name, folder / name)
    command = [sys.executable, "-m", "pip", "wheel", "--quiet", "--no-deps", "--no-build-isolation", "-w", "out", "."]
    subprocess.run(command, cwd=folder, env=environment_of(), check=True, timeout=120)
    (built,) = (folder / "out").glob("*.whl")
    return zipfile.ZipFile(built)


def names_in(requirements: str) -> list[str]:
    found = [re.match(r"[\w.-]+", line) for line in requirements.split("\n") if line]
    return [match[0].lower() for match in found if match]


def pins() -> dict[str, str]:
    text = re.sub(r" *#.*", "", (PROJECT / "tests" / "constraints.txt").read_text(encoding="utf-8"))
    parsed = (re.match(r"([\w.-]+)(.*)", line) for line in text.splitlines() if line)
    return {match[1].lower(): match[2] for match in parsed if match}


def test_the_wheel_is_complete(wheel: zipfile.ZipFile) -> None:
    inside = {name for name in wheel.namelist() if name.startswith("moss_tts_patches/")}
    sources = (PROJECT / "moss_tts_patches").rglob("*")
    wanted = {
        str(path.relative_to(PROJECT))
        for path in sources
        if path.is_file() and path.suffix in (".py", ".yaml", ".typed")
    }
    assert inside == wanted
    assert {"moss_tts_patches/configs/single_process.yaml", "moss_tts_patches/py.typed"} <= inside
    assert any(name.endswith("licenses/LICENSE") for name in wheel.namelist())


def test_the_wheel_names_its_hook_and_its_command(wheel: zipfile.ZipFile) -> None:
    (path,) = (name for name in wheel.namelist() if name.endswith("entry_points.txt"))
    entries = configparser.ConfigParser()
    entries.read_string(wheel.read(path).decode("utf-8"))
    assert entries["moss_tts_patches"]["argparse"] == "moss_tts_patches.bootstrap:on_argparse_import"
    assert entries["console_scripts"]["moss-lowmem"] == "moss_tts_patches.cli:main"


def test_entry_points_can_be_loaded() -> None:
    distribution = importlib.metadata.distribution("moss_tts_patches")
    assert distribution.version == moss_tts_patches.__version__
    entries = [entry for entry in distribution.entry_points if entry.group in ("moss_tts_patches", "console_scripts")]
    assert len(entries) == 2
    assert all(callable(entry.load()) for entry in entries)


def test_every_requirement_has_a_tested_version(metadata: configparser.ConfigParser) -> None:
    extras = metadata["options.extras_require"]
    wanted = set(names_in(metadata["options"]["install_requires"]))
    for name in ("qlora", "deepspeed", "test"):
        wanted |= set(names_in(extras[name]))
    # torch itself brings setuptools, and takes care of its version.
    assert wanted - pins().keys() == {"setuptools"}
    assert pins()["torch"] == "==2.13.0" and pins()["transformers"] == "==5.0.0"


def test_metadata_is_what_was_decided(metadata: configparser.ConfigParser) -> None:
    assert metadata["metadata"]["license"] == "Apache-2.0"
    assert metadata["options"]["python_requires"] == ">=3.10"
    floors = metadata["options"]["install_requires"].split()
    assert {"torch>=2.6", "transformers>=5.0", "wrapt>=2", "autowrapt>=2"} <= set(floors)
    assert {"qlora", "deepspeed", "test", "dev"} <= set(metadata["options.extras_require"])


def test_the_licence_is_there_in_full() -> None:
    text = (PROJECT / "LICENSE").read_text(encoding="utf-8")
    assert "Apache License" in text and "Version 2.0, January 2004" in text
    assert all(f"\n   {number}. " in text for number in range(1, 10)) and "END OF TERMS AND CONDITIONS" in text


def test_ci_is_the_one_command() -> None:
    lines = (PROJECT / ".ci" / "run").read_text(encoding="utf-8").splitlines()
    assert [line for line in lines if not line.startswith(("#", "set ", "cd "))] == ["bash tests/run.sh"]


def test_run_sh_checks_everything_in_order() -> None:
    text = (PROJECT / "tests" / "run.sh").read_text(encoding="utf-8")
    steps = ["venv.sh test", "ruff format --check", "ruff check", "-m mypy", '-m pytest "$@"']
    places = [text.find(step) for step in steps]
    assert -1 not in places and places == sorted(places)
    assert "set -euo pipefail" in text and text.rstrip().endswith(steps[-1])


@pytest.mark.parametrize("script", ["run_train_lowmem.sh", "tests/run.sh", "tests/venv.sh", ".ci/run"])
def test_shell_scripts_parse(script: str) -> None:
    subprocess.run(["bash", "-n", str(PROJECT / script)], check=True)
