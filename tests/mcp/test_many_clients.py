"""Eight clients, each a process with its own server, share one repository; some clients and servers are killed.

No work is lost or done twice, everything acknowledged is stored, and nothing is torn.
"""

from __future__ import annotations

import json
import random
import sys
import time
from collections import Counter
from pathlib import Path
from typing import Any

import psutil
import pytest

from holdfast.issues.creating import NewIssue
from holdfast.repository.ledgers import open_ledger
from holdfast.repository.opening import open_tracker
from holdfast.repository.overview import look_around
from holdfast.repository.repository import Repository
from proof.effort import rounds
from tests.cli.commands import holdfast
from tests.issues.trackers import problems
from tests.locks.workers import Worker, Workers
from tests.mcp.clients import make_repo
from tests.mcp.crowd import client, read_notes
from tests.repository.stages import files_stored
from tests.support.homes import records_of

pytestmark = [
    pytest.mark.both_homes,
    pytest.mark.skipif(sys.platform == "win32", reason="the clients are forked"),
]

CLIENTS, ISSUES = 8, rounds(24, least=12)
VICTIMS = ("server", "client", "server", "client", "server")[: rounds(5)]
PATIENCE = 180.0


@pytest.fixture
def repo(scratch: Path) -> Path:
    root = make_repo(scratch / "repo")
    (root / "main/counter").write_text("0")
    assert holdfast("snapshot", "-m", "the beginning", cwd=root).returncode == 0
    tracker = open_tracker(records_of(root), actor="human:owner")
    tracker.create_all(
        [
            NewIssue(
                title=f"Issue {number}",
                key=str(number),
                depends_on=(str(number - 8),) if number % 3 == 2 and number > 8 else (),
            )
            for number in range(ISSUES)
        ]
    )
    return root


@pytest.mark.req("FL-21")
def test_eight_clients_some_killed_lose_nothing_and_do_nothing_twice(repo: Path, tmp_path: Path) -> None:
    notes = tmp_path / "notes"
    notes.mkdir()
    with Workers() as workers:
        crew = [workers.start(client(repo, notes, number)) for number in range(CLIENTS)]
        killed = kill_some(crew, notes)
        for worker in crew:
            if worker not in killed:
                assert worker.hear() == "done"
    told = read_notes(notes)
    audit(repo, told)
    audit_finds_planted_faults(repo, told)


def kill_some(crew: list[Worker], notes: Path) -> list[Worker]:
    """Kill a server or a client each time more work is done; the first four clients are spared."""
    dice = random.Random(21)
    killed: list[Worker] = []
    for number, what in enumerate(VICTIMS, 1):
        wait_for_work(notes, 3 * number)
        time.sleep(dice.random() / 5)
        if what == "client":
            victim = dice.choice([each for each in crew[4:] if each not in killed])
            victim.kill()
            killed.append(victim)
        else:
            kill_server(dice.choice([each for each in crew if each not in killed]))
    return killed


def kill_server(worker: Worker) -> None:
    """Kill the server of a client as soon as it has one."""
    end = time.monotonic() + PATIENCE
    while time.monotonic() < end:
        for process in psutil.Process(worker.pid).children():
            process.kill()
            return
        time.sleep(0.01)
    raise AssertionError("the client has no server")


def wait_for_work(notes: Path, count: int) -> None:
    end = time.monotonic() + PATIENCE
    while sum(each["what"] == "done" for each in read_notes(notes)) < count:
        assert time.monotonic() < end, "the clients make no progress"
        time.sleep(0.02)


# --- The audit --------------------------------------------------------------------------------------


