"""A lock that *is* a file: the process that creates it holds the lock, and it is removed only after a second check.

The kernel does not release such a lock when its holder dies, so another process must judge and remove it.
This has a classic race: two processes judge the same stale lock, the first removes it and takes a new one, and the
second removes that one. Two rules prevent it:

1. Any process may create the file: it appears complete, by a link that never replaces.
2. A process removes the file only under a second lock, a file lock on a sidecar that is never deleted, and only after
   checking that the file is still the one that it judged.

A failed attempt to take the lock leaves no lock behind, whichever step failed.

Programs that follow the simple create-and-delete protocol obey rule 1. They do not know the
sidecar, so we cannot prevent them from removing the wrong lock.
"""

from __future__ import annotations

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
from holdfast.locks.file_lock import FileLocker

DOCUMENT_LOCK_TIMEOUT = 5.0
MOST_BYTES = 64 << 10
KEPT_FROM = 2  # uses of the lock before its draft is kept: a single use needs none
_FLAGS = os.O_WRONLY | getattr(os, "O_NOFOLLOW", 0) | getattr(os, "O_CLOEXEC", 0) | getattr(os, "O_BINARY", 0)
_NO_LINKS = (errno.EPERM, errno.EOPNOTSUPP, errno.ENOSYS)


class FoundLock(NamedTuple):
    """A lock file as read at one time. `record` is None if its content is not readable."""

    identity: str
    record: Mapping[str, object] | None
    modified_at: float
    is_directory: bool


class EncodedRecord(NamedTuple):
    lock_id: str
    content: bytes


Record = Mapping[str, object] | EncodedRecord


