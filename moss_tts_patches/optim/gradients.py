"""Where gradients live between the moment they are complete and the optimizer step.

The loss engine and autograd deliver *contributions*; a store adds them up over the micro-batches of a step and hands
them to the optimizer one parameter at a time. ``DeviceGradients`` keeps them in ``parameter.grad``, as torch does;
:mod:`.host_gradients` moves them to host memory.

Two things are the store's business wherever the gradients live:

* *chunk sums*: a parameter that the engine runs chunk by chunk receives many small contributions per micro-batch.
  Added up in bf16 they would cost up to 2.2 times upstream's own rounding error, so the store carries the rounding
  error of every addition along (:mod:`.compensated_sum`);
* *counting*: how many contributions a parameter got in this micro-batch, so that a gradient that was lost or came
  twice is noticed in the step in which it happened.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager

import torch
from torch import nn

from ..errors import NumericsError, first_ten
from .compensated_sum import add_compensated, add_rows_compensated


class ChunkSum:
    """The running sum of one parameter's chunk gradients within a micro-batch.

    Args:
        total: what it goes on from; changed in place.
        error: what rounding has left over of ``total`` so far (:func:`add_compensated`); changed in place.
    """

    def __init__(self, total: torch.Tensor | None, error: torch.Tensor | None = None) -> None:
        self.total = total
        self.error = error

    def add(self, value: torch.Tensor) -> None:
        """Adds one chunk's gradient; the first one is taken over as it is."""
        if self.total is None:
            self.total = value.contiguous()
        elif self.total.dtype != torch.bfloat16:
            self.total += value
        else:
            if self.error is None:
                self.error = torch.zeros_like(self.total, dtype=torch.int8)
            self.compensate(self.total, self.error, value)

    def compensate(self, total: torch.Tensor, error: torch.Tensor, value: torch.Tensor) -> None:
        """Adds to a bf16 sum; a simulation only takes the room that this takes."""
        add_compensated(total, error, value)


