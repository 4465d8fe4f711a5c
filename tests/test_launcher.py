"""run_train_lowmem.sh on a stand-in checkout: what it hands to the official script, and what it refuses."""

from __future__ import annotations

import itertools
import re
import sys
from pathlib import Path

import pytest
from launcher import (
    BIN,
    ENGINE_YAML,
    PROJECT,
    environment_of,
    launch,
    listing,
    make_bare_python,
    make_checkout,
    make_gpus,
    make_package,
    make_program,
)

from moss_tts_patches.launch.engine import SINGLE_PROCESS
from moss_tts_patches.launch.interpreter import activating_environment

LOG_LINE = re.compile(r"^\[\d{4}-\d\d-\d\d \d\d:\d\d:\d\d\] \[lowmem\] \w+=\S", re.MULTILINE)


@pytest.fixture
def checkout(tmp_path: Path) -> Path:
    return make_checkout(tmp_path / "somewhere" / "MOSS TTS")


@pytest.fixture
def user(tmp_path: Path) -> Path:
    """Where the user stands: not in the checkout, and with a space."""
    folder = tmp_path / "my data"
    folder.mkdir()
    return folder


# -- handing over -----------------------------------------------------------------------------------------------------


def test_the_official_script_gets_the_layer(checkout: Path) -> None:
    done = launch(checkout, environment_of(TRAIN_EXTRA_ARGS_STR="--num-epochs 1  --seed 3"))
    assert done.status == 0, done.stderr
    assert done.given["MOSS_LOWMEM"] == "1"
    assert done.given["AUTOWRAPT_BOOTSTRAP"] == "moss_tts_patches"
    assert done.given["ACCELERATE_CONFIG_FILE"] == str(SINGLE_PROCESS)
    assert done.given["PWD"] == str(checkout)
    assert done.given["TRAIN_EXTRA_ARGS_STR"] == "--num-epochs 1  --seed 3"
    assert len(LOG_LINE.findall(done.stdout)) == 2
    assert done.stderr == ""


def test_status_of_the_official_script_passes_through(checkout: Path) -> None:
    assert launch(checkout, environment_of(EXIT_STATUS="7")).status == 7


@pytest.mark.parametrize("switch", ["0", "1"])
def test_a_killed_training_is_explained(checkout: Path, switch: str) -> None:
    script = checkout / "moss_tts_local" / "finetuning" / "run_train.sh"
    script.write_text("kill -9 $$\n")
    done = launch(checkout, environment_of(MOSS_LOWMEM=switch))
    assert done.status == (137 if switch == "1" else -9)
    assert ("[lowmem] The command was killed by the system (SIGKILL" in done.stderr) == (switch == "1")


@pytest.mark.parametrize(
    "before", [None, "", "other", "other,moss_tts_patches", "moss_tts_patches", "moss_tts_patchesX"]
)
def test_start_up_hooks_of_others_stay(checkout: Path, before: str | None) -> None:
    environment = environment_of(**({} if before is None else {"AUTOWRAPT_BOOTSTRAP": before}))
    found = launch(checkout, environment).given["AUTOWRAPT_BOOTSTRAP"]
    assert found == activating_environment(environment)["AUTOWRAPT_BOOTSTRAP"]
    expected = [name for name in (before or "").split(",") if name not in ("", "moss_tts_patches")]
    assert found is not None and sorted(found.split(",")) == sorted([*expected, "moss_tts_patches"])


def test_switched_off_is_the_official_script_alone(checkout: Path, tmp_path: Path) -> None:
    # Nor does it need a Python: `accelerate` is not there, and would be missed with MOSS_LOWMEM=1.
    environment = {"PATH": "/usr/bin:/bin", "MOSS_LOWMEM": "0"}
    done = launch(checkout, environment)
    assert (done.status, done.stderr) == (0, "")
    assert done.given["MOSS_LOWMEM"] == "0"
    names = ("AUTOWRAPT_BOOTSTRAP", "ACCELERATE_CONFIG_FILE", "OUTPUT_DIR")
    assert [done.given[name] for name in names] == [None] * 3
    assert "[lowmem]" not in done.stdout


# -- the checkout -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("stands_in", "named"),
    [
        ("somewhere/MOSS TTS", None),
        ("somewhere/MOSS TTS/moss_tts_local/finetuning", None),
        ("elsewhere", "../somewhere/MOSS TTS"),
        ("other", "../somewhere/MOSS TTS"),  # a checkout itself; MOSS_TTS_REPO wins
    ],
)
def test_the_checkout_is_found(tmp_path: Path, checkout: Path, stands_in: str, named: str | None) -> None:
    make_checkout(tmp_path / "other")
    (tmp_path / "elsewhere").mkdir()
    environment = environment_of(**({} if named is None else {"MOSS_TTS_REPO": named}))
    assert launch(tmp_path / stands_in, environment).given["PWD"] == str(checkout)


