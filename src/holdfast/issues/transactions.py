"""Transactions on issues: read without locks, name the documents involved, decide, commit.

A transaction must name its documents before it begins, and which ones those are depends on their content.
So each operation first reads without locks and names what it found. Under the locks it sees the current
records; if they lead to a document that was neither named nor read, it raises `Changed` and starts again.

The dependencies and dependents of an issue are named, up to `MOST_NAMED`. The *stored* states of further
dependents follow in transactions of their own (`settle`). They are only a convenience: what users see and
what may be claimed is derived from the dependencies themselves.

A neighbour that cannot be read is not named. It counts as not done, which blocks only what waits for it.
Operations that must know its dependencies, or whether it is done, are refused.
"""

from __future__ import annotations

import contextlib
import time
import uuid
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple, TypeVar, cast

import msgspec

from holdfast.clock import SKEW, SYSTEM_CLOCK, Clock, ClockReading, Now, format_instant
from holdfast.errors import Blocked, Changed, Corrupt, Failure, IoFailure, NotFound, Refused
from holdfast.fs.directory import entry_exists
from holdfast.fs.names import is_safe_name
from holdfast.issues import model, rules
from holdfast.issues.index import rebuild_index
from holdfast.issues.model import (
    CLAIMS,
    DEPENDENTS,
    EVENTS,
    GRAPH,
    ISSUES,
    ClaimRecord,
    Issue,
    IssueSummary,
    State,
    searched_text,
)
from holdfast.issues.projection import IndexUnusable, projection_of
from holdfast.issues.reading import look_at, misnamed, read_claims, read_issue, read_listing, take_snapshot
from holdfast.issues.rules import Broken, IssueSet
from holdfast.locks.identity import boot_clock_id
from holdfast.locks.retry import RetryConfig, retry_with_backoff
from holdfast.store.model import (
    Append,
    Attempted,
    Change,
    Create,
    Decide,
    Decision,
    Delete,
    Family,
    FirstFree,
    Key,
    Replace,
    Store,
    Stream,
    Unreadable,
    View,
)

MOST_RECENT = 256  # how many added dependencies `Graph.recent` keeps
_NUMBERS = 1 << 128


