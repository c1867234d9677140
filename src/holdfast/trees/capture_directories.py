"""Capture of a source directory by directory: unchanged directories are shared, the others are read."""

from __future__ import annotations

import os
import stat
import struct
import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from holdfast.errors import IoFailure
from holdfast.fs import calls
from holdfast.fs.directory import Closing, close_quietly, status_at
from holdfast.fs.mounts import filesystem_kind, is_network, mounts_beneath
from holdfast.trees.capture_files import Base, CaptureStats, FileCapture, KnownFiles, OpenDirectory
from holdfast.trees.manifest import Meta, encode_body, encode_entry, encode_extras, mtime_of_directory, raw_entries
from holdfast.trees.payload import KIND_WORDS, Payload, link_path, meta_of, read_xattrs
from holdfast.trees.scan import (
    NO_MARK,
    UNTIMED,
    KnownDirectory,
    Listing,
    StatCache,
    count_in,
    is_foreign,
    is_of,
    is_recent,
    listing_of,
    marks_by_name,
    scan_directory,
    without_recent,
)
from holdfast.trees.shared_dirs import SharedDirectory
from holdfast.trees.walker import GONE, TreeWalker, joined, shown, unreadable

if TYPE_CHECKING:
    from holdfast.trees.scan_worker import ScanReport, ScanWorker

_WORTH_WATCHING = 3000  # files; scanning fewer twice takes less time than removing their watches
_WORTH_A_WORKER = 1 << 20  # bytes of the cache: some 8,000 files
_FAR_FUTURE = 1 << 62  # to which nothing is recent
_KIND = 0o170000


class CapturedDirectory(NamedTuple):
    """A captured directory. With `shared`, another tree stores its files; otherwise the new payload does."""

    path: str
    encoded: bytes  # the path as the filesystem has it
    identity: bytes
    kept: bytes  # the identity for the cache
    body: bytes
    shared: SharedDirectory | None = None
    from_cache: bool = False
    watched: bool = False  # later changes are noticed


