"""A client that works through the queue like an agent and records every acknowledgement."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import anyio
from mcp import MCPError

from holdfast.repository.opening import open_tracker
from tests.locks.workers import Line
from tests.mcp.clients import ERAS, Agent, ToolFailed, connected
from tests.support.homes import records_of

TTL = "3s"
EXPECTED_CODES = {
    "E_LOCK_CONFLICT",  # another client works there
    "E_LOCK_TIMEOUT",
    "E_LOCK_NOT_HELD",  # it expired, and another client took over
    "E_LOCK_EXPIRED",
    "E_FENCING_MISMATCH",
    "E_CONSISTENCY_UNAVAILABLE",
}


class Notes:
    """The answers that one client received, as lines of JSON in a file that survives it."""

    def __init__(self, path: Path) -> None:
        self._file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND)

    def add(self, what: str, **facts: Any) -> None:
        os.write(self._file, json.dumps({"what": what, **facts}).encode() + b"\n")


def read_notes(directory: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for path in sorted(directory.iterdir()) for line in path.read_text().splitlines()]


def client(repo: Path, notes: Path, number: int) -> Callable[[Line], None]:
    """The task of one client process: work until nothing is left, reconnecting when its server dies."""

    async def live() -> None:
        own = Notes(notes / f"{number}-{os.getpid()}")
        while not all_done(repo):
            try:
                async with connected(cwd=repo, mode=ERAS[number % 2], name=f"client-{number}") as agent:
                    await work(agent, repo, own, number)
            except* (MCPError, OSError, anyio.ClosedResourceError, anyio.BrokenResourceError) as group:
                own.add("disconnected", problem=repr(group.exceptions[0]))

    def task(line: Line) -> None:
        anyio.run(live)
        line.say("done")

    return task


def all_done(repo: Path) -> bool:
    found = open_tracker(records_of(repo), actor="human:owner").snapshot()
    return all(found.state(issue).value == "done" for issue in found)


async def work(agent: Agent, repo: Path, notes: Notes, number: int) -> None:
    """Take work, do it, increment the shared counter and record it, until nothing is left."""
    while not all_done(repo):
        try:
            taken = await agent("claim_next_work", ttl=TTL, wait="10s")
            Path(taken["path"], f"by-{taken['claim_token']}").write_text(taken["id"])
            made = await agent("append_to_ledger", event={"type": "step", "by": number, "issue": taken["id"]})
            notes.add("event", sequence=made["sequence"], id=made["event"]["id"])
            await increment_shared_counter(agent, repo, notes)
            if number == 0 and taken["title"].endswith("0"):
                added = await agent("add_work", title=f"More of {taken['title']}", priority="high")
                notes.add("added", id=added["id"])
            done = await agent("finish_work", outcome="done", issue=taken["id"])
            notes.add("done", issue=done["issue_id"], token=done["claim_token"], snapshot=done["snapshot_id"])
        except ToolFailed as failed:
            if failed.code == "E_NOT_FOUND":
                await anyio.sleep(0.2)  # other clients hold the rest
            elif failed.code not in EXPECTED_CODES:
                notes.add("unexpected", record=failed.record)


async def increment_shared_counter(agent: Agent, repo: Path, notes: Notes) -> None:
    """Increment a number in a file, which goes wrong if two clients do it at once."""
    await agent("take_lease", worktree="main", wait="30s", ttl=TTL, purpose="counting")
    counter = repo / "main/counter"
    value = int(counter.read_text()) + 1
    await anyio.sleep(0.01)
    counter.write_text(str(value))
    await agent("release_lease", worktree="main")  # fails if the lease was lost: then the increment is not recorded
    notes.add("counted", value=value)
