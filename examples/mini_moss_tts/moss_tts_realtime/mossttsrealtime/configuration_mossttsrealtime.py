"""Configuration of the miniature's realtime family: the fields of a MOSS-TTS-Realtime checkpoint's config.json."""

from __future__ import annotations

from typing import Any

from transformers import PretrainedConfig
from transformers.models.qwen3 import Qwen3Config


class MossTTSRealtimeLocalTransformerConfig(Qwen3Config):
    """The depth transformer: Qwen3's layers over one frame's codebooks.

    Args:
        rvq: codebooks per audio frame.
        audio_pad_token: the code that means "no audio here"; the two after it open and end an audio.
        audio_vocab_size: codes per codebook, these three included.
        layers: Qwen3's own fields.
    """

    model_type = "moss_tts_realtime_local_transformer"

    def __init__(self, rvq: int = 4, audio_pad_token: int = 32, audio_vocab_size: int = 35, **layers: Any) -> None:
        self.rvq, self.audio_pad_token, self.audio_vocab_size = rvq, audio_pad_token, audio_vocab_size
        super().__init__(**{**layers, "vocab_size": audio_vocab_size, "pad_token_id": audio_pad_token})


class MossTTSRealtimeConfig(PretrainedConfig):
    """Reads and writes the config.json of either trainer.

    Args:
        language_config: the backbone, as a Qwen3Config or its fields.
        local_config: the depth transformer, as its config or its fields.
        rvq, audio_pad_token, audio_vocab_size: as of the depth transformer.
        reference_audio_pad, text_pad: text tokens that stand beside a voice to imitate, and after a turn's text.

    Source: field names as in upstream ``mossttsrealtime/configuration_mossttsrealtime.py``; the default sizes are ours.
    """

    model_type = "moss_tts_realtime"

    def __init__(
        self,
        language_config: Qwen3Config | dict[str, Any] | None = None,
        local_config: MossTTSRealtimeLocalTransformerConfig | dict[str, Any] | None = None,
        rvq: int = 4,
        audio_pad_token: int = 32,
        audio_vocab_size: int = 35,
        reference_audio_pad: int = 1,
        text_pad: int = 2,
        initializer_range: float = 0.02,
        **fields: Any,
    ) -> None:
        if not isinstance(language_config, Qwen3Config):
            language_config = Qwen3Config(**(language_config or {}))
        if not isinstance(local_config, MossTTSRealtimeLocalTransformerConfig):
            local_config = MossTTSRealtimeLocalTransformerConfig(**(local_config or {}))
        self.language_config, self.local_config = language_config, local_config
        self.rvq, self.audio_pad_token, self.audio_vocab_size = rvq, audio_pad_token, audio_vocab_size
        self.reference_audio_pad, self.text_pad = reference_audio_pad, text_pad
        self.initializer_range = initializer_range
        super().__init__(**fields)
