"""Restoring a tree to an independent, writable directory, and swapping two directories."""

from __future__ import annotations

import errno
import os
import stat
import time
from collections.abc import Iterator
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import NamedTuple

from holdfast.errors import AlreadyExists, Corrupt, ExchangeUnavailable, NotFound, PartialSnapshot
from holdfast.fs import calls
from holdfast.fs.directory import although_read_only, entry_exists, io_failure, parent_of
from holdfast.trees.copy import NewFile, place_file
from holdfast.trees.engines import times_tell
from holdfast.trees.manifest import (
    PAYLOAD,
    READY,
    Manifest,
    ManifestEntry,
    decode_entry,
    digest_of,
    directory_of,
    is_plain_file,
    plain_file,
    raw_entries,
)
from holdfast.trees.payload import HEAD_OF_BODY, HEAD_OF_ENTRY, KIND_WORDS, Attributes, head_of_body, head_of_entry
from holdfast.trees.results import Materialised
from holdfast.trees.scan import KnownDirectory, Listing, Progress, scan_directory, without_recent, write_cache
from holdfast.trees.shared_dirs import Stored, ready_fields
from holdfast.trees.walker import NO_LINK, TreeWalker, joined, shown, split, unreadable, unwritable, writing

_A_TICK = 0.03
_HINT = "Restore another snapshot, or restore this one from a backup."
_MOST_NAMED = 5
_NO_EXCHANGE = (errno.ENOSYS, errno.EINVAL, errno.EOPNOTSUPP, errno.ENOTTY)
_KINDS = {"p": 0o010000, "s": 0o140000, "c": 0o020000, "b": 0o060000}


def materialise(
    tree: Path,
    destination: Path,
    *,
    only: bytes | None = None,
    cache: Path | None = None,
    progress: Progress | None = None,
) -> Materialised:
    """Create `destination` with the content of the tree, or of its path `only`.

    It shares nothing with the snapshot except blocks that the filesystem copies on write. `cache` is written for the
    new directory, so that its first capture need not read it. Not synced.

    Everything is compared with the manifest, and the manifest with `.READY`. Files that are missing or have other
    content are left out; if there are any, `Corrupt` is raised when the rest is in place.
    """
    _require_ready(tree)
    manifest = Manifest.read(tree)
    if ready_fields(tree).get("payload_hash", manifest.payload_hash) != manifest.payload_hash:
        raise Corrupt(f"{manifest.where} was changed: it has another hash", hint=_HINT, path=manifest.where)
    restore = _Restore(manifest, tree, destination, progress)
    if only is None or only == b"":
        restore.directory(b"")
        is_whole = not restore.not_preserved and not restore.damaged
        if cache is not None and is_whole and times_tell(destination, cache.parent):
            restore.write_cache(cache)
    elif restore.manifest.body(only) is not None:
        restore.directory(only)
    else:
        restore.single(only)
    restore.require_sound()
    return Materialised(restore.files, restore.directories, restore.bytes, tuple(restore.not_preserved))


def _require_ready(tree: Path) -> None:
    if not entry_exists(tree / READY):
        raise PartialSnapshot(f"{tree} is not a complete snapshot", path=str(tree))
    if not entry_exists(tree / PAYLOAD):
        hint = f"{_HINT} 'holdfast doctor' lists what else is missing."
        raise Corrupt(f"the files of the snapshot {tree.name} are gone", hint=hint, path=str(tree / PAYLOAD))


class _Pair(NamedTuple):
    """A directory of the snapshot and its copy; `top` is the path in the snapshot that is restored."""

    source: Stored
    path: str
    target: TreeWalker
    first: TreeWalker  # a second walker of the copy, for other names of a file
    new_path: str
    top: bytes

    def enter(self) -> tuple[int, int]:
        """The descriptors of the copy and of the snapshot's directory, valid until another one is entered."""
        try:
            into = self.target.enter(self.new_path)
        except OSError as error:
            raise unwritable(self.target.where(self.new_path), error) from error
        try:
            return into, self.source.enter(self.path)
        except (FileNotFoundError, NotADirectoryError):
            raise _missing(self.source.where(self.path)) from None
        except OSError as error:
            raise unreadable(self.source.where(self.path), error) from error


