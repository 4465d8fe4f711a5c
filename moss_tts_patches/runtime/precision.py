"""What a GPU without bf16 arithmetic, or a loss scaler, means for the kind of training that was asked for."""

from __future__ import annotations

from typing import Any

import torch

from ..adapters.precision import base_precision
from ..errors import EnvironmentProblem


def settle_precision(arguments: Any, *, full: bool, log: Any) -> None:
    """Checks ``--mixed-precision``, and changes it where a frozen base allows another one.

    Args:
        arguments: the trainer's; ``mixed_precision`` may be changed.
        full: all weights are trained.
        log: says what was changed and why.

    Raises:
        EnvironmentProblem: the GPU and ``--mixed-precision`` leave no way to update the weights.
    """
    wanted = getattr(arguments, "mixed_precision", "no")
    card = torch.cuda.is_available()
    capability, name = (torch.cuda.get_device_capability(), torch.cuda.get_device_name()) if card else (None, "the CPU")
    if full:
        _refuse_half_precision_without_bf16(wanted, capability, name)
        return
    chosen, reason = base_precision(wanted, capability, name)
    if reason is not None:
        log(f"mixed_precision={chosen} instead_of={wanted} reason='{reason}'")
        arguments.mixed_precision = chosen


def _refuse_half_precision_without_bf16(mixed_precision: str, capability: tuple[int, int] | None, name: str) -> None:
    """Full training needs bf16 or fp32 weights."""
    if capability is None or mixed_precision == "no":
        return
    major, minor = capability
    if mixed_precision == "fp16":
        raise EnvironmentProblem(
            "--mixed-precision fp16: upstream loads the weights themselves in fp16, and a loss scaler cannot unscale "
            "fp16 gradients. Expected bf16 (compute capability 8.0 or more; "
            f"{name} has {major}.{minor}), no (float32), or MOSS_LOWMEM_METHOD=lora, whose adapters are float32."
        )
    if major < 8:
        raise EnvironmentProblem(
            f"--mixed-precision bf16: {name} has compute capability {major}.{minor} and no bf16 arithmetic (8.0 and "
            "more have it). Expected --mixed-precision no, which trains float32 weights at twice the memory, or "
            "MOSS_LOWMEM_METHOD=lora, which has the base in fp16."
        )
