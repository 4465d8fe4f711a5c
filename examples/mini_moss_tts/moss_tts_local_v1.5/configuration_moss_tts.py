"""Configuration of the miniature's v1.5 family: the fields of a MOSS-TTS-Local v1.5 checkpoint's config.json."""

from __future__ import annotations

from typing import Any, cast

from transformers import PretrainedConfig
from transformers.models.gpt2.configuration_gpt2 import GPT2Config
from transformers.models.qwen3 import Qwen3Config


class MossTTSLocalConfig(PretrainedConfig):
    """Reads and writes the config.json of either trainer.

    Args:
        qwen3_config: the backbone, as a Qwen3Config or its fields.
        gpt2_config: the depth transformer, as a GPT2Config or its fields; as wide as the backbone.
        n_vq: codebooks per audio frame.
        audio_codebook_sizes: codes of each codebook; ``audio_vocab_size`` of them if None.
        audio_pad_code: means "no audio here"; it has no embedding.
        attn_implementation: the backbone's attention, ``sdpa`` or ``eager``.
        local_transformer_attn_implementation: the depth transformer's; the backbone's if None.
        local_text_head_mode: ``binary`` (one more frame, or the end) or ``full_vocab``.
        token_ids: the special tokens' ids, and whatever else a config.json holds.

    Source: field names as in upstream ``moss_tts_local_v1.5/configuration_moss_tts.py``; default sizes are ours.
    """

    model_type = "moss_tts_local"

    def __init__(
        self,
        qwen3_config: Qwen3Config | dict[str, Any] | None = None,
        gpt2_config: GPT2Config | dict[str, Any] | None = None,
        n_vq: int = 4,
        audio_vocab_size: int = 32,
        audio_codebook_sizes: list[int] | None = None,
        audio_pad_code: int | None = None,
        attn_implementation: str | None = None,
        local_transformer_attn_implementation: str | None = None,
        local_text_head_mode: str = "binary",
        initializer_range: float = 0.02,
        **token_ids: Any,
    ) -> None:
        if not isinstance(qwen3_config, Qwen3Config):
            qwen3_config = Qwen3Config(**(qwen3_config or {}))
        if not isinstance(gpt2_config, GPT2Config):
            gpt2_config = GPT2Config(**(gpt2_config or {}))
        self.qwen3_config, self.gpt2_config = qwen3_config, gpt2_config
        self.n_vq = n_vq
        self.audio_codebook_sizes = audio_codebook_sizes or [audio_vocab_size] * n_vq
        self.audio_vocab_size = max(self.audio_codebook_sizes)
        self.audio_pad_code = self.audio_vocab_size if audio_pad_code is None else audio_pad_code
        self.audio_pad_token_id = self.audio_pad_code
        self.attn_implementation = attn_implementation or "sdpa"
        self.local_transformer_attn_implementation = local_transformer_attn_implementation or self.attn_implementation
        self.local_text_head_mode = local_text_head_mode
        self.initializer_range = initializer_range
        slot = token_ids.pop("audio_assistant_gen_slot_token_id", None)
        self.audio_assistant_slot_token_id = token_ids.pop("audio_assistant_slot_token_id", slot)
        self.audio_assistant_gen_slot_token_id = self.audio_assistant_slot_token_id
        super().__init__(**{"tie_word_embeddings": True, **token_ids})
        self.hidden_size = self.local_hidden_size = cast(int, qwen3_config.hidden_size)
        self.vocab_size = cast(int, qwen3_config.vocab_size)

    def to_dict(self) -> dict[str, Any]:
        nested = {"qwen3_config": self.qwen3_config.to_dict(), "gpt2_config": self.gpt2_config.to_dict()}
        return {**super().to_dict(), **nested}
