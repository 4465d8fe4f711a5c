"""One way to run the layer, and the shape of a micro-batch. Plain values: nothing here needs torch."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

METHODS = ("full", "lora", "qlora")


@dataclass(frozen=True)
class MicroBatch:
    """Shape of a micro-batch: records in it, positions of the longest, supervised positions of all."""

    records: int
    positions: int
    supervised: int


@dataclass(frozen=True)
class Rung:
    """One way to run the layer, in the terms of the settings.

    Attributes:
        schedule: of the loss. ``by_module`` and ``by_module_kept`` are what engines that lend weights to one module at
            a time make of ``autograd``, the second for adapters; they are simulated and cannot be set.
        method: what is trained: ``full`` (every weight), ``lora`` or ``qlora``.
        host_gradient_dtype: name of a torch dtype.
        weights: ``host`` parks the backbone's layers while the loss works.
    """

    schedule: str = "staged"
    chunk_frames: int = 32
    checkpointing: bool = True
    optimizer: str = "adamw8bit"
    gradients: str = "device"
    states: str = "device"
    host_gradient_dtype: str = "float32"
    weights: str = "device"
    method: str = "full"

    @property
    def name(self) -> str:
        """For tables and messages: what differs from everything on the device, in words."""
        parts = [self.method, self.schedule]
        if not self.checkpointing:
            parts.append("stored")  # activations, instead of computing them again
        on_host = [store for store in ("gradients", "states", "weights") if getattr(self, store) == "host"]
        return "-".join([*parts, *(["host", "+".join(on_host)] if on_host else [])])

    def settings(self) -> dict[str, str]:
        """The environment variables that pin this rung."""
        values = {name: str(value) for name, value in asdict(self).items()}
        values["checkpointing"] = "1" if self.checkpointing else "0"
        return {f"MOSS_LOWMEM_{name.upper()}": value for name, value in values.items()}


@dataclass(frozen=True)
class UpstreamRung:
    """Upstream as it is, with or without its own gradient checkpointing."""

    checkpointing: bool

    @property
    def name(self) -> str:
        return "upstream-checkpointing" if self.checkpointing else "upstream"


#: Engines over several processes that have a config of ours, in the order of what they need on a GPU.
ENGINES = ("ddp", "zero2", "zero2-offload", "fsdp", "zero3", "zero3-offload")

#: Those for which upstream has a config.
UPSTREAM_ENGINES = ("ddp", "fsdp", "zero3")


@dataclass(frozen=True)
class EngineRung:
    """A training over several processes.

    Attributes:
        engine: one of :data:`ENGINES`.
        processes: one on each GPU of one machine.
        method: what is trained.
        states: where DDP's optimizer states are; other engines decide themselves.
        upstream: the name of an :class:`UpstreamRung` where it runs without the layer.
    """

    engine: str
    processes: int
    method: str = "full"
    states: str = "device"
    upstream: str = ""

    @property
    def name(self) -> str:
        engine = self.engine if self.states == "device" else f"{self.engine}-host-states"
        return f"{self.upstream or self.method}-{engine}-x{self.processes}"


AnyRung = Rung | UpstreamRung | EngineRung


def describe(rung: AnyRung) -> dict[str, Any]:
    """The rung's fields, for a cache's key or a JSON document."""
    return {"kind": type(rung).__name__, **asdict(rung)}
