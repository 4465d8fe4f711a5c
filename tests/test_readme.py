"""README.md and README_zh.md say the same, and what they say is what the code and the measured figures say."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from moss_tts_patches.settings import CORRECTIONS, PREFIX, Settings

ROOT = Path(__file__).resolve().parents[1]
READMES = ("README.md", "README_zh.md")
GIB, TFLOP = 2**30, 10**12
ROWS = (
    "upstream, checkpointing",
    "fused",
    "staged",
    "staged, gradients on host",
    "staged, both on host",
    "staged, both and idle weights on host",
)


def text_of(name):
    return (ROOT / name).read_text(encoding="utf-8")


def table_rows(text, first_cell):
    return [
        [cell.strip() for cell in line.strip("|").split("|")]
        for line in text.splitlines()
        if line.startswith("|") and re.match(first_cell, line)
    ]


@pytest.mark.parametrize("name", READMES)
def test_every_setting_stands_in_the_table_with_its_default(name):
    rows = {row[0].strip("`"): row[1] for row in table_rows(text_of(name), r"\| `MOSS_LOWMEM\w*` \|")}
    for field, info in Settings.model_fields.items():
        values = rows[PREFIX + field.upper()]
        default = "all" if field == "corrections" else str(info.default)
        assert values.startswith(f"`{default}`"), (field, values)
    assert {"MOSS_LOWMEM", "MOSS_LOWMEM_FAMILY", "MOSS_LOWMEM_ENGINE"} <= rows.keys()
    unknown = rows.keys() - {PREFIX + field.upper() for field in Settings.model_fields}
    assert unknown == {"MOSS_LOWMEM", "MOSS_LOWMEM_FAMILY", "MOSS_LOWMEM_ENGINE"}


@pytest.mark.parametrize("name", READMES)
def test_every_correction_is_described(name):
    described = set(re.findall(r"^- \*\*`(\w+)`\*\*", text_of(name), flags=re.MULTILINE))
    assert described == set(CORRECTIONS)


@pytest.mark.parametrize("name", READMES)
def test_the_memory_table_is_what_was_measured(name):
    """Reproduce with ``python benchmarks/memory.py --json benchmarks/results/memory-local.json``."""
    measured = json.loads((ROOT / "benchmarks/results/memory-local.json").read_text())["rows"]
    by_name = {row["name"]: row for row in measured if row["positions"] == 600}
    rows = [row for row in table_rows(text_of(name), r"\|.*TFLOP \|") if len(row) == 4]
    assert len(rows) == len(ROWS)
    for (_, peak, host, compute), measured_name in zip(rows, ROWS):
        figures = by_name[measured_name]
        assert peak == f"{figures['peak_bytes'] / GIB:.1f} GiB"
        assert host == (f"{figures['host_bytes'] / GIB:.1f} GiB" if figures["host_bytes"] else "")
        assert compute == f"{figures['matmul_flops'] / TFLOP:.1f} TFLOP"
    long = {row["name"]: row["peak_bytes"] / GIB for row in measured if row["positions"] == 3000}
    assert f"{long[ROWS[-1]]:.1f} GiB" in text_of(name)
    assert f"{long['upstream, checkpointing']:.1f}" in text_of(name)


FAMILY_FIGURES = ("delay-8b", "delay-1.7b", "local-v1.5", "realtime-1.7b")
FAMILY_COLUMNS = (
    "upstream",
    "upstream, checkpointing",
    "staged, both on host",
    "staged, both and idle weights on host",
)


@pytest.mark.parametrize("name", READMES)
def test_the_table_of_families_is_what_was_measured(name):
    rows = [row for row in table_rows(text_of(name), r"\| moss_tts_") if len(row) == 5]
    assert len(rows) == len(FAMILY_FIGURES)
    for row, file in zip(rows, FAMILY_FIGURES):
        measured = json.loads((ROOT / f"benchmarks/results/memory-{file}.json").read_text())["rows"]
        peaks = {entry["name"]: entry["peak_bytes"] / GIB for entry in measured if entry["positions"] == 600}
        for cell, column in zip(row[1:], FAMILY_COLUMNS):
            if column in peaks:
                assert cell == f"{peaks[column]:.1f} GiB", (file, column)
            else:
                assert "GiB" not in cell


def test_both_languages_show_the_same_commands_and_pictures():
    def parts(text):
        blocks = re.findall(r"```bash\n(.*?)```", text, flags=re.DOTALL)
        commands = [line.split("#")[0].strip() for block in blocks for line in block.splitlines()]
        return commands, re.findall(r"\]\((docs/images/[^)]*)\)", text), re.findall(r"^##? ", text, flags=re.MULTILINE)

    english, chinese = parts(text_of("README.md")), parts(text_of("README_zh.md"))
    assert english == chinese
    assert all((ROOT / image).exists() for image in english[1])


@pytest.mark.parametrize("name", READMES)
def test_files_that_are_named_exist(name):
    for path in re.findall(r"\]\(([^)#:]+)\)", text_of(name)):
        assert (ROOT / path).exists(), path
    for path in ("benchmarks/memory.py", "run_train_lowmem.sh", "tests/run.sh"):
        assert path in text_of(name)
        assert (ROOT / path).exists()
