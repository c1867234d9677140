"""Taking a source in, directory by directory: what is known to be unchanged is shared, the rest is read."""

from __future__ import annotations

import os
import stat
from collections.abc import Iterator
from typing import NamedTuple

from holdfast.fs import calls
from holdfast.fs.mounts import mounts_beneath
from holdfast.trees.capture_files import GONE, Base, FileCapture, KnownFiles, OpenSource
from holdfast.trees.manifest import (
    Meta,
    encode_body,
    encode_entry,
    encode_extras,
    encode_xattrs,
    mtime_of_directory,
    raw_entries,
)
from holdfast.trees.payload import KIND_WORDS, Payload, link_path, meta_of, read_xattrs
from holdfast.trees.scan import (
    NO_MARK,
    CaptureStats,
    Listing,
    TreeWalker,
    count_in,
    device_number,
    is_foreign,
    is_of,
    is_recent,
    joined,
    listing_of,
    look,
    marks_by_name,
    shown,
    unreadable,
    without_recent,
)
from holdfast.trees.scan_worker import ScanReport, ScanWorker
from holdfast.trees.shared_dirs import SharedDirectory, Stored
from holdfast.trees.stat_cache import KnownDirectory, SourceWatch, StatCache

_WORTH_WATCHING = 3000
_FAR_FUTURE = 1 << 62  # to which nothing is recent
_KIND = 0o170000


class CapturedDirectory(NamedTuple):
    """A directory as it was taken in. With `home`, its files are there; else they are in our own payload."""

    path: str
    encoded: bytes  # the path as the file system has it
    identity: bytes
    kept: bytes  # the identity for the cache
    body: bytes
    home: SharedDirectory | None = None
    from_cache: bool = False
    watched: bool = False  # somebody tells us of changes since


