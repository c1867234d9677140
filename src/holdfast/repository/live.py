"""A live overview: read again after each change that the watchers of the stores report. While nothing changes, nothing
is read.

A thread per watched family or stream waits for changes, and one waits for the end of the holders' processes, which no
store reports. One more thread reads what has changed, and pauses after each read to leave most of the time to
others. No store reports the file locks of other programs; they are read along with anything else, or on `refresh`.
"""

from __future__ import annotations

import contextlib
import os
import select
import sys
import threading
import time
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from holdfast.errors import Failure
from holdfast.fs import calls
from holdfast.issues.model import CLAIMS
from holdfast.issues.model import EVENTS as ISSUE_EVENTS
from holdfast.leases.rules import NAMED_LEASES, WORKTREE_LEASES
from holdfast.ledger.log import EVENTS
from holdfast.locks.identity import Liveness, current_holder
from holdfast.repository.attention import Situation, completed, read_situation
from holdfast.repository.landing_records import LANDINGS, TARGETS
from holdfast.repository.opening import tracker_of
from holdfast.repository.overview import Overview, changed_files, with_conflicts
from holdfast.store.audit import AuditTrail
from holdfast.store.model import Store, Watched
from holdfast.store.open import FILES, address_of, open_store

if TYPE_CHECKING:
    from holdfast.repository.conflicts import WorktreeConflict

AUDIT = AuditTrail().stream
_LEASES = f"{WORKTREE_LEASES.leases.name}/"

OF_REPOSITORY: tuple[Watched, ...] = (
    AUDIT,  # covers worktrees too: each has a separate directory, which could only be polled
    WORKTREE_LEASES.leases,
    WORKTREE_LEASES.queues,
    NAMED_LEASES.leases,
    NAMED_LEASES.queues,
    LANDINGS,
    TARGETS,
)
OF_TRACKER: tuple[Watched, ...] = (ISSUE_EVENTS, CLAIMS)
OF_LEDGER: tuple[Watched, ...] = (EVENTS,)

EVERYTHING, PROCESS = "everything", "process"
_WAKE = 30.0  # seconds: how soon a thread notices that it should end
_RETRY = 5.0  # seconds until a watch that failed begins again
_SETTLE = 0.1  # seconds: changes in quick succession are read together
_SHARE = 3.0  # the pause after a read, as a multiple of its duration
_DETAILS = 5.0  # seconds between two scans of all files


class ChangeWatcher:
    """Watches stores and processes: collects the names of what has changed, and calls `notify` after each change."""

    def __init__(self, notify: Callable[[], object]) -> None:
        self._notify = notify
        self._names: set[str] = set()
        self._lock = threading.Lock()
        self._closed = threading.Event()
        self._watched: set[tuple[Path, str]] = set()
        self._processes: dict[int, int] = {}  # by descriptor
        if sys.platform == "linux":
            self._ends: select.epoll | None = None

    def add(self, names: Iterable[str]) -> None:
        with self._lock:
            self._names.update(names)
        self._notify()

    def take(self) -> set[str]:
        """The names that were collected since the last call."""
        with self._lock:
            names, self._names = self._names, set()
        return names

    def watch(self, root: Path, address: str | None, watched: Iterable[Watched]) -> None:
        """Watch families and streams of a store, except those already watched."""
        new = [each for each in watched if (root, each.name) not in self._watched]
        self._watched.update((root, each.name) for each in new)
        for each in new:
            threading.Thread(target=self._follow, args=(root, address, each), daemon=True).start()

    def watch_processes(self, pids: Iterable[int]) -> None:
        """Report the end of these processes, if the kernel supports it."""
        if sys.platform != "linux":
            return
        with self._lock:
            if self._ends is None:
                self._ends = select.epoll()
                threading.Thread(target=self._await_ends, args=(self._ends,), daemon=True).start()
            for pid in set(pids).difference(self._processes.values()):
                with contextlib.suppress(OSError):  # it has ended, or the kernel is too old
                    descriptor = os.pidfd_open(pid)
                    self._processes[descriptor] = pid
                    self._ends.register(descriptor, select.EPOLLIN)

    def close(self) -> None:
        """Tell all threads to end; each does so when it next wakes up."""
        self._closed.set()

    def _follow(self, root: Path, address: str | None, what: Watched) -> None:
        while not self._closed.is_set():
            try:
                with contextlib.closing(open_store(root, address)) as store:
                    self._report(store, what)
            except Failure:
                self.add([what.name])  # the next read says why
                self._closed.wait(_RETRY)

    def _report(self, store: Store, what: Watched) -> None:
        with store.watch(what) as watch:
            self.add([f"{what.name}/"])  # something in it may have changed before the watch began
            while not self._closed.is_set():
                if names := watch.wait(_WAKE):
                    self.add(names)

    if sys.platform == "linux":

        def _await_ends(self, ends: select.epoll) -> None:
            while not self._closed.is_set():
                for descriptor, _ in ends.poll(_WAKE):
                    ends.unregister(descriptor)
                    with self._lock:
                        self._processes.pop(descriptor, None)
                    calls.close(descriptor)
                    self.add([PROCESS])


