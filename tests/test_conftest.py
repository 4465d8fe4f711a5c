"""The rules of tests/conftest.py, on small suites of their own."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from launcher import PROJECT, environment_of

ONE_OF_EACH = """
import os
import pytest

@pytest.mark.upstream
def test_upstream():
    if os.environ.get("SKIP_INSIDE"):
        pytest.skip("for some reason")

def test_other():
    pytest.skip("this one may")
"""
WHOLE_FILE = """
import pytest
pytest.skip("all of it", allow_module_level=True)
pytestmark = pytest.mark.upstream
"""
REPO = {"MOSS_TTS_REPO": "repo"}


@pytest.mark.parametrize(
    ("code", "variables", "status", "last_line"),
    [
        pytest.param(ONE_OF_EACH, {}, 0, "2 skipped", id="without upstream"),
        pytest.param(ONE_OF_EACH, REPO, 0, "1 passed, 1 skipped", id="with upstream"),
        pytest.param(ONE_OF_EACH, {**REPO, "SKIP_INSIDE": "1"}, 1, "1 failed, 1 skipped", id="skips itself"),
        pytest.param(WHOLE_FILE, {}, 5, "1 skipped", id="file without upstream"),  # 5: pytest ran no test
        pytest.param(WHOLE_FILE, REPO, 2, "1 error", id="file skips itself"),
        pytest.param(ONE_OF_EACH, {"MOSS_TTS_REPO": "no"}, 4, "is not a MOSS-TTS checkout", id="wrong checkout"),
    ],
)
def test_upstream_tests_do_not_go_missing(
    tmp_path: Path, code: str, variables: dict[str, str], status: int, last_line: str
) -> None:
    shutil.copy2(PROJECT / "tests" / "conftest.py", tmp_path / "conftest.py")
    (tmp_path / "pytest.ini").write_text("[pytest]\nmarkers =\n    upstream: as in the project\n")
    (tmp_path / "test_suite.py").write_text(code)
    script = tmp_path / "repo" / "moss_tts_local" / "finetuning" / "sft.py"
    script.parent.mkdir(parents=True)
    script.write_text("")
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "--strict-markers"]
    done = subprocess.run(command, cwd=tmp_path, env=environment_of(**variables), capture_output=True, text=True)
    assert last_line in (done.stdout + done.stderr).strip().splitlines()[-1]
    assert done.returncode == status


def test_no_test_shares_the_users_settings() -> None:
    assert Path(os.environ["HF_MODULES_CACHE"]).name.startswith("moss_lowmem_tests_")
    assert os.environ["HF_HUB_OFFLINE"] == "1"
    assert not any(name.startswith("MOSS_LOWMEM") for name in os.environ)


def test_upstream_processes_start_without_the_layer(upstream_environment: dict[str, str], tmp_path: Path) -> None:
    assert not any(name.startswith("MOSS_") or name == "AUTOWRAPT_BOOTSTRAP" for name in upstream_environment)
    code = "import os, shutil, torchaudio; print(shutil.which('accelerate'), os.environ['HF_MODULES_CACHE'])"
    done = subprocess.run(
        [sys.executable, "-c", code], env=upstream_environment, capture_output=True, text=True, check=True
    )
    program, cache = done.stdout.split()
    assert Path(program) == Path(sys.executable).parent / "accelerate"
    assert cache == str(tmp_path / "hf_modules")
