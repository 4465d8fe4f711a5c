"""One file per model family: everything the layer knows about upstream's code stands in this folder."""

from __future__ import annotations

from typing import Any

from ..errors import SeamError
from .delay import DelayFamily
from .family import Family
from .local import LocalFamily
from .local_v15 import LocalV15Family
from .realtime import RealtimeFamily

FAMILIES: tuple[type[Family], ...] = (LocalFamily, DelayFamily, RealtimeFamily, LocalV15Family)


def recognise_family(namespace: dict[str, Any]) -> Family:
    """Finds the family of a trainer by the shape of what its module defines.

    Raises:
        SeamError: it is a trainer, but of none of the families of this version.
    """
    for family in FAMILIES:
        if family.recognises(namespace):
            return family()
    known = ", ".join(family.name for family in FAMILIES)
    raise SeamError(
        f"activation: {namespace.get('__file__', 'this script')} looks like a MOSS-TTS trainer, but not like one of "
        f"the families that this version supports ({known}). Run it with MOSS_LOWMEM=0, or upgrade moss_tts_patches."
    )
