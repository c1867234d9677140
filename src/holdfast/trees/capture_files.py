"""Taking the files of a source, one by one: each is read once, and linked or copied into a payload."""

from __future__ import annotations

import errno
import os
import stat
from collections.abc import Iterator
from typing import NamedTuple

from holdfast.errors import ConsistencyUnavailable
from holdfast.fs import calls
from holdfast.fs.directory import close_quietly
from holdfast.trees.copy import Content, copy_file, hash_file
from holdfast.trees.link_worker import LinkWorker, Order
from holdfast.trees.manifest import (
    Manifest,
    Meta,
    Xattrs,
    digest_of,
    encode_entry,
    encode_extras,
    encode_xattrs,
    is_like,
    is_plain_file,
    is_same_file,
    size_of,
    with_first_link,
    without_first_link,
)
from holdfast.trees.payload import (
    HEAD_OF_ENTRY,
    READ,
    Payload,
    clone_file,
    head_of_entry,
    meta_of,
    read_xattrs,
)
from holdfast.trees.scan import (
    NO_MARK,
    CaptureStats,
    Listing,
    Recent,
    TreeWalker,
    is_recent,
    joined,
    mark_of,
    shown,
    split,
    unreadable,
    unwritable,
)
from holdfast.trees.shared_dirs import Stored

_WORTH_A_PROCESS = 32  # directories that did change
_FEW = 4


class LinkBatch(NamedTuple):
    """Files of one directory of the payload that shall be links to the base's; their entries, by name.

    With `time`, nothing more is put into it then, and that is all that it lacks.
    """

    path: str
    base_path: str
    files: dict[str, bytes]
    time: int | None


class Links:
    """Makes links, now or soon; what could not be linked is told in the end."""

    def __init__(self, base: Stored, payload: str) -> None:
        self._base, self._payload = base, payload
        self._count = 0
        self._process: LinkWorker | None = None
        self._given: list[LinkBatch] = []
        self._failed: list[LinkBatch] = []

    def make(self, wanted: LinkBatch, target: int) -> bool:
        """Link files into the open directory `target` of the payload; whether that will get its time, too."""
        self._count += 1
        if self._count == _WORTH_A_PROCESS:
            self._process = LinkWorker.start(self._payload)
        if self._process is not None and len(wanted.files) >= _FEW:
            source = self._base.where(wanted.base_path)
            if self._process.try_give(Order(source, wanted.path, [*wanted.files], wanted.time)):
                self._given.append(wanted)
                return wanted.time is not None
        link = calls.link
        try:
            here = self._base.enter(wanted.base_path)
            for name in wanted.files:
                link(name, name, src_dir_fd=here, dst_dir_fd=target, follow_symlinks=False)
        except OSError:
            self._failed.append(wanted)
        return False

    def missing(self) -> Iterator[LinkBatch]:
        """Wait until all is done that can be; what is not linked, or only in part."""
        if self._process is not None:
            self._failed += [self._given[number] for number in self._process.failed()]
            self._process = None  # not before: who is interrupted meanwhile ends it
        yield from self._failed

    def close(self) -> None:
        """End what is under way."""
        if self._process is not None:
            self._process.kill()


def is_there(directory: int, name: str) -> bool:
    """Whether there is something of this name in an open directory."""
    try:
        calls.stat(name, dir_fd=directory, follow_symlinks=False)
    except FileNotFoundError:
        return False
    return True


GONE = (errno.ENOENT, errno.ENOTDIR, errno.ELOOP, errno.ESTALE)
NO_LINK = (errno.EMLINK, errno.EXDEV, errno.EPERM, errno.EACCES, errno.EOPNOTSUPP, errno.ENOENT)
_ATTEMPTS = 3


class Base(NamedTuple):
    """The snapshot that unchanged directories are shared with, and unchanged files linked from."""

    manifest: Manifest
    stored: Stored


class KnownFiles(NamedTuple):
    """What is known of the files of one directory: by the cache, and in the base."""

    marks: dict[bytes, bytes]
    raw: dict[bytes, bytes]
    base_raw: dict[bytes, bytes]
    base_path: str


class OpenSource(NamedTuple):
    """A directory that is being taken: where it is, open here and (or -1) in the payload."""

    path: str
    here: int
    target: int
    known: KnownFiles


class CapturedFile(NamedTuple):
    """A file that was taken: its entry, the mark to know it by again, and what was written anew."""

    entry: bytes
    mark: bytes
    stored: int = 0


class First(NamedTuple):
    """A file with several names, under the one that was met first: where it is, and its entry."""

    path: str
    entry: bytes


