"""Models that a hub has and this machine's cache holds; nothing is downloaded."""

from __future__ import annotations

from pathlib import Path


def cached_config(name: str) -> Path | None:
    """Returns a hub repository's ``config.json`` in the cache; None where it is not there.

    Raises:
        ValueError: ``name`` has not the form of a repository's.
    """
    from huggingface_hub import try_to_load_from_cache

    found = try_to_load_from_cache(name, "config.json")
    return Path(found) if isinstance(found, str) else None
