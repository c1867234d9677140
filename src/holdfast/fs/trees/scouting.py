"""The scout: a second process that looks at a source from its other end, and tells the first what it saw.

Of a source that did not change, looking at it is all the work there is. The first process walks it in the
order of names, each directory before what is below it; the scout walks it against that order, each
directory likewise before what is below it. So they meet, and each has looked at one half.

The scout decides nothing. It sends the identity of each ordinary directory, and whether it has begun to
listen to it *before* it looked; the first process compares that with what it knows. What is not
ordinary the scout leaves out, and what it never comes to, for whatever reason, is left to the first process.

    report = u32 length of path, u32 length of identity, s32 number of the watch or -1,
             s64 time of the newest change in ns, u64 bytes of the files in it, path, identity
"""

from __future__ import annotations

import os
import struct
import sys

from holdfast.fs import calls
from holdfast.fs.directory import write_all
from holdfast.fs.trees.scan import Listing, held_time, is_foreign, look
from holdfast.fs.trees.way import Way, joined

REPORT = struct.Struct("<IIiqQ")
NO_WATCH = -1

_STDOUT = 1
_ENOUGH = 1 << 13  # bytes to send at once
_KIND, _FILE, _LINK = 0o170000, 0o100000, 0o120000
_ORDINARY = {_FILE, _LINK}


def serve(arguments: list[str]) -> None:
    """What the scout does: `arguments` are its parent, the source's device and inode, where to listen, paths.

    It ends when all is looked at, when nobody reads its reports any more, or with its parent.
    """
    parent, device, inode, watch, root, *mounts = arguments
    _die_with_parent()
    try:
        with Way(root) as way:
            top = calls.fstat(way.enter(""))
            if (top.st_dev, top.st_ino) == (int(device), int(inode)) and os.getppid() == int(parent):
                _Walk(way, top.st_dev, int(watch), frozenset(mounts)).run(int(parent))
    except OSError:
        return  # what there is no report of is looked at by who reads them


class _Walk:
    def __init__(self, way: Way, device: int, watch: int, mounts: frozenset[str]) -> None:
        self._way, self._device, self._watch, self._mounts = way, device, watch, mounts

    def run(self, parent: int) -> None:
        """Look at everything, the last first, and report it."""
        waiting, size = [""], 0
        unsent: list[bytes] = []
        while waiting and os.getppid() == parent:
            path = waiting.pop()
            try:
                number, listing = self._look(path)
            except OSError:
                continue
            if listing is None:
                continue
            waiting += [joined(path, name) for name in listing.directories]
            report = _report(path, number, listing)
            if report:
                unsent += report
                size += len(listing.identity)
            if size >= _ENOUGH or not waiting:
                write_all(_STDOUT, b"".join(unsent))
                unsent, size = [], 0

    def _look(self, path: str) -> tuple[int, Listing | None]:
        """Listen to a directory and then look at it; None if it is not the source's own."""
        here = self._way.enter(path)
        own = calls.fstat(here)
        if is_foreign(path, own, self._device, self._mounts):
            return NO_WATCH, None
        return self._listen(here), look(here)

    def _listen(self, here: int) -> int:
        if sys.platform != "linux" or self._watch < 0:
            return NO_WATCH
        from holdfast.fs import native

        calls.chdir(here)  # no other part of this process is in any directory
        return native.inotify_watch_here(self._watch)


def _report(path: str, number: int, listing: Listing) -> list[bytes]:
    """What to say of a directory; nothing unless all in it are files with one name, and symbolic links."""
    statuses = listing.statuses
    kinds = {each.st_mode & _KIND for each in statuses}
    if listing.linked or kinds - _ORDINARY:
        return []
    size = sum([each.st_size for each in statuses])
    if _LINK in kinds:
        size -= sum([each.st_size for each in statuses if each.st_mode & _KIND == _LINK])
    where, identity, own = os.fsencode(path), listing.identity, listing.own
    newest = held_time(max(listing.newest, own.st_ctime_ns))
    return [REPORT.pack(len(where), len(identity), number, newest, size), where, identity]


def _die_with_parent() -> None:
    if sys.platform == "linux":
        from holdfast.fs import native

        native.die_with_parent()
