"""Taking a source in, directory by directory: what is known to be unchanged is linked, the rest is read."""

from __future__ import annotations

import errno
import os
import stat
from collections.abc import Callable
from typing import NamedTuple

from holdfast.errors import ConsistencyUnavailable
from holdfast.fs import calls
from holdfast.fs.directory import close_quietly
from holdfast.fs.trees.attributes import Attributes
from holdfast.fs.trees.content import (
    HEAD_OF_ENTRY,
    KIND_WORDS,
    READ,
    Content,
    clone_file,
    copy_file,
    hash_file,
    head_of_entry,
    link_path,
    meta_of,
    read_xattrs,
)
from holdfast.fs.trees.descent import Descent, joined, shown, split, unreadable, unwritable
from holdfast.fs.trees.manifest import (
    DIGEST,
    ENTRY,
    Manifest,
    Xattrs,
    decode_entry,
    decode_extras,
    digest_of,
    encode_body,
    encode_entry,
    encode_extras,
    encode_xattrs,
    raw_entries,
)
from holdfast.fs.trees.scan import (
    NO_MARK,
    Listing,
    device_number,
    is_recent,
    look,
    mark_of,
    marks_by_name,
    without_recent,
)
from holdfast.fs.trees.stat_cache import StatCache

GONE = (errno.ENOENT, errno.ENOTDIR, errno.ELOOP, errno.ESTALE)
_NO_LINK = (errno.EMLINK, errno.EXDEV, errno.EPERM, errno.EACCES, errno.EOPNOTSUPP, errno.ENOENT)
_ATTEMPTS = 3

Progress = Callable[[int, int], None]
"""Called now and then with the number of files and of bytes that have been dealt with."""


class Taken(NamedTuple):
    """A directory as it was taken in. With `link_from`, its files are still to be linked from there."""

    path: str
    identity: bytes
    kept: bytes  # the identity for the cache
    body: bytes
    link_from: str | None


class Recent(NamedTuple):
    """A file that changed so shortly before it was read that its times cannot show another change."""

    path: str
    name: str
    digest: bytes


class Base(NamedTuple):
    """The snapshot that unchanged files are linked from."""

    manifest: Manifest
    payload: Descent


class Known(NamedTuple):
    """What is known of the files of one directory: by the cache, and in the base."""

    marks: dict[bytes, bytes]
    raw: dict[bytes, bytes]
    base_raw: dict[bytes, bytes]
    base_path: str


class Tally:
    """What was found on the way."""

    def __init__(self, progress: Progress | None) -> None:
        self.files = self.directories = self.bytes = self.stored_bytes = 0
        self.not_preserved: list[str] = []
        self.special: list[str] = []
        self.changed: list[str] = []
        self.recent: list[Recent] = []
        self._progress = progress

    def report(self) -> None:
        """Tell who wants to know how far it is."""
        if self._progress is not None:
            self._progress(self.files, self.bytes)


