"""Takes weights off the GPU while a phase of the step does not need them.

While the depth model and the heads work, the backbone's layers (2.6 of 5.1 GiB of the 1.7B model) only take up room,
and that is when a step has its peak. Their weights have a copy in host memory, which is brought up to date after each
optimizer step; on the GPU they are dropped before the loss and brought back after it.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager

import torch
from torch import nn

from .placement import empty_host


class WeightParking:
    """Parks a group of parameters in host memory.

    The parameters must not be held by a graph while they are away: their layers are checkpointed, so that a forward
    pass keeps their inputs only.

    Args:
        parameters: the group; trained or not.
    """

    def __init__(self, parameters: Iterable[nn.Parameter]) -> None:
        self._parameters = list(dict.fromkeys(parameters))
        self._homes: dict[nn.Parameter, torch.Tensor] = {}
        self._stale = True

    def weights_changed(self) -> None:
        """An optimizer step has written to the parameters: the host copies are out of date."""
        self._stale = True

    @contextmanager
    def away(self) -> Iterator[None]:
        """Drops the weights from their device; on leaving they are back, bit for bit."""
        devices = {parameter: parameter.device for parameter in self._parameters}
        self._bring_up_to_date()
        for parameter in self._parameters:
            parameter.data = torch.empty(0, dtype=parameter.dtype, device=parameter.device)
        try:
            yield
        finally:
            for parameter, device in devices.items():
                home = self._homes[parameter]
                weights = torch.empty(home.shape, dtype=home.dtype, device=device)
                parameter.data = weights.copy_(home, non_blocking=True)

    def _bring_up_to_date(self) -> None:
        if not self._homes:
            self._make_homes()
        if self._stale:
            for parameter, home in self._homes.items():
                home.copy_(parameter.data, non_blocking=True)
            if any(parameter.is_cuda for parameter in self._parameters):
                torch.cuda.synchronize()  # once per optimizer step: the copies must be complete before memory goes
            self._stale = False

    def _make_homes(self) -> None:
        """One buffer per dtype: pinned memory is registered once, not once per weight."""
        for dtype in dict.fromkeys(parameter.dtype for parameter in self._parameters):
            group = [parameter for parameter in self._parameters if parameter.dtype == dtype]
            buffer = empty_host(sum(parameter.numel() for parameter in group), dtype)
            for parameter, home in zip(group, buffer.split([parameter.numel() for parameter in group])):
                self._homes[parameter] = home.view(parameter.shape)

    def host_bytes(self) -> int:
        """Bytes of host memory that the copies take."""
        return sum(home.numel() * home.element_size() for home in self._homes.values())
