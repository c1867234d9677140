"""Checking a tracker: what is stored, against the rules; and putting right what can only be meant one way.

Circles, and documents that cannot be read, are reported and left to people.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

import msgspec

from holdfast.errors import Changed, Corrupt, NotInitialised
from holdfast.fs.names import is_safe_name
from holdfast.issues import claims, rules
from holdfast.issues.draft import Draft
from holdfast.issues.graph import in_order
from holdfast.issues.keys import CLAIMS, DEPENDENTS, EVENTS, GATES, GRAPH, INDEX, ISSUES
from holdfast.issues.records import EventCodec, Graph, Issue, State
from holdfast.issues.tracker import Tracker

REPAIR_TOGETHER = 200


class Finding(NamedTuple):
    """Something that is not as it should be. `fixable`: there is only one way to put it right."""

    kind: str
    issue_id: str
    message: str
    fixable: bool


class Examination:
    """One look at everything."""

    def __init__(self, tracker: Tracker) -> None:
        self._tracker = tracker
        self._store = tracker.store
        index = self._store.read(INDEX)
        if index is None:
            raise NotInitialised("there is no issue tracker here")
        self._listed = list(index.record.all_ids)
        self._unreadable: list[Finding] = []
        self._issues = self._load()
        self.findings = [*self._unreadable, *self._examine()]

    def _load(self) -> dict[str, Issue]:
        """Every issue that can be read, whether the index has it or not."""
        found: dict[str, Issue] = {}
        names = dict.fromkeys(each for each in self._listed if is_safe_name(each))
        try:
            for name, _ in self._store.scan(ISSUES):
                names[name] = None
        except Corrupt as failure:
            self._unreadable.append(Finding("unreadable", "", failure.message, False))
        for name in names:
            try:
                document = self._store.read(ISSUES.key(name))
            except Corrupt as failure:
                self._unreadable.append(Finding("unreadable", name, failure.message, False))
                continue
            if document is not None:
                found[name] = document.record
        return found

    def _examine(self) -> Iterator[Finding]:
        listed = set(self._listed)
        lost = {each.issue_id for each in self._unreadable}
        if len(listed) != len(self._listed):
            yield Finding("index", "", "the index has an id twice", True)
        for each in self._listed:
            if each not in self._issues and each not in lost:
                yield Finding("missing", each, "the index has it, but there is no such issue", True)
        for each in self._issues:
            if each not in listed:
                yield Finding("unlisted", each, "it is not in the index", True)
        yield from self._examine_graph(lost)
        gates = self._store.read(GATES)
        known = gates.record.gates if gates else {}
        for issue in self._issues.values():
            yield from self._examine_issue(issue, known)
        yield from self._examine_events()

    def _examine_graph(self, unreadable: set[str]) -> Iterator[Finding]:
        edges = {each.id: each.dependencies for each in self._issues.values()}
        for circle in in_order(edges)[1]:
            yield Finding("circle", circle[0], " -> ".join(circle), False)
        dependents: dict[str, set[str]] = {}
        for issue_id, deps in edges.items():
            for on in deps:
                dependents.setdefault(on, set()).add(issue_id)
                if on not in self._issues and on not in unreadable:
                    yield Finding("dangling", issue_id, f"it depends on {on}, which does not exist", True)
        stored = {name: set(each.record.dependents) for name, each in self._store.scan(DEPENDENTS)}
        graph = self._store.read(GRAPH)
        real = {on: each for on, each in dependents.items() if on in self._issues}
        if graph is None or not graph.record.dependents_complete or stored != real:
            yield Finding(
                "dependents", "", "the record of which issues depend on which is not complete", True
            )

    def _examine_issue(self, issue: Issue, gates: object) -> Iterator[Finding]:
        def lookup(issue_id: str) -> Issue | None:
            return self._issues.get(issue_id)

        if rules.state_of(issue, lookup) is not issue.state:
            wanted = rules.state_of(issue, lookup).value
            yield Finding("state", issue.id, f"it is stored as {issue.state.value}, but is {wanted}", True)
        if issue.state is State.DONE and (waiting := rules.open_dependencies(issue, lookup)):
            yield Finding(
                "done too early", issue.id, f"it is done, but waits for {', '.join(waiting)}", False
            )
        if issue.state is State.DONE and issue.open_gates():
            yield Finding("done too early", issue.id, f"not passed: {', '.join(issue.open_gates())}", False)
        for gate in issue.gates_required:
            if gate not in gates:  # type: ignore[operator]
                yield Finding("gate", issue.id, f"it requires the gate {gate}, which is not defined", False)
        claim = self._store.read(CLAIMS.key(issue.id))
        if claims.is_abandoned(issue, claim.record if claim else None, self._store.now()):
            yield Finding("abandoned", issue.id, f"the claim of {issue.assignee} has run out", True)

    def _examine_events(self) -> Iterator[Finding]:
        for entry in self._store.entries(EVENTS):
            if entry.record.type == EventCodec.UNREADABLE:
                yield Finding("event", "", f"at {entry.position}: {entry.record.unknown['problem']}", False)


def examine(tracker: Tracker) -> list[Finding]:
    """Everything that is not as it should be."""
    return Examination(tracker).findings


def repair(tracker: Tracker) -> list[Finding]:
    """Put right what can be; what is left is returned. Each repair is a transaction of its own."""
    findings = examine(tracker)
    kinds = {each.kind for each in findings if each.fixable}
    if kinds & {"missing", "unlisted", "index"}:
        tracker.transactions.retrying(lambda: _repair_index(tracker))
    for each in findings:
        if each.kind == "dangling":
            missing = each.message.removeprefix("it depends on ").removesuffix(", which does not exist")
            _detach(tracker, each.issue_id, missing)
    if kinds & {"dependents", "dangling", "unlisted", "missing"}:
        _repair_dependents(tracker)
    for each in findings:
        if each.kind == "abandoned":
            tracker.claims.reclaim(each.issue_id)
    for each in examine(tracker):
        if each.kind == "state":
            _settle(tracker, each.issue_id)
    return examine(tracker)


def _repair_index(tracker: Tracker) -> None:
    """Let the index have exactly what is there. What is entered or removed is locked meanwhile."""
    index = tracker.store.read(INDEX)
    listed = list(dict.fromkeys(index.record.all_ids)) if index else []
    there = {name for name, _ in tracker.store.scan(ISSUES)}
    doubtful = sorted(there.symmetric_difference(listed))

    def body(draft: Draft) -> None:
        record = draft.index()
        kept = [each for each in dict.fromkeys(record.all_ids) if each not in doubtful or draft.lookup(each)]
        new = [each for each in doubtful if each not in kept and draft.lookup(each) is not None]
        ids = [*kept, *new]
        deleted = [each for each in record.deleted_ids if each not in new]
        draft.set(INDEX, msgspec.structs.replace(record, all_ids=ids, deleted_ids=deleted))
        draft.record("index_repaired", "", entered=new)

    named = [each for each in doubtful if is_safe_name(each)]
    seen: dict[str, Issue | None] = dict.fromkeys(doubtful)
    tracker.transactions.change(body, issues=named, seen=seen, also=[INDEX])


def _detach(tracker: Tracker, issue_id: str, missing: str) -> None:
    if is_safe_name(missing):
        tracker.dependencies.remove(issue_id, missing)
        return

    def body(draft: Draft) -> None:  # a name that no document can have
        draft.put(rules.without_dependency(draft.issue(issue_id), missing))
        draft.record("dependency_removed", issue_id, depends_on=missing)

    tracker.transactions.change(body, issues=[issue_id])


def _settle(tracker: Tracker, issue_id: str) -> None:
    def attempt() -> None:
        issue = tracker.transactions.need(issue_id)
        seen = tracker.transactions.with_dependencies(issue)
        tracker.transactions.change(
            lambda draft: draft.settle([issue_id]),
            issues=[each for each in seen if is_safe_name(each)],
            seen=seen,
        )

    tracker.transactions.retrying(attempt)


def _repair_dependents(tracker: Tracker) -> None:
    """Write the edges the other way round anew.

    Not complete first, so that nobody relies on it meanwhile; then part by part, each under the locks
    of the issues that it is about; complete only if nobody has added an edge since it was begun.
    """
    tracker.transactions.retrying(lambda: _rewrite_dependents(tracker))


def _rewrite_dependents(tracker: Tracker) -> None:
    begun = _declare_complete(tracker, None)
    dependents: dict[str, list[str]] = {name: [] for name, _ in tracker.store.scan(DEPENDENTS)}
    for name, document in tracker.store.scan(ISSUES):
        for on in document.record.dependencies:
            dependents.setdefault(on, []).append(name)
    todo = [each for each in dependents if is_safe_name(each)]
    for start in range(0, len(todo), REPAIR_TOGETHER):
        part = todo[start : start + REPAIR_TOGETHER]

        def body(draft: Draft, part: list[str] = part) -> None:
            for on in part:
                draft.set_dependents(on, dependents[on] if draft.lookup(on) is not None else ())

        tracker.transactions.change(body, issues=part, also=map(DEPENDENTS.key, part))
    _declare_complete(tracker, begun)


def _declare_complete(tracker: Tracker, begun: tuple[int, str] | None) -> tuple[int, str]:
    """Say whether the record of dependents is complete: it is, if nothing was added since `begun`.

    Dependencies are added to issues that are there, which is counted, or with new ones, which changes
    the index.
    """

    def body(draft: Draft) -> tuple[int, str]:
        graph, index = draft.get(GRAPH) or Graph(), draft.view.document(INDEX)
        seen = int(graph.epoch), index.version if index else ""
        if begun not in (None, seen):
            raise Changed("dependencies were added meanwhile")
        draft.set(GRAPH, msgspec.structs.replace(graph, dependents_complete=begun is not None))
        return seen

    return tracker.transactions.change(body, also=[INDEX, GRAPH])
