"""Where every document and stream lives, which lock guards it, and in which order locks are taken.

This is the one table. A key names a row and, if the row has a `{name}`, a member of it. The rows
stand in the order in which their guards are locked: a transaction that touches several takes them in
this order, members of one row by name; so no two transactions can wait for each other, and none can
be written that does otherwise, because nothing else takes these locks.

`{stripe}` spreads the members of a row over 64 guards, for rows whose specification names none: a
guard is never deleted, and one for each of a hundred thousand documents would be litter.
"""

from __future__ import annotations

import contextlib
import os
import zlib
from collections.abc import Collection, Iterator, Sequence
from contextlib import AbstractContextManager
from enum import Enum
from typing import NamedTuple, Self

from holdfast.errors import NotFound, UsageFailure
from holdfast.fs import calls
from holdfast.fs.directory import Directory, io_failure
from holdfast.fs.names import safe_name
from holdfast.locks.file_lock import FileLocker, LockStatistics
from holdfast.locks.ledger_lock import DEFAULT_TIMEOUT, LOCK_NAME, LedgerLock

INTENTS = ".holdfast/intents"
"""Where the intents of commits to several documents are kept."""

STRIPES = 64
MOST_REMEMBERED = 10_000
"""How many places a layout remembers, so as not to work them out again."""


class Kind(Enum):
    """What a row's file is."""

    DOCUMENT = "document"
    LINES = "lines"
    """A stream of which each record is a line of one file."""
    NUMBERED = "numbered"
    """A stream of which each record is a file, `{number}` in its name."""


class Row(NamedTuple):
    """One line of the table: key, path, guard; all relative to the root of the store."""

    key: str
    path: str
    guard: str
    kind: Kind = Kind.DOCUMENT


# fmt: off
_WORKTREE = ".jvs/guards/worktree-{name}.lock"  # all that belongs to one worktree has one guard

_ISSUE = ".jit/issues/{name}.lock"  # and so has all that belongs to one issue

TABLE: tuple[Row, ...] = (
    # The repository, its worktrees and snapshots.
    Row("jvs/format",             ".jvs/format.json",                  ".jvs/guards/format.lock"),
    Row("jvs/worktrees/{name}",   ".jvs/worktrees/{name}/config.json", _WORKTREE),
    Row("jvs/leases/{name}",      ".jvs/locks/{name}.json",            _WORKTREE),
    Row("jvs/tokens/{name}",      ".jvs/tokens/{name}.json",           _WORKTREE),
    Row("jvs/queues/{name}",      ".jvs/queues/{name}.json",           _WORKTREE),
    Row("jvs/operations/{name}",  ".jvs/operations/{name}.json",       _WORKTREE),
    Row("jvs/descriptors/{name}", ".jvs/descriptors/{name}.json",      ".jvs/guards/snapshots-{stripe}.lock"),
    Row("jvs/refs/{name}",        ".jvs/refs/{name}.json",             ".jvs/guards/refs.lock"),
    Row("jvs/pins/{name}",        ".jvs/pins/{name}.json",             ".jvs/guards/refs.lock"),
    Row("jvs/retention",          ".jvs/retention.json",               ".jvs/guards/retention.lock"),
    Row("jvs/plans/{name}",       ".jvs/plans/{name}.json",            ".jvs/guards/retention.lock"),
    # Issues: index, gates, issues by id, events.
    Row("jit/index",              ".jit/index.json",                   ".jit/.index.lock"),
    Row("jit/graph",              ".jit/graph.json",                   ".jit/.index.lock"),
    Row("jit/gates",              ".jit/gates.json",                   ".jit/.gates.lock"),
    Row("jit/gate-runs/{name}",   ".jit/gate-runs/{name}/result.json", ".jit/.gates.lock"),
    Row("jit/issues/{name}",      ".jit/issues/{name}.json",           _ISSUE),
    Row("jit/claims/{name}",      ".jit/claims/{name}.json",           _ISSUE),
    Row("jit/dependents/{name}",  ".jit/dependents/{name}.json",       _ISSUE),
    # The ledger, whose guard is the lock file that other programs know too.
    Row("ledger/meta",            "meta.json",                         "ledger/.meta.lock"),
    Row("ledger/events",          "ledger/event-{number}.json",        "ledger/ledger.lock", Kind.NUMBERED),
    # Streams that every change appends to come last and are held briefly.
    Row("jit/events",             ".jit/events.jsonl",                 ".jit/.events.lock", Kind.LINES),
    Row("jvs/audit",              ".jvs/audit/audit.jsonl",            ".jvs/audit/.audit.lock", Kind.LINES),
)
# fmt: on


