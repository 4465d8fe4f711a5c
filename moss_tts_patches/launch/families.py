"""Which families of upstream this version trains, known without importing torch."""

from __future__ import annotations

import difflib

SUPPORTED = (
    "moss_tts_local",
    "moss_tts_delay",
    "moss_tts_realtime",
    "moss_tts_local_v1.5",
)  # moss_tts_patches.families.FAMILIES, by name; a test compares them


def family_problem(name: str) -> str | None:
    """Why the family cannot be trained with the layer, in one line, or None where it can."""
    supported = ", ".join(SUPPORTED)
    if name in SUPPORTED:
        return None
    nearest = difflib.get_close_matches(name, SUPPORTED, n=1, cutoff=0.0)[0]
    return f"MOSS_LOWMEM_FAMILY={name!r} is not a family; the nearest one is {nearest}. Supported: {supported}."
