"""Where optimizer states live between steps: on the parameter's device or in host memory, behind one interface.

A step asks for a parameter's states in *pieces*: runs of at most 2**24 elements. On the device a piece is a view. From
the host a piece is brought over, worked on and taken back, while the next one is already on its way; so what the states
take on the device during a step does not grow with the largest parameter (a table of 311 million elements has 0.59 GiB
of 8-bit states, two pieces have 65 MiB).
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensor

from ..errors import StateError
from ..memory.placement import empty_host

# 32 MiB of 8-bit states: 2 ms on PCIe 4.0 x16, so the 10 us that a copy takes to start do not show. A multiple of the
# 256-value block and of the update's slice.
PIECE_ELEMENTS = 2**24

# Start of every state in the arena: a cache line, and enough for any dtype and vector access. At most 0.01 % of it.
ALIGNMENT_BYTES = 64


@dataclass(frozen=True)
class StateSpec:
    """One state tensor of a parameter.

    Attributes:
        dtype: of its entries.
        elements_per_entry: how many of the parameter's elements share an entry: 1, or a block.
    """

    dtype: torch.dtype
    elements_per_entry: int = 1

    def entries(self, elements: int) -> int:
        """Returns how many entries ``elements`` elements need."""
        return -(-elements // self.elements_per_entry)

    def size(self, elements: int) -> int:
        """Returns the bytes that ``elements`` elements need."""
        return self.entries(elements) * self.dtype.itemsize


Layout = dict[str, StateSpec]
Tensors = dict[str, torch.Tensor]


@dataclass
class Piece:
    """States of the elements ``start:end`` of a parameter, on its device; writes to them are kept."""

    start: int
    end: int
    states: Tensors


def is_simulated(tensor: torch.Tensor) -> bool:
    """Whether the tensor has no memory behind it (``FakeTensorMode``)."""
    return isinstance(tensor, FakeTensor)


def _piece_bounds(parameter: torch.Tensor) -> list[tuple[int, int]]:
    numel = parameter.numel()
    return [(start, min(start + PIECE_ELEMENTS, numel)) for start in range(0, numel, PIECE_ELEMENTS)]


class StateStore:
    """Base of the stores. States come into being as zeros.

    Args:
        layout_of: tells which states a parameter has.
    """

    def __init__(self, layout_of: Callable[[torch.Tensor], Layout]) -> None:
        self._layout_of = layout_of

    def reserve(self, parameters: Sequence[nn.Parameter]) -> None:
        """Makes room for all of ``parameters``, and learns the order in which a step goes through them."""

    def pieces(self, parameter: nn.Parameter) -> Iterator[Piece]:
        """Yields the parameter's states piece by piece; a piece may be used until the next one is asked for."""
        raise NotImplementedError

    def read(self, parameter: nn.Parameter) -> Tensors:
        """Returns the parameter's whole states, flat, where they live."""
        raise NotImplementedError

    def write(self, parameter: nn.Parameter, states: Tensors) -> None:
        """Replaces the parameter's states by a copy of ``states``; names, shapes and dtypes are checked already."""
        raise NotImplementedError

    def clear(self) -> None:
        """Forgets all states."""
        raise NotImplementedError

    def end_step(self) -> None:
        """Gives back what was only needed during the step."""

    def device_bytes(self) -> int:
        """Bytes of states that stand on the compute device now."""
        return 0

    def host_bytes(self) -> int:
        """Bytes of host memory that the store holds."""
        return 0


