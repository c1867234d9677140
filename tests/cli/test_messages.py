"""Messages for people: real file names, readable durations, correct plurals, limits, and one code for one situation."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.cli.commands import data, error, holdfast


@pytest.mark.parametrize(
    ("command", "create"),
    [
        ("status", "holdfast init DIR"),
        ("info", "holdfast init DIR"),
        ("lease list", "holdfast init DIR"),
        ("issue list", "holdfast issue init"),
        ("ready", "holdfast issue init"),
        ("ledger log", "holdfast ledger init"),
        ("ledger append {}", "holdfast ledger init"),
        ("who", "holdfast issue init"),
    ],
)
def test_what_is_not_initialised_has_one_code_and_the_command_that_creates_it(
    tmp_path: Path, command: str, create: str
) -> None:
    result = holdfast(*command.split(), "--json", cwd=tmp_path)
    assert (result.returncode, error(result)["code"]) == (3, "E_NOT_INITIALISED")
    assert f"'{create}'" in error(result)["hint"]
    named = holdfast(*command.split(), "--repo", tmp_path, "--json")
    assert (named.returncode, error(named)["code"]) == (3, "E_NOT_INITIALISED")


def test_a_damaged_event_is_named_by_its_file(tmp_path: Path) -> None:
    holdfast("ledger", "init", cwd=tmp_path)
    for _ in range(2):
        holdfast("ledger", "append", '{"type":"made"}', cwd=tmp_path)
    (tmp_path / "ledger/event-000002.json").write_text("{")
    for command in (("ledger", "log"), ("ledger", "claims")):
        said = holdfast(*command, cwd=tmp_path)
        assert "event-000002.json" in said.stderr, said
        assert "{number}" not in said.stdout + said.stderr


@pytest.mark.parametrize(
    ("command", "given", "limit"),
    [
        (("lease", "acquire", "--ttl", "30d"), "30d", "1d"),
        (("lease", "acquire", "--ttl", "1ms"), "1ms", "from 100ms"),
        (("ledger", "claim", "1", "--actor", "agent:a", "--ttl", "31d"), "31d", "1h"),
        (("issue", "claim-next", "--ttl", "31d"), "31d", "30d"),
    ],
)
def test_a_duration_out_of_range_is_named_as_people_write_it(
    tmp_path: Path, command: tuple[str, ...], given: str, limit: str
) -> None:
    for init in (("init", "."), ("issue", "init"), ("ledger", "init")):
        holdfast(*init, cwd=tmp_path)
    message = error(holdfast(*command, "--json", cwd=tmp_path))["message"]
    assert f"'{given}'" in message
    assert limit in message
    assert "e+" not in message


def test_the_help_names_the_limits_of_a_ttl() -> None:
    for command, limits in {
        "lease acquire": "from 100ms to 1d",
        "run": "from 100ms to 1d",
        "issue claim": "from 100ms to 30d",
        "agent run": "from 100ms to 1d",
        "ledger claim": "from 1s to 1h",
    }.items():
        assert limits in " ".join(holdfast(*command.split(), "--help").stdout.split()), command


def test_one_finding_is_not_a_plural(tmp_path: Path) -> None:
    holdfast("issue", "init", cwd=tmp_path)
    issues = [holdfast("issue", "create", "x", "--field", "id", cwd=tmp_path).stdout.strip() for _ in range(2)]
    for count, noun in ((1, "1 finding"), (2, "2 findings")):
        (tmp_path / f".jit/issues/{issues[count - 1]}.json").write_text("{")
        assert error(holdfast("issue", "validate", "--json", cwd=tmp_path))["message"] == f"the tracker has {noun}"


def test_finished_issues_are_listed_only_if_asked_for(tmp_path: Path) -> None:
    holdfast("issue", "init", cwd=tmp_path)
    created = {each: holdfast("issue", "create", each, "--field", "id", cwd=tmp_path).stdout.strip() for each in "abc"}
    holdfast("issue", "update", created["a"], "--state", "done", cwd=tmp_path)
    holdfast("issue", "update", created["b"], "--state", "rejected", cwd=tmp_path)

    def listed(*options: str) -> list[str]:
        found = [each["title"] for each in data(holdfast("issue", "list", "--json", *options, cwd=tmp_path))["issues"]]
        shown = holdfast("issue", "list", "--field", "title", *options, cwd=tmp_path).stdout.split()
        assert shown == found
        return found

    assert listed() == ["c"]
    assert listed("--all") == ["a", "b", "c"]
    assert listed("--state", "done") == ["a"]
    assert json.loads(holdfast("issue", "search", created["a"], "--json", cwd=tmp_path).stdout)["data"]["count"] == 1
