"""Counts the bytes of live storages while code runs, on real or fake tensors.

Under ``FakeTensorMode`` a full-size training step is simulated without weights, without a GPU and in seconds. Fake CUDA
tensors do not train on a CPU build of torch, so storages are told apart by owner, not by device: everything counts as
device memory except what the stores announce as host memory.
"""

from __future__ import annotations

import functools
import weakref
from collections.abc import Iterable
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from .placement import register_host_observer


class StorageTracker(TorchDispatchMode):
    """Keeps the current and the largest sum of live storage bytes.

    Attributes:
        live_bytes: device bytes alive now.
        peak_bytes: the largest value that ``live_bytes`` had since the last :meth:`reset_peak`.
        host_bytes: bytes of host buffers alive now.
    """

    def __init__(self) -> None:
        super().__init__()
        self.live_bytes = 0
        self.peak_bytes = 0
        self.host_bytes = 0
        self._known: dict[int, tuple[weakref.ref, int, bool]] = {}
        self._observer: Any = None

    def __enter__(self) -> StorageTracker:
        self._observer = register_host_observer(lambda storage: self._add(storage, on_host=True))
        super().__enter__()
        return self

    def __exit__(self, *error: Any) -> None:
        super().__exit__(*error)
        self._observer.remove()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        for value in tree_leaves(result):
            if isinstance(value, torch.Tensor):
                self._add(value.untyped_storage(), on_host=False)
        return result

    def watch(self, tensors: Iterable[torch.Tensor]) -> None:
        """Counts tensors that were made before the tracker was on."""
        for tensor in tensors:
            self._add(tensor.untyped_storage(), on_host=False)

    def reset_peak(self) -> None:
        """Starts a new measurement from what is alive now."""
        self.peak_bytes = self.live_bytes

    def _add(self, storage: torch.UntypedStorage, *, on_host: bool) -> None:
        key = id(storage)
        if key in self._known:
            if on_host and not self._known[key][2]:
                self._move_to_host(key)
            return
        size = storage.nbytes()
        reference = weakref.ref(storage, functools.partial(self._forget, key))
        self._known[key] = (reference, size, on_host)
        if on_host:
            self.host_bytes += size
        else:
            self.live_bytes += size
            self.peak_bytes = max(self.peak_bytes, self.live_bytes)

    def _move_to_host(self, key: int) -> None:
        """A store announced a buffer that its allocation has just counted as device memory."""
        reference, size, _ = self._known[key]
        if self.peak_bytes == self.live_bytes:
            self.peak_bytes -= size
        self.live_bytes -= size
        self.host_bytes += size
        self._known[key] = (reference, size, True)

    def _forget(self, key: int, _: weakref.ref) -> None:
        _, size, on_host = self._known.pop(key)
        if on_host:
            self.host_bytes -= size
        else:
            self.live_bytes -= size