class LiveView(NamedTuple):
    """The last result, and when it was read (by the monotonic clock). `failure` says why a later read failed."""

    situation: Situation | None
    read_at: float
    published_at: float
    failure: Failure | None = None


class LiveOverview:
    """Keeps an overview with its details current. `look` reads the overview, `tell` is called after each read, in
    another thread. `address` is the store of the issues and the ledger, if it is not the configured one."""

    def __init__(self, look: Callable[[], Overview], tell: Callable[[], object], *, address: str | None = None) -> None:
        self.view: LiveView | None = None
        self._look, self._tell, self._address = look, tell, address
        self._changed = threading.Event()
        self._closed = threading.Event()
        self._changes = ChangeWatcher(self._changed.set)
        self._situation: Situation | None = None
        self._counts: Mapping[str, int] = {}
        self._conflicts: tuple[WorktreeConflict, ...] = ()
        self._details_due = True
        self._details_at = -_DETAILS
        self._read_at = 0.0

    def start(self) -> None:
        self._changes.add([EVERYTHING])
        threading.Thread(target=self._run, daemon=True).start()

    def refresh(self) -> None:
        """Read everything again."""
        self._details_at = -_DETAILS
        self._changes.add([EVERYTHING])

    def close(self) -> None:
        """Stop reading."""
        self._closed.set()
        self._changes.close()
        self._changed.set()

    def _run(self) -> None:
        while not self._closed.is_set():
            until_details = self._details_at + _DETAILS - time.monotonic()
            self._changed.wait(max(0.0, until_details) if self._details_due else None)
            self._closed.wait(_SETTLE)
            self._changed.clear()
            began = time.monotonic()
            try:
                self._read(self._changes.take())
            except Exception as error:  # without this thread, the view would stay as it is and look current
                self._details_at, self._details_due = time.monotonic(), True  # when to try again
                self._publish(error if isinstance(error, Failure) else Failure(f"{type(error).__name__}: {error}"))
            self._closed.wait(min(_RETRY, (time.monotonic() - began) * _SHARE))

    def _read(self, names: set[str]) -> None:
        self._situation, self._read_at = self._read_again(names), time.monotonic()
        self._follow(self._situation)
        self._publish()
        self._details_due = self._details_due or any(_may_change_files(each) for each in names)
        if self._details_due and time.monotonic() >= self._details_at + _DETAILS:
            self._look_at_files(self._situation.overview)
            self._publish()

    def _read_again(self, names: set[str]) -> Situation:
        """Read what has changed. The issues are reused unless one of them has changed."""
        overview, before = self._look(), self._situation
        if before is None or any(each == EVERYTHING or each.startswith("jit/") for each in names):
            return read_situation(overview, address=self._address)
        return read_situation(overview, address=self._address, issues=before.issues)

    def _look_at_files(self, overview: Overview) -> None:
        self._details_at, self._details_due = time.monotonic(), False
        self._conflicts = with_conflicts(overview).conflicts
        self._counts = changed_files(overview)

    def _follow(self, situation: Situation) -> None:
        """Watch only the parts that exist: watching files would create their directories."""
        root, address = situation.overview.root, self._address
        if calls.exists(root / ".jvs"):
            self._changes.watch(root, None, OF_REPOSITORY)
        if situation.issues is not None:
            self._changes.watch(tracker_of(root), address, OF_TRACKER)
        if address_of(root, address) != FILES or calls.exists(root / "ledger"):
            self._changes.watch(root, address, OF_LEDGER)
        self._changes.watch_processes(holder_pids(situation.overview))

    def _publish(self, failure: Failure | None = None) -> None:
        seen = self._situation
        if seen is not None:
            seen = completed(seen._replace(overview=seen.overview._replace(conflicts=self._conflicts)), self._counts)
        self.view = LiveView(seen, self._read_at, time.monotonic(), failure)
        self._tell()


def _may_change_files(name: str) -> bool:
    """Whether a change to this document may come with changed files: a renewal shows that an agent is working."""
    return name in (EVERYTHING, AUDIT.name) or (name.startswith(_LEASES) and name != _LEASES)


def holder_pids(overview: Overview) -> set[int]:
    """The processes on this machine that hold something."""
    here = current_holder().host
    found: set[int] = set()
    for each in overview.holdings:
        parts = (each.process or "").split(":")
        if each.liveness is Liveness.ALIVE and len(parts) == 4 and parts[0] == here and parts[2].isdigit():
            found.add(int(parts[2]))
    return found