def test_a_clone_in_the_current_folder_is_found(user: Path) -> None:
    make_checkout(user / "MOSS-TTS")
    assert launch(user, environment_of()).given["PWD"] == str(user / "MOSS-TTS")


# -- paths ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("switch", ["0", "1"])
def test_defaults_are_found_where_the_user_stands(checkout: Path, user: Path, switch: str) -> None:
    given = launch(user, environment_of(MOSS_TTS_REPO=str(checkout), MOSS_LOWMEM=switch)).given
    assert given["RAW_JSONL"] == f"{user}/train_raw.jsonl"
    assert given["PREPARED_JSONL"] == f"{user}/train_with_codes.jsonl"
    assert given["OUTPUT_DIR"] == f"{user}/output/moss_tts_local_sft"
    assert given["TRAIN_JSONL"] is None and given["MODEL_PATH"] is None


def test_relative_paths_start_where_the_user_stands(checkout: Path, user: Path) -> None:
    (user / "my model").mkdir()
    given = launch(
        user,
        environment_of(
            MOSS_TTS_REPO=str(checkout),
            MODEL_PATH="my model",
            CODEC_PATH="OpenMOSS-Team/MOSS-Audio-Tokenizer",
            RAW_JSONL="raw, all.jsonl",
            PREPARED_JSONL="/data/prepared.jsonl",
            TRAIN_JSONL="a b/x.jsonl, shards/*.jsonl ,/data/y z.jsonl,folder,",
            OUTPUT_DIR="../out",
            MOSS_LOWMEM_VALID_JSONL="valid.jsonl, more",
        ),
    ).given
    assert given["MOSS_LOWMEM_VALID_JSONL"] == f"{user}/valid.jsonl,{user}/more"
    assert given["MODEL_PATH"] == f"{user}/my model"
    assert given["CODEC_PATH"] == "OpenMOSS-Team/MOSS-Audio-Tokenizer"  # no such folder here: a name on a hub
    assert given["RAW_JSONL"] == f"{user}/raw, all.jsonl"
    assert given["PREPARED_JSONL"] == "/data/prepared.jsonl"
    assert given["TRAIN_JSONL"] == f"{user}/a b/x.jsonl,{user}/shards/*.jsonl,/data/y z.jsonl,{user}/folder"
    assert given["OUTPUT_DIR"] == f"{user}/../out"


def test_in_the_checkout_paths_stay_as_they_are(checkout: Path) -> None:
    given = launch(checkout, environment_of(TRAIN_JSONL="x.jsonl", MODEL_PATH="moss_tts_local")).given
    assert (given["TRAIN_JSONL"], given["MODEL_PATH"]) == ("x.jsonl", "moss_tts_local")
    assert given["OUTPUT_DIR"] is None


def test_a_folder_that_upstream_would_read_as_a_list_is_refused(checkout: Path, tmp_path: Path) -> None:
    folder = tmp_path / "one,two"
    folder.mkdir()
    assert "list or a pattern" in launch(folder, environment_of(MOSS_TTS_REPO=str(checkout))).error


@pytest.mark.parametrize("where", ["user", "checkout"])
def test_a_config_is_the_users_or_the_checkouts(checkout: Path, user: Path, where: str) -> None:
    for folder in (checkout, user) if where == "user" else (checkout,):
        (folder / "one.yaml").write_text(ENGINE_YAML.format(kind='"NO"', machines=1, processes=1))
    given = launch(user, environment_of(MOSS_TTS_REPO=str(checkout), ACCELERATE_CONFIG_FILE="one.yaml")).given
    assert given["ACCELERATE_CONFIG_FILE"] == (f"{user}/one.yaml" if where == "user" else "one.yaml")


# -- the engine -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("engine", "expected"), [("auto", str(SINGLE_PROCESS)), ("keep", "eight.yaml")])
def test_an_engine_over_several_gpus_is_one_process_on_one(checkout: Path, engine: str, expected: str) -> None:
    (checkout / "eight.yaml").write_text(ENGINE_YAML.format(kind="DEEPSPEED", machines=1, processes=8))
    done = launch(checkout, environment_of(ACCELERATE_CONFIG_FILE="eight.yaml", MOSS_LOWMEM_ENGINE=engine))
    assert done.given["ACCELERATE_CONFIG_FILE"] == expected
    assert ("ZeRO-3 over 8 process(es) shards nothing" in done.stdout) == (engine == "auto")


