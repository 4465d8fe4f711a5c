"""README.md and README_zh.md say the same, and what they say is what the code and the measured figures say."""

from __future__ import annotations

import json
import re
import sys
from pathlib import Path

import pytest

from moss_tts_patches.settings import CORRECTIONS, PREFIX, Settings
from moss_tts_patches.units import GIB, TFLOP

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT / "docs"))
import write_settings  # noqa: E402

READMES = ("README.md", "README_zh.md")
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
def test_the_settings_in_the_table_exist_and_have_that_default(name):
    rows = {row[0].strip("`"): row[1] for row in table_rows(text_of(name), r"\| `MOSS_LOWMEM\w*` \|")}
    fields = {PREFIX + field.upper(): (field, info) for field, info in Settings.model_fields.items()}
    for variable, values in rows.items():
        if variable in fields:
            default = write_settings.default_of(*fields[variable])
            assert values.startswith(f"`{default}`"), (variable, values)
    assert rows.keys() - fields.keys() == {"MOSS_LOWMEM", "MOSS_LOWMEM_FAMILY", "MOSS_LOWMEM_ENGINE"}
    named = set(re.findall(r"MOSS_LOWMEM_[A-Z0-9_]+", text_of(name)))
    assert named <= fields.keys() | rows.keys()


def test_both_tables_have_the_same_rows():
    first, second = ([row[0] for row in table_rows(text_of(name), r"\| `MOSS_\w+` \|")] for name in READMES)
    assert first == second


def test_the_page_of_settings_is_written_from_the_settings():
    """Reproduce with ``python docs/write_settings.py``."""
    assert write_settings.PATH.read_text(encoding="utf-8") == write_settings.text()


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


CARD_COLUMNS = (
    ("moss_tts_local", "1.7b", "local"),
    ("moss_tts_local_v1.5", "4b", "local-v1.5"),
    ("moss_tts_realtime", "1.7b", "realtime-1.7b"),
    ("moss_tts_delay", "8b", "delay-8b"),
)
CARD_ROWS = {
    "all weights, stores and idle weights in RAM": "staged, both and idle weights on host",
    "全参，存储与闲置权重在内存": "staged, both and idle weights on host",
    "all weights, stores in RAM": "staged, both on host",
    "全参，存储在内存": "staged, both on host",
    "all weights, gradients in RAM": "staged, gradients on host",
    "全参，梯度在内存": "staged, gradients on host",
    "all weights, `fused`": "fused",
    "全参 `fused`": "fused",
    "all weights, `staged`": "staged",
    "全参 `staged`": "staged",
}
BESIDE_THE_STEP_GIB = 1.5


def adapter_peaks(method):
    rows = json.loads((ROOT / "benchmarks/results/adapters.json").read_text())["rows"]
    return {(row["family"], row["size"]): row["peak_bytes"] / GIB for row in rows if row["method"] == method}


@pytest.mark.parametrize("name", READMES)
def test_the_table_of_cards_is_what_was_measured_and_fits(name):
    rows = table_rows(text_of(name), r"\| \d+ GB \|")
    assert [row[0] for row in rows] == ["6 GB", "8 GB", "12 GB", "16 GB", "24 GB"]
    for card, *cells in rows:
        for cell, (family, size, file) in zip(cells, CARD_COLUMNS, strict=True):
            if not cell:
                continue
            what, peak = re.fullmatch(r"(.*) ([\d.]+) GiB", cell).groups()
            if what == "QLoRA":
                measured = adapter_peaks("qlora")[family, size]
            else:
                figures = json.loads((ROOT / f"benchmarks/results/memory-{file}.json").read_text())["rows"]
                [measured] = [
                    row["peak_bytes"] / GIB
                    for row in figures
                    if row["name"] == CARD_ROWS[what] and row["positions"] == 600
                ]
            assert peak == f"{measured:.1f}"
            assert measured + BESIDE_THE_STEP_GIB <= int(card.split()[0])


@pytest.mark.parametrize("name", READMES)
def test_the_peaks_of_adapters_are_what_was_measured(name):
    for method in ("lora", "qlora"):
        peaks = [f"{adapter_peaks(method)[family, size]:.1f}" for family, size, _ in CARD_COLUMNS]
        pattern = r"\D+".join(re.escape(peak) for peak in peaks) + r" GiB"
        assert re.search(pattern, text_of(name)), (method, peaks)


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
