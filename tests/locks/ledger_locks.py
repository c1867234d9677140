"""Helpers for the tests of a ledger's lock between processes: holders, waiters and observers."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path

from holdfast.clock import ManualClock
from holdfast.errors import LockTimeout
from holdfast.locks.kernel_locks import find_holders
from holdfast.locks.ledger_lock import LedgerLock, LedgerLockState
from tests.locks.workers import PATIENCE, Line, Worker, Workers


def waiting_lock(ledger: Path, agent_id: str = "agent-patient") -> LedgerLock:
    """A lock that waits as long as the test may last."""
    return LedgerLock(ledger, agent_id, timeout=PATIENCE)


def observer(ledger: Path, *, ahead: float = 0.0) -> LedgerLock:
    """A lock that tries once, with a clock `ahead` of everyone else's."""
    return LedgerLock(ledger, "observer", timeout=0.0, clock=ManualClock(wall=time.time() + ahead))


def seen(lock: LedgerLock) -> LedgerLockState:
    """The state of the lock, which must be held."""
    state = lock.state()
    assert state is not None
    return state


def hold(ledger: Path, agent_id: str) -> Callable[[Line], None]:
    """Task for a worker: take the lock, report it, release it when told to, and report the result."""

    def task(line: Line) -> None:
        held = waiting_lock(ledger, agent_id).acquire()
        line.say("held")
        line.wait()
        line.say(held.release())

    return task


def start_holder(workers: Workers, ledger: Path, agent_id: str = "agent-holder") -> Worker:
    """Start a worker that holds the lock until told to release it."""
    holder = workers.start(hold(ledger, agent_id))
    assert holder.hear() == "held"
    return holder


def is_held(ledger: Path) -> bool:
    """Whether a single attempt is refused; if not, the lock is taken and released."""
    try:
        observer(ledger).acquire().release()
    except LockTimeout:
        return True
    return False


def is_waiting(worker: Worker, ledger: Path) -> bool:
    """Whether the worker is first in the queue."""
    found = find_holders(ledger / ".ledger.lock.turnstile") or ()
    return any(each.waiting and each.pid == worker.pid for each in found)


def count_up(counter: Path) -> None:
    """Increment the counter in two steps, which needs a lock."""
    count = int(counter.read_text())
    time.sleep(0)
    with counter.open("r+") as file:  # same length as before: a reader never sees half a number
        file.write(f"{count + 1:08}\n")
