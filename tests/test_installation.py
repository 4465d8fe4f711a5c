"""The package as a user gets it: built as sdist and wheel, installed with pip, and training from there.

A minute: an environment of its own with every dependency is what this is about.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
import tarfile
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import mini
import pytest
from launcher import PROJECT

import moss_tts_patches

VERSION = moss_tts_patches.__version__
BUILD = "from setuptools import build_meta as b; print(b.build_sdist('out'), b.build_wheel('out'), sep='\\n')"
SOURCES = ("moss_tts_patches", "setup.cfg", "pyproject.toml", "LICENSE", "README.md")


@dataclass(frozen=True)
class Installation:
    """An environment that knows nothing of this checkout."""

    programs: Path
    home: Path

    def run(self, *command: str | Path, cwd: Path | None = None, **variables: str) -> str:
        """Runs a program of the environment, elsewhere, and returns what it printed; its status must be 0."""
        done = subprocess.run(
            [str(self.programs / command[0]), *map(str, command[1:])],
            cwd=cwd or self.home,
            env=self.environment(variables),
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            timeout=300,
        )
        assert done.returncode == 0, done.stdout[-4000:]
        return done.stdout

    def environment(self, variables: Mapping[str, str]) -> dict[str, str]:
        """Without this checkout, its environment and its variables."""
        inherited = mini.clean_environment(**variables)
        inherited.pop("PYTHONPATH", None)
        inherited.pop("VIRTUAL_ENV", None)
        return {**inherited, "PATH": os.pathsep.join([str(self.programs), os.defpath])}


def build(folder: Path) -> list[str]:
    """Builds both distributions into ``folder/out`` and returns their names."""
    done = subprocess.run([sys.executable, "-c", BUILD], cwd=folder, check=True, capture_output=True, text=True)
    return re.findall(r"^moss_tts_patches-\S+$", done.stdout, flags=re.MULTILINE)


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The wheel, built from the unpacked sdist, which therefore lacks nothing."""
    folder = tmp_path_factory.mktemp("sources")
    for name in SOURCES:
        source = PROJECT / name
        if source.is_dir():
            shutil.copytree(source, folder / name, ignore=shutil.ignore_patterns("__pycache__"))
        else:
            shutil.copy2(source, folder / name)
    assert build(folder) == [f"moss_tts_patches-{VERSION}.tar.gz", f"moss_tts_patches-{VERSION}-py3-none-any.whl"]
    unpacked = tmp_path_factory.mktemp("unpacked")
    with tarfile.open(folder / "out" / f"moss_tts_patches-{VERSION}.tar.gz") as archive:
        archive.extractall(unpacked, filter="data")
    again = unpacked / f"moss_tts_patches-{VERSION}"
    return again / "out" / build(again)[1]


@pytest.fixture(scope="module")
def installed(built: Path, tmp_path_factory: pytest.TempPathFactory) -> Installation:
    folder = tmp_path_factory.mktemp("clean")
    subprocess.run([sys.executable, "-m", "venv", str(folder / "venv")], check=True)
    installation = Installation(folder / "venv" / "bin", folder)
    constraints = PROJECT / "tests" / "constraints.txt"
    torch = next(line for line in constraints.read_text().splitlines() if line.startswith("torch=="))
    # torch first and alone, as in venv.sh: then nothing asks for another build of it.
    for wanted in (torch, str(built)):
        installation.run("python", "-m", "pip", "install", "--quiet", "--constraint", constraints, wanted)
    return installation


def test_what_is_imported_is_what_was_installed(installed: Installation) -> None:
    where = installed.run("python", "-c", "import moss_tts_patches as m; print(m.__file__)").strip()
    assert Path(where).is_relative_to(installed.programs.parent)
    assert installed.run("moss-lowmem", "--version").strip() == f"moss_tts_patches {VERSION}"
    installed.run("python", "-m", "pip", "check")


def test_nothing_beyond_what_is_declared_is_needed(installed: Installation) -> None:
    """What the tests bring beside it, pytest or matplotlib, is not there to help."""
    packages = json.loads(installed.run("python", "-m", "pip", "list", "--format", "json"))
    assert not {"pytest", "matplotlib", "bitsandbytes", "deepspeed"} & {package["name"] for package in packages}
    help_text = installed.run("moss-lowmem", "--help")
    for command in ("run", "plan", "doctor", "check-data", "configs", "inspect", "merge", "report"):
        assert f" {command} " in help_text
    assert "zero2-offload" in installed.run("moss-lowmem", "configs")


def test_it_trains_from_there(installed: Installation, tmp_path: Path) -> None:
    trainer = tmp_path / "mini_moss_tts"
    shutil.copytree(mini.MINI, trainer, ignore=shutil.ignore_patterns("__pycache__"))
    inputs = mini.make_mini_inputs(tmp_path / "inputs", records=8)
    script = trainer / "moss_tts_local" / "finetuning" / "sft.py"

    def train(*start: str | Path, output: str, **variables: str) -> str:
        options = mini.command_line(inputs, tmp_path / output)
        return installed.run(*start, script, *options, cwd=trainer, **variables)

    launch = ("accelerate", "launch", "--config_file", trainer / "one_process.yaml")
    ours = train("moss-lowmem", "run", *launch, output="ours", MOSS_LOWMEM_OPTIMIZER="adamw")
    plain = train("python", output="plain")
    assert f"[lowmem] moss_tts_patches={VERSION} " in ours and "[lowmem]" not in plain
    losses = [[step.loss for step in mini.read_steps(text)] for text in (ours, plain)]
    assert len(losses[0]) == 2 and losses[0] == pytest.approx(losses[1], abs=1e-4)
    assert (tmp_path / "ours" / "checkpoint-epoch-0" / "model.safetensors").exists()
