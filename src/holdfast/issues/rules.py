"""Rules for issues and their claims as pure functions; and a set of issues, to which they are applied.

1. An unclaimed issue is `backlog` while it waits for another one, and `ready` otherwise. The stored state
   follows where a transaction reaches it; the effective state is derived from the dependencies.
2. Only a dependency that is done releases its dependents. A rejected one never will: a person decides.
3. `done` requires every dependency done and every gate passed. With open gates the issue becomes `gated`,
   and `done` when the last gate passes.
4. `rejected` is final.
5. An issue cannot be reopened while an issue that depends on it is done.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from types import MappingProxyType
from typing import Any, Generic, NamedTuple, Protocol

import msgspec

from holdfast.clock import Now, format_ago, format_duration, format_instant, ttl_within
from holdfast.errors import Blocked, Failure, FencingMismatch, IssueClaimed, LockExpired, LockNotHeld, TransitionRefused
from holdfast.issues.model import (
    ARCHIVED_FROM,
    ISSUES,
    AnyIssue,
    ClaimId,
    ClaimRecord,
    GateStatus,
    Issue,
    IssueClaim,
    Listed,
    Priority,
    State,
    searched_text,
)

Lookup = Callable[[str], AnyIssue | None]  # finds an issue by id, as stored or as drafted

WAITING = _READY, _BACKLOG = (State.READY, State.BACKLOG)
FINISHED = (State.DONE, State.REJECTED, State.ARCHIVED)
NEW_GATE = {"status": GateStatus.PENDING.value, "updated_by": None, "updated_at": ""}  # dated when it is stored


def is_released(issue: AnyIssue | None) -> bool:
    """Whether an issue releases its dependents; a missing one does not."""
    if issue is None:
        return False
    return issue.state is State.DONE or (issue.state is State.ARCHIVED and issue.archived_from == State.DONE)


def open_dependencies(issue: AnyIssue, lookup: Lookup) -> list[str]:
    """The dependencies that the issue waits for."""
    return [each for each in issue.dependencies if not is_released(lookup(each))]


def state_of(issue: AnyIssue, lookup: Lookup) -> State:
    """The effective state of an issue."""
    if issue.state not in WAITING:
        return issue.state
    return _BACKLOG if issue.dependencies and open_dependencies(issue, lookup) else _READY


def in_line(issue: Issue, lookup: Lookup) -> Issue:
    """The issue, with the stored state that the rules require."""
    state = state_of(issue, lookup)
    return issue if state is issue.state else msgspec.structs.replace(issue, state=state)


def moved(issue: Issue, to: State, lookup: Lookup, dependents: Iterable[Issue]) -> Issue:
    """The issue moved to a state, or to the one that the rules require instead.

    Moving to `done` may give `gated`; moving to `backlog` gives `ready` if nothing is open.
    """
    now = state_of(issue, lookup)
    if to is now:
        return in_line(issue, lookup)
    if now is State.REJECTED:
        raise _refused(issue, now, to, "rejected is final")
    if now in FINISHED and to is not State.ARCHIVED:
        _check_reopening(issue, now, to, dependents)
    if to is State.ARCHIVED:
        unknown = {**issue.unknown, ARCHIVED_FROM: now.value}
        return msgspec.structs.replace(issue, state=to, unknown=unknown)
    unknown = {name: value for name, value in issue.unknown.items() if name != ARCHIVED_FROM}
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
    """A gated issue becomes done when its last gate passes and no dependency is open."""
    if issue.state is State.GATED and not issue.open_gates() and not open_dependencies(issue, lookup):
        return msgspec.structs.replace(issue, state=State.DONE)
    return issue


def check_not_blocked(issue: Issue, lookup: Lookup) -> None:
    """Raise `Blocked` if the issue waits for others."""
    waiting = open_dependencies(issue, lookup)
    if waiting:
        shown = ", ".join(_shown(each, lookup) for each in waiting)
        raise Blocked(f"{issue.id} waits for {shown}", issue_id=issue.id, blocked_by=waiting)


def check_changeable(issue: Issue, what: str) -> None:
    """Raise `TransitionRefused` if the issue is finished."""
    if issue.state in FINISHED:
        hint, state = "Reopen it first: 'holdfast issue update ID --state ready'.", issue.state.value
        raise TransitionRefused(f"{issue.id} is {state}: {what}", issue_id=issue.id, state=state, hint=hint)


def with_dependency(issue: Issue, on: Issue) -> Issue:
    """The issue with another dependency; a ready one goes back to the backlog."""
    if not is_released(on):
        check_changeable(issue, "it cannot depend on an open issue")
    state = State.BACKLOG if issue.state is State.READY and not is_released(on) else issue.state
    return msgspec.structs.replace(issue, dependencies=(*issue.dependencies, on.id), state=state)


def without_dependency(issue: Issue, on: str) -> Issue:
    left = tuple(each for each in issue.dependencies if each != on)
    return msgspec.structs.replace(issue, dependencies=left)


def with_gates(issue: Issue, gates: Iterable[str]) -> Issue:
    new = [gate for gate in dict.fromkeys(gates) if gate not in issue.gates_required]
    if not new:
        return issue
    check_changeable(issue, "it cannot require more gates")
    pending = {gate: NEW_GATE for gate in new if gate not in issue.gates_status}
    return msgspec.structs.replace(
        issue, gates_required=(*issue.gates_required, *new), gates_status={**issue.gates_status, **pending}
    )


def judged(issue: Issue, gate: str, status: GateStatus, by: str, at: str, lookup: Lookup) -> Issue:
    """The issue with one gate decided; a gated issue becomes done with its last gate."""
    if gate not in issue.gates_required:
        hint = f"Require it first: 'holdfast gate require {issue.id[:8]} {gate}'."
        raise TransitionRefused(f"{issue.id} does not require gate {gate}", issue_id=issue.id, gate=gate, hint=hint)
    if status is not issue.gate_status(gate):
        check_changeable(issue, "its gates can no longer change")
    known = issue.gates_status.get(gate)
    decided: object = status.value  # some programs store only this
    if not isinstance(known, str):
        known = known if isinstance(known, dict) else {}
        decided = {**known, "status": status.value, "updated_by": by, "updated_at": at}
    issue = msgspec.structs.replace(issue, gates_status={**issue.gates_status, gate: decided})
    return completed(issue, lookup)


def _check_reopening(issue: Issue, now: State, to: State, dependents: Iterable[Issue]) -> None:
    if now is State.ARCHIVED and to is State.DONE and is_released(issue):
        return
    resting = [each.id for each in dependents if each.state in (State.DONE, State.ARCHIVED)]
    if is_released(issue) and resting:
        raise _refused(issue, now, to, f"{', '.join(resting)} depends on it and is done")


def _refused(issue: Issue, now: State, to: State, why: str) -> TransitionRefused:
    message = f"{issue.id} is {now.value} and cannot become {to.value}: {why}"
    return TransitionRefused(message, issue_id=issue.id, state=now.value, wanted=to.value)


def _shown(issue_id: str, lookup: Lookup) -> str:
    issue = lookup(issue_id)
    if issue is None:
        return f"{issue_id} (which does not exist)"
    return f"{issue_id} ({issue.title}, {issue.state.value})"


DEFAULT_TTL = 3600.0
SHORTEST_TTL, LONGEST_TTL = 0.1, 30 * 24 * 3600.0


class IssueClaimRequest(NamedTuple):
    """A request to work on an issue; `secret` makes the claim's id unique."""

    assignee: str
    ttl: float
    secret: str
    purpose: str = ""
    holder: Mapping[str, str] = MappingProxyType({})


