"""What the tests of a ledger's lock between processes share: who holds it, who waits for it, who looks."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path

from holdfast.clock import ManualClock
from holdfast.errors import LockTimeout
from holdfast.locks.kernel_locks import find_holders
from holdfast.locks.ledger_lock import LedgerLock, LedgerLockState
from tests.locks.workers import PATIENCE, Line, Worker, Workers


def patient(ledger: Path, agent_id: str = "agent-patient") -> LedgerLock:
    """One who waits as long as the test lasts."""
    return LedgerLock(ledger, agent_id, timeout=PATIENCE)


def observer(ledger: Path, *, ahead: float = 0.0) -> LedgerLock:
    """One who tries once, and whose clock is ahead of everybody else's."""
    return LedgerLock(ledger, "observer", timeout=0.0, clock=ManualClock(wall=time.time() + ahead))


def seen(lock: LedgerLock) -> LedgerLockState:
    """The lock that is there."""
    state = lock.state()
    assert state is not None
    return state


def hold(ledger: Path, agent_id: str) -> Callable[[Line], None]:
    """Take the lock, say so, release it when told to, say how that went."""

    def task(line: Line) -> None:
        held = patient(ledger, agent_id).acquire()
        line.say("held")
        line.wait()
        line.say(held.release())

    return task


def start_holder(workers: Workers, ledger: Path, agent_id: str = "agent-holder") -> Worker:
    """A worker that holds the lock until told otherwise."""
    holder = workers.start(hold(ledger, agent_id))
    assert holder.hear() == "held"
    return holder


def is_held(ledger: Path) -> bool:
    """Whether one who tries once is refused; if not, the lock is had and given back."""
    try:
        observer(ledger).acquire().release()
    except LockTimeout:
        return True
    return False


def is_waiting(worker: Worker, ledger: Path) -> bool:
    """Whether the worker stands first in line."""
    found = find_holders(ledger / ".ledger.lock.turnstile") or ()
    return any(each.waiting and each.pid == worker.pid for each in found)


def count_up(counter: Path) -> None:
    """What only one may do at a time."""
    count = int(counter.read_text())
    time.sleep(0)
    with counter.open("r+") as file:  # as long as before: a reader never finds half a number
        file.write(f"{count + 1:08}\n")