class FileCapture:
    """Takes files, into a payload or (None) only to know them.

    With `retry`, a file that changes while it is read is read again, up to a limit.
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
        tally: CaptureStats,
    ) -> None:
        self._source = source
        self._payload = payload
        self._base = base
        self._now = now
        self._clones = clones
        self._retry = retry
        self._tally = tally
        self._links = None if base is None or payload is None else Links(base.stored, payload.way.root)
        self._first_links: dict[int, First] = {}

    def unchanged(self, place: OpenSource, listing: Listing, marks: list[bytes]) -> dict[str, bytes]:
        """What most files of a directory are: such as did not change, and can be linked. Entries, by name."""
        known = place.known
        if self._links is None or not known.base_raw:
            return {}
        same: dict[str, bytes] = {}
        size, before, raws, in_base = 0, known.marks, known.raw, known.base_raw
        others = self._not_to_link(listing)
        every = zip(listing.encoded_names(), listing.names, marks, listing.sizes_and_times(), strict=True)
        for encoded, name, mark, (length, _) in every:
            if before.get(encoded) != mark:
                continue
            raw = raws.get(encoded, b"")
            if is_plain_file(raw) and (raws is in_base or raw == in_base.get(encoded)) and name not in others:
                same[name] = raw
                size += length
        self._tally.files += len(same)
        self._tally.bytes += size
        return same

    def link_unchanged(self, place: OpenSource, same: dict[str, bytes], own: Meta, xattrs: Xattrs) -> None:
        """Link these files, after all else is in the directory; `own` and `xattrs` are the directory's."""
        if self._links is None or self._payload is None or not same:
            return
        time = own.mtime_ns if self._payload.attributes.lacks_only_time(own, xattrs) else None
        if self._links.make(LinkBatch(place.path, place.known.base_path, same, time), place.target):
            self._payload.complete.add(place.path)

    def _not_to_link(self, listing: Listing) -> set[str]:
        """Files that have other names, and such as could change again without a trace."""
        found: set[str] = set()
        if listing.linked:
            found |= {listing.names[at] for at, each in enumerate(listing.statuses) if each.st_nlink != 1}
        if is_recent(listing.newest, self._now):
            times = zip(listing.names, listing.sizes_and_times(), strict=True)
            found |= {name for name, (_, changed) in times if is_recent(changed, self._now)}
        return found

    def finish(self) -> None:
        """Wait until all links are made. Where there can be none, there is a copy."""
        if self._links is None or self._payload is None:
            return
        for wanted in self._links.missing():
            self._payload.complete.discard(wanted.path)
            with TreeWalker(self._source.root) as way:
                for name, raw in wanted.files.items():
                    target = self._payload.enter(wanted.path)
                    if is_there(target, name):
                        continue
                    try:
                        here = way.enter(wanted.path)
                    except OSError as error:
                        raise unreadable(way.where(wanted.path), error) from error
                    place = OpenSource(wanted.path, here, target, KnownFiles({}, {}, {}, wanted.base_path))
                    if not self._link_base(place, name):
                        self._copy_again(place, name, raw)

    def _copy_again(self, place: OpenSource, name: str, raw: bytes) -> None:
        """Copy a file that was to be linked: it must be what it was when we looked at it."""
        path = joined(place.path, name)
        try:
            taken = self._copy(place, name)
        except OSError as error:
            if error.errno not in GONE:
                raise unreadable(self._source.where(path), error) from error
            taken = CapturedFile(b"", NO_MARK)
        if taken.entry != raw:
            where = self._source.where(path)
            raise ConsistencyUnavailable(f"{shown(where)} changed while it was captured", paths=[shown(path)])
        self._tally.stored_bytes += taken.stored

    def take(self, place: OpenSource, name: str, status: os.stat_result, mark: bytes) -> tuple[bytes, bytes]:
        """The entry of one file, and the mark to remember it by."""
        encoded, known = os.fsencode(name), place.known
        recent = is_recent(status.st_ctime_ns, self._now)
        first = self._first_links.get(status.st_ino) if status.st_nlink > 1 else None
        raw = known.raw.get(encoded, b"") if known.marks.get(encoded) == mark else b""
        if raw[:1] == b"f":
            taken = self._known(place, name, CapturedFile(without_first_link(raw), mark), first)
        else:
            taken = self._unknown(place, name, status, first)
        entry = taken.entry
        if recent:
            self._tally.recent.append(Recent(place.path, name, digest_of(entry)))
        if first is not None and is_same_file(entry, first.entry):
            entry = with_first_link(entry, os.fsencode(first.path))
        elif status.st_nlink > 1:
            self._first_links[status.st_ino] = First(joined(place.path, name), entry)
        self._tally.files += 1
        self._tally.stored_bytes += taken.stored
        self._tally.bytes += size_of(entry)
        return entry, taken.mark

    def close(self) -> None:
        """Let go of what makes the links."""
        if self._links is not None:
            self._links.close()

    # --- Known or not ----------------------------------------------------------------------------------

    def _known(self, place: OpenSource, name: str, known: CapturedFile, first: First | None) -> CapturedFile:
        """A file that is as it was the last time."""
        if self._payload is None or self._link_first(place, first, name, known.entry):
            return known
        if self._in_base(place, name) == known.entry and self._link_base(place, name):
            return known
        taken = self._copy(place, name)
        if taken.entry != known.entry:
            self._tally.changed.append(joined(place.path, name))
        return taken

    def _unknown(
        self, place: OpenSource, name: str, status: os.stat_result, first: First | None
    ) -> CapturedFile:
        """A file that has to be read. If it turns out to be in the base, it is linked all the same."""
        if self._payload is None:
            return self._read(place, name)
        if first is not None:
            taken = self._read(place, name)
            if self._link_first(place, first, name, taken.entry):
                return taken
        in_base = self._in_base(place, name)
        if in_base and is_like(in_base, status):
            taken = self._read(place, name, like=in_base)
            if taken.entry == in_base and self._link_base(place, name):
                return taken
        return self._copy(place, name)

    def _in_base(self, place: OpenSource, name: str) -> bytes:
        raw = place.known.base_raw.get(os.fsencode(name), b"")
        return without_first_link(raw) if raw[:1] == b"f" else b""

    # --- Reading and copying ---------------------------------------------------------------------------

    def _read(self, place: OpenSource, name: str, *, like: bytes = b"") -> CapturedFile:
        """Read a file; it is not read, and has no entry, if it cannot have the entry `like`."""
        reading = calls.open(name, READ, dir_fd=place.here)
        try:
            status = _regular(reading)
            if like and like[:HEAD_OF_ENTRY] != head_of_entry(status):
                return CapturedFile(b"", NO_MARK)
            xattrs, lost = read_xattrs(reading)
            content = hash_file(reading, status.st_size)
            mark = self._mark_after(reading, status)
        finally:
            close_quietly(reading)
        if not like:
            self._tally.lose(joined(place.path, name), lost)
        return CapturedFile(_entry(meta_of(status), name, content, xattrs), mark)

    def _copy(self, place: OpenSource, name: str) -> CapturedFile:
        """Copy a file; its entry is that of what was really copied."""
        for _ in range(_ATTEMPTS - 1):
            taken = self._copy_once(place, name)
            if taken.mark != NO_MARK:
                return taken
            calls.unlink(name, dir_fd=place.target)  # it changed meanwhile: once more
        return self._copy_once(place, name)

    def _copy_once(self, place: OpenSource, name: str) -> CapturedFile:
        reading = calls.open(name, READ, dir_fd=place.here)
        try:
            status = _regular(reading)
            xattrs, lost = read_xattrs(reading)
            meta = meta_of(status)
            try:
                content = self._write(reading, status, meta, place.target, name, xattrs)
            except OSError as error:
                raise unwritable(self._where(place, name), error) from error
            mark = self._mark_after(reading, status)
        finally:
            close_quietly(reading)
        if lost:
            self._tally.lose(joined(place.path, name), lost)
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
        """Hash what was cloned: by the source, which is in memory, unless it may have changed since."""
        content = hash_file(reading, status.st_size)
        same = mark_of(calls.fstat(reading)) == mark_of(status)
        if same and not is_recent(status.st_ctime_ns, self._now):
            return content
        cloned = calls.open(name, READ, dir_fd=target)
        try:
            return hash_file(cloned, status.st_size)
        finally:
            close_quietly(cloned)

    def _mark_after(self, reading: int, status: os.stat_result) -> bytes:
        """The mark of a file that was read; none if it changed meanwhile.

        A quiesced capture finds that out for all files at once, in its own way.
        """
        mark = mark_of(status)
        if self._retry and mark_of(calls.fstat(reading)) != mark:
            return NO_MARK
        return mark

    # --- Links -----------------------------------------------------------------------------------------

    def _link_base(self, place: OpenSource, name: str) -> bool:
        """Link a file from the base; where that cannot be, it has to be copied."""
        assert self._base is not None
        try:
            here = self._base.stored.enter(place.known.base_path)
            calls.link(name, name, src_dir_fd=here, dst_dir_fd=place.target, follow_symlinks=False)
        except OSError as error:
            if error.errno in NO_LINK:
                return False
            raise unwritable(self._where(place, name), error) from error
        return True

    def _link_first(self, place: OpenSource, first: First | None, name: str, entry: bytes) -> bool:
        """Link the first name that the same inode has in the payload, unless it has changed since then."""
        assert self._payload is not None
        if first is None or not is_same_file(entry, first.entry):
            return False
        directory, first_name = split(first.path)
        try:
            with TreeWalker(self._payload.way.root) as way:
                here = way.enter(directory)
                calls.link(first_name, name, src_dir_fd=here, dst_dir_fd=place.target, follow_symlinks=False)
        except OSError as error:
            if error.errno in NO_LINK:
                return False
            raise unwritable(self._where(place, name), error) from error
        return True

    def _where(self, place: OpenSource, name: str) -> str:
        way = self._source if self._payload is None else self._payload.way
        return way.where(place.path, name)


def _regular(descriptor: int) -> os.stat_result:
    status = calls.fstat(descriptor)
    if not stat.S_ISREG(status.st_mode):
        raise FileNotFoundError(errno.ENOENT, "it is no file any more")
    return status


def _entry(meta: Meta, name: str, content: Content, xattrs: Xattrs) -> bytes:
    extras = encode_extras(xattrs=encode_xattrs(xattrs)) if xattrs else b""
    return encode_entry(meta, os.fsencode(name), content.size, content.digest, extras)