class _Restore:
    def __init__(self, manifest: Manifest, tree: Path, destination: Path, progress: Progress | None) -> None:
        self._attributes = Attributes(None, kept=False)
        self.manifest, self.tree, self.destination = manifest, tree, destination
        self.progress = progress
        self.files = self.directories = self.bytes = 0
        self.not_preserved: list[str] = []
        self.damaged: list[str] = []
        self._first_names: dict[bytes, str] = {}

    def directory(self, top: bytes) -> None:
        try:
            with parent_of(self.destination) as (here, name):
                calls.mkdir(name, dir_fd=here)
        except FileExistsError:
            raise self._exists() from None
        except OSError as error:
            raise unwritable(os.fspath(self.destination), error) from error
        where = self.destination
        with Stored(self.tree) as source, TreeWalker(where) as target, TreeWalker(where) as first:
            self._attributes = Attributes(target.root_status(), kept=False)
            self._open_to(target, stat.S_IRWXU)  # until it is complete: directories in it may be private
            for path in self._below(top):  # 1. all directories
                parent, name = split(_relative(path, top))
                if name:
                    try:
                        calls.mkdir(name, dir_fd=target.enter(parent))
                    except OSError as error:
                        raise unwritable(target.where(parent, name), error) from error
                self.directories += 1
            for path in self._below(top):  # 2. their entries
                self._fill(_Pair(source, os.fsdecode(path), target, first, _relative(path, top), top))
            for path in reversed(list(self._below(top))):  # 3. their modes and times, the deepest first
                self._complete(target, path, _relative(path, top))
            self._open_to(target, directory_of(top, self._body(top)).mode)

    def _open_to(self, target: TreeWalker, mode: int) -> None:
        with writing(self.destination):
            descriptor = target.top()
            calls.chmod(descriptor, mode)

    def _exists(self) -> AlreadyExists:
        return AlreadyExists(f"{self.destination} already exists", path=str(self.destination))

    def _below(self, top: bytes) -> Iterator[bytes]:
        if not top:
            return self.manifest.paths()
        inside = top + b"/"
        return (path for path in self.manifest.paths() if path == top or path.startswith(inside))

    def _body(self, path: bytes) -> bytes:
        body = self.manifest.body(path)
        if body is None:
            raise Corrupt(f"{self.manifest.where} lacks a record", path=self.manifest.where)
        return body

    def _fill(self, pair: _Pair) -> None:
        encoded = os.fsencode(pair.path)
        raws = raw_entries(self._body(encoded))
        if not raws:
            return
        into, here = pair.enter()
        for raw in raws.values():
            if is_plain_file(raw):
                self._plain_file(pair, raw, here, into)
            else:
                self._make(pair, decode_entry(encoded, raw), here, into)
        self.files += len(raws)
        if self.progress is not None:
            self.progress(self.files, self.bytes)

    def _plain_file(self, pair: _Pair, raw: bytes, here: int, into: int) -> None:
        encoded, meta, size = plain_file(raw)
        name = os.fsdecode(encoded)
        try:
            lost = self._file(pair, NewFile(name, name, meta), digest_of(raw), here, into)
        except OSError as error:
            raise unwritable(pair.target.where(pair.new_path, name), error) from error
        self.bytes += size
        if lost:
            self._lose(os.fsencode(joined(pair.path, name)), lost)

    def _make(self, pair: _Pair, entry: ManifestEntry, here: int, into: int) -> None:
        name = os.fsdecode(entry.name)
        first = self._first_name(entry, pair.top)
        try:
            if first is not None and _link(pair.first, first, into, name):
                lost = []
            elif entry.kind == "f":
                self.bytes += entry.size
                new = NewFile(name, name, entry.meta, entry.xattrs)
                lost = self._file(pair, new, bytes.fromhex(entry.sha256), here, into)
                if first is not None:
                    lost.append(f"hard link to {shown(first)}")
                elif entry.first_link:
                    self._first_names[entry.first_link] = joined(pair.new_path, name)
            else:
                lost = _other(entry, into, name, self._attributes)
        except OSError as error:
            raise unwritable(pair.target.where(pair.new_path, name), error) from error
        self._lose(entry.path, lost)

    def _first_name(self, entry: ManifestEntry, top: bytes) -> str | None:
        """The path in the copy of the first name of the same file; None if this name is the first."""
        if not entry.first_link:
            return None
        if not top or entry.first_link.startswith(top + b"/"):
            return _relative(entry.first_link, top)
        return self._first_names.get(entry.first_link)  # the first name is not restored here

    def _lose(self, path: bytes, what: list[str]) -> None:
        self.not_preserved += [f"{shown(os.fsdecode(path)) or '.'}: {each}" for each in what]

    def _file(self, pair: _Pair, new: NewFile, digest: bytes, here: int, into: int) -> list[str]:
        try:
            found, lost = place_file(here, into, new, self._attributes)
        except (FileNotFoundError, IsADirectoryError):
            self.damaged.append(f"{shown(joined(pair.path, new.source_name))} (missing)")
            return []
        if found != digest:
            self.damaged.append(f"{shown(joined(pair.path, new.source_name))} (changed)")
            calls.unlink(new.name, dir_fd=into)
        return lost

    def require_sound(self) -> None:
        if self.damaged:
            more = len(self.damaged) - _MOST_NAMED
            named = ", ".join(self.damaged[:_MOST_NAMED]) + (f", and {more} more" if more > 0 else "")
            hint = f"Repair it: 'holdfast verify {self.tree.name} --repair'. {_HINT}"
            message = f"the snapshot {self.tree.name} is damaged: {named}"
            raise Corrupt(message, hint=hint, path=str(self.tree), damaged=self.damaged)

    def _complete(self, target: TreeWalker, path: bytes, new_path: str) -> None:
        entry = directory_of(path, self._body(path))
        if entry.kind == "m":
            self._lose(path, ["the filesystem mounted there was not captured"])
            return
        try:
            here = target.enter(new_path)
            lost = self._attributes.finish_directory(here, entry.meta, entry.xattrs)
        except OSError as error:
            raise unwritable(target.where(new_path), error) from error
        self._lose(path, lost)

    def single(self, path: bytes) -> None:
        directory, name = split(os.fsdecode(path))
        body = self.manifest.body(os.fsencode(directory))
        raw = raw_entries(body).get(os.fsencode(name)) if body is not None else None
        if raw is None:
            where = shown(os.fsdecode(path))
            raise NotFound(f"there is no {where} in the snapshot", path=where)
        entry = decode_entry(os.fsencode(directory), raw)
        with Stored(self.tree) as source, TreeWalker(self.destination.parent) as target:
            pair = _Pair(source, directory, target, target, "", b"")
            into, here = pair.enter()
            try:
                new_name = self.destination.name
                if entry.kind == "f":
                    new = NewFile(name, new_name, entry.meta, entry.xattrs)
                    lost = self._file(pair, new, bytes.fromhex(entry.sha256), here, into)
                else:
                    lost = _other(entry, into, new_name, self._attributes)
            except FileExistsError:
                raise self._exists() from None
            except OSError as error:
                raise unwritable(os.fspath(self.destination), error) from error
        self.files, self.bytes = 1, entry.size
        self._lose(path, lost)

    def write_cache(self, cache: Path) -> None:
        """Record the restored directories, once their times are old enough to be trusted."""
        time.sleep(_A_TICK)
        with TreeWalker(self.destination) as walker, suppress(OSError):  # the cache only saves time
            here = walker.enter("")
            status = calls.fstat(here)
            calls.utime(here, ns=(status.st_atime_ns, status.st_mtime_ns))  # so that its ctime is now
            status = calls.fstat(here)
            write_cache(cache, status.st_dev, self._known(walker, status.st_ctime_ns))

    def _known(self, walker: TreeWalker, now: int) -> Iterator[KnownDirectory]:
        for path, body in self.manifest.records():
            listing = scan_directory(walker.enter(os.fsdecode(path)))
            if _matches(body, listing):
                yield KnownDirectory(path, without_recent(listing.identity, listing, now), body)