def audit_finds_planted_faults(repo: Path, notes: list[dict[str, Any]]) -> None:
    """Run the same audit with one planted fault at a time."""
    done = next(each for each in notes if each["what"] == "done")
    counted = next(each for each in notes if each["what"] == "counted")
    event = next(each for each in notes if each["what"] == "event")
    stale = {**done, "token": done["token"] + 1}
    lost = {**event, "id": "another"}
    for planted in (done, stale, counted, lost, {"what": "unexpected"}):  # the first: done twice
        with pytest.raises(AssertionError):
            audit(repo, [*notes, planted])
    torn = records_of(repo) / ".jit/torn.json"
    torn.write_text('{"half": ')
    with pytest.raises(json.JSONDecodeError):
        audit_files(repo)
    torn.unlink()


def audit(repo: Path, notes: list[dict[str, Any]]) -> None:
    told = {what: [each for each in notes if each["what"] == what] for what in ("done", "event", "counted")}
    assert [each for each in notes if each["what"] == "unexpected"] == []
    assert any(each["what"] == "disconnected" for each in notes)
    audit_work(repo, told["done"], [each["id"] for each in notes if each["what"] == "added"])
    audit_ledger(repo, told["event"], told["done"])
    audit_counting(repo, told["counted"])
    audit_files(repo)


def audit_work(repo: Path, done: list[dict[str, Any]], added: list[str]) -> None:
    """Every issue is done by one client: acknowledged at most once, and completed once."""
    tracker = open_tracker(records_of(repo), actor="human:owner")
    found = tracker.snapshot()
    assert {found.state(issue).value for issue in found} == {"done"}
    assert len(found) >= ISSUES + len(added)
    assert set(added) <= set(found.issues)
    assert max(Counter(each["issue"] for each in done).values()) == 1
    completed = Counter(each.record.issue_id for each in tracker.events() if each.record.type == "issue_completed")
    assert completed == Counter(found.issues.keys())
    assert problems(tracker) == []
    tokens = {issue.id: tracker.claims.state(issue.id) for issue in found}
    for each in done:  # nobody claimed it after it was done
        record = tokens[each["issue"]]
        assert record is not None
        assert record.token == each["token"]
    repository = Repository(repo)
    for each in done:
        kept = files_stored(Repository(repo).context, each["snapshot"])
        assert kept[f"by-{each['token']}"] == each["issue"]
    for snapshot_id in repository.snapshots.all_ids():
        assert list(repository.snapshots.verify(snapshot_id)) == []


def audit_ledger(repo: Path, events: list[dict[str, Any]], done: list[dict[str, Any]]) -> None:
    """Every acknowledged event is stored under its sequence number, and the ledger is sound."""
    opened = open_ledger(records_of(repo))
    assert opened.verify().sound
    there = {each.sequence: each.event for each in opened.ledger.events()}
    assert len(there) == opened.ledger.sequence
    for each in events:
        assert there[each["sequence"]]["id"] == each["id"]
    recorded = {(each["issue_id"], each["claim_token"]) for each in there.values() if each["type"] == "work_done"}
    assert {(each["issue"], each["token"]) for each in done} <= recorded


def audit_counting(repo: Path, counted: list[dict[str, Any]]) -> None:
    """No number was written twice: no two clients held the lease at once."""
    values = [each["value"] for each in counted]
    assert len(values) == len(set(values))
    assert len(values) > CLIENTS
    assert max(values) <= int((repo / "main/counter").read_text())


def audit_files(repo: Path) -> None:
    """Everything opens cleanly, no file is torn, and no live process holds anything."""
    tracker = open_tracker(records_of(repo), actor="human:owner")
    more = tracker.create(NewIssue(title="One more: the store takes it"))
    tracker.delete(more.id)
    for directory in (".jvs", ".jit", "ledger", ".holdfast"):
        for path in (records_of(repo) / directory).rglob("*.json"):
            if "payload" not in path.parts:
                json.loads(path.read_text())
        for path in (repo / directory).rglob("*.jsonl"):
            assert all(json.loads(line) for line in path.read_text().splitlines())
    seen = look_around(repo)
    assert seen.unreadable == ()
    assert [each for each in seen.holdings if each.liveness.value == "alive"] == []
