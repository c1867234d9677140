"""Transactions to be killed, failed and cut off from power, and what may be there afterwards.

A `CommitCase` is one transaction on a store that holds an old world. A `RecoveryCase` is what comes by after
somebody died. `AfterADeath` and `AfterAFault` are two in a row on one disk: the first one dies or
fails at one of its calls, the second one is done to its end; then the power is cut.

Every check opens the store anew, as another process would, and holds it to the promises of
`holdfast.store.base`: see `examine`.
"""

from __future__ import annotations

import hashlib
import os
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from itertools import count
from pathlib import Path
from typing import Any, NamedTuple

from holdfast.clock import SYSTEM_CLOCK
from holdfast.errors import Failure, OutcomeUnknown
from holdfast.locks import ledger_lock
from holdfast.locks.holders import current_holder
from holdfast.store.files import FileStore
from holdfast.store.records import Append, Change, Create, Decision, Delete, Key, Replace, Stream, View
from holdfast.testing.crash import (
    Ending,
    Fault,
    Kill,
    Outcome,
    Report,
    cut_short,
    fresh,
    judge,
    mark,
    scratch,
)
from holdfast.testing.interpose import Faulty, interposed
from holdfast.testing.powercut import Case, power_cuts, record
from tests.store.worlds import (
    INDEX,
    Listed,
    Named,
    Text,
    World,
    check_pointers,
    drafts_left,
    intents_left,
    seen_by_readers,
    seen_in_files,
)

TIMEOUT = 1.0
"""Nobody else holds a lock here: who has to wait this long waits for the dead."""


# --- Operations --------------------------------------------------------------------------------------


class Operation(NamedTuple):
    """A transaction: what it names, and what it decides on what it reads."""

    named: Sequence[Named]
    decide: Callable[[View], Sequence[Change]]

    def run(self, store: FileStore) -> None:
        store.transact(self.named, lambda view, now: Decision(self.decide(view), None))

    def applied_to(self, world: World) -> World:
        return world.changed(self.decide(world.view(self.named)))


def making(*changes: Change) -> Operation:
    """The transaction that makes just these changes."""
    named = [change.stream if isinstance(change, Append) else change.key for change in changes]
    return Operation(list(dict.fromkeys(named)), lambda view: changes)


def looking(named: Sequence[Named]) -> Operation:
    """The transaction that changes nothing. It finishes all the same what others have left undone."""
    return Operation(named, lambda view: ())


def touching(named: Iterable[Named]) -> Operation:
    """The transaction that changes everything that it names, each by what was there before."""
    names = list(named)

    def decide(view: View) -> Sequence[Change]:
        return [change for each in names for change in _touched(each, view)]

    return Operation(names, decide)


def restoring(world: World, named: Sequence[Named]) -> Operation:
    """The transaction that puts the documents back to what they were in this world, byte for byte.

    An intent that came back would find them as it expects them, and undo this.
    """

    def decide(view: View) -> Sequence[Change]:
        return [change for each in named if isinstance(each, Key) for change in _restored(each, world, view)]

    return Operation(named, decide)


def _restored(key: Key[Any], world: World, view: View) -> Iterator[Change]:
    now, then = view.get(key), world.documents.get(key.name)
    if now == then:
        return
    if then is None:
        yield Delete(key)
    else:
        yield Create(key, then) if now is None else Replace(key, then)


def _touched(each: Named, view: View) -> Iterator[Change]:
    if isinstance(each, Stream):
        last = view.last(each)
        yield Append(each, Text(f"after {last.record.text[-20:] if last else 'nothing'}"))
    elif (record := view.get(each)) is None:
        yield Create(each, Listed(()) if each == INDEX else Text("created"))
    elif isinstance(record, Text):
        yield Replace(each, Text(f"{record.text[-20:]}, touched", record.head))


# --- Directories -------------------------------------------------------------------------------------


class Files(NamedTuple):
    """A directory as it was at one moment, to be put elsewhere."""

    directories: tuple[str, ...]
    contents: tuple[tuple[str, bytes], ...]

    @classmethod
    def of(cls, directory: Path) -> Files:
        paths = [(str(path.relative_to(directory)), path) for path in sorted(directory.rglob("*"))]
        return cls(
            tuple(name for name, path in paths if path.is_dir()),
            tuple((name, path.read_bytes()) for name, path in paths if path.is_file()),
        )

    def put(self, directory: Path) -> None:
        for name in self.directories:
            os.mkdir(directory / name)
        for name, content in self.contents:
            (directory / name).write_bytes(content)


