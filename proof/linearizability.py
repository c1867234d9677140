"""Linearizability checker: could the recorded answers come from one object that does one operation at a time?

Each process records its operations: the call, the answer, and the times of both. A history is *linearizable* if each
operation can be assigned an instant between its call and its return such that, done one after the other in that
order, the operations give the recorded answers. An operation that never returned, because its process was killed
or got `OutcomeUnknown`, may have happened at any instant after its call, or not at all; if the end of its process
is known, not after that.

The search is that of Wing and Gong, with a memo on (operations done, state). It is bounded, and a search that
reaches its bound is `UNDECIDED`, never a silent success. For a history that is not linearizable, the checker names
the first operation whose answer fits into no order: until just before its return, the history was linearizable.
"""

from __future__ import annotations

import json
import os
import time
from bisect import bisect_right
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from enum import Enum
from heapq import heappop, heappush
from pathlib import Path
from typing import Any, NamedTuple, Protocol, TypeVar

from holdfast.errors import Failure, OutcomeUnknown

MOST_CONFIGURATIONS = 1_000_000
"""The most configurations that a search visits before it gives up as undecided."""

_GUESS = 8
"""The cost of a guess, in operations: a guess must get the search that much further."""

State = TypeVar("State", bound=Hashable)
Value = TypeVar("Value")


class Operation(NamedTuple):
    """One operation of one process. Without `returned_at` it may have happened or not, but not after `ended_at`,
    and `result` means nothing.
    """

    process: str
    name: str
    argument: Any
    result: Any
    called_at: int
    returned_at: int | None
    ended_at: int | None = None

    def __str__(self) -> str:
        answer = "never returned" if self.returned_at is None else f"returned {self.result!r}"
        return f"{self.process}: {self.name}({self.argument!r}) {answer}"


class Spec(Protocol[State]):
    """The meaning of operations that are done one at a time. States are hashable values."""

    def initial(self) -> State:
        """The state before the first operation."""
        ...

    def apply(self, state: State, name: str, argument: Any) -> tuple[State, Any]:
        """The state after an operation, and its result."""
        ...

    def changed_nothing(self, name: str, result: Any) -> bool:
        """Whether an operation with this result leaves every state unchanged in which it is possible."""
        ...


class CheckResult(Enum):
    """The answer of the checker."""

    LINEARIZABLE = "linearizable"
    NOT_LINEARIZABLE = "not linearizable"
    UNDECIDED = "undecided"


class Check(NamedTuple):
    """A result, the operation that fits into no order if there is one, and an explanation."""

    result: CheckResult
    culprit: Operation | None = None
    explanation: str = ""

    def require(self) -> None:
        """Raise unless the history is linearizable: undecided is not good enough."""
        if self.result is not CheckResult.LINEARIZABLE:
            raise AssertionError(f"the history is {self.result.value}: {self.explanation}")


# --- Recording --------------------------------------------------------------------------------------


class History:
    """The operations of one process, written to a file of its own, so that a kill loses nothing.

    The clock is the monotonic one, which all processes of a machine share. `History.read` merges the
    files of all processes.
    """

    def __init__(self, directory: Path, process: str) -> None:
        self._process = process
        flags = os.O_WRONLY | os.O_CREAT | os.O_APPEND
        self._fd = os.open(directory / f"{process}.history", flags, 0o666)
        self._calls = 0

    def record(self, name: str, argument: Any, do: Callable[[], Value]) -> Value:
        """Perform an operation, and record the call before it and the answer after it.

        `OutcomeUnknown` leaves the operation open. Any other failure means that nothing was done, and
        withdraws it.
        """
        number, self._calls = self._calls, self._calls + 1
        self._write([number, "call", time.monotonic_ns(), name, argument])
        try:
            result = do()
        except OutcomeUnknown:
            raise
        except Failure:
            self._write([number, "nothing"])
            raise
        self._write([number, "return", time.monotonic_ns(), result])
        return result

    def close(self) -> None:
        """Close the file."""
        os.close(self._fd)

    @staticmethod
    def note_end(directory: Path, process: str) -> None:
        """Record, from outside, that a process has ended and can have no further effect.

        Not for stores on which a request may take effect after its client has ended.
        """
        history = History(directory, process)
        history._write([-1, "end", time.monotonic_ns()])
        history.close()

    @staticmethod
    def read(directory: Path) -> list[Operation]:
        """All operations that were recorded in a directory, by the time of their calls."""
        found: list[Operation] = []
        for path in sorted(directory.glob("*.history")):
            found += _read_process(path.stem, path.read_bytes())
        return sorted(found, key=lambda each: each.called_at)

    def _write(self, line: list[Any]) -> None:
        os.write(self._fd, b"\n" + json.dumps(line).encode() + b"\n")  # so that a torn line spoils no other


