"""The judgement of the demo: everything that must hold, looked up in what is left on disk.

1. All work is done, each piece exactly once, and none before what it waited for.
2. Nothing that an agent noted as written is lost: it is in the worktree or in a snapshot.
3. No stale write came through: along each line of snapshots, and in the ledger for each issue, tokens
   only grow; and the agent that was paused until its work was given to another was refused.
4. Every snapshot verifies, the ledger has no gap, the chain of the audit trail holds.
5. Nothing is stuck: nobody holds anything, and an examination finds no damage.
"""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from holdfast.demo.agents import AgentExit, Stage
from holdfast.errors import AuditChainBroken, NotFound, Refused
from holdfast.findings import Severity
from holdfast.fs import durable
from holdfast.issues.model import State
from holdfast.repository import doctor
from holdfast.repository.checks import all_checks
from holdfast.repository.context import DESCRIPTORS, Descriptor
from holdfast.repository.overview import look_around
from holdfast.repository.repository import Repository
from holdfast.store.audit import AuditTrail, verify
from holdfast.trees.shared_dirs import located, read_shared_directories


class Audit(NamedTuple):
    """What was counted, and what is wrong. Nothing is wrong if there are no findings."""

    done: int
    attempts: int
    taken_over: int
    snapshots: int
    events: int
    entries: int
    findings: tuple[str, ...]


def examine(
    stage: Stage, issues: Sequence[str], ended: Sequence[AgentExit], *, finished: bool, paused: bool
) -> Audit:
    """Judge what the agents have left behind."""
    repository, ledger = stage.repository(), stage.ledger()
    descriptors = [document.record for _, document in repository.context.store.scan(DESCRIPTORS)]
    events = [each.event for each in ledger.ledger.events()]
    story = [entry.record for entry in stage.tracker().events()]
    claims = Counter(each.issue_id for each in story if each.type == "issue_claimed")
    findings = [
        *([] if finished else ["the agents did not come to an end"]),
        *_work(stage, issues, story),
        *_lost(stage, repository, descriptors),
        *_stale(descriptors, events, ended, paused=paused),
        *_verified(repository, descriptors),
        *(f"ledger: {each.message}" for each in ledger.verify().findings if each.severity == "error"),
        *_chain(repository),
        *_stuck(stage, repository),
    ]
    return Audit(
        done=sum(each.state is State.DONE for each in stage.tracker().snapshot()),
        attempts=sum(claims.values()),
        taken_over=sum(bool(each.unknown.get("taken_over_from")) for each in story),
        snapshots=len(descriptors),
        events=len(events),
        entries=sum(1 for _ in repository.context.store.entries(AuditTrail().stream)),
        findings=tuple(findings),
    )


def _work(stage: Stage, issues: Sequence[str], story: Sequence[Any]) -> Iterator[str]:
    snapshot = stage.tracker().snapshot()
    known = {issue.id: issue for issue in snapshot}
    done_at: dict[str, list[int]] = {}
    for position, event in enumerate(story):
        if event.type == "issue_state_changed" and event.unknown.get("to") == State.DONE.value:
            done_at.setdefault(event.issue_id, []).append(position)
    for issue in issues:
        times = len(done_at.get(issue, ()))
        if issue not in known:
            yield f"work lost: the issue {issue} is gone"
        elif times != 1:
            yield f"the work {known[issue].title} was done {times} times"
        elif any(done_at.get(on, [len(story)])[0] > done_at[issue][0] for on in known[issue].dependencies):
            yield f"the work {known[issue].title} was done before what it waits for"


def _lost(stage: Stage, repository: Repository, descriptors: Sequence[Descriptor]) -> Iterator[str]:
    """What was noted as written and is neither in the worktree nor in a snapshot of it."""
    places = repository.context.places
    for note in stage.noted():
        worktree, file = f"issue-{str(note['issue'])[:8]}", str(note["file"])
        trees = [places.tree(each.snapshot_id) for each in descriptors if each.worktree_id == worktree]
        paths = [places.payload(worktree) / file, *(_stored(tree, file) for tree in trees)]
        expected = f"{note['issue']} {note['token']} {file.rpartition('-')[2].partition('.')[0]}\n".encode()
        if not any(_content(path) == expected for path in paths):
            yield f"what was written is lost: {worktree}/{file}"


def _stored(tree: Path, file: str) -> Path:
    """Where a snapshot has a file: its directory may be that of an earlier one."""
    return located(tree, read_shared_directories(tree), os.fsencode(file))


def _stale(
    descriptors: Sequence[Descriptor], events: Sequence[Any], ended: Sequence[AgentExit], *, paused: bool
) -> Iterator[str]:
    parents = {each.snapshot_id: each for each in descriptors}
    for each in descriptors:
        before = parents.get(each.parent_id or "")
        same_line = before is not None and before.worktree_id == each.worktree_id
        if same_line and before is not None and (each.fencing_token or 0) < (before.fencing_token or 0):
            yield f"a stale write came through: snapshot {each.snapshot_id} on top of a later holder's"
    highest: dict[str, int] = {}
    for event in events:
        if event["type"] == "work_done":
            issue, token = event["issue_id"], event["claim_token"]
            if token < highest.get(issue, 0):
                yield f"a stale write came through: the ledger has {issue} done again by an earlier holder"
            highest[issue] = max(token, highest.get(issue, 0))
    if paused and not any(each.paused and each.exit_status == 5 for each in ended):
        yield "the agent that was paused past its lease was not refused when it went on"


def _verified(repository: Repository, descriptors: Sequence[Descriptor]) -> Iterator[str]:
    for each in descriptors:
        for problem in repository.snapshots.verify(each.snapshot_id):
            yield f"snapshot {each.snapshot_id} does not verify: {problem}"


def _chain(repository: Repository) -> Iterator[str]:
    try:
        for _ in verify(repository.context.store.entries(AuditTrail().stream)):
            pass
    except AuditChainBroken as broken:
        yield f"the chain of the audit trail is broken: {broken.message}"


def _stuck(stage: Stage, repository: Repository) -> Iterator[str]:
    for held in look_around(stage.root).holdings:
        if not held.reclaim.safe and held.kind != "file lock":
            yield f"still held: {held.kind} {held.what} by {held.who}"
    doctor.repair(repository.context, all_checks())
    for finding in doctor.examine(repository.context, all_checks()):
        if finding.severity is not Severity.NOTE:
            yield f"an examination finds: {finding.message}"


def _content(path: Any) -> bytes | None:
    try:
        return durable.read(path)
    except (NotFound, Refused):
        return None
