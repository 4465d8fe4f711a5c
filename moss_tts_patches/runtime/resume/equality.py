"""Whether processes that should hold the same numbers do: a checksum of weights and optimizer states."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Mapping

import torch
from torch import nn

from ...errors import NumericsError
from ...optim.streamed import StreamedOptimizer
from .ranks import Ranks

# What bits are read as, by the bytes of an element: 3 GiB of bf16 are summed on the device that they stand on.
_INTEGERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


def check_equality(
    ranks: Ranks, steps: int, parameters: Mapping[str, nn.Parameter], optimizer: StreamedOptimizer
) -> None:
    """Has all processes compare what one of them is about to write for all; all have to call it together.

    Args:
        ranks: of the run.
        steps: optimizer steps that are done.
        parameters: the trained ones, by name.
        optimizer: the layer's.

    Raises:
        NumericsError: processes hold other weights or states than the main one.
    """
    if ranks.several and not ranks.alike(checksum(parameters, optimizer)):
        raise NumericsError(
            f"resume point: after step {steps} the {ranks.count} processes hold different weights or optimizer "
            "states; expected the same bits, as DDP keeps them, since one process writes them for all. GPUs of "
            "different kinds may round differently. Earlier points are whole; unset MOSS_LOWMEM_SAVE_STEPS and "
            "MOSS_LOWMEM_SAVE_MINUTES to train on without new ones."
        )


def checksum(parameters: Mapping[str, nn.Parameter], optimizer: StreamedOptimizer) -> int:
    """Returns a number from 0 to 2**62 that is another one if a bit of weights or states is.

    Sums of elements as integers, which do not depend on an order, each tensor by itself: two processes that have come
    apart differ in nearly every element, and no exchange of elements gives the same sum of every tensor.
    """
    digest = hashlib.sha256()
    for name, parameter in parameters.items():
        states = optimizer.states.read(parameter) if optimizer.steps.get(parameter, 0) else {}
        sums = _sums([parameter.detach(), *(states[key] for key in sorted(states))])
        digest.update(f"{name} {optimizer.steps.get(parameter, 0)} {sums}".encode())
    return int.from_bytes(digest.digest()[:8], "big") >> 2


def _sums(tensors: Iterable[torch.Tensor]) -> list[int]:
    return [int(_bits(tensor).sum(dtype=torch.int64)) for tensor in tensors]


def _bits(tensor: torch.Tensor) -> torch.Tensor:
    flat = tensor.contiguous().reshape(-1)
    return flat.view(_INTEGERS[flat.element_size()])
