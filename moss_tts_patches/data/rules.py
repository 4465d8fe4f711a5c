"""What a family expects of a record, as plain values, and how a record that breaks it is described."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal


@dataclass(frozen=True)
class RecordRules:
    """A family's records.

    Attributes:
        layout: ``speech`` (one text, one audio, reference voices) or ``conversation`` (turns).
        code_limits: one number a codebook; its codes are integers from 0 to the number less one.
        block_extra: positions that an audio takes beyond its frames, start and end token; with the delay pattern one
            less than the codebooks, since codebook c starts c positions late.
        audio_start, audio_end: ids of the tokens around an audio; neither may come out of a record's own text.
        template_bytes: upper bound on the UTF-8 bytes of the prompt around a record's own fields. A byte-level
            tokenizer makes at most one token of a byte, so it bounds the tokens where no tokenizer is at hand.
        text_growth: factor by which the family's own cleaning of a text can lengthen it, in bytes.
        loose_shape: codes may come as ``[codebooks, frames]`` too, and with more codebooks than are used.
        prompt: how the trainer measures what has no labels: as the ``whole`` prompt that it would generate from, as its
            ``parts`` tokenized one by one, or up to the token that opens the ``audio``.
    """

    layout: Literal["speech", "conversation"]
    code_limits: tuple[int, ...]
    block_extra: int = 0
    audio_start: int | None = None
    audio_end: int | None = None
    template_bytes: int = 0
    text_growth: int = 1
    loose_shape: bool = False
    prompt: Literal["whole", "parts", "audio"] = "whole"

    @property
    def codebooks(self) -> int:
        return len(self.code_limits)

    def with_prompt_length(self) -> RecordRules:
        """Returns the rules of the trainer with the correction ``prompt_length``."""
        return replace(self, prompt="audio") if self.prompt == "parts" else self


class RecordFault(Exception):
    """A record that cannot be trained on.

    Attributes:
        kind: a few words that group faults.
        problem: what was found and what was expected.
    """

    def __init__(self, kind: str, problem: str) -> None:
        super().__init__(problem)
        self.kind, self.problem = kind, problem


@dataclass(frozen=True)
class Size:
    """What a record costs in training.

    Attributes:
        positions: of the backbone, as the trainer's batch has them.
        supervised: positions with at least one label.
        frames: of the audio that is learned.
        references_without_codes: audio files that the trainer would have to encode; their frames are not counted.
    """

    positions: int
    supervised: int
    frames: int
    references_without_codes: int = 0


@dataclass(frozen=True)
class Place:
    """Where a record stands."""

    file: Path
    line: int

    def __str__(self) -> str:
        return f"{self.file}:{self.line}"


@dataclass(frozen=True)
class LeftOut:
    """A record that is not trained on, and why."""

    place: Place
    id: str
    kind: str
    problem: str

    def __str__(self) -> str:
        return f"{self.place} id={self.id} {self.kind}: {self.problem}"
