"""The miniature's trainer: the names, command line, call order and log lines of upstream's moss_tts_local sft.py.

A patch layer holds on to these: it activates in the ``parse_args`` call below, replaces names of this module, and
expects the model, the optimizer and the checkpoints to come in this order.
"""

from __future__ import annotations

import argparse
import json
import math
import shutil
import sys
import time
from contextlib import AbstractContextManager, nullcontext
from datetime import datetime, timedelta
from pathlib import Path
from typing import Any

import torch
from accelerate import Accelerator
from accelerate.utils import DistributedType, enable_fsdp_ram_efficient_loading, set_seed
from accelerate.utils.dataclasses import DistributedDataParallelKwargs
from torch.optim import AdamW
from torch.utils.data import DataLoader
from transformers import PreTrainedTokenizerFast, get_scheduler

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))

# Every name that upstream's script has must be in this module's namespace, whether or not it is used below.
from moss_tts_local.configuration_moss_tts import MossTTSDelayConfig  # noqa: E402
from moss_tts_local.finetuning.options import (  # noqa: E402
    add_options,
    resolve_channel_weights,
    resolve_warmup_steps,
    validate_args,
)
from moss_tts_local.finetuning.records import (  # noqa: E402
    MossTTSSFTDataset,
    load_jsonl_for_rank,
    shard_paths_for_rank,  # noqa: F401
)
from moss_tts_local.modeling_moss_tts import MossTTSDelayModel  # noqa: E402
from moss_tts_local.processing_moss_tts import MossTTSDelayProcessor  # noqa: E402

MODEL_CODE = ("__init__.py", "configuration_moss_tts.py", "modeling_moss_tts.py", "processing_moss_tts.py")
TOKENIZER_FILES = ("tokenizer.json", "tokenizer_config.json", "special_tokens_map.json", "chat_template.jinja")


def parse_args() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Trains the miniature of MOSS-TTS-Local.")
    add_options(parser)
    return parser.parse_args()


def configure_torch_backends() -> None:
    """Keeps cuDNN out of attention on CUDA; does nothing elsewhere."""
    if torch.cuda.is_available():
        torch.backends.cuda.enable_cudnn_sdp(False)


def resolve_torch_dtype(mixed_precision: str) -> torch.dtype:
    """The weights' dtype is that of the mixed precision on CUDA and float32 without it."""
    on_cuda = {"fp16": torch.float16, "bf16": torch.bfloat16}
    return on_cuda.get(mixed_precision, torch.float32) if torch.cuda.is_available() else torch.float32


def resolve_attn_implementation(requested: str, dtype: torch.dtype) -> str:
    """What to ask transformers for. The model's two transformers stay on sdpa whatever this says."""
    if requested != "auto":
        return requested
    return "sdpa" if torch.cuda.is_available() else "eager"


def build_processor(
    model_path: str,
    codec_path: str,
    need_audio_tokenizer: bool,
    audio_tokenizer_device: str | None,
    default_audio_tokenizer_device: str,
) -> MossTTSDelayProcessor:
    """Loads config and tokenizer; the codec arguments are upstream's, and there is no codec here."""
    config = MossTTSDelayConfig.from_pretrained(model_path)
    return MossTTSDelayProcessor(PreTrainedTokenizerFast.from_pretrained(model_path), None, config)


def processor_init_context(accelerator: Accelerator) -> AbstractContextManager[None]:
    """Upstream shields its codec from ZeRO-3's partitioning here; this processor holds no weights."""
    return nullcontext()


def model_init_context(accelerator: Accelerator) -> AbstractContextManager[Any]:
    """Lets FSDP load on one rank, and ZeRO-3 partition while loading if its config asks for that."""
    match accelerator.distributed_type:
        case DistributedType.FSDP:
            enable_fsdp_ram_efficient_loading()
        case DistributedType.DEEPSPEED:
            zero = accelerator.state.deepspeed_plugin
            return zero.zero3_init_context_manager(enable=zero.is_zero3_init_enabled())
    return nullcontext()


def copy_support_files(output_dir: Path) -> None:
    """Puts the model's code beside the weights, so that transformers can load the folder on its own."""
    for name in MODEL_CODE:
        shutil.copy2(ROOT / "moss_tts_local" / name, output_dir / name)


def resolve_inference_asset(model_path: str, filename: str) -> Path | None:
    """Returns the file in the checkpoint's folder, or None; the miniature never asks a hub."""
    path = Path(model_path) / filename
    return path if path.exists() else None