class Intake:
    """Takes directories in: into a payload, or only to know them (`payload` is None).

    With `retry`, a file that changes while it is read is read again, up to a limit; without, it is the
    second look that finds out.
    """

    def __init__(
        self,
        source: Descent,
        *,
        payload: Descent | None,
        attributes: Attributes | None,
        base: Base | None,
        cache: StatCache,
        device: int,
        mounts: frozenset[str],
        now: int,
        clones: bool,
        retry: bool,
        tally: Tally,
    ) -> None:
        self.source = source
        self.payload = payload
        self.attributes = attributes
        self.base = base
        self.cache = cache
        self.device = device
        self.mounts = mounts
        self.now = now
        self.clones = clones
        self.retry = retry
        self.tally = tally
        self._first_links: dict[int, str] = {}

    # --- One directory -------------------------------------------------------------------------------

    def take(self, path: str) -> tuple[Taken | None, list[str]]:
        """Take in one directory without what is below it; return it and the directories in it."""
        try:
            here = self.source.enter(path)
            own = calls.fstat(here)
            if own.st_dev != self.device or path in self.mounts:
                return self._mount_point(path, own), []
            listing = look(here)
        except OSError as error:
            if error.errno not in GONE:
                raise unreadable(self.source.where(path), error) from error
            self.tally.changed.append(path)
            return None, []
        self.tally.directories += 1
        self._make_directories(path, listing.directories)
        taken = self._unchanged(path, listing) or self._read(path, here, listing)
        self.tally.report()
        return taken, listing.directories

    def _mount_point(self, path: str, own: os.stat_result) -> Taken:
        self.tally.not_preserved.append(f"{shown(path)}: another file system is mounted there")
        self.tally.directories += 1
        body = encode_body(meta_of(own)._replace(kind=b"m"), b"", [])
        return Taken(path, b"", b"", body, None)

    def _make_directories(self, path: str, names: list[str]) -> None:
        if self.payload is None or not names:
            return
        try:
            here = self.payload.enter(path)
            for name in names:
                calls.mkdir(name, dir_fd=here)
        except OSError as error:
            raise unwritable(self.payload.where(path), error) from error

    def _unchanged(self, path: str, listing: Listing) -> Taken | None:
        """A directory whose record is known from the last time, and whose files can be linked as a whole."""
        known = self.cache.known(listing.own.st_ino)
        if known is None or listing.linked or known.identity != listing.identity:
            return None
        link_from: str | None = None
        if self.payload is not None:
            link_from = self._same_in_base(path, known.body, known.path)
            if link_from is None and listing.names:
                return None
        self.tally.files += len(listing.names)
        self.tally.bytes += sum([each.st_size for each in listing.statuses])
        self._note_specials(path, listing)
        return Taken(path, listing.identity, listing.identity, known.body, link_from)

    def _same_in_base(self, path: str, body: bytes, known_path: bytes) -> str | None:
        if self.base is None:
            return None
        for candidate in (os.fsencode(path), known_path):
            if self.base.manifest.body(candidate) == body:
                return os.fsdecode(candidate)
        return None

    def _note_specials(self, path: str, listing: Listing) -> None:
        for name, status in zip(listing.names, listing.statuses, strict=True):
            kind = status.st_mode & 0o170000
            if kind != stat.S_IFREG and kind != stat.S_IFLNK:
                word = KIND_WORDS.get(meta_of(status).kind, "entry of an unknown kind")
                self.tally.special.append(f"{shown(joined(path, name))}: {word}")

    # --- What has to be read ---------------------------------------------------------------------------

    def _read(self, path: str, here: int, listing: Listing) -> Taken:
        known = self._known(path, listing)
        target = -1 if self.payload is None else self._enter_payload(path)
        entries: list[bytes] = []
        kept: list[bytes] = []
        for name, status, mark in zip(listing.names, listing.statuses, listing.marks(), strict=True):
            entry, remembered = self._entry(path, here, target, name, status, mark, known)
            if entry:
                entries.append(entry)
            kept.append(remembered)
        xattrs, lost = read_xattrs(here)
        self._note_lost(path, lost)
        extras = encode_extras(xattrs=encode_xattrs(xattrs))
        meta = meta_of(listing.own)
        body = encode_body(meta, extras, entries)
        if self.attributes is not None:
            self._in_payload(path, lambda attributes: attributes.finish_directory(target, meta, xattrs))
        identity = listing.identity
        head = identity[: len(identity) - len(NO_MARK) * len(kept)]
        blotted = without_recent(head + b"".join(kept), listing, self.now)
        return Taken(path, identity, blotted, body, None)

    def _enter_payload(self, path: str) -> int:
        assert self.payload is not None
        try:
            return self.payload.enter(path)
        except OSError as error:
            raise unwritable(self.payload.where(path), error) from error

    def _in_payload(self, path: str, change: Callable[[Attributes], object]) -> None:
        assert self.attributes is not None
        try:
            change(self.attributes)
        except OSError as error:
            raise unwritable(self._shown_target(path, ""), error) from error

    def _known(self, path: str, listing: Listing) -> Known:
        known = self.cache.known(listing.own.st_ino)
        marks: dict[bytes, bytes] = {}
        raw: dict[bytes, bytes] = {}
        paths = [os.fsencode(path)]
        if known is not None:
            marks, raw = marks_by_name(known.identity), raw_entries(known.body)
            paths.append(known.path)
        for candidate in paths if self.base is not None else []:
            body = self.base.manifest.body(candidate) if self.base else None
            if body is not None:
                return Known(marks, raw, raw_entries(body), os.fsdecode(candidate))
        return Known(marks, raw, {}, "")

    def _entry(
        self, path: str, here: int, target: int, name: str, status: os.stat_result, mark: bytes, known: Known
    ) -> tuple[bytes, bytes]:
        """The entry of one name and the mark to remember it by; no entry if it is gone."""
        try:
            if stat.S_ISREG(status.st_mode):
                return self._file(path, here, target, name, status, mark, known)
            if stat.S_ISLNK(status.st_mode):
                return self._symlink(path, here, target, name, status), mark
            return self._special(path, name, status), mark
        except OSError as error:
            if error.errno not in GONE:
                raise unreadable(self.source.where(path, name), error) from error
            self.tally.changed.append(joined(path, name))
            return b"", NO_MARK

    def _symlink(self, path: str, here: int, target: int, name: str, status: os.stat_result) -> bytes:
        points_to = calls.readlink(name, dir_fd=here)
        xattrs, _ = read_xattrs(link_path(here, name))
        meta = meta_of(status)
        if self.attributes is not None:
            place = joined(path, name)
            self._in_payload(place, lambda _: calls.symlink(points_to, name, dir_fd=target))
            self._in_payload(place, lambda attributes: attributes.finish_other(target, name, meta, xattrs))
        self.tally.files += 1
        extras = encode_extras(target=os.fsencode(points_to), xattrs=encode_xattrs(xattrs))
        return encode_entry(meta, os.fsencode(name), extras=extras)

    def _special(self, path: str, name: str, status: os.stat_result) -> bytes:
        """A fifo, a socket or a device: recorded, never opened."""
        meta = meta_of(status)
        word = KIND_WORDS.get(meta.kind, "entry of an unknown kind")
        self.tally.special.append(f"{shown(joined(path, name))}: {word}")
        self.tally.files += 1
        extras = encode_extras(device=device_number(status)) if meta.kind in (b"c", b"b") else b""
        return encode_entry(meta, os.fsencode(name), extras=extras)

    # --- Files -----------------------------------------------------------------------------------------

    def _file(
        self, path: str, here: int, target: int, name: str, status: os.stat_result, mark: bytes, known: Known
    ) -> tuple[bytes, bytes]:
        encoded = os.fsencode(name)
        first = self._first_links.get(status.st_ino) if status.st_nlink > 1 else None
        raw = known.raw.get(encoded) if known.marks.get(encoded) == mark else None
        if raw is not None and raw[:1] == b"f":
            raw, mark, stored = self._store_known(path, here, target, name, raw, mark, known, first)
        else:
            raw, mark, stored = self._store_unknown(path, here, target, name, known, first)
        if not raw:
            return b"", NO_MARK
        if is_recent(status.st_ctime_ns, self.now):
            self.tally.recent.append(Recent(path, name, digest_of(raw)))
        if first is not None:
            raw = _with_link(raw, encoded, os.fsencode(first))
        elif status.st_nlink > 1:
            self._first_links[status.st_ino] = joined(path, name)
        self.tally.files += 1
        self.tally.stored_bytes += stored
        self.tally.bytes += decode_entry(b"", raw).size
        return raw, mark

    def _store_known(
        self,
        path: str,
        here: int,
        target: int,
        name: str,
        raw: bytes,
        mark: bytes,
        known: Known,
        first: str | None,
    ) -> tuple[bytes, bytes, int]:
        """Put a file whose entry is known into the payload."""
        encoded = os.fsencode(name)
        raw = _without_link(raw, encoded)
        if self.attributes is None or (first is not None and self._link_first(first, target, name)):
            return raw, mark, 0
        in_base = _without_link(known.base_raw.get(encoded, b""), encoded)
        if in_base == raw and self._link_base(known.base_path, target, name):
            return raw, mark, 0
        entry, mark, stored = self._copy(path, here, target, name)
        if entry != raw:
            self.tally.changed.append(joined(path, name))
        return entry, mark, stored

    def _store_unknown(
        self, path: str, here: int, target: int, name: str, known: Known, first: str | None
    ) -> tuple[bytes, bytes, int]:
        """Read a file, and put it into the payload: by a link if it turns out to be in the base."""
        if first is not None and self.attributes is not None and self._link_first(first, target, name):
            entry, mark, _ = self._read_only(path, here, name)
            return entry, mark, 0
        encoded = os.fsencode(name)
        in_base = _without_link(known.base_raw.get(encoded, b""), encoded)
        if self.attributes is None or in_base:
            entry, mark, _ = self._read_only(path, here, name, like=in_base)
            if self.attributes is None:
                return entry, mark, 0
            if entry == in_base and self._link_base(known.base_path, target, name):
                return entry, mark, 0
        return self._copy(path, here, target, name)

    def _read_only(self, path: str, here: int, name: str, *, like: bytes = b"") -> tuple[bytes, bytes, int]:
        """The entry of a file; nothing if it cannot be the entry `like`, so that reading it is spared."""
        reading = calls.open(name, READ, dir_fd=here)
        try:
            status = _regular(reading)
            if like and like[:HEAD_OF_ENTRY] != head_of_entry(status):
                return b"", NO_MARK, 0
            xattrs, lost = read_xattrs(reading)
            content = hash_file(reading, status.st_size)
            mark = self._mark_after(reading, status)
        finally:
            close_quietly(reading)
        if self.attributes is None:
            self._note_lost(joined(path, name), lost)
        return _file_entry(status, name, content, xattrs), mark, 0

    def _copy(self, path: str, here: int, target: int, name: str) -> tuple[bytes, bytes, int]:
        """Copy a file, and its entry with what was really copied."""
        for attempt in range(_ATTEMPTS):
            entry, mark, stored = self._copy_once(path, here, target, name)
            if mark != NO_MARK or attempt == _ATTEMPTS - 1:
                break
            calls.unlink(name, dir_fd=target)  # it changed meanwhile: once more
        return entry, mark, stored

    def _copy_once(self, path: str, here: int, target: int, name: str) -> tuple[bytes, bytes, int]:
        assert self.attributes is not None
        reading = calls.open(name, READ, dir_fd=here)
        try:
            status = _regular(reading)
            xattrs, lost = read_xattrs(reading)
            try:
                content = self._write(reading, status, target, name, xattrs)
            except OSError as error:
                raise unwritable(self._shown_target(path, name), error) from error
            mark = self._mark_after(reading, status)
        finally:
            close_quietly(reading)
        self._note_lost(joined(path, name), lost)
        return _file_entry(status, name, content, xattrs), mark, content.written

    def _write(self, reading: int, status: os.stat_result, target: int, name: str, xattrs: Xattrs) -> Content:
        assert self.attributes is not None
        meta = meta_of(status)
        writing = self.attributes.create(target, name, meta.mode)
        try:
            if self.clones and clone_file(reading, writing, status.st_size):
                content = self._hash_clone(reading, status, target, name)
            else:
                content = copy_file(reading, status, writing)
            self.attributes.finish_file(writing, meta, xattrs)
        finally:
            calls.close(writing)
        return content

    def _hash_clone(self, reading: int, status: os.stat_result, target: int, name: str) -> Content:
        """Hash what was cloned: by the source, which is in memory, unless it may have changed since."""
        content = hash_file(reading, status.st_size)
        same = mark_of(calls.fstat(reading)) == mark_of(status)
        if same and not is_recent(status.st_ctime_ns, self.now):
            return content
        cloned = calls.open(name, READ, dir_fd=target)
        try:
            return hash_file(cloned, status.st_size)
        finally:
            close_quietly(cloned)

    def _mark_after(self, reading: int, status: os.stat_result) -> bytes:
        """The mark of a file that was read, unless it changed meanwhile and somebody cares now."""
        mark = mark_of(status)
        if self.retry and mark_of(calls.fstat(reading)) != mark:
            return NO_MARK
        return mark

    def copy_again(self, target: int, path: str, name: str, raw: bytes) -> None:
        """Copy a file that was to be linked but that the base has lost."""
        try:
            entry, _, stored = self._copy(path, self.source.enter(path), target, name)
        except OSError as error:
            if error.errno not in GONE:
                raise unreadable(self.source.where(path, name), error) from error
            entry = b""
        if entry != raw:
            raise ConsistencyUnavailable(
                f"{self.source.where(path, name)} changed while it was captured", paths=[joined(path, name)]
            )
        self.tally.stored_bytes += stored

    # --- Links -----------------------------------------------------------------------------------------

    def _link_base(self, base_path: str, target: int, name: str) -> bool:
        """Link a file from the base; where that cannot be, it has to be copied."""
        assert self.base is not None
        try:
            here = self.base.payload.enter(base_path)
            calls.link(name, name, src_dir_fd=here, dst_dir_fd=target, follow_symlinks=False)
        except OSError as error:
            if error.errno in _NO_LINK:
                return False
            raise unwritable(self._shown_target(base_path, name), error) from error
        return True

    def _link_first(self, first: str, target: int, name: str) -> bool:
        """Link the first name that the same inode has in the payload."""
        assert self.payload is not None
        directory, first_name = split(first)
        try:
            with Descent(self.payload.root) as way:
                here = way.enter(directory)
                calls.link(first_name, name, src_dir_fd=here, dst_dir_fd=target, follow_symlinks=False)
        except OSError as error:
            if error.errno in _NO_LINK:
                return False
            raise unwritable(self._shown_target(directory, name), error) from error
        return True

    def _shown_target(self, path: str, name: str) -> str:
        return self.source.where(path, name) if self.payload is None else self.payload.where(path, name)

    def _note_lost(self, path: str, lost: list[str]) -> None:
        self.tally.not_preserved += [f"{shown(path) or '.'}: {each}" for each in lost]


