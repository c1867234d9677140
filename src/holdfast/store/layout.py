"""The layout of a file store: where each document and stream is, and which document lock protects it.

A key names a row of `TABLE` and, if the row has a `{name}`, a member of it. The rows are in lock order: a
transaction takes the locks of everything that it names in this order, and those of one row's members by name. Nothing
else takes these locks, so transactions cannot deadlock.

`{stripe}` spreads the members of a row over 64 locks, for rows whose specification names none. Lock files are
never deleted, and one for each of a hundred thousand documents would be litter.
"""

from __future__ import annotations

import contextlib
import os
import time
import zlib
from collections.abc import Collection, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager
from contextvars import ContextVar
from enum import Enum
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple, Self

from holdfast.errors import Failure, NotFound, UsageFailure
from holdfast.fs import calls, durable
from holdfast.fs.directory import Directory, io_failure, make_directories
from holdfast.fs.names import safe_name
from holdfast.locks.file_lock import FileLocker, LockStatistics
from holdfast.locks.flock_wait import LockWait

if TYPE_CHECKING:
    from holdfast.locks.ledger_lock import HeldLedgerLock, LedgerLock

CHECKPOINTS = ".holdfast/checkpoints"  # the directory of the checkpoint files
INTENTS = ".holdfast/intents"  # the directory of the intents of commits that change several documents
SHARED = ("jit/index", "jit/gates", "jit/issues/")  # documents that other programs change too, field by field
_STRIPES = 64
_MOST_CACHED = 10_000


class Kind(Enum):
    """How a document or stream is stored."""

    DOCUMENT = "document"
    LINES = "lines"  # a stream whose records are the lines of one file
    NUMBERED = "numbered"  # a stream whose records are files with a `{number}` in their names


class Row(NamedTuple):
    """A row of the table: key, path and document lock, relative to the root of the store."""

    key: str
    path: str
    lock: str
    kind: Kind = Kind.DOCUMENT


# fmt: off
_WORKTREE = ".jvs/guards/worktree-{name}.lock"  # one lock for everything that belongs to a worktree

_NAMED = ".jvs/guards/named-{stripe}.lock"  # for leases without a worktree

_ISSUE = ".jit/issues/{name}.lock"  # one lock for everything that belongs to an issue

TABLE: tuple[Row, ...] = (
    # The repository, its worktrees and snapshots.
    Row("jvs/format",             ".jvs/format.json",                  ".jvs/guards/format.lock"),
    Row("jvs/sites/{name}",       ".jvs/sites/{name}.json",            ".jvs/guards/sites.lock"),
    Row("jvs/worktrees/{name}",   ".jvs/worktrees/{name}/config.json", _WORKTREE),
    Row("jvs/leases/{name}",      ".jvs/locks/{name}.json",            _WORKTREE),
    Row("jvs/tokens/{name}",      ".jvs/tokens/{name}.json",           _WORKTREE),
    Row("jvs/queues/{name}",      ".jvs/queues/{name}.json",           _WORKTREE),
    Row("jvs/named-leases/{name}", ".jvs/named/leases/{name}.json",    _NAMED),
    Row("jvs/named-tokens/{name}", ".jvs/named/tokens/{name}.json",    _NAMED),
    Row("jvs/named-queues/{name}", ".jvs/named/queues/{name}.json",    _NAMED),
    Row("jvs/operations/{name}",  ".jvs/operations/{name}.json",       _WORKTREE),
    Row("jvs/descriptors/{name}", ".jvs/descriptors/{name}.json",      ".jvs/guards/snapshots-{stripe}.lock"),
    Row("jvs/refs/{name}",        ".jvs/refs/{name}.json",             ".jvs/guards/refs.lock"),
    Row("jvs/pins/{name}",        ".jvs/pins/{name}.json",             ".jvs/guards/refs.lock"),
    Row("jvs/retention",          ".jvs/retention.json",               ".jvs/guards/retention.lock"),
    Row("jvs/plans/{name}",       ".jvs/plans/{name}.json",            ".jvs/guards/retention.lock"),
    Row("jvs/content",            ".jvs/content.json",                 ".jvs/guards/retention.lock"),
    Row("jvs/uploads/{name}",     ".jvs/uploads/{name}.json",          ".jvs/guards/retention.lock"),
    Row("jvs/landing-targets/{name}", ".jvs/landing-targets/{name}.json", ".jvs/guards/landings.lock"),
    Row("jvs/landings/{name}",    ".jvs/landings/{name}.json",         ".jvs/guards/landings.lock"),
    # Issues: index, gates, issues by id, events.
    Row("jit/index",              ".jit/index.json",                   ".jit/.index.lock"),
    Row("jit/unlisted",           ".jit/unlisted.json",                ".jit/.index.lock"),
    Row("jit/graph",              ".jit/graph.json",                   ".jit/.index.lock"),
    Row("jit/gates",              ".jit/gates.json",                   ".jit/.gates.lock"),
    Row("jit/gate-runs/{name}",   ".jit/gate-runs/{name}/result.json", ".jit/.gates.lock"),
    Row("jit/issues/{name}",      ".jit/issues/{name}.json",           _ISSUE),
    Row("jit/claims/{name}",      ".jit/claims/{name}.json",           _ISSUE),
    Row("jit/dependents/{name}",  ".jit/dependents/{name}.json",       _ISSUE),
    # The ledger, whose lock is the lock file that other programs know too.
    Row("ledger/meta",            "meta.json",                         "ledger/.meta.lock"),
    Row("ledger/archive",         ".holdfast/ledger-archive.json",     "ledger/.meta.lock"),
    Row("ledger/events",          "ledger/event-{number}.json",        "ledger/ledger.lock", Kind.NUMBERED),
    Row("jvs/audit-archive",      ".jvs/audit/archive.json",           ".jvs/guards/audit-archive.lock"),
    # Streams that every change appends to come last: the lock of the events is taken late, and held only briefly.
    Row("jvs/audit",              ".jvs/audit/audit.jsonl",            ".jvs/audit/.audit.lock", Kind.LINES),
    Row("jvs/audit-head",         ".jvs/audit/head.json",              ".jvs/audit/.audit.lock"),
    Row("jit/events",             ".jit/events.jsonl",                 ".jit/.events.lock", Kind.LINES),
)
# fmt: on