class Draft:
    """A change in the making. Named issues are looked up in the view, others in `evidence`, which was read without
    locks; an issue in neither raises `Changed`."""

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
        self._events: list[model.IssueEvent] = []
        self._appends: list[Append] = []
        self._announced: set[str] = set()

    # --- Issues ------------------------------------------------------------------------------------

    def lookup(self, issue_id: str) -> Issue | None:
        """An issue as it will be."""
        if issue_id in self._issues:
            return self._issues[issue_id]
        if issue_id in self._named:
            found = self.view.get(ISSUES.key(issue_id))
            if found is not None and found.id != issue_id:
                raise misnamed(issue_id, found)
            return found
        if issue_id in self._evidence:
            return self._evidence[issue_id]
        raise Changed(f"{issue_id} became relevant meanwhile", issue_id=issue_id)

    def issue(self, issue_id: str) -> Issue:
        """The same; raises `NotFound` instead of returning None."""
        found = self.lookup(issue_id)
        if found is None:
            raise no_issue(issue_id)
        return found

    def put(self, issue: Issue, *, announced: bool = False) -> Issue:
        """Write an issue. With `announced`, an event of its own reports the new state."""
        before = self.view.get(ISSUES.key(issue.id))
        if before == issue:
            self._issues.pop(issue.id, None)
            return issue
        created_at = issue.created_at or self.at
        dated = {**rules.NEW_GATE, "updated_at": self.at}  # gates of other programs keep their shape
        gates = {name: dated if each == rules.NEW_GATE else each for name, each in issue.gates_status.items()}
        issue = msgspec.structs.replace(issue, created_at=created_at, updated_at=self.at, gates_status=gates)
        self._issues[issue.id] = issue
        if announced or before is None:
            self._announced.add(issue.id)
        return issue

    def drop(self, issue_id: str) -> None:
        """Delete an issue with its claim and dependents."""
        self._issues[issue_id] = None
        for family in (CLAIMS, DEPENDENTS):
            self._others[family.key(issue_id)] = None

    def settle(self, issue_ids: Iterable[str]) -> None:
        """Make the stored state of issues match their dependencies."""
        for issue_id in issue_ids:
            issue = self.lookup(issue_id)
            if issue is not None:
                self.put(rules.in_line(issue, self.lookup))

    # --- Other documents ---------------------------------------------------------------------------

    def get(self, key: Key[Any]) -> Any:
        """Another document as it will be."""
        return self._others[key] if key in self._others else self.view.get(key)

    def set(self, key: Key[Any], record: object) -> None:
        self._others[key] = record

    def claim(self, issue_id: str) -> ClaimRecord | None:
        found = self.get(CLAIMS.key(issue_id))
        assert found is None or isinstance(found, ClaimRecord)
        return found

    def set_claim(self, issue_id: str, record: ClaimRecord | None) -> None:
        if record != self.claim(issue_id):
            self.set(CLAIMS.key(issue_id), record)

    def end_claim_unless_working(self, issue: Issue) -> None:
        """End the claim of an issue that is no longer in progress."""
        record = self.claim(issue.id)
        if record is not None and issue.state not in (State.IN_PROGRESS, State.GATED):
            self.set_claim(issue.id, rules.ended(record))

    def dependents(self, issue_id: str) -> tuple[str, ...]:
        found = self.get(DEPENDENTS.key(issue_id))
        return found.dependents if isinstance(found, model.Dependents) else ()

    def set_dependents(self, issue_id: str, dependents: Iterable[str]) -> None:
        known = self.get(DEPENDENTS.key(issue_id)) or model.Dependents(issue_id=issue_id)
        wanted = tuple(dict.fromkeys(dependents))
        if wanted != known.dependents:
            record = msgspec.structs.replace(known, dependents=wanted) if wanted else None
            self.set(DEPENDENTS.key(issue_id), record)

    def add_dependent(self, on: str, issue_id: str) -> None:
        self.set_dependents(on, (*self.dependents(on), issue_id))

    def drop_dependent(self, on: str, issue_id: str) -> None:
        self.set_dependents(on, (each for each in self.dependents(on) if each != issue_id))

    def add_edges(self, edges: Iterable[tuple[str, str]]) -> None:
        """Count additions to the graph, so that walks without locks can notice them."""
        graph, new = self.get(GRAPH) or model.Graph(), list(edges)
        if new:
            recent = [*graph.recent, *new][-MOST_RECENT:]
            self.set(GRAPH, msgspec.structs.replace(graph, epoch=graph.epoch + len(new), recent=recent))

    # --- The outcome -------------------------------------------------------------------------------

    def record(self, type_: str, issue_id: str, **facts: object) -> None:
        """Add an event, with an id of its own and the actor."""
        number, known = str(uuid.UUID(int=(self._seed + len(self._events)) % _NUMBERS)), {**facts, "by": self.actor}
        event = model.IssueEvent(type=type_, id=number, issue_id=issue_id, timestamp=self.at, unknown=known)
        self._events.append(event)

    def append(self, entry: Append) -> None:
        """Add an entry of another stream, which the transaction names."""
        self._appends.append(entry)

    def changes(self) -> list[Change]:
        for issue_id, issue in self._issues.items():
            before = self.view.get(ISSUES.key(issue_id))
            if issue is not None and before is not None and issue_id not in self._announced:
                self._tell_state(before.state, issue)
        documents = {ISSUES.key(issue_id): issue for issue_id, issue in self._issues.items()} | self._others
        made = [change for key, record in documents.items() if (change := self._change(key, record)) is not None]
        return [*made, *(Append(EVENTS, event) for event in self._events), *self._appends]

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
    hint = "See 'holdfast issue list'; it may have been deleted."
    return NotFound(f"there is no issue {issue_id}", issue_id=issue_id, hint=hint)