def grant(
    issue: Issue, record: ClaimRecord | None, now: Now, request: IssueClaimRequest, lookup: Lookup
) -> ClaimRecord:
    """The granted claim; else `IssueClaimed`, `Blocked` or `TransitionRefused`."""
    current = record.claim if record else None
    if issue.state is State.IN_PROGRESS:
        if current is None or not current.may_be_taken(now):
            raise held_by(issue, current, now)
    elif issue.state not in WAITING:
        state = issue.state.value
        raise TransitionRefused(f"{issue.id} is {state}: it cannot be claimed", issue_id=issue.id, state=state)
    elif issue.assignee not in (None, request.assignee):
        raise held_by(issue, None, now)
    check_not_blocked(issue, lookup)
    token = (record.token if record else 0) + 1
    claim = IssueClaim(
        claim_id=f"{issue.id}.{token}.{request.secret}",
        assignee=request.assignee,
        token=token,
        ttl=request.ttl,
        claimed_at=format_instant(now.now),
        renewed_at=format_instant(now.now),
        expires_at=format_instant(now.now + request.ttl),
        boot_expires_at=now.mark(request.ttl),
        purpose=request.purpose,
        holder=dict(request.holder),
    )
    return ClaimRecord(issue_id=issue.id, token=token, claim=claim)


