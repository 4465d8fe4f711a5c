"""Configuration of the miniature's delay family: the fields of a MOSS-TTS-Delay checkpoint's config.json."""

from __future__ import annotations

from typing import Any, cast

from transformers import PretrainedConfig
from transformers.models.qwen3 import Qwen3Config


class MossTTSDelayConfig(PretrainedConfig):
    """Reads and writes the config.json of either trainer.

    Args:
        language_config: the backbone, as a Qwen3Config or its fields; its sizes are also this config's
            ``hidden_size`` and ``vocab_size``.
        n_vq: codebooks per audio frame.
        audio_vocab_size: codes per codebook; the code after the last one, ``audio_pad_code``, means "no audio here".
        token_ids: the special tokens' ids, and whatever else a config.json holds.

    Source: field names as in upstream ``moss_tts_delay/configuration_moss_tts.py``; the default sizes are ours.
    """

    model_type = "moss_tts_delay"
    pad_token_id: int

    def __init__(
        self,
        language_config: Qwen3Config | dict[str, Any] | None = None,
        n_vq: int = 4,
        audio_vocab_size: int = 32,
        audio_pad_code: int | None = None,
        initializer_range: float = 0.02,
        **token_ids: Any,
    ) -> None:
        if not isinstance(language_config, Qwen3Config):
            language_config = Qwen3Config(**(language_config or {}))
        self.language_config = language_config
        self.n_vq = n_vq
        self.audio_vocab_size = audio_vocab_size
        self.audio_pad_code = audio_vocab_size if audio_pad_code is None else audio_pad_code
        self.initializer_range = initializer_range
        super().__init__(**token_ids)
        self.hidden_size = cast(int, language_config.hidden_size)
        self.vocab_size = cast(int, language_config.vocab_size)

    def to_dict(self) -> dict[str, Any]:
        return {**super().to_dict(), "language_config": self.language_config.to_dict()}
