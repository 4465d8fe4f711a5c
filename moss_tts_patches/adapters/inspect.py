"""Says what a folder holds and whether it is whole, from headers and records alone: no weight is read."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ..errors import EnvironmentProblem, LowMemError, StateError
from .adapter_folder import CONFIG, WEIGHTS, AdapterFolder
from .record import ADAPTER, MERGED, RECORD_NAME, AdapterRecord
from .safetensors_shards import WEIGHTS as MODEL_WEIGHTS
from .safetensors_shards import Checkpoint, TensorEntry, adapter_keys

FULL, BROKEN = "full checkpoint", "broken"

_UNFINISHED = re.compile(r".+\.incomplete-\d+", re.DOTALL)


@dataclass(frozen=True)
class FolderDescription:
    """What a folder is; fields that it says nothing about are None or empty.

    Attributes:
        kind: ``full checkpoint``, ``adapter``, ``merged`` or ``broken``.
        problems: why it is broken, one line each.
        base: model that an adapter belongs to.
        targets: as asked for where the layer saved it, else as PEFT's config names them.
        bytes: of all tensors.
        dtypes: bytes by dtype, such as ``bfloat16``.
    """

    path: str
    kind: str
    problems: tuple[str, ...] = ()
    family: str | None = None
    base: str | None = None
    method: str | None = None
    rank: int | None = None
    alpha: float | None = None
    targets: tuple[str, ...] = ()
    fully_trained: tuple[str, ...] = ()
    steps: int | None = None
    epoch: int | None = None
    tensors: int = 0
    bytes: int = 0
    dtypes: Mapping[str, int] | None = None

    @property
    def is_whole(self) -> bool:
        return self.kind != BROKEN


def describe_folder(path: Path) -> FolderDescription:
    """Describes ``path``.

    Raises:
        EnvironmentProblem: there is no such folder.
    """
    if not path.is_dir():
        what = "a file" if path.exists() else "nothing"
        raise EnvironmentProblem(f"inspect {path}: found {what}, expected the folder of a checkpoint or an adapter.")
    found = _Findings(path)
    if _UNFINISHED.fullmatch(path.resolve().name):
        found.problems.append("its name says that the save was not finished; the process was killed, or still writes")
    record = found.take(lambda: AdapterRecord.find(path))
    if record is not None:
        found.facts.update(_facts_of(record))
    if any((path / name).exists() for name in (CONFIG, WEIGHTS, "adapter_model.bin")):
        found.adapter(record)
    else:
        found.checkpoint(record)
    return found.description()


class _Findings:
    """Gathers facts and problems; a problem does not keep the rest from being looked at."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.kind = FULL
        self.problems: list[str] = []
        self.facts: dict[str, Any] = {}

    def take(self, look: Any) -> Any:
        """Returns what ``look`` returns, or None and one problem more."""
        try:
            return look()
        except LowMemError as error:
            self.problems.append(str(error))
            return None

    def adapter(self, record: AdapterRecord | None) -> None:
        self.kind = ADAPTER
        if any(MODEL_WEIGHTS.fullmatch(entry.name) for entry in self.path.iterdir()):
            self.problems.append("it holds an adapter and a model's weights; transformers would load one on the other")
        if record is not None and record.kind != ADAPTER:
            self.problems.append(f"{RECORD_NAME} says {record.kind}, and PEFT's files say adapter")
        folder = self.take(lambda: AdapterFolder(self.path))
        if folder is None:
            return
        self.take(folder.check_pairs)
        self._count(folder.file.tensors)
        if record is None:
            self.facts.update(_facts_of_peft(folder.config))

    def checkpoint(self, record: AdapterRecord | None) -> None:
        self.kind = MERGED if record is not None and record.kind == MERGED else FULL
        if record is not None and record.kind == ADAPTER:
            self.problems.append(f"{RECORD_NAME} says adapter, and neither {CONFIG} nor {WEIGHTS} was found")
            return
        checkpoint = self.take(lambda: Checkpoint(self.path))
        if checkpoint is None:
            return
        self._count(checkpoint.tensors)
        self.take(lambda: _check_config(self.path))
        strange = adapter_keys(checkpoint.tensors)
        if strange:
            self.problems.append(
                f"{len(strange)} of its tensors are an adapter's, {strange[0]} among them: upstream would leave them "
                "out and give the layers they belong to random values"
            )

    def _count(self, tensors: Mapping[str, TensorEntry]) -> None:
        self.facts.update(
            tensors=len(tensors),
            bytes=sum(entry.bytes for entry in tensors.values()),
            dtypes=_bytes_by_dtype(tensors.values()),
        )
        if not tensors:
            self.problems.append("its weights hold no tensor")

    def description(self) -> FolderDescription:
        kind = BROKEN if self.problems else self.kind
        return FolderDescription(path=str(self.path), kind=kind, problems=tuple(self.problems), **self.facts)


def _facts_of(record: AdapterRecord) -> dict[str, Any]:
    names = ("family", "method", "rank", "alpha", "targets", "fully_trained", "steps", "epoch")
    return {"base": record.base_model, **{name: getattr(record, name) for name in names}}


def _facts_of_peft(config: Mapping[str, Any]) -> dict[str, Any]:
    """The same facts of an adapter that another tool saved, as far as PEFT's config has them."""
    targets = config.get("target_modules") or ()
    return {
        "base": config.get("base_model_name_or_path"),
        "method": "lora",
        "rank": config.get("r"),
        "alpha": config.get("lora_alpha"),
        "targets": (targets,) if isinstance(targets, str) else tuple(sorted(targets)),
        "fully_trained": tuple(config.get("modules_to_save") or ()),
    }


def _bytes_by_dtype(entries: Iterable[TensorEntry]) -> dict[str, int]:
    found: dict[str, int] = {}
    for entry in entries:
        name = str(entry.dtype).removeprefix("torch.")
        found[name] = found.get(name, 0) + entry.bytes
    return dict(sorted(found.items(), key=lambda item: -item[1]))


def _check_config(folder: Path) -> None:
    try:
        json.loads((folder / "config.json").read_text(encoding="utf-8"))
    except OSError:
        raise StateError("config.json was not found; upstream cannot tell which class the weights belong to") from None
    except ValueError as error:
        raise StateError(f"config.json is not JSON ({error})") from None
