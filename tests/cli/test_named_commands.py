"""Every command that a hint, a help text or a page names is there, with the options that it names."""

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
FORMATS = frozenset(["manifest", "stat", "homes"])  # "holdfast manifest 1" is how such a file begins
ENDS = frozenset(["|", "||", "&&", ";", "&", ">", "--", "#", "…", "..."])


class Mention(NamedTuple):
    """Words after `holdfast`, and where they stand."""

    words: str
    where: str


def mentions_in(text: str, where: str) -> Iterator[Mention]:
    for pattern in (QUOTED, LINE):
        yield from (Mention(" ".join(found[1].split()), where) for found in pattern.finditer(text))


def strings_of(path: Path) -> Iterator[str]:
    """The texts of a module; what is put into them later stands as X."""
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
    """What is wrong with a mention; None if nothing is, or if it names no command at all."""
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


def test_every_command_that_is_named_somewhere_is_there() -> None:
    all_mentions = mentions()

    wrong = [(*each, problem) for each in all_mentions if (problem := problem_with(each.words))]
    assert wrong == []
    assert len(all_mentions) > 200


@pytest.mark.parametrize(
    "text",
    ["see 'holdfast issue finnish ID'", "`holdfast lease renew --tll 5m`", "  holdfast hstory --all"],
)
def test_a_command_that_is_not_there_is_found(text: str) -> None:
    assert [problem_with(each.words) for each in mentions_in(text, "somewhere")] != [None]
