"""A lock that *is* a file: who creates it holds it, and only a proven one is ever removed.

The kernel does not free such a lock when its holder dies, so somebody must judge it and remove it.
There the classic race lives: two judge the same old lock, the first removes it and takes a new one,
the second removes that. Two rules end it:

1. Creating needs no permission: the file appears complete, by a link that never replaces.
2. Removing is done under a guard (a file lock beside it that is never deleted), and only after
   looking again whether the file is still the one that was judged.

Who fails to take the lock, at whatever step, leaves none behind.

Programs that follow the plain create-and-delete protocol take part in rule 1; they do not know the
guard, so what *they* remove wrongly cannot be prevented here.
"""

from __future__ import annotations

import contextlib
import errno
import functools
import hashlib
import os
import stat
import threading
import weakref
from collections.abc import Callable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

from holdfast.errors import AlreadyExists, Failure, JsonInvalid, NotFound, NotWritable, Refused, TooLarge
from holdfast.fs import calls, durable, strictjson
from holdfast.fs.directory import Directory, close_quietly, io_failure, write_all
from holdfast.locks.file_lock import FileLocker, LockGuard

_FLAGS = os.O_WRONLY | getattr(os, "O_NOFOLLOW", 0) | getattr(os, "O_CLOEXEC", 0) | getattr(os, "O_BINARY", 0)
KEPT_FROM = 2
"""From which use on a file is kept: who takes the lock only once needs none."""
_NO_LINKS = (errno.EPERM, errno.EOPNOTSUPP, errno.ENOSYS)


class _File:
    """The private file, open, in its directory, which is open too."""

    def __init__(self, directory: Directory, name: str, fd: int, identity: tuple[int, int]) -> None:
        self.directory = directory
        self.name = name
        self.fd = fd
        self.identity = identity
        self.place = _identity(calls.fstat(directory.fd or 0))
        self.size = 0
        self.pid = os.getpid()

    def write(self, content: bytes) -> None:
        """Make it hold this and nothing else."""
        calls.lseek(self.fd, 0, os.SEEK_SET)
        write_all(self.fd, content)
        if self.size > len(content):
            calls.ftruncate(self.fd, len(content))
        self.size = len(content)

    def remove(self) -> None:
        """Close it, and remove it where it is ours: a forked child does not clear up behind its parent."""
        if self.pid == os.getpid():
            with contextlib.suppress(OSError):
                calls.unlink(self.name, dir_fd=self.directory.fd)
        self.directory.close()
        close_quietly(self.fd)


class KeptDraft:
    """The private file of one lock in one process. Who takes the lock only once makes none."""

    def __init__(self, path: str, name: str, open_directory: Callable[[], Directory]) -> None:
        """The lock is `name` in the directory at `path`, which `open_directory` opens."""
        self._path = path
        self._name = name
        self._open_directory = open_directory
        self._lock = threading.Lock()
        self._uses = 0
        self._file: _File | None = None
        self._lock_id = ""
        self._was_taken = False
        self._finalizer: weakref.finalize[..., KeptDraft] | None = None

    def is_worth_it(self) -> bool:
        """Count one more use of the lock, and say whether it is used often."""
        self._uses += 1
        return self._uses >= KEPT_FROM

    def publish(self, content: bytes, lock_id: str) -> bool | None:
        """Make a lock with this content if there is none; None if it has to be done another way.

        Commit point: the link. `lock_id` is what `remove` will be asked for.
        """
        if not self._lock.acquire(blocking=False):
            return None
        try:
            return self._publish(content, lock_id)
        except FileNotFoundError:
            self._forget()  # somebody cleared it away, or all of the directory
            return None
        except OSError as error:
            self._forget()
            if error.errno in _NO_LINKS:
                self._uses = -(1 << 62)  # here there is no other way than the other way
                return None
            raise io_failure("create", f"{self._path}/{self._name}", error) from error
        finally:
            self._lock.release()

    def is_for(self, lock_id: str) -> bool:
        """Whether this very lock was made of the file, as far as that can be told without looking."""
        return self._lock_id == lock_id and self._file is not None and self._file.pid == os.getpid()

    def remove(self, lock_id: str) -> bool | None:
        """Remove the lock if it is this very file, published as this very lock; None: look closer."""
        if not self.is_for(lock_id):
            return None
        with self._lock:  # another thread may be about to close the directory
            file = self._file
            if file is None or not self.is_for(lock_id):
                return None
            status = file.directory.status(self._name)
            if status is None or _identity(status) != file.identity:
                return None
            return durable.remove_in(file.directory, self._name, durable=False)

    def discard(self) -> None:
        """Remove the private file; a lock that it is linked to stays."""
        file = self._file
        if file is not None and file.pid == os.getpid():  # in a forked child, the lock may be held for ever
            with self._lock:
                self._forget()

    def _publish(self, content: bytes, lock_id: str) -> bool | None:
        file = self._file
        if file is None or not self._is_private(file):
            file = self._make()
            if file is None:
                return None
        fd = file.directory.fd
        if self._was_taken and file.directory.status(self._name) is not None:
            return False  # spares the writing while somebody waits; what decides is the link
        file.write(content)
        self._lock_id = lock_id
        self._was_taken = True
        try:
            calls.link(file.name, self._name, src_dir_fd=fd, dst_dir_fd=fd, follow_symlinks=False)
        except FileExistsError:
            return False
        self._was_taken = False
        return True

    def _is_private(self, file: _File) -> bool:
        """Whether the file is ours, where the path leads to, and not a lock that is held."""
        if file.pid != os.getpid():
            return False
        status = file.directory.status(file.name)  # by name: the one that is left may be the lock's
        return (
            status is not None
            and status.st_nlink == 1
            and _identity(status) == file.identity
            and _identity(calls.stat(self._path)) == file.place
        )

    def _make(self) -> _File | None:
        self._forget()
        directory = self._open_directory()
        if directory.fd is None:
            return None
        draft = f".{self._name}-{os.urandom(6).hex()}.tmp"
        try:
            fd = calls.open(draft, _FLAGS | os.O_CREAT | os.O_EXCL, 0o600, dir_fd=directory.fd)
        except BaseException:
            directory.close()
            raise
        try:
            made = _File(directory, draft, fd, _identity(calls.fstat(fd)))
        except BaseException:
            with contextlib.suppress(OSError):
                calls.unlink(draft, dir_fd=directory.fd)
            directory.close()
            close_quietly(fd)
            raise
        self._finalizer = weakref.finalize(self, made.remove)
        self._file = made
        return made

    def _forget(self) -> None:
        if self._finalizer is not None:
            self._finalizer()
        self._file, self._finalizer = None, None


