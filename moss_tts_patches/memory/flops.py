"""Counts the FLOPs of matrix products and attention while code runs, on real or fake tensors.

torch's ``FlopCounterMode`` is not used itself: its module tracker keeps tensors of every module call alive, which is
what the storage tracker beside it would then measure (1.1 GiB a micro-batch on MOSS-TTS-Local). Its formulas are.
"""

from __future__ import annotations

from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import flop_registry, sdpa_backward_flop_count, sdpa_flop_count

_aten = torch.ops.aten


def _cpu_attention(query: Any, key: Any, value: Any, *_: Any, **__: Any) -> int:
    return sdpa_flop_count(query.shape, key.shape, value.shape)


def _cpu_attention_backward(gradient: Any, query: Any, key: Any, value: Any, *_: Any, **__: Any) -> int:
    return sdpa_backward_flop_count(gradient.shape, query.shape, key.shape, value.shape)


# torch lists the GPU's attention kernels only.
_CPU_ATTENTION: dict[Any, Any] = {
    _aten._scaled_dot_product_flash_attention_for_cpu: _cpu_attention,
    _aten._scaled_dot_product_flash_attention_for_cpu_backward: _cpu_attention_backward,
}


class FlopCounter(TorchDispatchMode):
    """Adds up FLOPs.

    Attributes:
        matmul_flops: of matrix products, which is what torch's own counter sees on a CPU.
        attention_flops: of the attention kernels, counted without causal skipping.
    """

    def __init__(self) -> None:
        super().__init__()
        self.matmul_flops = 0
        self.attention_flops = 0

    @property
    def flops(self) -> int:
        return self.matmul_flops + self.attention_flops

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False  # nothing is compiled here, and the guard around every operation costs a tenth of the time

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        result = func(*args, **kwargs)
        self.count(func, args, kwargs, result)
        return result

    def count(self, func: Any, args: Any, kwargs: Any, result: Any) -> None:
        """Adds one operation; for a mode that sees the operations already."""
        packet = func._overloadpacket
        if packet in _CPU_ATTENTION:
            self.attention_flops += _CPU_ATTENTION[packet](*args, **kwargs)
        elif packet in flop_registry:
            flops = flop_registry[packet](*args, **kwargs, out_val=result)
            if "dot_product" in str(packet):
                self.attention_flops += flops
            else:
                self.matmul_flops += flops
