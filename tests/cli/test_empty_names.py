"""An empty name, which an unset variable leaves in a script, is refused: it never means the default."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path

import click
import pytest

from holdfast.cli.entry import root as holdfast_command
from holdfast.errors import NameInvalid
from tests.cli.commands import error, holdfast
from tests.repository.stages import files_in, make_repository, put_files

MAY_BE_EMPTY = {"TEXT", "TITLE", "DURATION", "SIZE", "N", "WHEN"}
TEXTS = {"title", "words", "event"}
"""Texts, and the parameters whose own checks refuse the empty value."""


@pytest.fixture
def repo(scratch: Path) -> Path:
    make_repository(scratch / "repo")
    put_files(scratch / "repo/main", {"file": "precious"})
    return scratch / "repo"


@pytest.mark.parametrize(
    "command",
    [
        ["restore", "head", "--inplace", "--reason", "x", "--worktree", ""],
        ["restore", "head", ""],
        ["restore", ""],
        ["restore", "head", "--inplace", "--reason", "x", "--path", ""],
        ["snapshot", "--worktree", ""],
        ["snapshot", "--tag", ""],
        ["lease", "acquire", "--worktree", ""],
        ["lease", "release", "--lock-id", ""],
        ["worktree", "show", ""],
        ["worktree", "create", "new", "--from", ""],
        ["status", "--repo", ""],
        ["diff", ""],
        ["verify", ""],
        ["show", ""],
        ["issue", "show", ""],
        ["issue", "claim-next", "--actor", ""],
        ["issue", "create", "title", "--assignee", ""],
        ["ledger", "claim", ""],
        ["ledger", "release", "node", "--claim", ""],
    ],
    ids=lambda command: " ".join(each or "''" for each in command),
)
def test_an_empty_name_is_refused(repo: Path, command: list[str]) -> None:
    holdfast("snapshot", cwd=repo)
    put_files(repo / "main", {"file": "unsaved"})
    before = sorted(each.name for each in (repo / ".jvs/descriptors").iterdir())
    refused = holdfast(*command, "--json", cwd=repo)
    assert (refused.returncode, error(refused)["code"]) == (2, "E_NAME_INVALID")
    assert "is empty" in error(refused)["message"]
    assert files_in(repo / "main") == {"file": "unsaved"}
    assert sorted(each.name for each in (repo / ".jvs/descriptors").iterdir()) == before


def test_an_empty_text_and_an_empty_argument_of_a_command_are_allowed(repo: Path) -> None:
    assert holdfast("snapshot", "--note", "", cwd=repo).returncode == 0
    assert holdfast("run", "--purpose", "", "--", "test", "-z", "", cwd=repo).returncode == 0


def _commands(command: click.Command, context: click.Context) -> Iterator[tuple[click.Command, click.Context]]:
    if not isinstance(command, click.Group) or command.invoke_without_command:
        yield command, context
    if not isinstance(command, click.Group):
        return
    for name in command.list_commands(context):
        inner = command.get_command(context, name)
        assert inner is not None
        yield from _commands(inner, click.Context(inner, context, name))


def test_every_parameter_that_names_something_refuses_the_empty_name() -> None:
    accepting = set[str]()
    for command, context in _commands(holdfast_command, click.Context(holdfast_command, info_name="holdfast")):
        for each in command.params:
            is_text = each.metavar in MAY_BE_EMPTY or each.name in TEXTS
            if isinstance(each.type, click.types.StringParamType | click.Path) and not is_text:
                with contextlib.suppress(NameInvalid):
                    each.type.convert("", each, context)
                    accepting.add(f"{context.command_path} {each.name}")
    assert accepting == set()