MOST_NAMED = 100  # the most neighbours that a transaction names; one that changes needs an event and a place, too
_MOST_PICKED = 5  # issues that the server picks, and others change meanwhile
Result = TypeVar("Result")


class Seen(NamedTuple):
    """Issues read without locks; `issues` has None for missing and `broken` ones."""

    issues: dict[str, Issue | None]
    broken: dict[str, Broken]

    def add(self, issue_id: str, found: Issue | Broken | None) -> None:
        if isinstance(found, Broken):
            self.broken[issue_id] = found
        self.issues[issue_id] = found if isinstance(found, Issue) else None

    def can_name(self, issue_id: str) -> bool:
        """Whether a transaction can name it, which requires that it can be read."""
        return issue_id not in self.broken and is_safe_name(issue_id)

    def named(self) -> list[str]:
        return [each for each in self.issues if self.can_name(each)][:MOST_NAMED]


class IssueNeighbours(NamedTuple):
    """An issue with its dependencies and dependents, read without locks.

    The transaction names `named`; `followers` are the dependents whose stored state it can update.
    """

    issue: Issue
    named: list[str]
    seen: Seen
    dependents: tuple[str, ...]
    followers: list[str]

    def others(self) -> list[str]:
        """The other dependents that can be read."""
        return [each for each in self.dependents if each not in self.followers and self.seen.issues[each] is not None]

    def check_dependents_known(self) -> None:
        """Raise if a dependent cannot be read."""
        for each in self.dependents:
            if each in self.seen.broken:
                raise self.seen.broken[each].failure


def check_dependents(draft: Draft, around: IssueNeighbours) -> None:
    """Raise `Changed` if there is a dependent that was not read. The transaction names the dependents."""
    if not set(draft.dependents(around.issue.id)) <= set(around.dependents):
        raise Changed(f"{around.issue.id} has a new dependent", issue_id=around.issue.id)


class _Failed(NamedTuple):
    failure: Failure