def in_force(issue_id: str, record: ClaimRecord | None, now: Now, claim_id: ClaimId) -> IssueClaim:
    """The claim with this id, if it is in force; else nothing may be written."""
    current = record.claim if record else None
    if current is None or current.claim_id != claim_id.text:
        raise FencingMismatch(
            f"nothing was written: the claim {claim_id.text} is no longer the current one of {issue_id}",
            issue_id=issue_id,
            token=claim_id.token,
            current_token=record.token if record else None,
            held_by=current.assignee if current else None,
            hint="Your claim was released or taken over. See the issue, and claim it again if it is free.",
        )
    if current.is_expired(now):
        ago = format_duration(abs(current.time_left(now, for_others=False)))
        message = f"nothing was written: the claim on {issue_id} expired {ago} ago"
        hint = "Claim the issue again: nobody else has claimed it."
        raise LockExpired(message, issue_id=issue_id, token=current.token, hint=hint)
    return current


def authorised(
    issue: Issue, record: ClaimRecord | None, now: Now, claim_id: ClaimId | None, *, moving: bool
) -> ClaimRecord | None:
    """Refuse an unauthorised write; returns the record to store: using a claim also renews it.

    Without a claim anybody may add to an issue, but not move a claimed one (`moving`).
    """
    if claim_id is not None and claim_id.issue_id == issue.id:
        return renewed(issue.id, record, now, claim_id)
    current = record.claim if record else None
    if moving and current is not None and not current.may_be_taken(now):
        raise held_by(issue, current, now)
    return record


def renewed(
    issue_id: str, record: ClaimRecord | None, now: Now, claim_id: ClaimId, ttl: float | None = None
) -> ClaimRecord:
    """The record with the claim running for another ttl from now."""
    current = in_force(issue_id, record, now, claim_id)
    assert record is not None
    ttl = current.ttl if ttl is None else ttl
    claim = msgspec.structs.replace(
        current,
        ttl=ttl,
        renewed_at=format_instant(now.now),
        expires_at=format_instant(now.now + ttl),
        boot_expires_at=now.mark(ttl),
    )
    return msgspec.structs.replace(record, claim=claim)


def ended(record: ClaimRecord | None) -> ClaimRecord | None:
    """The record without its claim; the token stays."""
    return record and msgspec.structs.replace(record, claim=None)


def check_release(issue: Issue, record: ClaimRecord | None, now: Now, claim_id: ClaimId | None) -> None:
    """Refuse to release another holder's claim. Anybody may release an expired one."""
    if issue.state is not State.IN_PROGRESS and issue.assignee is None:
        raise LockNotHeld(f"{issue.id} is not claimed", issue_id=issue.id)
    current = record.claim if record else None
    if current is not None and not current.may_be_taken(now):
        if claim_id is None:
            raise held_by(issue, current, now)
        if claim_id.text != current.claim_id:
            in_force(issue.id, record, now, claim_id)


