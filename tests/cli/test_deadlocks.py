"""Deadlocks between agents that run each command in its own process: the youngest waiter fails, the rest proceed."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any, Self

import pytest

from holdfast.repository.ledgers import init_ledger
from tests.cli.commands import HOLDFAST, PATIENCE, data, environment, holdfast, wait_until

if sys.platform == "win32":
    pytest.skip("the agents are POSIX shells", allow_module_level=True)


@pytest.fixture
def root(records: Path, scratch: Path) -> Path:
    init_ledger(records)
    return scratch / "repo"


class Agent:
    """A shell that runs a script of commands, as agents do."""

    def __init__(self, root: Path, name: str, *lines: str) -> None:
        script = root / f"{name}.sh"
        command = " ".join(f"'{each}'" for each in HOLDFAST)
        script.write_text(f'holdfast() {{ {command} "$@"; }}\n' + "\n".join(lines) + "\n")
        self.process = subprocess.Popen(
            ["sh", str(script)],
            cwd=root,
            env=environment(),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *problem: object) -> None:
        self.process.kill()
        self.process.communicate()

    def proceed(self) -> None:
        assert self.process.stdin is not None
        self.process.stdin.write("\n")
        self.process.stdin.flush()

    def answers(self) -> list[Any]:
        out, _ = self.process.communicate(timeout=PATIENCE)
        return [json.loads(line) for line in out.splitlines()]


def script(root: Path, name: str, line: str) -> Path:
    """Write a script with one command."""
    path = root / name
    path.write_text(" ".join(f"'{each}'" for each in HOLDFAST) + f" {line}\n")
    return path


def waiting(root: Path) -> dict[str, list[Any]]:
    seen = data(holdfast("who", "--json", "--repo", root))["holdings"]
    return {f"{each['kind']} {each['what']}": each["waiting"] for each in seen}


def test_a_deadlock_between_a_lease_and_a_claim_is_reported(root: Path) -> None:
    """The command under `holdfast run` waits for the claim, and the claimant waits for the lease."""
    inner = root / "inner.sh"
    command = " ".join(f"'{each}'" for each in HOLDFAST)
    inner.write_text(f"{command} ledger claim 2 --actor a --wait 60s --json\n")
    agents = [
        Agent(
            root,
            "second",
            "holdfast ledger claim 2 --actor b --ttl 1h --json",
            "read go",
            "holdfast lease acquire --wait 60s --ttl 1h --json",
            "holdfast ledger release 2 --actor b --json",
        )
    ]
    try:
        wait_until(lambda: "claim 2" in waiting(root))
        agents.append(Agent(root, "first", f"holdfast run --ttl 1h -- sh {inner}"))
        second, first = agents
        wait_until(lambda: waiting(root)["claim 2"])
        assert [(each["who"], each["place"]) for each in waiting(root)["claim 2"]] == [("a", 1)]
        second.proceed()
        taken, refused, released = second.answers()
        [served] = [each for each in first.answers() if "node_id" in (each["data"] or {})]
    finally:
        for agent in agents:
            agent.process.kill()
            agent.process.communicate()

    assert taken["ok"]
    assert refused["error"]["code"] == "E_DEADLOCK"
    told = refused["error"]["cycle"]
    assert [each["waits_for"] for each in told] == ["the lease on main", "the claim on 2"]
    assert [each["kind"] for each in told] == ["lease", "claim"]
    assert released["ok"]
    assert served["data"]["actor"] == "a"


@pytest.mark.skipif(sys.platform != "linux", reason="only Linux shows the holders of a file lock")
def test_a_deadlock_between_a_lease_and_a_file_lock_is_reported(root: Path) -> None:
    """The command under `holdfast lock run` waits for the lease, and the lease holder waits for the file lock."""
    inner = script(root, "inner.sh", "lease acquire --wait 60s --ttl 1h --json")
    first = Agent(
        root,
        "first",
        "export HOLDFAST_LOCK_ID=$(holdfast lease acquire --ttl 1h --field lock_id)",
        "read go",
        "holdfast lock run build.lock --wait 60s --json -- true 2>&1",
        "holdfast lease release --json",
    )
    with first:
        wait_until(lambda: "lease main" in waiting(root))
        with Agent(root, "second", f"holdfast lock run build.lock -- sh {inner}") as second:
            wait_until(lambda: waiting(root)["lease main"])
            first.proceed()
            refused, released = first.answers()
            [served] = second.answers()

    assert refused["error"]["code"] == "E_DEADLOCK"
    told = refused["error"]["cycle"]
    assert [each["kind"] for each in told] == ["file lock", "lease"]
    assert told[0]["name"] == str(root / "build.lock")
    assert released["ok"]
    assert served["ok"]


@pytest.mark.long
def test_in_a_deadlock_with_a_repo_lock_the_older_waiter_is_served(root: Path) -> None:
    """The waiter for the repo lock is the older one here."""
    inner = script(root, "inner.sh", "ledger claim 2 --actor b --wait 60s --json")
    lines = (
        "holdfast ledger claim 2 --actor a --ttl 1h --json",
        "holdfast repo-lock run project --data-dir data --wait 60s --json -- true 2>&1",
        "holdfast ledger release 2 --actor a --json",
    )
    command = "holdfast repo-lock run project --data-dir data -- sh -c"
    with Agent(root, "second", f"{command} 'read go; sh {inner}'") as second:
        wait_until(lambda: repo_locks(root))
        with Agent(root, "first", *lines) as first:
            wait_until(lambda: any(each["waiting"] for each in repo_locks(root)))
            second.proceed()
            [refused] = second.answers()
            taken, outcome, released = first.answers()

    assert refused["error"]["code"] == "E_DEADLOCK"
    assert [each["waits_for"] for each in refused["error"]["cycle"]] == [
        "the claim on 2",
        "the repo lock on project",
    ]
    assert (taken["ok"], released["ok"], outcome["data"]["exit_status"]) == (True, True, 0)


def repo_locks(root: Path) -> list[Any]:
    seen = data(holdfast("who", "--json", "--repo", root, "--data-dir", root / "data"))["holdings"]
    return [each for each in seen if each["kind"] == "repo lock"]


@pytest.mark.skipif(sys.platform != "linux", reason="only Linux shows the holders of a file lock")
def test_a_deadlock_of_two_file_locks_is_reported_without_a_repository(tmp_path: Path) -> None:
    inner = "'read go; sh {}'"
    one = script(tmp_path, "one.sh", "lock run b.lock --wait 60s --json -- true 2>&1")
    two = script(tmp_path, "two.sh", "lock run a.lock --wait 60s --json --conflict-status 9 -- true 2>&1")
    with (
        Agent(tmp_path, "first", f"holdfast lock run a.lock -- sh -c {inner.format(one)}") as first,
        Agent(tmp_path, "second", f"holdfast lock run b.lock -- sh -c {inner.format(two)}") as second,
    ):
        wait_until(lambda: is_locked(tmp_path / "a.lock") and is_locked(tmp_path / "b.lock"))
        first.proceed()
        wait_until(lambda: data(holdfast("lock", "status", "--json", tmp_path / "b.lock"))["waiting"])
        second.proceed()
        [refused], [served] = second.answers(), first.answers()
        assert second.process.returncode == 9
    assert refused["error"]["code"] == "E_DEADLOCK"
    assert len(refused["error"]["cycle"]) == 2
    assert served["data"]["exit_status"] == 0


def is_locked(path: Path) -> bool:
    return bool(data(holdfast("lock", "status", "--json", path))["holders"])
