"""The questions that the launcher asks before a training: Python, families, engine, deepspeed."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from launcher import ENGINE_YAML, PROJECT, environment_of, make_gpus, make_package, make_program

from moss_tts_patches.errors import EnvironmentProblem, SettingsError
from moss_tts_patches.launch import configs, engine
from moss_tts_patches.launch.engine import SINGLE_PROCESS, choose_engine, read_config, visible_gpus
from moss_tts_patches.launch.families import SUPPORTED, family_problem
from moss_tts_patches.launch.interpreter import activating_environment, problem_with, python_of

# -- which Python -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("#!{bin}/python3.11\nimport sys\n", "{bin}/python3.11"),
        ("#!{bin}/python3.11 -sE\n", "{bin}/python3.11"),
        ("#!/usr/bin/env python3.11\n", "{bin}/python3.11"),
        ("#!/usr/bin/env -S python3.11 -I\n", "{bin}/python3.11"),
        ("#!/usr/bin/env -S A=1 python3.11\n", "{bin}/python3.11"),
        ("#!/bin/sh\n'''exec' \"{bin}/python3.11\" \"$0\" \"$@\"\n' '''\n", "{bin}/python3.11"),
        ("#!/bin/sh\n'''exec' {bin}/python3.11 \"$0\" \"$@\"\n' '''\n", None),  # unquoted: the shell splits it, too
        ("#!/bin/sh\nexec pyenv exec accelerate\n", None),
        ("#!/bin/sh\n'''exec' \"{bin}/gone/python3\" \"$0\"\n", None),
        ("#!/bin/sh\nit's unclosed\n", None),
        ("#!/bin/sh", None),
        ("#!/usr/bin/env bash\n", None),
        ("#!/usr/bin/perl\n", None),
        ("#!", None),
        ("\x7fELF\x00\x01", None),
        ("", None),
    ],
)
def test_the_python_of_a_script(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, text: str, expected: str | None
) -> None:
    programs = tmp_path / ("b" if text.startswith("#!{bin}") else "b in")  # a shebang cannot have a space
    make_program(programs / "python3.11", "#!/bin/sh\n")
    monkeypatch.setenv("PATH", f"{programs}:/usr/bin:/bin")
    script = make_program(tmp_path / "scripts" / "tool", text.replace("{bin}", str(programs)))
    assert python_of(str(script)) == (expected and expected.replace("{bin}", str(programs)))


@pytest.mark.parametrize("name", ["python", "python3", "python3.12", "Python.exe"])
def test_a_python_is_its_own(tmp_path: Path, name: str) -> None:
    program = make_program(tmp_path / name, "#!/bin/sh\n")
    assert python_of(str(program)) == str(program)


@pytest.mark.parametrize("name", ["accelerate", "accelerate.exe"])
def test_accelerate_may_have_its_python_beside_it(tmp_path: Path, name: str) -> None:
    program = make_program(tmp_path / "bin" / name, "MZ\x00 a launcher")
    assert python_of(str(program)) is None
    make_program(tmp_path / "bin" / "python", "#!/bin/sh\n")
    assert python_of(str(program)) == str(tmp_path / "bin" / "python")
    linked = tmp_path / name
    linked.symlink_to(program)
    assert python_of(str(linked)) == str(tmp_path / "bin" / "python")


def test_the_layer_reaches_this_python() -> None:
    assert problem_with(sys.executable, environment_of()) is None
    assert problem_with(sys.executable, environment_of(MOSS_LOWMEM="0")) is None  # what would happen with it on


@pytest.mark.parametrize(
    "before", [{}, {"AUTOWRAPT_BOOTSTRAP": " a, moss_tts_patches "}, {"MOSS_LOWMEM": "0", "X": "y"}]
)
def test_the_environment_that_activates(before: dict[str, str]) -> None:
    found = activating_environment(before)
    assert found["AUTOWRAPT_BOOTSTRAP"].split(",").count("moss_tts_patches") == 1
    assert found["MOSS_LOWMEM"] == before.get("MOSS_LOWMEM", "1")
    assert {**found, "MOSS_LOWMEM": "", "AUTOWRAPT_BOOTSTRAP": ""} == {
        **before,
        "MOSS_LOWMEM": "",
        "AUTOWRAPT_BOOTSTRAP": "",
    }


def test_the_search_for_a_python_needs_no_package() -> None:
    """Any Python may run it, by its path: it must import the standard library alone."""
    program = PROJECT / "moss_tts_patches" / "launch" / "interpreter.py"
    command = [sys.executable, "-I", "-S", str(program)]
    done = subprocess.run(command, env=environment_of(), capture_output=True, text=True)
    assert (done.returncode, done.stderr) == (0, "")
    assert Path(done.stdout.strip()).parent == Path(sys.executable).parent


# -- families ---------------------------------------------------------------------------------------------------------


def test_the_launcher_knows_the_families_of_the_layer() -> None:
    from moss_tts_patches.families import FAMILIES

    assert tuple(family.name for family in FAMILIES) == SUPPORTED


def test_only_supported_families_pass() -> None:
    assert all(family_problem(name) is None for name in SUPPORTED)
    assert "the nearest one is moss_tts_delay" in (family_problem("moss_tts_dealy") or "")


@pytest.mark.upstream
def test_the_families_are_upstreams(upstream_repo: Path) -> None:
    found = {path.parents[1].name for path in upstream_repo.glob("moss_tts_*/finetuning/sft.py")}
    assert found == set(SUPPORTED)


# -- the engine -------------------------------------------------------------------------------------------------------


def config(folder: Path, kind: str = "DEEPSPEED", processes: int | str = 8, machines: int = 1) -> str:
    path = folder / "engine.yaml"
    path.write_text(ENGINE_YAML.format(kind=kind, processes=processes, machines=machines), encoding="utf-8")
    return str(path)


def must_not_count() -> int:
    raise AssertionError("the number of GPUs does not matter here, and counting them may take seconds")


@pytest.mark.parametrize("gpus", [0, 1])
@pytest.mark.parametrize(
    ("kind", "processes", "title"),
    [("DEEPSPEED", 8, "ZeRO-3"), ("DEEPSPEED", 1, "ZeRO-3"), ("FSDP", 4, "FSDP"), ("MULTI_GPU", 2, "DDP")],
)
def test_one_gpu_trains_in_one_plain_process(tmp_path: Path, gpus: int, kind: str, processes: int, title: str) -> None:
    choice = choose_engine("auto", config(tmp_path, kind, processes), lambda: gpus)
    assert choice.config_file == str(SINGLE_PROCESS)
    assert title in choice.line and f"visible_gpus={gpus}" in choice.line and "MOSS_LOWMEM_ENGINE=keep" in choice.line


@pytest.mark.parametrize(("kind", "processes"), [('"NO"', 1), ("NO", 1), ('"NO"', "null")])
def test_a_config_for_one_plain_process_stays(tmp_path: Path, kind: str, processes: int | str) -> None:
    path = config(tmp_path, kind, processes)
    assert choose_engine("auto", path, must_not_count).config_file == path


@pytest.mark.parametrize("path", ["", "no/such/file.yaml"])
def test_keep_keeps_anything(path: str) -> None:
    assert choose_engine("keep", path, must_not_count).config_file == path


def test_without_a_config_a_default_of_the_user_does_not_count() -> None:
    assert choose_engine("auto", "", must_not_count).config_file == str(SINGLE_PROCESS)


def test_accelerate_reads_our_config_as_one_plain_process(tmp_path: Path) -> None:
    """Also where the user has a default config for several processes."""
    home = tmp_path / "accelerate"
    home.mkdir()
    (home / "default_config.yaml").write_text(ENGINE_YAML.format(kind="MULTI_CPU", machines=1, processes=2))
    script = tmp_path / "script.py"
    script.write_text(
        "import json, os\nfrom accelerate import PartialState\nstate = PartialState()\n"
        "precision = os.environ['ACCELERATE_MIXED_PRECISION']\n"
        "print(json.dumps([state.num_processes, str(state.distributed_type), precision]))"
    )
    command = [sys.executable, "-m", "accelerate.commands.launch", "--config_file", str(SINGLE_PROCESS), str(script)]
    environment = environment_of(HF_HOME=str(tmp_path), HF_HUB_OFFLINE="1")
    done = subprocess.run(command, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout.splitlines()[-1]) == [1, "DistributedType.NO", "no"]
    assert "had defaults used instead" not in done.stderr


@pytest.mark.parametrize(("gpus", "machines", "processes"), [(8, 1, 8), (1, 2, 2), (4, 1, "null"), (0, 2, 16)])
def test_several_processes_on_several_gpus_train_with_the_layer(
    tmp_path: Path, gpus: int, machines: int, processes: int | str
) -> None:
    path = config(tmp_path, "MULTI_GPU", processes, machines)
    choice = choose_engine("auto", path, lambda: gpus)
    assert choice.config_file == path
    assert choice.line.startswith("engine=DDP ")


def test_more_processes_than_gpus_are_refused(tmp_path: Path) -> None:
    with pytest.raises(EnvironmentProblem, match=r"asks for 8 processes \(DDP\), 2 GPUs are visible.*moss-lowmem"):
        choose_engine("auto", config(tmp_path, "MULTI_GPU", 8), lambda: 2)


# -- ready configs ----------------------------------------------------------------------------------------------------

READY = ["ddp", "fsdp", "zero2", "zero2-offload", "zero3", "zero3-offload"]


def test_there_is_a_config_for_every_engine() -> None:
    assert configs.config_names() == READY
    assert all(len(configs.describe_config(name)) > 40 for name in READY)


@pytest.mark.parametrize("name", READY)
def test_accelerate_reads_a_ready_config(tmp_path: Path, name: str) -> None:
    """What accelerate's launcher makes of it, up to the processes that it would start."""
    path = tmp_path / "config.yaml"
    path.write_text(configs.config_text(name, 3), encoding="utf-8")
    code = (
        "import json, sys\nfrom accelerate.commands import launch\n"
        "args = launch.launch_command_parser().parse_args(['--config_file', sys.argv[1], 'x.py'])\n"
        "args, defaults, _ = launch._validate_launch_command(args)\n"
        "names = ['num_processes', 'use_deepspeed', 'use_fsdp', 'multi_gpu', 'zero_stage', 'offload_optimizer_device', "
        "'offload_param_device', 'gradient_accumulation_steps', 'gradient_clipping', 'zero3_save_16bit_model']\n"
        "print(json.dumps({name: getattr(args, name) for name in names}))\n"
    )
    done = subprocess.run([sys.executable, "-c", code, str(path)], env=environment_of(), capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout.splitlines()[-1])
    zero = int(name[4]) if name.startswith("zero") else None
    assert found["num_processes"] == 3
    assert (found["use_deepspeed"], found["use_fsdp"], found["multi_gpu"]) == (
        bool(zero),
        name == "fsdp",
        name == "ddp",
    )
    if zero:
        assert found["zero_stage"] == zero
        assert found["offload_optimizer_device"] == ("cpu" if name.endswith("offload") else None)
        assert found["offload_param_device"] == ("cpu" if name == "zero3-offload" else None)
        assert found["zero3_save_16bit_model"] is (True if zero == 3 else None)
    # Those of the trainer's own options count.
    assert found["gradient_accumulation_steps"] is found["gradient_clipping"] is None