class Location(NamedTuple):
    """Where one document or stream is. `rank` sorts guards into the order in which they are locked:
    by the rows of the table, members of one row by name (not by path: `a-b.lock` sorts before `a.lock`)."""

    name: str
    kind: Kind
    directory: str
    file: str
    guard: str
    rank: tuple[int, str]

    @property
    def path(self) -> str:
        """The path relative to the root."""
        return f"{self.directory}/{self.file}" if self.directory else self.file

    def numbered(self, number: int) -> str:
        """The file of one record of a numbered stream; past 999999 the numbers simply go on."""
        return self.file.replace("{number}", f"{number:06d}")


class Layout:
    """A table, ready to be looked things up in."""

    def __init__(self, rows: Sequence[Row] = TABLE) -> None:
        self._rows = {row.key.removesuffix("/{name}"): row for row in rows}
        ranks: dict[str, int] = {}
        for row in rows:
            ranks.setdefault(row.guard, len(ranks))
        self._ranks = ranks
        self._places: dict[str, Location] = {}

    def place(self, key: str) -> Location:
        """The place of a key; one that no row has, or whose member is not a safe name, is refused."""
        known = self._places.get(key)
        if known is None:
            known = self._find(key)
            if len(self._places) < MOST_REMEMBERED:
                self._places[key] = known
        return known

    def _find(self, key: str) -> Location:
        row = self._rows.get(key)
        if row is not None and "{name}" not in row.key:
            return self._filled(row, key, "")
        family, _, member = key.rpartition("/")
        row = self._rows.get(family)
        if row is None or "{name}" not in row.key:
            raise UsageFailure(f"there is no place for {key!a} in the layout", key=ascii(key))
        return self._filled(row, key, safe_name(member, what="key"))

    def family(self, family: str) -> tuple[str, str, str]:
        """The directory of a family's members, and what stands before and behind their names there."""
        row = self._rows.get(family)
        if row is None or "{name}" not in row.key:
            raise UsageFailure(f"{family!a} is not a family of the layout", key=ascii(family))
        before, after = row.path.split("{name}")
        directory, _, start = before.rpartition("/")
        return directory, start, after

    def has_own_directory(self, key: str) -> bool:
        """Whether a document is alone in a directory that bears its name."""
        row = self._rows.get(key.rpartition("/")[0])
        return row is not None and "{name}/" in row.path

    def _filled(self, row: Row, key: str, member: str) -> Location:
        stripe = f"{zlib.crc32(member.encode()) % STRIPES:02d}"
        guard = row.guard.replace("{name}", member).replace("{stripe}", stripe)
        directory, _, file = row.path.replace("{name}", member).rpartition("/")
        among = member if "{name}" in row.guard else stripe if "{stripe}" in row.guard else ""
        return Location(key, row.kind, directory, file, guard, (self._ranks[row.guard], among))


