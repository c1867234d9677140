"""Agent rows: the holdings of an overview, grouped so that each agent is one row.

An agent is an actor working on one piece of work, so each leased worktree begins a row. An issue joins the row of the
worktree named after it; anything else joins the row of its process, or the only row of its actor. A holding that fits
no row begins a new row. An agent that waits but holds nothing also has a row.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import TYPE_CHECKING, NamedTuple

from holdfast.errors import Failure
from holdfast.locks.identity import Liveness
from holdfast.repository.compare import status
from holdfast.repository.holdings import Holding, HoldingWaiter

if TYPE_CHECKING:
    from holdfast.repository.landing_records import Landing
    from holdfast.repository.repository import Repository

SHORT_ID = 8
_ORDER = ("lease", "issue", "claim", "named lease", "operation", "repo lock", "file lock", "ledger lock")


class AwaitedHolding(NamedTuple):
    """Something that an agent waits for: its holder, the time until it expires, and the agent's position in the queue.
    For work that is to land, `kind` is `landing` and `what` is the branch."""

    kind: str
    what: str
    held_by: str
    time_left: float | None = None
    place: int | None = None

    def as_record(self) -> dict[str, object]:
        return self._asdict()


class AgentRow(NamedTuple):
    """An agent: its actor, work and worktree, when it acquired them and when they expire, and whether it is alive.
    `time_left` is the shortest of its leases and claims. `changed_files` counts the changes since the last snapshot;
    None if they were not counted."""

    actor: str
    work: str
    worktree: str | None
    issue_id: str | None
    since: str | None
    time_left: float | None
    liveness: Liveness
    changed_files: int | None
    waits_for: tuple[AwaitedHolding, ...]
    holdings: tuple[Holding, ...]

    def as_record(self) -> dict[str, object]:
        """The row as JSON values; each holding is the text `<kind> <what>`."""
        return {
            **self._asdict(),
            "liveness": self.liveness.value,
            "waits_for": [each.as_record() for each in self.waits_for],
            "holdings": [f"{each.kind} {each.what}" for each in self.holdings],
        }


class _Agent:
    """A row under construction."""

    def __init__(self, holding: Holding | None = None, waiter: HoldingWaiter | None = None) -> None:
        self.holdings = [] if holding is None else [holding]
        self.waiter = waiter
        self.waits_for: list[AwaitedHolding] = []

    @property
    def names(self) -> set[str]:
        """Its actor and its processes, as far as they are known."""
        of_waiter = () if self.waiter is None else (self.waiter.who, self.waiter.process)
        known = (name for each in self.holdings for name in (each.who, each.process))
        return {name for name in (*known, *of_waiter) if name}

    def first(self, kind: str) -> Holding | None:
        return next((each for each in self.holdings if each.kind == kind), None)

    def row(self) -> AgentRow:
        lease, issue = self.first("lease"), self.first("issue")
        times = [each.time_left for each in self.holdings if each.time_left is not None]
        starts = sorted(each.since for each in self.holdings if each.since)
        return AgentRow(
            actor=self._actor(),
            work=self._work(),
            worktree=lease.what if lease else None,
            issue_id=issue.what if issue else None,
            since=starts[0] if starts else self.waiter.since if self.waiter else None,
            time_left=min(times, default=None),
            liveness=self._liveness(),
            changed_files=None,
            waits_for=tuple(self.waits_for),
            holdings=tuple(self.holdings),
        )

    def _actor(self) -> str:
        """An actor, if any holding names one; else the process."""
        if self.waiter is not None:
            return self.waiter.who
        named = (each.who for each in self.holdings if each.process is not None and each.who != each.process)
        return next(named, self.holdings[0].who)

    def _work(self) -> str:
        issue = self.first("issue")
        if issue is not None:
            return f"{issue.what[:SHORT_ID]} {issue.title}".rstrip()
        if self.waiter is not None and self.waiter.purpose:
            return self.waiter.purpose
        lease = self.first("lease")
        if lease is not None and lease.purpose:
            return lease.purpose
        others = [each for each in self.holdings if each.kind != "lease"]
        return next((f"{each.kind} {each.what}: {each.purpose}".removesuffix(": ") for each in others), "")

    def _liveness(self) -> Liveness:
        """Dead if any of its holders is dead: what a dead process holds is stuck."""
        found = {each.liveness for each in self.holdings}
        if self.waiter is not None:
            found.add(self.waiter.liveness)
        return next((each for each in (Liveness.DEAD, Liveness.ALIVE) if each in found), Liveness.UNKNOWN)


def agent_rows(holdings: Iterable[Holding]) -> tuple[AgentRow, ...]:
    """One row per agent, in the order of their leases and claims. Locks that a command holds while it runs are left
    out: see `Holding.is_ours`."""
    visible = [each for each in holdings if not each.is_ours]
    agents: list[_Agent] = []
    for holding in sorted(visible, key=lambda each: _ORDER.index(each.kind)):
        agent = None if holding.kind == "lease" else _agent_of(agents, holding)
        if agent is None:
            agents.append(_Agent(holding))
        else:
            agent.holdings.append(holding)
    for holding in visible:
        for waiter in holding.waiting:
            awaited = AwaitedHolding(holding.kind, holding.what, holding.who, holding.time_left, waiter.place)
            _waiting_agent(agents, waiter, holding).waits_for.append(awaited)
    return tuple(each.row() for each in agents)


def worktree_of_issue(issue_id: str) -> str:
    """The name that `agent run` gives to the worktree of an issue."""
    return f"issue-{issue_id[:SHORT_ID]}"


def _agent_of(agents: Sequence[_Agent], holding: Holding) -> _Agent | None:
    """The agent that a holding belongs to, if only one fits."""
    fitting = [each for each in agents if holding.who in each.names or (holding.process or "") in each.names]
    if holding.kind == "issue":
        named = worktree_of_issue(holding.what)
        beside = [each for each in fitting if (lease := each.first("lease")) and lease.what == named]
        fitting = beside or [each for each in fitting if each.first("issue") is None]
    elif holding.kind == "operation":
        at = [each for each in agents if (lease := each.first("lease")) and lease.what == holding.what]
        fitting = at or fitting
    return _only(fitting, lambda each: holding.process in each.names)


def _waiting_agent(agents: list[_Agent], waiter: HoldingWaiter, holding: Holding) -> _Agent:
    """The agent that waits. An agent that holds what the waiter wants is a different agent of the same actor."""
    fitting = [each for each in agents if {waiter.who, waiter.process} & each.names and holding not in each.holdings]
    found = _only(fitting, lambda each: waiter.process in each.names)
    if found is None:
        found = _Agent(waiter=waiter)
        agents.append(found)
    return found


def _only(fitting: Sequence[_Agent], preferred: Callable[[_Agent], bool]) -> _Agent | None:
    """The only preferred agent, or else the only agent that fits; None if neither is unique."""
    best = [each for each in fitting if preferred(each)]
    return best[0] if len(best) == 1 else fitting[0] if len(fitting) == 1 else None


def with_landings(rows: Iterable[AgentRow], queued: Sequence[Landing]) -> tuple[AgentRow, ...]:
    """The rows, with the branches that the work of their worktrees is queued for; and one more row for each queued
    landing that fits none, because its actor holds nothing any more."""
    left = list(enumerate(queued, 1))
    found: list[AgentRow] = []
    for row in rows:
        mine = [each for each in left if row.worktree is not None and each[1].worktree_id == row.worktree]
        left = [each for each in left if each not in mine]
        found.append(row._replace(waits_for=(*row.waits_for, *map(_awaited, mine))))
    return (*found, *_landing_only(left))


def _awaited(numbered: tuple[int, Landing]) -> AwaitedHolding:
    position, landing = numbered
    return AwaitedHolding("landing", landing.branch, "", None, position)


def _landing_only(left: Sequence[tuple[int, Landing]]) -> Iterator[AgentRow]:
    for each in left:
        entry = each[1]
        work = f"{(entry.issue_id or '')[:SHORT_ID]} {entry.title}".strip()
        yield AgentRow(
            actor=entry.actor or "unknown",
            work=work,
            worktree=entry.worktree_id,
            issue_id=entry.issue_id,
            since=entry.queued_at,
            time_left=None,
            liveness=Liveness.UNKNOWN,
            changed_files=None,
            waits_for=(_awaited(each),),
            holdings=(),
        )


def count_changed_files(repository: Repository, worktrees: Sequence[str]) -> dict[str, int]:
    """The number of files that differ from the last snapshot (as `status` lists them), by worktree. A worktree that
    cannot be compared is left out. Examines every file."""
    from holdfast.git.program import side_by_side

    def count(worktree: str) -> int | None:
        try:
            found = status(repository.context, worktree).changes
        except Failure:
            return None
        return sum(each.kind != "d" for each in found)

    counts = side_by_side(count, worktrees)
    return {name: each for name, each in zip(worktrees, counts, strict=True) if each is not None}
