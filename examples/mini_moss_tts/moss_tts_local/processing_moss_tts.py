"""Turns a training record into rows of tokens: column 0 is text, the other ``n_vq`` columns are audio codes."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from .configuration_moss_tts import MossTTSDelayConfig

TEXT_FIELDS = ("instruction", "language", "tokens", "quality", "sound_event", "ambient_sound", "text")
PATH_FIELDS = ("reference", "reference_audio", "ref_audio")


class MossTTSDelayProcessor:
    """Packs a prompt (text fields, reference voices) and the frames to be learned.

    The layout is the miniature's own; upstream's prompts read differently. Common to both is what the model sees: a
    text row carries the pad code in every codebook, and a frame row carries a slot token in the text column.

    Args:
        tokenizer: the one in the checkpoint's folder.
        audio_tokenizer: must be None; the miniature has no codec.
        model_config: gives the special tokens' ids, ``n_vq`` and the pad code.
    """

    def __init__(self, tokenizer: Any, audio_tokenizer: None, model_config: MossTTSDelayConfig) -> None:
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
        answer = self._audio_rows(self._codes(record["audio_codes"]), config.audio_assistant_gen_slot_token_id)
        # The token that opens the audio is given; everything after it is learned.
        prompt += [self._text_rows("assistant\n", opening=[config.im_start_token_id]), answer[:1]]
        rows = torch.cat([*prompt, answer[1:], self._text_rows("", closing=[config.im_end_token_id])])
        return rows, sum(len(part) for part in prompt)

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
        codes = torch.as_tensor(value, dtype=torch.long)
        if codes.ndim != 2 or codes.shape[1] != self.model_config.n_vq:
            raise ValueError(f"audio codes of shape {list(codes.shape)}; expected [frames, {self.model_config.n_vq}]")
        return codes

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