def _read_process(process: str, content: bytes) -> Iterable[Operation]:
    operations: dict[int, Operation] = {}
    ended_at: int | None = None
    for line in content.splitlines():
        try:
            number, what, *rest = json.loads(line)
        except ValueError:
            continue  # torn: the process was killed while it wrote
        if what == "call":
            at, name, argument = rest
            operations[number] = Operation(process, name, argument, None, at, None)
        elif what == "return":
            operations[number] = operations[number]._replace(returned_at=rest[0], result=rest[1])
        elif what == "end":
            ended_at = rest[0]
        else:
            del operations[number]
    return [each._replace(ended_at=ended_at) if each.returned_at is None else each for each in operations.values()]


# --- Checking ---------------------------------------------------------------------------------------


def check(history: Iterable[Operation], spec: Spec[State], *, limit: int = MOST_CONFIGURATIONS) -> Check:
    """Whether a history is linearizable; if not, the first operation that fits into no order."""
    operations = sorted(history, key=lambda each: each.called_at)
    result = _search(operations, spec, limit)
    if result is CheckResult.UNDECIDED:
        return Check(result, None, f"the search was given up after {limit} configurations")
    if result is CheckResult.NOT_LINEARIZABLE:
        return _explain(operations, spec, limit)
    return Check(result)


def check_by_key(
    history: Iterable[Operation],
    spec: Spec[State],
    key_of: Callable[[Operation], Hashable],
    *,
    limit: int = MOST_CONFIGURATIONS,
) -> Check:
    """Check each key on its own, for operations that concern one key each."""
    by_key: dict[Hashable, list[Operation]] = {}
    for each in history:
        by_key.setdefault(key_of(each), []).append(each)
    checks = [check(operations, spec, limit=limit) for operations in by_key.values()]
    for result in (CheckResult.NOT_LINEARIZABLE, CheckResult.UNDECIDED):
        for found in checks:
            if found.result is result:
                return found
    return Check(CheckResult.LINEARIZABLE)


class _Configuration(NamedTuple):
    """The progress of a search: the first `below` of the returned operations are done, and those in
    `beyond`; of the operations that never returned, those in `guessed` are assumed to have happened.
    """

    below: int
    beyond: frozenset[int]
    guessed: frozenset[int]
    state: Any

    @property
    def done(self) -> int:
        return self.below + len(self.beyond)


class _Search:
    """The operations of one history, and the steps from one configuration to the next."""

    def __init__(self, operations: Sequence[Operation], spec: Spec[Any]) -> None:
        self._spec = spec
        self.returned = [each for each in operations if each.returned_at is not None]
        self.open = [each for each in operations if each.returned_at is None]
        self._open_calls = [each.called_at for each in self.open]
        self._alike = [f"{each.name}({each.argument!r}) {each.ended_at}" for each in self.open]

    def start(self) -> _Configuration:
        return _Configuration(0, frozenset(), frozenset(), self._spec.initial())

    def is_end(self, at: _Configuration) -> bool:
        return at.below == len(self.returned)

    def steps(self, at: _Configuration) -> list[_Configuration]:
        """The possible next steps, the most promising last: guesses first, the earliest return last.

        An operation that fits, and whose result says that it changed nothing, can always come next: no other
        step need be tried, unless a guess would then come too late.
        """
        candidates, horizon = self._candidates(at)
        guesses = self._guesses(at, horizon)
        too_late = min((self.open[each].ended_at or horizon for each, _ in guesses), default=horizon)
        found: list[_Configuration] = []
        for index in sorted(candidates, key=lambda each: self.returned[each].returned_at or 0, reverse=True):
            operation = self.returned[index]
            state, result = self._spec.apply(at.state, operation.name, operation.argument)
            if result == operation.result:
                found.append(self._done(at, index, state))
                if operation.called_at <= too_late and self._spec.changed_nothing(operation.name, result):
                    return found[-1:]
        guessed = [
            at._replace(guessed=at.guessed | {index}, state=state)
            for index, state in guesses
            if state != at.state  # a guess that changes nothing is useless
        ]
        return [*guessed, *found]

    def _guesses(self, at: _Configuration, horizon: int) -> list[tuple[int, Any]]:
        """The operations that never returned and may come next, each with the state after it."""
        found: list[tuple[int, Any]] = []
        tried: set[str] = set()
        latest = max(at.beyond, default=at.below - 1)
        latest_call = self.returned[latest].called_at if latest >= 0 else 0
        for index in range(bisect_right(self._open_calls, horizon)):
            operation = self.open[index]
            if index in at.guessed or self._alike[index] in tried:
                continue
            if operation.ended_at is not None and operation.ended_at < latest_call:
                continue
            tried.add(self._alike[index])  # of several that are alike, only the earliest call is tried
            state, _ = self._spec.apply(at.state, operation.name, operation.argument)
            found.append((index, state))
        return found

    def _candidates(self, at: _Configuration) -> tuple[list[int], int]:
        """The operations that were called before any unfinished one had returned, and that instant."""
        horizon = -1
        candidates: list[int] = []
        for index in range(at.below, len(self.returned)):
            if index in at.beyond:
                continue
            operation = self.returned[index]
            if horizon >= 0 and operation.called_at > horizon:
                break
            returned_at = operation.returned_at or 0
            horizon = returned_at if horizon < 0 else min(horizon, returned_at)
            candidates.append(index)
        return [each for each in candidates if self.returned[each].called_at <= horizon], horizon

    def _done(self, at: _Configuration, index: int, state: Any) -> _Configuration:
        below, beyond = at.below, at.beyond | {index}
        while below in beyond:
            beyond -= {below}
            below += 1
        return at._replace(below=below, beyond=beyond, state=state)


