"""What a figure was measured with: versions, date and machine, in the head of every result file."""

from __future__ import annotations

import importlib.metadata
import os
import platform
from collections.abc import Iterable
from datetime import date
from pathlib import Path
from typing import Any

import torch

GIB = 2**30


def describe_run(packages: Iterable[str], device: torch.device) -> dict[str, Any]:
    """Returns date, versions and hardware, without anything that names this machine.

    Args:
        packages: distributions whose versions matter; one that is not installed is listed as None.
        device: where the run computes.
    """
    return {
        "date": date.today().isoformat(),
        "versions": {"python": platform.python_version(), **{name: _version(name) for name in packages}},
        "machine": _hardware(device),
    }


def _version(package: str) -> str | None:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def _hardware(device: torch.device) -> dict[str, Any]:
    hardware: dict[str, Any] = {
        "system": f"{platform.system()} {platform.machine()}",
        "cpu": _processor(),
        "cores": os.cpu_count(),
        "torch_threads": torch.get_num_threads(),
    }
    if device.type == "cuda":
        card = torch.cuda.get_device_properties(device)
        hardware |= {"gpu": card.name, "gpu_memory_gib": round(card.total_memory / GIB, 1), "cuda": torch.version.cuda}
    return hardware


def _processor() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:  # not Linux
        return platform.processor()
    models = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return models[0] if models else platform.processor()
