"""All issues at once, without locks.

The index says, in one read, which issues there are: so a batch that is created or a deletion is seen
whole. Each issue is read as of one moment, and its state follows from its dependencies, so a change
that moves an issue and those that depend on it shows all of its effect or none. Where an issue refers
to one that was not found, both are read again: by then whatever made the difference is over.
"""

from __future__ import annotations

from collections.abc import Iterator

from holdfast.errors import NotInitialised
from holdfast.fs.names import is_safe_name
from holdfast.issues import claims, rules
from holdfast.issues.claim_records import ClaimRecord
from holdfast.issues.keys import CLAIMS, INDEX, ISSUES
from holdfast.issues.records import Issue, State
from holdfast.store.base import Store


class Snapshot:
    """The issues of one tracker, in the order in which they were created."""

    def __init__(self, store: Store, issues: dict[str, Issue], now: float) -> None:
        self.issues = issues
        self.now = now
        self._store = store
        self._claims: dict[str, ClaimRecord | None] = {}

    def __iter__(self) -> Iterator[Issue]:
        return iter(self.issues.values())

    def __len__(self) -> int:
        return len(self.issues)

    def lookup(self, issue_id: str) -> Issue | None:
        return self.issues.get(issue_id)

    def state(self, issue: Issue) -> State:
        """The state that the issue is in."""
        return rules.state_of(issue, self.lookup)

    def claim(self, issue: Issue) -> ClaimRecord | None:
        """The claim of an issue; looked up when it is asked for."""
        if issue.id not in self._claims:
            document = self._store.read(CLAIMS.key(issue.id))
            self._claims[issue.id] = document.record if document else None
        return self._claims[issue.id]

    def is_abandoned(self, issue: Issue) -> bool:
        """Whether somebody has claimed it and has not been heard of since."""
        return issue.state is State.IN_PROGRESS and claims.is_abandoned(issue, self.claim(issue), self.now)

    def is_available(self, issue: Issue, assignee: str | None = None) -> bool:
        """Whether somebody can begin to work on it now: nobody else does, and it waits for nobody."""
        if self.is_abandoned(issue):
            return not rules.open_dependencies(issue, self.lookup)
        return (
            issue.state in rules.WAITING
            and issue.assignee in (None, assignee)
            and not rules.open_dependencies(issue, self.lookup)
        )

    def ready(self, assignee: str | None = None) -> list[Issue]:
        """What can be worked on now, the most urgent first, then what was left alone longest.

        So work that fails again and again goes behind the rest of its priority each time, and does not keep
        everybody from it; what nobody has touched comes in the order in which it was created.
        """
        available = [issue for issue in self if self.is_available(issue, assignee)]
        return sorted(available, key=_urgency)

    def blocked(self) -> list[tuple[Issue, list[str]]]:
        """What waits for others, and for whom."""
        waiting = ((issue, rules.open_dependencies(issue, self.lookup)) for issue in self)
        return [(issue, on) for issue, on in waiting if on and issue.state not in rules.FINISHED]


def _urgency(issue: Issue) -> tuple[int, str, str]:
    """What issues are sorted by; those of one batch, which are equal in this, stay in the index's order."""
    return (-issue.priority.rank, issue.updated_at or issue.created_at, issue.created_at)


def take_snapshot(store: Store) -> Snapshot:
    """All issues as they are now. One that cannot be understood is `Corrupt`: it is not left out."""
    index = store.read(INDEX)
    if index is None:
        raise NotInitialised("there is no issue tracker here")
    found = {name: document.record for name, document in store.scan(ISSUES)}
    issues: dict[str, Issue] = {}
    for issue_id in index.record.all_ids:
        issue = found.get(issue_id) or read_issue(store, issue_id)  # None: it was deleted since
        if issue is not None:
            issues[issue_id] = issue
    _mend(store, issues)
    return Snapshot(store, issues, store.now())


def _mend(store: Store, issues: dict[str, Issue]) -> None:
    """Read again what refers to an issue that was not found, and look for that one by its name."""
    todo = list(issues)
    missing: set[str] = set()
    while todo:
        issue_id = todo.pop()
        if issue_id not in issues:
            continue
        before = issues[issue_id]
        lost = [each for each in before.dependencies if each not in issues]
        if not lost:
            continue
        for each in lost:
            found = None if each in missing else read_issue(store, each)
            if found is None:
                missing.add(each)
            else:
                issues[each] = found
                todo.append(each)
        again = read_issue(store, issue_id)
        if again is None:
            del issues[issue_id]
        else:
            issues[issue_id] = again
            if again.dependencies != before.dependencies:
                todo.append(issue_id)


def read_issue(store: Store, issue_id: str) -> Issue | None:
    """One issue as it is now, or None."""
    if not is_safe_name(issue_id):  # a dependency that another program has written: no issue has that name
        return None
    document = store.read(ISSUES.key(issue_id))
    return None if document is None else document.record
