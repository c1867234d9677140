"""Agents whose every command is a process of its own wait in a circle: the youngest is told, others go on."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.cli.commands import HOLDFAST, PATIENCE, data, environment, holdfast, wait_until

if sys.platform == "win32":
    pytest.skip("the agents are POSIX shells", allow_module_level=True)


@pytest.fixture
def root(tmp_path: Path) -> Path:
    directory = tmp_path / "root"
    assert holdfast("init", directory).returncode == 0
    assert holdfast("ledger", "init", "--dir", directory).returncode == 0
    return directory


class Agent:
    """A shell that runs a script, line by line, as agents do."""

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

    def go_on(self) -> None:
        assert self.process.stdin is not None
        self.process.stdin.write("\n")
        self.process.stdin.flush()

    def said(self) -> list[Any]:
        out, _ = self.process.communicate(timeout=PATIENCE)
        return [json.loads(line) for line in out.splitlines()]


def waiting(root: Path) -> dict[str, list[Any]]:
    seen = data(holdfast("who", "--json", "--repo", root))["holdings"]
    return {f"{each['kind']} {each['what']}": each["waiting"] for each in seen}


def test_a_lease_held_by_run_and_a_claim_held_by_a_script(root: Path) -> None:
    """What runs under `holdfast run` waits for a claim; the claim's owner waits for the lease."""
    inner = root / "inner.sh"
    command = " ".join(f"'{each}'" for each in HOLDFAST)
    inner.write_text(f"{command} claim take 2 --owner a --wait 60s --json\n")
    agents = [
        Agent(
            root,
            "second",
            "holdfast claim take 2 --owner b --ttl 1h --json",
            "read go",
            "holdfast lock acquire --wait 60s --ttl 1h --json",
            "holdfast claim release 2 --owner b --json",
        )
    ]
    try:
        wait_until(lambda: "claim 2" in waiting(root))
        agents.append(Agent(root, "first", f"holdfast run --ttl 1h -- sh {inner}"))
        second, first = agents
        wait_until(lambda: waiting(root)["claim 2"])
        assert [(each["who"], each["place"]) for each in waiting(root)["claim 2"]] == [("a", 1)]
        second.go_on()
        taken, refused, released = second.said()
        [served] = [each for each in first.said() if "node_id" in (each["data"] or {})]
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
    assert served["data"]["owner"] == "a"
