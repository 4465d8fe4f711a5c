"""Lets torch's allocator grow its segments where that works, so that fragmentation does not eat a small card.

It has to be in the environment before torch is imported, under the name which that torch reads.
"""

from __future__ import annotations

import importlib.metadata
import re
import subprocess
import sys
from collections.abc import Mapping

SETTING = "expandable_segments:True"

#: Every name under which some torch reads its allocator's settings; a value in any of them is the user's choice.
NAMES = ("PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_ALLOC_CONF", "PYTORCH_HIP_ALLOC_CONF")

# The newer name exists since 2.9, but 2.9 ignores expandable_segments in it (pytorch/pytorch#183387, fixed in 2.11).
# The older name works everywhere; from 2.9 on it may print a warning that it is deprecated.
_NEWER_NAME_FROM = (2, 11)

_ASK_VERSION = "import importlib.metadata; print(importlib.metadata.version('torch'))"


def allocator_environment(
    environment: Mapping[str, str], torch_version: str | None, *, native_linux: bool
) -> dict[str, str]:
    """Adds the allocator's setting, unless the user has one or the system does not support it.

    Args:
        environment: of the training to come.
        torch_version: of the Python that trains; None where it is not known.
        native_linux: not Windows, and not WSL2, where the driver cannot map memory this way.
    """
    wanted = native_linux and torch_version is not None and not any(name in environment for name in NAMES)
    if not wanted or torch_version is None:
        return dict(environment)
    return {**environment, variable_name(torch_version): SETTING}


def variable_name(torch_version: str) -> str:
    """The variable that a torch of this version reads."""
    numbers = tuple(int(number) for number in re.findall(r"\d+", torch_version)[:2])
    return "PYTORCH_ALLOC_CONF" if numbers >= _NEWER_NAME_FROM else "PYTORCH_CUDA_ALLOC_CONF"


def installed_torch(python: str) -> str | None:
    """The version of the torch that ``python`` would import, without importing it."""
    if python == sys.executable:
        try:
            return importlib.metadata.version("torch")
        except importlib.metadata.PackageNotFoundError:
            return None
    try:
        done = subprocess.run([python, "-c", _ASK_VERSION], capture_output=True, text=True, timeout=60)
    except (OSError, subprocess.TimeoutExpired):
        return None
    return done.stdout.strip() or None if done.returncode == 0 else None
