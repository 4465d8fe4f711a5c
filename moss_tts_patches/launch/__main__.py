"""Questions of ``run_train_lowmem.sh``, answered on standard output or with one line on standard error.

``python -m moss_tts_patches.launch settings FAMILY`` checks every ``MOSS_LOWMEM_*`` and the family; prints nothing.
``python -m moss_tts_patches.launch engine [CONFIG]`` prints the accelerate config to use, then a log line.
"""

from __future__ import annotations

import functools
import os
import shlex
import sys

from ..errors import EnvironmentProblem, LowMemError, SettingsError
from ..settings import load_settings
from .deepspeed import ask_deepspeed, has_deepspeed
from .engine import Choice, choose_engine, read_config, visible_gpus
from .families import family_problem


def check_settings(family: str) -> None:
    """Checks what the trainer would check too, but before the data is prepared, which may take hours.

    Raises:
        SettingsError: an unknown family, an unknown variable or a wrong value.
    """
    problem = family_problem(family)
    if problem is not None:
        raise SettingsError(problem)
    load_settings()


def prepare_engine(config_file: str) -> Choice:
    """Chooses the config, and refuses a deepspeed that would end the run when it saves.

    Raises:
        LowMemError: see :func:`.engine.choose_engine` and :func:`.deepspeed.ask_deepspeed`.
    """
    wish = os.environ.get("MOSS_LOWMEM_ENGINE", "auto")
    choice = choose_engine(wish, config_file, functools.partial(visible_gpus, os.environ))
    if wish != "keep" and read_config(choice.config_file).kind == "DEEPSPEED" and not has_deepspeed():
        raise EnvironmentProblem(
            f"{choice.config_file} is for DeepSpeed, which is not installed: "
            f"{shlex.quote(sys.executable)} -m pip install deepspeed (it needs no compiler until an optimizer is "
            "offloaded), or use lowmem:fsdp or lowmem:ddp."
        )
    problem = ask_deepspeed(sys.executable)
    if problem is not None:
        raise EnvironmentProblem(problem)
    return choice


def main(arguments: list[str]) -> int:
    question, *rest = arguments
    try:
        if question == "settings":
            check_settings(rest[0])
        elif question == "engine":
            choice = prepare_engine(rest[0] if rest else "")
            print(choice.config_file, choice.line, sep="\n")
        else:
            raise SettingsError(f"{question!r} is not a question: expected settings or engine.")
    except LowMemError as error:
        print(f"[lowmem] error: {error}", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