class DirectoryCapture:
    """Captures directories, into a payload or (None) only to get their records."""

    def __init__(
        self,
        source: TreeWalker,
        *,
        cache: StatCache,
        stats: CaptureStats,
        payload: Payload | None = None,
        base: Base | None = None,
        watch: SourceWatch | None = None,
        worker: ScanWorker | None = None,
        now: int = _FAR_FUTURE,
        clones: bool = False,
        retry: bool = False,
        clean: Callable[[int], None] | None = None,
    ) -> None:
        self.source, self.payload, self.base, self.stats = source, payload, base, stats
        self.files = FileCapture(source, payload, base, now=now, clones=clones, retry=retry, stats=stats, clean=clean)
        self._cache, self._watch, self._worker, self._now = cache, watch, worker, now
        if worker is not None:
            worker.cache = cache
        self._expected: set[str] = set()  # directories that the walk will reach
        self._ahead: dict[str, CapturedDirectory] = {}  # those of them that are already captured
        self._reader: DirectoryCapture | None = None
        if now == UNTIMED and base is not None:
            self._reader = DirectoryCapture(source, cache=StatCache(), stats=stats, now=now, retry=retry, clean=clean)
        self._device = source.root_status().st_dev
        self._mounts = mounts_beneath(source.enter(""))

    def capture_all(self) -> Iterator[CapturedDirectory]:
        """Capture all directories, in name order, each before its subdirectories."""
        waiting = [""]
        while waiting:
            path = waiting.pop()
            self._expected.discard(path)
            captured, below = self._capture(path)
            if captured is not None:
                yield captured
            waiting += [joined(path, name) for name in reversed(below)]
            if self._worker is not None:
                self._expected.update([joined(path, name) for name in below])
                self._capture_ahead(self._worker)
        if self._worker is not None:
            self._worker.stop()

    def _capture_ahead(self, worker: ScanWorker) -> None:
        """Capture directories that the worker has reported meanwhile, so that the worker can go on.

        Only those that the walk is sure to reach: a vanished directory must leave nothing behind.
        """
        for path, report in worker.arrived():
            if path in self._expected:
                captured = self._reported(path, report)
                if captured is not None:
                    self._expected.discard(path)
                    self._expected.update([joined(path, name) for name in report.directories])
                    self._ahead[path] = captured

    def _capture(self, path: str) -> tuple[CapturedDirectory | None, list[str]]:
        """Capture one directory without its subdirectories; return it and their names."""
        report = None if self._worker is None else self._worker.find(path)
        if report is not None:
            captured = self._ahead.pop(path, None) or self._reported(path, report)
            if captured is not None:
                return captured, report.directories
        try:
            here = self.source.enter(path)
            own = calls.fstat(here)
            if is_foreign(path, own, self._device, self._mounts):
                return self._mount_point(path), []
            watch, many = self._watch, self.stats.files >= _WORTH_WATCHING
            watched = watch is not None and (many or watch.descriptor != _CLOSED) and watch.add(here, path)
            listing = scan_directory(here)
        except OSError as error:
            if error.errno not in GONE:
                raise unreadable(self.source.where(path), error) from error
            self.stats.changed.append(path)
            return None, []
        self._note_time(max(listing.newest, listing.own.st_ctime_ns))
        captured = self._unchanged(path, listing, watched) or self._equal(path, here, listing, watched)
        if captured is None:
            captured = self.read(path, here, listing, watched)
        self.stats.count_directory()
        return captured, listing.directories

    def _note_time(self, newest: int) -> None:
        if is_recent(newest, self._now):
            self.stats.any_recent = True

    def _mount_point(self, path: str) -> CapturedDirectory:
        """Record only that it exists: its content belongs to another filesystem."""
        self.stats.lose(path, ["another filesystem is mounted there"])
        self.stats.directories += 1
        if self.payload is not None:
            self.payload.make(path)
        body = encode_body(Meta(b"m", 0, 0, 0, 0), b"", [])
        return CapturedDirectory(path, os.fsencode(path), b"", b"", body)

    def _unchanged(self, path: str, listing: Listing, watched: bool) -> CapturedDirectory | None:
        """A directory that equals its record in the cache, and that another tree stores; None if it has to be read.

        A directory with a hard-linked file is always read: its record depends on the location of the other names.
        """
        known = self._cache.known(listing.own.st_ino)
        if known is None or listing.linked or known.identity != listing.identity:
            return None
        captured = self._as_known(path, known, watched)
        if captured is None:
            return None
        self.stats.files += len(listing.names)
        self.stats.bytes += sum([each.st_size for each in listing.statuses])
        if {each.st_mode & _KIND for each in listing.statuses} - {stat.S_IFREG}:
            for name, status in zip(listing.names, listing.statuses, strict=True):
                if not stat.S_ISREG(status.st_mode):
                    self.stats.bytes -= status.st_size
                    if not stat.S_ISLNK(status.st_mode):
                        self._note_special(path, name, status)
        return captured

    def _equal(self, path: str, here: int, listing: Listing, watched: bool) -> CapturedDirectory | None:
        """A directory with exactly the content that another tree stores; used where times do not show changes."""
        reader = self._reader
        if reader is None or listing.linked:
            return None
        reader.stats = reader.files.stats = CaptureStats()
        found = reader.read(path, here, listing, watched)
        shared = self._stored_in_base(found.encoded, KnownDirectory(found.encoded, found.identity, found.body))
        if shared is None:
            return None
        self.stats.add(reader.stats)
        return found._replace(shared=shared)

    def _reported(self, path: str, report: ScanReport) -> CapturedDirectory | None:
        """Capture a directory from the worker's report; None if it has to be scanned here."""
        if path in self._mounts:
            return None
        if report.known is not None:
            captured = self._as_known(path, report.known, report.watched)
            if captured is not None:
                self.stats.files += count_in(captured.identity)
                self.stats.bytes += report.bytes
        else:
            captured = self._read_as_reported(path, report)
        if captured is not None:
            self._note_time(report.newest)
            self.stats.count_directory()
        return captured

    def _read_as_reported(self, path: str, report: ScanReport) -> CapturedDirectory | None:
        """Read the files of a changed directory, unless a name was added or removed since the report."""
        listing = listing_of(report.identity)
        if listing is None:
            return None
        try:
            here = self.source.enter(path)
            if not is_of(report.identity, calls.fstat(here)):
                return None
        except OSError:
            return None
        return self.read(path, here, listing, report.watched)

    def _as_known(self, path: str, known: KnownDirectory, watched: bool) -> CapturedDirectory | None:
        """Capture a directory from its record in the cache; None if no other tree stores it as a whole."""
        encoded = os.fsencode(path)
        shared: SharedDirectory | None = None
        if self.payload is not None:
            shared = self._stored_in_base(encoded, known)
            if shared is None:
                return None
        identity, from_cache = known.identity, encoded == known.path
        return CapturedDirectory(path, encoded, identity, identity, known.body, shared, from_cache, watched)

    def _stored_in_base(self, path: bytes, known: KnownDirectory) -> SharedDirectory | None:
        """The place where the base stores this very directory. A name added or removed there would change its time."""
        if self.base is None:
            return None
        manifest, stored, damaged = self.base
        for candidate in (path, known.path):
            try:
                is_stored = manifest.body(candidate) == known.body and candidate not in damaged
                if is_stored and stored.status(candidate).st_mtime_ns == mtime_of_directory(known.body):
                    return stored.location(candidate)
            except OSError:
                continue
        return None

    def read(self, path: str, here: int, listing: Listing, watched: bool) -> CapturedDirectory:
        """Capture an open directory entry by entry."""
        target = -1 if self.payload is None else self.payload.make(path)
        directory = OpenDirectory(path, here, target, self._known(path, listing))
        kept = listing.marks()
        linked = self.files.unchanged(directory, listing, kept)
        entries = [linked.get(name, b"") for name in listing.names]
        for index, entry in enumerate(entries):
            if not entry:
                name, status = listing.names[index], listing.status(index)
                entries[index], kept[index] = self._entry(directory, name, status, kept[index])
        xattrs, lost = read_xattrs(here)
        self.stats.lose(path, lost)
        own = meta_of(listing.own)
        self.files.link_unchanged(directory, linked)
        body = encode_body(own, encode_extras(xattrs=xattrs), [*filter(None, entries)])
        head = listing.identity[: len(listing.identity) - len(NO_MARK) * len(kept)]
        blanked = without_recent(head + b"".join(kept), listing, self._now)
        return CapturedDirectory(path, os.fsencode(path), listing.identity, blanked, body, watched=watched)

    def _known(self, path: str, listing: Listing) -> KnownFiles:
        known = self._cache.known(listing.own.st_ino)
        marks, raw = ({}, {}) if known is None else (marks_by_name(known.identity), raw_entries(known.body))
        paths = [os.fsencode(path)] if known is None else [os.fsencode(path), known.path]
        if self.base is not None:
            for candidate in paths:
                body = self.base.manifest.body(candidate)
                if body is not None and candidate not in self.base.damaged:
                    same = known is not None and body == known.body
                    return KnownFiles(marks, raw, raw if same else raw_entries(body), os.fsdecode(candidate))
        return KnownFiles(marks, raw, {}, "")

    def _entry(self, directory: OpenDirectory, name: str, status: os.stat_result, mark: bytes) -> tuple[bytes, bytes]:
        """The entry of one name and the mark for the cache; an empty entry if the name is gone."""
        try:
            if stat.S_ISREG(status.st_mode):
                return self.files.capture(directory, name, status, mark)
            if stat.S_ISLNK(status.st_mode):
                return self._symlink(directory, name, status), mark
            return self._special(directory.path, name, status), mark
        except OSError as error:
            if error.errno not in GONE:
                raise unreadable(self.source.where(directory.path, name), error) from error
            self.stats.changed.append(joined(directory.path, name))
            return b"", NO_MARK

    def _symlink(self, directory: OpenDirectory, name: str, status: os.stat_result) -> bytes:
        destination = calls.readlink(name, dir_fd=directory.here)
        xattrs, _ = read_xattrs(link_path(directory.here, name))
        meta = meta_of(status)
        if self.payload is not None:
            with self.payload.changing(directory.path, name):
                calls.symlink(destination, name, dir_fd=directory.target)
                self.payload.attributes.finish_other(directory.target, name, meta, xattrs)
        self.stats.files += 1
        extras = encode_extras(target=os.fsencode(destination), xattrs=xattrs)
        return encode_entry(meta, os.fsencode(name), extras=extras)

    def _special(self, path: str, name: str, status: os.stat_result) -> bytes:
        """The entry of a fifo, a socket or a device: recorded, never opened."""
        self._note_special(path, name, status)
        self.stats.files += 1
        meta = meta_of(status)
        device = 0
        if sys.platform != "win32":
            device = status.st_rdev
        extras = encode_extras(device=device) if meta.kind in (b"c", b"b") else b""
        return encode_entry(meta, os.fsencode(name), extras=extras)

    def _note_special(self, path: str, name: str, status: os.stat_result) -> None:
        word = KIND_WORDS.get(meta_of(status).kind, "entry of an unknown kind")
        self.stats.special.append(f"{shown(joined(path, name))}: {word}")


