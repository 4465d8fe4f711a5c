"""Runs of the real, unmodified upstream through its own run_train.sh, with the layer or without.

The fixtures here belong to whichever module imports them; its ``FAMILY`` says which trainer they run.
"""

from __future__ import annotations

import functools
import importlib
import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from launcher import LAUNCHER
from mini import clean_environment, read_steps
from safetensors.torch import load_file

ARGUMENTS = (
    "--per-device-batch-size 2 --gradient-accumulation-steps 2 --num-epochs 1 --mixed-precision no --learning-rate 1e-3"
)
# What makes a run comparable with upstream's, number by number.
EXACT = {"MOSS_LOWMEM_OPTIMIZER": "adamw", "MOSS_LOWMEM_CORRECTIONS": "none", "MOSS_LOWMEM_CHUNK_FRAMES": "7"}
SECONDS_ALLOWED = 300  # a run takes 10 to 20 s on an idle machine

# Where each family keeps its model and config: (module, model class, module, config class).
CLASSES = {
    "moss_tts_local": (
        "moss_tts_local.modeling_moss_tts",
        "MossTTSDelayModel",
        "moss_tts_local.configuration_moss_tts",
        "MossTTSDelayConfig",
    ),
    "moss_tts_delay": (
        "moss_tts_delay.modeling_moss_tts",
        "MossTTSDelayModel",
        "moss_tts_delay.configuration_moss_tts",
        "MossTTSDelayConfig",
    ),
    "moss_tts_realtime": (
        "moss_tts_realtime.mossttsrealtime.modeling_mossttsrealtime",
        "MossTTSRealtime",
        "moss_tts_realtime.mossttsrealtime.configuration_mossttsrealtime",
        "MossTTSRealtimeConfig",
    ),
}

_RELOAD = """
import sys, torch
from safetensors.torch import load_file
folder = sys.argv[1]
{load}
saved = load_file(folder + "/model.safetensors")
state = model.state_dict()
assert state.keys() == saved.keys(), state.keys() ^ saved.keys()
assert all(torch.equal(state[name], saved[name]) for name in saved)
{then}
assert not any(name.startswith("moss_tts_patches") for name in sys.modules)
"""


@dataclass(frozen=True)
class Run:
    """A finished run of upstream's script."""

    output: str
    folder: Path

    @property
    def losses(self) -> list[float]:
        return [step.loss for step in read_steps(self.output)]

    @property
    def checkpoint(self) -> Path:
        return self.folder / "checkpoint-epoch-0"

    def weights(self) -> dict[str, torch.Tensor]:
        return load_file(self.checkpoint / "model.safetensors")

    def files(self) -> set[str]:
        """Every saved file, by its path within the checkpoint."""
        return {str(path.relative_to(self.checkpoint)) for path in self.checkpoint.rglob("*") if path.is_file()}


def make_tiny(upstream: Path, family: str, folder: Path, *options: str) -> Path:
    """Makes a family's tiny checkpoint and ``train.jsonl`` with make_tiny.py, unless ``folder`` is there already."""
    if not folder.exists():
        command = [sys.executable, Path(__file__).with_name("make_tiny.py"), upstream, family, folder, *options]
        subprocess.run(command, check=True, capture_output=True)
    return folder


def layer_variables(upstream: Path, family: str) -> dict[str, str]:
    """Variables for our launcher, with which it finds a family's script in a checkout."""
    return {"MOSS_LOWMEM": "1", "MOSS_LOWMEM_FAMILY": family, "MOSS_TTS_REPO": str(upstream)}


def run_script(
    script: Path | str, upstream: Path, data: Path, output: Path, arguments: str, variables: dict[str, str]
) -> tuple[int, str]:
    """Runs a family's run_train.sh, or our launcher in its place, to its end.

    Args:
        script: from the checkout.
        data: of :func:`make_tiny`.
        variables: of :func:`upstream_variables`, and others.

    Returns:
        Exit status, and what it printed.
    """
    environment = {
        "MODEL_PATH": str(data),
        "TRAIN_JSONL": str(data / "train.jsonl"),
        "OUTPUT_DIR": str(output),
        "SKIP_PREPARE": "1",
        "TRAIN_EXTRA_ARGS_STR": arguments,
        **variables,
    }
    done = subprocess.run(
        ["bash", str(script)],
        cwd=upstream,
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=SECONDS_ALLOWED,
    )
    return done.returncode, done.stdout