def _regular(descriptor: int) -> os.stat_result:
    status = calls.fstat(descriptor)
    if not stat.S_ISREG(status.st_mode):
        raise FileNotFoundError(errno.ENOENT, "it is no file any more")
    return status


def _file_entry(status: os.stat_result, name: str, content: Content, xattrs: Xattrs) -> bytes:
    extras = encode_extras(xattrs=encode_xattrs(xattrs)) if xattrs else b""
    return encode_entry(meta_of(status), os.fsencode(name), content.size, content.digest, extras)


def _without_link(raw: bytes, name: bytes) -> bytes:
    """A file's entry as if it had no other name."""
    if not raw or b"H" not in (extras := decode_extras(raw[_extras_at(raw, name) :])):
        return raw
    return _replaced_extras(raw, name, encode_extras(xattrs=extras.get(b"X", b"")))


def _with_link(raw: bytes, name: bytes, first: bytes) -> bytes:
    """A file's entry as one whose inode was met before, under the path `first`."""
    extras = decode_extras(raw[_extras_at(raw, name) :])
    return _replaced_extras(raw, name, encode_extras(first_link=first, xattrs=extras.get(b"X", b"")))


def _replaced_extras(raw: bytes, name: bytes, extras: bytes) -> bytes:
    end = _extras_at(raw, name)
    length = len(extras).to_bytes(4, "little")
    return raw[: ENTRY.size - 4] + length + raw[ENTRY.size : end] + extras


def _extras_at(raw: bytes, name: bytes) -> int:
    return ENTRY.size + len(name) + (DIGEST if raw[:1] == b"f" else 0)
