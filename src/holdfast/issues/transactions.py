"""How every operation on issues is made: look without locks, name what it rests on, decide, commit.

Which documents a transaction names must be known before it begins, and which those are depends on what
they hold. So each operation looks first, without locks, and names what it found. Inside, under the
locks, it sees what is there now; if that leads to a document that was neither named nor looked at,
`Changed` is raised and it looks again.

An issue rests on what it depends on, and what depends on it rests on it: all of these are named, up to
`MOST_NAMED`. Beyond that, what was read without locks has to do for *stored* states, which are only a
convenience: what anybody is told, and what may be claimed, follows from the dependencies themselves.

A neighbour that cannot be read is not named either: it counts as not done, which keeps back whoever waits
for it and nobody else. Where it must be known what such a one depends on, or whether it is done, the
operation is refused.
"""

from __future__ import annotations

import time
import uuid
from collections.abc import Callable, Iterable, Mapping
from typing import Any, NamedTuple, TypeVar, cast

import msgspec

from holdfast.clock import SKEW, SYSTEM_CLOCK, Clock, ClockReading, Now, format_instant
from holdfast.errors import Blocked, Changed, Failure, NotFound, NotInitialised
from holdfast.fs.names import is_safe_name
from holdfast.issues import rules
from holdfast.issues.model import (
    CLAIMS,
    DEPENDENTS,
    EVENTS,
    GRAPH,
    INDEX,
    ISSUES,
    ClaimRecord,
    Dependents,
    Graph,
    Index,
    Issue,
    IssueEvent,
    State,
)
from holdfast.issues.reading import (
    TOLERANT_ISSUES,
    Broken,
    IssueSet,
    look_at,
    misnamed,
    read_issue,
    take_snapshot,
)
from holdfast.locks.identity import boot_clock_id
from holdfast.locks.retry import RetryConfig, retry_with_backoff
from holdfast.store.model import (
    Append,
    Change,
    Create,
    Decision,
    Delete,
    Key,
    Replace,
    Store,
    Stream,
    Unreadable,
    View,
)

MOST_RECENT = 256
"""How many of the last additions of dependencies are remembered."""

_NUMBERS = 1 << 128


