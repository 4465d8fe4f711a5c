"""Writes docs/settings.md from the settings class: ``python docs/write_settings.py``; a test compares the two."""

from __future__ import annotations

import typing
from pathlib import Path
from typing import Any

from moss_tts_patches.settings import CORRECTIONS, PREFIX, Settings

PATH = Path(__file__).with_name("settings.md")

#: Read by the launcher and the start-up hook, before there are settings.
LAUNCHER = {
    "MOSS_LOWMEM": ("unset", "0, 1", "the switch; off means upstream, byte for byte"),
    "MOSS_LOWMEM_FAMILY": (
        "moss_tts_local",
        "moss_tts_local, moss_tts_delay, moss_tts_local_v1.5, moss_tts_realtime",
        "which trainer run_train_lowmem.sh starts",
    ),
    "MOSS_LOWMEM_ENGINE": ("auto", "auto, keep", "auto runs one plain process where an engine would shard nothing"),
    "MOSS_TTS_REPO": ("", "a folder", "your MOSS-TTS checkout"),
}


#: Settings that are a word or something else, which their type does not say.
WORDS_OR_VALUES = {"max_positions": "1 or more, auto", "resume": "auto, off, a path"}


def default_of(field: str, info: Any) -> str:
    """A field's default as the variable would be written."""
    if field == "corrections":
        return "all"
    if info.default is None or info.default == ():
        return ""
    return str(info.default)


def values_of(field: str, info: Any) -> str:
    """What may be written, in words."""
    if typing.get_origin(info.annotation) is typing.Literal:
        return ", ".join(typing.get_args(info.annotation))
    if field in WORDS_OR_VALUES:
        return WORDS_OR_VALUES[field]
    limits = {type(limit).__name__: limit for limit in info.metadata}
    low = getattr(limits.get("Ge"), "ge", None)
    high = getattr(limits.get("Le"), "le", getattr(limits.get("Lt"), "lt", None))
    if low is not None:
        return f"{low} to {high}" if high is not None else f"{low} or more"
    if "Gt" in limits:
        return f"above {limits['Gt'].gt}"
    return "a list" if "tuple" in str(info.annotation) else "a path"


def text() -> str:
    """Returns the page."""
    lines = [
        "# Settings",
        "",
        "Every variable that the layer reads. Written by `python docs/write_settings.py` from the settings class. A",
        "wrong value or an unknown name stops the run before the model loads and names the nearest valid one.",
        "",
        "| variable | default | values | meaning |",
        "|---|---|---|---|",
    ]
    rows = [(name, *what) for name, what in LAUNCHER.items()]
    for field, info in Settings.model_fields.items():
        rows.append((PREFIX + field.upper(), default_of(field, info), values_of(field, info), info.description or ""))
    lines += [
        f"| `{name}` | {f'`{default}`' if default else ''} | {values} | {meaning} |"
        for name, default, values, meaning in rows
    ]
    lines += ["", "Names for `MOSS_LOWMEM_CORRECTIONS` (`all`, `none`, or some of them):", ""]
    lines += [f"- `{name}`: {meaning}" for name, meaning in CORRECTIONS.items()]
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    PATH.write_text(text(), encoding="utf-8")