@pytest.mark.upstream
@pytest.mark.parametrize("name", ["accelerate_zero3_1.7b", "accelerate_fsdp_1.7b", "accelerate_ddp_8gpu"])
@pytest.mark.parametrize("engine", ["auto", "keep"])
def test_upstreams_own_engines_and_script(
    upstream_repo: Path, user: Path, tmp_path: Path, name: str, engine: str
) -> None:
    make_program(tmp_path / "bin" / "accelerate", f"#!{sys.executable}\nimport sys\nprint(*sys.argv[1:], sep='\\n')\n")
    make_gpus(tmp_path / "bin", 1)
    config = f"moss_tts_local/finetuning/configs/{name}.yaml"
    environment = environment_of(
        tmp_path / "bin",
        MOSS_TTS_REPO=str(upstream_repo),
        MOSS_LOWMEM_ENGINE=engine,
        ACCELERATE_CONFIG_FILE=config,
        SKIP_PREPARE="1",
    )
    del environment["CUDA_VISIBLE_DEVICES"]
    done = launch(user, environment)
    assert done.status == 0, done.stderr
    words = [line for line in done.stdout.splitlines() if not line.startswith("[")]
    options = dict(itertools.pairwise(words))
    assert words[0] == "launch"
    assert options["--config_file"] == (str(SINGLE_PROCESS) if engine == "auto" else config)
    assert options["--output-dir"] == f"{user}/output/moss_tts_local_sft"
    assert options["--train-jsonl"] == f"{user}/train_with_codes.jsonl"


def test_a_ready_config_takes_the_gpus_that_are_there(checkout: Path, user: Path, tmp_path: Path) -> None:
    make_gpus(tmp_path / "bin", 2)
    environment = environment_of(
        tmp_path / "bin",
        MOSS_TTS_REPO=str(checkout),
        ACCELERATE_CONFIG_FILE="lowmem:fsdp",
        XDG_CACHE_HOME=str(tmp_path / "cache"),
    )
    del environment["CUDA_VISIBLE_DEVICES"]
    done = launch(user, environment)
    assert done.status == 0, done.stderr
    config = done.given["ACCELERATE_CONFIG_FILE"]
    assert config is not None and "num_processes: 2\n" in Path(config).read_text(encoding="utf-8")
    assert "engine=FSDP" in done.stdout


def test_deepspeed_has_to_be_there_for_its_config(checkout: Path, user: Path, tmp_path: Path) -> None:
    make_gpus(tmp_path / "bin", 2)
    environment = environment_of(
        tmp_path / "bin",
        MOSS_TTS_REPO=str(checkout),
        ACCELERATE_CONFIG_FILE="lowmem:zero2-offload",
        XDG_CACHE_HOME=str(tmp_path / "cache"),
    )
    del environment["CUDA_VISIBLE_DEVICES"]
    assert "is for DeepSpeed, which is not installed" in launch(user, environment).error
    packages = make_package(tmp_path / "packages", "deepspeed", "")
    done = launch(user, {**environment, "PYTHONPATH": str(packages)})
    assert "offload_optimizer_device: cpu" in Path(done.given["ACCELERATE_CONFIG_FILE"] or "").read_text(
        encoding="utf-8"
    )


# -- bad input --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("variables", "expected"),
    [
        ({"MOSS_LOWMEM": "yes"}, "MOSS_LOWMEM='yes' is not a value"),
        ({"MOSS_LOWMEM": "2"}, "MOSS_LOWMEM='2' is not a value"),
        ({"MOSS_LOWMEM": ""}, "MOSS_LOWMEM='' is not a value"),
        ({"MOSS_LOWMEM_FAMILY": "moss_tts_locale"}, "the nearest one is moss_tts_local."),
        ({"MOSS_LOWMEM_FAMILY": "moss_tts_realtme"}, "the nearest one is moss_tts_realtime."),
        ({"MOSS_LOWMEM_FAMILY": ""}, "MOSS_LOWMEM_FAMILY='' is not a family"),
        ({"MOSS_LOWMEM_ENGINE": "none"}, "MOSS_LOWMEM_ENGINE='none' is not a value: use auto or keep"),
        ({"MOSS_LOWMEM_SCHEDULE": "stagd"}, "MOSS_LOWMEM_SCHEDULE='stagd'"),
        ({"MOSS_LOWMEM_CHUNK": "8"}, "the nearest one is MOSS_LOWMEM_CHUNK_FRAMES"),
        ({"MOSS_TTS_REPO": "/no/such folder"}, "MOSS_TTS_REPO=/no/such folder is not a MOSS-TTS checkout"),
        ({"ACCELERATE_CONFIG_FILE": "lowmem:dpp"}, "lowmem:dpp is not a config; the nearest one is lowmem:ddp"),
        ({"ACCELERATE_CONFIG_FILE": "no.yaml"}, "ACCELERATE_CONFIG_FILE=no.yaml: No such file"),
    ],
)
def test_bad_input_is_one_line_and_writes_nothing(
    checkout: Path, user: Path, variables: dict[str, str], expected: str
) -> None:
    before = listing(checkout, user)
    done = launch(user, environment_of(**{"MOSS_TTS_REPO": str(checkout), **variables}))
    assert expected in done.error
    assert listing(checkout, user) == before


