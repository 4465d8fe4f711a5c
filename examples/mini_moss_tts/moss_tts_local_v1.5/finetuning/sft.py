"""The miniature's trainer of the v1.5 family: the model class comes with the checkpoint, and the loss is the trainer's.

A patch layer replaces ``load_training_model``, ``configure_gradient_checkpointing``, ``compute_supervised_loss`` and
``first_nonfinite_gradient`` here; for the rest see ``moss_tts_local/finetuning/sft.py``.
"""

from __future__ import annotations

import argparse
import sys
from datetime import datetime
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from accelerate import Accelerator
from accelerate.utils import set_seed
from accelerate.utils.dataclasses import DistributedDataParallelKwargs
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import CheckpointImpl, checkpoint_wrapper
from torch.optim import AdamW
from torch.utils.data import DataLoader
from transformers import AutoConfig, AutoModel, PreTrainedTokenizerFast, get_scheduler

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))

# Every name that a patch layer may look for must be in this module's namespace, whether or not it is used below.
from mini_trainer.options import (  # noqa: E402
    add_v15_options,
    resolve_channel_weights,
    resolve_warmup_steps,  # noqa: F401
    validate_args,
)
from mini_trainer.prompts import FramePrompts  # noqa: E402
from mini_trainer.records import NamedSpeechDataset as MossTTSLocalV15SFTDataset  # noqa: E402
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
    resolve_inference_asset,  # noqa: F401
    resolve_torch_dtype,
    save_weights,
    say,
    say_peak,
    train_epoch,
    write_json,
)
from supervision import (  # noqa: E402
    compute_supervised_loss,
    compute_supervised_loss_from_hidden,  # noqa: F401
    first_nonfinite_gradient,
    is_finite_scalar,
    unwrap_training_model,
)


def parse_args() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Trains the miniature of MOSS-TTS-Local v1.5.")
    add_v15_options(parser)
    return parser.parse_args()


def resolve_attn_implementation(requested: str, device: torch.device, dtype: torch.dtype) -> str:
    """What the backbone uses. The depth transformer uses what its checkpoint's config says."""
    if requested != "auto":
        return requested
    return "sdpa" if device.type == "cuda" else "eager"


# -- the model --------------------------------------------------------------------------------------------------------


def load_training_model(
    *, accelerator: Accelerator, model_path: str, model_dtype: torch.dtype, attn_implementation: str
) -> Any:
    with model_init_context(accelerator):
        return AutoModel.from_pretrained(
            model_path, trust_remote_code=True, dtype=model_dtype, attn_implementation=attn_implementation
        )


def configure_gradient_checkpointing(model: Any, *, scope: str, use_reentrant: bool, impl: str) -> None:
    """Wraps layers, so that their activations are recomputed.

    Raises:
        ValueError: upstream's other way, which computes wrong gradients and is not rebuilt here.
    """
    if impl != "module_wrapper":
        raise ValueError(f"--gradient-checkpointing-impl {impl}: the miniature has module_wrapper only")
    base = unwrap_training_model(model)
    stacks = {"global": base.transformer.layers, "local": base.local_transformer.h}
    way = CheckpointImpl.REENTRANT if use_reentrant else CheckpointImpl.NO_REENTRANT
    for layers in stacks.values() if scope == "all" else [stacks[scope]]:
        for index, layer in enumerate(layers):
            layers[index] = checkpoint_wrapper(layer, checkpoint_impl=way)


# -- checkpoints ------------------------------------------------------------------------------------------------------


def build_processor(
    args: argparse.Namespace, *, need_audio_tokenizer: bool, default_audio_tokenizer_device: str
) -> FramePrompts:
    """Loads config and tokenizer; the other arguments are upstream's, and there is no codec here."""
    config = AutoConfig.from_pretrained(args.model_path, trust_remote_code=True)
    return FramePrompts(PreTrainedTokenizerFast.from_pretrained(args.model_path), None, config)


def copy_support_files(output_dir: Path) -> None:
    copy_code(ROOT / "moss_tts_local_v1.5", output_dir)


def copy_inference_assets(model_path: str, codec_path: str, output_dir: Path) -> None:
    copy_tokenizer(
        model_path, output_dir, processor_class="MossTTSLocalProcessor", audio_tokenizer_name_or_path=codec_path
    )


def save_checkpoint(
    *,
    accelerator: Accelerator,
    model: Any,
    model_path: str,
    codec_path: str,
    output_dir: Path,
    train_args: dict[str, Any],
    global_step: int,
    epoch: int,
) -> None:
    """Writes weights, config, model code, tokenizer and the run's arguments into one folder."""
    save_weights(accelerator, model, output_dir)
    if accelerator.is_main_process:
        copy_support_files(output_dir)
        copy_inference_assets(model_path, codec_path, output_dir)
        saved = {"saved_global_step": global_step, "saved_epoch": epoch, "saved_at": f"{datetime.now():%F %T}"}
        write_json(output_dir / "finetune_args.json", {**train_args, **saved})
    accelerator.wait_for_everyone()


# -- training ---------------------------------------------------------------------------------------------------------


