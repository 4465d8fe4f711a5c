"""One AdamW step on one parameter, in plain torch: the reference that the kernel is compared with, and the CPU's path.

Everything is worked out in float32 whatever the parameter's dtype is: states are read back from 8 bits, updated, used,
and coded again; the new weight is rounded stochastically to bfloat16. The parameter is gone through in slices, so that
the float32 temporaries stay small beside it.

Every operation is a separate multiplication, addition, division or square root with one correct rounding, and no
scalar divides (torch on CUDA divides by a scalar through its inverse). So the kernel's moments are the same bits, and
its weights too except where torch's square root is not correctly rounded: on x86 CPUs it is MKL's, which was one unit
in the last place off for 17 % of random numbers.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

import torch

from ..errors import NumericsError
from .blockwise import BLOCK_SIZE, CodeTables, dequantize, quantize
from .stochastic_rounding import RoundingNoise, round_with

# 16 MiB for each float32 temporary, about 130 MiB at the peak; a multiple of the block size.
SLICE_ELEMENTS = 2**22

States = Mapping[str, torch.Tensor]


@dataclass(frozen=True)
class AdamWScalars:
    """The numbers of one step that do not depend on the element."""

    decay: float
    beta1: float
    beta2: float
    rest1: float
    rest2: float
    inverse_correction: float
    eps: float
    step_size: float

    @classmethod
    def of(cls, lr: float, betas: tuple[float, float], eps: float, weight_decay: float, step: int) -> AdamWScalars:
        """Works them out in double precision.

        Args:
            lr: learning rate.
            betas: decay rates of the first and second moment.
            eps: added to the root of the second moment.
            weight_decay: decoupled, times ``lr``.
            step: 1 for the first step of this parameter.

        Source: Loshchilov and Hutter, "Decoupled Weight Decay Regularization", ICLR 2019, algorithm 2, in the form of
        ``torch.optim.AdamW``.
        """
        beta1, beta2 = betas
        return cls(
            decay=1.0 - lr * weight_decay,
            beta1=beta1,
            beta2=beta2,
            rest1=1.0 - beta1,
            rest2=1.0 - beta2,
            inverse_correction=1.0 / math.sqrt(1.0 - beta2**step),
            eps=eps,
            step_size=lr / (1.0 - beta1**step),
        )


def check_parameter_dtype(name: str, dtype: torch.dtype) -> None:
    """Refuses what an update cannot be stored in.

    Raises:
        NumericsError: the dtype is not bfloat16 or float32.
    """
    if dtype in (torch.bfloat16, torch.float32):
        return
    why = ""
    if dtype == torch.float16:
        why = (
            " float16 gradients vanish below 6e-8 and overflow above 65504; only loss scaling helps, and torch's "
            "GradScaler refuses float16 gradients."
        )
    raise NumericsError(
        f"AdamW8bit: parameter {name} is {dtype}, expected bfloat16 or float32.{why} Load the model in bfloat16 (cards "
        "from compute capability 8.0 on) or float32."
    )


def update_parameter(
    parameter: torch.Tensor,
    gradient: torch.Tensor,
    states: States,
    scalars: AdamWScalars,
    noise: RoundingNoise,
    tables: CodeTables,
    first_element: int = 0,
    slice_elements: int = SLICE_ELEMENTS,
) -> None:
    """Steps a parameter, or a run of its elements, in place.

    Args:
        parameter: ``[n]`` bfloat16 or float32, changed.
        gradient: ``[n]``, any floating dtype.
        states: ``exp_avg_codes [n]`` and ``exp_avg_sq_codes [n]`` uint8 with ``exp_avg_absmax [blocks]`` and
            ``exp_avg_sq_absmax [blocks]`` float32; or ``exp_avg [n]`` and ``exp_avg_sq [n]`` float32. Changed.
        scalars: of this step.
        noise: of this parameter and step; unused for float32 parameters.
        tables: on the parameter's device.
        first_element: index of ``parameter[0]`` in the whole parameter, a multiple of the block size.
        slice_elements: how many elements at a time, a multiple of the block size.
    """
    assert first_element % BLOCK_SIZE == 0 and slice_elements % BLOCK_SIZE == 0
    values, gradients = parameter.split(slice_elements), gradient.split(slice_elements)
    for value, grad, part in zip(values, gradients, _split_states(states, slice_elements)):
        _update_slice(value, grad, part, scalars, noise, tables, first_element)
        first_element += slice_elements


def _split_states(states: States, slice_elements: int) -> Iterator[States]:
    """Cuts all states alike; an absmax has one entry for a block."""
    runs = [
        tensor.split(slice_elements // BLOCK_SIZE if name.endswith("_absmax") else slice_elements)
        for name, tensor in states.items()
    ]
    return (dict(zip(states, parts)) for parts in zip(*runs))


def _update_slice(
    parameter: torch.Tensor,
    gradient: torch.Tensor,
    states: States,
    scalars: AdamWScalars,
    noise: RoundingNoise,
    tables: CodeTables,
    first_element: int,
) -> None:
    quantized = "exp_avg_codes" in states
    if quantized:
        first = dequantize(states["exp_avg_codes"], states["exp_avg_absmax"], tables.signed_map)
        second = dequantize(states["exp_avg_sq_codes"], states["exp_avg_sq_absmax"], tables.unsigned_map)
    else:
        first, second = states["exp_avg"], states["exp_avg_sq"]
    gradient = gradient.float()
    first.mul_(scalars.beta1).add_(gradient * scalars.rest1)
    second.mul_(scalars.beta2).add_((gradient * gradient).mul_(scalars.rest2))
    del gradient
    divisor = second.sqrt().mul_(scalars.inverse_correction).add_(scalars.eps)
    update = (first / divisor).mul_(scalars.step_size)
    del divisor
    if quantized:
        quantize(first, tables.signed_limits, states["exp_avg_codes"], states["exp_avg_absmax"])
        quantize(second, tables.unsigned_limits, states["exp_avg_sq_codes"], states["exp_avg_sq_absmax"])
    del first, second
    if parameter.dtype == torch.float32:
        parameter.mul_(scalars.decay).sub_(update)
    else:
        exact = parameter.float().mul_(scalars.decay).sub_(update)
        del update
        parameter.copy_(round_with(exact, noise, first_element))
