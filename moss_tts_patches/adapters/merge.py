"""Turns an adapter and its base into a checkpoint of upstream's own form, on the CPU, a few rows at a time.

Everything that can be wrong is found before the first byte is written, and the folder appears as a whole.
"""

from __future__ import annotations

import dataclasses
import json
import os
import re
import shutil
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from ..errors import EnvironmentProblem, NumericsError, SettingsError, StateError
from ..runtime.saving import whole_folder
from ..units import GIB
from .adapter_folder import AdapterFolder
from .peft_merge import PeftMerge
from .record import ADAPTER, MERGED, AdapterRecord
from .safetensors_shards import INDEX, Checkpoint, TensorEntry, adapter_keys, row_blocks, write_tensors
from .support_files import support_files

#: What the merged weights can be stored in.
OUTPUT_DTYPES = ("bfloat16", "float16", "float32")
_HUB_ID = re.compile(r"[\w.-]+/[\w.-]+")
_DTYPE_KEYS = ("dtype", "torch_dtype")  # of transformers 5 and of those before


def _ignore(_: Any) -> None:
    pass


@dataclass(frozen=True)
class MergeReport:
    """What was written.

    Attributes:
        base: folder that the weights came from.
        dtype: of the floating-point weights.
        merged_modules: number of modules that an adapter changed.
        replaced_tensors: number of tensors that were trained as a whole.
        shards: number of files of weights.
        bytes: of all weights.
    """

    output: Path
    base: Path
    dtype: str
    merged_modules: int
    replaced_tensors: int
    shards: int
    bytes: int


def merge_adapter(
    adapter: Path,
    output: Path,
    base: Path | str | None = None,
    dtype: str | None = None,
    say: Callable[[str], None] = _ignore,
    *,
    tied: Sequence[str] = (),
    replace: bool = False,
    progress: Callable[[str, int, int], None] | None = None,
) -> MergeReport:
    """Merges ``adapter`` into its base and writes a checkpoint that upstream loads like any other.

    Not to be called while another folder is being saved beside ``output``: what an interrupted save left there is
    cleared up first.

    Args:
        adapter: a PEFT adapter; ``lowmem.json`` in it is used where it is there.
        output: a folder that does not exist yet or is empty, unless ``replace`` is set.
        base: folder or hub id of the base, where it is not the one that the adapter names.
        dtype: one of :data:`OUTPUT_DTYPES`; by default what the trainer held the base in, else what the base is in.
        say: gets a line for each step.
        tied: regular expressions over whole names of modules that share their weight with another one.
        replace: write a new checkpoint in the place of one that stands at ``output``, as upstream's saving does.
        progress: gets the name of a shard, the bytes of all shards that were written, and the bytes in all.

    Raises:
        StateError: adapter or base is broken, or they do not belong together.
        EnvironmentProblem: the base is not found, the disk is full, or something stands at ``output``.
        SettingsError: ``dtype`` is not one of those that can be written.
        NumericsError: a merged weight is not finite, or not in ``dtype``.
    """
    if not replace:
        _check_output(output)
    merge = _Merge(adapter, output, base, dtype, tied)
    say(f"base={merge.base.folder} adapter={adapter} dtype={merge.dtype} modules={len(merge.adapter.targets)}")
    try:
        output.parent.mkdir(parents=True, exist_ok=True)
        with whole_folder(output, say) as folder:
            folder.mkdir()
            merge.write(folder, progress)
    except OSError as error:
        raise EnvironmentProblem(
            f"output {output}: {error.strerror or error} ({error.filename or 'while writing'}). Nothing was left "
            "there; the adapter is as it was."
        ) from error
    say(f"merged={output} shards={len(merge.base.files)} size={merge.bytes / GIB:.2f}GiB")
    return MergeReport(
        output=output,
        base=merge.base.folder,
        dtype=merge.dtype,
        merged_modules=len(merge.adapter.targets),
        replaced_tensors=len(merge.adapter.replaced),
        shards=len(merge.base.files),
        bytes=merge.bytes,
    )