def _search(operations: Sequence[Operation], spec: Spec[Any], limit: int) -> CheckResult:
    """Best-first search: prefer configurations with many operations done and few guesses."""
    search = _Search(operations, spec)
    start = search.start()
    seen = {start}
    ahead = [(0, 0, start)]
    while ahead:
        *_, at = heappop(ahead)
        if search.is_end(at):
            return CheckResult.LINEARIZABLE
        for step in search.steps(at):
            if step not in seen:
                seen.add(step)
                heappush(ahead, (_GUESS * len(step.guessed) - step.done, -len(seen), step))
        if len(seen) > limit:
            return CheckResult.UNDECIDED
    return CheckResult.NOT_LINEARIZABLE


def _explain(operations: Sequence[Operation], spec: Spec[Any], limit: int) -> Check:
    """Find the first return that makes the history impossible, by bisection; everything before it is possible."""
    returns = sorted(each.returned_at for each in operations if each.returned_at is not None)
    good, bad = 0, len(returns)  # how many returns have been seen
    while bad - good > 1:
        middle = (good + bad) // 2
        result = _search(_until(operations, returns[middle - 1]), spec, limit)
        if result is CheckResult.UNDECIDED:
            return Check(
                CheckResult.NOT_LINEARIZABLE, None, "no order fits; the first operation that breaks it was not found"
            )
        good, bad = (middle, bad) if result is CheckResult.LINEARIZABLE else (good, middle)
    culprit = next(each for each in operations if each.returned_at == returns[bad - 1])
    return Check(CheckResult.NOT_LINEARIZABLE, culprit, _in_words(operations, culprit))


def _until(operations: Sequence[Operation], moment: int) -> list[Operation]:
    """The history as it was known at an instant: operations that had not returned by then were still open."""
    return [
        each._replace(returned_at=None, result=None) if (each.returned_at or 0) > moment else each
        for each in operations
        if each.called_at <= moment
    ]


def _in_words(operations: Sequence[Operation], culprit: Operation) -> str:
    end = culprit.returned_at or 0
    before = [each for each in operations if each.returned_at is not None and each.returned_at < culprit.called_at]
    last = max(before, key=lambda each: each.returned_at or 0, default=None)
    beside = [
        str(each)
        for each in operations
        if each is not culprit and each.called_at <= end and (each.returned_at or end) >= culprit.called_at
    ]
    return (
        f"{culprit} fits into no order. The last one to return before it was called: {last or 'none'}. "
        f"Concurrent with it: {'; '.join(beside[:8]) or 'nothing'}"
    )


# --- Specifications ---------------------------------------------------------------------------------


class Register:
    """One value: `read`, `write` and `cas`, which takes (expected, new) and returns whether it succeeded."""

    def __init__(self, initial: Hashable = None) -> None:
        self._initial = initial

    def initial(self) -> Hashable:
        return self._initial

    def apply(self, state: Hashable, name: str, argument: Any) -> tuple[Hashable, Any]:
        if name == "read":
            return state, state
        if name == "write":
            return argument, None
        expected, new = argument
        return (new, True) if state == expected else (state, False)

    def changed_nothing(self, name: str, result: Any) -> bool:
        return name == "read" or result is False


class Counter:
    """One number: `read`, and `add`, which returns the new number."""

    def initial(self) -> int:
        return 0

    def apply(self, state: int, name: str, argument: Any) -> tuple[int, Any]:
        return (state, state) if name == "read" else (state + argument, state + argument)

    def changed_nothing(self, name: str, result: Any) -> bool:
        return name == "read"


class Accounts:
    """Several balances: `read` one, `read_together` several, `transfer` (from, to, amount), which returns
    whether there was enough, and `deposit` (to, amount), which returns the new balance.
    """

    def __init__(self, balances: Mapping[str, int]) -> None:
        self._names = {name: index for index, name in enumerate(balances)}
        self._initial = tuple(balances.values())

    def initial(self) -> tuple[int, ...]:
        return self._initial

    def apply(self, state: tuple[int, ...], name: str, argument: Any) -> tuple[tuple[int, ...], Any]:
        if name == "read":
            return state, state[self._names[argument]]
        if name == "read_together":
            return state, [state[self._names[each]] for each in argument]
        if name == "deposit":
            target, amount = argument
            after = self._add(state, {target: amount})
            return after, after[self._names[target]]
        source, target, amount = argument
        if state[self._names[source]] < amount:
            return state, False
        return self._add(state, {source: -amount, target: amount}), True

    def changed_nothing(self, name: str, result: Any) -> bool:
        return name in ("read", "read_together") or result is False

    def _add(self, state: tuple[int, ...], amounts: Mapping[str, int]) -> tuple[int, ...]:
        balances = list(state)
        for name, amount in amounts.items():
            balances[self._names[name]] += amount
        return tuple(balances)
