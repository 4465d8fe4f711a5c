"""Counts the bytes of tensors that are alive, whoever made them: peers' states and ours by the same rule."""

from __future__ import annotations

import gc
from dataclasses import dataclass

import torch

from moss_tts_patches.memory.placement import register_host_observer


@dataclass(frozen=True)
class Bytes:
    """Live bytes on the compute device and in the layer's host stores."""

    device: int
    host: int


class LiveBytes:
    """Reads sums of live storages; use as a context, so that host buffers made inside it are known as such.

    Every tensor is found through Python's garbage collector, storages are counted once.
    """

    def __init__(self) -> None:
        self._host: list[torch.UntypedStorage] = []

    def __enter__(self) -> LiveBytes:
        self._observer = register_host_observer(self._host.append)
        return self

    def __exit__(self, *error: object) -> None:
        self._observer.remove()
        self._host.clear()

    def read(self) -> Bytes:
        """Returns what is alive now."""
        gc.collect()
        # By exact type: a tensor subclass (torchao's states) has no storage, its parts are plain tensors.
        tensors = [item for item in gc.get_objects() if type(item) in (torch.Tensor, torch.nn.Parameter)]
        storages = {
            (storage.device, storage.data_ptr()): storage.nbytes()
            for storage in (tensor.untyped_storage() for tensor in tensors if tensor.layout == torch.strided)
            if storage.device.type != "meta"
        }
        on_host = {(storage.device, storage.data_ptr()): storage.nbytes() for storage in self._host}
        total, host = sum((storages | on_host).values()), sum(on_host.values())
        return Bytes(total - host, host)
