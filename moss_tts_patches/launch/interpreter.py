"""Finds the Python that a command will run under, and whether the layer reaches it.

The commonest silent failure of a start-up hook is a second Python: the package stands in one environment and
``accelerate`` belongs to another, and training simply goes on without the layer.

``run_train_lowmem.sh`` runs this file by its path, under whatever ``python3`` there is: before this file has answered,
nobody knows which Python has the package. It therefore needs the standard library alone, and no Python newer than 3.7.
"""

from __future__ import annotations

import os
import re
import shlex
import shutil
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path

ENTRY_POINT_GROUP = "moss_tts_patches"

# Run by the Python in question; the attribute is set by bootstrap.on_argparse_import.
ASK_IF_ACTIVE = (
    "import argparse, sys; sys.exit(0 if getattr(argparse.ArgumentParser.parse_args, '__moss_lowmem__', False) else 3)"
)
ASK_IF_IMPORTABLE = "import moss_tts_patches"

_PYTHON_NAME = re.compile(r"python[\d.]*(\.exe)?$", re.IGNORECASE)
_SHELL_NAMES = ("sh", "bash", "dash", "ash", "zsh")


def activating_environment(environment: Mapping[str, str]) -> dict[str, str]:
    """Adds what switches the layer on in every Python process started with it.

    ``AUTOWRAPT_BOOTSTRAP`` keeps what it names already; ``MOSS_LOWMEM`` keeps a value that the user gave.
    """
    groups = [name.strip() for name in environment.get("AUTOWRAPT_BOOTSTRAP", "").split(",") if name.strip()]
    if ENTRY_POINT_GROUP not in groups:
        groups.append(ENTRY_POINT_GROUP)
    return {"MOSS_LOWMEM": "1", **environment, "AUTOWRAPT_BOOTSTRAP": ",".join(groups)}


def python_of(program: str) -> str | None:
    """The Python that runs ``program``, or None where it is not a Python program as far as its first lines tell.

    Args:
        program: path of an existing file, as ``shutil.which`` gives it.
    """
    path = Path(program)
    if _PYTHON_NAME.match(path.name):
        return program
    named = _python_in_shebang(_first_lines(path))
    if named is None and path.stem == "accelerate":
        # pyenv's shims are shell scripts and Windows' launchers are binaries; both have their Python beside them.
        return _python_beside(path)
    return named


def _first_lines(path: Path) -> list[str]:
    with path.open("rb") as handle:
        # A shebang ends within 256 bytes on Linux, but the line after `#!/bin/sh` may hold any path (4096 at most).
        return handle.read(8192).decode("utf-8", errors="replace").splitlines()[:2]


def _python_in_shebang(lines: list[str]) -> str | None:
    if not lines or not lines[0].startswith("#!"):
        return None
    words = lines[0][2:].split()
    name = Path(words[0]).name if words else ""
    if name == "env":
        named = [word for word in words[1:] if not word.startswith("-") and "=" not in word]
        is_python = bool(named) and _PYTHON_NAME.match(Path(named[0]).name) is not None
        return shutil.which(named[0]) if is_python else None
    if name in _SHELL_NAMES:
        return _python_in_exec_line(lines[1]) if len(lines) > 1 else None
    return shutil.which(words[0]) if _PYTHON_NAME.match(name) else None


def _python_in_exec_line(line: str) -> str | None:
    """Reads ``'''exec' "/long path/python" "$0" "$@"``, which pip writes where a shebang would not do."""
    try:
        words = shlex.split(line)
    except ValueError:  # an unclosed quote: some other shell script
        return None
    if len(words) < 2 or words[0] != "exec" or not _PYTHON_NAME.match(Path(words[1]).name):
        return None
    return shutil.which(words[1])


def _python_beside(path: Path) -> str | None:
    for folder in (path.parent, path.resolve().parent):
        for name in ("python3", "python", "python.exe"):
            found = shutil.which(str(folder / name))
            if found is not None:
                return found
    return None


def problem_with(python: str, environment: Mapping[str, str]) -> str | None:
    """Why the layer would not reach processes of ``python``, with what to do, or None where it does.

    Args:
        environment: variables of the training to come.
    """
    active = {**activating_environment(environment), "MOSS_LOWMEM": "1"}
    if _ask(python, ASK_IF_ACTIVE, active).returncode == 0:
        return None
    here = shlex.quote(python)
    source = _installation_source()
    imported = _ask(python, ASK_IF_IMPORTABLE, active)
    if imported.returncode != 0:
        reason = (imported.stderr.strip().splitlines() or ["no reason given"])[-1]
        return (
            f"{python} is the Python that would train, and it cannot import moss_tts_patches ({reason}). "
            f"Install it into that very Python: {here} -m pip install {source}"
        )
    return (
        f"{python} is the Python that would train; it imports moss_tts_patches, but does not run its start-up hook, so "
        "training would go on without the layer. Install both into that very Python: "
        f"{here} -m pip install --force-reinstall --no-deps autowrapt {source}"
    )


def _ask(python: str, question: str, environment: Mapping[str, str]) -> subprocess.CompletedProcess[str]:
    # In the root folder: `python -c` imports from where it stands, and the caller may stand beside this package.
    return subprocess.run(
        [python, "-c", question], env=dict(environment), cwd=os.path.abspath(os.sep), capture_output=True, text=True
    )


def _installation_source() -> str:
    root = Path(__file__).resolve().parents[2]
    return shlex.quote(str(root)) if (root / "setup.cfg").is_file() else "moss_tts_patches"


def find_accelerate() -> tuple[str, str | None]:
    """The Python that ``accelerate`` will use, and what is wrong with it (None: nothing).

    Returns:
        ``(python, None)``, or ``("", problem)``.
    """
    program = shutil.which("accelerate")
    if program is None:
        return "", (
            "`accelerate` is not on the PATH, and upstream's script starts it. Activate the environment in which you "
            f"train, or install everything with: python3 -m pip install {_installation_source()}"
        )
    python = python_of(program)
    if python is None:
        return "", (
            f"cannot tell which Python {program} uses: expected a script with a Python in its first lines, or a Python "
            "beside it. Reinstall it with the Python that you train with: python3 -m pip install --force-reinstall "
            "accelerate"
        )
    problem = problem_with(python, os.environ)
    return ("", problem) if problem else (python, None)


def main() -> int:
    """Prints the path of accelerate's Python, or one line that says what is wrong."""
    python, problem = find_accelerate()
    if problem is not None:
        print(f"[lowmem] error: {problem}", file=sys.stderr)
        return 2
    print(python)
    return 0


if __name__ == "__main__":
    sys.exit(main())
