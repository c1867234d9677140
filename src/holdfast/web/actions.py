"""Actions: each makes the library call of a command, and returns the equivalent command line."""

from __future__ import annotations

import shlex
from collections.abc import Callable
from typing import Any, NamedTuple

import msgspec

from holdfast.clock import parse_duration
from holdfast.errors import Failure, NotFound, UsageFailure
from holdfast.fs.names import in_utf_8
from holdfast.issues.creating import NewIssue
from holdfast.issues.model import ClaimId, GateStatus, Priority, State
from holdfast.issues.tracker import Update
from holdfast.locks.identity import calling_agent
from holdfast.web.layout import SHORT, path_of
from holdfast.web.workspaces import AUDIT, ISSUES, LANDING, Workspace

PURPOSE, BREAKING = "claimed in the browser", "release an expired lease"
TOPICS = (ISSUES, AUDIT, LANDING)
"""The records that an action may have changed: pages that show them are read again."""


class Done(NamedTuple):
    """The result of an action: a message, the equivalent command line, and the page that shows the result, if that is
    another one."""

    message: str
    command: str
    page: str = ""

    def as_json(self) -> bytes:
        return msgspec.json.encode({"ok": True, **self._asdict()})


class Given(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """The fields of an action. All of them are text, as forms send it."""


class CreateIssue(Given, frozen=True, kw_only=True):
    title: str
    description: str = ""
    priority: Priority = Priority.NORMAL
    labels: str = ""
    depends_on: str = ""


class EditIssue(Given, frozen=True, kw_only=True):
    issue: str
    title: str
    description: str = ""
    priority: Priority = Priority.NORMAL
    labels: str = ""


class MoveIssue(Given, frozen=True, kw_only=True):
    issue: str
    state: State
    claim: str = ""


class ClaimIssue(Given, frozen=True, kw_only=True):
    issue: str
    ttl: str = "8h"


class ReleaseIssue(Given, frozen=True, kw_only=True):
    issue: str
    claim: str = ""
    reason: str = ""


class DecideGate(Given, frozen=True, kw_only=True):
    issue: str
    gate: str


class BreakLease(Given, frozen=True, kw_only=True):
    worktree: str


class ChangeLanding(Given, frozen=True, kw_only=True):
    landing: str
    reason: str = "it was cancelled"


def create(workspace: Workspace, given: CreateIssue) -> Done:
    with workspace.tracker() as tracker:
        depends = tuple(tracker.find_id(each) for each in given.depends_on.split())
        new = NewIssue(
            title=given.title,
            description=_text(given.description),
            priority=given.priority,
            labels=tuple(given.labels.split()),
            depends_on=depends,
        )
        made = tracker.create(new)
    words = ["issue", "create"]
    words += ["--priority", given.priority.value] if given.priority is not Priority.NORMAL else []
    words += [part for each in given.labels.split() for part in ("--label", each)]
    words += [part for each in depends for part in ("--depends-on", each[:SHORT])]
    words += ["--description", _text(given.description)] if given.description else []
    words += ["--", given.title]
    return Done(f"created {made.id[:SHORT]}", _command(workspace, words), path_of(workspace, "issue", made.id))


def edit(workspace: Workspace, given: EditIssue) -> Done:
    labels, description = tuple(given.labels.split()), _text(given.description)
    with workspace.tracker() as tracker:
        found = tracker.find_id(given.issue)
        before = tracker.issue(found)
        gone = tuple(each for each in before.labels if each not in labels)
        added = tuple(each for each in labels if each not in before.labels)
        update = Update(
            title=given.title,
            description=description,
            priority=given.priority,
            add_labels=added,
            remove_labels=gone,
        )
        tracker.update(found, update)
    words = ["issue", "update", found[:SHORT]]
    words += ["--title", given.title] if given.title != before.title else []
    words += ["--priority", given.priority.value] if given.priority is not before.priority else []
    words += ["--description", description] if description != before.description else []
    words += [part for each in added for part in ("--label", each)]
    words += [part for each in gone for part in ("--remove-label", each)]
    return Done(f"changed {found[:SHORT]}", _command(workspace, words))


def move(workspace: Workspace, given: MoveIssue) -> Done:
    with workspace.tracker() as tracker:
        found = tracker.find_id(given.issue)
        moved = tracker.update(found, Update(state=given.state), claim=_claim(given.claim))
        state = tracker.state(moved)
    words = ["issue", "update", found[:SHORT], "--state", given.state.value]
    return Done(f"{found[:SHORT]} is {state.value}", _command(workspace, [*words, *_claimed(given.claim)]))


def claim(workspace: Workspace, given: ClaimIssue) -> Done:
    with workspace.tracker() as tracker:
        found = tracker.find_id(given.issue)
        ttl = parse_duration(given.ttl, setting="ttl")
        request = tracker.claims.request(ttl=ttl, purpose=PURPOSE, behalf_of=calling_agent())
        tracker.claims.claim(found, request)
    words = ["issue", "claim", found[:SHORT], "--ttl", given.ttl, "--purpose", PURPOSE]
    return Done(f"{found[:SHORT]} is yours for {given.ttl}", _command(workspace, words))


def release(workspace: Workspace, given: ReleaseIssue) -> Done:
    with workspace.tracker() as tracker:
        found = tracker.find_id(given.issue)
        tracker.claims.release(found, _claim(given.claim), reason=given.reason)
    words = ["issue", "release", found[:SHORT], *(["--reason", given.reason] if given.reason else [])]
    return Done(f"released {found[:SHORT]}", _command(workspace, [*words, *_claimed(given.claim)]))


def pass_gate(workspace: Workspace, given: DecideGate) -> Done:
    return _judge(workspace, given, GateStatus.PASSED, "pass")


def fail_gate(workspace: Workspace, given: DecideGate) -> Done:
    return _judge(workspace, given, GateStatus.FAILED, "fail")


def _judge(workspace: Workspace, given: DecideGate, status: GateStatus, verb: str) -> Done:
    with workspace.tracker() as tracker:
        found = tracker.find_id(given.issue)
        tracker.gates.judge(found, given.gate, status)
    return Done(f"{given.gate} {status.value}", _command(workspace, ["gate", verb, found[:SHORT], given.gate]))


def break_lease(workspace: Workspace, given: BreakLease) -> Done:
    """Steal an expired lease and release it, so that anybody can acquire it."""
    with workspace.repository() as repository:
        stolen = repository.steal(given.worktree, purpose=BREAKING)
        repository.leases.release(given.worktree, stolen.lease.lock_id)
    steal = _command(workspace, ["lease", "steal", "--worktree", given.worktree, "--purpose", BREAKING, "--export"])
    give_back = _command(workspace, ["lease", "release", "--worktree", given.worktree])
    return Done(f"the lease of {given.worktree} is free", f'eval "$({steal})" && {give_back}')


def cancel_landing(workspace: Workspace, given: ChangeLanding) -> Done:
    with workspace.landings() as landings:
        entry = landings.cancel(landings.find(given.landing).landing_id, given.reason)
    words = ["landing", "cancel", entry.landing_id, "--reason", given.reason]
    return Done(f"{entry.landing_id} is {entry.state.value}", _command(workspace, words))


def retry_landing(workspace: Workspace, given: ChangeLanding) -> Done:
    with workspace.landings() as landings:
        entry = landings.retry(landings.find(given.landing).landing_id, None)
    done = f"{entry.landing_id} is queued for {entry.branch}"
    return Done(done, _command(workspace, ["landing", "retry", given.landing, "--no-wait"]))


class Action(NamedTuple):
    """The fields that an action takes, and the function that carries it out."""

    given: type[Given]
    run: Callable[[Workspace, Any], Done]


ACTIONS: dict[str, Action] = {
    "create": Action(CreateIssue, create),
    "edit": Action(EditIssue, edit),
    "move": Action(MoveIssue, move),
    "claim": Action(ClaimIssue, claim),
    "release": Action(ReleaseIssue, release),
    "gate-pass": Action(DecideGate, pass_gate),
    "gate-fail": Action(DecideGate, fail_gate),
    "break-lease": Action(BreakLease, break_lease),
    "landing-cancel": Action(ChangeLanding, cancel_landing),
    "landing-retry": Action(ChangeLanding, retry_landing),
}


def carry_out(workspace: Workspace, name: str, content: bytes) -> Done:
    """Carry an action out; raises the failure of the library call, or `UsageFailure` for content of another form."""
    action = ACTIONS.get(name)
    if action is None:
        raise NotFound(f"there is no action {name}")
    try:
        given = msgspec.json.decode(content, type=action.given)
    except (msgspec.MsgspecError, UnicodeError) as error:
        raise UsageFailure(f"the action {name} cannot be understood: {error}") from None
    return action.run(workspace, given)


def refused(failure: Failure) -> bytes:
    """The answer to an action that failed."""
    return msgspec.json.encode({"ok": False, "error": in_utf_8(failure.as_record())})


def _claim(text: str) -> ClaimId | None:
    return ClaimId.parse(text) if text else None


def _claimed(text: str) -> list[str]:
    return ["--claim", text] if text else []


def _text(text: str) -> str:
    """A text from a browser, with the line breaks that other programs use."""
    return text.replace("\r\n", "\n")


def _command(workspace: Workspace, words: list[str]) -> str:
    """A command line; it names the repository if the server shows several."""
    return f"{shlex.join(['holdfast', *words[:2]])}{workspace.repo_option} {shlex.join(words[2:])}"
