"""The only place that reads ``MOSS_LOWMEM_*``: one frozen object, checked before anything else happens."""

from __future__ import annotations

import difflib
import os
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import Field, ValidationError, field_validator, model_validator
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
    "prompt_length": "moss_tts_local_v1.5: a record's labels begin at its first frame (upstream measures the prompt by "
    "its parts, which may be a token longer than the whole: the first frame then has no label)",
    "learning_rate_steps": "N processes, all families but moss_tts_local_v1.5: the learning rate takes one step per "
    "optimizer step (upstream: N, so that its schedule ends after 1/N of the training)",
    "sharded_windows": "N processes with files sharded by rank (*.rankR-of-N.jsonl), all families but "
    "moss_tts_local_v1.5: every epoch ends in an optimizer step, after as many micro-batches in each process "
    "(upstream: a window goes on with the next epoch's records, and unequal shards hang)",
    "gradient_clipping": "DeepSpeed clips at --max-grad-norm (upstream: at 1.0, whatever that says)",
    "depth_attention": "moss_tts_local_v1.5: the depth model uses the attention that --attn-implementation asks for "
    "(upstream: the one in the checkpoint's config, whether it is installed or not)",
}

#: Variables of the launcher: known, but not settings of a training process.
LAUNCHER_VARIABLES = ("MOSS_LOWMEM_ENGINE", "MOSS_LOWMEM_FAMILY")

Placement = Literal["auto", "device", "host"]


