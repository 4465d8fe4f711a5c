"""Records of turns with an audio each: what they hold and how many positions they take.

Facts about upstream in this file are from ``moss_tts_realtime/`` at commit 58b20a0.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from .codes import check_codes
from .rules import RecordFault, RecordRules, Size
from .tokens import token_ids

# UTF-8 bytes around a turn's text: end of the turn before, start, role (up to 9), line breaks.
_TURN_BYTES = 40
# Positions of a turn that belong to neither text nor frames: the text runs ahead of its audio by 12, then one ends it.
_TURN_TOKENS = 13


@dataclass(frozen=True)
class Turn:
    """One turn that the trainer packs."""

    role: str
    text: str
    frames: int

    @property
    def learned(self) -> bool:
        return self.role == "assistant"


@dataclass(frozen=True)
class ConversationAudio:
    """The audio of a record; ``voice`` is the reference's frames, or None."""

    turns: tuple[Turn, ...]
    voice: int | None = None
    has_prompt = True  # a turn without a text is a fault

    @property
    def frames(self) -> int:
        return sum(turn.frames for turn in self.turns if turn.learned)


def examine_conversation(record: dict[str, Any], rules: RecordRules, may_hold_booleans: bool) -> ConversationAudio:
    """Checks a record's fields and audio.

    Raises:
        RecordFault: it cannot be trained on.

    Source: upstream ``moss_tts_realtime/finetuning/``, ``sft.py`` ``validate_records`` and ``dataset.py``
    ``_pack_record``: the user's turn at the end is left out, labels are the assistant's turns alone.
    """
    turns = record.get("conversations")
    if not isinstance(turns, list) or not turns:
        raise RecordFault("missing", "no conversations; expected a list of turns")
    voice = None
    if record.get("ref_audio_codes") is not None:
        voice = check_codes(record["ref_audio_codes"], "ref_audio_codes", rules, may_hold_booleans)
    elif record.get("ref_wav") is not None:
        raise RecordFault("missing", "ref_wav without ref_audio_codes; run prepare_data.py on the records first")
    for index, turn in enumerate(turns):
        _check_fields(turn, index)
    if turns[-1]["role"] == "user":
        turns = turns[:-1]
    packed = tuple(
        Turn(
            turn["role"],
            turn["text"],
            check_codes(turn["audio_codes"], f"conversations[{index}].audio_codes", rules, may_hold_booleans),
        )
        for index, turn in enumerate(turns)
    )
    if not any(turn.learned for turn in packed):
        raise RecordFault("nothing to learn", "no turn of the assistant; expected at least one")
    return ConversationAudio(packed, voice)


def _check_fields(turn: Any, index: int) -> None:
    if not isinstance(turn, dict):
        raise RecordFault("shape", f"conversations[{index}] is a {type(turn).__name__}; expected an object")
    if turn.get("audio_codes") is None:
        problem = f"conversations[{index}] has no audio_codes; run prepare_data.py on the records first"
        raise RecordFault("missing", problem)
    for field in ("role", "text"):
        if not isinstance(turn.get(field), str):
            raise RecordFault("missing", f"conversations[{index}] has no {field}; expected a string")


def estimate_conversation(audio: ConversationAudio, rules: RecordRules) -> Size:
    """Returns an upper bound on what a record takes, without a tokenizer."""
    turns = sum(
        _TURN_BYTES + len(turn.role) + max(len(turn.text.encode("utf-8", "surrogatepass")), turn.frames + _TURN_TOKENS)
        for turn in audio.turns
    )
    return Size(rules.template_bytes + (audio.voice or 0) + turns, _supervised(audio), audio.frames)


def _supervised(audio: ConversationAudio) -> int:
    return sum(turn.frames + 1 for turn in audio.turns if turn.learned)


class ConversationCounter:
    """Positions as upstream's dataset and collator give them, from upstream's own prompt and tokenizer.

    Attributes:
        exact: the numbers are upstream's.
    """

    exact = True

    def __init__(self, rules: RecordRules, processor: Any) -> None:
        self._processor, self._tokenizer = processor, processor.tokenizer
        self._lead = int(processor.delay_tokens_len)
        self._system = len(processor.make_ensemble(None))
        one_frame = np.zeros((1, rules.codebooks), dtype=np.int64)
        self._system_with_voice = len(processor.make_ensemble(one_frame)) - 1
        self._prefix_tokens: dict[str, int] = {}

    def count(self, batch: Sequence[ConversationAudio]) -> list[Size | RecordFault]:
        """Returns one size a record, or what is wrong with its text."""
        prefixes = [_prefix(turn, index) for audio in batch for index, turn in enumerate(audio.turns)]
        texts = [turn.text for audio in batch for turn in audio.turns]
        whole = [prefix + text for prefix, text in zip(prefixes, texts)]
        ids = token_ids(self._tokenizer, texts + whole)
        lengths = iter(zip(prefixes, map(len, ids[: len(texts)]), map(len, ids[len(texts) :])))
        return [self._size(audio, [next(lengths) for _ in audio.turns]) for audio in batch]

    def _size(self, audio: ConversationAudio, lengths: list[tuple[str, int, int]]) -> Size | RecordFault:
        total = self._system if audio.voice is None else self._system_with_voice + audio.voice
        for index, (turn, (prefix, text, whole)) in enumerate(zip(audio.turns, lengths)):
            positions = self._turn_positions(turn, prefix, text, whole)
            if positions is None:
                return RecordFault(
                    "text",
                    f"conversations[{index}].text joins the line break before it, and its audio would not fit; "
                    "expected a text that does not start with white space",
                )
            total += positions
        return Size(total, _supervised(audio), audio.frames)

    def _turn_positions(self, turn: Turn, prefix: str, text: int, whole: int) -> int | None:
        """Returns the positions of a turn, or None where its audio would reach beyond them.

        Args:
            turn: the turn.
            prefix: what stands before its text.
            text: tokens of the text by itself.
            whole: tokens of the prefix and the text together.

        Source: upstream ``moss_tts_realtime/finetuning/dataset.py``, ``_build_turn``.
        """
        if text < self._lead:
            return whole + turn.frames + 1
        positions = whole + max(0, turn.frames + self._lead - text + 1)
        if prefix not in self._prefix_tokens:
            self._prefix_tokens[prefix] = len(self._tokenizer.encode(prefix))
        needed = self._prefix_tokens[prefix] + self._lead + turn.frames + 1
        return positions if positions >= needed else None


def _prefix(turn: Turn, index: int) -> str:
    return ("<|im_end|>\n" if index else "") + f"<|im_start|>{turn.role}\n"
