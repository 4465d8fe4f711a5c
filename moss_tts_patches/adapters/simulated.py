"""Adapters, and a base in 4 bit, for the planner: on tensors that have a size and no values.

bitsandbytes cannot quantise such tensors, so a layer of the same bytes stands in for its own, with the same
temporaries: the weight is unpacked to 16 bit for each product, forward and backward, and nothing of that is kept.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Iterator
from typing import Any

import torch
from torch import nn

from ..families.family import Family
from .injection import inject
from .plan import AdapterPlan
from .quantised_base import quantised_modules

# bitsandbytes' NF4 with double quantization: one absmax for 64 weights, itself in 8 bit, with one float32 for 256.
BLOCK, NESTED_BLOCK = 64, 256
_NF4_CODES, _NESTED_CODES = 16, 256


class FourBitStandIn(nn.Linear):
    """A linear layer that takes the bytes of ``bitsandbytes.nn.Linear4bit`` and does its products.

    Source: bitsandbytes, ``functional.quantize_4bit`` with ``compress_statistics`` (what is stored) and
    ``autograd._functions.MatMul4Bit`` (what is unpacked when).
    """

    def __init__(self, original: nn.Linear) -> None:
        nn.Module.__init__(self)
        self.in_features, self.out_features, self.bias = original.in_features, original.out_features, original.bias
        weight = original.weight
        elements, device = weight.numel(), weight.device
        blocks = math.ceil(elements / BLOCK)
        empty = torch.empty((elements + 1) // 2, 1, dtype=torch.uint8, device=device)
        self.weight = nn.Parameter(empty, requires_grad=False)
        for name, size, dtype in (
            ("absmax", blocks, torch.uint8),
            ("nested_absmax", math.ceil(blocks / NESTED_BLOCK), torch.float32),
            ("codes", _NF4_CODES, torch.float32),
            ("nested_codes", _NESTED_CODES, torch.float32),
            ("offset", 1, torch.float32),
        ):
            self.register_buffer(name, torch.empty(size, dtype=dtype, device=device))
        self.compute_dtype = weight.dtype

    def unpacked(self) -> torch.Tensor:
        """Returns what the weight would be for one product: ``[out_features, in_features]``."""
        blocks: Any = self.absmax
        scales = torch.empty(blocks.numel(), dtype=torch.float32, device=blocks.device)
        weight = torch.empty(self.out_features, self.in_features, dtype=self.compute_dtype, device=blocks.device)
        del scales
        return weight

    def forward(self, values: torch.Tensor) -> torch.Tensor:
        result = _UnpackedProduct.apply(values.to(self.compute_dtype), self)
        if self.bias is not None:
            result = result + self.bias.to(result.dtype)
        # PEFT's wrapper for 4-bit layers copies what they return before it adds the adapter's share.
        return result.to(values.dtype).clone()


class _UnpackedProduct(torch.autograd.Function):
    @staticmethod
    def forward(ctx, values, layer):  # type: ignore[no-untyped-def]
        ctx.layer = layer
        with torch.autocast(values.device.type, enabled=False):
            return nn.functional.linear(values, layer.unpacked())

    @staticmethod
    def backward(ctx, gradient):  # type: ignore[no-untyped-def]
        with torch.autocast(gradient.device.type, enabled=False):
            return gradient @ ctx.layer.unpacked().to(gradient.dtype), None


@contextlib.contextmanager
def injected_without_values(model: nn.Module) -> Iterator[None]:
    """Lets PEFT inject adapters into a model of fake tensors; they stand beside the rest afterwards, in float32.

    On the meta device PEFT leaves out its ``module.to(device, dtype)``, which torch cannot do to a fake tensor.
    """
    with torch.device("meta"):
        yield
    for module in model.modules():
        for name, parameter in list(module.named_parameters(recurse=False)):
            if parameter.device.type == "meta":
                empty = torch.empty(parameter.shape, dtype=torch.float32, device="cpu")
                module.register_parameter(name, nn.Parameter(empty, parameter.requires_grad))


class AdapterShape:
    """Shapes a simulated model as a run with adapters would.

    Args:
        plan: what to make; ``qlora`` also replaces the base's projections.
    """

    def __init__(self, plan: AdapterPlan) -> None:
        self.plan = plan

    def __call__(self, family: Family, model: nn.Module) -> None:
        """Replaces layers, freezes and injects; the model is one without values."""
        if self.plan.method == "qlora":
            for name in quantised_modules(model, family.adapter_groups):
                parent, _, attribute = name.rpartition(".")
                setattr(model.get_submodule(parent), attribute, FourBitStandIn(model.get_submodule(name)))  # type: ignore[arg-type]
        with injected_without_values(model):
            inject(model, self.plan, family.adapter_groups, base_model="simulated", seed=0)
