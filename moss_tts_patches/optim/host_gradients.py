"""Gradients in host memory: each leaves the GPU as soon as it is complete and is added up there.

One arena holds all gradients, so that pinned memory is registered once (PyTorch's own pinned allocator rounds every
buffer up to a power of two). Contributions pass through staging buffers on a side stream while the backward goes on;
one worker thread adds them, in the order in which they came, so that a sum does not depend on timing.
"""

from __future__ import annotations

import functools
import queue
import threading
import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import nn

from ..cores import cores
from ..errors import NumericsError
from ..memory.placement import empty_host
from .gradients import ChunkSum, GradientStore
from .state_store import is_simulated

# Gradients on their way to the host at any moment: enough to keep PCIe busy while the worker adds (16 ms at 16 GB/s),
# small beside 5 GiB of weights. The planner counts it.
IN_FLIGHT_BYTES = 256 * 2**20
LARGEST_ELEMENT_BYTES = 8  # int64 ids
PIECE_ELEMENTS = IN_FLIGHT_BYTES // 4 // LARGEST_ELEMENT_BYTES  # four staging buffers of 64 MiB

# bf16 that is added to float32 is widened in blocks of 1 MiB, which stay in a core's cache: 0.4 ns an element on one
# core against 2.3 for torch's own mixed addition, which is not vectorised (1.25 s and 7 s for the 3.04 B of 1.7B).
WIDENED_ELEMENTS = 2**18

# What keeps a desktop's memory busy. accelerate's launcher leaves a training one thread (OMP_NUM_THREADS=1).
WORKER_THREADS = 4

# For what is queued when the thread has to end: four pieces, added in under a second unless the GPU hangs.
LONGEST_END_SECONDS = 10.0


@dataclass(frozen=True)
class _Place:
    """Where one parameter's gradient lies in the arena: ``offset`` in elements (Python ints do not overflow)."""

    offset: int
    shape: torch.Size

    @property
    def numel(self) -> int:
        return self.shape.numel()


