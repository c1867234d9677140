"""The attention list: the reasons why work in a repository is stuck, or soon will be, for a person to look at.

`read_situation` reads what an overview does not have; `attention_list` is a pure function of the result.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from holdfast.clock import SYSTEM_CLOCK, ClockReading, format_duration
from holdfast.errors import Failure, format_size
from holdfast.findings import Check, Finding, Severity
from holdfast.fs import calls
from holdfast.fs.names import counted
from holdfast.issues import rules
from holdfast.issues.model import Issue, IssueSummary
from holdfast.issues.projection import IndexUnusable, projection_of
from holdfast.issues.reading import take_snapshot
from holdfast.issues.rules import IssueSet
from holdfast.locks.identity import Liveness, boot_clock_id
from holdfast.repository.agent_rows import with_landings
from holdfast.repository.checks import store_health
from holdfast.repository.context import WORKTREES
from holdfast.repository.doctor import examine
from holdfast.repository.holdings import Holding
from holdfast.repository.landing_records import LANDINGS, TARGETS, Landing, LandingState, LandingTarget, lease_of
from holdfast.repository.opening import tracker_of
from holdfast.repository.repository import Repository
from holdfast.store.open import open_store

if TYPE_CHECKING:
    from holdfast.repository.overview import Overview

LOW_DISK = 256 << 20  # bytes
SOON = 60.0  # seconds left, for a claim whose ttl is unknown
_LAST_PART = 0.25  # of the ttl: heartbeats renew every third, so two renewals were missed, or there is no heartbeat
_MOST_NAMED = 3


class Attention(NamedTuple):
    """Something that a person should look at, and the command that shows or resolves it. `kind` is stable: `expiring`,
    `expired`, `dead`, `gate`, `conflict`, `landing`, `queue`, `disk` or `store`."""

    kind: str
    subject: str
    message: str
    command: str
    severity: Severity = Severity.WARNING

    def as_record(self) -> dict[str, object]:
        return {**self._asdict(), "severity": self.severity.value}


class LandingQueues(NamedTuple):
    """The target branches, and all entries, the newest last."""

    targets: tuple[LandingTarget, ...] = ()
    entries: tuple[Landing, ...] = ()
    gone: frozenset[str | None] = frozenset()  # worktrees of unsettled entries that were removed since

    def queued(self) -> list[Landing]:
        """The entries without an outcome, by target, in the order in which they are served."""
        names = [each.name for each in self.targets]
        waiting = [each for each in self.entries if each.is_open and each.target in names]
        return sorted(waiting, key=lambda each: (names.index(each.target), *each.order()))

    def unsettled(self) -> list[Landing]:
        """The entries that conflict or failed, unless the same work was queued again since, or its worktree is gone."""
        latest = {each.worktree_id or each.issue_id or each.landing_id: each for each in self.entries}
        found = (each for each in latest.values() if each.state in (LandingState.CONFLICT, LandingState.FAILED))
        return [each for each in found if each.worktree_id not in self.gone]


class Situation(NamedTuple):
    """The input of the attention list."""

    overview: Overview
    issues: IssueSet[Issue] | IssueSet[IssueSummary] | None = None
    landings: LandingQueues = LandingQueues()
    findings: tuple[Finding, ...] = ()
    free_space: int | None = None


def read_situation(
    overview: Overview,
    *,
    address: str | None = None,
    issues: IssueSet[Issue] | IssueSet[IssueSummary] | None = None,
    in_full: bool = True,
) -> Situation:
    """Read what the attention list needs beyond an overview. Parts that are not in use or cannot be read are left out;
    `overview.unreadable` says why. `address` is the store of the issues, if it is not the configured one; `issues` are
    the issues from an earlier read, if none has changed since. The list itself does not need them `in_full`."""
    situation = Situation(overview, issues)
    if issues is None and overview.is_reachable:
        with contextlib.suppress(Failure):
            situation = situation._replace(issues=read_issues(overview.root, address, in_full=in_full))
    if overview.is_reachable:  # else every refresh would wait for the server again
        with contextlib.suppress(Failure), Repository(overview.root, to_examine=True) as repository:
            situation = situation._replace(findings=tuple(store_findings(repository)))
            situation = situation._replace(landings=read_landings(repository))
    with contextlib.suppress(OSError):
        situation = situation._replace(free_space=calls.free_space(overview.root))
    return situation


def read_landings(repository: Repository) -> LandingQueues:
    store = repository.context.store
    entries = (document.record for _, document in store.scan(LANDINGS))
    by_age = sorted(entries, key=lambda each: (each.queued_at, each.sequence))
    found = LandingQueues(tuple(document.record for _, document in store.scan(TARGETS)), tuple(by_age))
    named = {each.worktree_id for each in found.unsettled() if each.worktree_id is not None}
    return found._replace(gone=frozenset(each for each in named if store.read(WORKTREES.key(each)) is None))


def read_issues(root: Path, address: str | None, *, in_full: bool) -> IssueSet[Issue] | IssueSet[IssueSummary]:
    """All issues of a repository's tracker; unless `in_full`, perhaps only summaries of the unfinished ones. Raises
    `NotInitialised` if it has no tracker. Claims are not read."""
    place = tracker_of(root)
    with contextlib.closing(open_store(place, address)) as store:
        reading = ClockReading(boot_clock_id(), SYSTEM_CLOCK.boot(), store.skew)
        if not in_full:
            with contextlib.suppress(IndexUnusable):
                return projection_of(store, place).look(reading, finished=False)
        return take_snapshot(store, reading)


def store_findings(repository: Repository) -> list[Finding]:
    """The findings of the doctor's check of the store, which does not read the records."""
    return examine(repository.context, [Check("store", store_health)])


