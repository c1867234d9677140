"""The scout, seen from the process that it looks for; what it does is in `scouting`."""

from __future__ import annotations

import os
import struct
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

from holdfast.fs import calls
from holdfast.fs.directory import Closing, write_all
from holdfast.fs.mounts import mounts_beneath
from holdfast.trees.manifest import read_whole
from holdfast.trees.scan import (
    Listing,
    TreeWalker,
    Walker,
    directories_in,
    held_time,
    inode_of,
    is_foreign,
    is_identity,
    joined,
    look,
)
from holdfast.trees.stat_cache import KnownDirectory, SourceWatch, StatCache
from holdfast.trees.worker_process import processors, program_of, start

TYPE_CHECKING = False  # what checkers take for true; importing `typing` costs time

if TYPE_CHECKING:
    import subprocess


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
        with Walker(root) as way:
            top = calls.fstat(way.enter(""))
            if (top.st_dev, top.st_ino) == (int(device), int(inode)) and os.getppid() == int(parent):
                _Walk(way, top.st_dev, int(watch), frozenset(mounts)).run(int(parent))
    except OSError:
        return  # what there is no report of is looked at by who reads them


class _Walk:
    def __init__(self, way: Walker, device: int, watch: int, mounts: frozenset[str]) -> None:
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


PROGRAM = program_of("holdfast.trees.scan_worker")
_WORTH_A_SCOUT = 1 << 20  # bytes of the cache: from some 8 000 files on
_MANY_MOUNTS = 1000
_CHUNK = 1 << 18
_PATIENCE = 8  # directories that we look at before we ask again what the scout has sent


class ScanReport(NamedTuple):
    """What the scout saw: a directory with these directories in it; `known` if it is as it was known.

    `newest` is the time of the newest change in it, `watched` whether we are told of changes since.
    """

    identity: bytes
    known: KnownDirectory | None
    directories: list[str]
    bytes: int
    newest: int
    watched: bool


class ScanWorker(Closing):
    """The scout and what it has reported so far. Nothing depends on it."""

    def __init__(self, process: subprocess.Popen[bytes], watch: SourceWatch | None) -> None:
        assert process.stdout is not None
        self._process = process
        self.pipe = process.stdout.fileno()
        self._watch = watch
        self._cache = StatCache()
        self._reports: dict[str, ScanReport] = {}
        self._arrived: list[str] = []
        self._unread = bytearray()
        self._patience = _PATIENCE
        self._running = True

    @classmethod
    def start(cls, source: TreeWalker, cache: Path | None, watch: SourceWatch | None) -> ScanWorker | None:
        """Send one out; None where that cannot be, or is not worth it by the size of what is known."""
        if sys.platform == "win32" or _size(cache) < _WORTH_A_SCOUT or processors() < 2 or _is_busy():
            return None
        top = source.enter("")
        own, mounts = calls.fstat(top), mounts_beneath(top)
        if len(mounts) > _MANY_MOUNTS:
            return None
        listening = NO_WATCH if watch is None else watch.begin()
        process = start(
            PROGRAM,
            (own.st_dev, own.st_ino, listening, source.root, *sorted(mounts)),
            inherits=() if listening == NO_WATCH else (listening,),
        )
        if process is None:
            return None
        scout = cls(process, watch)
        os.set_blocking(scout.pipe, False)
        return scout

    def use(self, cache: StatCache) -> None:
        """Compare what it reports with this."""
        self._cache = cache

    def find(self, path: str) -> ScanReport | None:
        """What it saw at `path`, if it has said so by now.

        It has looked at whatever comes later in the order of names before it looked at `path`, but for
        what is below: so with a directory that has none the scout is of no more use, and is stopped.
        """
        report = self._reports.pop(path, None)
        if report is None and self._running:
            self._patience -= 1
            if self._patience <= 0:
                self._patience = _PATIENCE
                self._listen()
                report = self._reports.pop(path, None)
        if report is not None and not report.directories:
            self.stop()
        return report

    def arrived(self) -> Iterator[tuple[str, ScanReport]]:
        """What it has reported since this was last asked, and nobody has asked for."""
        arrived, self._arrived = self._arrived, []
        for path in arrived:
            report = self._reports.get(path)
            if report is not None:
                yield path, report

    def _listen(self) -> None:
        """Take what it has sent, without waiting for more."""
        more = True
        while more:
            try:
                chunk = calls.read(self.pipe, _CHUNK)
            except BlockingIOError:
                break
            except OSError:
                chunk = b""
            if not chunk:
                self.stop()
            self._unread += chunk
            more = len(chunk) == _CHUNK
        at = 0
        with memoryview(self._unread) as content:
            while len(content) >= at + REPORT.size:
                path, identity, *said = REPORT.unpack_from(content, at)
                start = at + REPORT.size + path
                end = start + identity
                if len(content) < end:
                    break
                self._note(bytes(content[start - path : start]), bytes(content[start:end]), *said)
                at = end
        del self._unread[:at]

    def _note(self, path: bytes, identity: bytes, number: int, newest: int, size: int) -> None:
        where = os.fsdecode(path)
        watched = number >= 0 and self._watch is not None
        if watched and self._watch is not None:
            self._watch.adopt(number, where)
        if not is_identity(identity):
            return
        known = self._cache.known(inode_of(identity))
        if known is not None and known.identity != identity:
            known = None
        self._reports[where] = ScanReport(identity, known, directories_in(identity), size, newest, watched)
        self._arrived.append(where)

    def stop(self) -> None:
        """Let it look no further. What it has reported remains."""
        if self._running:
            self._running = False
            self._process.kill()

    def close(self) -> None:
        """Stop it, and wait until it is gone."""
        self.stop()
        self._process.wait()
        if self._process.stdout is not None:
            self._process.stdout.close()


def _size(cache: Path | None) -> int:
    try:
        return 0 if cache is None else calls.stat(cache).st_size
    except OSError:
        return 0


def _is_busy() -> bool:
    """Whether more is ready to run at this moment than there are processors, as far as the system tells.

    Then the scout would only take turns with us.
    """
    if sys.platform != "linux":
        return False
    try:
        running = int(read_whole("/proc/loadavg").split()[3].partition(b"/")[0])
    except (OSError, ValueError, IndexError):
        return False
    return running > (os.cpu_count() or 1)