def _matches(body: bytes, listing: Listing) -> bool:
    """Whether a directory matches its record; False if the filesystem cannot hold all of it."""
    entries = raw_entries(body)
    if len(entries) != len(listing.names) or body[:HEAD_OF_BODY] != head_of_body(listing.own):
        return False
    return all(
        raw[:HEAD_OF_ENTRY] == head_of_entry(status) and name == os.fsencode(found)
        for (name, raw), found, status in zip(entries.items(), listing.names, listing.statuses, strict=True)
    )


def _missing(where: str) -> Corrupt:
    hint = f"{_HINT} 'holdfast verify' lists what else is lost."
    return Corrupt(f"{shown(where)} is missing in the snapshot", hint=hint, path=shown(where))


def _relative(path: bytes, top: bytes) -> str:
    return os.fsdecode(path[len(top) :].lstrip(b"/") if top else path)


def _link(walker: TreeWalker, first: str, into: int, name: str) -> bool:
    """Give a restored file a second name; False if that is impossible."""
    directory, first_name = split(first)
    try:
        here = walker.enter(directory)
        calls.link(first_name, name, src_dir_fd=here, dst_dir_fd=into, follow_symlinks=False)
    except OSError as error:
        if error.errno not in NO_LINK:
            raise
        return False
    return True


