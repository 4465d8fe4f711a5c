"""Counts the bytes of live storages by owner while code runs, on real or fake tensors.

Under ``FakeTensorMode`` a full-size training step is simulated without weights, without a GPU and in seconds. Fake CUDA
tensors do not train on a CPU build of torch, so storages are told apart by owner, not by device: everything counts as
device memory except what the stores announce as host memory.
"""

from __future__ import annotations

import functools
import weakref
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from .flops import FlopCounter
from .footprint import Footprint
from .placement import register_host_observer

WEIGHTS, GRADIENTS, STATES = "weights", "gradients", "states"
_UNOWNED, _HOST = "unowned", "host"
_BEGINNING = "beginning"  # the phase before the first one that is named

# Asked a thousand times a step, answered without work; more than half of what a simulated step dispatches.
_DEVICE_QUESTION = torch.ops.prim.device.default


@dataclass
class Phase:
    """A stretch of the step: what was alive when it began, and at its largest moment."""

    start: Footprint
    peak: Footprint


@dataclass
class _Known:
    reference: weakref.ref
    size: int
    owner: str = field(default=_UNOWNED)


class StorageTracker(TorchDispatchMode):
    """Keeps the current and the largest sum of live storage bytes, by owner and by phase.

    Args:
        counter: counts the FLOPs of the same operations; two modes on top of each other would cost twice.

    Attributes:
        live_bytes: device bytes alive now.
        peak_bytes: the largest value that ``live_bytes`` had since the last :meth:`reset_peak`.
        host_bytes: bytes of host buffers alive now.
        phases: by name, since the last :meth:`reset_peak`.
    """

    def __init__(self, counter: FlopCounter | None = None) -> None:
        super().__init__()
        self.live_bytes = 0
        self.host_bytes = 0
        self.phases: dict[str, Phase] = {}
        self._counter = counter
        self._owned: Counter[str] = Counter()
        self._unowned_sizes: Counter[int] = Counter()
        self._known: dict[int, _Known] = {}
        self._phase = self.phases[_BEGINNING] = Phase(Footprint(), Footprint())
        self._last: tuple[int, Footprint] = (0, Footprint())
        self._observer: Any = None

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False  # nothing is compiled here, and the guard around every operation costs a tenth of the time

    def __enter__(self) -> StorageTracker:
        self._observer = register_host_observer(lambda storage: self._own(storage, _HOST))
        super().__enter__()
        return self

    def __exit__(self, *error: Any) -> None:
        super().__exit__(*error)
        self._observer.remove()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func is _DEVICE_QUESTION:
            device = getattr(args[0], "fake_device", None)
            if device is not None:
                return device
        result = func(*args, **kwargs)
        if self._counter is not None:
            self._counter.count(func, args, kwargs, result)
        for value in (result,) if isinstance(result, torch.Tensor) else tree_leaves(result):
            if isinstance(value, torch.Tensor):
                self._add(value.untyped_storage(), _UNOWNED)
        return result

    @property
    def peak_bytes(self) -> int:
        return round(max(phase.peak.device_bytes for phase in self.phases.values()))

    def watch(self, tensors: Iterable[torch.Tensor], owner: str = _UNOWNED) -> None:
        """Counts tensors as ``owner``'s, those that were made before the tracker was on too."""
        for tensor in tensors:
            self._own(tensor.untyped_storage(), owner)

    def reset_peak(self) -> None:
        """Starts a new measurement from what is alive now."""
        self.phases.clear()
        self.phase(_BEGINNING)

    def phase(self, name: str) -> None:
        """What happens from now on belongs to the phase ``name``."""
        self._phase = self.phases[name] = Phase(self._footprint(), self._footprint())

    def _footprint(self) -> Footprint:
        unowned, largest = self._owned[_UNOWNED], max(self._unowned_sizes, default=0)
        return Footprint(self._owned[WEIGHTS], self._owned[GRADIENTS], self._owned[STATES], unowned - largest, largest)

    def _own(self, storage: torch.UntypedStorage, owner: str) -> None:
        known = self._known.get(id(storage))
        if known is None:
            self._add(storage, owner)
        elif known.owner != owner:
            if owner == _HOST and self._last[0] == id(storage):
                # A store announced a buffer that its allocation has just counted as device memory.
                self._phase.peak = self._last[1]
            self._take_out(known)
            known.owner = owner
            self._put_in(known)
            if owner != _HOST and self._phase.peak.device_bytes == self.live_bytes:
                self._phase.peak = self._footprint()

    def _add(self, storage: torch.UntypedStorage, owner: str) -> None:
        key = id(storage)
        if key in self._known:
            return
        known = _Known(weakref.ref(storage, functools.partial(self._forget, key)), storage.nbytes(), owner)
        self._known[key] = known
        self._put_in(known)
        self._last = (key, self._phase.peak)
        if self.live_bytes > self._phase.peak.device_bytes:
            self._phase.peak = self._footprint()

    def _put_in(self, known: _Known) -> None:
        self._owned[known.owner] += known.size
        if known.owner == _HOST:
            self.host_bytes += known.size
            return
        self.live_bytes += known.size
        if known.owner == _UNOWNED:
            self._unowned_sizes[known.size] += 1

    def _take_out(self, known: _Known) -> None:
        self._owned[known.owner] -= known.size
        if known.owner == _HOST:
            self.host_bytes -= known.size
            return
        self.live_bytes -= known.size
        if known.owner == _UNOWNED:
            self._unowned_sizes[known.size] -= 1
            if not self._unowned_sizes[known.size]:
                del self._unowned_sizes[known.size]

    def _forget(self, key: int, _: weakref.ref) -> None:
        self._take_out(self._known.pop(key))
