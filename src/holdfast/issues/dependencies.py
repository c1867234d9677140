"""Adding and removing dependencies: never a circle, whoever adds what at the same time.

To know that an edge closes no circle one has to look at everything that can be reached from its end.
That is done without locks, and is still true when the edge is committed, because:

1. The count of additions (`jit/graph`) is read before the first issue.
2. The issues are walked.
3. The transaction names the count. Additions since 1 are listed there; removals do no harm. If one of
   them leads from an issue that was walked to one that was not, the way may go on from there: look
   again. Otherwise the walk is as good as new.
4. The edge, its reverse, and the new count are committed together.

If the walk has found a way, the issues on it are named instead, and the way is checked under the locks.

So additions exclude each other for a moment only, and none waits for all issues to be locked.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from collections.abc import Set as AbstractSet
from itertools import pairwise
from typing import NamedTuple

from holdfast.errors import Changed, DependencyCycle
from holdfast.issues import rules
from holdfast.issues.model import DEPENDENTS, GRAPH, Graph, Issue
from holdfast.issues.reading import Broken
from holdfast.issues.rules import find_path, reachable
from holdfast.issues.transactions import MOST_NAMED, Draft, Transactions


class Added(NamedTuple):
    """What came of adding a dependency. If nothing was added, `implied_by` is the way that makes it so:
    two issues if it was there already, more if it follows from others."""

    issue: Issue
    added: bool
    implied_by: tuple[str, ...] = ()


class Walk:
    """A look at the graph without locks, that can tell later whether it is still good."""

    def __init__(self, transactions: Transactions) -> None:
        graph = transactions.store.read(GRAPH)
        self.epoch = graph.record.epoch if graph else 0
        self._transactions = transactions
        self._edges: dict[str, tuple[str, ...]] = {}

    def edges(self, issue_id: str) -> tuple[str, ...]:
        """What an issue depends on. Raises if it cannot be read: a circle may lead through it."""
        if issue_id not in self._edges:
            issue = self._transactions.read(issue_id)
            self._edges[issue_id] = issue.dependencies if issue else ()
        return self._edges[issue_id]

    def edges_as_known(self, issue_id: str) -> tuple[str, ...]:
        """The same for who asks what follows from what: of one that cannot be read nothing is known."""
        if issue_id not in self._edges:
            found = self._transactions.look_at(issue_id)
            if isinstance(found, Broken):
                return ()
            self._edges[issue_id] = found.dependencies if found else ()
        return self._edges[issue_id]

    def learn(self, edges: Mapping[str, tuple[str, ...]]) -> None:
        """Take edges for given that are about to be made."""
        self._edges.update(edges)

    def known(self) -> set[str]:
        """All that was looked at."""
        return set(self._edges)

    def check(self, draft: Draft, walked: AbstractSet[str]) -> None:
        """Raise `Changed` unless there is still no way out of what was walked."""
        graph = draft.get(GRAPH) or Graph()
        count = graph.epoch - self.epoch
        if count == 0:
            return
        leads_on = any(each in walked and on not in walked for each, on in graph.recent[-count:])
        if count > len(graph.recent) or leads_on:
            raise Changed("dependencies were added while this one was being looked at")

    def check_way(self, draft: Draft, way: Sequence[str]) -> None:
        """Raise `Changed` unless the way that was found is still there: the issues on it are named.

        One that is too long for that was there when the walk began, if nothing was added since.
        """
        if len(way) > MOST_NAMED:
            if (draft.get(GRAPH) or Graph()).epoch != self.epoch:
                raise Changed("dependencies were added while this one was being looked at")
            return
        for here, there in pairwise(way):
            issue = draft.lookup(here)
            if issue is None or there not in issue.dependencies:
                raise Changed("a dependency was removed while this one was being looked at")


class Dependencies:
    """The edges between issues."""

    def __init__(self, transactions: Transactions) -> None:
        self._transactions = transactions

    def add(self, issue_id: str, on: str) -> Added:
        """Let one issue wait for another. A circle is refused and named; what follows already is skipped."""
        return self._transactions.retrying(lambda: self._add(issue_id, on))

    def remove(self, issue_id: str, on: str) -> Issue | None:
        """Let it wait no longer; None if it did not."""
        return self._transactions.retrying(lambda: self._remove(issue_id, on))

    def _add(self, issue_id: str, on: str) -> Added:
        walk = Walk(self._transactions)  # 1. the count, before anything else
        back = find_path(walk.edges, on, issue_id)  # 2. the walk
        there = None if back else find_path(walk.edges_as_known, issue_id, on)
        walked = reachable(walk.edges, [on]) if back is None else set()
        way = back or there or []

        def body(draft: Draft) -> Added:
            issue, target = draft.issue(issue_id), draft.issue(on)
            if on in issue.dependencies:
                return Added(issue, False, (issue_id, on))
            walk.check_way(draft, way)
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

        named = [issue_id, on, *way[:MOST_NAMED]]
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


def cycle(way: list[str]) -> DependencyCycle:
    """The refusal that names the way around."""
    shown = " -> ".join(way)
    return DependencyCycle(f"that would be a circle of dependencies: {shown}", path=way)


def without_implied(wanted: Iterable[str], walk: Walk) -> tuple[list[str], dict[str, list[str]]]:
    """The dependencies that are needed; and those that follow from the others, with the way."""
    wanted, edges = list(dict.fromkeys(wanted)), walk.edges_as_known
    implied: dict[str, list[str]] = {}
    for each in wanted:
        for other in wanted:
            if other != each and other not in implied and (way := find_path(edges, other, each)):
                implied[each] = way
                break
    return [each for each in wanted if each not in implied], implied
