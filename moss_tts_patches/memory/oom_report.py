"""When memory runs out anyway: what was being done, what was wanted, where it went, what to change.

The report comes before the original error, which goes on untouched. It is also written to the output folder, since the
scrollback of a night's training is long gone in the morning.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Literal

from ..messages import Messages, gib
from .candidates import Candidate
from .oom_message import Failure, read_failure
from .readings import DeviceReading, HostReading

FILE_NAME = "lowmem_oom.json"

Phase = Literal[
    "load", "forward chunk", "backward", "optimizer state creation", "optimizer step", "validation", "save", "other"
]

# Two: more choices than that are a table, and `moss-lowmem plan` prints that one.
_CANDIDATES_SHOWN = 2
_RECORDS_SHOWN = 8


@dataclass(frozen=True)
class Situation:
    """What the run knows about itself; anything may be absent.

    Attributes:
        plan: expected bytes by category (weights, gradients, states, activations, …).
        reality: measured bytes by category (weights, gradients, states, other).
        records: id and length in positions of every record of the batch.
        gpu_candidates: settings with what each saves on the GPU.
        host_candidates: the same for host memory.
        device: the GPU as the process sees it.
        host: host memory.
    """

    plan: Mapping[str, int] = field(default_factory=dict)
    reality: Mapping[str, int] = field(default_factory=dict)
    records: Sequence[tuple[str, int]] = ()
    gpu_candidates: Sequence[Candidate] = ()
    host_candidates: Sequence[Candidate] = ()
    device: DeviceReading | None = None
    host: HostReading | None = None


@dataclass(frozen=True)
class OutOfMemoryReport:
    """Everything about one failure; :meth:`text` is for people, :meth:`to_dict` for programs."""

    phase: Phase
    failure: Failure
    situation: Situation
    error: str

    @property
    def candidates(self) -> list[Candidate]:
        """The settings most worth changing for the memory that ran out."""
        found = self.situation.gpu_candidates if self.failure.place == "gpu" else self.situation.host_candidates
        return sorted(found, key=lambda candidate: candidate.saved_bytes, reverse=True)[:_CANDIDATES_SHOWN]

    @property
    def is_spilled(self) -> bool:
        """Whether the driver had moved GPU memory into system RAM before it gave up."""
        device, failure = self.situation.device, self.failure
        if device is not None and device.is_spilled:
            return True
        if failure.allocated_bytes is None or failure.total_bytes is None:
            return False
        return failure.allocated_bytes + (failure.reserved_unused_bytes or 0) > failure.total_bytes

    def to_dict(self) -> dict[str, Any]:
        """For JSON; sizes in bytes."""
        situation = self.situation
        return {
            "phase": self.phase,
            **asdict(self.failure),
            "plan": dict(situation.plan),
            "reality": dict(situation.reality),
            "records": [{"id": name, "positions": length} for name, length in situation.records],
            "candidates": [asdict(candidate) for candidate in self.candidates],
            "spilled_to_host": self.is_spilled,
            "device": None if situation.device is None else asdict(situation.device),
            "host": None if situation.host is None else asdict(situation.host),
            "error": self.error,
        }

    def text(self, say: Messages) -> str:
        """The report in some lines."""
        lines = [*self._what_happened(say), *self._where_it_went(say)]
        if self.situation.records:
            shown = ", ".join(f"{name} ({length})" for name, length in self.situation.records[:_RECORDS_SHOWN])
            more = len(self.situation.records) - _RECORDS_SHOWN
            lines.append(say("oom_records", records=shown + (f", +{more}" if more > 0 else "")))
        for candidate in self.candidates:
            setting = f"{candidate.variable}={candidate.value}"
            lines.append(say("oom_candidate", setting=setting, saved=gib(candidate.saved_bytes)))
        if not self.candidates:
            lines.append(say("oom_no_candidate"))
        return "\n".join(lines)

    def _what_happened(self, say: Messages) -> Iterator[str]:
        failure, device, host = self.failure, self.situation.device, self.situation.host
        phase, wanted = say(f"phase {self.phase}"), gib(failure.wanted_bytes)
        yield say(f"oom_{failure.place}", phase=phase, wanted=wanted)
        if failure.place == "gpu":
            total, free, allocated = failure.total_bytes, failure.free_bytes, failure.allocated_bytes
            if device is not None:  # what the error does not say, the driver does
                total = device.total_bytes if total is None else total
                free = device.free_bytes if free is None else free
                allocated = device.allocated_bytes if allocated is None else allocated
            yield say("oom_gpu_state", total=gib(total), free=gib(free), allocated=gib(allocated))
            if failure.reserved_unused_bytes and failure.reserved_unused_bytes >= (failure.wanted_bytes or 1):
                yield say("oom_fragmented", unused=gib(failure.reserved_unused_bytes))
        elif host is not None:
            yield say(
                "oom_host_state",
                limit=gib(host.limit_bytes),
                free=gib(host.free_bytes),
                process=gib(host.process_bytes),
                swap=gib(host.swap_free_bytes),
            )
        if self.is_spilled:
            yield say("oom_spilled")

    def _where_it_went(self, say: Messages) -> Iterator[str]:
        plan, reality = self.situation.plan, self.situation.reality
        for category in dict.fromkeys((*plan, *reality)):
            planned, found = plan.get(category), reality.get(category)
            yield say("oom_category", category=category, planned=gib(planned), found=gib(found))


class PhaseTracker:
    """Knows what the run is doing; the watcher and the reports ask it."""

    def __init__(self) -> None:
        self._phases: list[Phase] = []
        self._reported: int | None = None

    @property
    def current(self) -> Phase:
        """The innermost phase."""
        return self._phases[-1] if self._phases else "other"

    @contextmanager
    def enter(self, phase: Phase) -> Iterator[None]:
        """Says that ``phase`` lasts as long as the block."""
        self._phases.append(phase)
        try:
            yield
        finally:
            self._phases.pop()
            if not self._phases:
                self._reported = None

    def is_new(self, error: BaseException) -> bool:
        """Whether no phase has reported ``error`` yet; phases lie within each other, and the innermost knows most."""
        # Its number only: the error itself would keep every frame alive, with all their tensors.
        if self._reported == id(error):
            return False
        self._reported = id(error)
        return True


@contextmanager
def reporting_out_of_memory(
    phase: Phase,
    tracker: PhaseTracker,
    describe: Callable[[], Situation],
    *,
    folder: Path | None,
    say: Messages,
    show: Callable[[str], object],
) -> Iterator[None]:
    """Reports an out-of-memory error that leaves the block; the error itself goes on as it is.

    Args:
        phase: what the block does.
        tracker: shared by all phases of the run.
        describe: called only after a failure, when there is no memory to spare: a situation that cannot be described
            is reported without.
        folder: the output folder, for :data:`FILE_NAME`; None to write nothing.
        say: the language of the report.
        show: prints the report.
    """
    with tracker.enter(phase):
        try:
            yield
        except BaseException as error:
            failure = read_failure(error) if tracker.is_new(error) else None
            if failure is not None:
                with suppress(Exception):  # nothing may stand between the user and the original error
                    _report(OutOfMemoryReport(phase, failure, _describe(describe), str(error)), folder, say, show)
            raise


def _describe(describe: Callable[[], Situation]) -> Situation:
    try:
        return describe()
    except Exception:
        return Situation()


def _report(report: OutOfMemoryReport, folder: Path | None, say: Messages, show: Callable[[str], object]) -> None:
    path = None
    if folder is not None:
        with suppress(OSError):  # a full disk does not keep the report from the screen
            path = write_report(report, folder)
    text = report.text(say)
    show(text if path is None else f"{text}\n{say('oom_written', path=path)}")


def write_report(report: OutOfMemoryReport, folder: Path) -> Path:
    """Writes the report as JSON, whole or not at all; returns where."""
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / FILE_NAME
    write_whole(path, json.dumps(report.to_dict(), indent=2, ensure_ascii=False))
    return path


def write_whole(path: Path, text: str) -> None:
    """Writes a small file so that a reader finds the old one or the new one, never half of it."""
    fresh = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        fresh.write_text(text, encoding="utf-8")
        os.replace(fresh, path)
    except OSError:
        with suppress(OSError):
            fresh.unlink()
        raise
