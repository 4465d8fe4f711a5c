"""Where gradients, optimizer states and idle weights of a run live: what was asked for, against what it can do."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass

import torch
from torch import nn

from ..errors import SettingsError
from ..memory.card import StorePlacement, StoreSizes, choose_placement
from ..memory.weight_parking import WeightParking
from ..optim import build_store
from ..optim.gradients import GradientStore


@dataclass(frozen=True)
class StoreRequest:
    """What the user chose, and what the run is.

    Attributes:
        placement: ``auto``, ``device`` or ``host`` for each store.
        host_gradient_dtype: of gradients in host memory.
        optimizer: its kind, which decides how large states are.
        schedule: of the loss.
        checkpointed_layers: how many layers are recomputed.
        loss_scaler: a loss scaler looks at gradients, so they have to be on the GPU.
        four_bit: the base's weights are quantised and cannot be moved.
        engine_reason: why an engine over several processes needs gradients on the GPU; None where none does.
    """

    placement: StorePlacement
    host_gradient_dtype: torch.dtype
    optimizer: str
    schedule: str
    checkpointed_layers: int
    loss_scaler: bool
    four_bit: bool
    engine_reason: str | None = None

    @property
    def can_park(self) -> bool:
        """Whether weights can be away during the loss: no graph holds them, and they can be moved at all."""
        return self.schedule != "autograd" and self.checkpointed_layers > 0 and not self.four_bit


@dataclass(frozen=True)
class Stores:
    """What was decided and built.

    Attributes:
        placement: ``device`` or ``host`` for each store.
        sizes: of weights, gradients and states.
        gradients: the gradient store.
        parking: takes the backbone's weights off the GPU during the loss; None where they stay.
        can_park: whether it could.
    """

    placement: StorePlacement
    sizes: StoreSizes
    gradients: GradientStore
    parking: WeightParking | None
    can_park: bool

    @property
    def weights_away(self) -> Callable[[], AbstractContextManager[None]]:
        return nullcontext if self.parking is None else self.parking.away


def build_stores(
    request: StoreRequest,
    model: nn.Module,
    layers: Callable[[], Iterator[nn.Parameter]],
    card_bytes: float | None,
) -> Stores:
    """Decides and builds.

    Args:
        request: see there.
        model: with everything frozen that will be.
        layers: yields the weights of the checkpointed layers.
        card_bytes: memory of the GPU, or None where there is none.

    Raises:
        SettingsError: a placement is set that this run cannot have.
    """
    sizes = StoreSizes.of(model.parameters(), request.optimizer)
    placement = choose_placement(_possible(request), card_bytes, sizes)
    parking = None
    if placement.weights == "host":
        if _parks(request):
            parking = WeightParking(layers())
        else:
            placement = StorePlacement(placement.gradients, placement.states, "device")
    return Stores(
        placement, sizes, build_store(placement.gradients, request.host_gradient_dtype), parking, request.can_park
    )


def _possible(request: StoreRequest) -> StorePlacement:
    """The request, with what this run cannot do taken out of ``auto``."""
    gradients, weights = request.placement.gradients, request.placement.weights
    if request.loss_scaler:
        if gradients == "host":
            raise SettingsError(
                "MOSS_LOWMEM_GRADIENTS=host with --mixed-precision fp16: the loss scaler looks for infinities in "
                "gradients on the GPU. Expected device, or auto; adapters' gradients are small."
            )
        gradients = "device"
    if request.engine_reason is not None:
        if gradients == "host":
            raise SettingsError(
                f"MOSS_LOWMEM_GRADIENTS=host: {request.engine_reason}. Expected device, or auto; "
                "MOSS_LOWMEM_STATES=host, LoRA, or ZeRO (lowmem:zero2, lowmem:zero3-offload) do save memory."
            )
        gradients = "device"
    if request.four_bit:
        if weights == "host":
            raise SettingsError(
                "MOSS_LOWMEM_WEIGHTS=host with MOSS_LOWMEM_METHOD=qlora: weights in 4 bit stay on the GPU. Expected "
                "device, or auto."
            )
        weights = "device"
    return StorePlacement(gradients, request.placement.states, weights)


def _parks(request: StoreRequest) -> bool:
    """Whether weights that should wait on the host will; ``auto`` gives way where they cannot."""
    if request.can_park:
        return True
    if request.placement.weights == "auto":
        return False
    raise SettingsError(
        f"MOSS_LOWMEM_WEIGHTS=host with schedule {request.schedule} and {request.checkpointed_layers} checkpointed "
        "layers: weights can only be away while no graph holds them. Expected schedule fused or staged, and "
        "MOSS_LOWMEM_CHECKPOINTING=1."
    )