def is_abandoned(issue: AnyIssue, record: ClaimRecord | None, now: Now) -> bool:
    """Whether the issue is in progress under an expired claim."""
    current = record.claim if record else None
    return issue.state is State.IN_PROGRESS and current is not None and current.may_be_taken(now)


def held_by(issue: Issue, claim: IssueClaim | None, now: Now) -> IssueClaimed:
    """The refusal of a claim on an issue that is claimed or assigned."""
    if claim is None:
        message = f"{issue.id} is assigned to {issue.assignee or 'somebody'} ({issue.state.value})"
        hint = "Claim another issue, or release this one first: 'holdfast issue release ID'."
        return IssueClaimed(message, issue_id=issue.id, assignee=issue.assignee, hint=hint)
    left = claim.time_left(now, for_others=True)
    purpose = f", for: {claim.purpose}" if claim.purpose else ""
    return IssueClaimed(
        f"{issue.id} is claimed by {claim.assignee}{purpose}; "
        f"claimed {format_ago(claim.claimed_at, now.now)}, expires in {format_duration(left)}",
        issue_id=issue.id,
        assignee=claim.assignee,
        claim_id=claim.claim_id,
        expires_at=claim.expires_at,
        time_left=left,
    )


def checked_ttl(ttl: float) -> float:
    return ttl_within(ttl, SHORTEST_TTL, LONGEST_TTL)


class Broken(NamedTuple):
    """An issue, or the claim of one, that cannot be read."""

    issue_id: str
    failure: Failure

    @property
    def path(self) -> str:
        facts = self.failure.facts
        return str(facts.get("path") or facts.get("source") or ISSUES.key(self.issue_id).name)

    def as_record(self) -> dict[str, str]:
        failure = self.failure
        texts = {"code": failure.code, "message": failure.message, "hint": failure.hint}
        return {"id": self.issue_id, "path": self.path, **texts}


_URGENCY = {priority: -priority.rank for priority in Priority}
Place = tuple[int, str, str, int, str]


def place_of(issue: AnyIssue, rank: int) -> Place:
    """The place of an issue in the queue: highest priority first, then least recently updated. So work that keeps
    failing moves behind the rest of its priority each time. Issues of one batch keep the order of their ranks."""
    return (_URGENCY[issue.priority], issue.updated_at or issue.created_at, issue.created_at, rank, issue.id)


def is_notable(issue: AnyIssue) -> bool:
    """Whether an unfinished issue is in progress, gated, or has a failed gate."""
    return issue.state not in FINISHED and (issue.state not in WAITING or bool(issue.failed_gates()))


class Order(Protocol):
    """The unfinished issues by urgency; the notable ones, in any order; those that depend on others, in their order."""

    def queue(self) -> Iterator[Any]: ...
    def notable(self) -> Iterator[Any]: ...
    def dependent(self) -> Iterator[Any]: ...


