"""One transaction on issues while it is being decided: what is there, what shall be, what to record.

A draft is made anew each time the decision runs, does no I/O and rolls no dice: the same view gives
the same changes. Whatever it changes, it also records: no change of state without its event.
"""

from __future__ import annotations

import uuid
from collections.abc import Iterable, Mapping
from typing import Any

import msgspec

from holdfast.clock import Now, format_instant
from holdfast.errors import Changed, NotFound, NotInitialised
from holdfast.issues import claims, rules
from holdfast.issues.claim_records import ClaimRecord
from holdfast.issues.keys import CLAIMS, DEPENDENTS, EVENTS, GRAPH, INDEX, ISSUES
from holdfast.issues.reading import misnamed
from holdfast.issues.records import Dependents, Event, Graph, Index, Issue, State
from holdfast.store.model import Append, Change, Create, Delete, Key, Replace, View

MOST_RECENT = 256
"""How many of the last additions of dependencies are remembered."""

_NUMBERS = 1 << 128


class Draft:
    """What is about to be committed. Issues that were named are looked up in the view, others in
    `evidence`: what was read before, without locks. About one that is in neither, nothing is known."""

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
        self._events: list[Event] = []
        self._told: set[str] = set()

    # --- Issues ------------------------------------------------------------------------------------

    def lookup(self, issue_id: str) -> Issue | None:
        """An issue as it shall be."""
        if issue_id in self._issues:
            return self._issues[issue_id]
        if issue_id in self._named:
            found = self.view.get(ISSUES.key(issue_id))
            if found is not None and found.id != issue_id:
                raise misnamed(issue_id, found)
            return found
        if issue_id in self._evidence:
            return self._evidence[issue_id]
        raise Changed(f"{issue_id} came into play while this was being decided", issue_id=issue_id)

    def issue(self, issue_id: str) -> Issue:
        """An issue that must be there."""
        found = self.lookup(issue_id)
        if found is None:
            raise no_issue(issue_id)
        return found

    def put(self, issue: Issue, *, told: bool = False) -> Issue:
        """Let an issue be this. `told`: an event of its own says which state it goes to."""
        before = self.view.get(ISSUES.key(issue.id))
        if before == issue:
            self._issues.pop(issue.id, None)
            return issue
        created_at = issue.created_at or self.at
        gates = {
            name: {**each, "updated_at": each.get("updated_at") or self.at}
            for name, each in issue.gates_status.items()
        }
        issue = msgspec.structs.replace(issue, created_at=created_at, updated_at=self.at, gates_status=gates)
        self._issues[issue.id] = issue
        if told or before is None:
            self._told.add(issue.id)
        return issue

    def drop(self, issue_id: str) -> None:
        """Let an issue be gone, with all that belongs to it."""
        self._issues[issue_id] = None
        for family in (CLAIMS, DEPENDENTS):
            self._others[family.key(issue_id)] = None

    def settle(self, issue_ids: Iterable[str]) -> None:
        """Bring the stored state of issues in line with what they depend on."""
        for issue_id in issue_ids:
            issue = self.lookup(issue_id)
            if issue is not None:
                self.put(rules.in_line(issue, self.lookup))

    # --- What belongs to them ----------------------------------------------------------------------

    def get(self, key: Key[Any]) -> Any:
        """Another document as it shall be."""
        return self._others[key] if key in self._others else self.view.get(key)

    def set(self, key: Key[Any], record: object) -> None:
        """Let another document be this."""
        self._others[key] = record

    def index(self) -> Index:
        found = self.get(INDEX)
        if found is None:
            raise NotInitialised("there is no issue tracker here")
        assert isinstance(found, Index)
        return found

    def claim(self, issue_id: str) -> ClaimRecord | None:
        found = self.get(CLAIMS.key(issue_id))
        assert found is None or isinstance(found, ClaimRecord)
        return found

    def set_claim(self, issue_id: str, record: ClaimRecord | None) -> None:
        if record != self.claim(issue_id):
            self.set(CLAIMS.key(issue_id), record)

    def end_claim_unless_working(self, issue: Issue) -> None:
        """Who has finished, or was sent back, holds no claim any more."""
        record = self.claim(issue.id)
        if record is not None and issue.state not in (State.IN_PROGRESS, State.GATED):
            self.set_claim(issue.id, claims.ended(record))

    def dependents(self, issue_id: str) -> tuple[str, ...]:
        found = self.get(DEPENDENTS.key(issue_id))
        return found.dependents if isinstance(found, Dependents) else ()

    def set_dependents(self, issue_id: str, dependents: Iterable[str]) -> None:
        known = self.get(DEPENDENTS.key(issue_id)) or Dependents(issue_id=issue_id)
        wanted = tuple(dict.fromkeys(dependents))
        if wanted != known.dependents:
            record = msgspec.structs.replace(known, dependents=wanted) if wanted else None
            self.set(DEPENDENTS.key(issue_id), record)

    def add_dependent(self, on: str, issue_id: str) -> None:
        self.set_dependents(on, (*self.dependents(on), issue_id))

    def drop_dependent(self, on: str, issue_id: str) -> None:
        self.set_dependents(on, (each for each in self.dependents(on) if each != issue_id))

    def add_edges(self, edges: Iterable[tuple[str, str]]) -> None:
        """Count additions to the graph, so that those who have walked it without locks can tell."""
        graph, new = self.get(GRAPH) or Graph(), list(edges)
        if new:
            recent = [*graph.recent, *new][-MOST_RECENT:]
            self.set(GRAPH, msgspec.structs.replace(graph, epoch=graph.epoch + len(new), recent=recent))

    # --- The outcome -------------------------------------------------------------------------------

    def record(self, type_: str, issue_id: str, **facts: object) -> None:
        """Say what happened; every event has an id of its own, and says who did it."""
        number = str(uuid.UUID(int=(self._seed + len(self._events)) % _NUMBERS))
        self._events.append(
            Event(
                type=type_,
                id=number,
                issue_id=issue_id,
                timestamp=self.at,
                unknown={**facts, "by": self.actor},
            )
        )

    def changes(self) -> list[Change]:
        """All of it."""
        for issue_id, issue in self._issues.items():
            before = self.view.get(ISSUES.key(issue_id))
            if issue is not None and before is not None and issue_id not in self._told:
                self._tell_state(before.state, issue)
        documents = {ISSUES.key(issue_id): issue for issue_id, issue in self._issues.items()} | self._others
        made = [
            change for key, record in documents.items() if (change := self._change(key, record)) is not None
        ]
        return [*made, *(Append(EVENTS, event) for event in self._events)]

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
    """The failure of naming an issue that is not there."""
    return NotFound(
        f"there is no issue {issue_id}",
        issue_id=issue_id,
        hint="See 'holdfast issue list'; it may have been deleted.",
    )
