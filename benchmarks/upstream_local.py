"""The real moss_tts_local of a checkout, in this process: a small checkpoint, its model and its micro-batches."""

from __future__ import annotations

import importlib
import importlib.util
import json
import os
import subprocess
import sys
import types
from pathlib import Path
from typing import Any

import torch

REPOSITORY = Path(__file__).resolve().parents[1]
TESTS = REPOSITORY / "tests"
FAMILY = "moss_tts_local"


def find_upstream() -> Path:
    """Returns the checkout that MOSS_TTS_REPO names; ends the program where there is none."""
    named = os.environ.get("MOSS_TTS_REPO")
    if named is None or not (Path(named) / FAMILY / "finetuning" / "sft.py").is_file():
        raise SystemExit(
            f"MOSS_TTS_REPO={named!r}: expected a MOSS-TTS checkout. "
            "Get it with: git clone https://github.com/OpenMOSS/MOSS-TTS"
        )
    return Path(named).resolve()


def make_checkpoint(upstream: Path, folder: Path, *options: str) -> Path:
    """Writes a checkpoint with random weights and ``train.jsonl``; options of tests/make_tiny.py."""
    command = [sys.executable, TESTS / "make_tiny.py", upstream, FAMILY, folder, *options]
    subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
    return folder


def import_trainer(upstream: Path) -> Any:
    """Returns upstream's sft.py as a module."""
    if importlib.util.find_spec("torchaudio") is None:  # upstream imports it, training never calls it
        stub = types.ModuleType("torchaudio")
        stub.__spec__ = importlib.util.spec_from_loader("torchaudio", None)
        sys.modules["torchaudio"] = stub
    sys.dont_write_bytecode = True  # the checkout is not ours to write to
    sys.path.insert(0, str(upstream))
    return importlib.import_module(f"{FAMILY}.finetuning.sft")


def load_model(trainer: Any, folder: Path) -> Any:
    """Returns the model in float32, as ``--mixed-precision no`` loads it, ready to train."""
    return trainer.MossTTSDelayModel.from_pretrained(folder, dtype=torch.float32, attn_implementation="sdpa").train()


def load_batches(trainer: Any, folder: Path, codebooks: int) -> list[dict[str, Any]]:
    """Returns a micro-batch a record, by upstream's data set and collate function, with its default weights."""
    processor = trainer.build_processor(
        model_path=str(folder),
        codec_path="none",
        need_audio_tokenizer=False,
        audio_tokenizer_device=None,
        default_audio_tokenizer_device="cpu",
    )
    records = [json.loads(line) for line in (folder / "train.jsonl").read_text(encoding="utf-8").splitlines()]
    dataset = trainer.MossTTSSFTDataset(records=records, processor=processor, n_vq=None)
    weights = trainer.parse_channelwise_loss_weight("1,32", codebooks + 1)  # run_train.sh's own
    return [
        {**dataset.collate_fn([dataset[index]]), "channelwise_loss_weight": weights} for index in range(len(dataset))
    ]