class DirectoryCapture:
    """Takes directories in, into a payload or (None) only to know them."""

    def __init__(
        self,
        source: TreeWalker,
        *,
        cache: StatCache,
        tally: CaptureStats,
        payload: Payload | None = None,
        base: Base | None = None,
        watch: SourceWatch | None = None,
        scout: ScanWorker | None = None,
        now: int = _FAR_FUTURE,
        clones: bool = False,
        retry: bool = False,
    ) -> None:
        self.source = source
        self.payload = payload
        self.base = base
        self.tally = tally
        self.files = FileCapture(source, payload, base, now=now, clones=clones, retry=retry, tally=tally)
        self._cache = cache
        self._scout = scout
        self._watch = watch
        self._now = now
        self._awaited: set[str] = set()  # directories that we shall come to
        self._ahead: dict[str, CapturedDirectory] = {}  # what of these is taken in already
        top = source.enter("")
        self._device = calls.fstat(top).st_dev
        self._mounts = mounts_beneath(top)

    def take_all(self) -> Iterator[CapturedDirectory]:
        """Take in all directories; return them in the order of names, each before those below it."""
        waiting = [""]
        while waiting:
            path = waiting.pop()
            self._awaited.discard(path)
            taken, below = self._take(path)
            if taken is not None:
                yield taken
            waiting += [joined(path, name) for name in reversed(below)]
            if self._scout is not None:
                self._awaited.update([joined(path, name) for name in below])
                self._take_ahead(self._scout)

    def _take_ahead(self, scout: ScanWorker) -> None:
        """Take in what the scout has reported since: so it looks at the more of the source meanwhile.

        Only what we shall surely come to: a directory that has gone since must leave nothing behind.
        """
        for path, report in scout.arrived():
            if path in self._awaited:
                taken = self._reported(path, report)
                if taken is not None:
                    self._awaited.discard(path)
                    self._awaited.update([joined(path, name) for name in report.directories])
                    self._ahead[path] = taken

    def _take(self, path: str) -> tuple[CapturedDirectory | None, list[str]]:
        """Take in one directory without what is below it; return it and the directories in it."""
        report = None if self._scout is None else self._scout.find(path)
        if report is not None:
            taken = self._ahead.pop(path, None) or self._reported(path, report)
            if taken is not None:
                return taken, report.directories
        try:
            here = self.source.enter(path)
            own = calls.fstat(here)
            if is_foreign(path, own, self._device, self._mounts):
                return self._mount_point(path), []
            watched = self._watches(here, path)
            listing = look(here)
        except OSError as error:
            if error.errno not in GONE:
                raise unreadable(self.source.where(path), error) from error
            self.tally.changed.append(path)
            return None, []
        if is_recent(max(listing.newest, listing.own.st_ctime_ns), self._now):
            self.tally.any_recent = True
        taken = self._unchanged(path, listing, watched) or self._read(path, here, listing, watched)
        self.tally.directories += 1
        self.tally.report()
        return taken, listing.directories

    def _watches(self, here: int, path: str) -> bool:
        """Listen to a directory; but a few files are sooner looked at twice: to stop listening takes time."""
        if self._watch is None or (self.tally.files < _WORTH_WATCHING and not self._watch.has_begun):
            return False
        return self._watch.add(here, path)

    def _mount_point(self, path: str) -> CapturedDirectory:
        """Only that it is there: what it shows belongs to what is mounted, and that is not ours."""
        self.tally.lose(path, ["another file system is mounted there"])
        self.tally.directories += 1
        if self.payload is not None:
            self.payload.make(path)
        return CapturedDirectory(
            path, os.fsencode(path), b"", b"", encode_body(Meta(b"m", 0, 0, 0, 0), b"", [])
        )

    # --- What is as it was -----------------------------------------------------------------------------

    def _unchanged(self, path: str, listing: Listing, watched: bool) -> CapturedDirectory | None:
        """A directory whose record is known from the last time, and which another tree has as a whole.

        Not one with a file that has several names: its record depends on where the others are.
        """
        known = self._cache.known(listing.own.st_ino)
        if known is None or listing.linked or known.identity != listing.identity:
            return None
        taken = self._as_known(path, known, watched)
        if taken is None:
            return None
        self.tally.files += len(listing.names)
        self.tally.bytes += sum([each.st_size for each in listing.statuses])
        if {each.st_mode & _KIND for each in listing.statuses} - {stat.S_IFREG}:
            self._note_others(path, listing)
        return taken

    def _reported(self, path: str, report: ScanReport) -> CapturedDirectory | None:
        """A directory that the scout has looked at; None if we have to look at it ourselves."""
        if path in self._mounts:
            return None
        return self._as_reported(path, report) or self._read_as_reported(path, report)

    def _as_reported(self, path: str, report: ScanReport) -> CapturedDirectory | None:
        """A directory that the scout has looked at, exactly as if we had done so at that moment."""
        if report.known is None or (taken := self._as_known(path, report.known, report.watched)) is None:
            return None
        if is_recent(report.newest, self._now):
            self.tally.any_recent = True
        self.tally.files += count_in(taken.identity)
        self.tally.bytes += report.bytes
        self.tally.directories += 1
        self.tally.report()
        return taken

    def _read_as_reported(self, path: str, report: ScanReport) -> CapturedDirectory | None:
        """The same for one that did change: what the scout saw in it is read."""
        listing = None if report.known is not None else listing_of(report.identity)
        if listing is None:
            return None
        try:
            here = self.source.enter(path)
            if not is_of(report.identity, calls.fstat(here)):
                return None
        except OSError:
            return None
        if is_recent(report.newest, self._now):
            self.tally.any_recent = True
        taken = self._read(path, here, listing, report.watched)
        self.tally.directories += 1
        self.tally.report()
        return taken

    def _as_known(self, path: str, known: KnownDirectory, watched: bool) -> CapturedDirectory | None:
        """A directory that is as it was known, unless no other tree has it as a whole."""
        home: SharedDirectory | None = None
        encoded = os.fsencode(path)
        if self.payload is not None:
            home = self._home(encoded, known)
            if home is None:
                return None
        identity, body = known.identity, known.body
        return CapturedDirectory(
            path, encoded, identity, identity, body, home, encoded == known.path, watched
        )

    def _note_others(self, path: str, listing: Listing) -> None:
        """Of what is no file: no bytes, and a word about what is special."""
        for name, status in zip(listing.names, listing.statuses, strict=True):
            if not stat.S_ISREG(status.st_mode):
                self.tally.bytes -= status.st_size
                if not stat.S_ISLNK(status.st_mode):
                    self._note_special(path, name, status)

    def _home(self, path: bytes, known: KnownDirectory) -> SharedDirectory | None:
        """Where the base has this very directory."""
        if self.base is not None:
            for candidate in (path, known.path):
                if self.base.manifest.body(candidate) == known.body and _is_whole(
                    self.base.stored, candidate, known.body
                ):
                    return self.base.stored.home(candidate)
        return None

    # --- What has to be read ---------------------------------------------------------------------------

    def _read(self, path: str, here: int, listing: Listing, watched: bool) -> CapturedDirectory:
        target = -1 if self.payload is None else self.payload.make(path)
        place = OpenSource(path, here, target, self._known(path, listing))
        kept = listing.marks()
        linked = self.files.unchanged(place, listing, kept)
        entries = [linked.get(name, b"") for name in listing.names]
        for index, entry in enumerate(entries):
            if not entry:
                name, status = listing.names[index], listing.status(index)
                entries[index], kept[index] = self._entry(place, name, status, kept[index])
        xattrs, lost = read_xattrs(here)
        self.tally.lose(path, lost)
        own = meta_of(listing.own)
        self.files.link_unchanged(place, linked, own, xattrs)
        body = encode_body(own, encode_extras(xattrs=encode_xattrs(xattrs)), [*filter(None, entries)])
        head = listing.identity[: len(listing.identity) - len(NO_MARK) * len(kept)]
        blotted = without_recent(head + b"".join(kept), listing, self._now)
        return CapturedDirectory(path, os.fsencode(path), listing.identity, blotted, body, watched=watched)

    def _known(self, path: str, listing: Listing) -> KnownFiles:
        known = self._cache.known(listing.own.st_ino)
        marks: dict[bytes, bytes] = {}
        raw: dict[bytes, bytes] = {}
        paths = [os.fsencode(path)]
        if known is not None:
            marks, raw = marks_by_name(known.identity), raw_entries(known.body)
            paths.append(known.path)
        if self.base is not None:
            for candidate in paths:
                body = self.base.manifest.body(candidate)
                if body is not None:
                    same = known is not None and body == known.body
                    return KnownFiles(marks, raw, raw if same else raw_entries(body), os.fsdecode(candidate))
        return KnownFiles(marks, raw, {}, "")

    def _entry(
        self, place: OpenSource, name: str, status: os.stat_result, mark: bytes
    ) -> tuple[bytes, bytes]:
        """The entry of one name and the mark to remember it by; no entry if it is gone."""
        try:
            if stat.S_ISREG(status.st_mode):
                return self.files.take(place, name, status, mark)
            if stat.S_ISLNK(status.st_mode):
                return self._symlink(place, name, status), mark
            return self._special(place.path, name, status), mark
        except OSError as error:
            if error.errno not in GONE:
                raise unreadable(self.source.where(place.path, name), error) from error
            self.tally.changed.append(joined(place.path, name))
            return b"", NO_MARK

    def _symlink(self, place: OpenSource, name: str, status: os.stat_result) -> bytes:
        leads_to = calls.readlink(name, dir_fd=place.here)
        xattrs, _ = read_xattrs(link_path(place.here, name))
        meta = meta_of(status)
        if self.payload is not None:
            with self.payload.changing(place.path, name):
                calls.symlink(leads_to, name, dir_fd=place.target)
                self.payload.attributes.finish_other(place.target, name, meta, xattrs)
        self.tally.files += 1
        extras = encode_extras(target=os.fsencode(leads_to), xattrs=encode_xattrs(xattrs))
        return encode_entry(meta, os.fsencode(name), extras=extras)

    def _special(self, path: str, name: str, status: os.stat_result) -> bytes:
        """A fifo, a socket or a device: recorded, never opened."""
        self._note_special(path, name, status)
        self.tally.files += 1
        meta = meta_of(status)
        extras = encode_extras(device=device_number(status)) if meta.kind in (b"c", b"b") else b""
        return encode_entry(meta, os.fsencode(name), extras=extras)

    def _note_special(self, path: str, name: str, status: os.stat_result) -> None:
        word = KIND_WORDS.get(meta_of(status).kind, "entry of an unknown kind")
        self.tally.special.append(f"{shown(joined(path, name))}: {word}")


def _is_whole(stored: Stored, path: bytes, body: bytes) -> bool:
    """Whether nothing was put into a directory of a tree, or taken out of it: that would show in its time."""
    try:
        return stored.status(path).st_mtime_ns == mtime_of_directory(body)
    except OSError:
        return False