def completed(situation: Situation, changed_files: Mapping[str, int]) -> Situation:
    """The situation with a complete overview: the agents with their landings and changed files, and the attention
    list."""
    overview = situation.overview
    rows = with_landings(overview.agents, situation.landings.queued())
    rows = tuple(each._replace(changed_files=changed_files.get(each.worktree or "")) for each in rows)
    overview = overview._replace(agents=rows, attention=attention_list(situation))
    return situation._replace(overview=overview)


def attention_list(situation: Situation) -> tuple[Attention, ...]:
    """Everything that needs attention, the most severe first."""
    sources: tuple[Callable[[Situation], Iterator[Attention]], ...] = (
        _store, _disk, _holders, _gates, _conflicts, _landings, _queues
    )  # fmt: skip
    found = [each for source in sources for each in source(situation)]
    return tuple(sorted(found, key=lambda each: each.severity is not Severity.ERROR))


_error = partial(Attention, severity=Severity.ERROR)


def _store(situation: Situation) -> Iterator[Attention]:
    for each in situation.findings:
        yield Attention("store", each.subject, each.message, "holdfast doctor", each.severity)
    seen = {each.message for each in situation.findings}
    for problem in dict.fromkeys(each.problem for each in situation.overview.unreadable):
        if problem not in seen:
            yield _error("store", str(situation.overview.root), problem, "holdfast doctor")


def _disk(situation: Situation) -> Iterator[Attention]:
    left = situation.free_space
    if left is not None and left < LOW_DISK:
        message = f"the disk of the repository has {format_size(left)} left"
        yield _error("disk", str(situation.overview.root), message, "holdfast gc plan")


