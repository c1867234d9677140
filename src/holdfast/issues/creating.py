"""Creation of issues: single ones, batches, parts of an issue, imports."""

from __future__ import annotations

import uuid
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import msgspec

from holdfast.errors import AlreadyExists, Changed, NotFound, UsageFailure
from holdfast.fs.names import checked_actor, safe_name
from holdfast.issues import model, rules
from holdfast.issues.dependencies import Walk, cycle, without_implied
from holdfast.issues.gates import check_defined
from holdfast.issues.graph import find_path, in_order
from holdfast.issues.index import plan_index_change
from holdfast.issues.model import DEPENDENTS, GATES, GRAPH, ISSUES, Issue, Priority, State, without_repeats
from holdfast.issues.scopes import checked_touches
from holdfast.issues.transactions import Draft, Transactions
from holdfast.store.model import Key

MOST_TOGETHER = 250  # the most issues that one transaction creates; fewer if the store has a lower limit
_FIXED = 8  # other documents and streams that such a transaction names, at most


class NewIssue(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """An issue to create. `depends_on` holds ids, or `key`s of other issues in the batch."""

    title: str
    description: str = ""
    priority: Priority = Priority.NORMAL
    depends_on: tuple[str, ...] = ()
    gates: tuple[str, ...] = ()
    labels: tuple[str, ...] = ()
    touches: tuple[str, ...] = ()
    context: dict[str, str] = {}
    assignee: str | None = None
    key: str | None = None

    def issue(self, issue_id: str, depends_on: Iterable[str]) -> Issue:
        """The issue with this id and these dependencies."""
        issue = Issue(
            id=issue_id,
            title=model.checked_title(self.title),
            description=model.checked_description(self.description),
            priority=self.priority,
            assignee=None if self.assignee is None else checked_actor(self.assignee, "assignee"),
            dependencies=without_repeats(depends_on),
            labels=model.checked_labels(self.labels),
            touches=checked_touches(self.touches),
            context=model.checked_context(self.context),
        )
        return rules.with_gates(issue, self.gates)


class Created(NamedTuple):
    """A created issue, and the dependencies left out because others imply them."""

    issue: Issue
    implied: Mapping[str, list[str]]


class Creating:
    def __init__(self, transactions: Transactions) -> None:
        self._transactions = transactions

    def create(self, new: Sequence[NewIssue]) -> list[Created]:
        """Create issues; up to `MOST_TOGETHER` of them in one transaction, or as many as the store accepts."""
        ids = _new_ids(len(new))
        by_key = {each.key: issue_id for each, issue_id in zip(new, ids, strict=True) if each.key is not None}
        if len(by_key) != sum(each.key is not None for each in new):
            raise UsageFailure("two issues in the batch have the same key")
        issues = [
            each.issue(issue_id, [by_key.get(on, on) for on in each.depends_on])
            for each, issue_id in zip(new, ids, strict=True)
        ]
        return self._add_all(issues, imported=False)

    def adopt(self, issues: Sequence[Issue]) -> list[Created]:
        """Import issues under the ids and states that they have."""
        for each in issues:
            safe_name(each.id, what="issue id")
            model.checked_title(each.title)
            model.checked_description(each.description)
            model.checked_labels(each.labels)
            checked_touches(each.touches)
            model.checked_context(each.context)
        if len({each.id for each in issues}) != len(issues):
            raise UsageFailure("the import contains an issue twice")
        return self._add_all(issues, imported=True)

    def break_down(self, issue_id: str, parts: Sequence[NewIssue]) -> list[Created]:
        """Create the parts of an issue: they inherit its dependencies, and it depends on them."""
        if not 0 < len(parts) <= MOST_TOGETHER:
            raise UsageFailure(f"an issue is broken down into 1 to {MOST_TOGETHER} parts, not {len(parts)}")
        return self._transactions.retrying(lambda: self._break_down(issue_id, parts))

    def _add_all(self, issues: Sequence[Issue], *, imported: bool) -> list[Created]:
        batch = {each.id: each for each in issues}
        order, cycles = in_order({each.id: each.dependencies for each in issues})
        if cycles:
            raise cycle(cycles[0])
        created: dict[str, Created] = {}
        places = {each.id: place for place, each in enumerate(issues)}
        for part in self._parts([batch[each] for each in order]):
            add = lambda part=part: self._add(part, places, imported=imported)  # noqa: E731
            for each in self._transactions.retrying(add):
                created[each.issue.id] = each
        return [created[each.id] for each in issues]

    def _parts(self, issues: Sequence[Issue]) -> Iterator[list[Issue]]:
        """The issues in parts that one transaction can create: it names each issue with its dependencies, and the
        dependents of these, and appends an event for each, which also gets a place in the queue."""
        part, new, touched, server = list[Issue](), set[str](), set[str](), self._transactions.store.server
        for issue in issues:
            on = touched.union(issue.dependencies)
            size = _FIXED + 3 * (len(part) + 1) + len(on) + len(on - new)
            is_too_large = server is not None and server.exceeded_limit(size) is not None
            if part and (is_too_large or len(part) == MOST_TOGETHER):
                yield part
                part, new, on = [], set(), set(issue.dependencies)
            part.append(issue)
            new.add(issue.id)
            touched = on
        if part:
            yield part

    def _add(self, issues: Sequence[Issue], places: Mapping[str, int], *, imported: bool) -> list[Created]:
        """Create issues, none of which depends on a later one, and list them in the order of `places`."""
        walk = Walk(self._transactions)
        new = {each.id: each for each in issues}
        walk.learn({each.id: each.dependencies for each in issues})
        needed = {each.id: without_implied(each.dependencies, walk) for each in issues}
        if imported:
            _check_cycles(issues, walk)
        existing = without_repeats(on for each in issues for on in each.dependencies if on not in new)
        touched = without_repeats(on for each in issues for on in each.dependencies)

        index = plan_index_change(self._transactions)

        def body(draft: Draft) -> list[Created]:
            for each in new:
                if draft.view.get(ISSUES.key(each)) is not None:
                    raise AlreadyExists(f"issue {each} already exists", issue_id=each)
            for on in existing:
                if draft.lookup(on) is None:
                    raise NotFound(f"the dependency {on} does not exist", issue_id=on)
            if imported:
                walk.check(draft, walk.known())
            check_defined(draft, (gate for each in issues for gate in each.gates_required))
            made = [self._draft(draft, each, *needed[each.id]) for each in issues]
            if imported:
                draft.add_edges((each.issue.id, on) for each in made for on in each.issue.dependencies)
            index.add(draft, sorted(new, key=lambda each: places[each]))
            return made

        also: list[Key[Any]] = [*index.keys, *map(DEPENDENTS.key, touched)]
        also += [GATES] if any(each.gates_required for each in issues) else []
        also += [GRAPH] if imported else []
        return self._transactions.change(body, issues=[*new, *existing], also=also)

    def _draft(self, draft: Draft, issue: Issue, needed: list[str], implied: dict[str, list[str]]) -> Created:
        issue = msgspec.structs.replace(issue, dependencies=tuple(needed))
        for on in needed:
            draft.add_dependent(on, issue.id)
        issue = draft.put(rules.in_line(issue, draft.lookup))
        draft.record("issue_created", issue.id, title=issue.title, priority=issue.priority.value)
        return Created(issue, implied)

    def _break_down(self, issue_id: str, parts: Sequence[NewIssue]) -> list[Created]:
        whole = self._transactions.need(issue_id)
        seen, index = self._transactions.with_dependencies(whole), plan_index_change(self._transactions)
        ids = _new_ids(len(parts))

        def body(draft: Draft) -> list[Created]:
            issue = draft.issue(issue_id)
            if issue.dependencies != whole.dependencies:
                raise Changed(f"{issue_id} was changed meanwhile", issue_id=issue_id)
            rules.check_changeable(issue, "it cannot be broken down")
            check_defined(draft, (gate for each in parts for gate in each.gates))
            made = [
                self._draft(draft, each.issue(part_id, issue.dependencies), list(issue.dependencies), {})
                for each, part_id in zip(parts, ids, strict=True)
            ]
            for on in issue.dependencies:  # it still waits for these, through its parts
                draft.drop_dependent(on, issue_id)
            for each in ids:
                draft.add_dependent(each, issue_id)
            state = State.BACKLOG if issue.state in rules.WAITING else issue.state
            draft.put(msgspec.structs.replace(issue, dependencies=tuple(ids), state=state))
            draft.add_edges((issue_id, each) for each in ids)
            draft.record("issue_broken_down", issue_id, parts=ids)
            index.add(draft, ids)
            return made

        also: list[Key[Any]] = [*index.keys, GRAPH, GATES, *map(DEPENDENTS.key, [*ids, *whole.dependencies])]
        return self._transactions.change(body, issues=[*seen.named(), *ids], seen=seen, also=also)


def _new_ids(count: int) -> list[str]:
    """Ids in the order in which they sort: issues of one age are listed in the order of their ids."""
    return sorted(str(uuid.uuid4()) for _ in range(count))


def _check_cycles(issues: Sequence[Issue], walk: Walk) -> None:
    """An imported issue that others already refer to may close a cycle."""
    for issue in issues:
        for on in issue.dependencies:
            if path := find_path(walk.edges, on, issue.id):
                raise cycle([issue.id, *path])
