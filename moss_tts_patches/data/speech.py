"""Records of one text, one audio and reference voices: what they hold and how many positions they take.

Facts about upstream in this file are from ``moss_tts_local/``, ``moss_tts_delay/`` and ``moss_tts_local_v1.5/`` at
commit 58b20a0, where these records have one form.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from .codes import check_codes
from .matrices import CodeMatrix
from .rules import RecordFault, RecordRules, Size
from .tokens import token_ids

# What the trainers hand from a record to the prompt.
PROMPT_FIELDS = ("text", "instruction", "tokens", "quality", "sound_event", "ambient_sound", "language")
_CODE_FIELDS = (("reference_audio_codes", True), ("ref_audio_codes", False))
_PATH_FIELDS = (("reference", True), ("reference_audio", False), ("ref_audio", False))

# Tokens of the assistant's turn around its frames where no tokenizer says so: role (3), start, end, end of turn and
# line break; the last three have labels.
_TURN_TOKENS, _TURN_LABELS = 7, 3
# UTF-8 bytes of a reference's label and line breaks, and its start and end token.
_REFERENCE_TOKENS = 16


@dataclass(frozen=True)
class SpeechAudio:
    """The audio of a record, and what stands around it.

    Attributes:
        fields: what goes into the prompt.
        frames: of the audio that is learned.
        references: one entry a reference voice: its frames; 0 for an audio file that has to be encoded; None for a
            speaker without one.
        without_codes: how many of them have to be encoded.
    """

    fields: dict[str, Any]
    frames: int
    references: tuple[int | None, ...] | None = None
    without_codes: int = 0

    @property
    def has_prompt(self) -> bool:
        """Whether anything says what is to be heard; upstream needs no field in particular."""
        return any(str(value).strip() for value in self.fields.values())

    @property
    def voices(self) -> list[int]:
        return [frames for frames in self.references or () if frames is not None]


def examine_speech(record: dict[str, Any], rules: RecordRules, may_hold_booleans: bool) -> SpeechAudio:
    """Checks a record's fields and audio.

    Raises:
        RecordFault: it cannot be trained on.

    Source: upstream ``*/finetuning/dataset.py``, ``_pack_record`` and ``_resolve_reference_codes``.
    """
    if record.get("audio_codes") is None:
        raise RecordFault("missing", "no audio_codes; run prepare_data.py on the records first")
    fields = {field: record[field] for field in PROMPT_FIELDS if record.get(field) is not None}
    frames = check_codes(record["audio_codes"], "audio_codes", rules, may_hold_booleans)
    for field, may_be_null in _CODE_FIELDS:
        if record.get(field) is not None:
            voices = _coded_references(record[field], field, may_be_null, rules, may_hold_booleans)
            return SpeechAudio(fields, frames, voices)
    for field, may_be_null in _PATH_FIELDS:
        paths = _paths(record.get(field), field, may_be_null)
        if paths is not None:
            slots = tuple(None if path is None else 0 for path in paths)
            return SpeechAudio(fields, frames, slots, sum(path is not None for path in paths))
    return SpeechAudio(fields, frames)


def _coded_references(
    value: Any, field: str, may_be_null: bool, rules: RecordRules, may_hold_booleans: bool
) -> tuple[int | None, ...] | None:
    """Returns the frames of each reference.

    Source: upstream ``*/finetuning/dataset.py``, ``normalize_audio_code_list``.
    """
    if isinstance(value, CodeMatrix):
        return (check_codes(value, field, rules, may_hold_booleans),)
    if value in ("", []):
        return None
    if not isinstance(value, list):
        raise RecordFault("reference", f"{field} is a {type(value).__name__}; expected codes, or a list of them")
    if may_be_null and any(item is None for item in value):
        several = True
    else:
        first = value[0]
        if not isinstance(first, (list, CodeMatrix)):
            raise RecordFault("reference", f"{field}[0] is a {type(first).__name__}; expected a list")
        several = isinstance(first, CodeMatrix) or (bool(first) and isinstance(first[0], (list, CodeMatrix)))
    if not several:
        return (check_codes(value, field, rules, may_hold_booleans),)
    return tuple(
        None if item is None and may_be_null else check_codes(item, f"{field}[{index}]", rules, may_hold_booleans)
        for index, item in enumerate(value)
    )


def _paths(value: Any, field: str, may_be_null: bool) -> list[str | None] | None:
    """Source: upstream ``*/finetuning/common.py``, ``normalize_audio_path_list``."""
    if value in (None, "", []):
        return None
    if isinstance(value, str):
        return [value]
    if isinstance(value, list) and all(isinstance(item, str) or (item is None and may_be_null) for item in value):
        return value
    raise RecordFault("reference", f"{field} is no path or list of paths")


def estimate_speech(audio: SpeechAudio, rules: RecordRules) -> Size:
    """Returns an upper bound on what a record takes, without a tokenizer."""
    own = sum(len(str(value).encode("utf-8", "surrogatepass")) for value in audio.fields.values())
    voices = sum(frames + rules.block_extra + _REFERENCE_TOKENS for frames in audio.voices)
    prompt = rules.template_bytes + own * rules.text_growth + voices
    learned = audio.frames + rules.block_extra
    return Size(prompt + learned + _TURN_TOKENS, learned + _TURN_LABELS, audio.frames, audio.without_codes)


class SpeechCounter:
    """Positions as upstream's dataset and collator give them, from upstream's own prompt and tokenizer.

    Every message is tokenized as a whole; an audio stands in it as its start token, one token a frame and its end
    token, all of them special. So a message with empty audios is tokenized, and the frames are added.

    Attributes:
        exact: the numbers are upstream's.
    """

    exact = True

    def __init__(self, rules: RecordRules, processor: Any) -> None:
        self._rules, self._processor, self._tokenizer = rules, processor, processor.tokenizer
        self._block = processor.audio_start_token + processor.audio_end_token
        answer = processor.build_assistant_message(audio_codes_list=[])
        self._placeholder = answer["content"]
        self._around_user = self._chat_around("user")
        self._answer_tokens = self._length(self._chat("assistant", self._block))
        self._answer_prompt_tokens = 0 if rules.prompt == "parts" else self._answer_prompt()
        self._piecewise: dict[tuple[Any, ...], int] = {}

    def count(self, batch: Sequence[SpeechAudio]) -> list[Size | RecordFault]:
        """Returns one size a record, or what is wrong with its text."""
        prompts = [self._prompt(audio) for audio in batch]
        texts = [prompt for prompt in prompts if isinstance(prompt, str)]
        ids = iter(token_ids(self._tokenizer, texts))
        tokenized = [next(ids) if isinstance(prompt, str) else prompt for prompt in prompts]
        pieces = self._pieces(batch) if self._rules.prompt == "parts" else itertools.repeat(None)
        return [
            item if isinstance(item, RecordFault) else self._size(item, audio, piece)
            for item, audio, piece in zip(tokenized, batch, pieces)
        ]

    def _prompt(self, audio: SpeechAudio) -> str | RecordFault:
        """Returns the user's message as it is tokenized, with empty audios."""
        try:
            content = self._message(audio)["content"]
        except Exception as error:  # whatever upstream's own code makes of the record, in training too
            return RecordFault("text", f"upstream cannot build the prompt: {type(error).__name__}: {error}")
        found = content.count(self._placeholder)
        if found != len(audio.voices):
            return RecordFault(
                "text", f"its fields hold {self._placeholder} {found - len(audio.voices)} time(s); expected none"
            )
        content = content.replace(self._placeholder, self._block)
        if self._around_user is None:
            return self._chat("user", content)
        before, after = self._around_user
        return before + content + after

    def _message(self, audio: SpeechAudio) -> dict[str, Any]:
        voices = audio.references
        slots = None if voices is None else [None if frames is None else "" for frames in voices]
        return self._processor.build_user_message(reference=slots, **audio.fields)

    def _size(self, ids: list[int], audio: SpeechAudio, prompt_in_parts: int | None) -> Size | RecordFault:
        rules = self._rules
        for token in (rules.audio_start, rules.audio_end):
            found = len(audio.voices) if token is None else ids.count(token)
            if token is not None and found != len(audio.voices):
                name = self._tokenizer.convert_ids_to_tokens(token)
                return RecordFault("text", f"its fields hold {name} {found - len(audio.voices)} time(s); expected none")
        voices = sum(frames + rules.block_extra for frames in audio.voices)
        user = len(ids) + voices
        whole = user + self._answer_tokens + audio.frames + rules.block_extra
        prompt = user + self._answer_prompt_tokens if prompt_in_parts is None else prompt_in_parts + voices
        # The batch drops the last position, labels the first.
        return Size(whole - 1, whole - prompt, audio.frames, audio.without_codes)

    def _pieces(self, batch: Sequence[SpeechAudio]) -> list[int | None]:
        """Returns the prompt's length as its parts add up, without the references' frames.

        Source: upstream ``moss_tts_local_v1.5/processing_moss_tts.py``, ``_build_generation_or_voice_clone_codes``: the
        text is encoded by itself, and what stands around it depends on the other fields only.
        """
        texts = [str(audio.fields.get("text", "")) for audio in batch]
        own = token_ids(self._tokenizer, texts, add_special_tokens=False)
        return [self._around_text(audio) + 2 * len(audio.voices) + len(ids) for audio, ids in zip(batch, own)]

    def _answer_prompt(self) -> int:
        """Returns how many tokens of the answer belong to the prompt: it has no labels up to there."""
        if self._rules.prompt == "audio":
            return self._tokenizer.encode(self._chat("assistant", self._block)).index(self._rules.audio_start) + 1
        message = self._processor.build_user_message(text="x")
        prompt = self._processor([[message]], mode="generation", n_vq=self._rules.codebooks)["input_ids"].shape[1]
        return prompt - self._length(self._chat("user", message["content"]))

    def _around_text(self, audio: SpeechAudio) -> int:
        fields = {name: value for name, value in audio.fields.items() if name != "text"}
        has_voices = bool(audio.voices)
        key = (has_voices, *((name, str(value)) for name, value in fields.items()))
        if key not in self._piecewise:
            import torch  # upstream's processor takes tensors; what examines records does without

            voice = [torch.zeros((1, self._rules.codebooks), dtype=torch.int64)] if has_voices else None
            message = self._processor.build_user_message(reference=voice, text="", **fields)
            ids = self._processor([[message]], mode="generation", n_vq=self._rules.codebooks)["input_ids"]
            self._piecewise[key] = ids.shape[1] - (3 if has_voices else 0)
        return self._piecewise[key]

    def _chat(self, role: str, content: str, **options: Any) -> str:
        return self._tokenizer.apply_chat_template([{"role": role, "content": content}], tokenize=False, **options)

    def _chat_around(self, role: str) -> tuple[str, str] | None:
        """Returns what the chat template puts before and after a content; None where it changes contents.

        Joining three strings then stands in for rendering the template for every record.
        """
        content = " \n x \n "
        before, found, after = self._chat(role, content).partition(content)
        other = self._chat(role, "y")
        return (before, after) if found and other == f"{before}y{after}" else None

    def _length(self, text: str) -> int:
        return len(self._tokenizer.encode(text))
