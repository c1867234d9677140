"""`holdfast who` and `top`: everything that is held is shown, truly and without harm to the terminal."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.cli.commands import RepoLockHeld, Running, data, holdfast, wait_until

if sys.platform == "win32":
    pytest.skip("the workers run in a POSIX shell", allow_module_level=True)


@pytest.fixture
def root(tmp_path: Path) -> Path:
    directory = tmp_path / "root"
    assert holdfast("init", directory).returncode == 0
    return directory


def holdings(root: Path, **env: str) -> dict[str, Any]:
    seen = data(holdfast("who", "--json", "--repo", root, env=env))
    assert seen["troubles"] == []
    return {f"{each['kind']} {each['what']}": each for each in seen["holdings"]}


def test_a_lease_is_shown_with_its_holder_its_time_and_its_line(root: Path) -> None:
    held = ("run", "--repo", root, "--ttl", "1h", "--purpose", "first")
    with Running(*held, "--", "sleep", "99") as first:
        wait_until(lambda: "lease main" in holdings(root))
        waits = ("run", "--repo", root, "--wait", "60s", "--purpose", "second", "--", "true")
        with Running(*waits) as second:
            wait_until(lambda: holdings(root)["lease main"]["waiting"])
            lease = holdings(root)["lease main"]
            second.kill()
        assert f":{first.pid}:" in lease["who"]
        assert (lease["liveness"], lease["purpose"]) == ("alive", "first")
        assert 0 < lease["time_left"] <= 3600
        assert lease["reclaim"]["safe"] is False
        assert [(each["place"], each["purpose"]) for each in lease["waiting"]] == [(1, "second")]
        first.kill()
        first.process.wait()
        wait_until(lambda: holdings(root)["lease main"]["liveness"] == "dead")


def test_claims_issues_and_repo_locks_are_shown_too(root: Path, tmp_path: Path) -> None:
    for command in (["issue", "init"], ["ledger", "init"], ["issue", "create", "Work"]):
        assert holdfast(*command, cwd=root).returncode == 0
    assert holdfast("claim", "take", "1.2", "--owner", "bob", cwd=root).returncode == 0
    claimed = holdfast("issue", "claim-next", "--actor", "agent:a", "--json", cwd=root)
    issue = data(claimed)["id"]
    with RepoLockHeld(tmp_path / "data", "project"):
        seen = holdings(root, HOLDFAST_DATA_DIR=str(tmp_path / "data"))

    assert seen["claim 1.2"]["who"] == "bob"
    assert seen[f"issue {issue}"]["who"] == "agent:a"
    assert seen["repo lock project"]["liveness"] == "alive"


def test_what_has_run_out_can_be_reclaimed_and_how_is_said(root: Path) -> None:
    assert holdfast("lock", "acquire", "--ttl", "200ms", cwd=root).returncode == 0
    wait_until(lambda: holdings(root)["lease main"]["reclaim"]["safe"])

    how = holdings(root)["lease main"]["reclaim"]["how"].split()[1:]

    assert holdfast(*how, cwd=root).returncode == 0
    assert holdings(root)["lease main"]["reclaim"]["safe"] is False


def test_what_somebody_typed_cannot_reach_the_terminal(root: Path) -> None:
    nasty = "\x1b[31mred\x07\r\nforged line"
    assert holdfast("lock", "acquire", "--ttl", "1h", "--purpose", nasty, cwd=root).returncode == 0

    shown = holdfast("who", cwd=root).stdout

    assert "\x1b" not in shown
    assert "\x07" not in shown
    assert len(shown.splitlines()) == 2
    assert holdings(root)["lease main"]["purpose"] == nasty


def test_looking_changes_nothing(root: Path) -> None:
    def everything() -> dict[str, bytes]:
        return {str(path): path.read_bytes() for path in sorted(root.rglob("*")) if path.is_file()}

    before = everything()
    holdfast("who", cwd=root)

    assert everything() == before


def test_nothing_held_is_said_and_so_is_a_place_without_anything(root: Path, tmp_path: Path) -> None:
    assert holdfast("who", cwd=root).stdout == "Nobody holds anything.\n"
    assert holdfast("who", cwd=tmp_path).returncode == 3


def test_top_gives_a_look_per_line_to_programs(root: Path) -> None:
    result = holdfast("top", "--count", "3", "--every", "10ms", "--json", cwd=root)

    looks = [json.loads(line) for line in result.stdout.splitlines()]
    assert [each["data"]["holdings"] for each in looks] == [[], [], []]


@pytest.mark.skipif(sys.platform != "linux", reason="needs a pseudo-terminal as Linux has it")
def test_top_draws_on_a_terminal_and_leaves_it_as_it_was(root: Path) -> None:
    import pty
    import subprocess

    from tests.cli.commands import HOLDFAST, environment

    main, terminal = pty.openpty()
    command = [*HOLDFAST, "top", "--count", "2", "--every", "10ms", "--repo", str(root)]
    process = subprocess.Popen(command, stdout=terminal, stderr=terminal, env=environment({"TERM": "xterm"}))
    os.close(terminal)
    drawn = b""
    with os.fdopen(main, "rb", buffering=0) as screen:
        while True:
            try:
                part = screen.read(4096)
            except OSError:
                break
            if not part:
                break
            drawn += part
    assert process.wait(30) == 0
    assert b"Nobody holds anything." in drawn
    assert b"\x1b[?1049h" in drawn  # the other screen
    assert b"\x1b[?1049l" in drawn  # and back