class HostGradients(GradientStore):
    """Accumulates gradients in one host arena.

    Args:
        dtype: of the arena: float32 (4 bytes of RAM per trained parameter) or bfloat16 (2 bytes; sums of many
            micro-batches then round as they would on the GPU).
        threaded: use the worker thread for CPU tensors too (it is always used for CUDA ones).
    """

    def __init__(self, dtype: torch.dtype = torch.float32, *, threaded: bool = False) -> None:
        super().__init__()
        self.dtype = dtype
        self._threaded = threaded
        self._arena: torch.Tensor | None = None
        self._places: dict[nn.Parameter, _Place] = {}
        self._written: set[nn.Parameter] = set()
        self._clip: torch.Tensor | None = None
        self._lane: TransferLane | None = None
        self._fetched: torch.cuda.Event | None = None

    def attach(self, named_parameters: Iterable[tuple[str, nn.Parameter]]) -> None:
        super().attach(named_parameters)
        offset = 0
        for parameter in self._names:
            self._places[parameter] = _Place(offset, parameter.shape)
            offset += parameter.numel()
        self._arena = empty_host(offset, self.dtype)

    def detach(self) -> None:
        super().detach()
        if self._lane is not None:
            self._lane.close()
            self._lane = None

    # -- contributions -------------------------------------------------------------------------------------------

    def add(self, parameter: nn.Parameter, gradient: torch.Tensor) -> None:
        self._send_range(parameter, 0, gradient)
        self.count(parameter)

    def add_slice(self, parameter: nn.Parameter, start: int, end: int, gradient: torch.Tensor) -> None:
        self._begin(parameter)
        self._send_range(parameter, start * (parameter.numel() // parameter.shape[0]), gradient)

    def add_rows(self, parameter: nn.Parameter, ids: torch.Tensor, rows: torch.Tensor) -> None:
        self._begin(parameter)
        view = self._view(parameter)
        block = max(1, PIECE_ELEMENTS // rows.shape[1])
        for part_ids, part_rows in zip(ids.split(block), rows.split(block)):
            self._send_rows(view, part_ids, part_rows)
        self.count(parameter)

    def _send_rows(self, view: torch.Tensor, ids: torch.Tensor, rows: torch.Tensor) -> None:
        arrived: list[torch.Tensor] = []
        # The ids travel first; the lane keeps order.
        self._send(ids, lambda staged: arrived.append(staged.clone()))
        self._send(rows, lambda staged: view.index_add_(0, arrived[0], staged.view(rows.shape).to(view.dtype)))

    def _begin(self, parameter: nn.Parameter) -> None:
        """Clears the parameter's place where this is its first, partial contribution of the step."""
        if parameter not in self._written:
            self._written.add(parameter)
            view = self._view(parameter)
            self._run(view.zero_)

    def _send_range(self, parameter: nn.Parameter, first_element: int, value: torch.Tensor) -> None:
        """Adds ``value`` to the flattened gradient from ``first_element`` on, or sets it where the step has none."""
        target = self._view(parameter).view(-1)
        combine = _add if parameter in self._written else torch.Tensor.copy_
        self._written.add(parameter)
        flat = value.reshape(-1)
        for start in range(0, flat.numel(), PIECE_ELEMENTS):
            piece = flat[start : start + PIECE_ELEMENTS]
            place = target[first_element + start : first_element + start + piece.numel()]
            self._send(piece, functools.partial(combine, place))

    def _send(self, value: torch.Tensor, consume: Callable[[torch.Tensor], object]) -> None:
        """Has ``consume`` called with a flat host copy of ``value``, in the order of the calls."""
        if self._lane is None and (value.is_cuda or self._threaded):
            self._lane = TransferLane(value.device)
        if self._lane is None:
            consume(value.reshape(-1))
        else:
            self._lane.send(value.reshape(-1), consume)

    def _run(self, action: Callable[[], object]) -> None:
        """Runs ``action`` on the arena in order with the contributions."""
        if self._lane is None:
            action()
        else:
            self._lane.run(action)

    def _view(self, parameter: nn.Parameter) -> torch.Tensor:
        place = self._places[parameter]
        assert self._arena is not None
        return self._arena[place.offset : place.offset + place.numel].view(place.shape)

    def _complete(self, parameter: nn.Parameter) -> None:
        gradient, parameter.grad = parameter.grad, None
        if gradient is not None:
            self.add(parameter, gradient)

    def _open_sum(self, parameter: nn.Parameter) -> ChunkSum:
        return self.chunk_sum_type(None)

    def _close_sum(self, parameter: nn.Parameter, chunk_sum: ChunkSum) -> None:
        if chunk_sum.total is not None:
            self.add(parameter, chunk_sum.total)
            self._counts[parameter] -= 1  # chunk_sums counts the contribution itself

    # -- gradient source of the optimizer ------------------------------------------------------------------------

    def wait(self) -> None:
        """Returns when every contribution has been added.

        Raises:
            NumericsError: the worker failed.
        """
        if self._lane is not None:
            self._lane.wait()

    def has(self, parameter: nn.Parameter) -> bool:
        """Whether the parameter received anything in this step."""
        return parameter in self._written

    def fetch(self, parameter: nn.Parameter) -> torch.Tensor | None:
        if not self.has(parameter):
            return None
        return self.fetch_range(parameter, 0, parameter.numel()).view(parameter.shape)

    def fetch_range(self, parameter: nn.Parameter, start: int, end: int) -> torch.Tensor:
        """Returns elements ``start:end`` of the flattened gradient on the parameter's device, clipped.

        The arena's own dtype travels: rounding to bf16 on the host would cost more time than it saves on PCIe.
        """
        self.wait()
        values = self._view(parameter).view(-1)[start:end].to(parameter.device, non_blocking=True)
        if values.is_cuda:
            self._fetched = torch.cuda.current_stream(values.device).record_event()
        if self._clip is None:
            return values
        return values * self._clip  # a number: on its way to the GPU it would wait for everything before it

    def zero(self) -> None:
        self.wait()
        if self._fetched is not None:
            # The next micro-batch clears parts of the arena at once; what is on its way to the GPU must have left it.
            self._fetched.synchronize()
            self._fetched = None
        self._written.clear()
        self._clip = None

    def clip(self, parameters: Sequence[nn.Parameter], max_norm: float, total_norm: torch.Tensor) -> None:
        # The factor is applied to what is fetched, which saves a pass over 10 GiB; same arithmetic as torch's.
        self._clip = torch.clamp(max_norm / (total_norm + 1e-6), max=1.0)

    def _accumulated(self, parameters: Sequence[nn.Parameter]) -> Iterator[tuple[nn.Parameter, torch.Tensor]]:
        self.wait()
        return ((parameter, self._view(parameter)) for parameter in parameters if parameter in self._written)

    def host_bytes(self) -> int:
        return 0 if self._arena is None else self._arena.numel() * self._arena.element_size()


class TransferLane:
    """Copies tensors off a device through pinned staging buffers and has one worker thread consume them in order.

    ``send`` returns as soon as the copy is queued on a side stream; the tensor's memory is free for reuse when the copy
    has run (``record_stream``). It blocks while all staging buffers are in use, which bounds what is in flight.

    Args:
        device: where the tensors come from.
    """

    def __init__(self, device: torch.device) -> None:
        self._stream = torch.cuda.Stream(device) if device.type == "cuda" else None
        self._jobs: queue.Queue[Callable[[], object] | None] = queue.Queue()
        self._free: queue.Queue[torch.Tensor] = queue.Queue()
        staging = empty_host(IN_FLIGHT_BYTES, torch.uint8)
        for slot in staging.split(PIECE_ELEMENTS * LARGEST_ELEMENT_BYTES):
            self._free.put(slot)
        self._errors: list[BaseException] = []
        # The thread knows no lane: what nobody else uses any more can go.
        arguments = (self._jobs, self._errors)
        thread = threading.Thread(target=_work, args=arguments, name="moss-lowmem-gradients", daemon=True)
        thread.start()
        # At the process's end too: Python ends a daemon thread that comes back from torch by unwinding its stack, which
        # C++ answers with abort(): status 134 instead of the run's own.
        self._end = weakref.finalize(self, _end, self._jobs, thread)

    def send(self, value: torch.Tensor, consume: Callable[[torch.Tensor], object]) -> None:
        """Queues a flat tensor of at most ``PIECE_ELEMENTS`` elements."""
        free, slot = self._free, self._free.get()
        staged = slot[: value.numel() * value.element_size()].view(value.dtype)
        arrived = self._copy(value, staged)

        def deliver() -> None:
            try:
                if arrived is not None:
                    arrived.synchronize()
                consume(staged)
            finally:
                free.put(slot)

        self._jobs.put(deliver)

    def run(self, action: Callable[[], object]) -> None:
        """Queues an action without data."""
        self._jobs.put(action)

    def wait(self) -> None:
        """Returns when everything queued so far is done.

        Raises:
            NumericsError: a job failed; the gradients of this step are incomplete.
        """
        self._jobs.join()
        if self._errors:
            raise NumericsError(
                f"host gradient store: a gradient could not be added ({self._errors[0]!r}). The step is incomplete and "
                "the weights were not touched; restart from the last checkpoint."
            ) from self._errors[0]

    def close(self) -> None:
        """Ends the thread, and returns once everything queued so far is done."""
        self._end()

    def _copy(self, value: torch.Tensor, staged: torch.Tensor) -> torch.cuda.Event | None:
        if self._stream is None:
            staged.copy_(value)
            return None
        self._stream.wait_stream(torch.cuda.current_stream(value.device))
        with torch.cuda.stream(self._stream):
            staged.copy_(value, non_blocking=True)
            value.record_stream(self._stream)
            arrived = torch.cuda.Event(blocking=True)  # the worker sleeps until then, where it would ask all the time
            arrived.record(self._stream)
        return arrived


def _work(jobs: queue.Queue[Callable[[], object] | None], errors: list[BaseException]) -> None:
    """Does ``jobs`` in their order; ``errors`` gets what they raise, and later jobs still free their buffers."""
    torch.set_num_threads(max(torch.get_num_threads(), min(WORKER_THREADS, cores())))
    while (job := jobs.get()) is not None:
        try:
            job()
        except BaseException as error:  # handed to the thread that waits
            errors.append(error)
        finally:
            del job  # it holds parts of the arena, and the next one may never come
            jobs.task_done()
    jobs.task_done()


def _end(jobs: queue.Queue[Callable[[], object] | None], thread: threading.Thread) -> None:
    jobs.put(None)
    if thread is not threading.current_thread():  # a lane may be collected anywhere
        thread.join(LONGEST_END_SECONDS)


def _add(total: torch.Tensor, value: torch.Tensor) -> None:
    """Adds ``value [n]`` to ``total [n]`` in place; the bits are those of ``total.add_(value)``."""
    if total.dtype != torch.float32 or value.dtype == torch.float32 or is_simulated(total):
        total.add_(value)
        return
    for part, narrow in zip(total.split(WIDENED_ELEMENTS), value.split(WIDENED_ELEMENTS)):
        part.add_(narrow.float())
