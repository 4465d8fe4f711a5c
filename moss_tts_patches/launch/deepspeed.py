"""Finds a deepspeed that would end the run at its first checkpoint."""

from __future__ import annotations

import importlib
import importlib.metadata
import importlib.util
import os
import shlex
import sys


def broken_deepspeed() -> str | None:
    """Says why the installed deepspeed would end the run when it first saves, or None where it would not.

    Source: accelerate ``utils/other.py``, ``extract_model_from_parallel``: wherever a deepspeed is installed it imports
    it, used or not, and upstream's ``save_checkpoint`` gets there through ``unwrap_model``.
    """
    if importlib.util.find_spec("deepspeed") is None:
        return None
    try:
        version = importlib.metadata.version("deepspeed")
    except importlib.metadata.PackageNotFoundError:  # a folder of that name; accelerate leaves it alone as well
        return None
    try:
        importlib.import_module("deepspeed")
    except Exception as error:  # it compiles and probes while it is imported: anything may come
        reason = (str(error).strip().splitlines() or ["no reason given"])[0]
        cuda_home = os.environ.get("CUDA_HOME")
        cause = f"CUDA_HOME is {cuda_home}" if cuda_home else "CUDA_HOME is not set"
        return (
            f"deepspeed {version} is installed but cannot be imported ({type(error).__name__}: {reason}). accelerate "
            "imports it to save a checkpoint, so the run would end after its first epoch. The layer does not need it: "
            f"{shlex.quote(sys.executable)} -m pip uninstall -y deepspeed, or repair it (it looks for a CUDA toolkit; "
            f"{cause})."
        )
    return None