def copy_inference_assets(model_path: str, codec_path: str, output_dir: Path) -> None:
    """Takes the tokenizer along and notes the codec's name."""
    for name in TOKENIZER_FILES:
        source = resolve_inference_asset(model_path, name)
        if source is not None:
            shutil.copy2(source, output_dir / name)
    write_json(
        output_dir / "processor_config.json",
        {"processor_class": "MossTTSDelayProcessor", "audio_tokenizer_name_or_path": codec_path},
    )


def save_checkpoint(
    accelerator: Accelerator,
    model: MossTTSDelayModel,
    model_path: str,
    codec_path: str,
    output_dir: Path,
    train_args: dict[str, Any],
) -> None:
    """Writes weights, config, model code, tokenizer and the run's arguments into one folder."""
    accelerator.wait_for_everyone()
    output_dir.mkdir(parents=True, exist_ok=True)
    weights = accelerator.get_state_dict(model)  # every rank takes part in gathering them
    accelerator.unwrap_model(model).save_pretrained(
        output_dir, is_main_process=accelerator.is_main_process, state_dict=weights
    )
    if accelerator.is_main_process:
        copy_support_files(output_dir)
        copy_inference_assets(model_path, codec_path, output_dir)
        write_json(output_dir / "finetune_args.json", train_args)
    accelerator.wait_for_everyone()


