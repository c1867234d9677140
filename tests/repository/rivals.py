"""A publisher and a thief that steals its lease: two processes, with clocks that tests set.

The thief's clock is ahead, so that it may steal a lease that is still valid by the publisher's clock: only the
fencing token stands between a stale holder and the head. The verdict rests on the audit trail alone, whose
entries are written in the same transactions that they record.
"""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from holdfast.clock import ManualClock
from holdfast.errors import Failure
from holdfast.fs import calls
from holdfast.leases.service import LeaseService
from holdfast.repository import snapshots
from holdfast.repository.context import (
    DESCRIPTORS,
    MAIN,
    Proof,
    RepositoryContext,
    RepositoryPaths,
    check_leasable,
    worktree_keys,
)
from holdfast.repository.history import worktree_history
from holdfast.repository.home import PlainHome
from holdfast.repository.restore import RestoreOptions, restore_in_place
from holdfast.store.audit import AuditTrail, verify
from holdfast.store.files import FileStore
from proof.interpose import Attempt, interposed
from tests.locks.workers import Line, stop_myself

BEGIN = 1_700_000_000.0
TTL = 30.0
PUBLISHING = ("snapshot_published", "restore_begun")


class Answer(NamedTuple):
    """The result of an attempt: the code of its failure, or its success and the snapshot."""

    what: str
    snapshot_id: str = ""


def control_at(root: Path, clock: ManualClock, *, timeout: float = 60.0) -> RepositoryContext:
    """Open the repository at `root` with its own clock."""
    store, trail = FileStore(root, clock=clock, timeout=timeout), AuditTrail()
    leases = LeaseService(store, trail, also_named=worktree_keys, precondition=check_leasable, clock=clock)
    return RepositoryContext(PlainHome(RepositoryPaths(root)), store, trail, leases)


class Rival:
    """The publisher or the thief, each in its own process."""

    def __init__(self, root: Path, *, timeout: float = 60.0) -> None:
        self.clock = ManualClock(wall=BEGIN)
        self.context = control_at(root, self.clock, timeout=timeout)
        self.proof: Proof | None = None

    def acquire(self, at: float) -> Answer:
        """Acquire the lease at this time, or steal it from its holder."""
        self.clock.advance(BEGIN + at - self.clock.wall())
        try:
            lease = self.context.leases.acquire(MAIN, self.context.leases.request(ttl=TTL)).lease
        except Failure as failure:
            return Answer(failure.code)
        self.proof = Proof(lease.lock_id, lease.fencing_token)
        return Answer("acquired")

    def snapshot(self) -> Answer:
        return self._published(lambda: snapshots.snapshot(self.context, MAIN, self.proof).snapshot_id)

    def restore(self, snapshot_id: str) -> Answer:
        how = RestoreOptions(reason="tested")

        def restore() -> str:
            restored = restore_in_place(self.context, MAIN, snapshot_id, self.proof, how)
            assert restored.published is not None
            return restored.published.snapshot_id

        return self._published(restore)

    def _published(self, publish: Callable[[], str]) -> Answer:
        try:
            return Answer("published", publish())
        except Failure as failure:
            return Answer(failure.code)


# --- Verdicts ---------------------------------------------------------------------------------------


def stale_commits(context: RepositoryContext) -> list[int]:
    """Numbers of the audit entries of publications with a stale token."""
    current, stale = 0, []
    for entry in verify(context.store.entries(context.trail.stream)):
        if entry.event == "lock_acquired":
            current = _number(entry.facts["fencing_token"])
        elif entry.event == "lock_stolen":
            new = entry.facts["new"]
            assert isinstance(new, dict)
            current = _number(new["fencing_token"])
        elif entry.event in PUBLISHING and entry.facts["fencing_token"] != current:
            stale.append(entry.number)
    return stale


def published(context: RepositoryContext) -> list[str]:
    """The published snapshots, in the order of the audit trail."""
    names = {"snapshot_published": "snapshot_id", "restore_begun": "operation_id"}
    entries = verify(context.store.entries(context.trail.stream))
    return [str(each.facts[names[each.event]]) for each in entries if each.event in PUBLISHING]


def require_one_line(context: RepositoryContext, *, hidden: Sequence[str] = ()) -> None:
    """The published snapshots form one linear history in that order; apart from `hidden` trees nothing else exists."""
    expected = published(context)
    assert [each.descriptor.snapshot_id for each in worktree_history(context, MAIN).entries] == expected[::-1]
    assert {name for name, _ in context.store.scan(DESCRIPTORS)} == set(expected)
    trees = {path.name for path in context.paths.snapshots.iterdir()}
    assert trees == set(expected) | set(hidden)
    assert all(context.home.is_ready(each) for each in expected)


def _number(value: object) -> int:
    assert isinstance(value, int)
    return value


# --- Interference -----------------------------------------------------------------------------------


class Steps:
    """Counts the file system calls of a publisher, and stops its process before one of them."""

    def __init__(self, stop_at: int) -> None:
        self.stop_at = stop_at
        self.count = 0

    def __call__(self, attempt: Attempt) -> Any:
        self.count += 1
        if self.count == self.stop_at:
            stop_myself()
        return attempt.perform()


_UNSEEN = ("open", "close", "fsync", "sync_directory", "sync_filesystem")
STEPS = tuple(name for name in calls.CHANGING if name not in _UNSEEN)
"""Calls with an effect that other processes can see, or before which they can interfere."""


class Delay:
    """Delays one call, chosen at random among those before which other processes can interfere."""

    KINDS = ("flock", "flock_interruptible", "link", "rename", "rename_noreplace", "replace")

    def __init__(self, among: int) -> None:
        self._left = random.randint(1, among)
        self.count = 0

    def __call__(self, attempt: Attempt) -> Any:
        self.count += 1
        self._left -= 1
        if not self._left:
            time.sleep(random.uniform(0.001, LONGEST_DELAY))
        return attempt.perform()


LONGEST_DELAY = 0.008


def delayed_publisher(root: Path, publish: Callable[[Rival], Answer]) -> Callable[[Line], None]:
    """A worker that acquires the lease at the given time, reports it, and publishes with a delay at some call."""

    def work(line: Line) -> None:
        rival, calls_made = Rival(root), 30
        while True:
            at = line.wait()
            line.say(rival.acquire(at))
            assert line.wait() == "publish"
            delay = Delay(calls_made)
            with interposed(delay, Delay.KINDS):
                line.say(publish(rival))
            calls_made = max(calls_made, delay.count)

    return work


def thief(root: Path) -> Callable[[Line], None]:
    """A worker that starts at a random moment, acquires the lease at the given time, and publishes at once."""

    def work(line: Line) -> None:
        rival = Rival(root)
        while True:
            at = line.wait()
            time.sleep(random.uniform(0, 2 * LONGEST_DELAY))
            while (stolen := rival.acquire(at)).what == "E_LOCK_CONFLICT":
                time.sleep(0.001)  # a restore that was decided is about to finish
            line.say(rival.snapshot() if stolen.what == "acquired" else stolen)

    return work
