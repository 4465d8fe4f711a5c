"""The only place that reads ``MOSS_LOWMEM_*``: one frozen object, checked before anything else happens."""

from __future__ import annotations

import difflib
import os
from collections.abc import Mapping
from typing import Annotated, Literal

from pydantic import Field, ValidationError, field_validator
from pydantic_settings import BaseSettings, NoDecode, SettingsConfigDict

from .errors import SettingsError

PREFIX = "MOSS_LOWMEM_"

#: Places where the layer knowingly departs from upstream's numbers, each with what it does.
CORRECTIONS: dict[str, str] = {
    "empty_channel_loss": "a codebook without any label leaves the printed loss finite (upstream prints nan; the "
    "gradients are the same)",
    "wrapped_checkpointing": "moss_tts_local_v1.5 with --gradient-checkpointing-impl model_internal: layers are "
    "recomputed one by one (upstream recomputes every layer as the last one: wrong gradients, same loss)",
    "padded_attention_rows": "moss_tts_local_v1.5: a padded query attends to itself (upstream leaves its row of the "
    "mask empty, which CUDA kernels turn into nan gradients: OpenMOSS/MOSS-TTS#196)",
    "depth_attention": "moss_tts_local_v1.5: the depth model uses the attention that --attn-implementation asks for "
    "(upstream: the one in the checkpoint's config, whether it is installed or not)",
}

# Variables of the launcher: known, but not settings of a training process.
_LAUNCHER_VARIABLES = ("MOSS_LOWMEM_ENGINE", "MOSS_LOWMEM_FAMILY")

Placement = Literal["auto", "device", "host"]


class Settings(BaseSettings):
    """What a user can choose. Every field is the variable ``MOSS_LOWMEM_<NAME>``."""

    model_config = SettingsConfigDict(env_prefix=PREFIX, frozen=True, extra="ignore", env_ignore_empty=False)

    schedule: Literal["fused", "staged", "autograd"] = Field(
        "staged", description="how the loss is computed: fused (fewest FLOPs), staged (least memory), autograd"
    )
    chunk_frames: int = Field(
        32, ge=1, le=65536, description="frames of the depth model alive at once; memory and speed grow with it"
    )
    checkpointing: Literal["0", "1"] = Field(
        "1", description="recompute backbone layers in the backward; 0 follows upstream's --gradient-checkpointing"
    )
    optimizer: Literal["adamw8bit", "adamw"] = Field(
        "adamw8bit", description="8-bit AdamW with stochastic rounding, or torch's AdamW arithmetic"
    )
    gradients: Placement = Field(
        "auto", description="where gradients are accumulated: on the GPU or in host memory; auto goes by the card"
    )
    states: Placement = Field(
        "auto", description="where optimizer states stand between steps: on the GPU or in host memory"
    )
    host_gradient_dtype: Literal["float32", "bfloat16"] = Field(
        "float32", description="precision of gradients in host memory: 4 or 2 bytes of RAM per trained parameter"
    )
    weights: Placement = Field(
        "auto", description="whether the backbone's weights wait in host memory while the depth model and heads work"
    )
    corrections: Annotated[tuple[str, ...], NoDecode] = Field(
        tuple(CORRECTIONS), description="departures from upstream's numbers: all, none, or names separated by commas"
    )
    self_check: Literal["0", "1"] = Field(
        "1", description="compare our loss and gradients with upstream's on a shrunken model before loading"
    )

    @field_validator("corrections", mode="before")
    @classmethod
    def _split_corrections(cls, value: object) -> object:
        if not isinstance(value, str):
            return value
        names = tuple(name.strip() for name in value.split(",") if name.strip())
        if names == ("all",):
            return tuple(CORRECTIONS)
        if names == ("none",):
            return ()
        unknown = [name for name in names if name not in CORRECTIONS]
        if unknown or not names:
            wrong = ", ".join(unknown) or "an empty value"
            raise ValueError(f"{wrong}; expected all, none, or some of: {', '.join(CORRECTIONS)}")
        return names

    @property
    def checkpoints_always(self) -> bool:
        return self.checkpointing == "1"

    @property
    def checks_itself(self) -> bool:
        return self.self_check == "1"

    def corrects(self, name: str) -> bool:
        """Whether the named correction is on.

        Raises:
            KeyError: the name is not one of :data:`CORRECTIONS` (a slip of ours).
        """
        CORRECTIONS[name]
        return name in self.corrections


def parse_switch(environment: Mapping[str, str]) -> bool:
    """Reads ``MOSS_LOWMEM``.

    Raises:
        SettingsError: it is set to anything but 0 or 1.
    """
    value = environment.get("MOSS_LOWMEM")
    if value is None or value == "0":
        return False
    if value == "1":
        return True
    raise SettingsError(f"MOSS_LOWMEM={value!r} is not a value: use 1 to switch the layer on, 0 or unset for off.")


def load_settings() -> Settings:
    """Reads and checks all variables of this process.

    Raises:
        SettingsError: an unknown name (with the nearest known one) or a wrong value (with the valid ones).
    """
    known = {PREFIX + name.upper() for name in Settings.model_fields} | set(_LAUNCHER_VARIABLES)
    for name in os.environ:
        if name.startswith(PREFIX) and name not in known:
            nearest = difflib.get_close_matches(name, sorted(known), n=1, cutoff=0.0)
            raise SettingsError(f"{name} is not a setting; the nearest one is {nearest[0]}.")
    try:
        return Settings()
    except ValidationError as error:
        raise SettingsError(_describe(error)) from None


def _describe(error: ValidationError) -> str:
    parts = []
    for item in error.errors():
        name = PREFIX + str(item["loc"][0]).upper()
        parts.append(f"{name}={item['input']!r}: {item['msg'].removeprefix('Value error, ')}")
    return "; ".join(parts) + "."
