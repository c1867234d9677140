"""Adding and removing dependencies; concurrent additions never close a cycle.

An edge closes no cycle if its start cannot be reached from its end. The walk that finds out takes no locks,
and its result still holds when the edge is committed, because:

1. The count of additions (`jit/graph`) is read before the first issue.
2. The issues are walked.
3. The transaction names the count, which lists the additions since step 1; removals do no harm. If an
   addition leads from a walked issue to one that was not, the walk starts again.
4. The edge, its reverse and the new count are committed together.

If the walk found a path, the issues on it are named instead, and the path is checked under the locks. So
additions exclude each other only briefly, and none locks all issues.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from collections.abc import Set as AbstractSet
from itertools import pairwise
from typing import NamedTuple

from holdfast.errors import Changed, DependencyCycle
from holdfast.issues import rules
from holdfast.issues.graph import find_path, reachable
from holdfast.issues.model import DEPENDENTS, GRAPH, Graph, Issue
from holdfast.issues.rules import Broken
from holdfast.issues.transactions import MOST_NAMED, Draft, Transactions


class Added(NamedTuple):
    """The result of adding a dependency. If nothing was added, `implied_by` is the path that implies it."""

    issue: Issue
    added: bool
    implied_by: tuple[str, ...] = ()


class Walk:
    """A walk of the graph without locks, which can be checked later."""

    def __init__(self, transactions: Transactions) -> None:
        graph = transactions.store.read(GRAPH)
        self.epoch = graph.record.epoch if graph else 0
        self._transactions = transactions
        self._edges: dict[str, tuple[str, ...]] = {}

    def edges(self, issue_id: str) -> tuple[str, ...]:
        """The dependencies of an issue; raises if it cannot be read, as a cycle may lead through it."""
        if issue_id not in self._edges:
            issue = self._transactions.read(issue_id)
            self._edges[issue_id] = issue.dependencies if issue else ()
        return self._edges[issue_id]

    def edges_as_known(self, issue_id: str) -> tuple[str, ...]:
        """The same, to find implied dependencies: an issue that cannot be read implies nothing."""
        if issue_id not in self._edges:
            found = self._transactions.look_at(issue_id)
            if isinstance(found, Broken):
                return ()
            self._edges[issue_id] = found.dependencies if found else ()
        return self._edges[issue_id]

    def learn(self, edges: Mapping[str, tuple[str, ...]]) -> None:
        """Add edges that are about to be created."""
        self._edges.update(edges)

    def known(self) -> set[str]:
        return set(self._edges)

    def check(self, draft: Draft, walked: AbstractSet[str]) -> None:
        """Raise `Changed` if an added edge leads out of what was walked."""
        graph = draft.get(GRAPH) or Graph()
        count = graph.epoch - self.epoch
        if count == 0:
            return
        leads_on = any(each in walked and on not in walked for each, on in graph.recent[-count:])
        if count > len(graph.recent) or leads_on:
            raise Changed("other dependencies were added meanwhile")

    def check_path(self, draft: Draft, path: Sequence[str]) -> None:
        """Raise `Changed` if the path no longer exists. The transaction names the issues on it, unless it is too long:
        then nothing may have been added since the walk began."""
        if len(path) > MOST_NAMED:
            if (draft.get(GRAPH) or Graph()).epoch != self.epoch:
                raise Changed("other dependencies were added meanwhile")
            return
        for here, there in pairwise(path):
            issue = draft.lookup(here)
            if issue is None or there not in issue.dependencies:
                raise Changed("a dependency was removed meanwhile")


class Dependencies:
    """The edges between issues."""

    def __init__(self, transactions: Transactions) -> None:
        self._transactions = transactions

    def add(self, issue_id: str, on: str) -> Added:
        """Make one issue depend on another. A cycle is refused; an implied dependency is skipped."""
        return self._transactions.retrying(lambda: self._add(issue_id, on))

    def remove(self, issue_id: str, on: str) -> Issue | None:
        """Remove a dependency; None if there is none."""
        return self._transactions.retrying(lambda: self._remove(issue_id, on))

    def _add(self, issue_id: str, on: str) -> Added:
        walk = Walk(self._transactions)  # 1. the count, before the first issue
        back = find_path(walk.edges, on, issue_id)  # 2. the walk
        there = None if back else find_path(walk.edges_as_known, issue_id, on)
        walked = reachable(walk.edges, [on]) if back is None else set()
        path = back or there or []

        def body(draft: Draft) -> Added:
            issue, target = draft.issue(issue_id), draft.issue(on)
            if on in issue.dependencies:
                return Added(issue, False, (issue_id, on))
            walk.check_path(draft, path)
            if back:
                raise cycle([issue_id, *back])
            if there:
                return Added(issue, False, tuple(there))
            walk.check(draft, walked)  # 3.
            issue = draft.put(rules.with_dependency(issue, target))
            draft.add_dependent(on, issue_id)
            draft.add_edges([(issue_id, on)])  # 4.
            draft.record("dependency_added", issue_id, depends_on=on)
            return Added(issue, True)

        named = [issue_id, on, *path[:MOST_NAMED]]
        return self._transactions.change(body, issues=named, also=[GRAPH, DEPENDENTS.key(on)])

    def _remove(self, issue_id: str, on: str) -> Issue | None:
        seen = self._transactions.with_dependencies(self._transactions.need(issue_id))

        def body(draft: Draft) -> Issue | None:
            issue = draft.issue(issue_id)
            if on not in issue.dependencies:
                return None
            issue = draft.put(rules.in_line(rules.without_dependency(issue, on), draft.lookup))
            draft.drop_dependent(on, issue_id)
            draft.record("dependency_removed", issue_id, depends_on=on)
            return issue

        return self._transactions.change(body, issues=seen.named(), seen=seen, also=[DEPENDENTS.key(on)])


def cycle(path: list[str]) -> DependencyCycle:
    return DependencyCycle(f"this would create a dependency cycle: {' -> '.join(path)}", path=path)


def without_implied(wanted: Iterable[str], walk: Walk) -> tuple[list[str], dict[str, list[str]]]:
    """The needed dependencies; and those that others imply, each with the path that implies it."""
    wanted, edges = list(dict.fromkeys(wanted)), walk.edges_as_known
    implied: dict[str, list[str]] = {}
    for each in wanted:
        for other in wanted:
            if other != each and other not in implied and (path := find_path(edges, other, each)):
                implied[each] = path
                break
    return [each for each in wanted if each not in implied], implied