class Location(NamedTuple):
    """The location of a document or stream. Locks are taken in the order of `rank`: by the rows of the table,
    members of one row by name (not by path: `a-b.lock` sorts before `a.lock`)."""

    name: str
    kind: Kind
    directory: str
    file: str
    lock: str
    rank: tuple[int, str]

    @property
    def path(self) -> str:
        """The path relative to the root."""
        return f"{self.directory}/{self.file}" if self.directory else self.file

    def numbered(self, number: int) -> str:
        """The file of a record in a numbered stream; numbers may exceed six digits."""
        return self.file.replace("{number}", f"{number:06d}")

    def place_of(self, position: int) -> str:
        """The location of a record of a stream, for display."""
        if self.kind is Kind.NUMBERED:
            return f"{self.directory}/{self.numbered(position)}"
        return f"{self.path}, at {position}"


class Layout:
    """Looks up keys in a table."""

    def __init__(self, rows: Sequence[Row] = TABLE) -> None:
        self._rows = {row.key.removesuffix("/{name}"): row for row in rows}
        self._ranks: dict[str, int] = {}
        for row in rows:
            self._ranks.setdefault(row.lock, len(self._ranks))
        self._cached: dict[str, Location] = {}

    def locate(self, key: str) -> Location:
        """The location of a key. Keys without a row and unsafe member names are refused."""
        location = self._cached.get(key)
        if location is None:
            location = self._find(key)
            if len(self._cached) < _MOST_CACHED:
                self._cached[key] = location
        return location

    def _find(self, key: str) -> Location:
        row, member = self._rows.get(key), ""
        if row is None or "{name}" in row.key:
            family, _, member = key.rpartition("/")
            row = self._rows.get(family)
            if row is None or "{name}" not in row.key:
                raise UsageFailure(f"the layout has no location for {key!a}", key=ascii(key))
            safe_name(member, what="key")
        stripe = f"{zlib.crc32(member.lower().encode()) % _STRIPES:02d}"  # names that are one file share a lock
        lock = row.lock.replace("{name}", member).replace("{stripe}", stripe)
        directory, _, file = row.path.replace("{name}", member).rpartition("/")
        within = member if "{name}" in row.lock else stripe if "{stripe}" in row.lock else ""
        return Location(key, row.kind, directory, file, lock, (self._ranks[row.lock], within))

    def family(self, family: str) -> tuple[str, str, str]:
        """The directory of a family's members, and the prefix and suffix of their names there."""
        row = self._rows.get(family)
        if row is None or "{name}" not in row.key:
            raise UsageFailure(f"{family!a} is not a family of the layout", key=ascii(family))
        before, after = row.path.split("{name}")
        directory, _, start = before.rpartition("/")
        return directory, start, after

    def existing_locks(self, root: Directory) -> Iterator[str]:
        """The document locks that have been taken at least once."""
        for template in self._ranks:
            directory, _, name = template.rpartition("/")
            start, end = name.partition("{")[0], name.rpartition("}")[2]
            with contextlib.suppress(NotFound), open_directory(root, directory) as opened:
                found = [each for each in opened.names() if each.startswith(start) and each.endswith(end)]
                yield from (f"{directory}/{each}" for each in sorted(found) if "{" in name or each == name)


