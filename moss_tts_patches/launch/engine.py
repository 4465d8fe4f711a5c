"""Chooses the accelerate config: what an engine over several processes is worth on the GPUs that are there."""

from __future__ import annotations

import importlib.util
import shutil
import subprocess
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ..errors import EnvironmentProblem, SettingsError
from .configs import PREFIX, config_text, write_config

SINGLE_PROCESS = Path(__file__).resolve().parents[1] / "configs" / "single_process.yaml"
WISHES = ("auto", "keep")


@dataclass(frozen=True)
class EngineConfig:
    """What an accelerate config asks for.

    Attributes:
        processes: over all machines; None where the file leaves it to the number of GPUs.
    """

    kind: str
    zero_stage: int | None
    processes: int | None
    machines: int

    @property
    def is_plain(self) -> bool:
        return self.kind == "NO" and self.processes in (None, 1)

    @property
    def title(self) -> str:
        """The engine as people call it."""
        if self.kind == "DEEPSPEED":
            return f"ZeRO-{self.zero_stage}" if self.zero_stage is not None else "DeepSpeed"
        return {"MULTI_GPU": "DDP", "NO": "plain training"}.get(self.kind, self.kind)


@dataclass(frozen=True)
class Choice:
    """The config that ``accelerate launch`` gets ("" for none), and a log line that says so."""

    config_file: str
    line: str


def read_config(path: str) -> EngineConfig:
    """Reads an accelerate config, YAML or JSON.

    Raises:
        EnvironmentProblem: there is no such file, or it is not an accelerate config.
    """
    import yaml

    try:
        content = yaml.safe_load(Path(path).read_text(encoding="utf-8"))
    except OSError as error:
        raise EnvironmentProblem(
            f"ACCELERATE_CONFIG_FILE={path}: {error.strerror}. Looked in the folder you stand in, then in the MOSS-TTS "
            "checkout."
        ) from None
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        reason = " ".join(str(error).split())
        raise EnvironmentProblem(f"ACCELERATE_CONFIG_FILE={path} is not YAML: {reason}") from None
    if not isinstance(content, dict) or "distributed_type" not in content:
        raise EnvironmentProblem(
            f"ACCELERATE_CONFIG_FILE={path} has no distributed_type: expected a file as `accelerate config` writes it."
        )
    kind = content["distributed_type"]
    engine = content.get("deepspeed_config") or {}
    try:
        return EngineConfig(
            # An unquoted NO is YAML's false; accelerate's own files quote it.
            kind="NO" if kind is False else str(kind).upper(),
            zero_stage=_whole_number(engine.get("zero_stage")) if isinstance(engine, dict) else None,
            processes=_whole_number(content.get("num_processes")),
            machines=_whole_number(content.get("num_machines")) or 1,
        )
    except ValueError as error:
        raise EnvironmentProblem(f"ACCELERATE_CONFIG_FILE={path}: expected a whole number, found {error}") from None


def _whole_number(value: Any) -> int | None:
    if value is None:
        return None
    try:
        return int(value)
    except (TypeError, ValueError):
        raise ValueError(repr(value)) from None