class IssueSet(Generic[Listed]):
    """The issues of one tracker, or some of them, in order of creation."""

    index_problem = ""  # why the index cannot be used

    def __init__(
        self,
        issues: Mapping[str, Listed],
        moment: Now,
        broken: dict[str, Broken] | None = None,
        *,
        claims: Callable[[list[str]], Mapping[str, ClaimRecord | Broken | None]],
        lookup: Callable[[str], Listed | None] | None = None,
        text: Callable[[str], str] | None = None,
        order: Order | None = None,
    ) -> None:
        """`claims` reads the claims of issues. `lookup` finds issues that are not among these, too; `text` is the text
        of an issue for searches. `order` has the unfinished ones."""
        self.issues = issues
        self.broken_issues = broken or {}
        self.moment = moment
        self.lookup: Callable[[str], Listed | None] = lookup or issues.get
        self._text = text
        self._order = order
        self._read_claims = claims
        self._claims: Mapping[str, ClaimRecord | Broken | None] | None = None
        self._broken_claims: list[Broken] = []

    @property
    def broken(self) -> list[Broken]:
        """Unreadable issues, which are left out, and unreadable claims, if they were needed."""
        claims_ = [each for each in (self._claims or {}).values() if isinstance(each, Broken)]
        return [*self.broken_issues.values(), *claims_, *(each for each in self._broken_claims if each not in claims_)]

    def add_broken(self, broken: Broken) -> None:
        """Add a claim that turned out to be unreadable."""
        self._broken_claims.append(broken)

    def __iter__(self) -> Iterator[Listed]:
        return iter(self.issues.values())

    def __len__(self) -> int:
        return len(self.issues)

    def state(self, issue: AnyIssue) -> State:
        return state_of(issue, self.lookup)

    def with_states(self, issues: Iterable[Listed]) -> Iterator[tuple[Listed, State]]:
        """Many issues with their states."""
        lookup = self.lookup
        for each in issues:
            derived = each.dependencies or each.state is _BACKLOG
            yield each, state_of(each, lookup) if derived else each.state

    def text(self, issue: AnyIssue) -> str:
        """The text in which words are searched."""
        if self._text is not None:
            return self._text(issue.id)
        return searched_text(issue) if isinstance(issue, Issue) else issue.title.casefold()

    def claim(self, issue: AnyIssue) -> ClaimRecord | None:
        """The claim of an issue in progress; None also if it cannot be read, which never counts as expired. The first
        call reads the claims of all."""
        if self._claims is None:
            self._claims = self._read_claims([each.id for each in self.working()])
        found = self._claims.get(issue.id)
        return None if isinstance(found, Broken) else found

    def is_abandoned(self, issue: AnyIssue) -> bool:
        """Whether its claim has expired."""
        return issue.state is State.IN_PROGRESS and is_abandoned(issue, self.claim(issue), self.moment)

    def is_available(self, issue: AnyIssue, assignee: str | None = None) -> bool:
        """Whether work on it can begin: it is unclaimed and waits for nothing."""
        free = issue.state in WAITING and (issue.assignee is None or issue.assignee == assignee)
        if not free and not self.is_abandoned(issue):
            return False
        return not (issue.dependencies and open_dependencies(issue, self.lookup))

    def ready(self, assignee: str | None = None) -> list[Listed]:
        """The available issues, the most urgent first."""
        return list(self.by_urgency(assignee))

    def by_urgency(self, assignee: str | None = None) -> Iterator[Listed]:
        """The same, one at a time, as they are asked for."""
        found = self._sorted() if self._order is None else self._order.queue()
        return (issue for issue in found if self.is_available(issue, assignee))

    def working(self) -> Iterator[Listed]:
        """The issues in progress, in any order."""
        return (issue for issue in self.notable() if issue.state is State.IN_PROGRESS)

    def notable(self) -> Iterator[Listed]:
        """The notable issues, in any order."""
        return filter(is_notable, self) if self._order is None else self._order.notable()

    def _sorted(self) -> list[Listed]:
        rank = {issue.id: place_of(issue, at) for at, issue in enumerate(self) if issue.state not in FINISHED}
        return [self.issues[each] for each in sorted(rank, key=rank.__getitem__)]

    def waiting(self) -> list[Listed]:
        """The issues that wait for others; none if one does not."""
        found: list[Listed] = []
        for issue in self._sorted() if self._order is None else self._order.queue():
            if issue.state in WAITING:
                if not open_dependencies(issue, self.lookup):
                    return []
                found.append(issue)
        return found

    def blocked(self) -> list[tuple[Listed, list[str]]]:
        """The waiting issues, each with its open dependencies."""
        found = self if self._order is None else self._order.dependent()
        waiting = ((issue, open_dependencies(issue, self.lookup)) for issue in found)
        return [(issue, on) for issue, on in waiting if on and issue.state not in FINISHED]