def _other(entry: ManifestEntry, into: int, name: str, attributes: Attributes) -> list[str]:
    """Create a symbolic link or a special file; return what the system refused."""
    if entry.kind == "l":
        calls.symlink(os.fsdecode(entry.target), name, dir_fd=into)
    else:
        try:
            calls.mknod(name, _KINDS[entry.kind] | 0o600, entry.device, dir_fd=into)
        except (PermissionError, KeyError):
            return [KIND_WORDS.get(entry.kind.encode(), "an entry of an unknown kind") + " could not be created"]
    return attributes.finish_other(into, name, entry.meta, entry.xattrs)


def exchange(one: Path, other: Path) -> None:
    """Swap two paths of one filesystem, or raise `ExchangeUnavailable`. Commit point: the exchange.

    Both keep their modification times. (xfs would change that of a directory that an exchange gives another parent.)
    """
    try:
        with parent_of(one) as (here, name), parent_of(other) as (there, other_name):
            places = ((here, name), (there, other_name))
            before = [calls.stat(each, dir_fd=parent, follow_symlinks=False) for parent, each in reversed(places)]
            swap = partial(calls.rename_exchange, name, other_name, src_dir_fd=here, dst_dir_fd=there)
            although_read_only(swap, {one: other, other: one})
            for (parent, each), status in zip(places, before, strict=True):
                with suppress(OSError):  # it belongs to another user
                    if calls.stat(each, dir_fd=parent, follow_symlinks=False).st_mtime_ns != status.st_mtime_ns:
                        times = status.st_atime_ns, status.st_mtime_ns
                        calls.utime(each, ns=times, dir_fd=parent, follow_symlinks=False)
    except OSError as error:
        if error.errno in _NO_EXCHANGE:
            raise ExchangeUnavailable(
                f"{one} and {other} cannot be swapped in one step here: {error.strerror}", path=str(one)
            ) from error
        raise io_failure("exchange", f"{one} and {other}", error) from error
