"""Safetensors files read and written a few rows at a time, and the checkpoints that are made of them.

The library maps a whole file into memory, and every page that was touched counts as the process's own: merging would
hold a whole shard. The format is simple enough to read where it is: 8 bytes with the header's length, a JSON header
with dtype, shape and offsets of every tensor, and the raw values.

Source: the format as described by huggingface/safetensors, README, section "Format".
"""

from __future__ import annotations

import json
import math
import os
import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from ..errors import StateError

SINGLE, INDEX = "model.safetensors", "model.safetensors.index.json"
#: Every name that transformers gives to a file of weights, in both of its formats.
WEIGHTS = re.compile(r"(pytorch_)?model(-\d{5}-of-\d{5})?\.(safetensors|bin)(\.index\.json)?")

# 16 MiB in float32. The allocator uses blocks of this size again and again; those above 32 MiB (glibc) are mapped and
# cleared anew each time, which made a merge 1.5 (2**23) and 3 times (2**24) slower.
BLOCK_ELEMENTS = 2**22
_LONGEST_HEADER = 100_000_000  # the library's own limit

DTYPES: Mapping[str, torch.dtype] = {
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E5M2": torch.float8_e5m2,
    "I64": torch.int64,
    "I32": torch.int32,
    "I16": torch.int16,
    "I8": torch.int8,
    "U8": torch.uint8,
    "BOOL": torch.bool,
}
_NAMES = {dtype: name for name, dtype in DTYPES.items()}


@dataclass(frozen=True)
class TensorEntry:
    """One tensor of a file: dtype, shape, and where its values begin in the file, in bytes."""

    dtype: torch.dtype
    shape: tuple[int, ...]
    start: int = 0

    @property
    def row_elements(self) -> int:
        """Elements of one entry of the first dimension."""
        return math.prod(self.shape[1:])

    @property
    def bytes(self) -> int:
        return math.prod(self.shape) * self.dtype.itemsize


@dataclass(frozen=True)
class TensorFile:
    """A safetensors file whose header was read and found to agree with its length."""

    path: Path
    tensors: Mapping[str, TensorEntry]
    metadata: Mapping[str, str]

    @classmethod
    def open(cls, path: Path) -> TensorFile:
        """Reads the header.

        Raises:
            StateError: no such file, or it is no whole safetensors file.
        """
        try:
            size = path.stat().st_size
            with path.open("rb") as file:
                length = int.from_bytes(file.read(8), "little")
                if size < 8 or length > min(size - 8, _LONGEST_HEADER):
                    raise _broken(path, f"{size} bytes, fewer than its header needs")
                header = json.loads(file.read(length))
        except OSError as error:
            raise StateError(f"weights {path}: {error.strerror}. Expected a safetensors file; copy it again.") from None
        except ValueError:
            raise _broken(path, "its header is not JSON") from None
        if not isinstance(header, dict):
            raise _broken(path, "its header is no JSON object")
        metadata = header.pop("__metadata__", None) or {}
        tensors = {name: _entry(path, name, item, 8 + length) for name, item in header.items()}
        promised = 8 + length + sum(entry.bytes for entry in tensors.values())
        if promised != size:
            raise _broken(path, f"{size} bytes, where its header promises {promised}")
        return cls(path, tensors, metadata)

    def rows(self, name: str, first: int = 0, last: int | None = None) -> torch.Tensor:
        """Reads entries ``first`` to ``last`` of the first dimension, or a tensor without dimensions.

        Returns:
            A tensor of its own, in the file's dtype: ``[last - first, ...]``.
        """
        entry = self.tensors[name]
        if not entry.shape:
            shape: tuple[int, ...] = ()
        else:
            last = entry.shape[0] if last is None else last
            shape = (last - first, *entry.shape[1:])
        row_bytes = entry.row_elements * entry.dtype.itemsize
        values = torch.empty(math.prod(shape) * entry.dtype.itemsize, dtype=torch.uint8)
        if len(values):
            with self.path.open("rb", buffering=0) as file:
                file.seek(entry.start + first * row_bytes)
                _read_whole(file, values.numpy().data, self.path)
        return values.view(entry.dtype).reshape(shape)


def _read_whole(file: Any, buffer: memoryview, path: Path) -> None:
    """One call reads at most 2 GiB on Linux."""
    done = 0
    while done < len(buffer):
        count = file.readinto(buffer[done:])
        if not count:
            raise _broken(path, "it became shorter while it was read")
        done += count


def _entry(path: Path, name: str, item: Any, data: int) -> TensorEntry:
    """Reads one tensor's place from a header."""
    try:
        shape = tuple(int(length) for length in item["shape"])
        start, stop = (int(offset) for offset in item["data_offsets"])
        dtype = str(item["dtype"])
    except (KeyError, TypeError, ValueError):
        raise _broken(path, f"its header has no dtype, shape and data_offsets for {name}") from None
    if dtype not in DTYPES:
        raise _broken(path, f"{name} has dtype {dtype}, expected one of {', '.join(DTYPES)}")
    entry = TensorEntry(DTYPES[dtype], shape, data + start)
    if stop - start != entry.bytes:
        raise _broken(path, f"{name} has {stop - start} bytes, where dtype and shape need {entry.bytes}")
    return entry


