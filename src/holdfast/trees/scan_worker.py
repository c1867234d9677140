"""The scan worker: a process that scans a source from its far end while another one captures it.

It walks in reverse name order and reports each directory on its standard output. The capturing process makes
all decisions, never waits for a report, and needs none.

    report = u32 length of path, u32 length of identity, s32 number of the watch or -1, s64 newest change
             time in ns, u64 bytes in files, path, identity
"""

from __future__ import annotations

import os
import struct
import sys
from collections.abc import Iterable, Iterator
from typing import NamedTuple

from holdfast.fs import calls
from holdfast.fs.directory import Closing, write_all
from holdfast.trees.scan import StatCache, directories_in, held_time, inode_of, is_foreign, is_sound, scan_directory
from holdfast.trees.walker import Walker, joined, read_whole

TYPE_CHECKING = False  # true for type checkers; importing `typing` costs time

if TYPE_CHECKING:
    import subprocess

    from holdfast.trees.capture_directories import SourceWatch
    from holdfast.trees.scan import KnownDirectory, Listing
    from holdfast.trees.walker import TreeWalker

REPORT = struct.Struct("<IIiqQ")
_NO_WATCH = -1
_KIND, _FILE, _LINK = 0o170000, 0o100000, 0o120000


# --- In the worker process --------------------------------------------------------------------------

_STDOUT = 1
_SENT_AT_ONCE = 1 << 13


def serve(arguments: list[str]) -> None:
    """Scan and report until everything is scanned, the pipe is closed, or the parent ends."""
    parent, device, inode, watch, root, *mounts = arguments
    if sys.platform == "linux":
        from holdfast.fs import native

        native.die_with_parent()
    try:
        with Walker(root) as walker:
            top = calls.fstat(walker.enter(""))
            if (top.st_dev, top.st_ino) == (int(device), int(inode)) and os.getppid() == int(parent):
                _scan(walker, top.st_dev, int(watch), frozenset(mounts), int(parent))
    except OSError:
        return  # the capturing process scans what was not reported


def _scan(walker: Walker, device: int, watch: int, mounts: frozenset[str], parent: int) -> None:
    """Watch and scan every directory of the source, the last name first, and report it."""
    waiting, size, number = [""], 0, _NO_WATCH
    unsent: list[bytes] = []
    while waiting and os.getppid() == parent:
        path = waiting.pop()
        try:
            here = walker.enter(path)
            if is_foreign(path, calls.fstat(here), device, mounts):
                continue
            if sys.platform == "linux" and watch >= 0:
                from holdfast.fs import native

                calls.chdir(here)  # nothing else in this process depends on the working directory
                number = native.inotify_watch_here(watch)
            listing = scan_directory(here)
        except OSError:
            continue
        waiting += [joined(path, name) for name in listing.directories]
        if report := _report(path, number, listing):
            unsent += report
            size += len(listing.identity)
        if size >= _SENT_AT_ONCE or not waiting:
            write_all(_STDOUT, b"".join(unsent))
            unsent, size = [], 0


def _report(path: str, number: int, listing: Listing) -> list[bytes]:
    """The report of a directory; empty unless it has only symbolic links and files with one name."""
    statuses = listing.statuses
    kinds = {each.st_mode & _KIND for each in statuses}
    if listing.linked or kinds - {_FILE, _LINK}:
        return []
    size = sum([each.st_size for each in statuses])
    if _LINK in kinds:
        size -= sum([each.st_size for each in statuses if each.st_mode & _KIND == _LINK])
    where, identity, own = os.fsencode(path), listing.identity, listing.own
    newest = held_time(max(listing.newest, own.st_ctime_ns))
    return [REPORT.pack(len(where), len(identity), number, newest, size), where, identity]


# --- In the capturing process -----------------------------------------------------------------------

PROGRAM = (
    "import gc, sys; gc.disable(); sys.path.insert(0, sys.argv[1]);"
    " from holdfast.trees.scan_worker import serve; serve(sys.argv[2:])"
)
_PIPE = 1 << 20
_MOST_MOUNTS = 1000
_CHUNK = 1 << 18
_SCANS_BETWEEN_READS = 8


class ScanReport(NamedTuple):
    """A reported directory; `known` is its record in the cache, if its identity is still the same.

    `newest` is the latest change time in it, `watched` whether later changes are noticed.
    """

    identity: bytes
    known: KnownDirectory | None
    directories: list[str]
    bytes: int
    newest: int
    watched: bool


