"""Capture of the files of a source: each is read once, and linked or copied into the payload."""

from __future__ import annotations

import errno
import os
import stat
from collections.abc import Callable
from typing import NamedTuple

from holdfast.errors import ConsistencyUnavailable
from holdfast.fs import calls
from holdfast.fs.directory import close_quietly
from holdfast.trees.copy import Content, clone_file, copy_file, hash_file
from holdfast.trees.manifest import (
    Manifest,
    Meta,
    Xattrs,
    digest_of,
    encode_entry,
    encode_extras,
    is_like,
    is_plain_file,
    is_same_file,
    size_of,
    with_first_link,
    without_first_link,
)
from holdfast.trees.payload import HEAD_OF_ENTRY, READ, Payload, head_of_entry, meta_of, read_xattrs
from holdfast.trees.scan import NO_MARK, Listing, Progress, is_recent, mark_of, names_in
from holdfast.trees.shared_dirs import Stored
from holdfast.trees.walker import GONE, NO_LINK, TreeWalker, joined, shown, split, unreadable, unwritable

_ATTEMPTS = 3


class RecentFile(NamedTuple):
    """A file that changed so shortly before it was read that its times cannot show another change."""

    path: str
    name: str
    digest: bytes


class CaptureStats:
    """Counts and lists of unusual entries, collected during a capture."""

    def __init__(self, progress: Progress | None = None) -> None:
        self.files = self.directories = self.bytes = self.stored_bytes = 0
        self.not_preserved: list[str] = []
        self.special: list[str] = []
        self.changed: list[str] = []
        self.recent: list[RecentFile] = []
        self.any_recent = False
        self._progress = progress

    def count_directory(self) -> None:
        self.directories += 1
        if self._progress is not None:
            self._progress(self.files, self.bytes)

    def add(self, other: CaptureStats) -> None:
        self.files += other.files
        self.bytes += other.bytes
        self.not_preserved += other.not_preserved
        self.special += other.special
        self.changed += other.changed
        self.recent += other.recent

    def lose(self, path: str, what: list[str]) -> None:
        """Note the attributes of an entry that cannot be preserved."""
        self.not_preserved += [f"{shown(path) or '.'}: {each}" for each in what]


class Base(NamedTuple):
    """The tree that unchanged directories are shared with, and unchanged files linked from, except `damaged` ones."""

    manifest: Manifest
    stored: Stored
    damaged: frozenset[bytes] = frozenset()


class KnownFiles(NamedTuple):
    """The files of one directory, as recorded in the cache and in the base."""

    marks: dict[bytes, bytes]
    raw: dict[bytes, bytes]
    base_raw: dict[bytes, bytes]
    base_path: str


class OpenDirectory(NamedTuple):
    """A directory that is being captured, open in the source and in the payload (-1 if there is none)."""

    path: str
    here: int
    target: int
    known: KnownFiles


class CapturedFile(NamedTuple):
    """A captured file: its entry, the mark for the cache, and how many bytes were written."""

    entry: bytes
    mark: bytes
    stored: int = 0


class FirstLink(NamedTuple):
    """The first name of a file with several: its path and its entry."""

    path: str
    entry: bytes