class DocumentLocks:
    """The guards of one store. Most are file locks; that of the ledger is its own protocol."""

    def __init__(self, root: Directory, timeout: float | None, agent_id: str) -> None:
        self._root = root
        self._timeout = timeout
        self._agent_id = agent_id
        self._locker = FileLocker(timeout)
        self._ledger_locks: dict[str, LedgerLock] = {}

    def locked(self, places: Collection[Location], *, shared: bool = False) -> AbstractContextManager[object]:
        """Hold the guards of all places; `LockTimeout` if one cannot be had, and then none is held."""
        if len(places) == 1:
            return self._lock(next(iter(places)).guard, shared=shared)
        guards = [guard for _, guard in sorted({(place.rank, place.guard) for place in places})]
        return self._all(guards, shared=shared)

    @contextlib.contextmanager
    def _all(self, guards: list[str], *, shared: bool) -> Iterator[None]:
        with contextlib.ExitStack() as held:
            for guard in guards:
                held.enter_context(self._lock(guard, shared=shared))
            yield

    def statistics(self) -> LockStatistics:
        """What was locked and waited for so far."""
        return self._locker.statistics()

    def without_waiting(self) -> DocumentLocks:
        """The same guards, but `LockTimeout` at once if one is held."""
        return DocumentLocks(self._root, 0.0, self._agent_id)

    def close(self) -> None:
        """Close the lock files that are kept open for speed, and remove those that are kept for it."""
        self._locker.close()
        for lock in self._ledger_locks.values():
            lock.close()

    def _lock(self, guard: str, *, shared: bool) -> AbstractContextManager[object]:
        try:
            return self._take(guard, shared=shared)
        except NotFound:  # the first use: its directory is not there yet
            self._root.beneath(guard.rpartition("/")[0], create=True).close()
            return self._take(guard, shared=shared)

    def _take(self, guard: str, *, shared: bool) -> AbstractContextManager[object]:
        directory, _, name = guard.rpartition("/")
        if name == LOCK_NAME:
            return self._ledger_lock(directory).acquire()
        path = self._root.where(guard)
        return self._locker.lock_shared(path) if shared else self._locker.lock_exclusive(path)

    def _ledger_lock(self, directory: str) -> LedgerLock:
        lock = self._ledger_locks.get(directory)
        if lock is None:
            timeout = DEFAULT_TIMEOUT if self._timeout is None else self._timeout
            lock = LedgerLock(self._root.path / directory, self._agent_id, timeout=timeout)
            self._ledger_locks[directory] = lock
        return lock


MOST_IDLE = 32
"""How many free directories are kept; beyond that the one kept longest is closed."""


def open_directory(root: Directory, relative: str, *, create: bool = False) -> Directory:
    """A directory of the store; "" is the root itself."""
    return root.beneath(relative, create=create) if relative else Directory.open(root.path)


class _Kept(Directory):
    """A directory that knows which one it is."""

    __slots__ = ("identity",)

    def __init__(self, directory: Directory) -> None:
        super().__init__(directory.shown, directory.hand_over())
        try:
            self.identity = None if self.fd is None else _identity(calls.fstat(self.fd))
        except OSError as error:
            self.close()
            raise io_failure("look at", self.shown, error) from error


class Directories:
    """The directories below one root."""

    def __init__(self, root: Directory) -> None:
        self._root = root
        self._idle: dict[str, _Kept] = {}

    def take(self, relative: str, *, create: bool = False) -> _Kept:
        """The directory `relative` as of now, for the caller alone; `NotFound` unless it may be created."""
        kept = self._idle.pop(relative, None)
        if kept is not None:
            if self._is_current(relative, kept):
                return kept
            kept.close()
        return _Kept(open_directory(self._root, relative, create=create))

    def give_back(self, relative: str, directory: _Kept) -> None:
        """Keep a directory for the next use."""
        if self._idle.setdefault(relative, directory) is not directory:
            directory.close()
        elif len(self._idle) > MOST_IDLE:
            with contextlib.suppress(KeyError, StopIteration, RuntimeError):  # another thread was faster
                self._idle.pop(next(iter(self._idle))).close()

    def close(self) -> None:
        """Close all that nobody uses."""
        while self._idle:
            with contextlib.suppress(KeyError):
                self._idle.popitem()[1].close()

    def _is_current(self, relative: str, kept: _Kept) -> bool:
        if kept.identity is None:
            return False
        try:
            status = calls.stat(relative or self._root.shown, dir_fd=self._root.fd, follow_symlinks=False)
        except OSError:
            return False
        return _identity(status) == kept.identity


class OpenDirectories:
    """The directories that one transaction works in, each taken once, given back together."""

    def __init__(self, directories: Directories) -> None:
        self._directories = directories
        self._taken: dict[str, _Kept] = {}

    def get(self, relative: str, *, create: bool = False) -> Directory:
        """A directory; `NotFound` unless it may be created."""
        found = self._taken.get(relative)
        if found is None:
            found = self._taken[relative] = self._directories.take(relative, create=create)
        return found

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *problem: object) -> None:
        for relative, directory in self._taken.items():
            self._directories.give_back(relative, directory)


def _identity(status: os.stat_result) -> tuple[int, int]:
    return status.st_dev, status.st_ino