class LockFile:
    """The lock file `name` in a directory, with a lock on the sidecar `.<name>.guard`."""

    def __init__(self, root: Path, relative: str, name: str, *, often: bool = False) -> None:
        """The directory is `root`, or `relative` below it; links in `relative` are refused. A lock that is taken
        `often` keeps its draft: see `KeptDraft`."""
        self.path = root / relative / name
        self.directory = functools.partial(_open_directory, root, relative)
        self._draft = KeptDraft(str(self.path.parent), name, self.directory) if often else None
        self._name = name
        self._sidecar = f".{name.lstrip('.')}.guard"
        self._sidecar_path = str(self.path.parent / self._sidecar)
        self._locker = FileLocker(DOCUMENT_LOCK_TIMEOUT, follow_links=False)
        self._has_sidecar = False

    def create(self, record: Record, *, synced: bool) -> bool:
        """Take the lock if it is free; return whether it was. Commit point: the link to the complete record."""
        encoded = _encoded(record)
        try:
            made = self._create_often(encoded) if self._draft is not None and not synced else None
            if made is None:
                with self.directory() as directory:
                    made = self._create(directory, encoded, synced=synced)
            return made
        except BaseException:
            self._withdraw(encoded)
            raise

    def read(self) -> FoundLock | None:
        """The lock as it is now, or None if it is free."""
        with self.directory() as directory:
            return self._read(directory)

    def take_over(self, found: FoundLock, record: Record, *, synced: bool) -> bool:
        """Replace the lock that was `found` with ours; return False if another process was faster. Never waits: the
        holder of the sidecar lock is deciding about this lock, or was stopped while doing so."""
        encoded = _encoded(record)
        guard = self._locker.try_lock_exclusive(self._sidecar_path)
        if guard is None:
            return False
        try:
            with guard, self.directory() as directory:
                if not self._remove_if(directory, found.identity):
                    return False
                return self._create(directory, encoded, synced=synced)
        except BaseException:
            self._withdraw(encoded)
            raise

    def remove(self, identity: str) -> bool:
        """Remove the lock if it still has this identity; return whether it did."""
        with suppress(NotFound), self._locker.lock_exclusive(self._sidecar_path), self.directory() as directory:
            return self._remove_if(directory, identity)
        return False

    def remove_own(self, field: str, value: str) -> bool:
        """Remove the lock if its record says that it is ours; return False if the lock is gone or not ours."""
        if self._draft is not None and self._draft.is_for(value):
            with self._locker.lock_exclusive(self._sidecar_path):
                removed = self._draft.remove(value)
                if removed is not None:
                    return removed
        with suppress(NotFound), self._locker.lock_exclusive(self._sidecar_path), self.directory() as directory:
            if self._says(directory, field, value):
                return durable.remove_in(directory, self._name, durable=False)
        return False

    def replace_own(self, field: str, value: str, record: Mapping[str, object]) -> bool:
        with suppress(NotFound), self._locker.lock_exclusive(self._sidecar_path), self.directory() as directory:
            if self._says(directory, field, value):
                durable.replace_in(directory, self._name, content_of(record), mode=_mode_in(directory))
                return True
        return False

    @property
    def kept_directory(self) -> Directory | None:
        """The directory of the kept draft, if there is one."""
        return None if self._draft is None else self._draft.directory

    def close(self) -> None:
        """Remove the kept draft."""
        if self._draft is not None:
            self._draft.discard()

    def _make_sidecar(self, directory: Directory) -> None:
        """Create the sidecar before the lock is taken: releasing must work on a full disk."""
        if self._has_sidecar:
            return
        if directory.status(self._sidecar) is None:
            guard = self._locker.try_lock_exclusive(self._sidecar_path)
            if guard is not None:
                guard.release()
        self._has_sidecar = True

    def _withdraw(self, record: EncodedRecord) -> None:
        """Remove a lock that was created before a failure: the caller does not know that it holds it."""
        with suppress(Failure, OSError):
            self.remove_own("lock_id", record.lock_id)

    def _create_often(self, record: EncodedRecord) -> bool | None:
        """`create` from the kept draft; None if a draft is not worth keeping, or cannot be used."""
        if self._draft is None or not self._draft.is_worth_it():
            return None
        if not self._has_sidecar:
            with self.directory() as directory:
                self._make_sidecar(directory)
        return self._draft.publish(record.content, record.lock_id)

    def _create(self, directory: Directory, record: EncodedRecord, *, synced: bool) -> bool:
        if directory.status(self._name) is not None:
            return False  # saves writing a draft; the link decides
        self._make_sidecar(directory)
        try:
            durable.create_in(directory, self._name, record.content, mode=_mode_in(directory), durable=synced)
        except AlreadyExists:
            return False
        return True

    def _read(self, directory: Directory) -> FoundLock | None:
        status = directory.status(self._name)
        if status is None:
            return None
        if stat.S_ISDIR(status.st_mode):
            return FoundLock(_lock_file_identity(status, b""), None, status.st_mtime, True)
        try:
            content = durable.read_in(directory, self._name, limit=MOST_BYTES)
        except NotFound:
            return None
        except Failure:
            content = b""
        return FoundLock(_lock_file_identity(status, content), _record(content), status.st_mtime, False)

    def _says(self, directory: Directory, field: str, value: str) -> bool:
        """Whether the record has this value; raises if the record cannot be read at the moment."""
        try:
            record = _record(durable.read_in(directory, self._name, limit=MOST_BYTES))
        except (NotFound, NotWritable, Refused, TooLarge):
            return False  # gone, another user's, or not ours
        return record is not None and record.get(field) == value

    def _remove_if(self, directory: Directory, identity: str) -> bool:
        found = self._read(directory)
        if found is None or found.identity != identity:
            return False
        if not found.is_directory:
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
    """A short digest that identifies this lock: another file, time or content gives another digest."""
    text = f"{status.st_dev}:{status.st_ino}:{status.st_mtime_ns}:".encode() + content
    return hashlib.blake2s(text, digest_size=8).hexdigest()


def _encoded(record: Record) -> EncodedRecord:
    if isinstance(record, EncodedRecord):
        return record
    return EncodedRecord(str(record["lock_id"]), content_of(record))


def content_of(record: Mapping[str, object]) -> bytes:
    """The stored form of a record, refused if it would be too large to be read again."""
    return strictjson.encode(record, what="the record of a lock", limit=MOST_BYTES - 1, string_keys=True) + b"\n"


def _record(content: bytes) -> Mapping[str, object] | None:
    try:
        value = strictjson.decode(content, limit=MOST_BYTES)
    except JsonInvalid:
        return None
    return value if isinstance(value, dict) else None


