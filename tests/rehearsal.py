"""Copied into a changed miniature, beside its sft.py: one loaded trainer that trains and is killed many times.

Starting a trainer takes seconds, an epoch of the miniature one. So the process forks just before its training loop:
each child trains into a folder of its own and, at its moment, kills itself with SIGKILL, after which nothing runs. A
moment is counted in *events*: each parameter that a step comes to, each piece of a file that is saved, each rename.
"""

from __future__ import annotations

import contextlib
import json
import os
import random
import shutil
import signal
import sys
import threading
import time
from collections import Counter
from pathlib import Path
from typing import Any

PIECES_A_FILE, SECONDS_A_PIECE = 4, 0.002
LONGEST_DELAY_SECONDS = 0.02


class Moments:
    """Counts events by kind, and ends the process some time after one of them.

    Args:
        kill: kind of event, which one of that kind, and how many seconds later; None for a run that lives.
    """

    def __init__(self, kill: tuple[str, int, float] | None) -> None:
        self.kill = kill
        self.counts: Counter[str] = Counter()

    def pass_by(self, kind: str) -> None:
        if self.kill is not None and (kind, self.counts[kind]) == self.kill[:2]:
            if not self.kill[2]:
                os.kill(os.getpid(), signal.SIGKILL)
            threading.Thread(target=self._kill_later, daemon=True).start()
        self.counts[kind] += 1

    def _kill_later(self) -> None:
        time.sleep(self.kill[2])
        os.kill(os.getpid(), signal.SIGKILL)


moments = Moments(None)


def watch(optimizer: Any) -> None:
    """Has the optimizer's updates and all renames counted, in this process alone."""
    update, replace = optimizer.update, os.replace

    def watched_update(*args: Any, **options: Any) -> None:
        moments.pass_by("update")
        update(*args, **options)

    def watched_replace(source: Any, target: Any) -> None:
        moments.pass_by("rename")
        replace(source, target)

    optimizer.update, os.replace = watched_update, watched_replace


def save_slowly(folder: Path) -> None:
    """Writes every file of the folder once more, in pieces."""
    for path in sorted(folder.iterdir()):
        content = path.read_bytes()
        size = -(-len(content) // PIECES_A_FILE) or 1
        with path.open("wb") as file:
            for start in range(0, len(content), size):
                moments.pass_by("saving")
                time.sleep(SECONDS_A_PIECE)
                file.write(content[start : start + size])
                file.flush()


def rehearse(optimizer: Any, root: Path) -> Path:
    """Returns the folder to train into, in each child; the parent ends here.

    Args:
        optimizer: accelerate's wrapper of the layer's optimizer.
        root: the output folder; what was asked for is in ``plan.json`` beside this file, what happened will be in
            ``report.json``.
    """
    from moss_tts_patches.runtime import saving

    here = Path(__file__).parent
    plan = json.loads((here / "plan.json").read_text())
    generator = random.Random(plan["seed"])
    report: list[dict[str, Any]] = []

    def child(folder: str, kill: tuple[str, int, float] | None = None, plain: bool = False) -> bool:
        """Forks; True in the child."""
        global moments
        sys.stdout.flush()
        process = os.fork()
        if process == 0:
            moments = Moments(kill)
            watch(optimizer.optimizer)
            if plain:
                saving.whole_folder = lambda destination, say: contextlib.nullcontext(destination)
            return True
        _, status = os.waitpid(process, 0)
        killed = os.WIFSIGNALED(status) and os.WTERMSIG(status) == signal.SIGKILL
        report.append({"folder": folder, "kill": kill, "plain": plain, "killed": killed, "status": status})
        return False

    if child("reference"):
        return root / "reference"
    counts = json.loads((here / "counts.json").read_text())
    for number, (kind, plain) in enumerate(plan["kills"]):
        delay = generator.choice([0.0, generator.uniform(0, LONGEST_DELAY_SECONDS)])
        folder = root / f"{kind}-{number}"
        if number % 2:  # an older checkpoint is in the way, another one so that the two can be told apart
            shutil.copytree(root / "reference" / "checkpoint-epoch-1", folder / "checkpoint-epoch-0")
        if child(folder.name, (kind, generator.randrange(counts[kind]), delay), plain):
            return folder
    for name in plan["again"]:
        shutil.copytree(root / name, root / f"{name}-again")
        if child(f"{name}-again"):
            return root / f"{name}-again"
    (here / "report.json").write_text(json.dumps(report))
    raise SystemExit(0)


def finished() -> None:
    """A child has trained to its end."""
    (Path(__file__).parent / "counts.json").write_text(json.dumps(moments.counts))