def _identity(status: os.stat_result) -> tuple[int, int]:
    return status.st_dev, status.st_ino


GUARD_TIMEOUT = 5.0
MOST_BYTES = 64 << 10


class Sighting(NamedTuple):
    """A lock file as it was seen at one moment. `record` is None if it could not be read."""

    identity: str
    record: Mapping[str, object] | None
    modified_at: float
    is_directory: bool


class Coded(NamedTuple):
    """A record as it is stored, by one who makes many that are nearly the same."""

    lock_id: str
    content: bytes


class LockFile:
    """The lock file `name` in a directory, and its guard `<name>.guard` beside it (dot in front)."""

    def __init__(self, root: Path, relative: str, name: str, *, often: bool = False) -> None:
        """The directory is `relative` (plain parts, or empty) below `root`; no link leads out of that.

        `often` says that this lock is taken again and again: see `kept_draft`.
        """
        self.path = root / relative / name
        self._directory = functools.partial(_open_directory, root, relative)
        self._draft = KeptDraft(str(self.path.parent), name, self._directory) if often else None
        self._name = name
        self._guard_name = f".{name.lstrip('.')}.guard"
        self._guard_path = str(self.path.parent / self._guard_name)
        self._guards = FileLocker(GUARD_TIMEOUT)
        self._has_guard = False

    def create(self, record: Mapping[str, object] | Coded, *, synced: bool) -> bool:
        """Take the lock if nobody has it. Commit point: the link of the finished record."""
        coded = record if isinstance(record, Coded) else _coded(record)
        try:
            made = self._create_often(coded) if self._draft is not None and not synced else None
            if made is None:
                with self._directory() as directory:
                    made = self._create(directory, coded, synced=synced)
            return made
        except BaseException:
            self._withdraw(coded)
            raise

    def look(self) -> Sighting | None:
        """What is there now, or None if nothing is."""
        with self._directory() as directory:
            return self._look(directory)

    def take_over(self, seen: Sighting, record: Mapping[str, object] | Coded, *, synced: bool) -> bool:
        """Put our lock in the place of the one that was `seen`; False if somebody was faster.

        Never waits: who has the guard is deciding about this very lock, or is stopped while doing so.
        """
        coded = record if isinstance(record, Coded) else _coded(record)
        guard = self._guards.try_lock_exclusive(self._guard_path)
        if guard is None:
            return False
        try:
            with guard, self._directory() as directory:
                if not self._remove_if(directory, seen.identity):
                    return False
                return self._create(directory, coded, synced=synced)
        except BaseException:
            self._withdraw(coded)
            raise

    def remove(self, identity: str) -> bool:
        """Remove the lock if it is still the one with this identity."""
        with suppress(NotFound), self._guard(), self._directory() as directory:
            return self._remove_if(directory, identity)
        return False

    def remove_own(self, field: str, value: str) -> bool:
        """Remove the lock if its record says that it is ours; False if it is gone or another's."""
        if self._draft is not None and self._draft.is_for(value):
            with self._guards.lock_exclusive(self._guard_path):
                removed = self._draft.remove(value)
                if removed is not None:
                    return removed
        with (
            suppress(NotFound),
            self._directory() as directory,
            self._guards.lock_exclusive(self._guard_path),
        ):
            if self._says(directory, field, value):
                return durable.remove_in(directory, self._name, durable=False)
        return False

    def replace_own(self, field: str, value: str, record: Mapping[str, object]) -> bool:
        """Write a new record if the lock is still ours."""
        with suppress(NotFound), self._guard(), self._directory() as directory:
            if self._says(directory, field, value):
                durable.replace_in(directory, self._name, content_of(record), mode=0o600)
                return True
        return False

    def close(self) -> None:
        """Leave nothing behind that was kept for speed."""
        if self._draft is not None:
            self._draft.discard()

    def _guard(self) -> LockGuard:
        """Wait for the guard; NotFound if the directory is gone, and the lock with it."""
        self._directory().close()  # refuses a link on the way before the guard is made behind it
        return self._guards.lock_exclusive(self._guard_path)

    def _make_guard(self, directory: Directory) -> None:
        """Have what it takes to give the lock back before it is taken: the disk may be full by then."""
        if self._has_guard:
            return
        if directory.status(self._guard_name) is None:
            guard = self._guards.try_lock_exclusive(self._guard_path)
            if guard is not None:
                guard.release()
        self._has_guard = True

    def _withdraw(self, record: Coded) -> None:
        """What fails after the commit point has made a lock of which its holder will never hear."""
        with suppress(Failure, OSError):
            self.remove_own("lock_id", record.lock_id)

    def _create_often(self, record: Coded) -> bool | None:
        """`create` with the file that is kept for it; None if that is not to be done, or cannot be."""
        if self._draft is None or not self._draft.is_worth_it():
            return None
        if not self._has_guard:
            with self._directory() as directory:
                self._make_guard(directory)
        return self._draft.publish(record.content, record.lock_id)

    def _create(self, directory: Directory, record: Coded, *, synced: bool) -> bool:
        if directory.status(self._name) is not None:
            return False  # spares the draft; what decides is the link
        self._make_guard(directory)
        try:
            durable.create_in(directory, self._name, record.content, mode=0o600, durable=synced)
        except AlreadyExists:
            return False
        return True

    def _look(self, directory: Directory) -> Sighting | None:
        status = directory.status(self._name)
        if status is None:
            return None
        if stat.S_ISDIR(status.st_mode):
            return Sighting(_lock_file_identity(status, b""), None, status.st_mtime, True)
        try:
            content = durable.read_in(directory, self._name, limit=MOST_BYTES)
        except NotFound:
            return None
        except Failure:
            content = b""
        return Sighting(_lock_file_identity(status, content), _record(content), status.st_mtime, False)

    def _says(self, directory: Directory, field: str, value: str) -> bool:
        """Whether the record says so. If it can just now not be read, that is no answer, and raised."""
        try:
            record = _record(durable.read_in(directory, self._name, limit=MOST_BYTES))
        except (NotFound, NotWritable, Refused, TooLarge):
            return False  # gone, another user's, or nothing that we would ever have written
        return record is not None and record.get(field) == value

    def _remove_if(self, directory: Directory, identity: str) -> bool:
        seen = self._look(directory)
        if seen is None or seen.identity != identity:
            return False
        if not seen.is_directory:
            return durable.remove_in(directory, self._name, durable=False)
        try:
            calls.rmdir(directory.at(self._name), dir_fd=directory.fd)
        except FileNotFoundError:
            return False
        except OSError as error:
            raise io_failure("remove", self.path, error) from error
        return True


def _open_directory(root: Path, relative: str) -> Directory:
    if not relative:
        return Directory.open(root)
    with Directory.open(root) as directory:
        return directory.beneath(relative)


def _lock_file_identity(status: os.stat_result, content: bytes) -> str:
    """A short name for exactly this lock: another file, another time or another content, another name."""
    seen = f"{status.st_dev}:{status.st_ino}:{status.st_mtime_ns}:".encode() + content
    return hashlib.blake2s(seen, digest_size=8).hexdigest()


def _coded(record: Mapping[str, object]) -> Coded:
    return Coded(str(record["lock_id"]), content_of(record))


def content_of(record: Mapping[str, object]) -> bytes:
    """A record as it is stored: never larger than what is read again."""
    text = strictjson.encode(record, what="the record of a lock", limit=MOST_BYTES - 1, string_keys=True)
    return text + b"\n"


def _record(content: bytes) -> Mapping[str, object] | None:
    try:
        value = strictjson.decode(content, limit=MOST_BYTES)
    except JsonInvalid:
        return None
    return value if isinstance(value, dict) else None