class ScanWorker(Closing):
    """A scan worker and its reports so far."""

    def __init__(self, process: subprocess.Popen[bytes], watch: SourceWatch | None) -> None:
        assert process.stdout is not None
        self._process = process
        self.pipe = process.stdout.fileno()
        self.cache = StatCache()
        """The cache that reports are compared with."""
        self._watch = watch
        self._reports: dict[str, ScanReport] = {}
        self._arrived: list[str] = []
        self._unread = bytearray()
        self._until_read = _SCANS_BETWEEN_READS
        self._running = True

    @classmethod
    def start(cls, source: TreeWalker, watch: SourceWatch | None) -> ScanWorker | None:
        """Start a worker; None if that is impossible, or no processor is idle."""
        if sys.platform == "win32" or processors() < 2 or _is_busy():
            return None
        from holdfast.fs.mounts import mounts_beneath

        top = source.enter("")
        own, mounts = calls.fstat(top), mounts_beneath(top)
        if len(mounts) > _MOST_MOUNTS:
            return None
        inotify = _NO_WATCH if watch is None else watch.begin()
        arguments = (os.getpid(), own.st_dev, own.st_ino, inotify, source.root, *sorted(mounts))
        process = _start_process(arguments, () if inotify == _NO_WATCH else (inotify,))
        if process is None:
            return None
        worker = cls(process, watch)
        os.set_blocking(worker.pipe, False)
        return worker

    def find(self, path: str) -> ScanReport | None:
        """The report of `path`, if it has arrived.

        The worker scans everything that follows `path` in name order before `path`, except its subdirectories. So once
        it has reported a `path` without subdirectories, the two processes have met, and it is stopped.
        """
        report = self._reports.pop(path, None)
        if report is None and self._running:
            self._until_read -= 1
            if self._until_read <= 0:
                self._until_read = _SCANS_BETWEEN_READS
                self._receive()
                report = self._reports.pop(path, None)
        if report is not None and not report.directories:
            self.stop()
        return report

    def arrived(self) -> Iterator[tuple[str, ScanReport]]:
        """The reports that arrived since the last call and that `find` has not returned."""
        arrived, self._arrived = self._arrived, []
        for path in arrived:
            if (report := self._reports.get(path)) is not None:
                yield path, report

    def _receive(self) -> None:
        """Read the reports that were sent, without waiting for more."""
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
                path, identity, *fields = REPORT.unpack_from(content, at)
                start = at + REPORT.size + path
                end = start + identity
                if len(content) < end:
                    break
                self._note(bytes(content[start - path : start]), bytes(content[start:end]), *fields)
                at = end
        del self._unread[:at]

    def _note(self, encoded: bytes, identity: bytes, number: int, newest: int, size: int) -> None:
        path = os.fsdecode(encoded)
        if watched := number >= 0 and self._watch is not None:
            self._watch.paths[number] = path
        if not is_sound(identity):
            return
        known = self.cache.known(inode_of(identity))
        if known is not None and known.identity != identity:
            known = None
        self._reports[path] = ScanReport(identity, known, directories_in(identity), size, newest, watched)
        self._arrived.append(path)

    def stop(self) -> None:
        """Kill the process, but keep its reports."""
        if self._running:
            self._running = False
            self._process.kill()

    def close(self) -> None:
        self.stop()
        self._process.wait()
        if self._process.stdout is not None:
            self._process.stdout.close()


def _start_process(arguments: Iterable[object], inherits: tuple[int, ...]) -> subprocess.Popen[bytes] | None:
    if sys.platform == "win32" or not sys.executable:
        return None
    import subprocess

    packages = os.path.abspath(os.path.join(os.path.dirname(__file__), *[os.pardir] * 2))
    try:
        process = subprocess.Popen(
            [sys.executable, "-I", "-S", "-c", PROGRAM, packages, *map(str, arguments)],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            bufsize=0,
            pass_fds=inherits,
            process_group=0,  # Ctrl-C in the terminal is for the capturing process to handle
        )
    except OSError:
        return None
    assert process.stdout is not None
    calls.enlarge_pipe(process.stdout.fileno(), _PIPE)
    return process


def processors() -> int:
    """How many processors this process may use."""
    if sys.platform == "linux":  # a statement, so that the checker follows
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def _is_busy() -> bool:
    """Whether more processes are ready to run than there are processors: a worker would only compete."""
    if sys.platform != "linux":
        return False
    try:
        running = int(read_whole("/proc/loadavg").split()[3].partition(b"/")[0])
    except (OSError, ValueError, IndexError):
        return False
    return running > (os.cpu_count() or 1)
