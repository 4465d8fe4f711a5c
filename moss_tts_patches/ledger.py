"""Every patch that was applied: what, where, why, and what was there before."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from .errors import SeamError

_ABSENT = object()


@dataclass(frozen=True)
class Patch:
    """One name on one owner (a module, a class or an instance) that now holds something of ours."""

    owner: Any
    name: str
    replacement: Any
    previous: Any
    reason: str

    @property
    def place(self) -> str:
        named = self.owner if hasattr(self.owner, "__name__") else type(self.owner)
        return f"{getattr(named, '__qualname__', named.__name__)}.{self.name}"


class Ledger:
    """Applies and undoes patches; undoing restores exactly what the owner's ``__dict__`` held."""

    def __init__(self) -> None:
        self._patches: list[Patch] = []

    def apply(self, owner: Any, name: str, replacement: Any, reason: str) -> None:
        """Puts ``replacement`` at ``owner.name``; a second application at the same place is a no-op.

        The previous value is read from ``__dict__``, never through attribute access or ``__wrapped__``: a bound or
        inherited class method put back as an attribute would pin it to the wrong class.
        """
        if any(patch.owner is owner and patch.name == name for patch in self._patches):
            return
        previous = vars(owner).get(name, _ABSENT)
        self._patches.append(Patch(owner, name, replacement, previous, reason))
        setattr(owner, name, replacement)

    def undo(self) -> None:
        """Takes every patch back, the last one first."""
        while self._patches:
            patch = self._patches.pop()
            if patch.previous is _ABSENT:
                delattr(patch.owner, patch.name)
            else:
                setattr(patch.owner, patch.name, patch.previous)

    def verify(self) -> None:
        """Checks that every patch still stands.

        Raises:
            SeamError: something has overwritten one since.
        """
        lost = [patch.place for patch in self._patches if vars(patch.owner).get(patch.name) is not patch.replacement]
        if lost:
            raise SeamError(
                f"ledger: {', '.join(lost)} no longer holds the layer's patch: something replaced it after activation. "
                "Training would run partly patched. Find what imports or patches upstream after start-up, or unset "
                "MOSS_LOWMEM."
            )

    def __iter__(self):  # type: ignore[no-untyped-def]
        return iter(tuple(self._patches))

    def __len__(self) -> int:
        return len(self._patches)