@pytest.fixture(scope="module", name="inputs")
def inputs_fixture(
    request: pytest.FixtureRequest, upstream_repo: Path, torchaudio_stub: Path, tmp_path_factory: Any
) -> Path:
    """Tiny checkpoints and data: one folder a seed, of the module's ``SEEDS``."""
    folder = tmp_path_factory.mktemp("tiny")
    for seed in getattr(request.module, "SEEDS", (0,)):
        make_tiny(upstream_repo, request.module.FAMILY, folder / str(seed), "--seed", str(seed))
    return folder


@pytest.fixture(scope="module", name="train")
def train_fixture(
    request: pytest.FixtureRequest, upstream_repo: Path, torchaudio_stub: Path, inputs: Path, tmp_path_factory: Any
) -> Callable[..., Run]:
    """Runs upstream's script, through our launcher or by itself."""
    family = request.module.FAMILY

    def run(
        output: Path,
        seed: int = 0,
        layer: dict[str, str] | None = None,
        arguments: str = ARGUMENTS,
        **variables: str,
    ) -> Run:
        variables = upstream_variables(torchaudio_stub, tmp_path_factory.mktemp("hf_modules")) | variables
        script: Path | str = f"{family}/finetuning/run_train.sh"
        if layer is not None:
            variables |= layer_variables(upstream_repo, family) | layer
            script = LAUNCHER
        status, printed = run_script(script, upstream_repo, inputs / str(seed), output, arguments, variables)
        assert status == 0, printed[-6000:]
        return Run(printed, output)

    return run


@pytest.fixture(scope="module", name="exact_run")
def exact_run_fixture(train: Callable[..., Run], tmp_path_factory: Any) -> Callable[..., Run]:
    """Runs with plain AdamW and no correction, each made once for a module.

    They are ``plain`` (without the layer), a schedule's name, or ``host`` (staged, both stores in host memory).
    """

    @functools.cache
    def run(name: str, arguments: str = ARGUMENTS) -> Run:
        output = tmp_path_factory.mktemp("runs") / name
        if name == "plain":
            return train(output, arguments=arguments)
        layer = {"MOSS_LOWMEM_SCHEDULE": "staged" if name == "host" else name}
        if name == "host":
            layer |= {"MOSS_LOWMEM_GRADIENTS": "host", "MOSS_LOWMEM_STATES": "host"}
        return train(output, layer={**EXACT, **layer}, arguments=arguments)

    return run


@pytest.fixture(scope="module", name="upstream_classes")
def upstream_classes_fixture(
    request: pytest.FixtureRequest, upstream_repo: Path, torchaudio_stub: Path
) -> Iterator[tuple[Any, Any]]:
    """Upstream's model and config classes, in this process."""
    family = getattr(request.module, "FAMILY", "moss_tts_local")
    yield from importable_classes(upstream_repo, family, torchaudio_stub)


def importable_classes(upstream_repo: Path, family: str, torchaudio_stub: Path) -> Iterator[tuple[Any, Any]]:
    """Yields a family's model and config classes while the checkout, and a torchaudio, are on the path."""
    added = [str(upstream_repo), str(torchaudio_stub)]
    sys.path[:0] = added
    sys.dont_write_bytecode = True
    model_module, model_class, config_module, config_class = CLASSES[family]
    try:
        yield (
            getattr(importlib.import_module(model_module), model_class),
            getattr(importlib.import_module(config_module), config_class),
        )
    finally:
        for folder in added:
            sys.path.remove(folder)


def upstream_variables(torchaudio_stub: Path, modules_cache: Path) -> dict[str, str]:
    """Variables for a process that runs the real upstream, without the layer."""
    environment = clean_environment(
        PYTHONPATH=str(torchaudio_stub), PYTHONDONTWRITEBYTECODE="1", HF_MODULES_CACHE=str(modules_cache)
    )
    del environment["ACCELERATE_CONFIG_FILE"]  # the miniature's; upstream's runs choose their own
    return environment


def assert_upstream_reloads(
    checkpoint: Path, environment: dict[str, str], load: str, then: str = "", folder: Path | None = None
) -> None:
    """Loads a checkpoint in a process that knows upstream only, compares every tensor, and goes on from there.

    Args:
        checkpoint: as upstream saved it.
        environment: of :func:`upstream_variables`.
        load: code that binds ``model`` from ``folder``.
        then: code after the comparison.
        folder: where to stand; a checkout, where its own classes load the checkpoint.
    """
    code = _RELOAD.format(load=load, then=then)
    done = subprocess.run(
        [sys.executable, "-c", code, str(checkpoint)], env=environment, cwd=folder, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-2000:]
