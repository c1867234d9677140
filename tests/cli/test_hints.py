"""Hints: every command and option that one names exists, and a command never hears of an option that it lacks."""

from __future__ import annotations

import ast
import re
import shlex
from collections.abc import Iterator
from pathlib import Path

import click
import pytest

import holdfast as package
from holdfast.cli.entry import Group, bare_options, fitting_hint, root
from holdfast.errors import ConsistencyUnavailable, Failure, LockConflict, UsageFailure, all_failures
from tests.cli.commands import error, holdfast

SOURCE = Path(package.__file__).parent


def sources() -> Iterator[tuple[Path, str]]:
    return ((path, path.read_text(encoding="utf-8")) for path in sorted(SOURCE.rglob("*.py")))


def texts() -> Iterator[tuple[str, str]]:
    """Every text in the source with its place; what is filled in later reads as an argument."""
    for path, source in sources():
        if "holdfast " not in source:
            continue
        tree = ast.parse(source)
        parts = {id(each) for node in ast.walk(tree) if isinstance(node, ast.JoinedStr) for each in ast.walk(node)}
        for node in ast.walk(tree):
            where = f"{path.relative_to(SOURCE)}:{getattr(node, 'lineno', 0)}"
            if isinstance(node, ast.JoinedStr):
                filled = (str(each.value) if isinstance(each, ast.Constant) else "ARGUMENT" for each in node.values)
                yield where, "".join(filled)
            elif isinstance(node, ast.Constant) and isinstance(node.value, str) and id(node) not in parts:
                yield where, node.value


def commands(group: Group = root, path: str = "") -> Iterator[tuple[str, click.Command]]:
    context = click.Context(group)
    for name in group.list_commands(context):
        command = group.get_command(context, name)
        assert command is not None
        yield f"{path}{name}", command
        if isinstance(command, Group):
            yield from commands(command, f"{path}{name} ")


COMMANDS = dict(commands())
QUOTED = re.compile(r"'(holdfast [a-z][^']*)'|`(holdfast [a-z][^`]*)`|\$\((holdfast [a-z][^)]*)\)")
OPTIONS = {option for each in COMMANDS.values() for parameter in each.params for option in parameter.opts}


def problem_of(quoted: str) -> str | None:
    """What is wrong with a command line that a text quotes; None if it can be typed."""
    words = shlex.split(quoted.replace("...", "").replace("…", ""))[1:]
    if "|" in words[0]:
        return None
    depth = 2 if " ".join(words[:2]) in COMMANDS else 1
    command = COMMANDS.get(" ".join(words[:depth]))
    if command is None:
        return f"there is no command {words[0]}"
    own = words[depth : words.index("--") if "--" in words else None]
    known = {"--help", "--json", *(option for each in command.params for option in each.opts)}
    lacking = [each for each in own if each.startswith("-") and each.partition("=")[0] not in known]
    if lacking:
        return f"it has no option {lacking[0]}"
    if isinstance(command, Group) and not command.invoke_without_command and own:
        return f"{words[0]} has no command {own[0]}"
    return None


def test_every_quoted_command_exists_with_its_options() -> None:
    found = [(where, "".join(match)) for where, text in texts() for match in QUOTED.findall(text)]
    assert len(found) > 60
    wrong = [f"{where}: {quoted!r}: {why}" for where, quoted in found if (why := problem_of(quoted))]
    assert wrong == []


@pytest.mark.parametrize(
    ("quoted", "why"),
    [
        ("holdfast snapshots", "there is no command snapshots"),
        ("holdfast worktree remvoe NAME", "worktree has no command remvoe"),
        ("holdfast gc run --fast", "it has no option --fast"),
        ("holdfast run --consistency=quiesced -- ls --all", None),
    ],
)
def test_a_wrong_command_in_a_text_is_found(quoted: str, why: str | None) -> None:
    assert problem_of(quoted) == why


def hints() -> Iterator[tuple[str, str]]:
    """Every hint in the source: of the classes, and those given where a failure is raised."""
    for kind in all_failures():
        yield kind.__name__, kind.hint
    for path, source in sources():
        for node in ast.walk(ast.parse(source)) if "hint" in source else ():
            given: list[ast.expr] = []
            if (isinstance(node, ast.keyword) and node.arg == "hint") or (
                isinstance(node, ast.Assign) and "hint" in [getattr(each, "id", "") for each in node.targets]
            ):
                given = [node.value]
            for value in given:
                parts = [each.value for each in ast.walk(value) if isinstance(each, ast.Constant)]
                yield f"{path.relative_to(SOURCE)}:{value.lineno}", "".join(each for each in parts if type(each) is str)


def test_every_option_in_a_hint_is_one_of_ours() -> None:
    found = [(where, option) for where, hint in hints() for option in bare_options(hint)]
    assert len(found) > 10
    assert [each for each in found if each[1] not in {*OPTIONS, "--help"}] == []


@pytest.mark.parametrize("kind", list(all_failures()), ids=lambda each: each.__name__)
def test_no_command_hears_of_an_option_that_it_lacks(kind: type[Failure]) -> None:
    failure = kind.__new__(kind)
    for name, command in COMMANDS.items():
        known = {"--help", *(option for each in command.params for option in each.opts)}
        hint = fitting_hint(failure, command)
        assert hint, name
        assert known.issuperset(bare_options(hint)), (name, hint)
        if kind is not UsageFailure and kind.hint != UsageFailure.hint:
            assert hint != UsageFailure.hint, f"nothing is left of the hint of {kind.__name__} for {name}"


def test_only_the_sentences_about_missing_options_are_left_out() -> None:
    failure = ConsistencyUnavailable("a file changed")
    assert fitting_hint(failure, COMMANDS["snapshot"]) == failure.hint
    assert fitting_hint(failure, COMMANDS["worktree remove"]) == "Stop the writers and try again."
    given = LockConflict("it is held", hint="Name it with --lock-id.")
    assert fitting_hint(given, COMMANDS["worktree list"]).startswith("Wait until the holder is done")


def test_a_command_prints_the_hint_that_fits_it(tmp_path: Path) -> None:
    holdfast("init", "repo", cwd=tmp_path)
    main = tmp_path / "repo/main"
    holdfast("lease", "acquire", "--ttl", "1m", cwd=main)
    waiting, renaming = holdfast("lease", "acquire", "--json", cwd=main), holdfast("worktree", "rename", "main", "x")
    assert "--wait" in str(error(waiting)["hint"])
    assert "--wait" not in renaming.stderr
