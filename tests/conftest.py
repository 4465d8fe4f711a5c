"""What every test relies on: no network, no layer unless a test asks for it, no upstream test that goes missing."""

from __future__ import annotations

import os
import shutil
import signal
import tempfile
from collections.abc import Generator
from pathlib import Path
from typing import Any

import pytest

# Set before any test imports torch or transformers, which read these once.
os.environ["HF_HUB_OFFLINE"] = "1"
os.environ["HF_HUB_DISABLE_PROGRESS_BARS"] = "1"
# Small tensors: a second thread costs more than it saves, and sums in another order. Child processes inherit it.
os.environ.setdefault("OMP_NUM_THREADS", "1")
for _name in [name for name in os.environ if name.startswith("MOSS_LOWMEM") or name == "AUTOWRAPT_BOOTSTRAP"]:
    del os.environ[_name]

# transformers copies a checkpoint's code to a cache that is keyed by the folder's name alone, and every checkpoint of
# upstream is called checkpoint-epoch-0: a shared cache would load one test's code in another.
_MODULES_CACHE = tempfile.mkdtemp(prefix="moss_lowmem_tests_")
os.environ["HF_MODULES_CACHE"] = _MODULES_CACHE

# A shell's background job ignores Ctrl-C, and so would everything that tests start and interrupt.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)

_REPO_VARIABLE = "MOSS_TTS_REPO"


def _named_upstream() -> Path | None:
    named = os.environ.get(_REPO_VARIABLE)
    return Path(named).resolve() if named else None


def pytest_configure(config: pytest.Config) -> None:
    repo = _named_upstream()
    if repo is not None and not (repo / "moss_tts_local" / "finetuning" / "sft.py").is_file():
        raise pytest.UsageError(
            f"{_REPO_VARIABLE}={repo} is not a MOSS-TTS checkout: it has no moss_tts_local/finetuning/sft.py. Correct "
            "it, or unset it to leave out the tests against the real upstream."
        )


def pytest_unconfigure(config: pytest.Config) -> None:
    shutil.rmtree(_MODULES_CACHE, ignore_errors=True)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    if _named_upstream() is None:
        skip = pytest.mark.skip(reason=f"{_REPO_VARIABLE} names no MOSS-TTS checkout")
        for item in items:
            if item.get_closest_marker("upstream"):
                item.add_marker(skip)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: pytest.Item) -> Generator[None, Any, Any]:
    """With an upstream at hand, a skipped upstream test is a failure: nobody reads a list of skips."""
    report = yield
    skipped = report.outcome == "skipped" and not hasattr(report, "wasxfail")
    if skipped and _named_upstream() is not None and item.get_closest_marker("upstream"):
        report.outcome = "failed"
        report.longrepr = f"{item.nodeid} was skipped although {_REPO_VARIABLE} is set: {report.longrepr}"
    return report


@pytest.hookimpl(wrapper=True)
def pytest_make_collect_report(collector: pytest.Collector) -> Generator[None, Any, Any]:
    """The same for a whole file that skips itself while it is imported."""
    report = yield
    skipped = report.outcome == "skipped" and isinstance(collector, pytest.Module)
    if skipped and _named_upstream() is not None and "mark.upstream" in collector.path.read_text(encoding="utf-8"):
        report.outcome = "failed"
        report.longrepr = f"{collector.nodeid} was skipped although {_REPO_VARIABLE} is set: {report.longrepr}"
    return report


@pytest.fixture(scope="session")
def upstream_repo() -> Path:
    """The real checkout; for tests with the marker ``upstream``. Nothing may be written to it."""
    repo = _named_upstream()
    assert repo is not None, "a test that uses upstream_repo needs the marker `upstream`"
    return repo


@pytest.fixture(scope="session")
def torchaudio_stub(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder for PYTHONPATH with an empty torchaudio: upstream imports it, training never calls it."""
    folder = tmp_path_factory.mktemp("torchaudio_stub")
    (folder / "torchaudio.py").write_text("", encoding="utf-8")
    return folder


@pytest.fixture
def upstream_environment(torchaudio_stub: Path, tmp_path: Path) -> dict[str, str]:
    """Variables for a process that runs the real upstream, without the layer."""
    from mini import clean_environment  # it imports torch, which the tests of the launcher do without

    environment = clean_environment(
        PYTHONPATH=str(torchaudio_stub),
        PYTHONDONTWRITEBYTECODE="1",
        HF_MODULES_CACHE=str(tmp_path / "hf_modules"),
    )
    del environment["ACCELERATE_CONFIG_FILE"]  # the miniature's; upstream's runs choose their own
    return environment
