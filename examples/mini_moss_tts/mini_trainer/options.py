"""The command line that the miniature's four trainers have in common, and what follows from it alone."""

from __future__ import annotations

import argparse
import math
from collections.abc import Collection
from typing import Any

# Flag, type and default, as upstream's parse_args of moss_tts_local has them; other trainers set their own defaults.
OPTIONS: tuple[tuple[str, type, Any], ...] = (
    ("--model-path", str, "OpenMOSS-Team/MOSS-TTS-Local-Transformer"),
    ("--codec-path", str, "OpenMOSS-Team/MOSS-Audio-Tokenizer"),
    ("--output-dir", str, "output"),
    ("--per-device-batch-size", int, 1),
    ("--gradient-accumulation-steps", int, 1),
    ("--learning-rate", float, 1e-5),
    ("--weight-decay", float, 0.1),
    ("--adam-beta1", float, 0.9),
    ("--adam-beta2", float, 0.95),
    ("--adam-eps", float, 1e-8),
    ("--warmup-steps", int, 0),
    ("--warmup-ratio", float, 0.03),
    ("--num-epochs", int, 3),
    ("--max-train-steps", int, None),
    ("--max-grad-norm", float, 1.0),
    ("--logging-steps", int, 1),
    ("--wandb-project", str, None),
    ("--wandb-run-name", str, None),
    ("--wandb-entity", str, None),
    ("--wandb-tags", str, None),
    ("--num-workers", int, 0),
    ("--attn-implementation", str, "auto"),
    ("--audio-tokenizer-device", str, None),
    ("--n-vq", int, None),
    ("--channelwise-loss-weight", str, "1,32"),
    ("--seed", int, 42),
)
WANDB = ("--wandb-project", "--wandb-run-name", "--wandb-entity", "--wandb-tags")
# What only v1.5's trainer has; the first choice is the default.
V15_CHOICES = {
    "--gradient-checkpointing-scope": ("global", "all", "local"),
    "--gradient-checkpointing-impl": ("module_wrapper", "model_internal"),
    "--codec-weight-dtype": ("fp32",),
    "--codec-compute-dtype": ("bf16", "fp32", "fp16"),
    "--codec-attn-implementation": ("auto", "flash_attention_2", "sdpa", "eager"),
}
V15_DEFAULTS = {
    "model_path": "OpenMOSS-Team/MOSS-TTS-Local-Transformer-v1.5",
    "codec_path": "OpenMOSS-Team/MOSS-Audio-Tokenizer-v2",
    "output_dir": "output/moss_tts_local_v1_5_sft",
    "learning_rate": 2e-5,
    "adam_eps": 1e-4,
    "warmup_ratio": 0.0,
    "lr_scheduler_type": "constant",
}
SCHEDULERS = (
    "linear",
    "cosine",
    "cosine_with_restarts",
    "polynomial",
    "constant",
    "constant_with_warmup",
    "inverse_sqrt",
)
POSITIVE = (
    "per_device_batch_size",
    "gradient_accumulation_steps",
    "learning_rate",
    "num_epochs",
    "max_train_steps",
    "logging_steps",
    "n_vq",
)
NOT_NEGATIVE = ("weight_decay", "warmup_steps", "warmup_ratio", "max_grad_norm", "num_workers")


def add_options(parser: argparse.ArgumentParser, without: Collection[str] = ()) -> None:
    """Adds every option but those that this trainer of upstream does not have."""
    for flag, kind, default in OPTIONS:
        if flag not in without:
            parser.add_argument(flag, type=kind, default=default)
    parser.add_argument("--train-jsonl", required=True, help="file, folder, pattern, or several separated by commas")
    parser.add_argument("--lr-scheduler-type", choices=SCHEDULERS, default="linear")
    parser.add_argument("--mixed-precision", choices=["no", "fp16", "bf16"], default="bf16")
    if "--gradient-checkpointing" not in without:
        parser.add_argument("--gradient-checkpointing", action="store_true")


def add_v15_options(parser: argparse.ArgumentParser) -> None:
    """Adds the options of v1.5's trainer."""
    add_options(parser, without=WANDB)
    parser.add_argument("--save-every-epochs", type=int, default=1)
    for flag, choices in V15_CHOICES.items():
        parser.add_argument(flag, choices=choices, default=choices[0])
    for flag in ("--gradient-checkpointing-use-reentrant", "--skip-nonfinite-batches"):
        parser.add_argument(flag, action="store_true")
    parser.set_defaults(**V15_DEFAULTS)


def validate_args(args: argparse.Namespace) -> None:
    """Refuses numbers that cannot be meant.

    Raises:
        ValueError: names the flag, the value and the range.
    """
    for names, allowed, fits in ((POSITIVE, "above 0", lambda v: v > 0), (NOT_NEGATIVE, "0 or more", lambda v: v >= 0)):
        for name in names:
            value = getattr(args, name)
            if value is not None and not fits(value):
                raise ValueError(f"--{name.replace('_', '-')} {value}: expected a value {allowed}")
    if args.warmup_ratio >= 1:
        raise ValueError(f"--warmup-ratio {args.warmup_ratio}: expected a value below 1")
    if getattr(args, "wandb_project", None):
        raise ValueError("--wandb-project: the miniature only prints its steps; leave the flag out")
    if getattr(args, "skip_nonfinite_batches", False):
        raise ValueError("--skip-nonfinite-batches: the miniature stops at the first one; leave the flag out")


def resolve_warmup_steps(args: argparse.Namespace, num_training_steps: int) -> int:
    return args.warmup_steps or math.ceil(args.warmup_ratio * num_training_steps)


def resolve_channel_weights(spec: str | None, channels: int) -> list[float] | None:
    """Reads ``--channelwise-loss-weight``: one value per channel, or the text's and the codebooks' sum.

    Raises:
        ValueError: another number of values, or values without a positive sum.
    """
    values = [float(part) for part in (spec or "").split(",") if part.strip()]
    if not values:
        return None
    if len(values) == 2 and channels != 2:
        values = [values[0]] + [values[1] / (channels - 1)] * (channels - 1)
    if len(values) != channels or sum(values) <= 0:
        raise ValueError(f"--channelwise-loss-weight {spec}: expected 2 or {channels} values with a positive sum")
    return values
