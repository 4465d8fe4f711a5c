"""Turns a training record into rows of tokens: column 0 is text, the other ``n_vq`` columns are audio codes.

The layouts are the miniature's own; upstream's prompts read differently. Common to both is what a model sees: a text
row carries the pad code in every codebook, and a frame row carries a slot token in the text column.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

TEXT_FIELDS = ("instruction", "language", "tokens", "quality", "sound_event", "ambient_sound", "text")
PATH_FIELDS = ("reference", "reference_audio", "ref_audio")


class FramePrompts:
    """Packs a prompt (text fields, reference voices) and the frames to be learned, one frame a row.

    Args:
        tokenizer: the one in the checkpoint's folder.
        audio_tokenizer: must be None; the miniature has no codec.
        model_config: gives the special tokens' ids, ``n_vq`` and the pad code.
    """

    def __init__(self, tokenizer: Any, audio_tokenizer: None, model_config: Any) -> None:
        if audio_tokenizer is not None:
            raise ValueError("the miniature has no codec: records must hold audio codes, audio_tokenizer must be None")
        self.tokenizer = tokenizer
        self.audio_tokenizer = audio_tokenizer
        self.model_config = model_config

    def pack(self, record: dict[str, Any]) -> tuple[torch.Tensor, int]:
        """Returns rows ``[T, 1 + n_vq]`` int64 and how many of them are prompt.

        Raises:
            ValueError: the record has no ``audio_codes``, codes of another shape than ``[frames][n_vq]``, or a path
                to reference audio without its codes.
        """
        config = self.model_config
        if record.get("audio_codes") is None:
            raise ValueError("record without audio_codes: make the data with make_demo_data.py or add the codes")
        prompt = [self._text_rows("user\n", opening=[config.im_start_token_id])]
        prompt += [self._audio_rows(codes, config.audio_user_slot_token_id) for codes in self._references(record)]
        prompt.append(self._text_rows(self._description(record), closing=[config.im_end_token_id]))
        answer = self._answer_rows(self._codes(record["audio_codes"]))
        # The token that opens the audio is given; everything after it is learned.
        prompt += [self._text_rows("assistant\n", opening=[config.im_start_token_id]), answer[:1]]
        rows = torch.cat([*prompt, answer[1:], self._text_rows("", closing=[config.im_end_token_id])])
        return rows, sum(len(part) for part in prompt)

    def _answer_rows(self, codes: torch.Tensor) -> torch.Tensor:
        return self._audio_rows(codes, self.model_config.audio_assistant_gen_slot_token_id)

    def _description(self, record: dict[str, Any]) -> str:
        present = (field for field in TEXT_FIELDS if record.get(field) is not None)
        return "\n".join(f"{field}: {record[field]}" for field in present)

    def _references(self, record: dict[str, Any]) -> list[torch.Tensor]:
        given = record.get("reference_audio_codes") or record.get("ref_audio_codes") or []
        if not given:
            paths = [field for field in PATH_FIELDS if record.get(field)]
            if paths:
                raise ValueError(f"record with {paths[0]} but no codes for it: the miniature has no codec to make them")
            return []
        one_voice = given[0] is not None and not isinstance(given[0][0], Sequence)  # [frames][n_vq], not a list of them
        return [self._codes(voice) for voice in ([given] if one_voice else given) if voice is not None]

    def _codes(self, value: Any) -> torch.Tensor:
        return checked_codes(value, self.model_config.n_vq)

    def _text_rows(self, text: str, opening: Sequence[int] = (), closing: Sequence[int] = ()) -> torch.Tensor:
        ids = [*opening, *self.tokenizer(text, add_special_tokens=False)["input_ids"], *closing]
        rows = torch.full((len(ids), 1 + self.model_config.n_vq), self.model_config.audio_pad_code)
        rows[:, 0] = torch.tensor(ids, dtype=torch.long)
        return rows

    def _audio_rows(self, codes: torch.Tensor, slot: int) -> torch.Tensor:
        """Frames between an opening and a closing row."""
        config = self.model_config
        rows = torch.full((len(codes) + 2, 1 + config.n_vq), config.audio_pad_code)
        rows[:, 0] = slot
        rows[0, 0], rows[-1, 0] = config.audio_start_token_id, config.audio_end_token_id
        rows[1:-1, 1:] = codes
        return rows


class DelayedPrompts(FramePrompts):
    """The answer's codebook c starts c rows late, so that it can be predicted from the codebooks before it."""

    def _answer_rows(self, codes: torch.Tensor) -> torch.Tensor:
        config, frames, late = self.model_config, len(codes), self.model_config.n_vq - 1
        delayed = torch.full((frames + late, config.n_vq), config.audio_pad_code)
        for codebook in range(config.n_vq):
            delayed[codebook : codebook + frames, codebook] = codes[:, codebook]
        rows = self._audio_rows(delayed, config.audio_assistant_gen_slot_token_id)
        # After the last frame has begun, the text column says that codebooks are only running out.
        rows[1 + frames : 1 + frames + late, 0] = config.audio_assistant_delay_slot_token_id
        return rows


