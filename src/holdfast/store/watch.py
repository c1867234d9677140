"""Watching files for changes: by inotify, or by polling where inotify is not available."""

from __future__ import annotations

import contextlib
import math
import os
import select
import struct
import sys
import time
from pathlib import Path
from typing import Literal, NamedTuple, Self

from holdfast.errors import Failure, NotFound
from holdfast.fs import calls
from holdfast.fs.directory import Directory, close_quietly
from holdfast.fs.names import is_safe_name
from holdfast.store.intents import Intents
from holdfast.store.layout import INTENTS, Kind, Layout, open_directory
from holdfast.store.model import Family, Watch, Watched

POLL_INTERVAL = 0.05
_EVENT = struct.Struct("iIII")
_MASK = 0x00000FCA  # modified, closed after writing, moved, created, deleted; itself deleted or moved
_LOST = 0x00004000 | 0x00008000 | 0x00000800 | 0x00000400  # overflow, watch removed, itself moved or deleted
_LONGEST = (1 << 31) - 1  # milliseconds that the system call can wait
_REPORTED = "by an event"  # the fingerprint of a file that an event reported; differs from every real one


class DirectoryEvents:
    """Events about the names in some directories."""

    def __init__(self, fd: int) -> None:
        self._fd = fd
        self._directories: dict[int, Path] = {}

    @classmethod
    def open(cls) -> Self | None:
        """An instance that listens to no directory yet; None if inotify is not available."""
        if sys.platform != "linux":
            return None
        from holdfast.fs import native

        fd = native.inotify_open()
        return None if fd < 0 else cls(fd)

    def add(self, directory: Directory) -> bool:
        """Listen to one more directory, which need not stay open; False if that is impossible."""
        if sys.platform != "linux":
            return False
        from holdfast.fs import native

        number = native.inotify_watch(self._fd, b"/proc/self/fd/%d" % (directory.fd or 0), _MASK)
        if number >= 0:
            self._directories[number] = directory.path
        return number >= 0

    def wait(self, timeout: float | None) -> set[tuple[Path, str]] | None:
        """Directory and name of each change since the last call; empty after the timeout. None means that events were
        lost or a directory is gone: compare everything, and listen again."""
        if sys.platform == "win32":
            return set()  # never opened there
        waiting = select.poll()  # `select` is limited to the first 1024 descriptors
        waiting.register(self._fd, select.POLLIN)
        readable = waiting.poll(None if timeout is None else min(math.ceil(timeout * 1000), _LONGEST))
        return self._read() if readable else set()

    def close(self) -> None:
        fd, self._fd = self._fd, -1
        if fd >= 0:
            close_quietly(fd)

    def _read(self) -> set[tuple[Path, str]] | None:
        try:
            content = calls.read(self._fd, 1 << 16)
        except OSError:
            return None
        found: set[tuple[Path, str]] = set()
        offset = 0
        while offset < len(content):
            number, mask, _, length = _EVENT.unpack_from(content, offset)
            offset += _EVENT.size
            name = os.fsdecode(content[offset : offset + length].rstrip(b"\0"))
            offset += length
            if mask & _LOST:
                return None
            found.add((self._directories[number], name))
        return found


class _Subject(NamedTuple):
    """The watched files: one file, the numbered files of a stream, or the members of a family; with the prefix
    and suffix of their names."""

    name: str
    shape: Literal["file", "numbered", "family"]
    directory: str
    start: str
    end: str

    @classmethod
    def of(cls, layout: Layout, what: Watched) -> _Subject:
        if isinstance(what, Family):
            return cls(what.name, "family", *layout.family(what.name))
        location = layout.locate(what.name)
        if location.kind is Kind.NUMBERED:
            start, end = location.file.split("{number}")
            return cls(what.name, "numbered", location.directory, start, end)
        return cls(what.name, "file", location.directory, location.file, "")

    @property
    def is_nested(self) -> bool:
        """Whether each member is a directory with a file in it."""
        return self.end.startswith("/")

    def has(self, name: str) -> bool:
        return name.startswith(self.name + "/") if self.shape == "family" else name == self.name

    def name_of(self, file: str) -> str | None:
        """The document or stream that a file of the directory belongs to."""
        if self.shape == "file":
            return self.name if file == self.start else None
        end = "" if self.is_nested else self.end
        if not (file.startswith(self.start) and file.endswith(end)) or file.endswith(".tmp"):
            return None
        if self.shape == "numbered":
            return self.name
        member = file[len(self.start) : len(file) - len(end)]
        return f"{self.name}/{member}" if is_safe_name(member) else None

    def fingerprint(self, directory: Directory, file: str) -> object:
        """A value that differs between states of a file, determined without reading it."""
        path = directory.at(file + self.end if self.is_nested else file)
        try:
            status = calls.stat(path, dir_fd=directory.fd, follow_symlinks=False)
        except OSError:
            return None
        return status.st_ino, status.st_size, status.st_mtime_ns, status.st_ctime_ns