@contextmanager
def determined(role: str) -> Iterator[None]:
    """Be a process that does the same, byte for byte, each time that it is run, and is dead afterwards.

    So what two runs leave behind can be compared. The locks that it leaves are those of a dead one.
    """
    numbers = count(1)

    def numbered_bytes(size: int) -> bytes:
        return hashlib.blake2b(f"{role} {next(numbers)}".encode(), digest_size=size).digest()

    dead = current_holder()._replace(pid=(1 << 31) - 2)
    with (
        _replaced(os, "urandom", numbered_bytes),
        _replaced(SYSTEM_CLOCK, "wall", lambda: 1_700_000_000.0),
        _replaced(ledger_lock, "current_holder", lambda: dead),
    ):
        yield


@contextmanager
def _replaced(owner: object, name: str, value: object) -> Iterator[None]:
    """What `mock.patch.object` does, in a hundredth of the time: this is done for each of many points."""
    original = getattr(owner, name)
    setattr(owner, name, value)
    try:
        yield
    finally:
        setattr(owner, name, original)


def run_as(role: str, directory: Path, operation: Operation) -> None:
    """Run the operation in a store of its own."""
    with determined(role):
        try:
            _run(directory, operation)
        except Exception as error:
            _let_go(error)
            raise


def _run(directory: Path, operation: Operation) -> None:
    with FileStore(directory, timeout=TIMEOUT) as store:
        operation.run(store)


def _let_go(error: BaseException) -> None:
    """See to it that who keeps the error does not keep the store, with all that it has open."""
    found: list[BaseException | None] = [error]
    for each in found:
        if each is not None:
            each.__traceback__ = None
            found += [one for one in (each.__cause__, each.__context__) if one not in found]


# --- What must be true afterwards --------------------------------------------------------------------


def examine(directory: Path, named: Sequence[Named], legal: Sequence[World], ending: Ending) -> None:
    """Come by as another process, and hold the store to its promises.

    1. Pointers lead to something, for readers of plain files too, even before anything is recovered.
    2. Who reads without a lock sees one of the legal worlds: all of a commit or nothing.
    3. Who transacts finishes what was left: then nothing is to be finished any more, and the plain
       files say what had been seen before.
    4. The next transaction works: after a kill on all of them, else on one, each in its turn.
    """
    check_pointers(directory)
    if ending is Ending.POWER_CUT:
        break_torn_lock(directory)
    with FileStore(directory, timeout=TIMEOUT) as store:
        seen = seen_by_readers(store, named)
        assert seen in legal, f"{difference(seen, legal)}"
        if ending is Ending.KILLED:
            transact_and_compare(directory, store, looking(named), seen)
            transact_and_compare(directory, store, touching(named), seen)
        else:
            one = touching([named[next(_turns) % len(named)]])
            transact_and_compare(directory, store, one._replace(named=named), seen)


def transact_and_compare(directory: Path, store: FileStore, operation: Operation, seen: World) -> None:
    """Transact on what was `seen`; afterwards the files say just that, and nothing is left to be finished."""
    operation.run(store)
    unfinished = intents_left(directory)
    assert not unfinished, f"still to be finished: {unfinished}"
    expected, found = operation.applied_to(seen), seen_in_files(directory, operation.named)
    assert found == expected, f"the files differ from what was seen: {difference(found, [expected])}"


_turns = count()


def break_torn_lock(directory: Path) -> None:
    """Do what a person has to do where a power cut has torn `ledger.lock`, which says nothing then.

    The content of that lock is not synced. Whose it was cannot be known, so it takes an order (LG-05).
    """
    if (directory / "ledger").is_dir():
        lock = ledger_lock.LedgerLock(directory / "ledger", "a person", timeout=TIMEOUT)
        state = lock.state()
        if state is not None and state.holder is None:
            lock.break_lock(state.identity)


