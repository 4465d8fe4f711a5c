"""The miniature's trainer of the realtime family: no channel weights, and no option to recompute activations.

See ``moss_tts_local/finetuning/sft.py`` for what a patch layer holds on to.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import Any

import torch
from accelerate import Accelerator
from accelerate.utils import set_seed
from accelerate.utils.dataclasses import DistributedDataParallelKwargs
from torch.optim import AdamW
from torch.utils.data import DataLoader
from transformers import PreTrainedTokenizerFast, get_scheduler

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))

# Every name that upstream's script has must be in this module's namespace, whether or not it is used below.
from mini_trainer.options import (  # noqa: E402
    add_options,
    resolve_warmup_steps,  # noqa: F401
    validate_args,
)
from mini_trainer.prompts import ChatPrompts as MossTTSRealtimeProcessor  # noqa: E402
from mini_trainer.records import ChatDataset as MossTTSRealtimeSFTDataset  # noqa: E402
from mini_trainer.records import load_jsonl_for_rank, shard_paths_for_rank  # noqa: E402, F401
from mini_trainer.training import (  # noqa: E402
    Plan,
    StepClock,
    adamw_options,
    configure_torch_backends,
    copy_code,
    copy_tokenizer,
    loader_options,
    model_init_context,
    prepare,
    processor_init_context,
    read_records,
    resolve_attn_implementation,
    resolve_inference_asset,  # noqa: F401
    resolve_torch_dtype,
    save_weights,
    say,
    say_peak,
    train_epoch,
    train_micro_batch,
    write_json,
)
from moss_tts_realtime.mossttsrealtime.configuration_mossttsrealtime import MossTTSRealtimeConfig  # noqa: E402
from moss_tts_realtime.mossttsrealtime.modeling_mossttsrealtime import MossTTSRealtime  # noqa: E402


def parse_args() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Trains the miniature of MOSS-TTS-Realtime.")
    absent = ("--audio-tokenizer-device", "--channelwise-loss-weight", "--gradient-checkpointing")
    add_options(parser, without=absent)
    parser.set_defaults(model_path="OpenMOSS-Team/MOSS-TTS-Realtime")
    return parser.parse_args()


def build_processor(model_path: str) -> MossTTSRealtimeProcessor:
    config = MossTTSRealtimeConfig.from_pretrained(model_path)
    return MossTTSRealtimeProcessor(PreTrainedTokenizerFast.from_pretrained(model_path), config)


def copy_support_files(output_dir: Path) -> None:
    """The checkpoint carries the model's package as a whole."""
    copy_code(ROOT / "moss_tts_realtime" / "mossttsrealtime", output_dir / "mossttsrealtime")


def copy_inference_assets(model_path: str, output_dir: Path) -> None:
    copy_tokenizer(model_path, output_dir, processor_class="MossTTSRealtimeProcessor")


def save_checkpoint(
    accelerator: Accelerator,
    model: MossTTSRealtime,
    model_path: str,
    codec_path: str,
    output_dir: Path,
    train_args: dict[str, Any],
) -> None:
    """Writes weights, config, model code, tokenizer and the run's arguments into one folder."""
    save_weights(accelerator, model, output_dir)
    if accelerator.is_main_process:
        copy_support_files(output_dir)
        copy_inference_assets(model_path, output_dir)
        write_json(output_dir / "finetune_args.json", train_args)
    accelerator.wait_for_everyone()


def main() -> None:
    args = parse_args()
    validate_args(args)
    configure_torch_backends()
    accelerator = Accelerator(
        gradient_accumulation_steps=args.gradient_accumulation_steps,
        mixed_precision=args.mixed_precision,
        kwargs_handlers=[DistributedDataParallelKwargs(find_unused_parameters=False)],
    )
    set_seed(args.seed, device_specific=True)
    records, sharded = read_records(accelerator, args, load_jsonl_for_rank)
    with processor_init_context(accelerator):
        processor = build_processor(args.model_path)
    dataset = MossTTSRealtimeSFTDataset(records=records, processor=processor, n_vq=args.n_vq)

    dtype = resolve_torch_dtype(args.mixed_precision)
    attention = resolve_attn_implementation(args.attn_implementation, dtype)
    with model_init_context(accelerator):
        model = MossTTSRealtime.from_pretrained(args.model_path, torch_dtype=dtype, attn_implementation=attention)
    model.language_model.embed_tokens.weight.requires_grad = False  # in the file, never read

    loader = DataLoader(dataset, **loader_options(dataset, args, sharded))
    optimizer = AdamW(model.parameters(), **adamw_options(args))
    plan = Plan.of(accelerator, args, len(records), sharded)
    scheduler = get_scheduler(optimizer=optimizer, **plan.schedule(args))
    model, optimizer, loader, scheduler = prepare(accelerator, model, optimizer, loader, scheduler, sharded)

    to_save = {
        **vars(args),
        "global_batch_size": plan.samples_per_step,
    }
    _training_loop(accelerator, args, model, loader, optimizer, scheduler, plan, Path(args.output_dir), to_save)


def _training_loop(
    accelerator: Accelerator,
    args: argparse.Namespace,
    model: MossTTSRealtime,
    loader: DataLoader,
    optimizer: torch.optim.Optimizer,
    lr_scheduler: Any,
    plan: Plan,
    output_root: Path,
    args_to_save: dict[str, Any],
) -> None:
    """Trains epoch by epoch and saves after each."""
    clock = StepClock(plan)

    def micro_batch(batch: dict[str, torch.Tensor]) -> Any:
        return train_micro_batch(accelerator, model, batch, optimizer, lr_scheduler, args.max_grad_norm)

    while clock.goes_on(args.num_epochs):
        model.train()
        epoch = clock.epoch
        train_epoch(accelerator, loader, micro_batch, lr_scheduler, clock, args.logging_steps)
        save_checkpoint(
            accelerator=accelerator,
            model=model,
            model_path=args.model_path,
            codec_path=args.codec_path,
            output_dir=output_root / f"checkpoint-epoch-{epoch}",
            train_args=args_to_save,
        )
    say_peak(accelerator)
    say(accelerator, f"Finished training: global_step={clock.steps}, saved_epochs={clock.epoch}, output={output_root}")


if __name__ == "__main__":
    main()
