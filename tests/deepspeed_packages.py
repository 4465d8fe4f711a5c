"""Where DeepSpeed is for the tests that need it: a folder of its own, so that no other test's training imports it.

accelerate imports an installed deepspeed in every run that saves, which takes seconds; the suite has hundreds of runs.
``MOSS_TEST_DEEPSPEED`` names the folder, made by ``pip install --no-deps --target FOLDER deepspeed==0.19.8 einops hjson
msgpack ninja py-cpuinfo`` (half a minute); a deepspeed in the environment does as well.
"""

from __future__ import annotations

import importlib.util
import os
import shutil

FOLDER = os.environ.get("MOSS_TEST_DEEPSPEED", "")
REASON = (
    "DeepSpeed is not installed: pip install --no-deps --target FOLDER deepspeed==0.19.8 einops hjson msgpack ninja "
    "py-cpuinfo, then MOSS_TEST_DEEPSPEED=FOLDER"
)


def is_there() -> bool:
    return (
        os.path.isdir(os.path.join(FOLDER, "deepspeed"))
        if FOLDER
        else importlib.util.find_spec("deepspeed") is not None
    )


def can_compile() -> bool:
    """DeepSpeed compiles its Adam for the CPU when it is first used."""
    return shutil.which("g++") is not None