class Draft:
    """What is about to be committed. Issues that were named are looked up in the view, others in
    `evidence`: what was read before, without locks. About one that is in neither, nothing is known."""

    def __init__(
        self,
        view: View,
        moment: Now,
        *,
        seed: int,
        actor: str,
        named: Iterable[str],
        evidence: Mapping[str, Issue | None],
    ) -> None:
        self.view = view
        self.moment = moment
        self.at = format_instant(moment.now)
        self.actor = actor
        self._seed = seed
        self._named = frozenset(named)
        self._evidence = evidence
        self._issues: dict[str, Issue | None] = {}
        self._others: dict[Key[Any], object] = {}
        self._events: list[IssueEvent] = []
        self._told: set[str] = set()

    # --- Issues ------------------------------------------------------------------------------------

    def lookup(self, issue_id: str) -> Issue | None:
        """An issue as it shall be."""
        if issue_id in self._issues:
            return self._issues[issue_id]
        if issue_id in self._named:
            found = self.view.get(ISSUES.key(issue_id))
            if found is not None and found.id != issue_id:
                raise misnamed(issue_id, found)
            return found
        if issue_id in self._evidence:
            return self._evidence[issue_id]
        raise Changed(f"{issue_id} came into play while this was being decided", issue_id=issue_id)

    def issue(self, issue_id: str) -> Issue:
        """An issue that must be there."""
        found = self.lookup(issue_id)
        if found is None:
            raise no_issue(issue_id)
        return found

    def put(self, issue: Issue, *, told: bool = False) -> Issue:
        """Let an issue be this. `told`: an event of its own says which state it goes to."""
        before = self.view.get(ISSUES.key(issue.id))
        if before == issue:
            self._issues.pop(issue.id, None)
            return issue
        created_at = issue.created_at or self.at
        gates = {
            name: {**each, "updated_at": each.get("updated_at") or self.at}
            for name, each in issue.gates_status.items()
        }
        issue = msgspec.structs.replace(issue, created_at=created_at, updated_at=self.at, gates_status=gates)
        self._issues[issue.id] = issue
        if told or before is None:
            self._told.add(issue.id)
        return issue

    def drop(self, issue_id: str) -> None:
        """Let an issue be gone, with all that belongs to it."""
        self._issues[issue_id] = None
        for family in (CLAIMS, DEPENDENTS):
            self._others[family.key(issue_id)] = None

    def settle(self, issue_ids: Iterable[str]) -> None:
        """Bring the stored state of issues in line with what they depend on."""
        for issue_id in issue_ids:
            issue = self.lookup(issue_id)
            if issue is not None:
                self.put(rules.in_line(issue, self.lookup))

    # --- What belongs to them ----------------------------------------------------------------------

    def get(self, key: Key[Any]) -> Any:
        """Another document as it shall be."""
        return self._others[key] if key in self._others else self.view.get(key)

    def set(self, key: Key[Any], record: object) -> None:
        """Let another document be this."""
        self._others[key] = record

    def index(self) -> Index:
        found = self.get(INDEX)
        if found is None:
            raise NotInitialised("there is no issue tracker here")
        assert isinstance(found, Index)
        return found

    def claim(self, issue_id: str) -> ClaimRecord | None:
        found = self.get(CLAIMS.key(issue_id))
        assert found is None or isinstance(found, ClaimRecord)
        return found

    def set_claim(self, issue_id: str, record: ClaimRecord | None) -> None:
        if record != self.claim(issue_id):
            self.set(CLAIMS.key(issue_id), record)

    def end_claim_unless_working(self, issue: Issue) -> None:
        """Who has finished, or was sent back, holds no claim any more."""
        record = self.claim(issue.id)
        if record is not None and issue.state not in (State.IN_PROGRESS, State.GATED):
            self.set_claim(issue.id, rules.ended(record))

    def dependents(self, issue_id: str) -> tuple[str, ...]:
        found = self.get(DEPENDENTS.key(issue_id))
        return found.dependents if isinstance(found, Dependents) else ()

    def set_dependents(self, issue_id: str, dependents: Iterable[str]) -> None:
        known = self.get(DEPENDENTS.key(issue_id)) or Dependents(issue_id=issue_id)
        wanted = tuple(dict.fromkeys(dependents))
        if wanted != known.dependents:
            record = msgspec.structs.replace(known, dependents=wanted) if wanted else None
            self.set(DEPENDENTS.key(issue_id), record)

    def add_dependent(self, on: str, issue_id: str) -> None:
        self.set_dependents(on, (*self.dependents(on), issue_id))

    def drop_dependent(self, on: str, issue_id: str) -> None:
        self.set_dependents(on, (each for each in self.dependents(on) if each != issue_id))

    def add_edges(self, edges: Iterable[tuple[str, str]]) -> None:
        """Count additions to the graph, so that those who have walked it without locks can tell."""
        graph, new = self.get(GRAPH) or Graph(), list(edges)
        if new:
            recent = [*graph.recent, *new][-MOST_RECENT:]
            self.set(GRAPH, msgspec.structs.replace(graph, epoch=graph.epoch + len(new), recent=recent))

    # --- The outcome -------------------------------------------------------------------------------

    def record(self, type_: str, issue_id: str, **facts: object) -> None:
        """Say what happened; every event has an id of its own, and says who did it."""
        number = str(uuid.UUID(int=(self._seed + len(self._events)) % _NUMBERS))
        self._events.append(
            IssueEvent(
                type=type_,
                id=number,
                issue_id=issue_id,
                timestamp=self.at,
                unknown={**facts, "by": self.actor},
            )
        )

    def changes(self) -> list[Change]:
        """All of it."""
        for issue_id, issue in self._issues.items():
            before = self.view.get(ISSUES.key(issue_id))
            if issue is not None and before is not None and issue_id not in self._told:
                self._tell_state(before.state, issue)
        documents = {ISSUES.key(issue_id): issue for issue_id, issue in self._issues.items()} | self._others
        made = [
            change for key, record in documents.items() if (change := self._change(key, record)) is not None
        ]
        return [*made, *(Append(EVENTS, event) for event in self._events)]

    def _tell_state(self, before: State, issue: Issue) -> None:
        if before is not issue.state:
            self.record("issue_state_changed", issue.id, **{"from": before.value, "to": issue.state.value})
            if issue.state is State.DONE:
                self.record("issue_completed", issue.id)

    def _change(self, key: Key[Any], record: object) -> Change | None:
        before = self.view.get(key)
        if record == before:
            return None
        if record is None:
            return Delete(key)
        return Create(key, record) if before is None else Replace(key, record)