def difference(seen: World, legal: Sequence[World]) -> str:
    """What was seen, as far as it is not the same in all worlds; for messages."""
    parts = []
    for kind in ("documents", "streams"):
        worlds = [getattr(world, kind) for world in (seen, *legal)]
        for name in sorted(set().union(*worlds)):
            values = [world.get(name) for world in worlds]
            if any(value != values[0] for value in values):
                parts.append(f"{name} is {values[0]}, not {' or '.join(dict.fromkeys(map(str, values[1:])))}")
    return "; ".join(parts) or "a mixture"


# --- Scenarios ---------------------------------------------------------------------------------------


class Transaction:
    """One transaction on a store with an old world, of which a process can be killed or can fail."""

    named: Sequence[Named]
    operation: Operation
    old: World
    new: World
    litter: frozenset[str] = frozenset()

    def prepare(self, directory: Path) -> None:
        raise NotImplementedError

    def operate(self, directory: Path) -> None:
        run_as("first", directory, self.operation)

    def check(self, directory: Path, outcome: Outcome) -> None:
        if outcome.ending in (Ending.FAILED, Ending.SUCCEEDED):
            self._check_conduct(directory, outcome)
        examine(directory, self.named, self._legal(outcome), outcome.ending)

    def _check_conduct(self, directory: Path, outcome: Outcome) -> None:
        """Who lives on to report has cleaned up, and fails with a failure of ours."""
        expected = outcome.error is None or isinstance(outcome.error, Failure)
        assert expected, f"raised {outcome.error!r}"
        if outcome.call is None or outcome.call.name != "unlink":  # what cannot be removed is left
            litter = set(drafts_left(directory)) - self.litter
            assert not litter, f"left {sorted(litter)}"

    def _legal(self, outcome: Outcome) -> list[World]:
        """The new world if it was acknowledged, the old one if it failed, else one of the two."""
        if outcome.acknowledged:
            return [self.new]
        if outcome.error is None or isinstance(outcome.error, OutcomeUnknown):
            return [self.old, self.new]
        return [self.old]


class CommitCase(Transaction):
    """A transaction on a store in which `history` had happened."""

    def __init__(self, history: Sequence[Operation], operation: Operation) -> None:
        self.operation = operation
        self.old = World.empty()
        for each in history:
            self.old = each.applied_to(self.old)
        self.new = operation.applied_to(self.old)
        self.named = list(dict.fromkeys(name for each in (operation, *history) for name in each.named))
        self._history = history
        self._files: Files | None = None

    def prepare(self, directory: Path) -> None:
        if self._files is None:
            for number, each in enumerate(self._history):
                run_as(f"history {number}", directory, each)
            self._files = Files.of(directory)
        else:
            self._files.put(directory)


class RecoveryCase(Transaction):
    """A transaction on a store in which somebody died, and left these files."""

    def __init__(self, files: Files, named: Sequence[Named], operation: Operation) -> None:
        self.files = files
        self.named = named
        self.operation = operation
        with scratch() as base, fresh(base) as directory:
            files.put(directory)
            self.litter = frozenset(drafts_left(directory))
            self.finishes_an_intent = bool(intents_left(directory))
            with FileStore(directory, timeout=TIMEOUT) as store:
                self.old = seen_by_readers(store, named)
        self.new = operation.applied_to(self.old)

    def prepare(self, directory: Path) -> None:
        self.files.put(directory)


def deaths(case: Transaction) -> Iterator[tuple[Kill, int]]:
    """Every way to die that leaves something of its own: before each call that changes what is on the
    disk or may be there, halfway through each write, and at last not at all."""
    with scratch() as base, fresh(base) as directory:
        calls_made = [step.call for step in record(case, directory).steps if step.call is not None]
    for call in dict.fromkeys(calls_made):
        yield Kill.BEFORE, call.index
        if call.name == "write":
            yield Kill.HALFWAY, call.index
    yield Kill.BEFORE, sys.maxsize


def dead_at(case: Transaction, directory: Path, when: Kill, index: int) -> Outcome:
    """Prepare the empty directory, and run the transaction as far as one gets who dies there."""
    case.prepare(directory)
    call = cut_short(lambda: case.operate(directory), when, index)
    if call is None:
        return Outcome(Ending.SUCCEEDED, acknowledged=True)
    return Outcome(Ending.KILLED, when.value, call)


