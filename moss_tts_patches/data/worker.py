"""A process that examines pieces of files for :mod:`.pool`: standard library and numpy, no torch, no CUDA.

Tasks come on standard input and results go to standard output, pickled, each after its length in 8 bytes.
"""

from __future__ import annotations

import pickle
import sys
from pathlib import Path
from typing import BinaryIO, NamedTuple

from .files import read_part
from .lines import Examined, examine_lines
from .rules import RecordRules


class Task(NamedTuple):
    """A piece of a file from one line's start to another's, in bytes."""

    path: Path
    start: int
    stop: int
    rules: RecordRules
    keeps_records: bool


class Result(NamedTuple):
    """What is in a piece; its lines are counted from 1, blank ones too."""

    examined: list[Examined]
    lines: int


def run(task: Task) -> Result:
    """Examines a piece of a file."""
    lines, count = read_part(task.path, task.start, task.stop)
    return Result(list(examine_lines(lines, task.rules, task.keeps_records)), count)


def send(stream: BinaryIO, value: object) -> None:
    """Writes a value to a pipe."""
    content = pickle.dumps(value, protocol=pickle.HIGHEST_PROTOCOL)
    stream.write(len(content).to_bytes(8, "little"))
    stream.write(content)
    stream.flush()


def receive(stream: BinaryIO) -> object:
    """Reads a value from a pipe.

    Raises:
        EOFError: the other side has gone.
    """
    head = stream.read(8)
    content = stream.read(int.from_bytes(head, "little"))
    if len(head) < 8 or len(content) < int.from_bytes(head, "little"):
        raise EOFError("the pipe has ended")
    return pickle.loads(content)


def main() -> None:
    """Works until standard input ends."""
    while True:
        try:
            task = receive(sys.stdin.buffer)
        except EOFError:
            return
        assert isinstance(task, Task)
        send(sys.stdout.buffer, run(task))
