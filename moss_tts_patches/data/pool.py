"""Examines big files with every core: several processes read pieces of them, and the results come in file order.

The processes are new interpreters and no forks (a fork of a process that has used CUDA or a thread pool is a gamble),
and not ``multiprocessing``'s either: that imports the main module again, which in a training is upstream's trainer with
all of torch.
"""

from __future__ import annotations

import contextlib
import functools
import json
import os
import queue
import subprocess
import sys
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import IO, cast

from ..cores import cores
from .files import read_lines
from .lines import Examined, examine_lines
from .rules import RecordRules
from .worker import Result, Task, receive, run, send

#: Examines one file; the second argument is told how many bytes were read.
Examine = Callable[[Path, Callable[[int], object] | None], Iterator[Examined]]

# Below, one process is done in half a second, and a new one needs 0.2 s until it has imported numpy.
_SMALL_BYTES = 128 * 2**20
# 80 records of 300 frames of 32 codes: pieces are fair shares, and a few of them in flight are little memory.
_PIECE_BYTES = 4 * 2**20
# The tokenizer, which stays in this process, takes a sixth of the time of the rest.
_MOST_WORKERS = 8

_START = (
    "import sys, json; sys.path[:] = json.loads(sys.argv[1]); from moss_tts_patches.data import worker; worker.main()"
)


def workers_for(files: Sequence[Path], processes: int = 1) -> int:
    """Returns how many processes should examine files; 1 means that this one does.

    Args:
        files: all of them.
        processes: how many of a training do the same at the same time.
    """
    if sum(path.stat().st_size for path in files if path.is_file()) < _SMALL_BYTES:
        return 1
    return max(1, min(cores() // processes, _MOST_WORKERS))


@contextlib.contextmanager
def examiners(rules: RecordRules, keeps_records: bool, workers: int = 1) -> Iterator[Examine]:
    """Lends what examines files: in this process, or in several others.

    Args:
        rules: the family's.
        keeps_records: whether records are of any use later.
        workers: how many processes; 1 for none but this one.
    """
    if workers == 1:
        yield lambda path, advance: examine_lines(read_lines(path, advance), rules, keeps_records)
        return
    pool = _Pool(workers)
    try:
        yield functools.partial(pool.examine, rules, keeps_records)
    finally:
        pool.close()


class _Worker:
    """One process, and the pipes to it."""

    def __init__(self) -> None:
        environment = {name: value for name, value in os.environ.items() if name != "AUTOWRAPT_BOOTSTRAP"}
        environment |= {"OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1"}  # numpy's threads have nothing to do
        self._process = subprocess.Popen(
            [sys.executable, "-c", _START, json.dumps(sys.path)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            env=environment,
        )

    def run(self, task: Task) -> Result:
        """Has the process examine a piece; does it itself if the process has died (of the memory it found, say)."""
        if self._process.returncode is not None:
            return run(task)
        try:
            send(cast("IO[bytes]", self._process.stdin), task)  # type: ignore[arg-type]
            return cast(Result, receive(cast("IO[bytes]", self._process.stdout)))  # type: ignore[arg-type]
        except (EOFError, OSError):
            self.close()
            return run(task)

    def close(self) -> None:
        self._process.kill()
        self._process.wait()
        for pipe in (self._process.stdin, self._process.stdout):
            with contextlib.suppress(OSError):
                cast("IO[bytes]", pipe).close()


class _Pool:
    """Processes, and a thread for each that waits for it."""

    def __init__(self, workers: int) -> None:
        self._workers = [_Worker() for _ in range(workers)]
        self._threads = ThreadPoolExecutor(workers, thread_name_prefix="moss_lowmem_data")
        self._idle: queue.SimpleQueue[_Worker] = queue.SimpleQueue()
        for worker in self._workers:
            self._idle.put(worker)

    def examine(
        self, rules: RecordRules, keeps_records: bool, path: Path, advance: Callable[[int], object] | None
    ) -> Iterator[Examined]:
        """Yields a file's records in their order.

        Raises:
            OSError: it cannot be read.
        """
        under_way: deque[tuple[Future[Result], int]] = deque()
        lines = 0
        pieces = _pieces(path)
        while True:
            # Two pieces a process: one that it works on, one for when it is done.
            while len(under_way) < 2 * len(self._workers) and (piece := next(pieces, None)) is not None:
                task = Task(path, *piece, rules, keeps_records)
                under_way.append((self._threads.submit(self._run, task), piece[1] - piece[0]))
            if not under_way:
                return
            future, size = under_way.popleft()
            result = future.result()
            for examined in result.examined:
                yield examined._replace(line=lines + examined.line)
            lines += result.lines
            if advance is not None:
                advance(size)

    def _run(self, task: Task) -> Result:
        worker = self._idle.get()
        try:
            return worker.run(task)
        finally:
            self._idle.put(worker)

    def close(self) -> None:
        self._threads.shutdown(wait=False, cancel_futures=True)
        for worker in self._workers:
            worker.close()
        self._threads.shutdown(wait=True)


def _pieces(path: Path) -> Iterator[tuple[int, int]]:
    """Yields where pieces of a file start and stop; none starts within a line."""
    size = path.stat().st_size
    start = 0
    with open(path, "rb") as file:
        while start < size:
            file.seek(min(start + _PIECE_BYTES, size))
            file.readline()
            stop = file.tell()
            yield start, stop
            start = stop
