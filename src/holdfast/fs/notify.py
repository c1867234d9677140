"""Being told by the operating system when something changes in a directory.

Linux has inotify for this; elsewhere `DirectoryEvents.open` gives None, and the caller looks again
from time to time.
"""

from __future__ import annotations

import math
import os
import select
import struct
import sys
from pathlib import Path
from typing import Self

from holdfast.fs import calls

_EVENT = struct.Struct("iIII")
_MASK = 0x00000FCA  # modified, closed after writing, moved, created, deleted; itself deleted or moved
_LOST = 0x00004000 | 0x00008000 | 0x00000800 | 0x00000400  # overflow, watch removed, itself moved or deleted
_LONGEST = (1 << 31) - 1  # milliseconds that the system call can wait


class DirectoryEvents:
    """What happens to the names in some directories."""

    def __init__(self, fd: int, directories: dict[int, Path]) -> None:
        self._fd = fd
        self._directories = directories

    @classmethod
    def open(cls, directories: list[Path]) -> Self | None:
        """Begin to listen; None if that is impossible here, or if one of the directories is missing."""
        if sys.platform != "linux":
            return None
        from holdfast.fs import native

        fd = native.inotify_open()
        if fd < 0:
            return None
        watched: dict[int, Path] = {}
        for directory in directories:
            number = native.inotify_watch(fd, os.fsencode(directory), _MASK)
            if number < 0:
                calls.close(fd)
                return None
            watched[number] = directory
        return cls(fd, watched)

    def wait(self, timeout: float | None) -> set[tuple[Path, str]] | None:
        """Directory and name of what changed since the last call; empty if nothing did in time.

        None means that events were lost, or a directory is gone: look at everything, listen anew.
        """
        if sys.platform == "win32":
            return set()  # never opened there
        waiting = select.poll()  # not `select`, which knows only the first 1024 descriptors
        waiting.register(self._fd, select.POLLIN)
        readable = waiting.poll(None if timeout is None else min(math.ceil(timeout * 1000), _LONGEST))
        return self._read() if readable else set()

    def close(self) -> None:
        """Stop listening."""
        fd, self._fd = self._fd, -1
        if fd >= 0:
            calls.close(fd)

    def _read(self) -> set[tuple[Path, str]] | None:
        content = calls.read(self._fd, 1 << 16)
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