def no_issue(issue_id: str) -> NotFound:
    """The failure of naming an issue that is not there."""
    return NotFound(
        f"there is no issue {issue_id}",
        issue_id=issue_id,
        hint="See 'holdfast issue list'; it may have been deleted.",
    )


MOST_NAMED = 100
"""How many neighbours a transaction names at most."""

Result = TypeVar("Result")


class Seen(NamedTuple):
    """Issues as seen without locks; `issues` has None for those that are not there or are `broken`."""

    issues: dict[str, Issue | None]
    broken: dict[str, Broken]

    def add(self, issue_id: str, found: Issue | Broken | None) -> None:
        """Take in what was found."""
        if isinstance(found, Broken):
            self.broken[issue_id] = found
        self.issues[issue_id] = found if isinstance(found, Issue) else None

    def can_name(self, issue_id: str) -> bool:
        """Whether a transaction can name it: it must be able to read it."""
        return issue_id not in self.broken and is_safe_name(issue_id)

    def named(self) -> list[str]:
        """Those that a transaction names."""
        return [each for each in self.issues if self.can_name(each)][:MOST_NAMED]


class IssueNeighbours(NamedTuple):
    """An issue and what its state rests on, and what rests on it; as seen without locks.

    `named` are to be named; `followers` are the dependents whose stored state can follow at once.
    """

    issue: Issue
    named: list[str]
    seen: Seen
    dependents: tuple[str, ...]
    followers: list[str]

    def check_dependents_known(self) -> None:
        """Raise if one that depends on the issue cannot be read, for those who must know its state."""
        for each in self.dependents:
            if each in self.seen.broken:
                raise self.seen.broken[each].failure


def check_dependents(draft: Draft, around: IssueNeighbours) -> None:
    """Raise `Changed` if somebody depends on the issue who was not seen. Its dependents must be named."""
    if not set(draft.dependents(around.issue.id)) <= set(around.dependents):
        raise Changed(f"somebody began to depend on {around.issue.id}", issue_id=around.issue.id)


class _Failed(NamedTuple):
    failure: Failure


