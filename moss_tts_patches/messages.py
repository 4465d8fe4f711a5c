"""What the doctor and the memory reports say, in English and Chinese; the only place that decides the language.

Log lines and errors of a training stay English, as upstream's are: people search for them. What explains a machine to
its owner is written here, each sentence in both languages, under one name.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

from .message_texts import TEXTS
from .units import GIB

Language = Literal["en", "zh"]


def language_of(environment: Mapping[str, str]) -> Language:
    """Chinese where the locale for messages is Chinese.

    Source: POSIX.1-2017, 8.2: ``LC_ALL`` wins over ``LC_MESSAGES``, that over ``LANG``; an empty value is no value.
    """
    for name in ("LC_ALL", "LC_MESSAGES", "LANG"):
        value = environment.get(name, "")
        if value:
            return "zh" if value.lower().startswith("zh") else "en"
    return "en"


@dataclass(frozen=True)
class Messages:
    """The texts in one language: ``messages("disk_full", free="2.0 GiB")``."""

    language: Language = "en"

    def __call__(self, name: str, **values: object) -> str:
        """Returns the text.

        Raises:
            KeyError: there is no text of that name, or a value that it needs is missing (a slip of ours).
        """
        english, chinese = TEXTS[name]
        return (chinese if self.language == "zh" else english).format(**values)


def gib(size_bytes: int | None) -> str:
    """``1.50 GiB``; ``?`` where it is not known."""
    return "?" if size_bytes is None else f"{size_bytes / GIB:.2f} GiB"
