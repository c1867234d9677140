"""Checking a tracker: what is stored, against the rules; and putting right what can only be meant one way.

Circles, documents that cannot be read, and commits that another program has got in the way of are reported
and left to people.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import NamedTuple

import msgspec

from holdfast.errors import Changed, Failure, NotInitialised
from holdfast.fs.names import is_safe_name
from holdfast.issues import rules
from holdfast.issues.model import (
    CLAIMS,
    DEPENDENTS,
    EVENTS,
    GATES,
    GRAPH,
    INDEX,
    ISSUES,
    Graph,
    Issue,
    IssueEventCodec,
    State,
)
from holdfast.issues.reading import TOLERANT_ISSUES, Broken, tried
from holdfast.issues.rules import in_order
from holdfast.issues.tracker import Tracker
from holdfast.issues.transactions import Draft, Seen
from holdfast.store.model import Key, Record, Store, UnfinishedCommit, Unreadable

REPAIR_TOGETHER = 200
FAMILY = "jit/"
"""What the names of all documents of a tracker begin with."""


class IssueFinding(NamedTuple):
    """Something that is not as it should be. `fixable`: there is only one way to put it right. `hint` says
    what else can be done about it, if that does not go without saying."""

    kind: str
    issue_id: str
    message: str
    fixable: bool
    hint: str = ""


class TrackerExamination:
    """One look at everything. What cannot be read is a finding, and what would rest on it is not judged."""

    def __init__(self, tracker: Tracker) -> None:
        self._tracker = tracker
        self._store = tracker.store
        index = self._store.read(INDEX)
        if index is None:
            raise NotInitialised("there is no issue tracker here")
        self._listed = list(index.record.all_ids)
        self._unreadable: list[IssueFinding] = []
        self._broken: set[str] = set()
        self._issues = self._load()
        findings = list(self._examine())
        self.findings = [*self._unreadable, *findings]

    def _load(self) -> dict[str, Issue]:
        """Every issue that can be read, whether the index has it or not."""
        found: dict[str, Issue] = {}
        there = (name for name, _ in self._store.scan(TOLERANT_ISSUES))
        for name in dict.fromkeys((*self._listed, *there)):
            issue = self._tracker.transactions.look_at(name)
            if isinstance(issue, Broken):
                self._broken.add(name)
                self._unreadable.append(_unreadable(name, issue.failure))
            elif issue is not None:
                found[name] = issue
        return found

    def _read(self, key: Key[Record], issue_id: str = "") -> Record | None:
        """Another document, if it is there and can be read."""
        found = tried(self._store, key, issue_id)
        if isinstance(found, Broken):
            self._unreadable.append(_unreadable(issue_id, found.failure))
            return None
        return found

    def _examine(self) -> Iterator[IssueFinding]:
        yield from _examine_commits(self._store)
        listed = set(self._listed)
        if len(listed) != len(self._listed):
            yield IssueFinding("index", "", "the index has an id twice", True)
        for each in self._listed:
            if each not in self._issues and each not in self._broken:
                yield IssueFinding("missing", each, "the index has it, but there is no such issue", True)
        for each in self._issues:
            if each not in listed:
                yield IssueFinding("unlisted", each, "it is not in the index", True)
        yield from self._examine_graph()
        gates = self._read(GATES)
        known = gates.gates if gates else {}
        for issue in self._issues.values():
            yield from self._examine_issue(issue, known)
        yield from self._examine_events()

    def _examine_graph(self) -> Iterator[IssueFinding]:
        edges = {each.id: each.dependencies for each in self._issues.values()}
        for circle in in_order(edges)[1]:
            yield IssueFinding("circle", circle[0], " -> ".join(circle), False)
        dependents: dict[str, set[str]] = {}
        for issue_id, deps in edges.items():
            for on in deps:
                dependents.setdefault(on, set()).add(issue_id)
                if on not in self._issues and on not in self._broken:
                    yield IssueFinding(
                        "dangling", issue_id, f"it depends on {on}, which does not exist", True
                    )
        stored, whole = self._stored_dependents()
        graph = self._read(GRAPH)
        real = {on: each for on, each in dependents.items() if on in self._issues}
        complete = graph is not None and graph.dependents_complete
        if whole and not (complete and stored == real):
            yield IssueFinding(
                "dependents",
                "",
                "the record of which issues depend on which is not complete",
                not self._broken,
                "Repair what cannot be read first: nobody knows what that depends on."
                if self._broken
                else "",
            )

    def _stored_dependents(self) -> tuple[dict[str, set[str]], bool]:
        """Which issues depend on which, as recorded, without those that cannot be read; and whether all of
        these records can be."""
        stored, whole = dict[str, set[str]](), True
        for on, document in self._store.scan(DEPENDENTS.tolerant()):
            if isinstance(document.record, Unreadable):
                self._unreadable.append(_unreadable(on, document.record.failure))
                whole = False
            elif on not in self._broken and (left := set(document.record.dependents) - self._broken):
                stored[on] = left
        return stored, whole

    def _examine_issue(self, issue: Issue, gates: Mapping[str, object]) -> Iterator[IssueFinding]:
        lookup = self._issues.get
        waiting = [each for each in rules.open_dependencies(issue, lookup) if each not in self._broken]
        knows_all = self._broken.isdisjoint(issue.dependencies)
        if knows_all and rules.state_of(issue, lookup) is not issue.state:
            wanted = rules.state_of(issue, lookup).value
            yield IssueFinding(
                "state", issue.id, f"it is stored as {issue.state.value}, but is {wanted}", True
            )
        if issue.state is State.DONE and waiting:
            yield IssueFinding(
                "done too early", issue.id, f"it is done, but waits for {', '.join(waiting)}", False
            )
        if issue.state is State.DONE and issue.open_gates():
            yield IssueFinding(
                "done too early", issue.id, f"not passed: {', '.join(issue.open_gates())}", False
            )
        for gate in issue.gates_required:
            if gate not in gates:
                yield IssueFinding(
                    "gate", issue.id, f"it requires the gate {gate}, which is not defined", False
                )
        claim = self._read(CLAIMS.key(issue.id), issue.id)
        if rules.is_abandoned(issue, claim, self._tracker.transactions.moment()):
            yield IssueFinding("abandoned", issue.id, f"the claim of {issue.assignee} has run out", True)

    def _examine_events(self) -> Iterator[IssueFinding]:
        for entry in self._store.entries(EVENTS):
            if entry.record.type == IssueEventCodec.UNREADABLE:
                yield IssueFinding(
                    "event", "", f"at {entry.position}: {entry.record.unknown['problem']}", False
                )


def _unreadable(issue_id: str, failure: Failure) -> IssueFinding:
    return IssueFinding("unreadable", issue_id, f"{failure.message} ({failure.code})", False, failure.hint)


def _examine_commits(store: Store) -> Iterator[IssueFinding]:
    """Commits to several documents of the tracker whose author died after the commit point."""
    for commit in _abandoned(store):
        obstacle = commit.obstacle
        if obstacle is None:
            yield IssueFinding(
                "commit unfinished",
                "",
                f"the commit {commit.id} is decided, but its process died before it was carried out",
                True,
                "Nothing is lost: everybody sees it whole. 'holdfast issue validate --fix' carries it out, "
                "and so does the next one who changes an issue.",
            )
        else:
            message = f"the commit {commit.id} is decided, but cannot be carried out: {obstacle.message}"
            yield IssueFinding("commit blocked", "", message, False, obstacle.hint)


def _abandoned(store: Store) -> list[UnfinishedCommit]:
    commits = [] if store.files is None else store.files.unfinished_commits()
    return [each for each in commits if any(name.startswith(FAMILY) for name in each.documents)]


def examine(tracker: Tracker) -> list[IssueFinding]:
    """Everything that is not as it should be."""
    return TrackerExamination(tracker).findings


def repair(tracker: Tracker) -> list[IssueFinding]:
    """Put right what can be; what is left is returned. Each repair is a transaction of its own."""
    _finish_commits(tracker.store)
    findings = examine(tracker)
    kinds = {each.kind for each in findings if each.fixable}
    if kinds & {"missing", "unlisted", "index"}:
        tracker.transactions.retrying(lambda: _repair_index(tracker))
    for each in findings:
        if each.kind == "dangling":
            missing = each.message.removeprefix("it depends on ").removesuffix(", which does not exist")
            _detach(tracker, each.issue_id, missing)
    if kinds & {"dependents", "dangling", "unlisted", "missing"} and not _has_unreadable(findings):
        _repair_dependents(tracker)
    for each in findings:
        if each.kind == "abandoned":
            tracker.claims.reclaim(each.issue_id)
    for each in examine(tracker):
        if each.kind == "state":
            _settle(tracker, each.issue_id)
    return examine(tracker)


def _finish_commits(store: Store) -> None:
    if store.files is not None:
        store.files.finish_commits(each for each in _abandoned(store) if each.obstacle is None)


def _has_unreadable(findings: Iterable[IssueFinding]) -> bool:
    """Whether something cannot be read: then nobody knows all dependencies."""
    return any(each.kind == "unreadable" for each in findings)


def _repair_index(tracker: Tracker) -> None:
    """Let the index have exactly what is there. What is entered or removed is locked meanwhile."""
    index = tracker.store.read(INDEX)
    listed = list(dict.fromkeys(index.record.all_ids)) if index else []
    there = {name for name, _ in tracker.store.scan(TOLERANT_ISSUES)}
    look_at = tracker.transactions.look_at
    doubtful = sorted(
        each
        for each in there.symmetric_difference(listed)
        if not isinstance(look_at(each), Broken)  # that is for a person to decide
    )

    def body(draft: Draft) -> None:
        record = draft.index()
        kept = [each for each in dict.fromkeys(record.all_ids) if each not in doubtful or draft.lookup(each)]
        new = [each for each in doubtful if each not in kept and draft.lookup(each) is not None]
        ids = [*kept, *new]
        deleted = [each for each in record.deleted_ids if each not in new]
        draft.set(INDEX, msgspec.structs.replace(record, all_ids=ids, deleted_ids=deleted))
        draft.record("index_repaired", "", entered=new)

    named = [each for each in doubtful if is_safe_name(each)]
    seen = Seen(dict.fromkeys(doubtful), {})
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
            issues=filter(seen.can_name, seen.issues),
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