def choose_engine(wish: str, config_file: str, count_gpus: Callable[[], int]) -> Choice:
    """Decides which config the training runs with.

    Args:
        wish: ``MOSS_LOWMEM_ENGINE``: auto, or keep for the config as it is given.
        config_file: ``ACCELERATE_CONFIG_FILE``, "" where it is not set.
        count_gpus: asked only where the answer depends on it; it may take seconds.

    Raises:
        SettingsError: ``wish`` is neither auto nor keep.
        EnvironmentProblem: the config cannot be read, or asks for more processes than there are GPUs.
    """
    if wish not in WISHES:
        raise SettingsError(f"MOSS_LOWMEM_ENGINE={wish!r} is not a value: use {' or '.join(WISHES)}.")
    if config_file.startswith(PREFIX):
        return _ready_config(wish, config_file.removeprefix(PREFIX), count_gpus)
    if wish == "keep":
        return Choice(config_file, f"engine=keep accelerate_config={config_file or 'none'}")
    if not config_file:
        return Choice(
            str(SINGLE_PROCESS),
            f"engine=one_process accelerate_config={SINGLE_PROCESS} reason='ACCELERATE_CONFIG_FILE is not set; "
            "lowmem:ddp and others use several GPUs' (MOSS_LOWMEM_ENGINE=keep overrides)",
        )
    config = read_config(config_file)
    if config.is_plain:
        return Choice(config_file, f"engine=one_process accelerate_config={config_file}")
    gpus = count_gpus()
    processes = gpus if config.processes is None else config.processes
    if processes > 1 and config.machines > 1:
        return Choice(config_file, f"engine={config.title} accelerate_config={config_file} machines={config.machines}")
    if processes > 1 and gpus > 1:
        if processes > gpus:
            raise EnvironmentProblem(
                f"ACCELERATE_CONFIG_FILE={config_file} asks for {processes} processes ({config.title}), {gpus} GPUs "
                f"are visible. Expected num_processes: {gpus}, or one of `moss-lowmem configs`."
            )
        return Choice(config_file, f"engine={config.title} accelerate_config={config_file} processes={processes}")
    return _one_process(config_file, config.title, processes, gpus)


def _one_process(instead_of: str, title: str, processes: int, gpus: int) -> Choice:
    return Choice(
        str(SINGLE_PROCESS),
        f"engine=one_process accelerate_config={SINGLE_PROCESS} instead_of={instead_of} visible_gpus={gpus} "
        f"reason='{title} over {processes} process(es) shards nothing on one device' "
        "(MOSS_LOWMEM_ENGINE=keep overrides)",
    )


def _ready_config(wish: str, name: str, count_gpus: Callable[[], int]) -> Choice:
    """A config of ours, for as many processes as there are GPUs."""
    config_text(name, 1)  # a wrong name, before anything is counted
    gpus = count_gpus()
    if gpus < 2 and wish == "auto":
        return _one_process(PREFIX + name, name, gpus, gpus)
    path = write_config(name, max(1, gpus))
    return Choice(str(path), f"engine={read_config(str(path)).title} accelerate_config={path} processes={max(1, gpus)}")


def visible_gpus(environment: Mapping[str, str]) -> int:
    """Counts the GPUs that a training started with these variables would see."""
    named = environment.get("CUDA_VISIBLE_DEVICES")
    devices = None if named is None else _listed_devices(named)
    if devices == []:
        return 0
    present = _nvidia_gpus()
    if present is None:
        return _torch_gpus()
    if devices is None:
        return present
    # CUDA stops at the first number that names no GPU; a UUID is taken at its word.
    count = 0
    for device in devices:
        if device.isdigit() and int(device) >= present:
            break
        count += 1
    return count


def _listed_devices(value: str) -> list[str]:
    devices = []
    for item in (part.strip() for part in value.split(",")):
        if not item or item.startswith("-"):  # "" and -1 end the list, as CUDA reads it
            break
        devices.append(item)
    return devices


def _nvidia_gpus() -> int | None:
    """Counts what ``nvidia-smi -L`` lists; None where it is missing or fails."""
    program = shutil.which("nvidia-smi")
    if program is None:
        return None
    try:
        listed = subprocess.run([program, "-L"], capture_output=True, text=True, timeout=60)
    except (OSError, subprocess.TimeoutExpired):
        return None
    if listed.returncode != 0:
        return None
    return sum(line.startswith("GPU ") for line in listed.stdout.splitlines())


def _torch_gpus() -> int:
    """What torch says: 3 s for its import, and right for AMD's cards too."""
    if importlib.util.find_spec("torch") is None:
        return 0
    import torch

    return torch.cuda.device_count()
