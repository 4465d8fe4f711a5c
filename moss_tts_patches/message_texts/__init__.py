"""The sentences of :mod:`moss_tts_patches.messages`: name -> (English, Chinese).

A name with ``.do`` is the advice to the finding of that name.
"""

from .doctor import DOCTOR_TEXTS
from .reports import REPORT_TEXTS

TEXTS: dict[str, tuple[str, str]] = {**DOCTOR_TEXTS, **REPORT_TEXTS}
