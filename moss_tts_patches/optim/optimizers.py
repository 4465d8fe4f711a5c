"""The two optimizers that a run can ask for: 8-bit AdamW with stochastic rounding, and torch's AdamW to the bit."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import nn
from torch.optim.adamw import adamw

from . import adamw_update, kernel
from .blockwise import BLOCK_SIZE, CodeTables
from .state_store import Layout, StateSpec, Tensors, is_simulated
from .stochastic_rounding import RoundingNoise
from .streamed import GradientSource, StreamedOptimizer

# Norms and biases: together 0.02 % of the weights, so their states cost nothing in float32, and they are where one
# outlier in a block of 256 would matter most. The bound is that of bitsandbytes.
SMALL_PARAMETER_ELEMENTS = 4096

_BLOCK_ABSMAX = StateSpec(torch.float32, BLOCK_SIZE)
_CODES = StateSpec(torch.uint8)
_FLOAT = StateSpec(torch.float32)

_QUANTIZED: Layout = {
    "exp_avg_codes": _CODES,
    "exp_avg_absmax": _BLOCK_ABSMAX,
    "exp_avg_sq_codes": _CODES,
    "exp_avg_sq_absmax": _BLOCK_ABSMAX,
}
_FULL: Layout = {"exp_avg": _FLOAT, "exp_avg_sq": _FLOAT}


class AdamW8bit(StreamedOptimizer):
    """AdamW with block-wise 8-bit states (2.03 bytes an element) that does not lose small updates to bfloat16.

    Parameters are bfloat16, rounded stochastically, or float32. On CUDA a step is one Triton kernel a piece; elsewhere,
    and without triton, torch operations that give the same numbers.

    Args:
        named_parameters: see :class:`.streamed.StreamedOptimizer`, as all up to ``states``.
        lr: learning rate.
        betas: decay rates of the two moments.
        eps: added to the root of the second moment.
        weight_decay: decoupled weight decay.
        seed: of the rounding noise.
        gradients: where gradients come from.
        states: "device" or "host".
        small_parameter_elements: a parameter with fewer elements keeps float32 states.
        use_kernel: True or False to insist; by default, the kernel wherever it works.

    Raises:
        NumericsError: a parameter is neither bfloat16 nor float32.
    """

    def __init__(
        self,
        named_parameters: Iterable[tuple[str, nn.Parameter]],
        lr: float = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 1e-2,
        *,
        seed: int = 0,
        gradients: GradientSource | None = None,
        states: str = "device",
        small_parameter_elements: int = SMALL_PARAMETER_ELEMENTS,
        use_kernel: bool | None = None,
    ) -> None:
        self._small_parameter_elements = small_parameter_elements
        self._use_kernel = use_kernel
        self._tables: dict[tuple[torch.device, bool], CodeTables] = {}
        super().__init__(named_parameters, lr, betas, eps, weight_decay, seed=seed, gradients=gradients, states=states)

    def check_parameter(self, name: str, parameter: torch.Tensor) -> None:
        super().check_parameter(name, parameter)
        if parameter.requires_grad:
            adamw_update.check_parameter_dtype(name, parameter.dtype)

    def layout_of(self, parameter: torch.Tensor) -> Layout:
        return _FULL if parameter.numel() < self._small_parameter_elements else _QUANTIZED

    def update(
        self,
        parameter: nn.Parameter,
        values: torch.Tensor,
        gradient: torch.Tensor,
        states: Tensors,
        group: dict[str, Any],
        first_element: int,
    ) -> None:
        adamw_update.check_parameter_dtype(self.names[parameter], values.dtype)  # it may have been frozen before
        step = self.steps[parameter]
        scalars = adamw_update.AdamWScalars.of(
            float(group["lr"]), group["betas"], group["eps"], group["weight_decay"], step
        )
        noise = RoundingNoise.of(self.seed, step, self.names[parameter], parameter.device)
        update_parameter = kernel.update_parameter if self._runs_kernel(parameter) else adamw_update.update_parameter
        update_parameter(values, gradient, states, scalars, noise, self._tables_for(parameter), first_element)

    def _runs_kernel(self, parameter: torch.Tensor) -> bool:
        if is_simulated(parameter):
            return False
        return kernel.usable(parameter.device) if self._use_kernel is None else self._use_kernel

    def _tables_for(self, parameter: torch.Tensor) -> CodeTables:
        """Returns the tables on the parameter's device, simulated ones for a simulated parameter."""
        key = (parameter.device, is_simulated(parameter))
        if key not in self._tables:
            self._tables[key] = CodeTables.build(parameter.device)
        return self._tables[key]


class AdamW(StreamedOptimizer):
    """torch's own AdamW arithmetic with states in the parameter's dtype, for comparison with upstream's numbers.

    In float32 the weights are bit-equal to those of ``torch.optim.AdamW(foreach=False)``. In bfloat16 it loses updates
    as upstream does.

    Source: ``torch.optim.adamw.adamw``, called on one piece at a time; every operation in it is element by element.
    """

    def layout_of(self, parameter: torch.Tensor) -> Layout:
        return {"exp_avg": StateSpec(parameter.dtype), "exp_avg_sq": StateSpec(parameter.dtype)}

    def update(
        self,
        parameter: nn.Parameter,
        values: torch.Tensor,
        gradient: torch.Tensor,
        states: Tensors,
        group: dict[str, Any],
        first_element: int,
    ) -> None:
        beta1, beta2 = group["betas"]
        # The function counts up by itself, once a call, and a parameter may come in several pieces.
        before = torch.tensor(float(self.steps[parameter] - 1))
        adamw(
            [values],
            [gradient.to(values.dtype)],
            [states["exp_avg"]],
            [states["exp_avg_sq"]],
            [],
            [before],
            foreach=False,
            amsgrad=False,
            beta1=beta1,
            beta2=beta2,
            lr=group["lr"],
            weight_decay=group["weight_decay"],
            eps=group["eps"],
            maximize=False,
        )
