"""Keeps the figures of simulations by content: what was simulated, with which code and which versions."""

from __future__ import annotations

import functools
import hashlib
import importlib.metadata
import json
import os
import tempfile
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from .. import __version__

_PACKAGE = Path(__file__).resolve().parents[1]
# A figure depends on these; the package's version does not change between two commits, its sources do.
_SOURCES = ("families", "loss", "optim", "memory", "runtime", "adapters")
_DISTRIBUTIONS = ("torch", "transformers", "accelerate", "peft")


class PlanCache:
    """JSON documents in a folder, named by the hash of what they are the answer to.

    A cache that cannot be read or written is no error: the simulation is run again.

    Args:
        folder: made when something is kept.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    @staticmethod
    def key(content: Mapping[str, Any]) -> str:
        """Names what is asked for; sources and versions belong to it."""
        document = json.dumps([content, _code()], sort_keys=True, default=str)
        return hashlib.sha256(document.encode()).hexdigest()[:32]

    def read(self, key: str) -> Any:
        """Returns the document, or None."""
        try:
            return json.loads((self.folder / f"{key}.json").read_text(encoding="utf-8"))
        except (OSError, ValueError):
            return None

    def write(self, key: str, document: Any) -> None:
        """Keeps the document; whoever reads at the same time sees all of it or nothing."""
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
            handle, name = tempfile.mkstemp(dir=self.folder, suffix=".tmp")
            with open(handle, "w", encoding="utf-8") as file:
                json.dump(document, file)
            os.replace(name, self.folder / f"{key}.json")
        except OSError:
            return


def user_cache_folder(environment: Mapping[str, str], home: Path) -> Path:
    """Where a user's caches stand.

    Source: XDG Base Directory Specification, ``XDG_CACHE_HOME``; the same place is used on every system.
    """
    base = environment.get("XDG_CACHE_HOME")
    return (Path(base) if base and os.path.isabs(base) else home / ".cache") / "moss_tts_patches" / "plans"


def hash_files(paths: Iterable[Path]) -> str:
    """Returns a hash of the files' contents, in the order of their names."""
    digest = hashlib.sha256()
    for path in sorted(paths):
        digest.update(path.name.encode() + b"\0" + path.read_bytes())
    return digest.hexdigest()[:16]


@functools.cache
def _code() -> dict[str, str]:
    versions = {name: _version(name) for name in _DISTRIBUTIONS}
    files = [path for folder in _SOURCES for path in (_PACKAGE / folder).rglob("*.py")]
    return {**versions, "moss_tts_patches": __version__, "sources": hash_files(files)}


def _version(distribution: str) -> str:
    try:
        return importlib.metadata.version(distribution)
    except importlib.metadata.PackageNotFoundError:
        return ""
