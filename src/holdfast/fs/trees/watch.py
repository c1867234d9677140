"""Being told of every change in a source while it is captured, so that nothing has to be looked at twice.

What the system does not tell of: changes by other machines, writes through a mapping of a file into memory,
and writes through a name outside of the source. The last two leave their time in the status of the file;
see `capturing`, which looks twice where that matters.
"""

from __future__ import annotations

import os
import struct
import sys
from contextlib import suppress

from holdfast.fs import calls
from holdfast.fs.directory import Closing, close_quietly
from holdfast.fs.probe import filesystem_kind, is_network
from holdfast.fs.trees.way import joined

_EVENT = struct.Struct("iIII")
_OVERFLOW = 0x4000
_ENOUGH = 1 << 16
_CLOSED = -1


class SourceWatch(Closing):
    """Listens to directories from the moment when each is added."""

    def __init__(self, root: str) -> None:
        self._fd = _CLOSED
        self._paths: dict[int, str] = {}
        self._possible = sys.platform == "linux" and not is_network(filesystem_kind(root))

    def add(self, directory: int, path: str) -> bool:
        """Listen to an open directory from now on; False if that cannot be."""
        if sys.platform != "linux" or not self._possible:
            return False
        from holdfast.fs import native

        number = native.inotify_watch_directory(self.begin(), directory)
        if number < 0:  # too many
            self._possible = False
            return False
        self._paths[number] = path
        return True

    def begin(self) -> int:
        """The descriptor to listen with, also for another process; less than 0 if that cannot be."""
        if sys.platform == "linux" and self._possible and self._fd == _CLOSED:
            from holdfast.fs import native

            self._fd = native.inotify_open()
        return self._fd

    @property
    def has_begun(self) -> bool:
        """Whether somebody listens already."""
        return self._fd != _CLOSED

    def adopt(self, number: int, path: str) -> None:
        """Know by its number what another process listens to with the same descriptor."""
        self._paths[number] = path

    def changed(self) -> list[str]:
        """Paths that something happened to; perhaps not all of them."""
        found: list[str] = []
        with suppress(BlockingIOError):
            while self._fd != _CLOSED and len(found) < _ENOUGH:
                found += self._events(calls.read(self._fd, _ENOUGH))
        return found

    def _events(self, content: bytes) -> list[str]:
        at, found = 0, []
        while at < len(content):
            number, mask, _, length = _EVENT.unpack_from(content, at)
            at += _EVENT.size
            name = content[at : at + length].rstrip(b"\0")
            at += length
            path = None if mask & _OVERFLOW else self._paths.get(number)
            found.append("" if path is None else joined(path, os.fsdecode(name)))
        return [path.rstrip("/") for path in found]

    def close(self) -> None:
        """Stop listening. The system takes some 10 ms for that, doing nothing; nobody has to wait for it."""
        if self._fd != _CLOSED:
            import threading

            descriptor, self._fd = self._fd, _CLOSED
            try:
                threading.Thread(target=close_quietly, args=(descriptor,), daemon=True).start()
            except RuntimeError:  # no more threads
                close_quietly(descriptor)