class DeviceStates(StateStore):
    """Keeps states on the parameter's device."""

    def __init__(self, layout_of: Callable[[torch.Tensor], Layout]) -> None:
        super().__init__(layout_of)
        self._states: dict[nn.Parameter, Tensors] = {}

    def reserve(self, parameters: Sequence[nn.Parameter]) -> None:
        # Now: what is tried before the first step has to find the card as full as it will be after it.
        for parameter in parameters:
            self.read(parameter)

    def pieces(self, parameter: nn.Parameter) -> Iterator[Piece]:
        layout, states = self._layout_of(parameter), self.read(parameter)
        for start, end in _piece_bounds(parameter):
            parts = {name: _cut(states[name], spec, start, end) for name, spec in layout.items()}
            yield Piece(start, end, parts)

    def read(self, parameter: nn.Parameter) -> Tensors:
        states = self._states.get(parameter)
        if states is None:
            states = self._states[parameter] = {
                name: torch.zeros(spec.entries(parameter.numel()), dtype=spec.dtype, device=parameter.device)
                for name, spec in self._layout_of(parameter).items()
            }
        elif any(state.device != parameter.device for state in states.values()):
            # Loaded before the model was moved.
            states = self._states[parameter] = {name: state.to(parameter.device) for name, state in states.items()}
        return states

    def write(self, parameter: nn.Parameter, states: Tensors) -> None:
        self._states[parameter] = {name: state.to(parameter.device, copy=True) for name, state in states.items()}

    def clear(self) -> None:
        self._states.clear()

    def device_bytes(self) -> int:
        return sum(state.numel() * state.element_size() for part in self._states.values() for state in part.values())


class HostStates(StateStore):
    """Keeps states in one host arena and lends them to the parameter's device piece by piece.

    The arena is laid out by pieces, each with all of its states side by side, so that a piece is one copy each way. On
    a CUDA device copies run on a side stream. Pieces are allocated there too, so their memory is reused in that
    stream's order, which a piece enters first (brought) and leaves last (taken back): no other bookkeeping is needed.
    """

    def __init__(self, layout_of: Callable[[torch.Tensor], Layout]) -> None:
        super().__init__(layout_of)
        self._arena: torch.Tensor | None = None
        self._homes: dict[nn.Parameter, list[_Home]] = {}
        self._next: dict[nn.Parameter, nn.Parameter] = {}
        self._ahead: _Loan | None = None
        self._streams: dict[torch.device, torch.cuda.Stream] = {}
        self._lent_bytes = 0

    def reserve(self, parameters: Sequence[nn.Parameter]) -> None:
        parameters = [parameter for parameter in parameters if parameter.numel()]
        self._next = dict(itertools.pairwise(parameters))
        if self._arena is None:
            self._lay_out(parameters)
            return
        late = [parameter for parameter in parameters if parameter not in self._homes]
        if late:
            shapes = ", ".join(str(tuple(parameter.shape)) for parameter in late[:10])
            raise StateError(
                f"host state store: {len(late)} parameters became trainable after the first step (shapes {shapes}); "
                "the host memory was laid out without them. Set requires_grad before training starts, or use "
                "MOSS_LOWMEM_STATES=device."
            )

    def _lay_out(self, parameters: Sequence[nn.Parameter]) -> None:
        """Gives every piece its place and takes the memory at once."""
        bounds = [(parameter, *bound) for parameter in parameters for bound in _piece_bounds(parameter)]
        sizes = [_packed_bytes(self._layout_of(parameter), end - start) for parameter, start, end in bounds]
        self._arena = empty_host(sum(sizes), torch.uint8).zero_()
        for (parameter, start, end), buffer in zip(bounds, self._arena.split(sizes)):
            self._homes.setdefault(parameter, []).append(_Home(parameter, start, end, buffer))

    def pieces(self, parameter: nn.Parameter) -> Iterator[Piece]:
        homes = self._homes[parameter]
        following = self._next.get(parameter)
        for home, coming in zip(homes, [*homes[1:], self._homes[following][0] if following is not None else None]):
            loan = self._take(home)
            self._ahead = None if coming is None else self._bring(coming)
            yield Piece(home.start, home.end, loan.states)
            self._take_back(loan)

    def _take(self, home: _Home) -> _Loan:
        """Returns the piece that was sent ahead if it is the right one (a parameter may have been passed over)."""
        loan, self._ahead = self._ahead, None
        if loan is not None and loan.home is not home:
            self._drop(loan)
            loan = None
        loan = loan or self._bring(home)
        if loan.ready is not None:
            torch.cuda.current_stream(home.parameter.device).wait_event(loan.ready)
        return loan

    def _bring(self, home: _Home) -> _Loan:
        """Starts copying a piece to its parameter's device."""
        parameter = home.parameter
        stream = self._stream(parameter)
        with torch.cuda.stream(stream):  # None: the context does nothing
            # A copy even where the device is the host: what is lent must be counted, and simulated, as device memory.
            buffer = torch.empty(home.buffer.numel(), dtype=torch.uint8, device=parameter.device)
            buffer.copy_(home.buffer, non_blocking=True)
            states = _unpack(buffer, self._layout_of(parameter), home.end - home.start)
            ready = None if stream is None else stream.record_event()
        self._lent_bytes += home.buffer.numel()
        return _Loan(home, buffer, states, stream, ready)

    def _take_back(self, loan: _Loan) -> None:
        """Starts copying a piece home and gives its device memory back."""
        if loan.stream is not None:
            loan.stream.wait_stream(torch.cuda.current_stream(loan.stream.device))
        assert loan.buffer is not None
        with torch.cuda.stream(loan.stream):
            loan.home.buffer.copy_(loan.buffer, non_blocking=True)
        self._drop(loan)

    def _drop(self, loan: _Loan) -> None:
        self._lent_bytes -= loan.home.buffer.numel()
        loan.buffer = None
        loan.states.clear()  # the piece that the caller still holds shares this dict

    def _stream(self, parameter: nn.Parameter) -> torch.cuda.Stream | None:
        """Returns the side stream of the parameter's device, None where copies are synchronous."""
        device = parameter.device
        if device.type != "cuda" or is_simulated(parameter):
            return None
        if device not in self._streams:
            self._streams[device] = torch.cuda.Stream(device)
        return self._streams[device]

    def read(self, parameter: nn.Parameter) -> Tensors:
        """Returns views of the arena; for a parameter of several pieces, copies."""
        self._synchronize()
        layout = self._layout_of(parameter)
        parts = [_unpack(home.buffer, layout, home.end - home.start) for home in self._homes[parameter]]
        return parts[0] if len(parts) == 1 else {name: torch.cat([part[name] for part in parts]) for name in layout}

    def write(self, parameter: nn.Parameter, states: Tensors) -> None:
        self._synchronize()
        layout = self._layout_of(parameter)
        for home in self._homes[parameter]:
            for name, part in _unpack(home.buffer, layout, home.end - home.start).items():
                part.copy_(_cut(states[name], layout[name], home.start, home.end))

    def clear(self) -> None:
        self._synchronize()
        self.end_step()
        if self._arena is not None:
            self._arena.zero_()

    def end_step(self) -> None:
        if self._ahead is not None:
            self._drop(self._ahead)
            self._ahead = None

    def _synchronize(self) -> None:
        for stream in self._streams.values():
            stream.synchronize()

    def device_bytes(self) -> int:
        return self._lent_bytes

    def host_bytes(self) -> int:
        return 0 if self._arena is None else self._arena.numel()


