"""Transactions to kill, to fail and to cut off from power, and the states that are legal afterwards.

A `CommitCase` is one transaction on a store that holds an old world. A `RecoveryCase` is one transaction on the
files that a dead process left. `AfterADeath` and `AfterAFault` are two transactions in a row on one disk: the first
dies or fails at one of its calls, and the second completes; then the power is cut.

Every check opens the store again, as another process would, and holds it to the promises of
`holdfast.store.model`: see `examine`.
"""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Iterator, Sequence
from itertools import count
from pathlib import Path

from holdfast.errors import Failure, OutcomeUnknown
from holdfast.locks import ledger_lock
from holdfast.store.files import FileStore
from proof.crash import Ending, Fault, Kill, Outcome, Report, cut_short, fresh, judge, mark, scratch
from proof.disk import LIMIT
from proof.effort import chosen
from proof.interpose import Faulty, interposed
from proof.powercut import Case, power_cuts, record
from tests.store.commit_operations import TIMEOUT, Files, Operation, determined, looking, run_as, touching
from tests.store.worlds import (
    Named,
    World,
    check_pointers,
    drafts_left,
    drafts_needed,
    intents_left,
    plain,
    seen_by_readers,
    seen_in_files,
)

# --- Checks ------------------------------------------------------------------------------------------


def examine(directory: Path, named: Sequence[Named], legal: Sequence[World], ending: Ending) -> None:
    """Open the store as another process would, and hold it to its promises.

    1. No pointer dangles, even for readers of plain files, and even before recovery.
    2. A reader without a lock sees one of the legal worlds: all of a commit or nothing.
    3. A transaction finishes what was left: then no intent remains, and the plain files agree with
       what the reader saw.
    4. The next transaction works: after a kill on everything named, otherwise on one name, each in turn.
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
    """Run the operation on the world `seen`; afterwards, the files show its result and no intent is left."""
    operation.run(store)
    unfinished = intents_left(directory)
    assert not unfinished, f"still to be finished: {unfinished}"
    expected, found = operation.applied_to(seen), seen_in_files(directory, operation.named)
    assert found == expected, f"the files differ from what was seen: {difference(found, [expected])}"


_turns = count()


manual_steps: Counter[str] = Counter()
"""How often an operator had to step in before the store worked again."""


def break_torn_lock(directory: Path) -> None:
    """Break `ledger.lock` if a power cut has torn it, as an operator would.

    The content of the lock is not synced, but its name is, together with the names of the events beside it. A
    torn lock names no holder, so it can only be broken on request (LG-05). `manual_steps` counts these cases.
    """
    if (directory / "ledger").is_dir():
        lock = ledger_lock.LedgerLock(directory / "ledger", "a person", timeout=TIMEOUT)
        state = lock.state()
        if state is not None and state.holder is None:
            lock.break_lock(state.identity)
            manual_steps["to break a torn ledger.lock"] += 1


def difference(seen: World, legal: Sequence[World]) -> str:
    """Where the world that was seen and the legal ones differ; for messages."""
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
    """One transaction on a store that holds an old world. It can be killed, or made to fail."""

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
        """A process that survives has cleaned up, and raises nothing but a `Failure`."""
        expected = outcome.error is None or isinstance(outcome.error, Failure)
        assert expected, f"raised {outcome.error!r}"
        if outcome.call is None or outcome.call.name != "unlink":  # the draft could not be removed
            litter = set(drafts_left(directory)) - self.litter - drafts_needed(directory)
            assert not litter, f"left {sorted(litter)}"

    def _legal(self, outcome: Outcome) -> list[World]:
        """The new world if the commit was acknowledged, the old one if it failed, otherwise either."""
        if outcome.acknowledged:
            return [self.new]
        if outcome.error is None or isinstance(outcome.error, OutcomeUnknown):
            return [self.old, self.new]
        return [self.old]


class CommitCase(Transaction):
    """A transaction on a store with this `history`."""

    def __init__(self, history: Sequence[Operation], operation: Operation) -> None:
        self.operation = operation
        self.old = World.empty()
        for each in history:
            self.old = each.applied_to(self.old)
        self.new = operation.applied_to(self.old)
        self.named = list(dict.fromkeys(plain(name) for each in (operation, *history) for name in each.named))
        self.history = history
        self._files: Files | None = None

    def prepare(self, directory: Path) -> None:
        if self._files is None:
            for number, each in enumerate(self.history):
                run_as(f"history {number}", directory, each)
            self._files = Files.of(directory)
        else:
            self._files.put(directory)


class RecoveryCase(Transaction):
    """A transaction on the files that a dead process left."""

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
    """Every distinct way to die: before each call that changes what is, or may be, on the disk; halfway
    through each write; and, as the last one, not at all."""
    with scratch() as base, fresh(base) as directory:
        calls_made = [step.call for step in record(case, directory).steps if step.call is not None]
    for call in dict.fromkeys(calls_made):
        yield Kill.BEFORE, call.index
        if call.name == "write":
            yield Kill.HALFWAY, call.index
    yield Kill.BEFORE, sys.maxsize


def dead_at(case: Transaction, directory: Path, when: Kill, index: int) -> Outcome:
    """Prepare the empty directory, and run the transaction until it dies at this call."""
    case.prepare(directory)
    call = cut_short(lambda: case.operate(directory), when, index)
    if call is None:
        return Outcome(Ending.SUCCEEDED, acknowledged=True)
    return Outcome(Ending.KILLED, when.value, call)


def leftovers(case: Transaction) -> list[Files]:
    """Every distinct set of files that a process leaves if it dies at one of the calls of a transaction."""
    found: dict[Files, None] = {}
    with scratch() as base:
        for when, index in deaths(case):
            with fresh(base) as directory:
                dead_at(case, directory, when, index)
                found[Files.of(directory)] = None
    return list(found)


def death_points(case: Transaction, *, share: float = 1.0) -> Report:
    """Like `kill_points`, but within this process: every distinct death, and its check."""
    report = Report(type(case).__name__)
    with scratch() as base:
        for when, index in chosen(list(deaths(case)), share=share):
            with fresh(base) as directory:
                outcome = dead_at(case, directory, when, index)
                report.add(outcome, judge(case, directory, outcome), "")
    return report


class TwoInARow:
    """A commit that ends in some way, then an operation that completes; on one disk.

    The second may depend on changes of the first that are visible but not durable. With `warm`, the
    second uses a store that was already open, and in use, before the first began.
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
        """Run the first commit; return how it ended."""
        raise NotImplementedError

    def check(self, directory: Path, outcome: Outcome) -> None:
        known: dict[tuple[str, ...], list[World]] = {("made",): [self.new], ("failed",): [self.old]}
        before = known.get(outcome.marks, [self.old, self.new])
        after = [self.second.applied_to(world) for world in before] if outcome.marks else []
        legal = after if outcome.acknowledged else before + after
        examine(directory, self.first.named, legal, outcome.ending)


