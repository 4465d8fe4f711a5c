"""patches/: one line of ours for each upstream sft.py, and what that line does."""

from __future__ import annotations

import difflib
import re
import subprocess
import sys
from pathlib import Path

import pytest
from launcher import PROJECT, environment_of

from moss_tts_patches.launch.families import SUPPORTED

PATCHES = PROJECT / "patches"
LINE = "import moss_tts_patches.explicit  # noqa: F401  (does nothing unless MOSS_LOWMEM=1)\n"
FAMILIES = SUPPORTED
ACTIVE = "hasattr(argparse.ArgumentParser.parse_args, '__moss_lowmem__')"


def git(folder: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(["git", *arguments], cwd=folder, capture_output=True, text=True, check=True)


def clone(upstream: Path, folder: Path, family: str) -> Path:
    """A clone of the checkout with the files of one family; objects are shared, nothing is written to the original."""
    git(folder, "clone", "--quiet", "--shared", "--no-checkout", str(upstream), "clone")
    git(folder / "clone", "checkout", "--quiet", "HEAD", "--", family)
    return folder / "clone"


def test_there_is_one_patch_for_each_family() -> None:
    assert {path.stem for path in PATCHES.glob("*.diff")} == set(FAMILIES)


@pytest.mark.parametrize("family", FAMILIES)
def test_a_patch_holds_nothing_of_upstream(family: str) -> None:
    lines = (PATCHES / f"{family}.diff").read_text(encoding="utf-8").splitlines(keepends=True)
    script = f"{family}/finetuning/sft.py"
    assert lines[:3] == [f"diff --git a/{script} b/{script}\n", f"--- a/{script}\n", f"+++ b/{script}\n"]
    hunk = re.fullmatch(r"@@ -(\d+),0 \+(\d+) @@\n", lines[3])
    assert hunk is not None and int(hunk[2]) == int(hunk[1]) + 1
    assert lines[4:] == ["+" + LINE]


@pytest.mark.parametrize(("switch", "active"), [(None, False), ("0", False), ("1", True)])
def test_the_line_activates_without_a_start_up_hook(switch: str | None, active: bool) -> None:
    environment = environment_of(**({} if switch is None else {"MOSS_LOWMEM": switch}))
    code = f"import argparse, sys\n{LINE}print({ACTIVE}, 'torch' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=True)
    assert done.stdout == f"{active} False\n"


def test_hook_and_line_together_are_one_activation() -> None:
    environment = environment_of(MOSS_LOWMEM="1", AUTOWRAPT_BOOTSTRAP="moss_tts_patches")
    code = f"import argparse\nbefore = argparse.ArgumentParser.parse_args\nassert {ACTIVE}\n{LINE}"
    code += "print(argparse.ArgumentParser.parse_args is before)"
    done = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=True)
    assert done.stdout == "True\n"


@pytest.mark.upstream
@pytest.mark.parametrize("family", FAMILIES)
def test_a_patch_adds_its_line_where_it_works(upstream_repo: Path, tmp_path: Path, family: str) -> None:
    checkout = clone(upstream_repo, tmp_path, family)
    script = checkout / family / "finetuning" / "sft.py"
    before = script.read_text(encoding="utf-8").splitlines(keepends=True)
    patch = str(PATCHES / f"{family}.diff")
    git(checkout, "apply", "--unidiff-zero", patch)
    after = script.read_text(encoding="utf-8").splitlines(keepends=True)
    changes = [line for line in difflib.ndiff(before, after) if line[0] != " "]
    assert changes == ["+ " + LINE]
    # Directly below the import of argparse, and above anything that could parse arguments.
    assert after[after.index(LINE) - 1] == "import argparse\n"
    compile("".join(after), str(script), "exec")
    git(checkout, "apply", "--unidiff-zero", "-R", patch)
    assert script.read_text(encoding="utf-8").splitlines(keepends=True) == before


@pytest.mark.upstream
def test_a_patched_trainer_activates_the_layer(
    upstream_repo: Path, tmp_path: Path, upstream_environment: dict[str, str]
) -> None:
    """Shown by a setting that only the layer refuses; without the patch nobody reads it."""
    checkout = clone(upstream_repo, tmp_path, "moss_tts_local")
    command = [sys.executable, "moss_tts_local/finetuning/sft.py", "--help"]
    environment = {**upstream_environment, "MOSS_LOWMEM": "1", "MOSS_LOWMEM_SCHEDULE": "none_such"}
    for patched, status, expected in ((False, 0, "--train-jsonl"), (True, 1, "[lowmem] error: MOSS_LOWMEM_SCHEDULE")):
        if patched:
            git(checkout, "apply", "--unidiff-zero", str(PATCHES / "moss_tts_local.diff"))
        done = subprocess.run(command, cwd=checkout, env=environment, capture_output=True, text=True, timeout=120)
        assert done.returncode == status, done.stderr
        assert expected in done.stdout + done.stderr
