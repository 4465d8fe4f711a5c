"""``lowmem.json``: what a folder that the layer saved holds and how it came about, beside PEFT's own files."""

from __future__ import annotations

import dataclasses
import json
import os
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from ..errors import EnvironmentProblem, StateError

RECORD_NAME = "lowmem.json"
FORMAT = 1
ADAPTER, MERGED = "adapter", "merged"

# JSON has one kind of number; PEFT's lora_alpha is a whole number by its annotation and a fraction in the wild.
_TYPES: dict[str, tuple[type, ...]] = {
    "str": (str,),
    "int": (int,),
    "float": (int, float),
    "tuple[str, ...]": (list,),
    "dict[str, Any]": (dict,),
    "dict[str, str]": (dict,),
}
_CHOICES = {"kind": (ADAPTER, MERGED), "method": ("lora", "qlora")}


@dataclass(frozen=True, kw_only=True)
class AdapterRecord:
    """Where an adapter, or a checkpoint with one merged into it, comes from.

    Attributes:
        kind: ``adapter`` or ``merged``.
        family: upstream's folder name, such as ``moss_tts_local``.
        base_model: path or hub id, as given to the trainer.
        base_dtype: in which the trainer held the base, such as ``bfloat16``.
        method: ``lora`` or ``qlora``.
        rank: PEFT's ``r``.
        alpha: PEFT's ``lora_alpha``.
        targets: as asked for: groups or patterns.
        fully_trained: what was trained as a whole beside the adapters, as asked for.
        steps: optimizer steps done.
        epoch: the trainer's own count at the time of saving.
        settings: the layer's settings of that run.
        versions: of packages, by name.
    """

    kind: str
    family: str
    base_model: str
    base_dtype: str
    method: str
    rank: int
    alpha: float
    targets: tuple[str, ...]
    fully_trained: tuple[str, ...] = ()
    steps: int
    epoch: int
    settings: dict[str, Any] = field(default_factory=dict)
    versions: dict[str, str] = field(default_factory=dict)

    def write(self, folder: Path) -> None:
        """Writes the record into ``folder`` as a whole, in place of one that stands there."""
        text = json.dumps({"format": FORMAT, **dataclasses.asdict(self)}, indent=2, ensure_ascii=False) + "\n"
        unfinished = folder / f"{RECORD_NAME}.incomplete-{os.getpid()}"
        try:
            with unfinished.open("w", encoding="utf-8") as file:
                file.write(text)
                file.flush()
                os.fsync(file.fileno())
            os.replace(unfinished, folder / RECORD_NAME)
        except BaseException:
            unfinished.unlink(missing_ok=True)
            raise

    @classmethod
    def read(cls, folder: Path) -> AdapterRecord:
        """Reads the record of ``folder``; fields that this version does not know are left out.

        Raises:
            EnvironmentProblem: there is none, or it cannot be opened.
            StateError: it is no record, is of a newer format, or lacks a field.
        """
        path = folder / RECORD_NAME
        try:
            content = json.loads(path.read_text(encoding="utf-8"))
        except OSError as error:
            raise EnvironmentProblem(
                f"record {path}: {error.strerror}. Expected the file that moss_tts_patches writes into every adapter "
                "folder; was only a part of the folder copied?"
            ) from None
        except ValueError as error:
            raise StateError(f"record {path}: not JSON ({error}). Copy the folder again, or save it again.") from None
        return cls._from_json(content, path)

    @classmethod
    def find(cls, folder: Path) -> AdapterRecord | None:
        """Like :meth:`read`, but returns None where there is no record: another tool wrote that folder."""
        return cls.read(folder) if os.path.lexists(folder / RECORD_NAME) else None

    @classmethod
    def _from_json(cls, content: Any, path: Path) -> AdapterRecord:
        if not isinstance(content, dict):
            raise StateError(f"record {path}: found a {type(content).__name__}, expected a JSON object.")
        found = content.get("format")
        if found != FORMAT or isinstance(found, bool):
            advice = "upgrade moss_tts_patches" if isinstance(found, int) and found > FORMAT else "save it again"
            raise StateError(f"record {path}: format is {found!r}, expected {FORMAT}; {advice}.")
        fields = dataclasses.fields(cls)
        missing = [item.name for item in fields if item.name not in content]
        if missing:
            raise StateError(f"record {path}: {', '.join(missing)} not found. Copy the folder again, or save it again.")
        values = {item.name: _checked(item, content[item.name], path) for item in fields}
        return cls(**values)


def _checked(item: dataclasses.Field[Any], value: Any, path: Path) -> Any:
    """Returns a field's value from JSON in its own type."""
    annotation = str(item.type)  # a string, by the __future__ import
    choices = _CHOICES.get(item.name)
    fits = isinstance(value, _TYPES[annotation]) and not isinstance(value, bool)
    if fits and annotation.startswith("tuple"):
        fits = all(isinstance(entry, str) for entry in value)
    if not fits or (choices is not None and value not in choices):
        expected = " or ".join(choices) if choices else annotation
        raise StateError(f"record {path}: {item.name} is {value!r}, expected {expected}.")
    return tuple(value) if annotation.startswith("tuple") else value
