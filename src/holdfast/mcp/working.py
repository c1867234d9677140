"""The steps about work and its record. They run in worker threads."""

from __future__ import annotations

import contextlib
from functools import partial

from holdfast.clock import parse_duration
from holdfast.errors import FencingMismatch, LockExpired, LockNotHeld
from holdfast.issues import reading
from holdfast.issues.claims import Claimed
from holdfast.issues.creating import NewIssue
from holdfast.issues.model import Priority
from holdfast.ledger import log
from holdfast.mcp import arguments
from holdfast.mcp.calls import Call, Plain
from holdfast.mcp.held import Place, Work
from holdfast.repository.agent import AgentContext, AssignmentOptions, take
from holdfast.repository.overview import look_around


def who(call: Call, given: arguments.Who) -> Plain:
    return look_around(call.project.root, repo_locks=call.project.repo_locks()).as_record()


def claim_next_work(call: Call, given: arguments.ClaimNextWork) -> Plain:
    project = call.project
    repository = project.repository()
    workshop = AgentContext(repository, project.tracker(call.actor), project.ledger_if_any())
    wish = AssignmentOptions(
        issue_id=given.issue,
        worktree=given.worktree,
        assignee=call.actor,
        gate=given.gate,
        ttl=parse_duration(given.ttl, setting="ttl"),
        wait=parse_duration(given.wait, setting="wait"),
        by=call.client,
        client=project.settings.client,
        cancelled=call.cancelled,
    )
    with contextlib.ExitStack() as end:
        assignment = end.enter_context(take(workshop, wish))
        work = Work(Place(repository.root, assignment.lease.worktree), assignment, end.pop_all())
    call.held.keep_work(work)
    call.undo = partial(_dropped, call, assignment.issue.id)
    claimed = Claimed(assignment.issue, assignment.claim.claim, assignment.taken_over_from)
    return {
        **reading.claimed_issue_to_json(claimed),
        "description": assignment.issue.description,
        "worktree_id": assignment.lease.worktree,
        "path": str(assignment.path),
        "lock_id": assignment.lease.lock_id,
        "fencing_token": assignment.lease.token,
        "broken": reading.unreadable_issues_to_json(assignment.broken),
    }


def _dropped(call: Call, issue: str) -> None:
    call.held.take_work(issue).end.close()


def finish_work(call: Call, given: arguments.FinishWork) -> Plain:
    work = call.held.take_work(given.issue)
    assignment = work.assignment
    try:
        if given.outcome == "done":
            outcome = assignment.succeed()
        elif given.outcome == "failed":
            outcome = assignment.fail(given.reason or "it was given up")
        else:
            outcome = assignment.put_back(given.reason or "was given back")
    except (LockNotHeld, LockExpired, FencingMismatch):
        work.end.close()  # it is not ours any more
        raise
    except BaseException:
        call.held.keep_work(work)  # still ours: it can be tried again, or given up
        raise
    work.end.close()
    return reading.outcome_to_json(outcome, assignment)


def add_work(call: Call, given: arguments.AddWork) -> Plain:
    tracker = call.project.tracker(call.actor)
    new = NewIssue(
        title=given.title,
        description=given.description,
        priority=Priority(given.priority),
        depends_on=tuple(map(tracker.find_id, given.depends_on)),
        labels=tuple(given.labels),
    )
    [created] = tracker.create_all([new])
    return reading.created_issues_to_json(created)


def append_to_ledger(call: Call, given: arguments.AppendToLedger) -> Plain:
    ledger = call.project.ledger()
    if given.if_sequence is None:
        return log.event_to_json(ledger.append(given.event))
    return log.event_to_json(ledger.append_if_sequence(given.event, given.if_sequence))