class _Merge:
    """A merge of which everything was checked."""

    def __init__(
        self, adapter: Path, output: Path, base: Path | str | None, dtype: str | None, tied: Sequence[str]
    ) -> None:
        self.record = AdapterRecord.find(adapter)
        if self.record is not None and self.record.kind != ADAPTER:
            raise StateError(f"adapter {adapter}: its record says {self.record.kind}; there is nothing to merge.")
        self.adapter = AdapterFolder(adapter)
        self.peft = PeftMerge(self.adapter)
        named = self.record.base_model if self.record else self.peft.config.base_model_name_or_path
        self.base = Checkpoint(_find_base(base, named, self.peft.config.revision))
        self.config = _read_base_config(self.base)
        self.peft.check(self.base.tensors, tied)
        self.dtype = _output_dtype(dtype, self.record, self.config, self.base)
        self.files = {**support_files(self.base.folder), **support_files(adapter)}
        self.bytes = sum(self._entry(entry).bytes for entry in self.base.tensors.values())
        _check_space(output, self.bytes + sum(path.stat().st_size for path in self.files.values()))

    def write(self, folder: Path, progress: Callable[[str, int, int], None] | None) -> None:
        """Writes the checkpoint into ``folder``."""
        done = 0
        for number, file in enumerate(self.base.files, start=1):
            shard = f"shard {number} of {len(self.base.files)}"

            def count(size: int, shard: str = shard) -> None:
                nonlocal done
                done += size
                if progress is not None:
                    progress(shard, done, self.bytes)

            entries = {name: self._entry(entry) for name, entry in file.tensors.items()}
            write_tensors(folder / file.path.name, entries, self._parts, file.metadata, count)
        if self.base.index is not None:
            metadata = {**(self.base.index.get("metadata") or {}), "total_size": self.bytes}
            _write_json(folder / INDEX, {**self.base.index, "metadata": metadata})
        for name, source in self.files.items():
            (folder / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(source, folder / name)
        _write_json(folder / "config.json", _with_dtype(self.config, self.dtype))
        if self.record is not None:
            dataclasses.replace(self.record, kind=MERGED).write(folder)

    def _entry(self, entry: TensorEntry) -> TensorEntry:
        """What becomes of a tensor of the base: integers stay."""
        dtype = getattr(torch, self.dtype) if entry.dtype.is_floating_point else entry.dtype
        return TensorEntry(dtype, entry.shape)

    def _parts(self, name: str) -> Iterator[torch.Tensor]:
        """Yields a tensor's new values, a block of rows at a time."""
        target = self._entry(self.base.tensors[name]).dtype
        if self.peft.changes(name):
            module, _, kind = name.rpartition(".")
            parts = self._merged_parts(module, kind)
        else:
            parts = (self._rows(name, *block) for block in row_blocks(self.base.tensors[name].shape))
        for values in parts:
            yield _converted(values, target, name)

    def _merged_parts(self, module: str, kind: str) -> Iterator[torch.Tensor]:
        """Weight or bias of an adapted module; each needs the weight, which a shard may hold apart from the bias."""
        weight, bias = f"{module}.weight", f"{module}.bias"
        for first, last in self.peft.blocks(module, self.base.tensors[weight].shape):
            bias_rows = self._rows(bias, first, last) if bias in self.base.tensors else None
            merged = self.peft.merged(module, self._rows(weight, first, last), bias_rows, first, last)
            values = merged[("weight", "bias").index(kind)]
            assert values is not None
            yield values

    def _rows(self, name: str, first: int, last: int) -> torch.Tensor:
        """Rows before merging: of the adapter's file where they were trained as a whole, else of the base."""
        if name in self.adapter.replaced:
            return self.adapter.file.rows(self.adapter.replaced[name], first, last)
        return self.base.rows(name, first, last)


def _converted(values: torch.Tensor, dtype: torch.dtype, name: str) -> torch.Tensor:
    """Rounds once, to the nearest."""
    result = values.to(dtype)
    if dtype == torch.float16 and bool((result.isinf() & values.isfinite()).any()):
        raise NumericsError(f"merge: {name} has values beyond what float16 can hold. Use --dtype bfloat16.")
    return result


def _check_output(output: Path) -> None:
    if output.is_dir() and not any(output.iterdir()):
        return
    if os.path.lexists(output):
        raise EnvironmentProblem(
            f"output {output}: something stands there already. Expected a new or an empty folder; move it away, or "
            "name another one with --output."
        )


def _find_base(given: Path | str | None, named: str | None, revision: str | None) -> Path:
    """Returns the folder with the base's weights."""
    wanted = str(given) if given is not None else named
    if not wanted:
        raise EnvironmentProblem("base: the adapter names none. Pass the model that it was trained on with --base.")
    folder = Path(wanted)
    if not folder.is_dir() and _HUB_ID.fullmatch(wanted):
        folder = _cached_snapshot(wanted, revision) or folder
    if not folder.is_dir():
        raise EnvironmentProblem(
            f"base {wanted}: no folder of that name, and no model of it in the local hub cache. Pass the folder with "
            "the base model's config.json and weights with --base."
        )
    if not (folder / "config.json").is_file():
        raise EnvironmentProblem(f"base {folder}: no config.json found. Pass the base model's folder with --base.")
    return folder


def _cached_snapshot(hub_id: str, revision: str | None) -> Path | None:
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import HFValidationError, LocalEntryNotFoundError

    try:
        return Path(snapshot_download(hub_id, revision=revision, local_files_only=True))
    except (LocalEntryNotFoundError, HFValidationError):
        return None


def _read_base_config(base: Checkpoint) -> dict[str, Any]:
    """Reads ``config.json`` and refuses what is not a plain model."""
    path = base.folder / "config.json"
    try:
        config = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise StateError(f"base {path}: not JSON ({error}). Copy it again.") from None
    if not isinstance(config, dict):
        raise StateError(f"base {path}: found a {type(config).__name__}, expected a JSON object.")
    if config.get("quantization_config"):
        raise StateError(
            f"base {base.folder}: its weights are quantised. An adapter trained with QLoRA, too, is merged into the "
            "16-bit model; pass that with --base."
        )
    leftover = adapter_keys(base.tensors)
    if leftover:
        raise StateError(
            f"base {base.folder}: {leftover[0]} and {len(leftover) - 1} more tensors belong to an adapter that was "
            "saved inside a model. Pass the original base with --base."
        )
    return config


def _output_dtype(wanted: str | None, record: AdapterRecord | None, config: dict[str, Any], base: Checkpoint) -> str:
    """Returns the first of: what was asked for, what was trained in, what the config says, what the files hold."""
    stored: dict[str, int] = {}
    for entry in base.tensors.values():
        if entry.dtype.is_floating_point:
            name = str(entry.dtype).removeprefix("torch.")
            stored[name] = stored.get(name, 0) + entry.bytes
    configured = next((config[key] for key in _DTYPE_KEYS if config.get(key)), None)
    most = max(stored, key=lambda name: stored[name], default=None)
    dtype = wanted or (record.base_dtype if record else None) or configured or most
    if dtype not in OUTPUT_DTYPES:
        raise SettingsError(f"merge: dtype is {dtype!r}, expected one of {', '.join(OUTPUT_DTYPES)}; pass --dtype.")
    return dtype


def _with_dtype(config: dict[str, Any], dtype: str) -> dict[str, Any]:
    """Makes the config agree with the weights."""
    changed = _renamed_dtypes(config, dtype)
    return changed if any(changed.get(key) for key in _DTYPE_KEYS) else {**changed, _DTYPE_KEYS[0]: dtype}


def _renamed_dtypes(config: dict[str, Any], dtype: str) -> dict[str, Any]:
    """The configs of parts name a dtype of their own, or none."""

    def renamed(key: str, value: Any) -> Any:
        if isinstance(value, dict):
            return _renamed_dtypes(value, dtype)
        return dtype if key in _DTYPE_KEYS and value else value

    return {key: renamed(key, value) for key, value in config.items()}


def _check_space(output: Path, needed: int) -> None:
    folder = next(parent for parent in output.absolute().parents if parent.is_dir())
    free = shutil.disk_usage(folder).free
    if free < needed:
        raise EnvironmentProblem(
            f"disk {folder}: {free / GIB:.1f} GiB are free and the merged model takes {needed / GIB:.1f}. Make room, "
            "or name a folder on another disk with --output."
        )


def _write_json(path: Path, content: Any) -> None:
    path.write_text(json.dumps(content, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")