class GradientStore:
    """Base of the stores: receives contributions, keeps count, lends out chunk sums.

    A store is also the gradient source of an optimizer: ``fetch``, ``release``, ``zero``.

    Attributes:
        chunk_sum_type: of the sums that :meth:`chunk_sums` opens; a simulation sets its own, to see their buffers.
    """

    chunk_sum_type: type[ChunkSum] = ChunkSum

    def __init__(self) -> None:
        self._names: dict[nn.Parameter, str] = {}
        self._sums: dict[nn.Parameter, ChunkSum] = {}
        self._counts: dict[nn.Parameter, int] = {}
        self._received: set[nn.Parameter] = set()
        self._hooks: list[torch.utils.hooks.RemovableHandle] = []

    def attach(self, named_parameters: Iterable[tuple[str, nn.Parameter]]) -> None:
        """Watches every trainable parameter from now on."""
        for name, parameter in named_parameters:
            if parameter.requires_grad and parameter not in self._names:
                self._names[parameter] = name
                self._hooks.append(parameter.register_post_accumulate_grad_hook(self._arrived))

    def detach(self) -> None:
        """Stops watching; gradients stay where they are."""
        for hook in self._hooks:
            hook.remove()
        self._hooks.clear()
        self._names.clear()

    # -- contributions -------------------------------------------------------------------------------------------

    def add(self, parameter: nn.Parameter, gradient: torch.Tensor) -> None:
        """Adds a dense contribution, same shape as the parameter."""
        raise NotImplementedError

    def add_slice(self, parameter: nn.Parameter, start: int, end: int, gradient: torch.Tensor) -> None:
        """Adds to rows ``start:end`` of the parameter's gradient; ``gradient`` is ``[end - start, ...]``."""
        raise NotImplementedError

    def add_rows(self, parameter: nn.Parameter, ids: torch.Tensor, rows: torch.Tensor) -> None:
        """Adds ``rows [n, hidden]`` (float32) at ``ids [n]``; only id 0 may repeat, with zero rows."""
        raise NotImplementedError

    def count(self, parameter: nn.Parameter) -> None:
        """Notes that one contribution of this micro-batch is complete."""
        self._counts[parameter] = self._counts.get(parameter, 0) + 1

    def _arrived(self, parameter: nn.Parameter) -> None:
        """Runs when autograd has written ``parameter.grad``."""
        if parameter in self._sums:
            gradient = parameter.grad
            parameter.grad = None
            if gradient is not None:
                self._sums[parameter].add(gradient)
        else:
            self._complete(parameter)

    def _complete(self, parameter: nn.Parameter) -> None:
        """Autograd's contribution of this micro-batch stands in ``parameter.grad``."""
        raise NotImplementedError

    # -- chunk sums ----------------------------------------------------------------------------------------------

    @contextmanager
    def chunk_sums(self, parameters: Iterable[nn.Parameter]) -> Iterator[None]:
        """While open, autograd's gradients of ``parameters`` are partial sums of one contribution."""
        opened = [parameter for parameter in parameters if parameter.requires_grad]
        for parameter in opened:
            self._sums[parameter] = self._open_sum(parameter)
        try:
            yield
        finally:
            sums = {parameter: self._sums.pop(parameter) for parameter in opened}
        for parameter, chunk_sum in sums.items():
            self._close_sum(parameter, chunk_sum)
            self.count(parameter)

    def add_chunk(self, parameter: nn.Parameter, gradient: torch.Tensor) -> None:
        """Adds a chunk's gradient that did not come through autograd; the parameter's sum must be open."""
        self._sums[parameter].add(gradient.to(parameter.dtype))

    def _open_sum(self, parameter: nn.Parameter) -> ChunkSum:
        raise NotImplementedError

    def _close_sum(self, parameter: nn.Parameter, chunk_sum: ChunkSum) -> None:
        raise NotImplementedError

    # -- one micro-batch -----------------------------------------------------------------------------------------

    def end_micro_batch(self, expected: dict[nn.Parameter, int]) -> None:
        """Checks that every parameter got as many contributions as the loss says it has.

        Args:
            expected: contributions by parameter where that is not 1; 0 where none is due.

        Raises:
            NumericsError: a gradient was lost or came twice; names up to ten parameters.
        """
        wrong = []
        for parameter, name in self._names.items():
            want, got = expected.get(parameter, 1), self._counts.get(parameter, 0)
            if want != got:
                wrong.append(f"{name} (expected {want}, got {got})")
        self._received.update(self._counts)
        self._counts.clear()
        if wrong:
            raise NumericsError(
                f"gradient store: {len(wrong)} parameters did not get the contributions that this micro-batch owes "
                f"them: {first_ten(wrong)}. The weights were not touched. This is a fault of the layer or an upstream "
                "change: set MOSS_LOWMEM_SCHEDULE=autograd MOSS_LOWMEM_GRADIENTS=device to train without it, and "
                "report it."
            )

    def has_received(self, parameter: nn.Parameter) -> bool:
        """Whether any micro-batch so far has brought the parameter a gradient."""
        return parameter in self._received

    # -- gradient source of the optimizer ------------------------------------------------------------------------

    def fetch(self, parameter: nn.Parameter) -> torch.Tensor | None:
        """Returns the accumulated gradient on the parameter's device, clipped, or None if there is none."""
        raise NotImplementedError

    def release(self, parameter: nn.Parameter) -> None:
        """The optimizer is done with ``parameter``: its fetched gradient may be freed."""

    def zero(self) -> None:
        """Forgets all gradients: the next micro-batch starts a new step."""
        raise NotImplementedError

    def total_norm(self, parameters: Sequence[nn.Parameter], norm_type: float) -> torch.Tensor:
        """Returns the norm of all accumulated gradients taken as one vector, before any update.

        Source: ``torch.nn.utils.clip_grad_norm_``, of which this and :meth:`clip` are the two halves.
        """
        return nn.utils.get_total_norm([gradient for _, gradient in self._accumulated(parameters)], norm_type)

    def clip(self, parameters: Sequence[nn.Parameter], max_norm: float, total_norm: torch.Tensor) -> None:
        """Scales all gradients so that a total norm of ``total_norm`` becomes at most ``max_norm``."""
        raise NotImplementedError

    def nonfinite_names(self, parameters: Sequence[nn.Parameter]) -> list[str]:
        """Names the parameters whose accumulated gradient holds an infinity or a nan."""
        return [
            self._names[parameter]
            for parameter, gradient in self._accumulated(parameters)
            if not torch.isfinite(gradient).all()
        ]

    def _accumulated(self, parameters: Sequence[nn.Parameter]) -> Iterator[tuple[nn.Parameter, torch.Tensor]]:
        """Yields the gradients where they are accumulated."""
        raise NotImplementedError

    def device_bytes(self) -> int:
        """Bytes of gradients that stand on the compute device now."""
        return sum(
            parameter.grad.numel() * parameter.grad.element_size()
            for parameter in self._names
            if parameter.grad is not None
        )

    def host_bytes(self) -> int:
        """Bytes of host memory that the store holds."""
        return 0