_wait_ends_at: ContextVar[float | None] = ContextVar("wait_ends_at", default=None)


@contextlib.contextmanager
def document_locks_until(instant: float | None) -> Iterator[None]:
    """Within the block, wait for document locks only until `instant` (of `time.monotonic`), or until that of an outer
    block, if it comes first; None lifts every limit. For operations with a time limit that run transactions."""
    outer = _wait_ends_at.get()
    token = _wait_ends_at.set(instant if instant is None or outer is None else min(instant, outer))
    try:
        yield
    finally:
        _wait_ends_at.reset(token)


_LEDGER_LOCK = "/ledger.lock"


class DocumentLocks:
    """The document locks of one store: file locks, except for the ledger lock, which has its own protocol."""

    def __init__(self, root: Directory, timeout: float | None, agent_id: str) -> None:
        self._root = root
        self._timeout = timeout
        self._agent_id = agent_id
        self._locker = FileLocker(timeout, follow_links=False)
        self._ledger_locks: dict[str, LedgerLock] = {}

    def locked(self, locations: Collection[Location], *, shared: bool = False) -> AbstractContextManager[object]:
        """Hold the locks of all locations, or none: raises `LockTimeout` if one cannot be acquired in time."""
        if len(locations) == 1:
            return self._lock(next(iter(locations)).lock, shared=shared)
        return self._lock_all(locations, shared=shared)

    @contextlib.contextmanager
    def _lock_all(self, locations: Collection[Location], *, shared: bool) -> Iterator[None]:
        with contextlib.ExitStack() as held:
            for _, lock in sorted({(each.rank, each.lock) for each in locations}):
                held.enter_context(self._lock(lock, shared=shared))
            yield

    def statistics(self) -> LockStatistics:
        return self._locker.statistics()

    def wait_for_holders(self, locks: Iterable[str]) -> None:
        """Take and release each of these locks: every transaction that held one of them has then ended."""
        for lock in locks:
            with self._lock(lock, shared=False):
                pass

    def held_ledger_lock(self, location: Location) -> HeldLedgerLock | None:
        """The ledger lock of a location, which the caller holds; None if there is none."""
        lock = self._ledger_locks.get(location.directory)
        return None if lock is None else lock.held

    def release_interrupted(self) -> None:
        """Release the ledger locks whose acquisition or release a signal interrupted in this thread."""
        for lock in self._ledger_locks.values():
            lock.release_interrupted()

    def without_waiting(self) -> DocumentLocks:
        """The same locks, but acquiring a held one raises `LockTimeout` at once."""
        return DocumentLocks(self._root, 0.0, self._agent_id)

    def close(self) -> None:
        """Close the lock files that are kept open for speed."""
        self._locker.close()
        for lock in self._ledger_locks.values():
            lock.close()

    def _lock(self, lock: str, *, shared: bool) -> AbstractContextManager[object]:
        try:
            return self._take(lock, shared=shared)
        except NotFound:  # first use: the directory does not exist yet
            self._root.beneath(lock.rpartition("/")[0], create=True).close()
            return self._take(lock, shared=shared)

    def _take(self, lock: str, *, shared: bool) -> AbstractContextManager[object]:
        limit = self._limit()
        if lock.endswith(_LEDGER_LOCK):
            return self._ledger_lock(lock.removesuffix(_LEDGER_LOCK)).acquire(limit)
        wait = None if limit is None else LockWait(limit)
        return self._locker.acquire(self._root.where(lock), shared=shared, wait=wait)

    def _limit(self) -> float | None:
        """The time limit of `document_locks_until`, if it is shorter than the usual timeout; otherwise None."""
        if (ends_at := _wait_ends_at.get()) is None:
            return None
        left = max(0.0, ends_at - time.monotonic())
        return left if self._timeout is None or left < self._timeout else None

    def _ledger_lock(self, directory: str) -> LedgerLock:
        lock = self._ledger_locks.get(directory)
        if lock is None:
            from holdfast.locks.ledger_lock import DEFAULT_TIMEOUT, LedgerLock  # only stores with a ledger need it

            timeout = DEFAULT_TIMEOUT if self._timeout is None else self._timeout
            lock = LedgerLock(self._root.path / directory, self._agent_id, timeout=timeout)
            self._ledger_locks[directory] = lock
        return lock