class Transactions:
    """The store of one tracker, who acts on it, and how often an attempt is repeated."""

    def __init__(
        self,
        store: Store,
        *,
        actor: str,
        retry: RetryConfig | None = None,
        sleep: Callable[[float], object] = time.sleep,
        clock: Clock = SYSTEM_CLOCK,
        skew: float = SKEW,
    ) -> None:
        """`skew` is how far the clocks of those who share the store may be apart."""
        self.store = store
        self._clock = clock
        self._skew = skew
        self.actor = actor
        self._retry = retry or RetryConfig()
        self._sleep = sleep

    # --- Looking, without locks --------------------------------------------------------------------

    def reading(self) -> ClockReading:
        """What the boot clock shows: taken before a transaction that judges a claim."""
        return ClockReading(boot_clock_id(), self._clock.boot(), self._skew)

    def moment(self) -> Now:
        """Now, for one who looks."""
        return self.reading().at(self.store.now())

    def snapshot(self) -> IssueSet:
        """All issues, as of now."""
        return take_snapshot(self.store, self.reading())

    def read(self, issue_id: str) -> Issue | None:
        return read_issue(self.store, issue_id)

    def look_at(self, issue_id: str) -> Issue | Broken | None:
        """An issue, or why it cannot be read."""
        return look_at(self.store, issue_id)

    def lookup(self, issue_id: str) -> Issue | None:
        """An issue for the rules: one that cannot be read is not done, as far as anybody knows."""
        found = self.look_at(issue_id)
        return found if isinstance(found, Issue) else None

    def need(self, issue_id: str) -> Issue:
        """An issue that must be there."""
        issue = self.read(issue_id)
        if issue is None:
            self.check_initialised()
            raise no_issue(issue_id)
        return issue

    def check_initialised(self) -> None:
        if self.store.read(INDEX) is None:
            raise NotInitialised("there is no issue tracker here")

    def dependents_of(self, issue_id: str) -> tuple[str, ...]:
        """Which issues depend on one. Without complete records of that, all issues are looked at; one that
        cannot be read may be among them."""
        graph = self.store.read(GRAPH)
        document = self.store.read(DEPENDENTS.key(issue_id))
        known = document.record.dependents if document else ()
        if graph is not None and graph.record.dependents_complete:
            return known
        others = (
            name
            for name, each in self.store.scan(TOLERANT_ISSUES)
            if isinstance(each.record, Unreadable) or issue_id in each.record.dependencies
        )
        return tuple(dict.fromkeys((*known, *others)))

    def with_dependencies(self, issue: Issue) -> Seen:
        """The issue and what it depends on."""
        seen = Seen({issue.id: issue}, {})
        for each in issue.dependencies:
            seen.add(each, self.look_at(each))
        return seen

    def surroundings(self, issue_id: str) -> IssueNeighbours:
        issue = self.need(issue_id)
        seen = self.with_dependencies(issue)
        named = seen.named()
        dependents = self.dependents_of(issue_id)
        followers: list[str] = []
        for each in dependents:
            seen.add(each, self.look_at(each))
            dependent = seen.issues[each]
            if dependent is None:
                continue
            for dependency in dependent.dependencies:
                if dependency not in seen.issues:
                    seen.add(dependency, self.look_at(dependency))
            group = dict.fromkeys(
                each
                for each in (dependent.id, *dependent.dependencies)
                if each not in named and seen.can_name(each)
            )
            if len(named) + len(group) <= MOST_NAMED:
                named += group
                followers.append(each)
        return IssueNeighbours(issue, named, seen, dependents, followers)

    # --- Changing ----------------------------------------------------------------------------------

    def change(
        self,
        body: Callable[[Draft], Result],
        *,
        issues: Iterable[str] = (),
        seen: Seen | None = None,
        also: Iterable[Key[Any]] = (),
    ) -> Result:
        """Run one decision on the issues and other documents named; commit what it has drafted."""
        named = list(dict.fromkeys(issues))
        seen = seen or Seen({}, {})
        seed, evidence = uuid.uuid4().int, seen.issues
        keys: list[Key[Any] | Stream[Any]] = [*dict.fromkeys(also), *map(ISSUES.key, named), EVENTS]

        reading = self.reading()

        def decide(view: View, now: float) -> Decision[Result]:
            moment = reading.at(now)
            draft = Draft(view, moment, seed=seed, actor=self.actor, named=named, evidence=evidence)
            result = body(draft)
            return Decision(draft.changes(), result)

        try:
            return self.store.transact(keys, decide).result
        except Blocked as failure:
            raise _explained(failure, seen.broken) from None

    def retrying(self, attempt: Callable[[], Result]) -> Result:
        """Try again while others change what was looked at, as often as the settings allow."""

        def once() -> Result | _Failed:
            try:
                return attempt()
            except Changed:
                raise
            except Failure as failure:
                return _Failed(failure)  # trying again is the caller's business, if it may help at all

        result = retry_with_backoff(self._retry, once, sleep=self._sleep)
        if isinstance(result, _Failed):
            raise result.failure
        return result


def _explained(failure: Blocked, broken: Mapping[str, Broken]) -> Blocked:
    """The same refusal, which says too what of that which is waited for cannot be read."""
    waiting = cast("list[str]", failure.facts["blocked_by"])
    guilty = [broken[each] for each in waiting if each in broken]
    if not guilty:
        return failure
    shown = ", ".join(f"{each} (which cannot be read)" if each in broken else each for each in waiting)
    why = "; ".join(each.failure.message for each in guilty)
    return Blocked(
        f"{failure.facts['issue_id']} waits for {shown}: {why}",
        **{**failure.facts, "broken": [each.as_record() for each in guilty]},
        hint=f"Repair {', '.join(each.path for each in guilty)} first, or remove the dependency.",
    )