class DeviceGradients(GradientStore):
    """Keeps gradients in ``parameter.grad`` on the compute device.

    A table that is a head as well (tied weights) gets a dense contribution and then rows, several times a micro-batch.
    Autograd would add them up at the size of one micro-batch and round once more at the size of the sum; here each
    one meets the sum. At 8 micro-batches in bf16 that cost 1.2 times upstream's error, so these tables have what
    rounding left over carried along between contributions.
    """

    def __init__(self) -> None:
        super().__init__()
        self._whole: set[nn.Parameter] = set()  # what has received a dense contribution
        self._errors: dict[nn.Parameter, torch.Tensor] = {}
        # Gradients of earlier micro-batches, put aside while a chunk sum is open.
        self._before: dict[nn.Parameter, torch.Tensor | None] = {}

    def add(self, parameter: nn.Parameter, gradient: torch.Tensor) -> None:
        self._whole.add(parameter)
        if parameter.grad is None:
            parameter.grad = gradient.to(parameter.dtype)
        elif parameter in self._errors:
            add_compensated(parameter.grad, self._errors[parameter], gradient)
        else:
            parameter.grad += gradient
        self.count(parameter)

    def add_slice(self, parameter: nn.Parameter, start: int, end: int, gradient: torch.Tensor) -> None:
        self._dense(parameter)[start:end] += gradient

    def add_rows(self, parameter: nn.Parameter, ids: torch.Tensor, rows: torch.Tensor) -> None:
        gradient = self._dense(parameter)
        if parameter in self._whole and gradient.dtype == torch.bfloat16:
            if parameter not in self._errors:
                self._errors[parameter] = torch.zeros_like(gradient, dtype=torch.int8)
            add_rows_compensated(gradient, self._errors[parameter], ids, rows)
        else:
            gradient.index_add_(0, ids, rows.to(gradient.dtype))
        self.count(parameter)

    def _dense(self, parameter: nn.Parameter) -> torch.Tensor:
        if parameter.grad is None:
            parameter.grad = torch.zeros_like(parameter)
        return parameter.grad

    def _complete(self, parameter: nn.Parameter) -> None:
        self.count(parameter)

    def _open_sum(self, parameter: nn.Parameter) -> ChunkSum:
        before, parameter.grad = parameter.grad, None
        if parameter.dtype == torch.bfloat16:
            # It goes on from earlier micro-batches: a second buffer would cost 2 bytes more.
            return self.chunk_sum_type(before, self._errors.get(parameter))
        self._before[parameter] = before
        return self.chunk_sum_type(None)

    def _close_sum(self, parameter: nn.Parameter, chunk_sum: ChunkSum) -> None:
        self._whole.add(parameter)
        before = self._before.pop(parameter, None)
        if before is None:
            parameter.grad = chunk_sum.total
        else:
            parameter.grad = before if chunk_sum.total is None else before.add_(chunk_sum.total)

    def fetch(self, parameter: nn.Parameter) -> torch.Tensor | None:
        return parameter.grad

    def release(self, parameter: nn.Parameter) -> None:
        parameter.grad = None
        self._errors.pop(parameter, None)

    def zero(self) -> None:
        for parameter in self._names:
            parameter.grad = None
        self._errors.clear()

    def device_bytes(self) -> int:
        return super().device_bytes() + sum(error.numel() for error in self._errors.values())

    def clip(self, parameters: Sequence[nn.Parameter], max_norm: float, total_norm: torch.Tensor) -> None:
        self._errors.clear()  # they belong to the sums before scaling, and nothing is added after it
        nn.utils.clip_grads_with_norm_(parameters, max_norm, total_norm)

    def _accumulated(self, parameters: Sequence[nn.Parameter]) -> Iterator[tuple[nn.Parameter, torch.Tensor]]:
        return ((parameter, parameter.grad) for parameter in parameters if parameter.grad is not None)
