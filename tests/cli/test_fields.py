"""`--field` means the same in every command that has it."""

from __future__ import annotations

import contextlib
import io
import json
import os
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import click
import pytest

from holdfast.cli.entry import root as holdfast_command
from holdfast.cli.entry import run
from holdfast.cli.lease import LEASE_FIELDS
from holdfast.cli.ledger_claims import CLAIM_FIELDS
from holdfast.cli.options import ISSUE_FIELDS, SNAPSHOT_FIELDS, WORKTREE_FIELDS

COMMANDS: dict[str, list[str]] = {
    "lease acquire": ["--ttl", "1h"],
    "lease steal": [],
    "snapshot": ["-m", "a note"],
    "worktree create": ["{new}"],
    "issue create": ["Another", "--depends-on", "{issue}"],
    "issue list": [],
    "issue search": ["first"],
    "issue show": ["{issue}"],
    "issue update": ["{issue}", "--label", "{new}"],
    "issue claim": ["{issue}"],
    "issue claim-next": [],
    "ready": [],
    "blocked": [],
    "ledger claim": ["{node}", "--actor", "me"],
    "ledger append": ['{"type":"note"}'],
}
"""Arguments for each command with `--field`. A new one must be added here."""

IN_GIT = ["worktree adopt"]  # needs a git home: see test_git_home.py

READING = ("issue list", "issue search", "issue show", "ready", "blocked")


def commands_with_field(command: click.Command = holdfast_command, path: tuple[str, ...] = ()) -> Iterator[str]:
    context = click.Context(command, info_name=" ".join(path))
    if isinstance(command, click.Group):
        for name in command.list_commands(context):
            below = command.get_command(context, name)
            assert below is not None
            yield from commands_with_field(below, (*path, name))
    if any("--field" in parameter.opts for parameter in command.params):
        yield " ".join(path)


def test_every_command_with_the_option_is_tested() -> None:
    assert sorted(commands_with_field()) == sorted([*COMMANDS, *IN_GIT])


class Answer(NamedTuple):
    """The result of a command. The commands run in this process because there are many."""

    returncode: int
    stdout: str


def call(*arguments: str) -> Answer:
    written = io.StringIO()
    with contextlib.redirect_stdout(written), contextlib.redirect_stderr(io.StringIO()):
        status = run(arguments)
    return Answer(status, written.getvalue())


class Place:
    """A repository with a ready issue, one blocked by it, and a ledger."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.count = 0
        assert call("init", str(root)).returncode == 0
        (root / "main/file").touch()
        os.chdir(root)
        for command in (["issue", "init"], ["ledger", "init"]):
            assert call(*command).returncode == 0
        self.issue = self.data("issue", "create", "The first")["id"]
        self.data("issue", "create", "The second", "--depends-on", self.issue)

    def data(self, *arguments: str) -> Any:
        return content(call(*arguments, "--json"))["data"]

    def call(self, command: str, *more: str) -> Answer:
        self.count += 1
        known = {"{issue}": self.issue, "{new}": f"new-{self.count}", "{node}": str(self.count)}
        words = [known.get(word, word) for word in COMMANDS[command]]
        return call(*command.split(), *words, *more)

    def prepare(self, command: str) -> None:
        """Undo the effects of the last call that would make the next one fail."""
        lease = self.data("lease", "status").get("lease")
        if lease is not None:
            call("lease", "release", "--lock-id", lease["lock_id"])
        claim = self.data("issue", "show", self.issue)["claim"]
        if claim is not None:
            call("issue", "release", self.issue, "--claim", claim["claim_id"])
        if command == "lease steal":
            call("lease", "acquire", "--ttl", "100ms")

    def state(self) -> dict[str, bytes]:
        """The content of every file except caches."""
        found = (path for path in self.root.rglob("*") if path.is_file() and "cache" not in path.parts)
        return {str(path): path.read_bytes() for path in found}


def content(answer: Answer) -> Any:
    (line,) = answer.stdout.splitlines()
    return json.loads(line)


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Place]:
    here = Path.cwd()
    try:
        yield Place(tmp_path_factory.mktemp("fields") / "root")
    finally:
        os.chdir(here)


@pytest.fixture(autouse=True)
def clean_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in list(os.environ):
        if name.startswith("HOLDFAST_"):
            monkeypatch.delenv(name)


def as_line(value: object) -> str:
    return value if isinstance(value, str) else "" if value is None else json.dumps(value)


@pytest.mark.parametrize("command", COMMANDS)
def test_the_option_means_the_same_everywhere(place: Place, command: str) -> None:
    place.prepare(command)
    before = place.state()
    wrong = place.call(command, "--field", "colour", "--json")
    refused = content(wrong)["error"]
    assert (wrong.returncode, refused["code"]) == (2, "E_USAGE")
    assert refused["message"] == "there is no field 'colour'"
    names = refused["hint"].removeprefix("The fields are: ").removesuffix(".").split(", ")
    assert place.state() == before, "an unknown field must be refused before anything changes"

    record = content(call_until_success(place, command, "--json"))["data"]
    records = record.get("issues", [record])
    assert records
    for each in records:
        assert set(each) == set(names), "the hint must list exactly the fields of the record"

    plain = call_until_success(place, command, "--field", names[0])
    told = content(call_until_success(place, command, "--field", names[0], "--json"))["data"]
    assert len(plain.stdout.splitlines()) == len(records)
    assert sorted(told) == ["field", "values"]
    assert told["field"] == names[0]
    assert len(told["values"]) == len(records)
    if command in READING:
        assert plain.stdout.splitlines() == [as_line(each) for each in told["values"]]
        assert told["values"] == [each[names[0]] for each in records]


def call_until_success(place: Place, command: str, *more: str) -> Answer:
    """Retry until the command succeeds: a lease must expire before it can be stolen."""
    place.prepare(command)
    for _ in range(1000):
        answer = place.call(command, *more)
        if answer.returncode == 0:
            return answer
        assert command == "lease steal", answer
        time.sleep(0.01)
    raise AssertionError("the command never succeeded")


def test_strings_are_printed_as_they_are_and_other_values_as_json(place: Place) -> None:
    def printed(field: str) -> str:
        return call("issue", "show", place.issue, "--field", field).stdout

    call("issue", "update", place.issue, "--context", "a.b=dotted")
    assert printed("title") == "The first\n"
    assert printed("gates_required") == "[]\n"
    assert printed("context.a.b") == "dotted\n"
    assert json.loads(printed("context")) == {"a.b": "dotted"}
    call("issue", "create", "Escaped\x1b[31m")
    assert "Escaped\\x1b[31m" in call("issue", "list", "--field", "title").stdout


def test_help_names_a_few_of_the_fields(place: Place) -> None:
    for names in (ISSUE_FIELDS, LEASE_FIELDS, CLAIM_FIELDS, SNAPSHOT_FIELDS, WORKTREE_FIELDS):
        assert len(set(names)) == len(names)
    shown = call("lease", "acquire", "--help").stdout
    assert "lock_id" in shown
    assert "boot_expires_at" not in shown
