"""The check of the demo: everything that must hold, read from disk.

1. All work is done, each issue exactly once, and none before its dependencies.
2. No write that an agent noted is lost: it is in the worktree or in a snapshot.
3. No stale write came through: in each history, and in the ledger for each issue, tokens only grow; and
   the agent that was paused until another had done its work was refused.
4. Every snapshot verifies, the ledger has no gap, and the audit trail is intact.
5. Nothing is stuck: no lease, claim or lock is held, and the doctor finds no damage.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from holdfast.demo.agents import AgentExit, Stage
from holdfast.errors import AuditChainBroken, NotFound, Refused
from holdfast.findings import Severity
from holdfast.fs import durable
from holdfast.issues.model import State
from holdfast.repository.context import Descriptor
from holdfast.repository.overview import look_around
from holdfast.repository.repository import Repository
from holdfast.trees.shared_dirs import located, read_shared_directories


class Audit(NamedTuple):
    """Counts and findings. Without findings, the demo has passed."""

    done: int
    attempts: int
    taken_over: int
    snapshots: int
    events: int
    entries: int
    findings: tuple[str, ...]


def examine(stage: Stage, issues: Sequence[str], exits: Sequence[AgentExit], *, finished: bool, paused: bool) -> Audit:
    repository, ledger, tracker = stage.repository(), stage.ledger(), stage.tracker()
    descriptors = [each.descriptor for each in repository.snapshots.everything().entries]
    events = [each.event for each in ledger.ledger.events()]
    story = [entry.record for entry in tracker.events()]
    findings = [
        *([] if finished else ["the agents did not finish in time"]),
        *_work(stage, issues, story),
        *_lost(stage, repository, descriptors),
        *_stale(descriptors, events, exits, paused=paused),
        *_unverified(repository, descriptors),
        *(f"ledger: {each.message}" for each in ledger.verify().findings if each.severity == "error"),
        *_stuck(stage, repository),
    ]
    return Audit(
        done=sum(each.state is State.DONE for each in tracker.snapshot()),
        attempts=sum(each.type == "issue_claimed" for each in story),
        taken_over=sum(bool(each.unknown.get("taken_over_from")) for each in story),
        snapshots=len(descriptors),
        events=len(events),
        entries=sum(1 for _ in repository.audit().read()),
        findings=tuple(findings),
    )


def _work(stage: Stage, issues: Sequence[str], story: Sequence[Any]) -> Iterator[str]:
    known = {issue.id: issue for issue in stage.tracker().snapshot()}
    done_at: dict[str, list[int]] = {}
    for position, event in enumerate(story):
        if event.type == "issue_state_changed" and event.unknown.get("to") == State.DONE.value:
            done_at.setdefault(event.issue_id, []).append(position)
    for issue in issues:
        times = len(done_at.get(issue, ()))
        if issue not in known:
            yield f"work lost: the issue {issue} is gone"
        elif times != 1:
            yield f"the issue {known[issue].title} was done {times} times"
        elif any(done_at.get(on, [len(story)])[0] > done_at[issue][0] for on in known[issue].dependencies):
            yield f"the issue {known[issue].title} was done before its dependencies"


def _lost(stage: Stage, repository: Repository, descriptors: Sequence[Descriptor]) -> Iterator[str]:
    paths = repository.paths
    for note in stage.noted():
        worktree, file = f"issue-{str(note['issue'])[:8]}", str(note["file"])
        trees = [paths.tree(each.snapshot_id) for each in descriptors if each.worktree_id == worktree]
        stored = (located(tree, read_shared_directories(tree), os.fsencode(file)) for tree in trees)
        expected = f"{note['issue']} {note['token']} {file.rpartition('-')[2].partition('.')[0]}\n".encode()
        if not any(_content(path) == expected for path in (paths.payload(worktree) / file, *stored)):
            yield f"a write is lost: {worktree}/{file}"


def _content(path: Path) -> bytes | None:
    try:
        return durable.read(path)
    except (NotFound, Refused):
        return None


def _stale(
    descriptors: Sequence[Descriptor], events: Sequence[Any], exits: Sequence[AgentExit], *, paused: bool
) -> Iterator[str]:
    by_id = {each.snapshot_id: each for each in descriptors}
    for each in descriptors:
        parent = by_id.get(each.parent_id or "")
        same_worktree = parent is not None and parent.worktree_id == each.worktree_id
        if parent and same_worktree and (each.fencing_token or 0) < (parent.fencing_token or 0):
            yield f"a stale write came through: the snapshot {each.snapshot_id} follows a later holder's"
    highest: dict[str, int] = {}
    for event in events:
        if event["type"] == "work_done":
            issue, token = event["issue_id"], event["claim_token"]
            if token < highest.get(issue, 0):
                yield f"a stale write came through: in the ledger an earlier holder did {issue} again"
            highest[issue] = max(token, highest.get(issue, 0))
    if paused and not any(each.paused and each.exit_status == 5 for each in exits):
        yield "the agent that was paused past its lease was not refused when it resumed"


def _unverified(repository: Repository, descriptors: Sequence[Descriptor]) -> Iterator[str]:
    for each in descriptors:
        for problem in repository.snapshots.verify(each.snapshot_id):
            yield f"the snapshot {each.snapshot_id} does not verify: {problem}"
    try:
        repository.verify_audit()
    except AuditChainBroken as broken:
        yield f"the chain of the audit trail is broken: {broken.message}"


def _stuck(stage: Stage, repository: Repository) -> Iterator[str]:
    for held in look_around(stage.root).holdings:
        if not held.reclaim.safe and held.kind != "file lock":
            yield f"still held: {held.kind} {held.what} by {held.who}"
    repository.repair()
    for finding in repository.examine():
        if finding.severity is not Severity.NOTE:
            yield f"the doctor finds: {finding.message}"
