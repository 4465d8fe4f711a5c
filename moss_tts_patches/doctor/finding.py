"""One thing that a check has found: how bad, what was seen, what to do."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Literal

from ..messages import Messages

Severity = Literal["ok", "note", "warning", "error"]


@dataclass(frozen=True)
class Finding:
    """The result of a check.

    Attributes:
        check: short name, the same in every language.
        severity: ``error`` would end the training; ``warning`` may spoil or end it; ``note`` is worth knowing.
        evidence: what was found.
        advice: what to do; empty for ``ok``.
    """

    check: str
    severity: Severity
    evidence: str
    advice: str = ""

    def to_dict(self) -> dict[str, str]:
        """For JSON."""
        return asdict(self)


def finding(say: Messages, check: str, severity: Severity, text: str, **values: object) -> Finding:
    """Makes a finding of the texts ``text`` and, unless all is well, ``text.do``."""
    advice = "" if severity == "ok" else say(f"{text}.do", **values)
    return Finding(check, severity, say(text, **values), advice)
