"""The graph of dependencies, drawn as text, for Graphviz or for Mermaid."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from holdfast.cli.output import printable
from holdfast.issues import rules
from holdfast.issues.model import Issue
from holdfast.issues.reading import IssueSet

SHORT = 8


class Picture:
    """The issues to be shown, and the edges between them."""

    def __init__(self, snapshot: IssueSet, *, everything: bool) -> None:
        self._snapshot = snapshot
        chosen = [issue for issue in snapshot if everything or issue.state not in rules.FINISHED]
        self._issues = {issue.id: issue for issue in chosen}
        self._edges = [(issue.id, on) for issue in chosen for on in issue.dependencies if on in self._issues]

    def as_record(self) -> dict[str, Any]:
        """Nodes and edges."""
        nodes = [
            {"id": each.id, "title": each.title, "state": self._state(each)} for each in self._issues.values()
        ]
        return {"nodes": nodes, "edges": [{"issue": issue, "depends_on": on} for issue, on in self._edges]}

    def text(self) -> Iterator[str]:
        """From what nobody waits for, down to what waits for nobody."""
        needed = {on for _, on in self._edges}
        shown: set[str] = set()
        for issue in self._issues.values():
            if issue.id not in needed:
                yield from self._below(issue, shown)

    def dot(self) -> Iterator[str]:
        """For Graphviz."""
        yield "digraph issues {"
        yield "  rankdir=LR; node [shape=box];"
        for issue in self._issues.values():
            label = f"{issue.id[:SHORT]}\\n{_quoted(issue.title)}\\n({self._state(issue)})"
            yield f'  "{issue.id}" [label="{label}"];'
        yield from (f'  "{issue}" -> "{on}";' for issue, on in self._edges)
        yield "}"

    def mermaid(self) -> Iterator[str]:
        """For Mermaid."""
        yield "graph LR"
        names = {issue_id: f"n{number}" for number, issue_id in enumerate(self._issues)}
        for issue in self._issues.values():
            title = printable(issue.title).replace('"', "#quot;").replace("<", "#lt;").replace(">", "#gt;")
            yield f'  {names[issue.id]}["{issue.id[:SHORT]}: {title} ({self._state(issue)})"]'
        yield from (f"  {names[issue]} --> {names[on]}" for issue, on in self._edges)

    def _below(self, start: Issue, shown: set[str]) -> Iterator[str]:
        todo = [(0, start)]
        while todo:
            level, issue = todo.pop()
            again = issue.id in shown and bool(issue.dependencies)
            title = printable(issue.title) + ("  (see above)" if again else "")
            yield "  " * level + f"{issue.id[:SHORT]} ({self._state(issue)}) {title}"
            if issue.id not in shown:
                below = [self._issues[on] for on in reversed(issue.dependencies) if on in self._issues]
                todo += [(level + 1, each) for each in below]
            shown.add(issue.id)

    def _state(self, issue: Issue) -> str:
        return self._snapshot.state(issue).value


def _quoted(text: str) -> str:
    return printable(text).replace("\\", "\\\\").replace('"', '\\"')