def test_no_upstream_says_where_to_get_it(user: Path) -> None:
    error = launch(user, environment_of()).error
    assert "git clone https://github.com/OpenMOSS/MOSS-TTS" in error
    assert str(user / "MOSS-TTS") in error
    assert listing(user) == []


def test_no_accelerate(checkout: Path, tmp_path: Path) -> None:
    (tmp_path / "bin").mkdir()
    (tmp_path / "bin" / "python3").symlink_to(sys.executable)
    environment = environment_of(PATH=f"{tmp_path / 'bin'}:/usr/bin:/bin")
    assert "`accelerate` is not on the PATH" in launch(checkout, environment).error


def test_unknown_options_are_refused(checkout: Path) -> None:
    assert "'--num-epochs' is not an option of this script" in launch(checkout, environment_of(), "--num-epochs").error


@pytest.fixture(scope="module")
def bare_python(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_bare_python(tmp_path_factory.mktemp("another python"))


def test_a_python_without_the_package(checkout: Path, bare_python: Path) -> None:
    before = listing(checkout)
    error = launch(checkout, environment_of(bare_python)).error
    assert f"{bare_python}/python3 is the Python that would train, and it cannot import moss_tts_patches" in error
    assert f"'{bare_python}/python3' -m pip install {PROJECT}" in error
    assert listing(checkout) == before


def test_a_python_that_the_hook_does_not_reach(checkout: Path, bare_python: Path) -> None:
    # Importable through PYTHONPATH, but without autowrapt's .pth: training would silently go on without the layer.
    error = launch(checkout, environment_of(bare_python, PYTHONPATH=str(PROJECT))).error
    assert "does not run its start-up hook" in error
    assert f"'{bare_python}/python3' -m pip install" in error


def test_standing_beside_the_package_is_not_having_it_installed(bare_python: Path) -> None:
    assert "cannot import moss_tts_patches" in launch(PROJECT, environment_of(bare_python)).error


def test_a_broken_deepspeed_stops_before_anything_starts(checkout: Path, tmp_path: Path) -> None:
    packages = make_package(tmp_path / "packages", "deepspeed", "print('noise')\nraise OSError('CUDA_HOME is wrong')\n")
    before = listing(checkout)
    error = launch(checkout, environment_of(PYTHONPATH=str(packages))).error
    assert "deepspeed 9.9 is installed but cannot be imported (OSError: CUDA_HOME is wrong)" in error
    assert "pip uninstall -y deepspeed" in error
    assert listing(checkout) == before


def test_a_sound_deepspeed_that_prints_is_let_through(checkout: Path, tmp_path: Path) -> None:
    packages = make_package(tmp_path / "packages", "deepspeed", "print('[INFO] Setting ds_accelerator to cuda')\n")
    done = launch(checkout, environment_of(PYTHONPATH=str(packages)))
    assert done.given["ACCELERATE_CONFIG_FILE"] == str(SINGLE_PROCESS)


# -- other uses -------------------------------------------------------------------------------------------------------


def test_help_needs_nothing(user: Path) -> None:
    done = launch(user, {"PATH": "/usr/bin:/bin"}, "--help")
    assert done.status == 0
    for name in ("MOSS_TTS_REPO", "MOSS_LOWMEM_FAMILY", "MOSS_LOWMEM_ENGINE", "--demo"):
        assert name in done.stdout


def test_the_demo_runs_under_the_python_that_has_the_package(user: Path) -> None:
    done = launch(user, environment_of(), "--demo", "--help")
    assert done.status == 0, done.stderr
    assert "compare_demo.py" in done.stdout


def test_programs_of_this_environment_are_beside_python() -> None:
    """What the tests above take for granted: otherwise they would test another environment's accelerate."""
    assert (BIN / "accelerate").is_file()
