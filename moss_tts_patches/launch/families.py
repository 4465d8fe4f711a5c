"""Which families of upstream this version trains, and how a checkpoint tells its own, without importing torch."""

from __future__ import annotations

import difflib
from collections.abc import Collection

SUPPORTED = (
    "moss_tts_local",
    "moss_tts_delay",
    "moss_tts_realtime",
    "moss_tts_local_v1.5",
)  # moss_tts_patches.families.FAMILIES, by name; a test compares them

# An entry of config.json that one family alone has; the family without one is the last resort.
_MARKS = {
    "rvq": "moss_tts_realtime",
    "gpt2_config": "moss_tts_local_v1.5",
    "local_num_layers": "moss_tts_local",
    "n_vq": "moss_tts_delay",
}


def family_of_config(entries: Collection[str]) -> str | None:
    """Returns the family that a checkpoint is of, by the names in its ``config.json``; None where nothing tells."""
    return next((name for mark, name in _MARKS.items() if mark in entries), None)


def family_problem(name: str) -> str | None:
    """Why the family cannot be trained with the layer, in one line, or None where it can."""
    supported = ", ".join(SUPPORTED)
    if name in SUPPORTED:
        return None
    nearest = difflib.get_close_matches(name, SUPPORTED, n=1, cutoff=0.0)[0]
    return f"MOSS_LOWMEM_FAMILY={name!r} is not a family; the nearest one is {nearest}. Supported: {supported}."
