"""Finds a deepspeed that would end the run at its first checkpoint."""

from __future__ import annotations

import importlib
import importlib.metadata
import importlib.util
import os
import shlex
import subprocess
import sys

# Before the answer of the child process: deepspeed itself prints, too.
_ANSWER = "moss_tts_patches found: "
_ASK = (
    f"from moss_tts_patches.launch.deepspeed import broken_deepspeed; print({_ANSWER!r} + (broken_deepspeed() or ''))"
)

# A sound deepspeed imports in 5 to 20 s; one that probes a compiler over a network file system takes longer.
_SECONDS_ALLOWED = 180


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


def has_deepspeed() -> bool:
    """Whether a deepspeed is installed, sound or not."""
    return importlib.util.find_spec("deepspeed") is not None


def ask_deepspeed(python: str) -> str | None:
    """The answer of :func:`broken_deepspeed` in a process of its own.

    A deepspeed that crashes takes that process with it, and a sound one leaves nothing behind in this one.

    Args:
        python: the Python that trains.
    """
    if importlib.util.find_spec("deepspeed") is None:
        return None
    try:
        done = subprocess.run([python, "-c", _ASK], capture_output=True, text=True, timeout=_SECONDS_ALLOWED)
    except subprocess.TimeoutExpired:
        return f"importing deepspeed took more than {_SECONDS_ALLOWED} s"
    answers = [line for line in done.stdout.splitlines() if line.startswith(_ANSWER)]
    if not answers:
        last = (done.stderr.strip().splitlines() or ["nothing printed"])[-1]
        return f"importing deepspeed ends the process (status {done.returncode}: {last})"
    return answers[-1].removeprefix(_ANSWER) or None
