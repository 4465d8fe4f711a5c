"""Where DeepSpeed is for the tests that need it: a folder of its own, so that no other test's training imports it.

accelerate imports an installed deepspeed in every run that saves, which takes seconds; the suite has hundreds of runs.
``MOSS_TEST_DEEPSPEED`` names the folder, which ``tests/deepspeed.sh`` makes and ``tests/run.sh`` sets; a deepspeed in
the environment does as well.
"""

from __future__ import annotations

import importlib.util
import os
import shutil

FOLDER = os.environ.get("MOSS_TEST_DEEPSPEED", "")
REASON = "DeepSpeed is not installed: bash tests/deepspeed.sh, then MOSS_TEST_DEEPSPEED=$PWD/.venv/deepspeed"
#: All families in every case; otherwise one, and the other families' weights split in other tests.
EVERY_CASE = os.environ.get("MOSS_TEST_ZERO") == "all"


def is_there() -> bool:
    return (
        os.path.isdir(os.path.join(FOLDER, "deepspeed"))
        if FOLDER
        else importlib.util.find_spec("deepspeed") is not None
    )


def can_compile() -> bool:
    """DeepSpeed compiles its Adam for the CPU when it is first used."""
    return shutil.which("g++") is not None


def variables() -> dict[str, str]:
    """What a process that trains with it needs: compiled pieces stay with the folder, and are made once."""
    extensions = os.path.join(os.path.dirname(os.path.abspath(FOLDER)), "deepspeed_extensions") if FOLDER else ""
    found = {"PYTHONPATH": FOLDER, "DS_ACCELERATOR": "cpu"}
    return found | ({"TORCH_EXTENSIONS_DIR": os.environ.get("TORCH_EXTENSIONS_DIR", extensions)} if FOLDER else {})


def without_shared_memory() -> None:
    """Has ranks meet over gloo alone: DeepSpeed's own exchange for CPUs takes a minute to compile, and GPUs lack it."""
    import deepspeed

    deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False
