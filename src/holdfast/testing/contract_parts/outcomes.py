"""Outcomes: when the answer to a commit gets lost, nobody is told a falsehood, and nothing is done twice."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest

from holdfast.errors import Failure, OutcomeUnknown
from holdfast.store.model import Append, Change, Create, Decision, Key, Replace, Store, Stream, View
from holdfast.testing.contract_clients import EVENTS, INDEX, ISSUES, LEDGER, Event, Item, number_of
from holdfast.testing.contract_parts.backend import Backend, When

ONE = ISSUES.key("one")
ROUNDS = 6

KINDS: dict[str, Sequence[Key[Item] | Stream[Event]]] = {
    "one document": [ONE],
    "two documents": [ONE, INDEX],
    "a document and a stream": [ONE, EVENTS],
    "a document and two streams": [ONE, EVENTS, LEDGER],
    "a stream": [EVENTS],
    "the ledger": [LEDGER],
}


class OutcomesContract(Backend):
    """Outcomes that are hard to know."""

    @pytest.mark.parametrize("kind", KINDS)
    @pytest.mark.parametrize("when", ["before", "after"])
    def test_what_is_said_agrees_with_what_is_seen_and_nothing_happens_twice(
        self, store: Store, when: When, kind: str
    ) -> None:
        named = KINDS[kind]
        with self.client(store) as other:
            for each in range(ROUNDS):
                before = self._count(other, named)
                problem = self._count_up_losing_the_answer(store, when, named, f"commit-{each}")

                after = self._count(other, named)
                if isinstance(problem, OutcomeUnknown):
                    assert problem.commit_id == f"commit-{each}"
                    assert after in (before, before + 1)
                else:
                    assert after == (before + 1 if problem is None else before)
                self._count_up(store, named, f"next-{each}")
                assert self._count(other, named) == after + 1

    def test_the_answers_really_get_lost(self, store: Store) -> None:
        """At least one commit fails in each way: else the other test shows nothing."""
        assert self._count_up_losing_the_answer(store, "before", [ONE, INDEX], "one") is not None
        assert self._count_up_losing_the_answer(store, "after", [ONE, INDEX], "two") is not None

    def _count_up_losing_the_answer(
        self, store: Store, when: When, named: Sequence[Key[Item] | Stream[Event]], commit_id: str
    ) -> Failure | None:
        try:
            with self.losing_answers(store, when):
                self._count_up(store, named, commit_id)
        except Failure as problem:
            return problem
        return None

    def _count_up(self, store: Store, named: Sequence[Key[Item] | Stream[Event]], commit_id: str) -> None:
        def decide(view: View, now: float) -> Decision[None]:
            changes: list[Change] = []
            for each in named:
                if isinstance(each, Stream):
                    changes.append(Append(each, Event(0)))
                else:
                    there = view.get(each)
                    number = 1 if there is None else there.number + 1
                    changes.append((Create if there is None else Replace)(each, Item(number)))
            return Decision(changes, None)

        store.transact(named, decide, commit_id=commit_id)

    def _count(self, store: Store, named: Sequence[Key[Item] | Stream[Event]]) -> int:
        """How often it was counted up, by all that was named alike."""
        counts = {_count(store, each) for each in named}
        assert len(counts) == 1, f"a commit was made by halves: {counts}"
        return counts.pop()


def _count(store: Store, what: Any) -> int:
    if isinstance(what, Stream):
        return len(list(store.entries(what)))
    return 0 if store.read(what) is None else number_of(store, what)
