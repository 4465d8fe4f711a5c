#!/usr/bin/env python3
"""Makes what the miniature trains on: a small random checkpoint and train.jsonl, the same bytes for the same arguments.

    python make_demo_data.py FOLDER [--family F] [--scale tiny|demo] [--records N] [--frames LOW HIGH] [--seed S]

Nothing is downloaded. The weights have the names and shapes of the family's checkpoints, so that upstream's own model
class loads them as well.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import shutil
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent

FAMILIES = ("moss_tts_local", "moss_tts_delay", "moss_tts_local_v1.5", "moss_tts_realtime")

SPECIAL_TOKENS = {
    "pad_token_id": "<|pad|>",
    "im_start_token_id": "<|im_start|>",
    "im_end_token_id": "<|im_end|>",
    "audio_start_token_id": "<|audio_start|>",
    "audio_end_token_id": "<|audio_end|>",
    "audio_user_slot_token_id": "<|audio_user_slot|>",
    "audio_assistant_gen_slot_token_id": "<|audio_gen_slot|>",
    "audio_assistant_delay_slot_token_id": "<|audio_delay_slot|>",
}

TEXTS = (
    "Two boats left the harbour before dawn.",
    "Mind the third step, it creaks.",
    "窗外的雨停了，街上又热闹起来。",
    "How many pears are left in the basket?",
    "The lamp went out; nobody moved.",
    "Ein kurzer Satz genügt hier.",
    "Call me when the kettle sings.",
    "我把钥匙放在桌上了。",
)


@dataclass(frozen=True)
class Scale:
    """Sizes of a model; ``frames`` is the range of audio lengths that goes with it."""

    vocabulary: int
    hidden: int
    inner: int
    layers: int
    codebooks: int
    codes: int
    depth_hidden: int
    depth_inner: int
    frames: tuple[int, int]

    @property
    def head_width(self) -> int:
        return self.hidden // 4  # four query heads share two key heads, as a check on grouped attention


SCALES = {
    # 0.3 M parameters: a training step takes 0.05 s, for tests.
    "tiny": Scale(640, 64, 128, 3, 4, 32, 32, 96, (8, 40)),
    # Large enough for the loss's share of the memory to stand out beside the 0.5 GiB of an idle torch process.
    "demo": Scale(1024, 128, 384, 4, 12, 256, 96, 384, (60, 140)),
}


def make_demo_data(
    folder: Path,
    scale: str | Scale = "tiny",
    records: int = 12,
    frames: tuple[int, int] | None = None,
    seed: int = 0,
    family: str = FAMILIES[0],
) -> int:
    """Writes the checkpoint and ``train.jsonl`` into ``folder`` and returns the number of parameters."""
    sizes = SCALES[scale] if isinstance(scale, str) else scale
    folder.mkdir(parents=True, exist_ok=True)
    tokenizer = byte_tokenizer()
    tokenizer.save_pretrained(folder)
    ids = {field: tokenizer.convert_tokens_to_ids(token) for field, token in SPECIAL_TOKENS.items()}
    model = random_model(sizes, ids, seed, family)
    model.save_pretrained(folder)
    copy_model_code(family, folder)
    generator = random.Random(seed)
    make_record = random_conversation if family == "moss_tts_realtime" else random_record
    lines = [make_record(index, sizes, frames or sizes.frames, generator) for index in range(records)]
    text = "".join(json.dumps(line, ensure_ascii=False) + "\n" for line in lines)
    (folder / "train.jsonl").write_text(text, encoding="utf-8")
    return sum(parameter.numel() for parameter in model.parameters())


def copy_model_code(family: str, folder: Path) -> None:
    """Puts beside the weights what a checkpoint of the family brings along."""
    source = ROOT / family
    if family == "moss_tts_realtime":
        source, folder = source / "mossttsrealtime", folder / "mossttsrealtime"
    folder.mkdir(exist_ok=True)
    for path in source.glob("*.py"):
        shutil.copy2(path, folder / path.name)


def byte_tokenizer() -> Any:
    """A tokenizer that gives every UTF-8 byte an id of its own, and then the special tokens."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    bytes_only = Tokenizer(models.BPE(vocab={char: index for index, char in enumerate(alphabet)}, merges=[]))
    bytes_only.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    bytes_only.decoder = decoders.ByteLevel()
    tokens = list(SPECIAL_TOKENS.values())
    return PreTrainedTokenizerFast(
        tokenizer_object=bytes_only, additional_special_tokens=tokens, pad_token=SPECIAL_TOKENS["pad_token_id"]
    )


def random_model(sizes: Scale, special_ids: dict[str, int], seed: int, family: str = FAMILIES[0]) -> Any:
    """Builds a model; see :func:`mini_moss_tts.demo_models.random_model`."""
    if str(ROOT.parent) not in sys.path:
        sys.path.insert(0, str(ROOT.parent))
    from mini_moss_tts import demo_models

    return demo_models.random_model(sizes, special_ids, seed, family)


def random_record(index: int, sizes: Scale, frames: tuple[int, int], generator: random.Random) -> dict[str, Any]:
    """A record in upstream's form; one in three has a reference voice, one in four an instruction."""
    record = {
        "id": f"demo-{index:04d}",
        "text": TEXTS[index % len(TEXTS)],
        "audio_codes": random_codes(generator.randint(*frames), sizes, generator),
    }
    if index % 3 == 0:
        record["ref_audio_codes"] = random_codes(frames[0], sizes, generator)
    if index % 4 == 1:
        record["instruction"] = "Calm, a little tired."
    return record


def random_conversation(index: int, sizes: Scale, frames: tuple[int, int], generator: random.Random) -> dict[str, Any]:
    """A record of the realtime family; one in three is a question, an answer and a question that nobody answers."""
    roles = ("user", "assistant", "user") if index % 3 == 0 else ("assistant",)
    turns = [
        {
            "role": role,
            "text": TEXTS[(index + turn) % len(TEXTS)],
            "audio_codes": random_codes(generator.randint(*frames), sizes, generator),
        }
        for turn, role in enumerate(roles)
    ]
    record = {"id": f"demo-{index:04d}", "conversations": turns}
    if index % 2 == 0:
        record["ref_audio_codes"] = random_codes(frames[0], sizes, generator)
    return record


def random_codes(frames: int, sizes: Scale, generator: random.Random) -> list[list[int]]:
    """Low codes are more frequent than high ones, so that there is something to learn and the loss goes down."""
    return [[int(sizes.codes * generator.random() ** 3) for _ in range(sizes.codebooks)] for _ in range(frames)]


def main() -> None:
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    parser = argparse.ArgumentParser(description="Makes a small random checkpoint and train.jsonl for the miniature.")
    parser.add_argument("folder", type=Path)
    parser.add_argument("--family", choices=FAMILIES, default=FAMILIES[0])
    parser.add_argument("--scale", choices=sorted(SCALES), default="demo")
    parser.add_argument("--records", type=int, default=64)
    parser.add_argument("--frames", type=int, nargs=2, metavar=("LOW", "HIGH"), help="audio frames per record")
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    frames = tuple(args.frames) if args.frames else None
    parameters = make_demo_data(args.folder, args.scale, args.records, frames, args.seed, args.family)
    print(f"{args.folder}: {parameters:,} random parameters and {args.records} records")


if __name__ == "__main__":
    main()