def remains(case: Transaction) -> list[Files]:
    """Everything, each once, that can be found after a process died at one of the calls of a transaction."""
    found: dict[Files, None] = {}
    with scratch() as base:
        for when, index in deaths(case):
            with fresh(base) as directory:
                dead_at(case, directory, when, index)
                found[Files.of(directory)] = None
    return list(found)


def death_points(case: Transaction) -> Report:
    """Like `kill_points`, within this process: each death that leaves something of its own, and its check."""
    report = Report(type(case).__name__)
    with scratch() as base:
        for when, index in deaths(case):
            with fresh(base) as directory:
                outcome = dead_at(case, directory, when, index)
                report.add(outcome, judge(case, directory, outcome), "")
    return report


class TwoInARow:
    """A commit that ends somehow, and then an operation that is done to its end; on one disk.

    What the first one has left seen but not durable, the second one may rest on. With `warm`, the
    second one works through a store that was open, and in use, before the first one began.
    """

    def __init__(self, first: CommitCase, second: Operation, *, warm: bool = False) -> None:
        self.first = first
        self.second = second
        there = {*first.old.documents, *first.old.streams}
        self.warm = touching(each for each in first.named if each.name in there) if warm else None
        self.old = self.warm.applied_to(first.old) if self.warm else first.old
        self.new = first.operation.applied_to(self.old)
        self.store: FileStore | None = None

    def prepare(self, directory: Path) -> None:
        self.first.prepare(directory)
        if self.warm is not None:
            with determined("warm"):
                self.store = FileStore(directory, timeout=TIMEOUT)
                self.warm.run(self.store)

    def operate(self, directory: Path) -> None:
        mark(self.begin(directory))
        if self.store is None:
            run_as("second", directory, self.second)
        else:
            with determined("second"), self.store:
                self.second.run(self.store)

    def begin(self, directory: Path) -> str:
        """Let the first one end; say how it did."""
        raise NotImplementedError

    def check(self, directory: Path, outcome: Outcome) -> None:
        known: dict[tuple[str, ...], list[World]] = {("made",): [self.new], ("failed",): [self.old]}
        before = known.get(outcome.marks, [self.old, self.new])
        after = [self.second.applied_to(world) for world in before] if outcome.marks else []
        legal = after if outcome.acknowledged else before + after
        examine(directory, self.first.named, legal, outcome.ending)


class AfterADeath(TwoInARow):
    """The first one dies at one of its calls."""

    when = Kill.BEFORE
    index = 1

    def begin(self, directory: Path) -> str:
        call = cut_short(lambda: self.first.operate(directory), self.when, self.index)
        return "made" if call is None else "died"


class AfterAFault(TwoInARow):
    """The first one meets an error at one of its calls, and knows what to say to that."""

    fault = Fault(None)
    index = 1
    struck = False

    def begin(self, directory: Path) -> str:
        fate = Faulty(self.fault, self.index)
        try:
            with interposed(fate):
                self.first.operate(directory)
        except OutcomeUnknown:
            return "unknown"
        except Failure:
            return "failed"
        finally:
            self.struck = fate.struck is not None
        return "made"


# --- Sweeps of two in a row --------------------------------------------------------------------------


def after_deaths(first: CommitCase, second: Operation, checked: set[Case], *, warm: bool = False) -> Report:
    """Let the first one die at each of its calls; cut the power at each moment of the second one."""
    report = Report("after a death")
    for when, index in deaths(first):
        scenario = AfterADeath(first, second, warm=warm)
        scenario.when, scenario.index = when, index
        _add(report, power_cuts(scenario, checked=checked, since_mark=True))
    return report


def after_faults(first: CommitCase, second: Operation, fault: Fault, checked: set[Case]) -> Report:
    """Let the first one meet the fault at each of its calls; cut the power at each moment after that."""
    report = Report("after a fault")
    for index in count(1):
        scenario = AfterAFault(first, second)
        scenario.fault, scenario.index = fault, index
        _add(report, power_cuts(scenario, checked=checked, since_mark=True))
        if not scenario.struck:
            return report
    raise AssertionError("never reached")


def _add(report: Report, part: Report) -> None:
    report.points += part.points
    report.calls |= part.calls
    report.violations += part.violations
    report.capped += part.capped
