"""Every command and option named in a hint, a help text or the documentation exists."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import click
import pytest

from holdfast.cli.entry import root

ROOT = Path(__file__).parents[2]
SOURCES = sorted((ROOT / "src/holdfast").rglob("*.py"))
PAGES = sorted([ROOT / "README.md", ROOT / "CHANGELOG.md", *(ROOT / "docs").rglob("*.md")])
QUOTED = re.compile(r"['`$(]holdfast ((?:[^'`()]|\n)+?)['`)]")
LINE = re.compile(r"^ *(?:\$ )?holdfast (.+)$", re.MULTILINE)
WORD = re.compile(r"[a-z][a-z-]*$")
FORMATS = frozenset(["manifest", "stat", "homes"])  # such a file starts with "holdfast manifest 1"
ENDS = frozenset(["|", "||", "&&", ";", "&", ">", "--", "#", "…", "..."])


class Mention(NamedTuple):
    """The words after `holdfast`, and the file that contains them."""

    words: str
    where: str


def mentions_in(text: str, where: str) -> Iterator[Mention]:
    for pattern in (QUOTED, LINE):
        yield from (Mention(" ".join(found[1].split()), where) for found in pattern.finditer(text))


def strings_of(path: Path) -> Iterator[str]:
    """The strings in a module, with X for each interpolated value."""
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Constant) and isinstance(node.value, str):
            yield node.value
        elif isinstance(node, ast.JoinedStr):
            yield "".join(str(part.value) if isinstance(part, ast.Constant) else "X" for part in node.values)


def mentions() -> list[Mention]:
    found = [mention for path in SOURCES for text in strings_of(path) for mention in mentions_in(text, path.name)]
    for path in PAGES:
        found += mentions_in(path.read_text(encoding="utf-8"), path.name)
    return sorted(set(found))


def problem_with(words: str) -> str | None:
    """The problem with a mention; None if it is correct or names no command."""
    rest = words.split()
    if rest[0] in FORMATS:
        return None
    command: click.Command = root
    context = click.Context(root, info_name="holdfast")
    while isinstance(command, click.Group) and rest and WORD.match(rest[0]):
        named = command.get_command(context, rest[0])
        if named is None:
            return f"there is no command {rest[0]!r}"
        command = named
        rest = rest[1:]
    known = {name for option in command.params for name in option.opts + option.secondary_opts}
    for word in rest:
        if word in ENDS or word.endswith(";"):
            break
        option = word.split("=")[0].strip("[],.:;\"'")
        if option.startswith("--") and not isinstance(command, click.Group) and option not in known | {"--help"}:
            return f"{command.name!r} has no option {option!r}"
    return None


def test_every_command_that_is_mentioned_exists() -> None:
    all_mentions = mentions()

    wrong = [(*each, problem) for each in all_mentions if (problem := problem_with(each.words))]
    assert wrong == []
    assert len(all_mentions) > 200


@pytest.mark.parametrize(
    "text",
    ["see 'holdfast issue finnish ID'", "`holdfast lease renew --tll 5m`", "  holdfast hstory --all"],
)
def test_a_mention_of_a_missing_command_is_found(text: str) -> None:
    assert [problem_with(each.words) for each in mentions_in(text, "somewhere")] != [None]
