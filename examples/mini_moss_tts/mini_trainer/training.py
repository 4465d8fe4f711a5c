"""What the miniature's four trainers do alike between their seams.

A patch layer replaces names in a trainer's own namespace (``Accelerator``, ``AdamW``, ``save_checkpoint`` and the
model class or the loss). So each ``sft.py`` calls those itself, in upstream's order, and only what lies between them is
here.
"""

from __future__ import annotations

import argparse
import json
import math
import shutil
import time
from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from datetime import datetime, timedelta
from pathlib import Path
from typing import Any

import torch
from accelerate import Accelerator
from accelerate.utils import DistributedType, enable_fsdp_ram_efficient_loading

from .options import resolve_warmup_steps

TOKENIZER_FILES = ("tokenizer.json", "tokenizer_config.json", "special_tokens_map.json", "chat_template.jinja")


# -- before the model -------------------------------------------------------------------------------------------------


def configure_torch_backends() -> None:
    """Keeps cuDNN out of attention on CUDA; does nothing elsewhere."""
    if torch.cuda.is_available():
        torch.backends.cuda.enable_cudnn_sdp(False)


def resolve_torch_dtype(mixed_precision: str) -> torch.dtype:
    """The weights' dtype is that of the mixed precision on CUDA and float32 without it."""
    on_cuda = {"fp16": torch.float16, "bf16": torch.bfloat16}
    return on_cuda.get(mixed_precision, torch.float32) if torch.cuda.is_available() else torch.float32


def resolve_attn_implementation(requested: str, dtype: torch.dtype) -> str:
    """What to ask transformers for; whether a model listens is another matter."""
    if requested != "auto":
        return requested
    return "sdpa" if torch.cuda.is_available() else "eager"


def processor_init_context(accelerator: Accelerator) -> AbstractContextManager[None]:
    """Upstream shields its codec from ZeRO-3's partitioning here; these processors hold no weights."""
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


def say(accelerator: Accelerator, line: str) -> None:
    accelerator.print(f"[{datetime.now():%Y-%m-%d %H:%M:%S}] {line}")


def read_records(
    accelerator: Accelerator, args: argparse.Namespace, load_jsonl_for_rank: Callable[..., Any]
) -> tuple[list[dict[str, Any]], bool]:
    """Returns this rank's records, and whether their files were sharded by rank beforehand.

    Args:
        load_jsonl_for_rank: the trainer's own, which is a seam.

    Raises:
        ValueError: there is none.
    """
    files, records, own, sharded = load_jsonl_for_rank(
        args.train_jsonl, world_size=accelerator.num_processes, rank=accelerator.process_index
    )
    if not records:
        raise ValueError(f"--train-jsonl {args.train_jsonl}: the files hold no record")
    say(accelerator, f"[sft] files={len(files)} own_files={len(own)} own_records={len(records)} sharded={sharded}")
    return records, sharded


# -- around the optimizer ---------------------------------------------------------------------------------------------


def loader_options(dataset: Any, args: argparse.Namespace, sharded: bool) -> dict[str, Any]:
    return {
        "batch_size": args.per_device_batch_size,
        "shuffle": True,
        "drop_last": sharded,  # ranks with one batch more than others would wait for them forever
        "num_workers": args.num_workers,
        "collate_fn": dataset.collate_fn,
    }


def adamw_options(args: argparse.Namespace) -> dict[str, Any]:
    return {
        "lr": args.learning_rate,
        "weight_decay": args.weight_decay,
        "betas": (args.adam_beta1, args.adam_beta2),
        "eps": args.adam_eps,
    }


@dataclass(frozen=True)
class Plan:
    """How long a training is.

    Attributes:
        samples_per_step: records that one optimizer step has seen, on all ranks.
    """

    max_steps: int
    warmup_steps: int
    samples_per_step: int

    @classmethod
    def of(cls, accelerator: Accelerator, args: argparse.Namespace, records: int, sharded: bool) -> Plan:
        batch = args.per_device_batch_size
        batches = math.ceil(records / (batch * (1 if sharded else accelerator.num_processes)))
        max_steps = args.max_train_steps or args.num_epochs * math.ceil(batches / args.gradient_accumulation_steps)
        warmup = resolve_warmup_steps(args, max_steps)
        say(accelerator, f"[sft] micro_batches_per_epoch={batches} max_train_steps={max_steps} warmup_steps={warmup}")
        return cls(max_steps, warmup, batch * accelerator.num_processes * args.gradient_accumulation_steps)

    def schedule(self, args: argparse.Namespace) -> dict[str, Any]:
        """Arguments of ``get_scheduler`` beside the optimizer."""
        return {
            "name": args.lr_scheduler_type,
            "num_warmup_steps": self.warmup_steps,
            "num_training_steps": self.max_steps,
        }


