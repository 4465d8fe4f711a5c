"""The bar of a training, and lines that do not run into it."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any, TextIO

from ..units import GIB

# A terminal's bar is drawn anew at most twice a second. Where every state is a line of its own, one in 10 s is enough
# to see that a training lives.
_SECONDS_BETWEEN, _SECONDS_BETWEEN_LINES = 0.5, 10.0
# Of a terminal that does not say: what terminals have at least.
_UNKNOWN_SIZE = {"ncols": 80, "nrows": 24}
# What matters stands first: a narrow terminal cuts a line off at its right.
_FORMAT = "{desc} {n_fmt}/{total_fmt}{postfix} [{elapsed}<{remaining}, {rate_fmt}] |{bar}|"


def wants_bar(setting: str, stream: TextIO) -> bool:
    """Whether there is a bar.

    Args:
        setting: ``1``, ``0``, or ``auto``: on a terminal only.
        stream: where it would be drawn.
    """
    return setting == "1" or (setting == "auto" and stream.isatty())


class StepBar:
    """Shows how far a training is, how it does, and how long it will take.

    Where the stream is no terminal, each state is a line of its own, so that a log stays readable.

    Args:
        total: steps of the training; None where it is not known.
        done: steps that an earlier process has done.
        stream: where to draw.
    """

    def __init__(self, total: int | None, done: int = 0, stream: TextIO | None = None) -> None:
        from tqdm import tqdm  # comes with transformers

        stream = stream or sys.stderr
        terminal = stream.isatty()
        sized = terminal and _has_width(stream)
        self._bar = tqdm(
            total=total,
            initial=done,
            desc="training",
            unit="step",
            file=stream if terminal else _Lines(stream),  # type: ignore[arg-type]
            dynamic_ncols=sized,
            **(_UNKNOWN_SIZE if terminal and not sized else {}),  # type: ignore[arg-type]
            mininterval=_SECONDS_BETWEEN if terminal else _SECONDS_BETWEEN_LINES,
            miniters=1,
            bar_format=_FORMAT if terminal else _FORMAT.removesuffix(" |{bar}|"),
        )

    def step(self, values: Mapping[str, Any]) -> None:
        """Moves on to a step.

        Args:
            values: its line in the log.
        """
        self._bar.set_description_str(f"epoch {values['epoch']:.2f}", refresh=False)
        self._bar.set_postfix_str(describe_step(values), refresh=False)
        self._bar.update(values["step"] - self._bar.n)

    def close(self) -> None:
        """Leaves the last state where it stands."""
        self._bar.close()


def describe_step(values: Mapping[str, Any]) -> str:
    """Returns what a bar says of a step beside how far it is."""
    loss, memory = values["loss"], values["memory_bytes"]
    parts = ["loss " + ("not finite" if loss is None else f"{loss:.4f}"), f"lr {values['lr']:.1e}"]
    if "gpu" in memory:
        parts.append(f"VRAM {memory['gpu'] / GIB:.1f}/{memory['gpu_peak'] / GIB:.1f} GiB")
    elif "host" in memory:
        parts.append(f"RAM {memory['host'] / GIB:.1f} GiB")
    parts.append(f"{values['frames_per_second']:.0f} frames/s")
    if values.get("skipped"):
        parts.append("left out")
    return ", ".join(parts)


@contextmanager
def lines_above_bars() -> Iterator[None]:
    """While it is open, every bar on the terminal is gone, so that a line stands alone; afterwards it is below it."""
    module = sys.modules.get("tqdm")  # not imported: then there is no bar
    if module is None:
        yield
        return
    with module.tqdm.external_write_mode(file=sys.stdout):
        yield


def _has_width(stream: TextIO) -> bool:
    """Whether the terminal says how wide it is; one in a container may say 0, and then nothing would be drawn."""
    try:
        return os.get_terminal_size(stream.fileno()).columns > 0
    except OSError:  # no file behind it
        return False


class _Lines:
    """A stream that turns what overwrites a line into a line."""

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream

    def write(self, text: str) -> int:
        shown = text.strip("\r\n ")
        if shown:
            self._stream.write(f"{shown}\n")
        return len(text)

    def flush(self) -> None:
        self._stream.flush()
