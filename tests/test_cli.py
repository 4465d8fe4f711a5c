"""moss-lowmem: runs a command with the layer, and changes nothing else about it."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path

import pytest
import typer
from launcher import BIN, PROJECT, environment_of, listing, make_bare_python, make_program

from moss_tts_patches import __version__, cli
from moss_tts_patches.memory.readings import is_wsl

PROGRAM = str(BIN / "moss-lowmem")
SHOW = (
    "import argparse, json, os, sys\n"
    "names = ('MOSS_LOWMEM', 'AUTOWRAPT_BOOTSTRAP')\n"
    "print(json.dumps({'arguments': sys.argv[1:], 'pid': os.getpid(),\n"
    "    'active': hasattr(argparse.ArgumentParser.parse_args, '__moss_lowmem__'),\n"
    "    **{name: os.environ.get(name) for name in names}}))\n"
)


def run(
    *arguments: str, environment: Mapping[str, str] | None = None, folder: Path | None = None
) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [PROGRAM, *arguments], env=dict(environment or environment_of()), cwd=folder, capture_output=True, text=True
    )


@pytest.mark.parametrize(
    "arguments",
    [
        ["-v", "--help", "--version", "--", "-"],
        ["--", "a b", "", "*", "$HOME", "'\""],
        ["--config_file=x", "run"],
    ],
)
def test_arguments_reach_the_command_as_they_are(arguments: list[str]) -> None:
    done = run("run", "python", "-c", SHOW, *arguments)
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)["arguments"] == arguments


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        ({}, {"MOSS_LOWMEM": "1", "AUTOWRAPT_BOOTSTRAP": "moss_tts_patches", "active": True}),
        (
            {"MOSS_LOWMEM": "1", "AUTOWRAPT_BOOTSTRAP": "none_such"},
            {"MOSS_LOWMEM": "1", "AUTOWRAPT_BOOTSTRAP": "none_such,moss_tts_patches", "active": True},
        ),
        ({"MOSS_LOWMEM": "0"}, {"MOSS_LOWMEM": "0", "AUTOWRAPT_BOOTSTRAP": None, "active": False}),
    ],
)
def test_the_command_gets_the_layer(given: dict[str, str], expected: dict[str, object]) -> None:
    shown = json.loads(run("run", "python", "-c", SHOW, environment=environment_of(**given)).stdout)
    assert {name: shown[name] for name in expected} == expected


@pytest.mark.parametrize("switch", ["0", "1"])
def test_only_without_the_layer_the_command_replaces_the_process(switch: str) -> None:
    """With it somebody has to be left who can say why the command was killed."""
    with subprocess.Popen(
        [PROGRAM, "run", "python", "-c", SHOW], env=environment_of(MOSS_LOWMEM=switch), stdout=subprocess.PIPE
    ) as process:
        output, _ = process.communicate()
    assert (json.loads(output)["pid"] == process.pid) == (switch == "0")


def test_a_kill_is_explained_with_the_layer_only() -> None:
    for switch, status in (("1", 137), ("0", -9)):
        done = run("run", "sh", "-c", "kill -9 $$", environment=environment_of(MOSS_LOWMEM=switch))
        assert done.returncode == status
        assert ("killed by the system (SIGKILL" in done.stderr) == (switch == "1")


def test_the_allocator_is_set_up_for_the_command_unless_the_user_did() -> None:
    code = "import os; print({name: value for name, value in os.environ.items() if name.endswith('ALLOC_CONF')})"
    shown = run("run", "python", "-c", code).stdout
    assert "expandable_segments:True" in shown or is_wsl()
    users = environment_of(PYTORCH_CUDA_ALLOC_CONF="max_split_size_mb:64")
    expected = "{'PYTORCH_CUDA_ALLOC_CONF': 'max_split_size_mb:64'}\n"
    assert run("run", "python", "-c", code, environment=users).stdout == expected
    assert run("run", "python", "-c", code, environment=environment_of(MOSS_LOWMEM="0")).stdout == "{}\n"


@pytest.mark.parametrize("command", [["sh", "-c", "exit 7"], ["python", "-c", "raise SystemExit(7)"]])
def test_the_status_passes_through(command: list[str]) -> None:
    assert run("run", *command).returncode == 7


def test_on_windows_the_status_passes_through_a_child(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cli.os, "name", "nt")
    with pytest.raises(typer.Exit) as ended:
        cli._replace_process("/bin/sh", ["sh", "-c", 'test "$ANSWER" = 42 && exit 5'], {"ANSWER": "42"})
    assert ended.value.exit_code == 5


@pytest.mark.parametrize(
    ("command", "variables", "status", "expected"),
    [
        (["python"], {"MOSS_LOWMEM": "yes"}, 2, "MOSS_LOWMEM='yes' is not a value"),
        (["python"], {"MOSS_LOWMEM": "2"}, 2, "MOSS_LOWMEM='2' is not a value"),
        (["python"], {"MOSS_LOWMEM": ""}, 2, "MOSS_LOWMEM='' is not a value"),
        (["python"], {"MOSS_LOWMEM_SCEDULE": "staged"}, 2, "the nearest one is MOSS_LOWMEM_SCHEDULE"),
        (["no-such-program", "-x"], {}, 127, "no-such-program: command not found"),
        ([], {}, 2, "run needs a command"),
    ],
)
def test_bad_input_is_one_line_and_runs_nothing(
    tmp_path: Path, command: list[str], variables: dict[str, str], status: int, expected: str
) -> None:
    program = ["-c", "open('written', 'w')"] if command == ["python"] else []
    done = run("run", *command, *program, environment=environment_of(**variables), folder=tmp_path)
    assert done.returncode == status
    assert done.stdout == "" and done.stderr.count("\n") == 1 and done.stderr.startswith("[lowmem] error: ")
    assert expected in done.stderr
    assert listing(tmp_path) == []


@pytest.fixture(scope="module")
def bare_python(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_bare_python(tmp_path_factory.mktemp("another python"))


@pytest.mark.parametrize("name", ["accelerate", "python3"])
def test_a_python_without_the_package_is_refused(bare_python: Path, name: str) -> None:
    done = run("run", str(bare_python / name), "-c", "print('launched')")
    assert (done.returncode, done.stdout) == (2, "")
    assert f"'{bare_python}/python3' -m pip install {PROJECT}" in done.stderr
    off = run("run", str(bare_python / name), "-c", "print('launched')", environment=environment_of(MOSS_LOWMEM="0"))
    assert (off.returncode, off.stdout) == (0, "launched\n")


def test_other_programs_are_not_checked(tmp_path: Path) -> None:
    program = make_program(tmp_path / "program", "#!/bin/sh\necho launched\n")
    assert run("run", str(program)).stdout == "launched\n"


def test_version_and_help_are_quick_to_answer() -> None:
    assert run("--version").stdout == f"moss_tts_patches {__version__}\n"
    assert "run" in run("--help").stdout
    heavy = "[name for name in ('torch', 'transformers', 'accelerate', 'pydantic') if name in sys.modules]"
    code = f"import sys; import moss_tts_patches.cli; print({heavy})"
    done = subprocess.run([sys.executable, "-c", code], env=environment_of(), capture_output=True, text=True)
    assert done.stdout == "[]\n", done.stderr