class Transactions:
    """Transactions on the store of one tracker, in the name of one actor."""

    def __init__(
        self,
        store: Store,
        *,
        actor: str,
        retry: RetryConfig | None = None,
        sleep: Callable[[float], object] = time.sleep,
        clock: Clock = SYSTEM_CLOCK,
        skew: float = SKEW,
        root: Path | None = None,
    ) -> None:
        """`skew` is how far apart the clocks of the store's clients may be. `root` is the directory for checkpoints, if
        the store is not in files."""
        self.store = store
        self._projection = projection_of(store, root)
        self._clock = clock
        self.skew = skew
        self.actor = actor
        self._retry = retry or RetryConfig()
        self._sleep = sleep

    # --- Reading, without locks --------------------------------------------------------------------

    def reading(self) -> ClockReading:
        """The boot clock, read before a transaction that judges a claim."""
        return ClockReading(boot_clock_id(), self._clock.boot(), self.skew)

    def moment(self) -> Now:
        return self.reading().at(self.store.now())

    def summaries(self, *, finished: bool = True) -> IssueSet[IssueSummary]:
        """The summaries of all issues as they are now, or only of the unfinished ones. Costs what has changed since the
        last call, in this process or an earlier one."""
        try:
            return self._projection.look(self.reading(), finished=finished)
        except IndexUnusable:
            seen = self.snapshot()
        rows = {each.id: IssueSummary.of(each) for each in seen}
        texts = {each.id: searched_text(each) for each in seen}
        return IssueSet(
            rows,
            seen.moment,
            seen.broken_issues,
            claims=partial(read_claims, self.store),
            text=texts.__getitem__,
        )

    def snapshot(self) -> IssueSet[Issue]:
        """All issues as they are now. If the index is missing or cannot be understood, it is rebuilt, if possible."""
        seen = take_snapshot(self.store, self.reading())
        if seen.index_problem:
            with contextlib.suppress(Failure):
                rebuild_index(self)
            seen = take_snapshot(self.store, self.reading())
        return seen

    def read(self, issue_id: str) -> Issue | None:
        return read_issue(self.store, issue_id)

    def look_at(self, issue_id: str) -> Issue | Broken | None:
        return look_at(self.store, issue_id)

    def lookup(self, issue_id: str) -> Issue | None:
        """An issue for the rules: an unreadable issue counts as not done."""
        found = self.look_at(issue_id)
        return found if isinstance(found, Issue) else None

    def need(self, issue_id: str) -> Issue:
        """One issue; raises `NotFound`."""
        issue = self.read(issue_id)
        if issue is None:
            self.check_initialised()
            raise no_issue(issue_id)
        return issue

    def check_initialised(self) -> None:
        """Raise `NotInitialised` if there is no tracker. A damaged index is rebuilt, if possible."""
        if read_listing(self.store).problem:
            self.snapshot()

    @property
    def records_dependents(self) -> bool:
        """Whether the dependents documents can be complete: in a checkout, git changes issues without telling."""
        return self.store.files is None or not entry_exists(self.store.files.path / ".git")

    def dependents_of(self, issue_id: str) -> tuple[str, ...]:
        """The dependents of an issue. If the dependents documents are incomplete, all issues are read; an unreadable
        issue may be among the dependents."""
        key = DEPENDENTS.key(issue_id)
        view = self.store.read_each([GRAPH, key])
        graph, dependents = view.get(GRAPH), view.get(key)
        known = dependents.dependents if dependents else ()
        if graph is not None and graph.dependents_complete and self.records_dependents:
            return known
        others = (
            name
            for name, each in self.store.scan(ISSUES.tolerant())
            if isinstance(each.record, Unreadable) or issue_id in each.record.dependencies
        )
        return tuple(dict.fromkeys((*known, *others)))

    def with_dependencies(self, issue: Issue) -> Seen:
        seen = Seen({issue.id: issue}, {})
        self.look_at_each(issue.dependencies, seen)
        return seen

    def look_at_each(self, issue_ids: Iterable[str], seen: Seen) -> None:
        """Look at several issues, in one request unless one of them cannot be read."""
        named = [each for each in dict.fromkeys(issue_ids) if each not in seen.issues]
        keys = {each: ISSUES.key(each) for each in named if is_safe_name(each)}
        found: Callable[[str], Issue | Broken | None] = self.look_at
        with contextlib.suppress(Corrupt, IoFailure, Refused):
            view = self.store.read_each(list(keys.values())) if keys else View({})
            found = lambda each: view.get(keys[each]) if each in keys else None  # noqa: E731
        for each in named:
            seen.add(each, found(each))

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
                each for each in (dependent.id, *dependent.dependencies) if each not in named and seen.can_name(each)
            )
            if len(named) + len(group) + 2 * len(followers) < MOST_NAMED:
                named += group
                followers.append(each)
        return IssueNeighbours(issue, named, seen, dependents, followers)

    # --- Changing ----------------------------------------------------------------------------------

    def settle(self, issue_ids: Iterable[str]) -> None:
        """Make the stored states of issues match their dependencies, about `MOST_NAMED` documents at a time."""
        left = list(issue_ids)
        while left:
            settled = self.retrying(partial(self._settle_some, left))
            left = left[settled:]

    def settle_others(self, around: IssueNeighbours, issue: Issue) -> None:
        """Settle the dependents that the transaction could not name, if the issue now releases them or no longer does.

        The transaction stands: what cannot be settled now is left to `validate`.
        """
        if rules.is_released(issue) is not rules.is_released(around.issue):
            with contextlib.suppress(Failure):
                self.settle(around.others())

    def _settle_some(self, issue_ids: Sequence[str]) -> int:
        """Settle the first of these issues; return how many."""
        seen, count = Seen({}, {}), 0
        for each in issue_ids:
            found = self.look_at(each)
            around = self.with_dependencies(found) if isinstance(found, Issue) else Seen({}, {})
            around.add(each, found)
            if count and len(seen.issues | around.issues) + 2 * count >= MOST_NAMED:
                break
            seen.issues.update(around.issues)
            seen.broken.update(around.broken)
            count += 1
        self.change(lambda draft: draft.settle(issue_ids[:count]), issues=seen.named(), seen=seen)
        return count

    def change(
        self,
        body: Callable[[Draft], Result],
        *,
        issues: Iterable[str] = (),
        seen: Seen | None = None,
        also: Iterable[Key[Any] | Stream[Any]] = (),
    ) -> Result:
        """Run one decision on the named issues, documents and streams, and commit its draft."""
        named = list(dict.fromkeys(issues))
        seen = seen or Seen({}, {})
        keys: list[Key[Any] | Stream[Any]] = [*dict.fromkeys(also), *map(ISSUES.key, named), EVENTS]
        try:
            return self.store.transact(keys, self._deciding(body, named, seen.issues)).result
        except Blocked as failure:
            raise _explained(failure, seen.broken) from None

    def change_once(
        self,
        body: Callable[[Draft, str], Result],
        issue: str | FirstFree,
        fits: Callable[[Issue, View], bool],
        *,
        also: Iterable[Family[Any]] = (CLAIMS,),
        hints: Sequence[Key[Any]] = (),
    ) -> Result | None:
        """Attempt one decision on an issue and its dependencies, with fewer requests to a server than `change`. `also`
        has its other documents; `fits` says whether that is enough. None if not, after a conflict, or without a
        server."""
        server, named = self.store.server, list[str]()
        if server is None:
            return None

        def keys(issue_id: str) -> list[Key[Any] | Stream[Any]]:
            return [*(each.key(issue_id) for each in also), ISSUES.key(issue_id), EVENTS]

        def more(issue_id: str, view: View) -> list[Key[Any]] | None:
            found = view.get(ISSUES.key(issue_id))
            if found is None or not fits(found, view):
                return None
            named[:] = dict.fromkeys((issue_id, *found.dependencies))
            return [ISSUES.key(each) for each in named[1:]] if len(named) <= MOST_NAMED else None

        decide = self._deciding(lambda draft: body(draft, named[0]), named, {})
        for _ in range(_MOST_PICKED if isinstance(issue, FirstFree) else 1):
            try:
                made = server.transact_once(Attempted(issue, keys, hints, more, decide))
            except Changed:
                continue
            except (Blocked, Corrupt):
                return None
            return None if made is None else made.result
        return None

    def _deciding(
        self, body: Callable[[Draft], Result], named: Sequence[str], evidence: Mapping[str, Issue | None]
    ) -> Decide[Result]:
        seed, reading = uuid.uuid4().int, self.reading()

        def decide(view: View, now: float) -> Decision[Result]:
            draft = Draft(view, reading.at(now), seed=seed, actor=self.actor, named=named, evidence=evidence)
            result = body(draft)
            return Decision(draft.changes(), result)

        return decide

    def retrying(self, attempt: Callable[[], Result], retry: RetryConfig | None = None) -> Result:
        """Retry while others change what was read, as often as the settings or `retry` allow."""

        def once() -> Result | _Failed:
            try:
                return attempt()
            except Changed:
                raise
            except Failure as failure:
                return _Failed(failure)  # retrying other failures is up to the caller

        result = retry_with_backoff(retry or self._retry, once, sleep=self._sleep)
        if isinstance(result, _Failed):
            raise result.failure
        return result


def _explained(failure: Blocked, broken: Mapping[str, Broken]) -> Blocked:
    """The refusal, naming the dependencies that cannot be read."""
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
