"""The rules of claims under every order of a few actions, with time passing between them.

Each state is a whole ledger, and every action is tried in every reachable state. An action that was
decided on an older state is refused by the sequence. The invariants are checked on the events alone, by
code that shares nothing with the projection.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any, NamedTuple

import pytest

from holdfast.clock import parse_instant
from holdfast.errors import Failure
from holdfast.ledger import rules as ledger_rules
from holdfast.ledger.log import Event, Recorded
from holdfast.ledger.projection import ClaimState
from holdfast.ledger.rules import ClaimRequest, ClaimRuling

START = 1_700_000_000.0
TTL, STEP = 10.0, 6.0
NODE = "1"
Rule = Callable[[ClaimState, float], ClaimRuling[Any]]


class State(NamedTuple):
    """A ledger, the time, and how many actions led here."""

    events: tuple[tuple[tuple[str, Any], ...], ...]
    now: float
    depth: int


def book_of(state: State) -> ClaimState:
    book = ClaimState()
    for number, event in enumerate(state.events, 1):
        book.apply(Recorded(number, dict(event)))
    return book


def request(owner: str, number: int = 1) -> ClaimRequest:
    return ClaimRequest(NODE, owner, f"{owner}{number}", TTL, patience=1000.0)


def actions(owners: str) -> Iterator[tuple[str, Rule]]:
    for owner in owners:
        first, second = request(owner), request(owner, 2)
        yield f"{owner} claims", partial(_claim, asked=first, wait=False)
        yield f"{owner} claims again", partial(_claim, asked=second, wait=False)
        yield f"{owner} waits", partial(_claim, asked=first, wait=True)
        yield f"{owner} withdraws", partial(_withdraw, asked=first)
        yield f"{owner} extends", partial(_extend, owner=owner)
        yield f"{owner} releases", partial(_release, owner=owner)
    yield "somebody reaps", _reap


def _claim(book: ClaimState, now: float, *, asked: ClaimRequest, wait: bool) -> ClaimRuling[Any]:
    return ledger_rules.claim(book, now, asked, wait=wait)


def _withdraw(book: ClaimState, now: float, *, asked: ClaimRequest) -> ClaimRuling[Any]:
    return ledger_rules.withdraw(book, now, asked)


def _extend(book: ClaimState, now: float, *, owner: str) -> ClaimRuling[Any]:
    return ledger_rules.extend(book, now, NODE, owner, TTL)


def _release(book: ClaimState, now: float, *, owner: str) -> ClaimRuling[Any]:
    return ledger_rules.release(book, now, NODE, owner)


def _reap(book: ClaimState, now: float) -> ClaimRuling[Any]:
    seen = book.claims.get(NODE)
    return ClaimRuling(None, None) if seen is None else ledger_rules.reap(book, now, seen)


def explore(owners: str, depth: int, rules: list[tuple[str, Rule]] | None = None) -> int:
    """Try every action in every reachable state; return the number of states."""
    rules = list(actions(owners)) if rules is None else rules
    begin = State((), START, 0)
    seen: set[tuple[object, ...]] = set()
    waiting = deque([begin])
    while waiting:
        state = waiting.popleft()
        check([dict(event) for event in state.events])
        if state.depth == depth:
            continue
        for following in _following(state, rules):
            shape = (following.events, following.now)
            if shape not in seen:
                seen.add(shape)
                waiting.append(following)
    return len(seen)


def _following(state: State, rules: list[tuple[str, Rule]]) -> Iterator[State]:
    yield State(state.events, state.now + STEP, state.depth + 1)
    for _, rule in rules:
        try:
            event = rule(book_of(state), state.now).event
        except Failure:
            continue
        if event is not None:
            yield State((*state.events, _frozen(event)), state.now, state.depth + 1)


def _frozen(event: Event) -> tuple[tuple[str, Any], ...]:
    return tuple(
        (name, str(value) if isinstance(value, dict) else value) for name, value in event.items() if name != "holder"
    )


def check(events: list[Event]) -> None:
    """Owners never overlap; each claim ends once, by an event of its own; the queue is respected."""
    held: Event | None = None
    queue: list[str] = []
    for event in events:
        kind, now = event["type"], parse_instant(event["timestamp"])
        if kind == "lock_acquired":
            if event.get("extended"):
                assert held is not None, "an extension of nothing"
                assert held["claim_id"] == event["claim_id"], "an extension of another's claim"
                assert now < parse_instant(held["expires_at"]), "an extension of an expired claim"
            else:
                assert held is None, "two claims at once"
                assert not queue or queue[0] == event["claim_id"], "somebody jumped the queue"
                queue = [each for each in queue if each != event["claim_id"]]
            held = event
        elif kind in ("lock_released", "lock_reaped"):
            assert held is not None, f"a {kind} of nothing"
            assert held["claim_id"] == event["claim_id"], f"a {kind} of another's claim"
            assert kind == "lock_released" or now >= parse_instant(held["expires_at"]), "reaped too early"
            held = None
        elif kind == "lock_requested" and event["ticket"] not in queue:
            queue.append(event["ticket"])
        elif kind == "lock_withdrawn":
            queue.remove(event["ticket"])


@pytest.mark.req("LG-10", "LG-15", "LG-17", "LG-19")
def test_the_rules_hold_in_every_order_of_two_agents() -> None:
    assert explore("ab", 6) > 10_000


@pytest.mark.req("LG-17", "LG-19")
def test_the_rules_hold_in_every_order_of_three_agents() -> None:
    assert explore("abc", 5) > 5_000


def _careless_claim(book: ClaimState, now: float) -> ClaimRuling[Any]:
    empty = ClaimState()
    return ledger_rules.claim(empty, now, request("z"), wait=False)


def _careless_reap(book: ClaimState, now: float) -> ClaimRuling[Any]:
    seen = book.claims.get(NODE)
    return ClaimRuling(None if seen is None else ledger_rules.reaped(seen, now), None)


@pytest.mark.parametrize("planted", [_careless_claim, _careless_reap])
def test_a_planted_bug_is_found(planted: Rule) -> None:
    with pytest.raises(AssertionError):
        explore("ab", 4, [*actions("ab"), ("planted", planted)])