@pytest.mark.parametrize("gpus", [2, 8])
def test_a_ready_config_takes_all_gpus(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, gpus: int) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    choice = choose_engine("auto", "lowmem:zero2-offload", lambda: gpus)
    found = read_config(choice.config_file)
    assert (found.title, found.processes, found.machines) == ("ZeRO-2", gpus, 1)
    assert choice.line == f"engine=ZeRO-2 accelerate_config={choice.config_file} processes={gpus}"


def test_a_ready_config_on_one_gpu_is_one_plain_process(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    choice = choose_engine("auto", "lowmem:zero3", lambda: 1)
    assert choice.config_file == str(SINGLE_PROCESS) and "instead_of=lowmem:zero3" in choice.line
    assert not list(tmp_path.iterdir())
    assert read_config(choose_engine("keep", "lowmem:zero3", lambda: 1).config_file).processes == 1


def test_an_unknown_ready_config_names_the_nearest() -> None:
    with pytest.raises(SettingsError, match="lowmem:zero4 is not a config; the nearest one is lowmem:zero"):
        choose_engine("auto", "lowmem:zero4", must_not_count)


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("a: [", "is not YAML"),
        ("- 1\n", "no distributed_type"),
        ("", "no distributed_type"),
        ("distributed_type: FSDP\nnum_processes: many\n", "expected a whole number, found 'many'"),
    ],
)
def test_what_is_no_config_is_refused(tmp_path: Path, text: str, expected: str) -> None:
    path = tmp_path / "config.yaml"
    path.write_text(text, encoding="utf-8")
    with pytest.raises(EnvironmentProblem, match=expected) as caught:
        read_config(str(path))
    assert "\n" not in str(caught.value)