class _File:
    def __init__(self, directory: Directory, name: str, fd: int, identity: tuple[int, int]) -> None:
        self.directory = directory
        self.name = name
        self.fd = fd
        self.identity = identity
        self.directory_identity = _identity(calls.fstat(directory.fd or 0))
        self.size = 0
        self.pid = os.getpid()

    def write(self, content: bytes) -> None:
        calls.lseek(self.fd, 0, os.SEEK_SET)
        write_all(self.fd, content)
        if self.size > len(content):
            calls.ftruncate(self.fd, len(content))
        self.size = len(content)

    def remove(self) -> None:
        """Close and remove the file; a forked child leaves its parent's file alone."""
        if self.pid == os.getpid():
            durable.discard(self.directory, self.name)
        self.directory.close()
        close_quietly(self.fd)


class KeptDraft:
    """A reusable draft of the lock `name` in the directory at `path`: one file per process, linked for each use."""

    def __init__(self, path: str, name: str, open_directory: Callable[[], Directory]) -> None:
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
        """Count a use of the lock; return whether it is used often."""
        self._uses += 1
        return self._uses >= KEPT_FROM

    def publish(self, content: bytes, lock_id: str) -> bool | None:
        """Create the lock with this content if it is free; None if the caller must create it without the draft. Commit
        point: the link. `remove` takes the same `lock_id`."""
        if not self._lock.acquire(blocking=False):
            return None
        try:
            return self._publish(content, lock_id)
        except FileNotFoundError:
            self._forget()  # the draft was deleted, or its directory
            return None
        except OSError as error:
            self._forget()
            if error.errno in _NO_LINKS:
                self._uses = -(1 << 62)  # never again: this filesystem has no links
                return None
            raise io_failure("create", f"{self._path}/{self._name}", error) from error
        finally:
            self._lock.release()

    @property
    def directory(self) -> Directory | None:
        """The open directory of the draft; None if this process keeps no draft."""
        file = self._file
        return None if file is None or file.pid != os.getpid() else file.directory

    def is_for(self, lock_id: str) -> bool:
        """Whether this process created this lock from the draft."""
        return self._lock_id == lock_id and self._file is not None and self._file.pid == os.getpid()

    def remove(self, lock_id: str) -> bool | None:
        """Remove the lock if it is this draft, published under this id; None if the record must decide."""
        if not self.is_for(lock_id):  # in a forked child, `_lock` may be held forever
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
        """Remove the draft; a lock that is linked to it stays."""
        file = self._file
        if file is not None and file.pid == os.getpid():
            with self._lock:
                self._forget()

    def _publish(self, content: bytes, lock_id: str) -> bool | None:
        file = self._file
        if file is None or not self._is_private(file):
            file = self._make()
            if file is None:
                return None
        if self._was_taken and file.directory.status(self._name) is not None:
            return False  # saves the write while others hold the lock; the link decides
        file.write(content)
        self._lock_id = lock_id
        self._was_taken = True
        fd = file.directory.fd
        try:
            calls.link(file.name, self._name, src_dir_fd=fd, dst_dir_fd=fd, follow_symlinks=False)
        except FileExistsError:
            return False
        self._was_taken = False
        return True

    def _is_private(self, file: _File) -> bool:
        """Whether the file is ours, at its path, and not linked to a held lock."""
        if file.pid != os.getpid():
            return False
        status = file.directory.status(file.name)  # by name: the one link that is left may be the lock's
        return (
            status is not None
            and status.st_nlink == 1
            and _identity(status) == file.identity
            and _identity(calls.stat(self._path, follow_symlinks=False)) == file.directory_identity
        )

    def _make(self) -> _File | None:
        self._forget()
        directory = self._open_directory()
        if directory.fd is None:
            return None
        draft = durable.draft_name(self._name, durable.new_mark())
        try:
            fd = directory.create(draft, _FLAGS, _mode_in(directory))
        except BaseException:
            directory.close()
            raise
        try:
            made = _File(directory, draft, fd, _identity(calls.fstat(fd)))
        except BaseException:
            durable.discard(directory, draft)
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


def _mode_in(directory: Directory) -> int:
    """0600, or 0640 in a shared directory: the group must be able to judge whether the holder is dead."""
    return 0o640 if directory.is_shared() else 0o600


def _identity(status: os.stat_result) -> tuple[int, int]:
    return status.st_dev, status.st_ino
