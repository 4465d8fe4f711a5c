"""Which families of upstream this version trains, known without importing torch."""

from __future__ import annotations

import difflib

SUPPORTED = ("moss_tts_local",)  # moss_tts_patches.families.FAMILIES, by name; a test compares them
LATER = ("moss_tts_delay", "moss_tts_local_v1.5", "moss_tts_realtime")


def family_problem(name: str) -> str | None:
    """Why the family cannot be trained with the layer, in one line, or None where it can."""
    supported = ", ".join(SUPPORTED)
    if name in SUPPORTED:
        return None
    if name in LATER:
        return (
            f"MOSS_LOWMEM_FAMILY={name}: a family of MOSS-TTS that this version does not support yet. Supported: "
            f"{supported}. MOSS_LOWMEM=0 runs its official script without the layer."
        )
    nearest = difflib.get_close_matches(name, SUPPORTED + LATER, n=1, cutoff=0.0)[0]
    return f"MOSS_LOWMEM_FAMILY={name!r} is not a family; the nearest one is {nearest}. Supported: {supported}."