def test_other_engines_than_auto_and_keep_are_refused() -> None:
    with pytest.raises(SettingsError, match="use auto or keep"):
        choose_engine("", "", must_not_count)


@pytest.mark.parametrize(
    ("named", "expected"),
    [
        (None, 2),
        ("0", 1),
        ("1,0", 2),
        ("0, 1, 2, 3", 2),
        ("7", 0),
        ("", 0),
        ("-1", 0),
        ("0,-1,1", 1),
        ("GPU-abc,MIG-def", 2),
        ("NoDevFiles", 1),
    ],
)
def test_visible_gpus(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, named: str | None, expected: int) -> None:
    make_gpus(tmp_path, 2)
    monkeypatch.setenv("PATH", f"{tmp_path}:/usr/bin:/bin")
    environment = {} if named is None else {"CUDA_VISIBLE_DEVICES": named}
    assert visible_gpus(environment) == expected


@pytest.mark.parametrize("program", [None, "#!/bin/sh\nexit 9\n"])
def test_torch_counts_where_nvidia_smi_does_not(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, program: str | None
) -> None:
    if program is not None:
        make_program(tmp_path / "nvidia-smi", program)
    monkeypatch.setenv("PATH", f"{tmp_path}:/bin" if program else str(tmp_path))
    monkeypatch.setattr(engine, "_torch_gpus", lambda: 5)
    assert visible_gpus({}) == 5
    assert visible_gpus({"CUDA_VISIBLE_DEVICES": ""}) == 0