class ChatPrompts:
    """Packs a conversation: in a turn, audio runs beside the text and starts a few rows after it.

    Args:
        tokenizer: the one in the checkpoint's folder.
        model_config: of the realtime family: ``rvq``, ``audio_pad_token`` and the filler of the text column.
    """

    LAG = 3  # rows of text before the first frame; upstream's is 12

    def __init__(self, tokenizer: Any, model_config: Any) -> None:
        self.tokenizer = tokenizer
        self.model_config = model_config

    def pack(self, record: dict[str, Any]) -> tuple[torch.Tensor, torch.Tensor]:
        """Returns rows and labels, both ``[T, 1 + rvq]`` int64; labels stand at their own row, -100 elsewhere.

        Raises:
            ValueError: the record has no ``conversations``, or a turn no ``audio_codes`` of ``rvq`` codebooks.
        """
        turns = record.get("conversations")
        if not turns:
            raise ValueError("record without conversations: make the data with make_demo_data.py")
        if turns[-1]["role"] == "user":
            turns = turns[:-1]  # a question without an answer teaches nothing
        parts = [self._voice(record.get("ref_audio_codes"))]
        parts += [self._turn(turn) for turn in turns]
        return torch.cat([rows for rows, _ in parts]), torch.cat([labels for _, labels in parts])

    def _voice(self, codes: Any) -> tuple[torch.Tensor, torch.Tensor]:
        """The opening of every record: the system's line, and the voice to speak with."""
        rows = self._rows(self._ids("system\nspeak\n"))
        if codes is not None:
            frames = checked_codes(codes, self.model_config.rvq)
            voice = self._rows([self.model_config.reference_audio_pad] * len(frames))
            voice[:, 1:] = frames
            rows = torch.cat([rows, voice])
        return rows, torch.full_like(rows, -100)

    def _turn(self, turn: dict[str, Any]) -> tuple[torch.Tensor, torch.Tensor]:
        config = self.model_config
        codes = checked_codes(turn.get("audio_codes"), config.rvq)
        opening, text = self._ids(turn["role"] + "\n"), self._ids(turn["text"])
        first = len(opening) + min(self.LAG, len(text))
        end = first + len(codes)
        ids = opening + text
        rows = self._rows(ids + [config.text_pad] * (end + 1 - len(ids)))
        rows[first:end, 1:] = codes
        rows[first - 1, 1], rows[end, 1] = config.audio_pad_token + 1, config.audio_pad_token + 2
        labels = torch.full_like(rows, -100)
        if turn["role"] == "assistant":
            labels[first:end, 1:] = codes
            labels[end, 1] = config.audio_pad_token + 2  # the end of the audio is told by the first codebook alone
        return rows, labels

    def _ids(self, text: str) -> list[int]:
        return self.tokenizer(text, add_special_tokens=False)["input_ids"]

    def _rows(self, ids: Sequence[int]) -> torch.Tensor:
        rows = torch.full((len(ids), 1 + self.model_config.rvq), self.model_config.audio_pad_token)
        rows[:, 0] = torch.tensor(ids, dtype=torch.long)
        return rows


def checked_codes(value: Any, codebooks: int) -> torch.Tensor:
    """Returns ``[frames, codebooks]`` int64.

    Raises:
        ValueError: there is nothing, or something of another shape.
    """
    if value is None:
        raise ValueError("a turn without audio_codes: the miniature has no codec to make them")
    codes = torch.as_tensor(value, dtype=torch.long)
    if codes.ndim != 2 or codes.shape[1] != codebooks:
        raise ValueError(f"audio codes of shape {list(codes.shape)}; expected [frames, {codebooks}]")
    return codes
