"""The rules of issues, as pure functions: what state an issue is in, and where it may go from there.

1. An issue that nobody works on is `backlog` while it waits for another one, and `ready` otherwise.
   What is stored follows in the same transaction as far as that reaches; what counts is what follows
   from its dependencies, which is what everybody is told.
2. Only a dependency that is done releases. One that was rejected will never be: somebody has to decide.
3. `done` needs every dependency done and every gate passed. Without the gates it becomes `gated`, and
   done with the last of them.
4. `rejected` is the end.
5. What others rest on is not taken back: an issue is not reopened while one that depends on it is done.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable

import msgspec

from holdfast.errors import Blocked, TransitionRefused
from holdfast.issues.records import GateStatus, Issue, State

Lookup = Callable[[str], Issue | None]
"""Finds an issue by its id, as it is or as it is about to be."""

WAITING = (State.BACKLOG, State.READY)
FINISHED = (State.DONE, State.REJECTED, State.ARCHIVED)
_ARCHIVED_FROM = "archived_from"


def is_released(issue: Issue | None) -> bool:
    """Whether those who depend on an issue may go on; one that is not there releases nobody."""
    if issue is None:
        return False
    return issue.state is State.DONE or (
        issue.state is State.ARCHIVED and issue.unknown.get(_ARCHIVED_FROM) == State.DONE
    )


def open_dependencies(issue: Issue, lookup: Lookup) -> list[str]:
    """What the issue waits for."""
    return [each for each in issue.dependencies if not is_released(lookup(each))]


def state_of(issue: Issue, lookup: Lookup) -> State:
    """The state that an issue is in, whatever is stored about its waiting."""
    if issue.state not in WAITING:
        return issue.state
    return State.BACKLOG if open_dependencies(issue, lookup) else State.READY


def in_line(issue: Issue, lookup: Lookup) -> Issue:
    """The issue with its stored state as the rules have it."""
    state = state_of(issue, lookup)
    return issue if state is issue.state else msgspec.structs.replace(issue, state=state)


def moved(issue: Issue, to: State, lookup: Lookup, dependents: Iterable[Issue]) -> Issue:
    """The issue in the state asked for, or in the one that the rules have instead of it.

    Asking for `done` may give `gated`, asking for `backlog` gives `ready` if it waits for nobody.
    """
    now = state_of(issue, lookup)
    if to is now:
        return in_line(issue, lookup)
    if now is State.REJECTED:
        raise _refused(issue, now, to, "rejected is the end")
    if now in FINISHED and to is not State.ARCHIVED:
        _check_reopening(issue, now, to, dependents)
    if to is State.ARCHIVED:
        unknown = {**issue.unknown, _ARCHIVED_FROM: now.value}
        return msgspec.structs.replace(issue, state=to, unknown=unknown)
    unknown = {name: value for name, value in issue.unknown.items() if name != _ARCHIVED_FROM}
    issue = msgspec.structs.replace(issue, unknown=unknown)
    if to is State.REJECTED:
        return msgspec.structs.replace(issue, state=to)
    if to is State.BACKLOG:
        return in_line(msgspec.structs.replace(issue, state=State.BACKLOG), lookup)
    check_not_blocked(issue, lookup)
    if to in (State.DONE, State.GATED):
        return completed(msgspec.structs.replace(issue, state=State.GATED), lookup)
    return msgspec.structs.replace(issue, state=to)


def completed(issue: Issue, lookup: Lookup) -> Issue:
    """A gated issue turns done when its last gate is passed and nothing holds it back."""
    if issue.state is State.GATED and not issue.open_gates() and not open_dependencies(issue, lookup):
        return msgspec.structs.replace(issue, state=State.DONE)
    return issue


def check_not_blocked(issue: Issue, lookup: Lookup) -> None:
    """Refuse to work on, or to finish, what waits for others."""
    waiting = open_dependencies(issue, lookup)
    if waiting:
        raise Blocked(
            f"{issue.id} waits for {', '.join(_shown(each, lookup) for each in waiting)}",
            issue_id=issue.id,
            blocked_by=waiting,
        )


def check_changeable(issue: Issue, what: str) -> None:
    """Refuse to change what a finished issue was judged by."""
    if issue.state in FINISHED:
        raise TransitionRefused(
            f"{issue.id} is {issue.state.value}: {what}",
            issue_id=issue.id,
            state=issue.state.value,
            hint="Reopen it first: 'holdfast issue update ID --state ready'.",
        )


# --- Dependencies -----------------------------------------------------------------------------------


def with_dependency(issue: Issue, on: Issue) -> Issue:
    """The issue, waiting for another one too. One that was ready goes back to the backlog."""
    if not is_released(on):
        check_changeable(issue, "it cannot wait for something that is not done")
    state = State.BACKLOG if issue.state is State.READY and not is_released(on) else issue.state
    return msgspec.structs.replace(issue, dependencies=(*issue.dependencies, on.id), state=state)


def without_dependency(issue: Issue, on: str) -> Issue:
    """The issue, not waiting for another one any more; `in_line` says what that makes of it."""
    left = tuple(each for each in issue.dependencies if each != on)
    return msgspec.structs.replace(issue, dependencies=left)


# --- Gates ------------------------------------------------------------------------------------------


def with_gates(issue: Issue, gates: Iterable[str]) -> Issue:
    """The issue, requiring these gates too."""
    new = [gate for gate in dict.fromkeys(gates) if gate not in issue.gates_required]
    if not new:
        return issue
    check_changeable(issue, "a gate cannot be required of it any more")
    pending = {
        gate: {"status": GateStatus.PENDING.value, "updated_by": None, "updated_at": ""} for gate in new
    }
    return msgspec.structs.replace(
        issue,
        gates_required=(*issue.gates_required, *new),
        gates_status={
            **issue.gates_status,
            **{k: v for k, v in pending.items() if k not in issue.gates_status},
        },
    )


def judged(issue: Issue, gate: str, status: GateStatus, by: str, at: str, lookup: Lookup) -> Issue:
    """The issue, with one of its gates judged; a gated issue turns done with the last one passed."""
    if gate not in issue.gates_required:
        raise TransitionRefused(
            f"the gate {gate} is not required of {issue.id}",
            issue_id=issue.id,
            gate=gate,
            hint=f"Require it first: 'holdfast gate require {issue.id[:8]} {gate}'.",
        )
    if status is not issue.gate_status(gate):
        check_changeable(issue, "its gates cannot be judged any more")
    known = issue.gates_status.get(gate, {})
    verdict = {**known, "status": status.value, "updated_by": by, "updated_at": at}
    issue = msgspec.structs.replace(issue, gates_status={**issue.gates_status, gate: verdict})
    return completed(issue, lookup)


def _check_reopening(issue: Issue, now: State, to: State, dependents: Iterable[Issue]) -> None:
    if now is State.ARCHIVED and to is State.DONE and is_released(issue):
        return
    resting = [each.id for each in dependents if each.state in (State.DONE, State.ARCHIVED)]
    if is_released(issue) and resting:
        raise _refused(issue, now, to, f"{', '.join(resting)} depends on it and is done")


def _refused(issue: Issue, now: State, to: State, why: str) -> TransitionRefused:
    return TransitionRefused(
        f"{issue.id} is {now.value} and cannot become {to.value}: {why}",
        issue_id=issue.id,
        state=now.value,
        wanted=to.value,
    )


def _shown(issue_id: str, lookup: Lookup) -> str:
    issue = lookup(issue_id)
    if issue is None:
        return f"{issue_id} (which does not exist)"
    return f"{issue_id} ({issue.title}, {issue.state.value})"
