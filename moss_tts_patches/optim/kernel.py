"""Runs the AdamW step as a Triton kernel where there is triton and a CUDA device; says whether there is.

The torch path gives the same numbers, so a machine without a working triton only loses time: about 150 small kernels
for every four million elements instead of one for all.
"""

from __future__ import annotations

import functools
import warnings

import torch

from .adamw_update import AdamWScalars, States
from .blockwise import BLOCK_SIZE, CodeTables, block_count
from .stochastic_rounding import ELEMENTS_PER_CALL, RoundingNoise

# 1024 elements for 128 threads: 8 a thread, which in bfloat16 is one 16-byte access, the widest there is.
ROWS_PER_PROGRAM = 4
WARPS_PER_PROGRAM = 4


@functools.cache
def usable(device: torch.device) -> bool:
    """Whether the kernel runs on ``device``; tried once, on 256 elements.

    A failed trial is a warning and not an error, because nothing is wrong with the results of the torch path. Usual
    causes are a missing C compiler (triton builds its launcher with one) and Windows.
    """
    if device.type != "cuda":
        return False
    try:
        _run_trial(device)
    except Exception as error:  # triton raises what its compiler, the C compiler and the driver raise
        reason = str(error).strip().splitlines() or [""]
        warnings.warn(
            f"AdamW8bit: the Triton kernel does not run here ({type(error).__name__}: {reason[0]}). The step is done "
            "by torch operations: the same numbers, slower. Installing triton and a C compiler brings it back.",
            RuntimeWarning,
            stacklevel=2,
        )
        return False
    return True


def _run_trial(device: torch.device) -> None:
    bf16 = torch.zeros(BLOCK_SIZE, dtype=torch.bfloat16, device=device)
    states = {
        "exp_avg_codes": torch.zeros(BLOCK_SIZE, dtype=torch.uint8, device=device),
        "exp_avg_absmax": torch.zeros(1, device=device),
        "exp_avg_sq_codes": torch.zeros(BLOCK_SIZE, dtype=torch.uint8, device=device),
        "exp_avg_sq_absmax": torch.zeros(1, device=device),
    }
    scalars = AdamWScalars.of(0.0, (0.9, 0.999), 1e-8, 0.0, 1)
    noise = RoundingNoise.of(0, 1, "trial", device)
    update_parameter(bf16, bf16.clone(), states, scalars, noise, CodeTables.build(device))
    torch.cuda.synchronize(device)


def update_parameter(
    parameter: torch.Tensor,
    gradient: torch.Tensor,
    states: States,
    scalars: AdamWScalars,
    noise: RoundingNoise,
    tables: CodeTables,
    first_element: int = 0,
) -> None:
    """Steps a parameter, or a run of its elements, in place: :func:`.adamw_update.update_parameter` in one launch.

    Raises:
        ImportError: triton is not installed.
    """
    from .triton_adamw import adamw_step

    assert first_element % BLOCK_SIZE == 0
    quantized = "exp_avg_codes" in states
    first, second = ("exp_avg_codes", "exp_avg_sq_codes") if quantized else ("exp_avg", "exp_avg_sq")
    numel = parameter.numel()
    if numel == 0:
        return
    arguments = (
        parameter,
        gradient,
        states[first],
        states["exp_avg_absmax" if quantized else first],
        states[second],
        states["exp_avg_sq_absmax" if quantized else second],
        tables.signed_map,
        tables.signed_limits,
        tables.unsigned_map,
        tables.unsigned_limits,
        numel,
        first_element // ELEMENTS_PER_CALL,
        _as_signed(noise.key[1] << 32 | noise.key[0]),
        noise.step_word,
        noise.name_word,
        float(scalars.decay),
        float(scalars.beta1),
        float(scalars.beta2),
        float(scalars.rest1),
        float(scalars.rest2),
        float(scalars.inverse_correction),
        float(scalars.eps),
        float(scalars.step_size),
    )
    grid = (-(-block_count(numel) // ROWS_PER_PROGRAM),)
    # A launch goes to the current device, not to that of its arguments.
    with torch.cuda.device_of(parameter):
        # Without fused multiply-add the results are those of the torch path; the kernel waits for memory anyway.
        adamw_step[grid](
            *arguments,
            ROWS=ROWS_PER_PROGRAM,
            QUANTIZED=quantized,
            num_warps=WARPS_PER_PROGRAM,
            enable_fp_fusion=False,
        )


def _as_signed(word: int) -> int:
    """Writes an unsigned 64-bit number as the signed one with the same bits."""
    return word - 2**64 if word >= 2**63 else word
