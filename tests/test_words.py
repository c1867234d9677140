"""Help, documentation and messages use no word that the glossary has retired."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
GLOSSARY = ROOT / "docs/reference/glossary.md"
PAGES = sorted(
    page
    for page in [*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md"), ROOT / "bench/README.md"]
    if page not in (GLOSSARY, ROOT / "docs/requirements.md")  # requirements quote the specifications
)
SOURCES = sorted((ROOT / "src/holdfast").rglob("*.py"))
CODE = re.compile(r"^(?: {4}|\t).*$|```.*?```|`[^`\n]*`", re.MULTILINE | re.DOTALL)


def retired_words(page: str) -> list[str]:
    """The first column of the table of retired words."""
    table = page[page.index("## Retired words") :]
    return re.findall(r"^\| `([^`]+)` \|", table, re.MULTILINE)


RETIRED = retired_words(GLOSSARY.read_text(encoding="utf-8"))
PATTERN = re.compile(
    "|".join(
        rf"(?<![\w.-])(?{'' if word[0].isupper() else 'i'}:{re.escape(word)})(?![\w-])"  # proper names: with their case
        for word in sorted(RETIRED, key=len, reverse=True)
    )
)


def found_in(text: str) -> list[str]:
    """The retired words in a text, ignoring code, which holds names and not words."""
    return PATTERN.findall(CODE.sub("", text))


def texts_of(source: str) -> Iterator[tuple[int, str]]:
    """The prose of a module: docstrings, help and messages, but not names, keys or paths."""
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Constant) and isinstance(node.value, str) and " " in node.value.strip():
            yield node.lineno, node.value


def test_there_are_retired_words() -> None:
    assert len(RETIRED) > 20


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_a_page_uses_no_retired_word(page: Path) -> None:
    assert found_in(page.read_text(encoding="utf-8")) == []


def test_help_messages_and_docstrings_use_no_retired_word() -> None:
    wrong = [
        f"{path.relative_to(ROOT)}:{line}: {word}"
        for path in SOURCES
        for line, text in texts_of(path.read_text(encoding="utf-8"))
        for word in found_in(text)
    ]
    assert wrong == []


def test_a_retired_word_is_found() -> None:
    assert found_in("The scout waits in line; `homes` is a file.") == ["scout", "in line"]
    planted = 'def f():\n    """Ask the Desk."""\n    raise E("the remnants are gone", key="homes")\n'
    assert [(line, found_in(text)) for line, text in texts_of(planted)] == [
        (2, ["Desk"]),
        (3, ["remnants"]),
    ]
