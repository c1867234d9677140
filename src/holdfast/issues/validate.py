"""Validation of a tracker against the rules, and repair of findings that have only one possible repair.

Cycles, unreadable documents, and commits that another program interfered with are reported and left to people.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import cached_property, partial

import msgspec

from holdfast import findings
from holdfast.errors import Changed, Corrupt, Failure, NotInitialised
from holdfast.findings import Check, Finding
from holdfast.fs.names import is_safe_name
from holdfast.issues import model, rules
from holdfast.issues.graph import in_order
from holdfast.issues.index import IndexChange, deleted_issues, rebuild_index
from holdfast.issues.model import CLAIMS, DEPENDENTS, EVENTS, GATES, GRAPH, ISSUES, Issue, State, has_index
from holdfast.issues.reading import TOLERANT_ISSUES, end_of_events, read_listing, tried
from holdfast.issues.rules import Broken
from holdfast.issues.tracker import Tracker
from holdfast.issues.transactions import Draft
from holdfast.store.model import Key, Record, Unreadable

REPAIR_TOGETHER = 50  # issues, each with its dependents: etcd limits the documents in one transaction
FAMILY = "jit/"  # the names of all documents of a tracker begin with this
OF_COMMITS = frozenset({"commit unfinished"})
"""The codes of findings about commits to several documents."""


def examine(tracker: Tracker) -> list[Finding]:
    """All findings; `subject` is the id of the issue, if any. Changes nothing."""
    return findings.examine(_Examination(tracker), _CHECKS, _stopped)


def repair(tracker: Tracker) -> list[Finding]:
    """Repair findings, each in a transaction of its own; return those that remain. Dependents that nobody has recorded
    are recorded, if all issues can be read."""
    repaired = findings.repair(lambda: _Examination(tracker), _CHECKS, _stopped)
    for _, failure in repaired.failed:
        raise failure
    if not repaired.remaining and tracker.store.read(GRAPH) is None:
        tracker.transactions.retrying(partial(rewrite_dependents, tracker))
    return list(repaired.remaining)


def finding_to_json(finding: Finding) -> dict[str, object]:
    return {
        "kind": finding.code,
        "issue_id": finding.subject,
        "message": finding.message,
        "fixable": finding.fixable,
        "hint": finding.remedy,
    }


class _Examination:
    """One pass over a tracker. Nothing that depends on an unreadable document is judged."""

    def __init__(self, tracker: Tracker) -> None:
        self.tracker = tracker
        self.store = tracker.store
        self.unreadable: list[Finding] = []
        self.listing = read_listing(self.store)
        self.listed = self.listing.ids if has_index(self.store) else self._stored
        if not (self.listing.exists or any(self.store.scan(TOLERANT_ISSUES))):
            raise NotInitialised("there is no issue tracker here")

    @cached_property
    def _loaded(self) -> dict[str, Issue | Broken]:
        """Every issue, whether the index lists it or not."""
        names = (name for name in dict.fromkeys((*self.listed, *self._stored)) if name not in self.deleted)
        loaded = ((name, self.tracker.transactions.look_at(name)) for name in names)
        return {name: issue for name, issue in loaded if issue is not None}

    @cached_property
    def _stored(self) -> list[str]:
        return [name for name, _ in self.store.scan(TOLERANT_ISSUES)]

    @cached_property
    def deleted(self) -> set[str]:
        """Deleted issues whose files are still there, because git has merged a branch that changed them."""
        unlisted = set(self._stored).difference(self.listed)
        return unlisted and unlisted & (deleted_issues(self.store) | self.listing.deleted)

    @cached_property
    def issues(self) -> dict[str, Issue]:
        return {name: issue for name, issue in self._loaded.items() if isinstance(issue, Issue)}

    @cached_property
    def broken(self) -> set[str]:
        """The issues that cannot be read."""
        broken = {name: issue for name, issue in self._loaded.items() if isinstance(issue, Broken)}
        self.unreadable += [_unreadable(name, issue.failure) for name, issue in broken.items()]
        return set(broken)

    def read(self, key: Key[Record], issue_id: str = "") -> Record | None:
        """Another document, if it exists and can be read."""
        found = tried(self.store, key, issue_id)
        if isinstance(found, Broken):
            self.unreadable.append(_unreadable(issue_id, found.failure))
            return None
        return found


def _finding(
    code: str, issue_id: str, message: str, fix: Callable[[], object] | None = None, *, remedy: str = ""
) -> Finding:
    make = Finding if fix is None else findings.warning
    return make(code, issue_id, message, "The tracker is inconsistent.", remedy, fix)


def _unreadable(issue_id: str, failure: Failure) -> Finding:
    return Finding(
        "unreadable",
        issue_id,
        f"{failure.message} ({failure.code})",
        "Other issues work without it; its dependents keep waiting. It was not changed.",
        failure.hint,
    )


def _stopped(examination: _Examination, check: Check[_Examination], failure: Failure) -> Iterator[Finding]:
    if not isinstance(failure, Corrupt):
        raise failure
    yield _unreadable("", failure)


def _check_commits(examination: _Examination) -> Iterator[Finding]:
    """Commits to several documents of the tracker whose process died after the commit point."""
    files = examination.store.files
    if files is None:
        return
    for commit in files.unfinished_commits():
        if not any(name.startswith(FAMILY) for name in commit.documents):
            continue
        yield _finding(
            "commit unfinished",
            "",
            f"the commit {commit.id} is decided, but its process died before it was applied",
            partial(files.finish_commits, [commit]),
            remedy="Nothing is lost: all readers see it applied. 'holdfast issue validate --fix' applies it on "
            "disk, as does the next change of an issue.",
        )


def _check_index(examination: _Examination) -> Iterator[Finding]:
    tracker, listed = examination.tracker, set(examination.listed)
    fix = partial(tracker.transactions.retrying, partial(rebuild_index, tracker.transactions))
    for each in sorted(examination.deleted):
        yield _finding(
            "deleted",
            each,
            "it was deleted, but its file exists, as after a merge with a branch that changed it",
            remedy=f"Remove .jit/issues/{each}.json, or list its id in .jit/index.json again to keep it.",
        )
    if examination.listing.problem:
        yield _finding("index", "", examination.listing.problem, fix)
        return
    if len(listed) != len(examination.listed):
        yield _finding("index", "", "the index lists an id twice", fix)
    for each in examination.listed:
        if each not in examination.issues and each not in examination.broken:
            yield _finding("missing", each, "the index lists it, but there is no such issue", fix)
    for each in examination.issues:
        if each not in listed:
            yield _finding("unlisted", each, "the index does not list it", fix)


def _check_graph(examination: _Examination) -> Iterator[Finding]:
    tracker, issues, broken = examination.tracker, examination.issues, examination.broken
    edges = {each.id: each.dependencies for each in issues.values()}
    for cycle in in_order(edges)[1]:
        yield _finding("circle", cycle[0], " -> ".join(cycle))
    dependents: dict[str, set[str]] = {}
    for issue_id, dependencies in edges.items():
        for on in dependencies:
            dependents.setdefault(on, set()).add(issue_id)
            if on not in issues and on not in broken:
                message = f"it depends on {on}, which does not exist"
                yield _finding("dangling", issue_id, message, partial(_detach, tracker, issue_id, on))
    stored = _stored_dependents(examination)
    graph = examination.read(GRAPH)
    actual = {on: each for on, each in dependents.items() if on in issues}
    complete = graph is not None and graph.dependents_complete
    is_recorded = tracker.transactions.records_dependents
    if not is_recorded or (graph is None and not any(examination.store.scan(DEPENDENTS.tolerant()))):
        return  # dependents are found by reading all issues
    if stored is not None and not (complete and stored == actual):
        message = "the record of dependents is incomplete"
        if examination.unreadable:
            remedy = "First repair what cannot be read: its dependencies are unknown."
            yield _finding("dependents", "", message, remedy=remedy)
        else:
            rewrite = partial(rewrite_dependents, tracker)
            yield _finding("dependents", "", message, partial(tracker.transactions.retrying, rewrite))


def _stored_dependents(examination: _Examination) -> dict[str, set[str]] | None:
    """The recorded dependents of each issue, as far as these can be read; None if some records cannot."""
    stored, broken, whole = dict[str, set[str]](), examination.broken, True
    for on, document in examination.store.scan(DEPENDENTS.tolerant()):
        if isinstance(document.record, Unreadable):
            examination.unreadable.append(_unreadable(on, document.record.failure))
            whole = False
        elif on not in broken and (left := set(document.record.dependents) - broken):
            stored[on] = left
    return stored if whole else None


def _check_issues(examination: _Examination) -> Iterator[Finding]:
    gates = examination.read(GATES)
    known = gates.gates if gates else {}
    for issue in examination.issues.values():
        for gate in issue.gates_required:
            if gate not in known:
                yield _finding("gate", issue.id, f"it requires the gate {gate}, which is not defined")
        yield from _check_state(examination, issue)


def _check_state(examination: _Examination, issue: Issue) -> Iterator[Finding]:
    tracker, lookup, broken = examination.tracker, examination.issues.get, examination.broken
    actual = rules.state_of(issue, lookup)
    if broken.isdisjoint(issue.dependencies) and actual is not issue.state:
        message = f"it is stored as {issue.state.value}, but is {actual.value}"
        yield _finding("state", issue.id, message, partial(tracker.transactions.settle, [issue.id]))
    if issue.state is State.DONE:
        waiting = [each for each in rules.open_dependencies(issue, lookup) if each not in broken]
        if waiting:
            yield _finding("done too early", issue.id, f"it is done, but waits for {', '.join(waiting)}")
        if issue.open_gates():
            yield _finding("done too early", issue.id, f"not passed: {', '.join(issue.open_gates())}")
    claim = examination.read(CLAIMS.key(issue.id), issue.id)
    if rules.is_abandoned(issue, claim, tracker.transactions.moment()):
        yield findings.note(
            "abandoned",
            issue.id,
            f"the claim of {issue.assignee} has expired",
            "The next agent that looks for work takes it over.",
            fix=partial(tracker.claims.reclaim, issue.id),
        )


def _check_events(examination: _Examination) -> Iterator[Finding]:
    for entry in examination.store.entries(EVENTS):
        if entry.record.type == model.IssueEventCodec.UNREADABLE:
            yield _finding("event", "", f"at {entry.position}: {entry.record.unknown['problem']}")


_CHECKS: tuple[Check[_Examination], ...] = (
    Check("commits", _check_commits),
    Check("index", _check_index),
    Check("graph", _check_graph),
    Check("issues", _check_issues),
    Check("events", _check_events),
    Check("documents", lambda examination: examination.unreadable),  # what the others could not read
)


def _detach(tracker: Tracker, issue_id: str, missing: str) -> None:
    if is_safe_name(missing):
        tracker.dependencies.remove(issue_id, missing)
        return

    def body(draft: Draft) -> None:  # a name that no document can have
        draft.put(rules.without_dependency(draft.issue(issue_id), missing))
        draft.record("dependency_removed", issue_id, depends_on=missing)

    tracker.transactions.change(body, issues=[issue_id])


def rewrite_dependents(tracker: Tracker) -> None:
    """Rewrite the record of dependents from the dependencies.

    It is declared incomplete first, so that nobody relies on it meanwhile; then rewritten part by part, each
    under the locks of its issues; and declared complete only if no edge was added since the start.

    Where no index lists new issues, their events tell whether one was created before the last part was rewritten. An
    issue that is created later records its edges itself, and they are not overwritten any more.
    """
    begun = _declare_complete(tracker, None)
    last_event = _end_of_events(tracker)
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
    if _end_of_events(tracker) != last_event:
        raise Changed("issues were changed meanwhile")
    _declare_complete(tracker, begun)


def _end_of_events(tracker: Tracker) -> int:
    return 0 if has_index(tracker.store) else end_of_events(tracker.store)


def _declare_complete(tracker: Tracker, begun: tuple[int, str] | None) -> tuple[int, str]:
    """Declare the record of dependents complete if no edge was added since `begun`; without it, incomplete.

    Edges are added to existing issues, which is counted, or with new ones, which the index lists, if there is one.
    """
    lists = IndexChange().keys if has_index(tracker.store) else []

    def body(draft: Draft) -> tuple[int, str]:
        graph, listing = draft.get(GRAPH) or model.Graph(), map(draft.view.document, lists)
        seen = int(graph.epoch), " ".join(each.version if each else "" for each in listing)
        if begun not in (None, seen):
            raise Changed("dependencies were added meanwhile")
        draft.set(GRAPH, msgspec.structs.replace(graph, dependents_complete=begun is not None))
        return seen

    return tracker.transactions.change(body, also=[*lists, GRAPH])
