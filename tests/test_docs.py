"""The pages of docs/ name settings, files, commands and messages that exist, and say the same in both languages."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from moss_tts_patches import cli
from moss_tts_patches.settings import LAUNCHER_VARIABLES, PREFIX, Settings

ROOT = Path(__file__).resolve().parents[1]
DOCS = ROOT / "docs"
PAGES = sorted(DOCS.glob("*.md"))
PAIRS = [
    (page, page.with_name(f"{page.stem}_zh.md")) for page in PAGES if page.with_name(f"{page.stem}_zh.md").exists()
]
KNOWN_SETTINGS = {PREFIX + name.upper() for name in Settings.model_fields} | set(LAUNCHER_VARIABLES)
HEADING = re.compile(r"^### (.*)$", re.MULTILINE)


def text_of(page: Path) -> str:
    return page.read_text(encoding="utf-8")


def what_is_wrong(text: str) -> list[str]:
    """Names of settings and commands, and targets of links, that do not exist."""
    wrong = [name for name in re.findall(r"MOSS_LOWMEM_[A-Z0-9_]*[A-Z0-9]", text) if name not in KNOWN_SETTINGS]
    commands = {
        command.name or command.callback.__name__ for command in cli.app.registered_commands if command.callback
    }
    wrong += [name for name in re.findall(r"moss-lowmem ([a-z][\w-]*)", text) if name not in commands]
    links = re.findall(r"\]\(([^)#:]+)\)", text)
    wrong += [link for link in links if not (DOCS / link).exists()]
    paths = re.findall(
        r"`((?:tests|benchmarks|docs|runtime|families|engines|adapters)/[\w./]+\.(?:py|sh|txt|md))`", text
    )
    wrong += [path for path in paths if not ((ROOT / path).exists() or (ROOT / "moss_tts_patches" / path).exists())]
    return wrong


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_what_a_page_names_exists(page: Path) -> None:
    assert not what_is_wrong(text_of(page))


def test_a_wrong_name_is_noticed() -> None:
    wrong = "`MOSS_LOWMEM_STATE=x`, `moss-lowmem plam`, [a](gone.md), `tests/test_gone.py`"
    assert what_is_wrong(wrong) == ["MOSS_LOWMEM_STATE", "plam", "gone.md", "tests/test_gone.py"]


@pytest.mark.parametrize("pair", PAIRS, ids=lambda pair: pair[0].stem)
def test_both_languages_have_the_same_sections_pictures_and_code(pair: tuple[Path, Path]) -> None:
    def parts(text: str) -> tuple[list[str], list[str], list[str]]:
        code = [span for span in re.findall(r"`([^`\n]+)`", text) if not re.search(r"[一-鿿]", span)]
        pictures = re.findall(r"!\[[^]]*\]\(([^)]*)\)", text)
        return re.findall(r"^#+(?= )", text, re.MULTILINE), pictures, sorted(set(code))

    english, chinese = (parts(text_of(page)) for page in pair)
    assert english == chinese


def test_these_pages_are_in_both_languages() -> None:
    assert {"troubleshooting", "how_it_works"} <= {english.stem for english, _ in PAIRS}


def source_text() -> str:
    """Every string of the package as it is printed: pieces of one literal joined, values left as braces."""
    files = sorted((ROOT / "moss_tts_patches").rglob("*.py"))
    text = "\n".join(file.read_text(encoding="utf-8") for file in files)
    return re.sub(r'"\s*\n\s*f?"', "", text)


def unknown_messages(text: str, source: str) -> list[str]:
    """Pieces of the quoted messages under the layer's own heading that no source file has."""
    section = re.split(r"^## ", text, flags=re.MULTILINE)[-1]
    messages = [message for heading in HEADING.findall(section) for message in re.findall(r"`([^`]+)`", heading)]
    assert len(messages) >= 10
    pieces = [piece.strip() for message in messages for piece in message.split("…")]
    return [piece for piece in pieces if len(piece) > 3 and piece not in source]


@pytest.mark.parametrize("name", ["troubleshooting.md", "troubleshooting_zh.md"])
def test_messages_to_search_for_are_those_that_are_printed(name: str) -> None:
    source = source_text()
    assert unknown_messages(text_of(DOCS / name), source) == []
    changed = text_of(DOCS / name).replace("no longer holds", "has lost")
    assert unknown_messages(changed, source) == ["has lost the layer's patch"]
