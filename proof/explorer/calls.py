"""Performs the calls of tasks in the real directory, and reduces results to the part common to all executions."""

from __future__ import annotations

import errno
import os
import stat
from collections import Counter
from typing import Any

from holdfast.fs import calls
from proof.explorer.files import Descriptors, Listing, Opened, Tree, is_descriptor
from proof.explorer.footprints import LOCK_NB, LOCK_SH, LOCK_UN, base_of, descriptors_of, paths_of
from proof.explorer.world import Unexplorable
from proof.interpose import Attempt

LOCKS = ("flock", "flock_interruptible")
_SYNCS = ("fsync", "sync_directory", "sync_filesystem")
_CHANGING_FILES = frozenset(calls.CHANGING) - {"open", "close", *_SYNCS, *LOCKS}


class Performer:
    """Makes calls, and records what is open, locked and created. `changes` counts changes to files."""

    def __init__(self, tree: Tree, descriptors: Descriptors) -> None:
        self.changes = 0
        self._tree = tree
        self._descriptors = descriptors
        self._created: Counter[int] = Counter()

    def concerns(self, attempt: Attempt) -> bool:
        """Whether a call is about the directory; a call with a closed descriptor fails here."""
        ours = descriptors_of(attempt)
        for number in ours:
            self._descriptors.require(number)
        return bool(ours) or any(self._tree.holds(each) for each in paths_of(attempt))

    def perform(self, task: int, attempt: Attempt) -> tuple[Any, object]:
        """Make the call; return its result, and the part of it that is the same in every execution."""
        name = attempt.name
        if name in _SYNCS:
            return None, None  # no task can see the difference
        if name in LOCKS:
            return self._lock(attempt)
        if name == "close":
            self._descriptors.close(attempt.arguments[0])
            return None, None
        if name in ("open", "open_without_links"):
            return self._open(task, attempt)
        if name == "scandir":
            listing = Listing.made_by(lambda: self._make(attempt))
            return listing, listing.names
        if name == "listdir":
            names = sorted(self._make(attempt))  # any order is allowed
            return names, tuple(names)
        result = self._make(attempt)
        self.changes += name in _CHANGING_FILES
        if name in ("mkdir", "symlink"):
            self._name_new(task, self._status(attempt, 0 if name == "mkdir" else 1))
        return result, self._seen(result) if isinstance(result, os.stat_result) else result

    def described(self, attempt: Attempt) -> str:
        """Describe a call for a message."""
        shown = [self._shown(attempt, index) for index in range(len(attempt.arguments))]
        return f"{attempt.name}({', '.join(filter(None, shown))})"

    # --- Performing calls ------------------------------------------------------------------------------

    def _make(self, attempt: Attempt) -> Any:
        """Make the call with the system's descriptors."""
        real, ours = self._descriptors.real, 2 if attempt.name == "clone" else 1
        arguments = (*map(real, attempt.arguments[:ours]), *attempt.arguments[ours:])
        return attempt.original(*arguments, **{key: real(each) for key, each in attempt.options.items()})

    def _open(self, task: int, attempt: Attempt) -> tuple[int, object]:
        creates = bool(attempt.flags & os.O_CREAT) and self._status(attempt, 0) is None
        real = self._make(attempt)
        self.changes += creates or bool(attempt.flags & os.O_TRUNC)
        status = os.fstat(real)
        if creates:
            self._name_new(task, status)
        path = self._path(attempt, 0)
        label = self._tree.label(status, path)
        return self._descriptors.add(Opened(task, real, label, path)), (label, creates)

    def _lock(self, attempt: Attempt) -> tuple[int | None, object]:
        number, operation = attempt.arguments
        if not operation & (LOCK_NB | LOCK_UN) and self._descriptors.is_locked(number):
            raise Unexplorable("a task waits for a lock on a descriptor that already has one")
        try:
            code = attempt.original(self._descriptors.real(number), operation | LOCK_NB)
        except BlockingIOError:
            code = errno.EWOULDBLOCK
        if code and not operation & LOCK_NB:
            raise Unexplorable("the holder of a lock is not a task")
        if code or operation & LOCK_UN:
            self._descriptors.unlock(number)  # a failed conversion loses the old lock too
        else:
            self._descriptors.lock(number, shared=bool(operation & LOCK_SH))
        if code and attempt.name == "flock":
            raise BlockingIOError(code, os.strerror(code))
        return code, code

    def _name_new(self, task: int, status: os.stat_result | None) -> None:
        if status is not None:
            self._created[task] += 1
            self._tree.name(status, (task, self._created[task]))

    def _status(self, attempt: Attempt, argument: int) -> os.stat_result | None:
        base = base_of(attempt, argument)
        directory = None if base is None else self._descriptors.real(base)
        try:
            return os.stat(attempt.arguments[argument], dir_fd=directory, follow_symlinks=False)
        except OSError:
            return None

    def _seen(self, status: os.stat_result) -> tuple[object, ...]:
        """The modelled part of a status: no times, and for a directory neither size nor links."""
        label = self._tree.label(status)
        if stat.S_ISDIR(status.st_mode):
            return (label, status.st_mode)
        return (label, status.st_mode, status.st_size, status.st_nlink)

    # --- Descriptions ----------------------------------------------------------------------------------

    def _shown(self, attempt: Attempt, argument: int) -> str:
        value = attempt.arguments[argument]
        if attempt.name in LOCKS and argument == 1:
            mode = "unlock" if value & LOCK_UN else "shared" if value & LOCK_SH else "exclusive"
            return f"{mode}, not waiting" if value & LOCK_NB else mode
        if attempt.name == "open" and argument == 1:
            return "create" if value & os.O_CREAT else ""
        if isinstance(value, bytes | bytearray | memoryview):
            return repr(bytes(value[:60]))
        if isinstance(value, str | os.PathLike) or is_descriptor(value):
            return self._path(attempt, argument) or "."
        return ""

    def _path(self, attempt: Attempt, argument: int) -> str:
        path = attempt.arguments[argument]
        if is_descriptor(path):
            return self._descriptors.paths[path]
        base = base_of(attempt, argument)
        if base is not None and not os.path.isabs(path):
            return os.path.join(self._descriptors.paths[base], os.fsdecode(path))
        return self._tree.relative(path) or ""
