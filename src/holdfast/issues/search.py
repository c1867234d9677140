"""Finding issues: by words, and by what they are."""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

from holdfast.issues.reading import Snapshot
from holdfast.issues.records import Issue, Priority, State


class Query(NamedTuple):
    """What is wanted. Everything that is given must fit; of several states or priorities, one."""

    words: tuple[str, ...] = ()
    states: tuple[State, ...] = ()
    priorities: tuple[Priority, ...] = ()
    assignee: str | None = None
    labels: tuple[str, ...] = ()

    def fits(self, issue: Issue, state: State) -> bool:
        """Whether an issue in this state is wanted."""
        return (
            (not self.states or state in self.states)
            and (not self.priorities or issue.priority in self.priorities)
            and (self.assignee is None or issue.assignee == self.assignee)
            and all(_has_label(issue, label) for label in self.labels)
            and (not self.words or _has_words(issue, self.words))
        )


def find(snapshot: Snapshot, query: Query) -> list[Issue]:
    """The issues that fit, in the order in which they were created."""
    return [issue for issue in snapshot if query.fits(issue, snapshot.state(issue))]


def _has_label(issue: Issue, wanted: str) -> bool:
    """A label, or with a `*` at the end all that begin like it."""
    if wanted.endswith("*"):
        return any(label.startswith(wanted[:-1]) for label in issue.labels)
    return wanted in issue.labels


def _has_words(issue: Issue, words: tuple[str, ...]) -> bool:
    text = "\n".join(_texts(issue)).casefold()
    return all(word in text or issue.id.startswith(word) for word in map(str.casefold, words))


def _texts(issue: Issue) -> Iterator[str]:
    yield from (issue.title, issue.description, issue.assignee or "", *issue.labels)
    yield from (f"{name}={value}" for name, value in issue.context.items())