def _holders(situation: Situation) -> Iterator[Attention]:
    holdings = situation.overview.holdings
    actors = {each.process: each.who for each in holdings if each.process and each.who != each.process}
    for each in holdings:
        subject, who = f"{each.kind} {each.what}", actors.get(each.who, each.who)
        what = f"issue {each.what[:8]}" if each.kind == "issue" else subject
        if each.is_ours or (each.kind == "issue" and each.time_left is None):
            continue  # an issue without a limit waits to land: its queue is what may need attention
        if each.time_left is not None and each.time_left <= 0:
            yield Attention("expired", subject, f"{who} let the {what} expire", _command(each))
        elif each.liveness is Liveness.DEAD:
            free = "" if each.time_left is None else f"; free in {format_duration(round(each.time_left))}"
            yield _error("dead", subject, f"the process of {who}, which has the {what}, is gone{free}", _command(each))
        elif each.time_left is not None and each.time_left < _soon(each):
            left = format_duration(round(each.time_left))
            yield Attention("expiring", subject, f"the {what} of {who} expires in {left}", _command(each))


def _soon(holding: Holding) -> float:
    return SOON if holding.ttl is None else holding.ttl * _LAST_PART


def _command(holding: Holding) -> str:
    return holding.reclaim.how if holding.reclaim.safe else "holdfast who"


def _gates(situation: Situation) -> Iterator[Attention]:
    for issue in () if situation.issues is None else situation.issues.notable():
        if failed := issue.failed_gates():
            names = ", ".join(failed)
            message = f"{issue.id[:8]} {issue.title}: {names} failed"
            yield _error("gate", issue.id, message, f"holdfast issue show {issue.id[:8]}")


def _conflicts(situation: Situation) -> Iterator[Attention]:
    for each in situation.overview.conflicts:
        more = len(each.paths) - _MOST_NAMED
        paths = ", ".join(each.paths[:_MOST_NAMED]) + (f" and {more} more" if more > 0 else "")
        message = f"{each.worktree} conflicts with {each.other}" + (f": {paths}" if paths else "")
        yield Attention("conflict", each.worktree, message, f"holdfast conflicts --worktree {each.worktree}")


def _landings(situation: Situation) -> Iterator[Attention]:
    for each in situation.landings.unsettled():
        if (issue := _issue_of(situation, each)) is not None and issue.state in rules.FINISHED:
            continue
        word = "conflicts with" if each.state is LandingState.CONFLICT else "failed a check for"
        message = f"{each.worktree_id or each.commit[:12]} {word} {each.branch}: {each.title}".removesuffix(": ")
        yield _error("landing", each.landing_id, message, f"holdfast landing show {each.landing_id}")


def _issue_of(situation: Situation, entry: Landing) -> Issue | IssueSummary | None:
    return None if entry.issue_id is None or situation.issues is None else situation.issues.lookup(entry.issue_id)


def _can_land(situation: Situation, entry: Landing) -> bool:
    """Whether the issue of an entry waits for no other."""
    issue, issues = _issue_of(situation, entry), situation.issues
    return issue is None or issues is None or not rules.open_dependencies(issue, issues.lookup)


def _queues(situation: Situation) -> Iterator[Attention]:
    leases = (each for each in situation.overview.holdings if each.kind == "named lease")
    busy = {each.what for each in leases if each.liveness is not Liveness.DEAD and (each.time_left or 0) > 0}
    for target in situation.landings.targets:
        entries = counted(len(target.queue), "entry")
        if target.queue and target.waits_for:
            message = f"{entries} cannot land on {target.branch}: {target.waits_for}"
            yield Attention("queue", target.branch, message, "holdfast landing list")
        elif lease_of(target.name) not in busy and any(
            each.target == target.name and _can_land(situation, each) for each in situation.landings.queued()
        ):
            message = f"{entries} queued to land on {target.branch}, and no process is landing"
            yield Attention("queue", target.branch, message, "holdfast land --all")
    issues = situation.issues
    if issues is None:
        return
    waiting = () if any(each.state not in rules.WAITING for each in issues.notable()) else issues.waiting()
    if waiting:
        message = f"no issue can be claimed: all {len(waiting)} that are left wait for others"
        yield Attention("queue", "issues", message, "holdfast blocked")