def start_scan_worker(
    stack: ExitStack, source: TreeWalker, cache: Path | None, watch: SourceWatch | None = None
) -> ScanWorker | None:
    """Start a scan worker that `stack` stops; None if that is impossible or the cache is small."""
    size = 0
    with suppress(IoFailure):
        if cache is not None and (status := status_at(cache)) is not None:
            size = status.st_size
    if size < _WORTH_A_WORKER:
        return None
    from holdfast.trees.scan_worker import ScanWorker

    worker = ScanWorker.start(source, watch)
    return None if worker is None else stack.enter_context(worker)


_EVENT = struct.Struct("iIII")
_OVERFLOW = 0x4000
_EVENTS_AT_ONCE = 1 << 16
_CLOSED = -1


class SourceWatch(Closing):
    """Watches directories with inotify, each from the moment when it is added."""

    def __init__(self, root: str) -> None:
        self.descriptor = _CLOSED
        self.paths: dict[int, str] = {}
        """By the number of the watch; a worker process adds watches to the same descriptor."""
        self._possible = sys.platform == "linux" and not is_network(filesystem_kind(root))

    def add(self, directory: int, path: str) -> bool:
        """Watch an open directory from now on; False if that is impossible."""
        if sys.platform != "linux" or not self._possible:
            return False
        from holdfast.fs import native

        number = native.inotify_watch_directory(self.begin(), directory)
        if number < 0:  # too many
            self._possible = False
            return False
        self.paths[number] = path
        return True

    def begin(self) -> int:
        """The inotify descriptor, which a worker process may share; less than 0 if watching is impossible."""
        if sys.platform == "linux" and self._possible and self.descriptor == _CLOSED:
            from holdfast.fs import native

            self.descriptor = native.inotify_open()
        return self.descriptor

    def changed(self) -> list[str]:
        """Paths with changes; perhaps not all of them."""
        found: list[str] = []
        with suppress(BlockingIOError):
            while self.descriptor != _CLOSED and len(found) < _EVENTS_AT_ONCE:
                found += self._events(calls.read(self.descriptor, _EVENTS_AT_ONCE))
        return found

    def _events(self, content: bytes) -> list[str]:
        at, found = 0, []
        while at < len(content):
            number, mask, _, length = _EVENT.unpack_from(content, at)
            at += _EVENT.size
            name = content[at : at + length].rstrip(b"\0")
            at += length
            path = None if mask & _OVERFLOW else self.paths.get(number)
            found.append("" if path is None else joined(path, os.fsdecode(name)))
        return [path.rstrip("/") for path in found]

    def close(self) -> None:
        """Stop watching, in a thread: the system takes some 10 ms for that."""
        if self.descriptor != _CLOSED:
            import threading

            descriptor, self.descriptor = self.descriptor, _CLOSED
            try:
                threading.Thread(target=close_quietly, args=(descriptor,), daemon=True).start()
            except RuntimeError:  # no more threads
                close_quietly(descriptor)