def write_json(path: Path, value: dict[str, Any]) -> None:
    path.write_text(json.dumps(value, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")


def say(accelerator: Accelerator, line: str) -> None:
    accelerator.print(f"[{datetime.now():%Y-%m-%d %H:%M:%S}] {line}")


def load_data(accelerator: Accelerator, args: argparse.Namespace) -> tuple[MossTTSSFTDataset, bool]:
    """Returns the data set, and whether its files were sharded by rank beforehand."""
    files, records, own, sharded = load_jsonl_for_rank(
        args.train_jsonl, world_size=accelerator.num_processes, rank=accelerator.process_index
    )
    if not records:
        raise ValueError(f"--train-jsonl {args.train_jsonl}: the files hold no record")
    say(accelerator, f"[sft] files={len(files)} own_files={len(own)} own_records={len(records)} sharded={sharded}")
    with processor_init_context(accelerator):
        processor = build_processor(
            args.model_path, args.codec_path, False, args.audio_tokenizer_device, str(accelerator.device)
        )
    return MossTTSSFTDataset(records=records, processor=processor, n_vq=args.n_vq), sharded


def load_model(accelerator: Accelerator, args: argparse.Namespace) -> MossTTSDelayModel:
    dtype = resolve_torch_dtype(args.mixed_precision)
    attention = resolve_attn_implementation(args.attn_implementation, dtype)
    with model_init_context(accelerator):
        model = MossTTSDelayModel.from_pretrained(args.model_path, torch_dtype=dtype, attn_implementation=attention)
    if args.gradient_checkpointing:
        model.gradient_checkpointing_enable()
    return model


def make_loader(dataset: MossTTSSFTDataset, args: argparse.Namespace, sharded: bool) -> DataLoader:
    return DataLoader(
        dataset,
        batch_size=args.per_device_batch_size,
        shuffle=True,
        drop_last=sharded,  # ranks with one batch more than others would wait for them forever
        num_workers=args.num_workers,
        collate_fn=dataset.collate_fn,
    )


def make_optimizer(model: MossTTSDelayModel, args: argparse.Namespace) -> torch.optim.Optimizer:
    return AdamW(
        model.parameters(),
        lr=args.learning_rate,
        weight_decay=args.weight_decay,
        betas=(args.adam_beta1, args.adam_beta2),
        eps=args.adam_eps,
    )


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
    dataset, sharded = load_data(accelerator, args)
    model = load_model(accelerator, args)
    weights = resolve_channel_weights(args.channelwise_loss_weight, model.config.n_vq + 1)
    loader = make_loader(dataset, args, sharded)
    optimizer = make_optimizer(model, args)

    records_a_batch = args.per_device_batch_size * (1 if sharded else accelerator.num_processes)
    batches = math.ceil(len(dataset) / records_a_batch)
    steps_an_epoch = math.ceil(batches / args.gradient_accumulation_steps)
    max_steps = args.max_train_steps or args.num_epochs * steps_an_epoch
    warmup = resolve_warmup_steps(args, max_steps)
    say(accelerator, f"[sft] micro_batches_per_epoch={batches} max_train_steps={max_steps} warmup_steps={warmup}")
    scheduler = get_scheduler(
        name=args.lr_scheduler_type, optimizer=optimizer, num_warmup_steps=warmup, num_training_steps=max_steps
    )
    if sharded:  # accelerate would split between the ranks what is split already
        model, optimizer, scheduler = accelerator.prepare(model, optimizer, scheduler)
    else:
        model, optimizer, loader, scheduler = accelerator.prepare(model, optimizer, loader, scheduler)

    samples = args.per_device_batch_size * accelerator.num_processes * args.gradient_accumulation_steps
    to_save = {**vars(args), "global_batch_size": samples, "resolved_channelwise_loss_weight": weights}
    output = Path(args.output_dir)
    _training_loop(accelerator, args, model, loader, optimizer, scheduler, weights, max_steps, samples, output, to_save)


def train_micro_batch(
    accelerator: Accelerator,
    model: MossTTSDelayModel,
    batch: dict[str, torch.Tensor],
    optimizer: torch.optim.Optimizer,
    lr_scheduler: Any,
    channel_weights: list[float] | None,
    max_grad_norm: float,
) -> Any:
    """Adds a micro-batch's gradients; the one that completes a window also updates the weights.

    Returns:
        The model's whole output. It stays alive until the next call returns, as upstream's does.
    """
    with accelerator.accumulate(model):
        output = model(**batch, channelwise_loss_weight=channel_weights)
        accelerator.backward(output.loss)
        if max_grad_norm > 0 and accelerator.sync_gradients:
            accelerator.clip_grad_norm_(model.parameters(), max_grad_norm)
        for stepper in (optimizer, lr_scheduler):  # accelerate lets these and zero_grad pass until the window is full
            stepper.step()
        optimizer.zero_grad()
    return output


def _training_loop(
    accelerator: Accelerator,
    args: argparse.Namespace,
    model: MossTTSDelayModel,
    loader: DataLoader,
    optimizer: torch.optim.Optimizer,
    lr_scheduler: Any,
    channel_weights: list[float] | None,
    max_steps: int,
    samples_per_step: int,
    output_root: Path,
    args_to_save: dict[str, Any],
) -> None:
    """Trains epoch by epoch and saves after each; the loss printed is that of a step's last micro-batch."""
    clock = StepClock(max_steps, samples_per_step)
    step = epoch = 0
    while epoch < args.num_epochs and step < max_steps:
        model.train()
        for batch in loader:
            output = train_micro_batch(
                accelerator, model, batch, optimizer, lr_scheduler, channel_weights, args.max_grad_norm
            )
            step += accelerator.sync_gradients
            if accelerator.sync_gradients and step % args.logging_steps == 0:
                mean = accelerator.gather(output.loss.detach().float().reshape(1)).mean().item()
                rate = lr_scheduler.get_last_lr()[0]
                progress = f"epoch={epoch} step={step}/{max_steps} loss={mean:.4f} lr={rate:.2e}"
                say(accelerator, f"{progress} {clock.reading(step)}")
            if step == max_steps:
                break
        save_checkpoint(
            accelerator=accelerator,
            model=model,
            model_path=args.model_path,
            codec_path=args.codec_path,
            output_dir=output_root / f"checkpoint-epoch-{epoch}",
            train_args=args_to_save,
        )
        epoch += 1
    if accelerator.device.type == "cuda":
        say(accelerator, f"[sft] peak_gpu_allocated={torch.cuda.max_memory_allocated() / 2**30:.3f}GiB")
    say(accelerator, f"Finished training: global_step={step}, saved_epochs={epoch}, output_dir={output_root}")


class StepClock:
    """Seconds between the steps that are logged."""

    def __init__(self, max_steps: int, samples_per_step: int) -> None:
        self.max_steps = max_steps
        self.samples_per_step = samples_per_step
        self._step, self._time = 0, time.perf_counter()

    def reading(self, step: int) -> str:
        """Returns the time fields of a step's line and starts the next interval."""
        now = time.perf_counter()
        seconds = max(now - self._time, 1e-9) / (step - self._step)  # a clock may tick coarser than a step takes
        self._step, self._time = step, now
        left = timedelta(seconds=int(seconds * max(self.max_steps - step, 0)))
        return (
            f"step_time={seconds:.2f}s steps_per_sec={1 / seconds:.3f} "
            f"samples_per_sec={self.samples_per_step / seconds:.2f} eta={left}"
        )


if __name__ == "__main__":
    main()
