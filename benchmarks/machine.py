"""What a figure was measured with: versions, seed, date and machine, in the head of every result file.

``python benchmarks/machine.py`` prints it.
"""

from __future__ import annotations

import importlib.metadata
import json
import os
import platform
import subprocess
from collections.abc import Iterable
from datetime import date
from pathlib import Path
from typing import Any

import torch

from moss_tts_patches.units import GIB

SEED = 0


def describe_run(packages: Iterable[str], device: torch.device, repository: Path | None = None) -> dict[str, Any]:
    """Returns date, seed, versions and hardware, without anything that names this machine.

    Args:
        packages: distributions whose versions matter; one that is not installed is listed as None.
        device: where the run computes.
        repository: upstream's checkout, where the run uses it: its commit is a version too.
    """
    return {
        "date": date.today().isoformat(),
        "seed": SEED,
        **({} if repository is None else {"upstream": upstream_commit(repository)}),
        "versions": {"python": platform.python_version(), **{name: _version(name) for name in packages}},
        "machine": _hardware(device),
    }


def upstream_commit(repository: Path) -> str | None:
    """Returns the checkout's short commit; None where it is no git checkout."""
    command = ["git", "-C", str(repository), "rev-parse", "--short=7", "HEAD"]
    found = subprocess.run(command, capture_output=True, text=True, check=False)
    return found.stdout.strip() or None


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


if __name__ == "__main__":
    packages = ("torch", "transformers", "accelerate", "peft", "bitsandbytes", "triton")
    checkout = Path(os.environ["MOSS_TTS_REPO"]) if "MOSS_TTS_REPO" in os.environ else None
    print(json.dumps(describe_run(packages, torch.device("cuda" if torch.cuda.is_available() else "cpu"), checkout)))
