"""The trainer's Accelerator: accelerate's own, with the layer told what is about to happen."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import torch

from ..errors import ending_the_run
from .bar import lines_above_bars

if TYPE_CHECKING:
    from ..session import Session


def lowmem_accelerator(base: type, session: Session) -> type:
    """Derives a class from the trainer's ``Accelerator`` that reports to ``session``.

    Args:
        base: accelerate's ``Accelerator`` as the trainer imported it.
        session: the run.
    """

    class LowMemAccelerator(base):  # type: ignore[misc, valid-type]
        """accelerate's ``Accelerator`` under the low-memory layer."""

        def __init__(self, *args: Any, **kwargs: Any) -> None:
            super().__init__(*args, **kwargs)
            session.accelerator_created(self)

        def prepare(self, *args: Any, **kwargs: Any) -> Any:
            with ending_the_run():
                session.before_prepare(args)
                prepared = super().prepare(*args, **kwargs)
                session.after_prepare(prepared if isinstance(prepared, tuple) else (prepared,))
            return prepared

        @contextmanager
        def accumulate(self, *models: Any) -> Iterator[None]:
            session.resume.micro_batch_begins()
            with super().accumulate(*models):
                yield
            session.resume.micro_batch_done(self.sync_gradients)

        def print(self, *args: Any, **kwargs: Any) -> None:
            if not session.resume.quiet.on:
                with lines_above_bars():
                    super().print(*args, **kwargs)

        def gather(self, tensor: Any) -> Any:
            # Of a replay: its losses, for lines that nobody sees.
            return tensor if session.resume.replaying else super().gather(tensor)

        def backward(self, loss: torch.Tensor, **kwargs: Any) -> None:
            if session.resume.replaying:
                return
            session.loop.before_backward()
            with session.watch.guard.phase("backward"), session.record.phase("backward"):
                super().backward(loss, **kwargs)
            session.loop.after_backward()

        def get_state_dict(self, model: Any, unwrap: bool = True) -> Any:
            own = session.state_dict()
            if own is not None:
                return own
            return session.parallel.complete(super().get_state_dict(model, unwrap), session.model)

        def clip_grad_norm_(self, parameters: Any, max_norm: float, norm_type: float = 2) -> Any:
            if session.resume.replaying:
                return torch.zeros(())
            if session.parallel.owns_optimizer:
                total = super().clip_grad_norm_(parameters, max_norm, norm_type)
                if total is not None:  # DeepSpeed gives a number; trainers look for a tensor that is not finite
                    total = torch.as_tensor(total)
                session.record.gradient_norm = total
                return total
            self.unscale_gradients()
            with ending_the_run():
                return session.loop.clip_gradients(list(parameters), max_norm, norm_type)

    LowMemAccelerator.__name__ = LowMemAccelerator.__qualname__ = base.__name__
    return LowMemAccelerator