# -- deepspeed --------------------------------------------------------------------------------------------------------

ASK_DEEPSPEED = "from moss_tts_patches.launch.deepspeed import broken_deepspeed; print(broken_deepspeed())"


def ask_deepspeed(packages: Path, **variables: str) -> str:
    environment = {**os.environ, "PYTHONPATH": str(packages), **variables}
    return subprocess.run(
        [sys.executable, "-c", ASK_DEEPSPEED], env=environment, check=True, capture_output=True, text=True
    ).stdout.strip()


@pytest.mark.parametrize("code", ["raise OSError('no nvcc\\nsecond line')", "import no_such_module", "1 / 0"])
def test_a_deepspeed_that_fails_is_described_in_one_line(tmp_path: Path, code: str) -> None:
    message = ask_deepspeed(make_package(tmp_path, "deepspeed", code), CUDA_HOME="/wrong")
    assert "\n" not in message
    assert "deepspeed 9.9 is installed but cannot be imported" in message and "CUDA_HOME is /wrong" in message
    assert f"{sys.executable} -m pip uninstall -y deepspeed" in message


def test_a_sound_deepspeed_is_none_of_our_business(tmp_path: Path) -> None:
    assert ask_deepspeed(make_package(tmp_path, "deepspeed", "")) == "None"


def test_a_folder_called_deepspeed_is_not_a_package(tmp_path: Path) -> None:
    (tmp_path / "deepspeed").mkdir()
    (tmp_path / "deepspeed" / "__init__.py").write_text("raise OSError")
    assert ask_deepspeed(tmp_path) == "None"