class Settings(BaseSettings):
    """What a user can choose. Every field is the variable ``MOSS_LOWMEM_<NAME>``."""

    model_config = SettingsConfigDict(env_prefix=PREFIX, frozen=True, extra="ignore", env_ignore_empty=False)

    method: Literal["full", "lora", "qlora"] = Field(
        "full", description="what is trained: all weights, adapters, or adapters on a base in 4 bit"
    )
    lora_targets: Annotated[tuple[str, ...], NoDecode] = Field(
        (),
        description="modules that get an adapter: backbone, depth, adapters, audio_heads, audio_embeddings, or any "
        "pattern of PEFT's, separated by commas; by default backbone and depth",
    )
    lora_rank: int = Field(16, ge=1, le=4096, description="rank of the adapters")
    lora_alpha: int = Field(32, ge=1, description="an adapter's output counts alpha / rank times")
    lora_dropout: float = Field(0.05, ge=0, lt=1, description="dropout before an adapter")
    lora_rslora: Literal["0", "1"] = Field("0", description="scale by alpha / sqrt(rank) instead (rank-stabilised)")
    lora_dora: Literal["0", "1"] = Field("0", description="train a magnitude beside the direction (DoRA)")
    lora_config: Path | None = Field(None, description="JSON file with rarer options of PEFT's LoraConfig")
    lora_init: Path | None = Field(None, description="folder of a PEFT adapter to start from")
    lora_also_train: Annotated[tuple[str, ...], NoDecode] = Field(
        (), description="weights trained beside the adapters: norms, audio_embeddings, audio_heads or adapters"
    )
    merge: Literal["last", "all", "none"] = Field(
        "last", description="which adapter checkpoints also get a merged folder that upstream loads as it is"
    )
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
    save_steps: int = Field(
        0, ge=0, description="write a resume point every so many optimizer steps, to OUTPUT_DIR/resume/step-N; 0: never"
    )
    save_minutes: float = Field(
        0, ge=0, description="write a resume point when so many minutes have passed since the last; 0: never"
    )
    keep: int = Field(2, ge=1, description="resume points that stay; older ones are deleted")
    resume: str = Field(
        "auto",
        description="the training goes on from: auto, the newest whole resume point in OUTPUT_DIR if there is one; the "
        "path of a resume point; or off",
    )
    progress: Literal["auto", "1", "0"] = Field(
        "auto",
        description="a bar with loss, memory and remaining time: on a terminal; always (a line every 10 s where there "
        "is no terminal); never",
    )
    nonfinite: Literal["stop", "skip"] = Field(
        "stop",
        description="gradients that are not finite: stop, naming parameters and records, or leave out the step and go "
        "on",
    )
    self_check: Literal["0", "1"] = Field(
        "1", description="compare our loss and gradients with upstream's on a shrunken model before loading"
    )

    plan: Literal["auto", "off"] = Field(
        "auto",
        description="choose schedule, checkpointing and stores for the card and the longest record; what is set here "
        "is kept (off: every default as it stands)",
    )
    vram: float | None = Field(None, gt=0, description="GiB of GPU memory to plan for; by default the card's")
    bad_records: Literal["stop", "skip"] = Field(
        "stop", description="faulty records: stop with a list of them, or train without them (skipped_records.jsonl)"
    )
    max_positions: Annotated[int, Field(ge=1)] | Literal["auto"] | None = Field(
        None,
        description="leave out records with more positions than this; auto: than the planner finds room for in any "
        "plan that your settings allow",
    )
    valid_jsonl: str | None = Field(
        None, description="records to evaluate while training, named as --train-jsonl names its own"
    )
    valid_share: float = Field(
        0, ge=0, lt=1, description="hold out this share of the training records and evaluate it, for example 0.02"
    )
    valid_steps: int = Field(
        0, ge=0, description="evaluate every so many optimizer steps, and before each of the trainer's checkpoints"
    )
    valid_best: Literal["0", "1"] = Field(
        "1", description="save the weights with the lowest validation loss so far to OUTPUT_DIR/best"
    )
    longest_first: Literal["0", "1"] = Field(
        "1", description="try the longest records before the first step, so that memory fails at once or never"
    )
    preflight: Literal["0", "1"] = Field(
        "1", description="check disk, output folder and machine before anything is loaded"
    )

    @field_validator("lora_targets", "lora_also_train", mode="before")
    @classmethod
    def _split(cls, value: object) -> object:
        return split_list(value) if isinstance(value, str) else value

    @model_validator(mode="after")
    def _adapter_settings_need_adapters(self) -> Settings:
        given = sorted(name for name in self.model_fields_set if name.startswith("lora_") or name == "merge")
        if self.method == "full" and given:
            raise ValueError(
                f"{PREFIX}{given[0].upper()} is set, but {PREFIX}METHOD is full, which trains no adapter. Set "
                f"{PREFIX}METHOD=lora or qlora, or unset it"
            )
        return self

    @model_validator(mode="after")
    def _validation_needs_records(self) -> Settings:
        if self.valid_jsonl is not None and self.valid_share:
            raise ValueError(
                f"{PREFIX}VALID_JSONL and {PREFIX}VALID_SHARE are both set. Expected one of them: files of their own, "
                "or a share of the training records"
            )
        given = sorted(self.model_fields_set & {"valid_best", "valid_steps"})
        if given and not self.validates:
            raise ValueError(
                f"{PREFIX}{given[0].upper()} is set, but there are no records to evaluate. Set {PREFIX}VALID_JSONL or "
                f"{PREFIX}VALID_SHARE, or unset it"
            )
        return self

    @model_validator(mode="after")
    def _auto_needs_a_plan(self) -> Settings:
        if self.max_positions == "auto" and self.plan == "off":
            raise ValueError(
                f"{PREFIX}MAX_POSITIONS is auto, but {PREFIX}PLAN is off, and the planner finds the number. Set a "
                f"number, or unset {PREFIX}PLAN"
            )
        return self

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
    def validates(self) -> bool:
        """Whether there are records to evaluate while training."""
        return self.valid_jsonl is not None or self.valid_share > 0

    @property
    def saves_best(self) -> bool:
        """Whether the weights with the lowest validation loss are kept."""
        return self.validates and self.valid_best == "1"

    @property
    def most_positions(self) -> int | None:
        """Of a record, where the user has set a number."""
        return None if self.max_positions == "auto" else self.max_positions

    @property
    def checkpoints_always(self) -> bool:
        """Whether layers are recomputed, whatever the trainer's command line asks for."""
        return self.checkpointing == "1"

    @property
    def checks_itself(self) -> bool:
        """Whether loss and gradients are compared with upstream's before the model is loaded."""
        return self.self_check == "1"

    def adapter_options(self) -> dict[str, Any]:
        """Keyword arguments of PEFT's ``LoraConfig`` that have a setting of their own."""
        return {
            "r": self.lora_rank,
            "lora_alpha": self.lora_alpha,
            "lora_dropout": self.lora_dropout,
            "use_rslora": self.lora_rslora == "1",
            "use_dora": self.lora_dora == "1",
        }

    def pinned_rung(self) -> dict[str, Any]:
        """What the user has set of what the planner chooses, and what it never chooses."""
        pinned: dict[str, Any] = {
            name: getattr(self, name)
            for name in ("schedule", "gradients", "states", "weights")
            if name in self.model_fields_set and getattr(self, name) != "auto"
        }
        if "checkpointing" in self.model_fields_set:
            pinned["checkpointing"] = self.checkpoints_always
        if "host_gradient_dtype" in self.model_fields_set:
            pinned["host_gradient_dtype"] = self.host_gradient_dtype
        return pinned | {"chunk_frames": self.chunk_frames, "optimizer": self.optimizer}

    def chosen_adapter_options(self) -> frozenset[str]:
        """Names of those of :meth:`adapter_options` that the user set."""
        fields = ("lora_rank", "lora_alpha", "lora_dropout", "lora_rslora", "lora_dora")
        return frozenset(
            option for option, name in zip(self.adapter_options(), fields) if name in self.model_fields_set
        )

    def corrects(self, name: str) -> bool:
        """Whether the named correction is on.

        Raises:
            KeyError: the name is not one of :data:`CORRECTIONS` (a slip of ours).
        """
        CORRECTIONS[name]
        return name in self.corrections


def split_list(value: str) -> tuple[str, ...]:
    """Splits at commas, except within the brackets of a regular expression."""
    parts = re.split(r",(?![^{}\[\]()]*[}\])])", value)
    return tuple(part.strip() for part in parts if part.strip())


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
    known = {PREFIX + name.upper() for name in Settings.model_fields} | set(LAUNCHER_VARIABLES)
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
        message = item["msg"].removeprefix("Value error, ")
        name = PREFIX + str(item["loc"][0]).upper() if item["loc"] else ""
        parts.append(f"{name}={item['input']!r}: {message}" if name else message)
    return "; ".join(parts) + "."