class FileCapture:
    """Captures files, into a payload or (None) only to get their entries.

    `clean` is called with each open file before it is read. A file that changes between its scan and the end of its
    reading is noted as changed; with `retry`, it is read again, up to a limit.
    """

    def __init__(
        self,
        source: TreeWalker,
        payload: Payload | None,
        base: Base | None,
        *,
        now: int,
        clones: bool,
        retry: bool,
        stats: CaptureStats,
        clean: Callable[[int], None] | None,
    ) -> None:
        self._source, self._payload, self._base = source, payload, base
        self._now, self._clones, self._retry, self.stats = now, clones, retry, stats
        self._clean = clean
        self._first_links: dict[int, FirstLink] = {}

    def unchanged(self, directory: OpenDirectory, listing: Listing, marks: list[bytes]) -> dict[str, bytes]:
        """The entries, by name, of unchanged files that can be linked: usually most of them."""
        known = directory.known
        if self._base is None or self._payload is None or not known.base_raw:
            return {}
        same: dict[str, bytes] = {}
        size, before, raws, in_base = 0, known.marks, known.raw, known.base_raw
        others = self._not_to_link(listing)
        every = zip(names_in(listing.identity), listing.names, marks, listing.sizes_and_times(), strict=True)
        for encoded, name, mark, (length, _) in every:
            if before.get(encoded) != mark:
                continue
            raw = raws.get(encoded, b"")
            if is_plain_file(raw) and (raws is in_base or raw == in_base.get(encoded)) and name not in others:
                same[name] = raw
                size += length
        self.stats.files += len(same)
        self.stats.bytes += size
        return same

    def link_unchanged(self, directory: OpenDirectory, entries: dict[str, bytes]) -> None:
        """Link these files; copy them where no link is possible."""
        if self._base is None or not entries:
            return
        link, linked = calls.link, 0
        try:
            here = self._base.stored.enter(directory.known.base_path)
            for name in entries:
                link(name, name, src_dir_fd=here, dst_dir_fd=directory.target, follow_symlinks=False)
                linked += 1
        except OSError:
            for name, raw in [*entries.items()][linked:]:
                if not self._link_base(directory, name):
                    self._copy_again(directory, name, raw)

    def _not_to_link(self, listing: Listing) -> set[str]:
        """Files that have other names too, and files that could change again without a trace."""
        found: set[str] = set()
        if listing.linked:
            found |= {listing.names[at] for at, each in enumerate(listing.statuses) if each.st_nlink != 1}
        if is_recent(listing.newest, self._now):
            times = zip(listing.names, listing.sizes_and_times(), strict=True)
            found |= {name for name, (_, changed) in times if is_recent(changed, self._now)}
        return found

    def _copy_again(self, directory: OpenDirectory, name: str, raw: bytes) -> None:
        """Copy a file instead of linking it: it must still have the entry of the scan."""
        path = joined(directory.path, name)
        try:
            captured = self._copy(directory, name)
        except OSError as error:
            if error.errno not in GONE:
                raise unreadable(self._source.where(path), error) from error
            captured = CapturedFile(b"", NO_MARK)
        if captured.entry != raw:
            message = f"{shown(self._source.where(path))} changed while it was captured"
            raise ConsistencyUnavailable(message, paths=[shown(path)])
        self.stats.stored_bytes += captured.stored

    def capture(self, directory: OpenDirectory, name: str, status: os.stat_result, mark: bytes) -> tuple[bytes, bytes]:
        encoded, known = os.fsencode(name), directory.known
        recent = is_recent(status.st_ctime_ns, self._now)
        first = self._first_links.get(status.st_ino) if status.st_nlink > 1 else None
        raw = known.raw.get(encoded, b"") if known.marks.get(encoded) == mark else b""
        if raw[:1] == b"f":
            captured = self._known(directory, name, CapturedFile(without_first_link(raw), mark), first)
        else:
            captured = self._unknown(directory, name, status, first)
        entry = captured.entry
        if captured.mark != mark and not self._retry:
            self.stats.changed.append(joined(directory.path, name))
        if recent:
            self.stats.recent.append(RecentFile(directory.path, name, digest_of(entry)))
        if first is not None and is_same_file(entry, first.entry):
            entry = with_first_link(entry, os.fsencode(first.path))
        elif status.st_nlink > 1:
            self._first_links[status.st_ino] = FirstLink(joined(directory.path, name), entry)
        self.stats.files += 1
        self.stats.stored_bytes += captured.stored
        self.stats.bytes += size_of(entry)
        return entry, captured.mark

    def _known(self, directory: OpenDirectory, name: str, known: CapturedFile, first: FirstLink | None) -> CapturedFile:
        """Capture a file that equals its record in the cache."""
        if self._payload is None or self._link_first(directory, first, name, known.entry):
            return known
        if self._in_base(directory, name) == known.entry and self._link_base(directory, name):
            return known
        return self._copy(directory, name)

    def _unknown(
        self, directory: OpenDirectory, name: str, status: os.stat_result, first: FirstLink | None
    ) -> CapturedFile:
        """Capture a file that has to be read; link it if the base has the same."""
        if self._payload is None:
            return self._read(directory, name)
        if first is not None:
            captured = self._read(directory, name)
            if self._link_first(directory, first, name, captured.entry):
                return captured
        in_base = self._in_base(directory, name)
        if in_base and is_like(in_base, status):
            captured = self._read(directory, name, like=in_base)
            if captured.entry == in_base and self._link_base(directory, name):
                return captured
        return self._copy(directory, name)

    def _in_base(self, directory: OpenDirectory, name: str) -> bytes:
        raw = directory.known.base_raw.get(os.fsencode(name), b"")
        return without_first_link(raw) if raw[:1] == b"f" else b""

    def _read(self, directory: OpenDirectory, name: str, *, like: bytes = b"") -> CapturedFile:
        """Read a file; with `like`, return an empty entry at once if it cannot have that one."""
        reading = self._open(directory, name)
        try:
            status = _regular(reading)
            if like and like[:HEAD_OF_ENTRY] != head_of_entry(status):
                return CapturedFile(b"", NO_MARK)
            xattrs, lost = read_xattrs(reading)
            content = hash_file(reading, status.st_size)
            mark = _mark_after(reading, status)
        finally:
            close_quietly(reading)
        if not like:
            self.stats.lose(joined(directory.path, name), lost)
        return CapturedFile(_entry(meta_of(status), name, content, xattrs), mark)

    def _copy(self, directory: OpenDirectory, name: str) -> CapturedFile:
        """Copy a file; its entry is that of the copy."""
        for _ in range(_ATTEMPTS - 1):
            captured = self._copy_once(directory, name)
            if captured.mark != NO_MARK or not self._retry:
                return captured
            calls.unlink(name, dir_fd=directory.target)  # it changed meanwhile
        return self._copy_once(directory, name)

    def _copy_once(self, directory: OpenDirectory, name: str) -> CapturedFile:
        reading = self._open(directory, name)
        try:
            status = _regular(reading)
            xattrs, lost = read_xattrs(reading)
            meta = meta_of(status)
            try:
                content = self._write(reading, status, meta, directory.target, name, xattrs)
            except OSError as error:
                raise unwritable(self._where(directory, name), error) from error
            mark = _mark_after(reading, status)
        finally:
            close_quietly(reading)
        if lost:
            self.stats.lose(joined(directory.path, name), lost)
        return CapturedFile(_entry(meta, name, content, xattrs), mark, content.written)

    def _write(
        self, reading: int, status: os.stat_result, meta: Meta, target: int, name: str, xattrs: Xattrs
    ) -> Content:
        assert self._payload is not None
        attributes = self._payload.attributes
        writing = attributes.create(target, name, meta.mode)
        try:
            if self._clones and clone_file(reading, writing, status.st_size):
                content = self._hash_clone(reading, status, target, name)
            else:
                content = copy_file(reading, status, writing)
            attributes.finish_file(writing, meta, xattrs)
        finally:
            calls.close(writing)
        return content

    def _hash_clone(self, reading: int, status: os.stat_result, target: int, name: str) -> Content:
        """Hash the clone, by way of the source, which is in memory, unless the source may have changed since."""
        content = hash_file(reading, status.st_size)
        same = mark_of(calls.fstat(reading)) == mark_of(status)
        if same and not is_recent(status.st_ctime_ns, self._now):
            return content
        cloned = calls.open(name, READ, dir_fd=target)
        try:
            return hash_file(cloned, status.st_size)
        finally:
            close_quietly(cloned)

    def _open(self, directory: OpenDirectory, name: str) -> int:
        reading = calls.open(name, READ, dir_fd=directory.here)
        if self._clean is not None:
            try:
                self._clean(reading)
            except BaseException:
                close_quietly(reading)
                raise
        return reading

    def _link_base(self, directory: OpenDirectory, name: str) -> bool:
        """Link a file of the base; False if it has to be copied."""
        assert self._base is not None
        return self._link(self._base.stored, directory.known.base_path, name, directory, name)

    def _link_first(self, directory: OpenDirectory, first: FirstLink | None, name: str, entry: bytes) -> bool:
        """Link the first name of the same inode in the payload; False if the file changed since then."""
        assert self._payload is not None
        if first is None or not is_same_file(entry, first.entry):
            return False
        path, first_name = split(first.path)
        return self._link(self._payload.first_links(), path, first_name, directory, name)

    def _link(self, stored: TreeWalker | Stored, path: str, old_name: str, directory: OpenDirectory, name: str) -> bool:
        try:
            here = stored.enter(path)
            calls.link(old_name, name, src_dir_fd=here, dst_dir_fd=directory.target, follow_symlinks=False)
        except OSError as error:
            if error.errno in NO_LINK:
                return False
            raise unwritable(self._where(directory, name), error) from error
        return True

    def _where(self, directory: OpenDirectory, name: str) -> str:
        walker = self._source if self._payload is None else self._payload.walker
        return walker.where(directory.path, name)


def _regular(descriptor: int) -> os.stat_result:
    status = calls.fstat(descriptor)
    if not stat.S_ISREG(status.st_mode):
        raise FileNotFoundError(errno.ENOENT, "no longer a file")
    return status


def _mark_after(reading: int, status: os.stat_result) -> bytes:
    """The mark of a file that was read; `NO_MARK` if it changed meanwhile."""
    mark = mark_of(status)
    return mark if mark_of(calls.fstat(reading)) == mark else NO_MARK


def _entry(meta: Meta, name: str, content: Content, xattrs: Xattrs) -> bytes:
    extras = encode_extras(xattrs=xattrs) if xattrs else b""
    return encode_entry(meta, os.fsencode(name), content.size, content.digest, extras)