class FileWatch(Watch):
    """A watch of one document, family or stream of a file store.

    An event names the changed file. A commit of several changes takes effect with its intent, so the directory
    of intents is watched too. Without events, or after losing some, the watch compares fingerprints.

    A watch changes nothing on disk. Until a directory exists, it watches the nearest existing parent.
    """

    def __init__(self, root: Directory, layout: Layout, intents: Intents, what: Watched) -> None:
        self._root = root
        self._intents = intents
        self._subject = _Subject.of(layout, what)
        self._awaited: dict[tuple[Path, str], str] = {}  # the missing directories, by the event that can create them
        self._events = self._listen()
        # With events, a numbered stream, which may be long, is not listed; if events are lost, it counts as changed.
        skip = self._events is not None and self._subject.shape == "numbered"
        self._fingerprints: dict[str, object] = {} if skip else self._current()

    def close(self) -> None:
        if self._events is not None:
            self._events.close()
            self._events = None

    def _next(self, left: float | None) -> set[str]:
        if self._events is None:
            time.sleep(POLL_INTERVAL if left is None else min(POLL_INTERVAL, left))
            return self._compare()
        events = self._events.wait(left)
        if events is None:  # some were lost, or a directory was replaced
            self.close()
            self._events = self._listen()
            return self._compare() | set(self._fingerprints)
        appeared = {self._awaited[each] for each in events if each in self._awaited}
        if appeared and not self._reach(self._events):
            self.close()
        names = {name for directory, file in events for name in self._names(directory, file)}
        self._fingerprints.update(dict.fromkeys(names, _REPORTED))
        if self._subject.directory in appeared:
            names |= self._compare()
        elif appeared:
            names |= {name for name, _ in self._pending()}
        return names

    def _names(self, directory: Path, file: str) -> set[str]:
        if directory == self._root.path / INTENTS:
            return {name for name, _ in self._pending()}
        name = self._subject.name_of(file) if directory == self._root.path / self._subject.directory else None
        return set() if name is None else {name}

    def _pending(self) -> list[tuple[str, str]]:
        """Names and intents of watched changes that are committed but not applied yet."""
        return [
            (step.name, intent.id)
            for intent in self._intents.pending()
            for step in intent.steps
            if self._subject.has(step.name)
        ]

    def _compare(self) -> set[str]:
        before, self._fingerprints = self._fingerprints, self._current()
        names = before.keys() | self._fingerprints.keys()
        return {name for name in names if before.get(name) != self._fingerprints.get(name)}

    def _current(self) -> dict[str, object]:
        """The fingerprint of everything watched, including commits that are not applied yet."""
        found: dict[str, object] = {}
        with contextlib.suppress(NotFound), open_directory(self._root, self._subject.directory) as directory:
            for file in directory.names():
                name = self._subject.name_of(file)
                if name is not None and self._subject.shape == "numbered":
                    found[name] = max(str(found.get(name, "")), file, key=lambda each: (len(each), each))
                elif name is not None:
                    found[name] = self._subject.fingerprint(directory, file)
        for name, intent_id in self._pending():
            found[name] = (found.get(name), intent_id)
        return found

    def _listen(self) -> DirectoryEvents | None:
        if self._subject.is_nested:
            return None  # each member is a separate directory, which events do not cover
        events = DirectoryEvents.open()
        if events is not None and not self._reach(events):
            events.close()
            return None
        return events

    def _reach(self, events: DirectoryEvents) -> bool:
        """Listen to both directories, or above those that are missing; False if that is impossible."""
        self._awaited = {}
        try:
            return all(self._approach(events, each, each) for each in (self._subject.directory, INTENTS))
        except Failure:
            return False  # a directory cannot be opened: poll

    def _approach(self, events: DirectoryEvents, relative: str, target: str) -> bool:
        with contextlib.suppress(NotFound), open_directory(self._root, relative) as directory:
            return events.add(directory)
        if not relative:
            return False  # the whole store is gone
        above, _, name = relative.rpartition("/")
        self._awaited[self._root.path / above, name] = target
        if not self._approach(events, above, target):
            return False
        with contextlib.suppress(NotFound), open_directory(self._root, relative) as directory:
            return events.add(directory)  # it appeared before anything listened above it
        return True