def _broken(path: Path, what: str) -> StateError:
    return StateError(f"weights {path}: {what}. It is not whole; copy or save it again.")


def row_blocks(shape: tuple[int, ...]) -> Iterator[tuple[int, int]]:
    """Cuts the first dimension into ranges of at most :data:`BLOCK_ELEMENTS` elements, but at least one row."""
    rows = shape[0] if shape else 1
    step = max(1, BLOCK_ELEMENTS // max(1, math.prod(shape[1:])))
    for first in range(0, rows, step):
        yield first, min(first + step, rows)


class Checkpoint:
    """A model's weights in one file or in several with an index.

    Attributes:
        folder: where they stand.
        files: in the order of their names.
        index: content of the index file, or None for a single file.
        tensors: of all files.
    """

    def __init__(self, folder: Path) -> None:
        """Opens every file.

        Raises:
            StateError: no safetensors weights, a shard is missing or not whole, or the index names other tensors.
        """
        self.folder = folder
        self.index = _read_index(folder)
        self.files = tuple(TensorFile.open(folder / name) for name in self._file_names())
        self._owners = {name: file for file in self.files for name in file.tensors}
        self.tensors = {name: file.tensors[name] for name, file in self._owners.items()}
        if self.index is not None:
            for name, file_name in self.index["weight_map"].items():
                owner = self._owners.get(name)
                if owner is None or owner.path.name != file_name:
                    raise StateError(f"weights {folder / INDEX}: it places {name} in {file_name}, where it is not.")

    def _file_names(self) -> list[str]:
        if self.index is not None:
            names = sorted(set(self.index["weight_map"].values()))
            missing = [name for name in names if not (self.folder / name).is_file()]
            if missing:
                raise StateError(
                    f"weights {self.folder}: the index names {len(names)} shards, and {', '.join(missing)} "
                    "not found. Copy the folder again."
                )
            return names
        if (self.folder / SINGLE).is_file():
            return [SINGLE]
        if any(self.folder.glob("pytorch_model*.bin*")):
            raise StateError(
                f"weights {self.folder}: found pytorch_model.bin, expected {SINGLE}. Load it with upstream's class and "
                "call save_pretrained once; transformers then writes safetensors."
            )
        raise StateError(f"weights {self.folder}: neither {SINGLE} nor {INDEX} found.")

    def rows(self, name: str, first: int = 0, last: int | None = None) -> torch.Tensor:
        """See :meth:`TensorFile.rows`."""
        return self._owners[name].rows(name, first, last)


def adapter_keys(names: Iterable[str]) -> list[str]:
    """Names that no model of upstream has: an adapter was saved as part of it."""
    return [name for name in names if "lora_" in name or ".base_layer." in name]


def _read_index(folder: Path) -> dict[str, Any] | None:
    path = folder / INDEX
    if not path.is_file() or (folder / SINGLE).is_file():  # transformers, too, prefers the single file
        return None
    try:
        index = json.loads(path.read_text(encoding="utf-8"))
        names = index["weight_map"]
        # A name with a folder in it would make what is written land somewhere else.
        if not names or any(os.path.basename(name) != name for name in names.values()):
            raise ValueError
    except (ValueError, KeyError, TypeError, AttributeError):
        raise StateError(f"weights {path}: expected JSON with the shard of each tensor in weight_map.") from None
    return index


def write_tensors(
    path: Path,
    tensors: Mapping[str, TensorEntry],
    parts: Callable[[str], Iterable[torch.Tensor]],
    metadata: Mapping[str, str],
    progress: Callable[[int], None],
) -> None:
    """Writes a safetensors file without holding more than one part of one tensor.

    Args:
        path: of the new file.
        tensors: dtype and shape of each.
        parts: returns a tensor's consecutive parts, together of its size, in its dtype.
        metadata: for the header; ``format`` is set to ``pt``, which transformers insists on.
        progress: gets the number of bytes of each part that was written.

    Raises:
        StateError: a tensor's parts are not what was announced (a slip of ours, or a source that changed).
    """
    # The widest dtype first keeps every tensor aligned to its own size.
    names = sorted(tensors, key=lambda name: -tensors[name].dtype.itemsize)
    with path.open("wb") as file:
        file.write(_header({name: tensors[name] for name in names}, metadata))
        for name in names:
            written = 0
            for part in parts(name):
                if part.dtype != tensors[name].dtype:
                    raise StateError(f"weights {path}: {name} came as {part.dtype}, not {tensors[name].dtype}.")
                values = part.contiguous().reshape(-1).view(torch.uint8)
                file.write(values.numpy().data)
                written += len(values)
                progress(len(values))
            if written != tensors[name].bytes:
                raise StateError(f"weights {path}: {name} came to {written} bytes, not {tensors[name].bytes}.")


def _header(tensors: Mapping[str, TensorEntry], metadata: Mapping[str, str]) -> bytes:
    header: dict[str, Any] = {"__metadata__": {**metadata, "format": "pt"}}
    start = 0
    for name, entry in tensors.items():
        offsets = [start, start + entry.bytes]
        header[name] = {"dtype": _NAMES[entry.dtype], "shape": list(entry.shape), "data_offsets": offsets}
        start = offsets[1]
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    return len(text).to_bytes(8, "little") + text