@dataclass(frozen=True, eq=False)
class _Home:
    """The place of one piece in the arena: ``buffer [bytes]`` uint8, a view."""

    parameter: nn.Parameter
    start: int
    end: int
    buffer: torch.Tensor


@dataclass(eq=False)
class _Loan:
    """A piece on its way to the device or there: ``states`` are views of ``buffer``, usable after ``ready``."""

    home: _Home
    buffer: torch.Tensor | None
    states: Tensors
    stream: torch.cuda.Stream | None
    ready: torch.cuda.Event | None


def _aligned(size: int) -> int:
    return -(-size // ALIGNMENT_BYTES) * ALIGNMENT_BYTES


def _packed_bytes(layout: Layout, elements: int) -> int:
    """Returns what the states of ``elements`` elements take side by side."""
    return sum(_aligned(spec.size(elements)) for spec in layout.values())


def _unpack(buffer: torch.Tensor, layout: Layout, elements: int) -> Tensors:
    """Returns the states that lie side by side in ``buffer [bytes]`` as views."""
    states, offset = {}, 0
    for name, spec in layout.items():
        size = spec.size(elements)
        states[name] = buffer[offset : offset + size].view(spec.dtype)
        offset += _aligned(size)
    return states


def _cut(state: torch.Tensor, spec: StateSpec, start: int, end: int) -> torch.Tensor:
    """Returns the entries of the elements ``start:end``; pieces begin at an entry's first element."""
    if start == 0 and spec.entries(end) == state.numel():
        return state
    return state[start // spec.elements_per_entry : spec.entries(end)]