class AfterADeath(TwoInARow):
    """The first commit dies at one of its calls."""

    when = Kill.BEFORE
    index = 1

    def begin(self, directory: Path) -> str:
        call = cut_short(lambda: self.first.operate(directory), self.when, self.index)
        return "made" if call is None else "died"


class AfterAFault(TwoInARow):
    """The first commit meets an error at one of its calls, and reports its outcome."""

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


# --- Sweeps of two commits in a row ------------------------------------------------------------------


def after_deaths(
    first: CommitCase,
    second: Operation,
    checked: set[Case],
    *,
    warm: bool = False,
    limit: int = LIMIT,
    share: float = 1.0,
) -> Report:
    """Kill the first commit at each of its calls; cut the power at each moment of the second operation."""
    report = Report("after a death")
    ways = list(deaths(first))
    tried = chosen(ways, share=share)
    report.skipped += 10 * (len(ways) - len(tried))
    for when, index in tried:
        scenario = AfterADeath(first, second, warm=warm)
        scenario.when, scenario.index = when, index
        _add(report, power_cuts(scenario, limit=limit, checked=checked, since_mark=True, share=share))
    return report


def after_faults(
    first: CommitCase,
    second: Operation,
    fault: Fault,
    checked: set[Case],
    *,
    limit: int = LIMIT,
    share: float = 1.0,
) -> Report:
    """Make each call of the first commit fail; cut the power at each moment after that."""
    report = Report("after a fault")
    for index in count(1):
        scenario = AfterAFault(first, second)
        scenario.fault, scenario.index = fault, index
        _add(report, power_cuts(scenario, limit=limit, checked=checked, since_mark=True, share=share))
        if not scenario.struck:
            return report
    raise AssertionError("unreachable")


def _add(report: Report, part: Report) -> None:
    report.points += part.points
    report.skipped += part.skipped
    report.calls |= part.calls
    report.violations += part.violations
    report.capped += part.capped
