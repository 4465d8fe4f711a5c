"""QLoRA's frozen base: NF4 projections by bitsandbytes, through transformers' own quantization config."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

import torch
from torch import nn

from ..errors import EnvironmentProblem, SeamError
from .targets import DEFAULT_GROUPS


def quantised_modules(model: nn.Module, groups: Mapping[str, str]) -> list[str]:
    """Names the linear layers that are stored in 4 bit: those of the transformer layers, whatever the adapters are on.

    Heads, embeddings and norms stay as they are: heads are few parameters and decide the codes.

    Args:
        model: of upstream's class, on the meta device.
        groups: the family's target groups.
    """
    patterns = [re.compile(groups[name]) for name in DEFAULT_GROUPS if name in groups]
    return [
        name
        for name, module in model.named_modules()
        if type(module) is nn.Linear and any(pattern.fullmatch(name) for pattern in patterns)
    ]


def loading_options(
    model: nn.Module, quantised: list[str], compute_dtype: torch.dtype, device: torch.device
) -> dict[str, Any]:
    """Returns what ``from_pretrained`` has to be given besides.

    Weights are quantised one by one as they are read, on the training device, so the model never stands there in 16
    bit.

    Args:
        model: of upstream's class, on the meta device.
        quantised: see :func:`quantised_modules`.
        compute_dtype: of the matrix products, and of everything that is not quantised.
        device: where training will be.

    Raises:
        EnvironmentProblem: bitsandbytes is missing.
    """
    _require_bitsandbytes()
    from transformers import BitsAndBytesConfig

    # transformers' own list of what to leave would miss the heads in lists; so every other linear layer is named.
    left = [n for n, module in model.named_modules() if isinstance(module, nn.Linear) and n not in set(quantised)]
    return {
        "quantization_config": BitsAndBytesConfig(
            load_in_4bit=True,
            bnb_4bit_quant_type="nf4",
            bnb_4bit_use_double_quant=True,
            bnb_4bit_compute_dtype=compute_dtype,
            bnb_4bit_quant_storage=torch.uint8,
            llm_int8_skip_modules=[re.escape(name) + "$" for name in left],
        ),
        "device_map": {"": device.type if device.index is None else f"{device.type}:{device.index}"},
    }


def check_quantised(model: nn.Module, expected: list[str]) -> None:
    """Checks what was quantised after loading.

    Raises:
        SeamError: another set of layers than ``expected`` is in 4 bit.
    """
    import bitsandbytes

    found = {name for name, module in model.named_modules() if isinstance(module, bitsandbytes.nn.Linear4bit)}
    if found != set(expected):
        different = sorted(found ^ set(expected))
        raise SeamError(
            f"qlora: transformers and bitsandbytes quantised {len(found)} layers, expected {len(expected)}; the first "
            f"that differs is {different[0]}. Use the transformers version named in docs/upgrading.md, or "
            "MOSS_LOWMEM_METHOD=lora."
        )


def _require_bitsandbytes() -> None:
    try:
        import bitsandbytes  # noqa: F401
    except ImportError as error:
        raise EnvironmentProblem(
            f"MOSS_LOWMEM_METHOD=qlora needs bitsandbytes, which cannot be imported ({error}). Install it with "
            "pip install 'moss_tts_patches[qlora]', or use MOSS_LOWMEM_METHOD=lora."
        ) from error