def main() -> None:
    args = parse_args()
    validate_args(args)
    configure_torch_backends()
    accelerator = Accelerator(
        gradient_accumulation_steps=args.gradient_accumulation_steps,
        mixed_precision=args.mixed_precision if torch.cuda.is_available() else "no",
        step_scheduler_with_optimizer=False,
        kwargs_handlers=[DistributedDataParallelKwargs(find_unused_parameters=False)],
    )
    set_seed(args.seed, device_specific=True)
    records, sharded = read_records(accelerator, args, load_jsonl_for_rank)
    with processor_init_context(accelerator):
        processor = build_processor(
            args, need_audio_tokenizer=False, default_audio_tokenizer_device=str(accelerator.device)
        )
    dataset = MossTTSLocalV15SFTDataset(records=records, processor=processor, n_vq=args.n_vq)

    dtype = resolve_torch_dtype(args.mixed_precision)
    model = load_training_model(
        accelerator=accelerator,
        model_path=args.model_path,
        model_dtype=dtype,
        attn_implementation=resolve_attn_implementation(args.attn_implementation, accelerator.device, dtype),
    )
    if args.gradient_checkpointing:
        configure_gradient_checkpointing(
            model,
            scope=args.gradient_checkpointing_scope,
            use_reentrant=args.gradient_checkpointing_use_reentrant,
            impl=args.gradient_checkpointing_impl,
        )
    weights = resolve_channel_weights(args.channelwise_loss_weight, model.config.n_vq + 1)

    loader = DataLoader(dataset, **loader_options(dataset, args, sharded))
    optimizer = AdamW(model.parameters(), **adamw_options(args), foreach=False)
    plan = Plan.of(accelerator, args, len(records), sharded)
    scheduler = get_scheduler(optimizer=optimizer, **plan.schedule(args))
    model, optimizer, loader, scheduler = prepare(accelerator, model, optimizer, loader, scheduler, sharded)

    to_save = {
        **vars(args),
        "global_batch_size": plan.samples_per_step,
        "resolved_channelwise_loss_weight": weights,
    }
    _training_loop(
        accelerator, args, model, loader, optimizer, scheduler, weights, plan, Path(args.output_dir), to_save
    )


def train_micro_batch(
    accelerator: Accelerator,
    model: Any,
    batch: dict[str, Any],
    optimizer: Any,
    lr_scheduler: Any,
    channel_weights: list[float] | None,
    max_grad_norm: float,
) -> SimpleNamespace:
    """Adds a micro-batch's gradients, and looks at them; the one that completes a window also updates the weights.

    Raises:
        FloatingPointError: the loss or the norm of the gradients is not finite; names the records.
    """
    records = ", ".join(batch.pop("record_ids", ()))
    tensors = {name: value.to(accelerator.device) for name, value in batch.items()}
    with accelerator.accumulate(model):
        loss = compute_supervised_loss(model, **tensors, channelwise_loss_weight=channel_weights)
        if not is_finite_scalar(loss):
            raise FloatingPointError(f"the loss is not finite; records: {records}")
        accelerator.backward(loss)
        if accelerator.sync_gradients and max_grad_norm > 0:
            norm = accelerator.clip_grad_norm_(model.parameters(), max_grad_norm)
            if not is_finite_scalar(norm):
                raise FloatingPointError(f"gradient of {first_nonfinite_gradient(model)}; last records: {records}")
        optimizer.step()
        if accelerator.sync_gradients and not optimizer.step_was_skipped:
            lr_scheduler.step()
        optimizer.zero_grad()
    return SimpleNamespace(loss=loss)


def _training_loop(
    accelerator: Accelerator,
    args: argparse.Namespace,
    model: Any,
    loader: DataLoader,
    optimizer: torch.optim.Optimizer,
    lr_scheduler: Any,
    channel_weights: list[float] | None,
    plan: Plan,
    output_root: Path,
    args_to_save: dict[str, Any],
) -> None:
    """Trains epoch by epoch, saves after some, and once more at the end."""
    clock = StepClock(plan)

    def micro_batch(batch: dict[str, Any]) -> SimpleNamespace:
        return train_micro_batch(
            accelerator, model, batch, optimizer, lr_scheduler, channel_weights, args.max_grad_norm
        )

    def save(name: str) -> None:
        save_checkpoint(
            accelerator=accelerator,
            model=model,
            model_path=args.model_path,
            codec_path=args.codec_path,
            output_dir=output_root / name,
            train_args=args_to_save,
            global_step=clock.steps,
            epoch=clock.epoch,
        )

    while clock.goes_on(args.num_epochs):
        model.train()
        train_epoch(accelerator, loader, micro_batch, lr_scheduler, clock, args.logging_steps)
        if clock.epoch % args.save_every_epochs == 0 or clock.steps == plan.max_steps:
            save(f"checkpoint-epoch-{clock.epoch}")
    save("checkpoint-last")
    say_peak(accelerator)
    say(accelerator, f"Finished training: global_step={clock.steps}, saved_epochs={clock.epoch}, output={output_root}")


if __name__ == "__main__":
    main()
