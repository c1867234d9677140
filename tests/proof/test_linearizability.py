"""The checker accepts exactly the histories that an object doing one operation at a time could produce."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from itertools import chain, combinations, permutations
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from holdfast.errors import LockTimeout, OutcomeUnknown
from proof.effort import rounds
from proof.linearizability import (
    Accounts,
    Check,
    CheckResult,
    Counter,
    History,
    Operation,
    Register,
    Spec,
    check,
    check_by_key,
)


def op(
    process: str,
    name: str,
    argument: Any,
    result: Any,
    called: int,
    returned: int | None,
    ended: int | None = None,
) -> Operation:
    return Operation(process, name, argument, result, called, returned, ended)


BALANCES = {"a": 10, "b": 10}

GOOD: dict[str, tuple[Spec[Any], list[Operation]]] = {
    "an empty history": (Register(0), []),
    "one after the other": (
        Register(0),
        [op("p", "write", 1, None, 1, 2), op("q", "read", None, 1, 3, 4)],
    ),
    "a read beside a write may see either": (
        Register(0),
        [
            op("p", "write", 1, None, 1, 6),
            op("q", "read", None, 0, 2, 3),
            op("q", "read", None, 1, 4, 5),
        ],
    ),
    "two concurrent writes in either order": (
        Register(0),
        [
            op("p", "write", 1, None, 1, 5),
            op("q", "write", 2, None, 2, 4),
            op("r", "read", None, 1, 6, 7),
        ],
    ),
    "one of two concurrent swaps wins": (
        Register(0),
        [
            op("p", "cas", (0, 1), False, 1, 4),
            op("q", "cas", (0, 2), True, 2, 3),
            op("q", "read", None, 2, 5, 6),
        ],
    ),
    "an operation that never returned may have happened": (
        Register(0),
        [op("p", "write", 1, None, 1, None), op("q", "read", None, 1, 8, 9)],
    ),
    "an operation that never returned may have happened late": (
        Register(0),
        [
            op("p", "write", 1, None, 1, None),
            op("q", "read", None, 0, 2, 3),
            op("q", "read", None, 1, 8, 9),
        ],
    ),
    "an operation that never returned may not have happened": (
        Register(0),
        [op("p", "write", 1, None, 1, None), op("q", "read", None, 0, 8, 9)],
    ),
    "a killed operation may have happened before the end of its process": (
        Register(0),
        [op("p", "write", 1, None, 1, None, 5), op("q", "read", None, 1, 4, 9)],
    ),
    "additions return the new number": (
        Counter(),
        [op("p", "add", 1, 2, 1, 4), op("q", "add", 1, 1, 2, 3), op("q", "read", None, 2, 5, 6)],
    ),
    "a transfer is seen whole": (
        Accounts(BALANCES),
        [
            op("p", "transfer", ("a", "b", 5), True, 1, 6),
            op("q", "read_together", ["a", "b"], [10, 10], 2, 3),
            op("q", "read_together", ["a", "b"], [5, 15], 4, 5),
        ],
    ),
}

BAD: dict[str, tuple[Spec[Any], list[Operation], int]] = {
    "a stale read": (
        Register(0),
        [op("p", "write", 1, None, 1, 2), op("q", "read", None, 0, 3, 4)],
        1,
    ),
    "a read that goes back": (
        Register(0),
        [
            op("p", "write", 1, None, 1, 9),
            op("q", "read", None, 1, 2, 3),
            op("r", "read", None, 0, 4, 5),
        ],
        2,
    ),
    "a lost update": (
        Counter(),
        [
            op("p", "add", 1, 1, 1, 3),
            op("q", "add", 1, 1, 2, 4),
        ],
        1,
    ),
    "two winners of one swap": (
        Register(0),
        [op("p", "cas", (0, 1), True, 1, 3), op("q", "cas", (0, 2), True, 2, 4)],
        1,
    ),
    "a dirty read: the value was never written": (
        Register(0),
        [op("p", "write", 1, None, 1, 2), op("q", "read", None, 7, 3, 4)],
        1,
    ),
    "swapped order": (
        Register(0),
        [
            op("p", "write", 1, None, 1, 2),
            op("p", "write", 2, None, 3, 4),
            op("q", "read", None, 2, 5, 6),
            op("q", "read", None, 1, 7, 8),
        ],
        3,
    ),
    "a fractured read of two accounts": (
        Accounts(BALANCES),
        [
            op("p", "transfer", ("a", "b", 5), True, 1, 4),
            op("q", "read_together", ["a", "b"], [5, 10], 2, 3),
        ],
        1,
    ),
    "one account is ahead of the other": (
        Accounts(BALANCES),
        [
            op("p", "transfer", ("a", "b", 5), True, 1, 9),
            op("q", "read", "a", 5, 2, 3),
            op("q", "read", "b", 10, 4, 5),
        ],
        2,
    ),
    "write skew: more is transferred than the balance": (
        Accounts(BALANCES),
        [
            op("p", "transfer", ("a", "b", 8), True, 1, 3),
            op("q", "transfer", ("a", "b", 8), True, 2, 4),
        ],
        1,
    ),
    "an operation that never returned cannot be undone": (
        Register(0),
        [
            op("p", "write", 1, None, 1, None),
            op("q", "read", None, 1, 2, 3),
            op("q", "read", None, 0, 4, 5),
        ],
        2,
    ),
    "an operation that never returned cannot happen twice": (
        Counter(),
        [op("p", "add", 1, None, 1, None), op("q", "read", None, 2, 2, 3)],
        1,
    ),
    "an operation that never returned cannot happen before its call": (
        Register(0),
        [op("q", "read", None, 1, 1, 2), op("p", "write", 1, None, 3, None)],
        0,
    ),
    "a killed operation cannot happen after the end of its process": (
        Register(0),
        [
            op("p", "write", 1, None, 1, None, 4),
            op("q", "read", None, 0, 5, 6),
            op("q", "read", None, 1, 7, 8),
        ],
        2,
    ),
}


@pytest.mark.parametrize("name", GOOD)
def test_a_good_history_is_accepted(name: str) -> None:
    spec, history = GOOD[name]
    assert check(history, spec) == Check(CheckResult.LINEARIZABLE)


@pytest.mark.parametrize("name", BAD)
def test_a_bad_history_is_refused_and_the_operation_that_breaks_it_is_named(name: str) -> None:
    spec, history, culprit = BAD[name]
    found = check(history, spec)

    assert found.result is CheckResult.NOT_LINEARIZABLE
    assert found.culprit == history[culprit]
    assert str(history[culprit]) in found.explanation
    with pytest.raises(AssertionError, match="fits into no order"):
        found.require()


def test_a_search_that_is_given_up_counts_as_a_failure() -> None:
    history = [op(str(each), "write", each, None, each, 100 + each) for each in range(20)]
    history.append(op("reader", "read", None, "never written", 200, 201))
    found = check(history, Register(), limit=1000)

    assert found.result is CheckResult.UNDECIDED
    with pytest.raises(AssertionError, match="given up after 1000"):
        found.require()


def test_each_key_is_checked_on_its_own() -> None:
    def key_of(operation: Operation) -> str:
        return str(operation.process[-1])

    good = [op("p-x", "write", 1, None, 1, 2), op("q-y", "read", None, 0, 3, 4)]
    assert check_by_key(good, Register(0), key_of).result is CheckResult.LINEARIZABLE

    bad = [*good, op("r-x", "read", None, 0, 5, 6)]
    found = check_by_key(bad, Register(0), key_of)
    assert found.result is CheckResult.NOT_LINEARIZABLE
    assert found.culprit == bad[-1]


# --- Random histories -------------------------------------------------------------------------------

ACCOUNTS = ["a", "b", "c"]

registers = st.one_of(
    st.just(("read", None)),
    st.tuples(st.just("write"), st.integers(0, 2)),
    st.tuples(st.just("cas"), st.tuples(st.integers(0, 2), st.integers(0, 2))),
)
accounts = st.one_of(
    st.tuples(st.just("read"), st.sampled_from(ACCOUNTS)),
    st.tuples(st.just("read_together"), st.lists(st.sampled_from(ACCOUNTS), unique=True)),
    st.tuples(st.just("transfer"), st.tuples(st.just("a"), st.sampled_from("bc"), st.integers(1, 4))),
    st.tuples(st.just("deposit"), st.tuples(st.sampled_from(ACCOUNTS), st.integers(1, 4))),
)
KINDS: list[tuple[Spec[Any], st.SearchStrategy[Any]]] = [
    (Register(0), registers),
    (Accounts(dict.fromkeys(ACCOUNTS, 5)), accounts),
]


def run(spec: Spec[Any], asked: Sequence[tuple[str, Any]], chance: random.Random) -> list[Operation]:
    """A valid history: each operation takes effect at one moment, between its call and its return.

    One in six is killed, before or after that moment.
    """
    state = spec.initial()
    history: list[Operation] = []
    for number, (name, argument) in enumerate(asked):
        moment = 10 * number
        called, returned = moment - chance.randrange(1, 40), moment + chance.randrange(1, 40)
        killed = chance.random() < 1 / 6
        if not (killed and chance.random() < 0.5):
            state, result = spec.apply(state, name, argument)
        if killed:
            end = returned if chance.random() < 0.5 else None
            history.append(op(str(number), name, argument, None, called, None, end))
        else:
            history.append(op(str(number), name, argument, result, called, returned))
    return history


@settings(deadline=None, max_examples=rounds(100, least=5))
@given(kind=st.sampled_from(KINDS), draw=st.data(), seed=st.integers(0))
def test_a_history_that_really_happened_is_always_accepted(
    kind: tuple[Spec[Any], st.SearchStrategy[Any]], draw: st.DataObject, seed: int
) -> None:
    spec, operations = kind
    history = run(spec, draw.draw(st.lists(operations, max_size=25)), random.Random(seed))

    check(history, spec).require()


def is_linearizable_by_brute_force(history: Sequence[Operation], spec: Spec[Any]) -> bool:
    returned = [each for each in history if each.returned_at is not None]
    opened = [each for each in history if each.returned_at is None]
    happened = chain.from_iterable(combinations(opened, size) for size in range(len(opened) + 1))
    return any(_fits(order, spec) for some in happened for order in permutations([*returned, *some]))


def _fits(order: Sequence[Operation], spec: Spec[Any]) -> bool:
    state = spec.initial()
    for index, each in enumerate(order):
        end = each.returned_at if each.returned_at is not None else each.ended_at
        if end is not None and any(earlier.called_at > end for earlier in order[:index]):
            return False
        state, result = spec.apply(state, each.name, each.argument)
        if each.returned_at is not None and result != each.result:
            return False
    return True


@settings(deadline=None, max_examples=rounds(100, least=5))
@given(kind=st.sampled_from(KINDS), draw=st.data(), seed=st.integers(0))
def test_the_result_is_the_same_as_by_brute_force(
    kind: tuple[Spec[Any], st.SearchStrategy[Any]], draw: st.DataObject, seed: int
) -> None:
    spec, operations = kind
    chance = random.Random(seed)
    history = run(spec, draw.draw(st.lists(operations, max_size=6)), chance)
    if history:
        history = spoil(history, chance)

    assert (check(history, spec).result is CheckResult.LINEARIZABLE) == is_linearizable_by_brute_force(history, spec)


def spoil(history: Sequence[Operation], chance: random.Random) -> list[Operation]:
    """The history with one answer replaced, by that of another operation of the same kind if there is one."""
    spoilt = list(history)
    index = chance.randrange(len(spoilt))
    each = spoilt[index]
    others = [other for other in spoilt if other.name == each.name and other.result != each.result]
    result: Any = chance.choice(others).result if others else "something else"
    spoilt[index] = each._replace(result=result)
    return spoilt


@pytest.mark.parametrize(("kind", "least"), [(KINDS[0], 100), (KINDS[1], 130)], ids=["register", "accounts"])
def test_a_changed_answer_is_mostly_refused(kind: tuple[Spec[Any], st.SearchStrategy[Any]], least: int) -> None:
    spec, _ = kind
    refused = 0
    for seed in range(200):
        chance = random.Random(seed)
        history = run(spec, [_ask(spec, chance) for _ in range(20)], chance)
        spoilt = spoil(history, chance)
        refused += check(spoilt, spec).result is CheckResult.NOT_LINEARIZABLE
        assert check(history, spec).result is CheckResult.LINEARIZABLE

    assert refused >= least


def _ask(spec: Spec[Any], chance: random.Random) -> tuple[str, Any]:
    if isinstance(spec, Register):
        return chance.choice([("read", None), ("write", chance.randrange(50)), ("read", None)])
    source, target = chance.sample(ACCOUNTS, 2)
    return chance.choice(
        [("read", source), ("read_together", ACCOUNTS), ("deposit", (target, chance.randrange(1, 50)))]
    )


# --- Recording --------------------------------------------------------------------------------------


def test_a_history_is_read_back_from_the_files_of_all_processes(tmp_path: Path) -> None:
    first, second = History(tmp_path, "first"), History(tmp_path, "second")
    assert first.record("write", 1, lambda: None) is None
    assert second.record("read", None, lambda: 1) == 1
    first.close()
    second.close()

    write, read = History.read(tmp_path)
    assert (write.process, write.name, write.argument, write.result) == ("first", "write", 1, None)
    assert (read.process, read.name, read.argument, read.result) == ("second", "read", None, 1)
    assert write.called_at <= (write.returned_at or 0) <= read.called_at <= (read.returned_at or 0)


def raising(error: Exception) -> Callable[[], None]:
    def fail() -> None:
        raise error

    return fail


def test_an_unknown_outcome_stays_open_and_a_failure_is_withdrawn(tmp_path: Path) -> None:
    history = History(tmp_path, "p")
    with pytest.raises(OutcomeUnknown):
        history.record("write", 1, raising(OutcomeUnknown("id", "lost")))
    with pytest.raises(LockTimeout):
        history.record("write", 2, raising(LockTimeout("x", 1, "1s")))
    history.close()

    (only,) = History.read(tmp_path)
    assert (only.argument, only.returned_at, only.ended_at) == (1, None, None)


def test_a_line_that_a_killed_process_has_torn_spoils_no_other(tmp_path: Path) -> None:
    history = History(tmp_path, "p")
    history.record("write", 1, lambda: None)
    history._write([1, "call", 10**18, "write", 2])
    history.close()
    file = tmp_path / "p.history"
    file.write_bytes(file.read_bytes() + b'\n[1, "retu')
    History.note_end(tmp_path, "p")

    done, torn = History.read(tmp_path)
    assert done.returned_at is not None
    assert torn.returned_at is None
    assert torn.ended_at is not None
