"""States of the generators that a training draws from, as plain JSON values and back."""

from __future__ import annotations

import random
import sys
from typing import Any

import torch

State = dict[str, Any]


def capture(device: torch.device, generator: torch.Generator | None = None) -> State:
    """Returns the states of Python's, numpy's and torch's generators; 20 us and 15 kB.

    Args:
        device: of the training; on CUDA its generator is taken too, and no other GPU's.
        generator: one more, which a data loader may own.
    """
    version, words, gauss = random.getstate()
    state: State = {"python": [version, list(words), gauss], "torch": _text(torch.get_rng_state())}
    numpy_random = _numpy_random()
    if numpy_random is not None:
        name, keys, *rest = numpy_random.get_state()
        state["numpy"] = [name, keys.tolist(), *rest]
    if device.type == "cuda":
        state["cuda"] = _text(torch.cuda.get_rng_state(device))
    if generator is not None:
        state["loader"] = _text(generator.get_state())
    return state


def restore(state: State, device: torch.device, generator: torch.Generator | None = None) -> None:
    """Puts every generator back to where :func:`capture` found it.

    A generator that had no state then (another kind of device, numpy not imported yet) stays as it is.
    """
    version, words, gauss = state["python"]
    random.setstate((version, tuple(words), gauss))
    torch.set_rng_state(_tensor(state["torch"]))
    numpy_random = _numpy_random()
    if numpy_random is not None and "numpy" in state:
        numpy_random.set_state(tuple(state["numpy"]))
    if device.type == "cuda" and "cuda" in state:
        torch.cuda.set_rng_state(_tensor(state["cuda"]), device)
    if generator is not None and "loader" in state:
        generator.set_state(_tensor(state["loader"]))


def _numpy_random() -> Any:
    return getattr(sys.modules.get("numpy"), "random", None)  # not imported: nobody has drawn from it


def _text(state: torch.Tensor) -> str:
    return state.numpy().tobytes().hex()  # uint8 on the CPU, whatever device the generator is for


def _tensor(text: str) -> torch.Tensor:
    return torch.frombuffer(bytearray.fromhex(text), dtype=torch.uint8)