MOST_IDLE = 32  # how many unused directories stay open; beyond that, the oldest is closed


def open_directory(root: Directory, relative: str, *, create: bool = False) -> Directory:
    """A directory of the store; "" is the root itself."""
    return root.beneath(relative, create=create) if relative else Directory.open(root.path)


class _KeptDirectory(Directory):
    """An open directory with its device and inode, which show whether its path still leads to it."""

    __slots__ = ("identity",)

    def __init__(self, directory: Directory) -> None:
        super().__init__(directory.shown, directory.hand_over())
        try:
            self.identity = None if self.fd is None else _identity(calls.fstat(self.fd))
        except OSError as error:
            self.close()
            raise io_failure("examine", self.shown, error) from error


def _identity(status: os.stat_result) -> tuple[int, int]:
    return status.st_dev, status.st_ino


class Directories:
    """The directories below one root, kept open between uses."""

    def __init__(self, root: Directory) -> None:
        self._root = root
        self._idle: dict[str, _KeptDirectory] = {}

    def take(self, relative: str, *, create: bool = False) -> _KeptDirectory:
        """The current directory at `relative`, for the caller alone; `NotFound` if it is missing, unless `create`."""
        kept = self._idle.pop(relative, None)
        if kept is not None:
            if self._is_current(relative, kept):
                return kept
            kept.close()
        return _KeptDirectory(open_directory(self._root, relative, create=create))

    def give_back(self, relative: str, directory: _KeptDirectory) -> None:
        if self._idle.setdefault(relative, directory) is not directory:
            directory.close()
        elif len(self._idle) > MOST_IDLE:
            with contextlib.suppress(KeyError, StopIteration, RuntimeError):  # another thread was faster
                self._idle.pop(next(iter(self._idle))).close()

    def close(self) -> None:
        """Close all directories that are not in use."""
        while self._idle:
            with contextlib.suppress(KeyError):
                self._idle.popitem()[1].close()

    def _is_current(self, relative: str, kept: _KeptDirectory) -> bool:
        if kept.identity is None:
            return False
        try:
            status = calls.stat(relative or self._root.shown, dir_fd=self._root.fd, follow_symlinks=False)
        except OSError:
            return False
        return _identity(status) == kept.identity


class OpenDirectories:
    """The directories that one transaction uses: each taken once, all given back at the end."""

    def __init__(self, directories: Directories) -> None:
        self._directories = directories
        self._taken: dict[str, _KeptDirectory] = {}

    def get(self, relative: str, *, create: bool = False) -> Directory:
        """A directory of the store; `NotFound` if it is missing, unless `create`."""
        found = self._taken.get(relative)
        if found is None:
            found = self._taken[relative] = self._directories.take(relative, create=create)
        return found

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *problem: object) -> None:
        for relative, directory in self._taken.items():
            self._directories.give_back(relative, directory)


def read_checkpoint(root: Path, file: str, *, limit: int = durable.LARGEST) -> bytes | None:
    """The content of a checkpoint file; None if it cannot be read.

    A checkpoint is a projection as of some point, so that opening it only has to apply later changes. It is a cache:
    written without a sync, and safe to delete. The caller must check it: it may be torn or belong to another store.
    """
    try:
        with Directory.open(root / CHECKPOINTS) as directory:
            return durable.read_in(directory, file, limit=limit)
    except Failure:
        return None


def write_checkpoint(root: Path, file: str, content: bytes) -> None:
    """Replace a checkpoint file; failures are ignored."""
    with contextlib.suppress(Failure, OSError):
        make_directories(root / CHECKPOINTS)
        with Directory.open(root / CHECKPOINTS) as directory:
            durable.publish(directory, durable.write_draft(directory, file, content, durable=False), file)
