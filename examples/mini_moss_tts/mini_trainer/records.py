"""Finding the training files, reading this rank's records, and batching them."""

from __future__ import annotations

import glob
import json
import re
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import torch
from torch.utils.data import Dataset

from .prompts import ChatPrompts, FramePrompts

IGNORE_INDEX = -100
SHARD_NAME = re.compile(r"\.rank(\d+)-of-(\d+)\.jsonl$")


def shard_paths_for_rank(paths: list[Path], world_size: int, rank: int) -> tuple[list[Path], bool]:
    """Picks a rank's own files if all are named ``*.rankR-of-N.jsonl`` with one N, else every file.

    Returns:
        The files, and whether they are this rank's alone.

    Raises:
        ValueError: the files are shards and none is for this rank.
    """
    shards = [SHARD_NAME.search(path.name) for path in paths]
    if world_size <= 1 or None in shards or len({shard[2] for shard in shards if shard}) != 1:
        return paths, False
    own = [path for path, shard in zip(paths, shards) if shard and int(shard[1]) % world_size == rank]
    if not own:
        raise ValueError(f"none of the {len(paths)} shard files is for rank {rank} of {world_size}")
    return own, True


def load_jsonl_for_rank(
    spec: str, world_size: int, rank: int
) -> tuple[list[Path], list[dict[str, Any]], list[Path], bool]:
    """Reads the records that a rank works on.

    Args:
        spec: a file, a folder, a glob pattern, or several of them separated by commas.

    Returns:
        All files, this rank's records, this rank's files, whether the files were sharded beforehand.

    Raises:
        ValueError: a part of ``spec`` matches no file.
    """
    found: dict[Path, Path] = {}
    for part in filter(None, map(str.strip, spec.split(","))):
        matches = list(Path(part).glob("*.jsonl")) if Path(part).is_dir() else [Path(name) for name in glob.glob(part)]
        if not matches:
            raise ValueError(f"--train-jsonl: no file matches {part}; expected a .jsonl file, a folder or a pattern")
        found.update((path.resolve(), path) for path in sorted(matches))
    files = list(found.values())
    own, sharded = shard_paths_for_rank(files, world_size, rank)
    # Not splitlines(): it also breaks at U+2028 and the like, which JSON leaves unescaped inside a text.
    lines = (line for path in own for line in path.read_text(encoding="utf-8").split("\n"))
    return files, [json.loads(line) for line in lines if line.strip()], own, sharded


class SpeechDataset(Dataset):
    """Records of one text and its audio as token rows, packed when they are asked for."""

    def __init__(self, records: Iterable[dict[str, Any]], processor: FramePrompts, n_vq: int | None = None) -> None:
        self.records = list(records)
        self.processor = processor
        self.n_vq = n_vq
        if n_vq not in (None, processor.model_config.n_vq):
            raise ValueError(f"--n-vq {n_vq}: this checkpoint has {processor.model_config.n_vq} codebooks")

    def __len__(self) -> int:
        return len(self.records)

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        """Returns ``input_ids`` ``[T, 1 + n_vq]`` int64 and ``loss_mask`` ``[T - 1]`` bool over its shifted rows."""
        rows, prompt_rows = self.processor.pack(self.records[index])
        return {"input_ids": rows, "loss_mask": torch.arange(1, len(rows)) >= prompt_rows}

    def collate_fn(self, batch: list[dict[str, torch.Tensor]]) -> dict[str, torch.Tensor]:
        """Pads on the left to the longest record and shifts the labels by one row.

        Returns:
            ``input_ids`` and ``labels`` ``[batch, longest - 1, 1 + n_vq]`` int64 (labels -100 on prompt, padding and
            pad codes), ``attention_mask`` ``[batch, longest - 1]`` bool.
        """
        config = self.processor.model_config
        longest = max(len(item["input_ids"]) for item in batch)
        rows = torch.full((len(batch), longest, 1 + config.n_vq), config.audio_pad_code)
        rows[..., 0] = config.pad_token_id
        present = torch.zeros(len(batch), longest, dtype=torch.bool)
        supervised = torch.zeros(len(batch), longest - 1, dtype=torch.bool)
        for index, item in enumerate(batch):
            start = longest - len(item["input_ids"])
            rows[index, start:], present[index, start:] = item["input_ids"], True
            supervised[index, start:] = item["loss_mask"]
        labels = rows[:, 1:].masked_fill(~supervised.unsqueeze(-1), IGNORE_INDEX)
        codes = labels[..., 1:]
        codes[codes == config.audio_pad_code] = IGNORE_INDEX
        return {
            "input_ids": rows[:, :-1].contiguous(),
            "attention_mask": present[:, :-1].contiguous(),
            "labels": labels,
        }


class NamedSpeechDataset(SpeechDataset):
    """The same, with each record's name in the batch, for the messages of a trainer that checks its losses."""

    def __getitem__(self, index: int) -> dict[str, Any]:
        return {**super().__getitem__(index), "record_id": str(self.records[index].get("id", index))}

    def collate_fn(self, batch: list[dict[str, Any]]) -> dict[str, Any]:
        return {**super().collate_fn(batch), "record_ids": [item["record_id"] for item in batch]}


class ChatDataset(Dataset):
    """Conversations as token rows with their labels."""

    def __init__(self, records: Iterable[dict[str, Any]], processor: ChatPrompts, n_vq: int | None = None) -> None:
        self.records = list(records)
        self.processor = processor
        if n_vq not in (None, processor.model_config.rvq):
            raise ValueError(f"--n-vq {n_vq}: this checkpoint has {processor.model_config.rvq} codebooks")

    def __len__(self) -> int:
        return len(self.records)

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        rows, labels = self.processor.pack(self.records[index])
        return {"input_ids": rows, "labels": labels}

    def collate_fn(self, batch: list[dict[str, torch.Tensor]]) -> dict[str, torch.Tensor]:
        """Pads on the right; labels are not shifted here, the model does that.

        Returns:
            ``input_ids`` and ``labels`` ``[batch, longest, 1 + rvq]`` int64, ``attention_mask`` ``[batch, longest]``
            bool.
        """
        config = self.processor.model_config
        longest = max(len(item["input_ids"]) for item in batch)
        rows = torch.full((len(batch), longest, 1 + config.rvq), config.audio_pad_token)
        rows[..., 0] = self.processor.tokenizer.pad_token_id
        labels, present = torch.full_like(rows, IGNORE_INDEX), torch.zeros(len(batch), longest, dtype=torch.bool)
        for index, item in enumerate(batch):
            end = len(item["input_ids"])
            rows[index, :end], labels[index, :end], present[index, :end] = item["input_ids"], item["labels"], True
        return {"input_ids": rows, "attention_mask": present, "labels": labels}
