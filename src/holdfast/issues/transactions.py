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

from holdfast.clock import SKEW, SYSTEM_CLOCK, Clock, ClockReading, Now
from holdfast.errors import Blocked, Changed, Failure, NotInitialised
from holdfast.fs.names import is_safe_name
from holdfast.issues.draft import Draft, no_issue
from holdfast.issues.keys import DEPENDENTS, EVENTS, GRAPH, INDEX, ISSUES
from holdfast.issues.reading import TOLERANT_ISSUES, Broken, Snapshot, look_at, read_issue, take_snapshot
from holdfast.issues.records import Issue
from holdfast.locks.identity import boot_clock_id
from holdfast.locks.retry import RetryConfig, retry_with_backoff
from holdfast.store.model import Decision, Key, Store, Stream, Unreadable, View

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


class Surroundings(NamedTuple):
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


def check_dependents(draft: Draft, around: Surroundings) -> None:
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

    def snapshot(self) -> Snapshot:
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

    def surroundings(self, issue_id: str) -> Surroundings:
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
        return Surroundings(issue, named, seen, dependents, followers)

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