def prepare(
    accelerator: Accelerator, model: Any, optimizer: Any, loader: Any, scheduler: Any, sharded: bool
) -> tuple[Any, Any, Any, Any]:
    """Returns model, optimizer, loader and scheduler as accelerate wants them used."""
    if not sharded:
        return accelerator.prepare(model, optimizer, loader, scheduler)
    # accelerate would split between the ranks what is split already
    model, optimizer, scheduler = accelerator.prepare(model, optimizer, scheduler)
    return model, optimizer, loader, scheduler


# -- steps ------------------------------------------------------------------------------------------------------------


def train_micro_batch(
    accelerator: Accelerator,
    model: Any,
    batch: dict[str, Any],
    optimizer: torch.optim.Optimizer,
    lr_scheduler: Any,
    max_grad_norm: float,
) -> Any:
    """Adds a micro-batch's gradients; the one that completes a window also updates the weights.

    Returns:
        The model's whole output. It stays alive until the next call returns, as upstream's does.
    """
    with accelerator.accumulate(model):
        output = model(**batch)
        accelerator.backward(output.loss)
        if max_grad_norm > 0 and accelerator.sync_gradients:
            accelerator.clip_grad_norm_(model.parameters(), max_grad_norm)
        for stepper in (optimizer, lr_scheduler):  # accelerate lets these and zero_grad pass until the window is full
            stepper.step()
        optimizer.zero_grad()
    return output


def train_epoch(
    accelerator: Accelerator,
    batches: Iterable[dict[str, Any]],
    micro_batch: Callable[[dict[str, Any]], Any],
    lr_scheduler: Any,
    clock: StepClock,
    logging_steps: int,
) -> None:
    """Trains on the batches, or until the last step; the loss printed is that of a step's last micro-batch.

    Args:
        micro_batch: does what :func:`train_micro_batch` does.
    """
    for batch in batches:
        output = micro_batch(batch)
        clock.steps += accelerator.sync_gradients
        if accelerator.sync_gradients and clock.steps % logging_steps == 0:
            clock.log(accelerator, output.loss, lr_scheduler)
        if clock.steps == clock.max_steps:
            break
    clock.epoch += 1


class StepClock:
    """Counts steps and epochs, and times the steps that are logged."""

    def __init__(self, plan: Plan) -> None:
        self.max_steps = plan.max_steps
        self.samples_per_step = plan.samples_per_step
        self.steps = self.epoch = 0
        self._logged, self._time = 0, time.perf_counter()

    def goes_on(self, epochs: int) -> bool:
        return self.epoch < epochs and self.steps < self.max_steps

    def log(self, accelerator: Accelerator, loss: torch.Tensor, lr_scheduler: Any) -> None:
        """Prints a step's line, in upstream's form, and starts the next interval."""
        mean = accelerator.gather(loss.detach().float().reshape(1)).mean().item()
        now = time.perf_counter()
        seconds = max(now - self._time, 1e-9) / (self.steps - self._logged)  # a clock may tick coarser than a step
        self._logged, self._time = self.steps, now
        left = timedelta(seconds=int(seconds * max(self.max_steps - self.steps, 0)))
        say(
            accelerator,
            f"epoch={self.epoch} step={self.steps}/{self.max_steps} loss={mean:.4f} "
            f"lr={lr_scheduler.get_last_lr()[0]:.2e} step_time={seconds:.2f}s steps_per_sec={1 / seconds:.3f} "
            f"samples_per_sec={self.samples_per_step / seconds:.2f} eta={left}",
        )


# -- checkpoints ------------------------------------------------------------------------------------------------------


def save_weights(accelerator: Accelerator, model: Any, output_dir: Path) -> None:
    """Writes weights and config; every rank takes part in gathering them."""
    accelerator.wait_for_everyone()
    output_dir.mkdir(parents=True, exist_ok=True)
    weights = accelerator.get_state_dict(model)
    accelerator.unwrap_model(model).save_pretrained(
        output_dir, is_main_process=accelerator.is_main_process, state_dict=weights
    )


def copy_code(source: Path, output_dir: Path) -> None:
    """Puts the model's code beside the weights, so that the folder can be loaded on its own."""
    output_dir.mkdir(exist_ok=True)
    for path in source.glob("*.py"):
        shutil.copy2(path, output_dir / path.name)


def resolve_inference_asset(model_path: str, filename: str) -> Path | None:
    """Returns the file in the checkpoint's folder, or None; the miniature never asks a hub."""
    path = Path(model_path) / filename
    return path if path.exists() else None


def copy_tokenizer(model_path: str, output_dir: Path, **processor: str) -> None:
    """Takes the tokenizer along, and notes what reads it."""
    for name in TOKENIZER_FILES:
        source = resolve_inference_asset(model_path, name)
        if source is not None:
            shutil.copy2(source, output_dir / name)
    write_json(output_dir / "processor_config.json", processor)


def write_json(path: Path, value: dict[str, Any]) -> None:
    path.write_text(json.dumps(value, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")


def say_peak(accelerator: Accelerator) -> None:
    """Prints the largest allocation on the GPU, if there is one."""
    if accelerator.device.type == "cuda":
        say(accelerator, f"[sft] peak_gpu_allocated={torch.cuda.max_memory_allocated() / 2**30:.3f}GiB")
