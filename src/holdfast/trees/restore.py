"""Making a new directory from a snapshot's tree: an independent one, which may be written to."""

from __future__ import annotations

import errno
import os
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

from holdfast.errors import AlreadyExists, Corrupt, ExchangeUnavailable, NotFound, PartialSnapshot
from holdfast.fs import calls
from holdfast.fs.directory import although_read_only, io_failure
from holdfast.trees.capture_files import NO_LINK
from holdfast.trees.copy import NewFile, place_file
from holdfast.trees.manifest import (
    PAYLOAD,
    READY,
    Manifest,
    ManifestEntry,
    decode_entry,
    directory_of,
    is_plain_file,
    plain_file,
    raw_entries,
)
from holdfast.trees.payload import (
    HEAD_OF_BODY,
    HEAD_OF_ENTRY,
    KIND_WORDS,
    Attributes,
    head_of_body,
    head_of_entry,
    meta_of_entry,
)
from holdfast.trees.scan import (
    Listing,
    Progress,
    TreeWalker,
    joined,
    look,
    shown,
    split,
    unreadable,
    unwritable,
    without_recent,
)
from holdfast.trees.shared_dirs import Stored
from holdfast.trees.stat_cache import KnownDirectory, write_cache

_A_TICK = 0.03
_KINDS = {"p": 0o010000, "s": 0o140000, "c": 0o020000, "b": 0o060000}


class Materialised(NamedTuple):
    """What was made."""

    files: int
    directories: int
    bytes: int
    not_preserved: tuple[str, ...]


def materialise(
    tree: Path,
    destination: Path,
    *,
    only: bytes | None = None,
    cache: Path | None = None,
    progress: Progress | None = None,
) -> Materialised:
    """Make `destination`, where nothing is yet, hold what the tree holds, or the one path `only` of it.

    Nothing is shared with the snapshot but blocks that the file system copies when they are written.
    `cache` is written for the new directory, so that its first capture need not read it. Not synced.
    """
    _require_ready(tree)
    making = _Making(Manifest.read(tree), tree, destination, progress)
    if only is None or only == b"":
        making.directory(b"")
        if cache is not None and not making.not_preserved:
            making.write_cache(cache)
    elif making.manifest.body(only) is not None:
        making.directory(only)
    else:
        making.single(only)
    return Materialised(making.files, making.directories, making.bytes, tuple(making.not_preserved))


def _require_ready(tree: Path) -> None:
    try:
        calls.stat(tree / READY, follow_symlinks=False)
    except FileNotFoundError:
        raise PartialSnapshot(f"{tree} is not a complete snapshot", path=str(tree)) from None
    except OSError as error:
        raise unreadable(os.fspath(tree / READY), error) from error
    try:
        calls.stat(tree / PAYLOAD, follow_symlinks=False)
    except FileNotFoundError:
        raise Corrupt(
            f"the files of the snapshot {tree.name} are gone",
            hint="Restore another one, or bring this directory back from a copy; 'holdfast doctor' finds "
            "what else is missing.",
            path=str(tree / PAYLOAD),
        ) from None


class _Place(NamedTuple):
    """A directory of the snapshot and the one that is made of it; `top` is what of the snapshot is made."""

    source: Stored
    path: str
    target: TreeWalker
    new_path: str
    top: bytes

    def enter(self) -> tuple[int, int]:
        """The new directory and the one of the snapshot, good until one of the two ways is used again."""
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


class _Making:
    def __init__(self, manifest: Manifest, tree: Path, destination: Path, progress: Progress | None) -> None:
        self.manifest, self.tree, self.destination = manifest, tree, destination
        self.progress = progress
        self.files = self.directories = self.bytes = 0
        self.not_preserved: list[str] = []
        self._first_names: dict[bytes, str] = {}

    # --- A directory with all that is below it ---------------------------------------------------------

    def directory(self, top: bytes) -> None:
        """Make the directory `top` of the tree at the destination."""
        try:
            calls.mkdir(self.destination)
        except FileExistsError:
            raise AlreadyExists(f"{self.destination} is there already", path=str(self.destination)) from None
        except OSError as error:
            raise unwritable(os.fspath(self.destination), error) from error
        with Stored(self.tree) as source, TreeWalker(self.destination) as target:
            attributes = Attributes(calls.fstat(target.enter("")), kept=False)
            for path in self._below(top):  # 1. all directories
                parent, name = split(_relative(path, top))
                if name:
                    _make_directory(target, parent, name)
                self.directories += 1
            for path in self._below(top):  # 2. what is in them
                place = _Place(source, os.fsdecode(path), target, _relative(path, top), top)
                self._fill(place, attributes)
            for path in reversed(list(self._below(top))):  # 3. their own modes and times, the deepest first
                self._complete(target, path, _relative(path, top), attributes)

    def _below(self, top: bytes) -> Iterator[bytes]:
        if not top:
            return self.manifest.paths()
        inside = top + b"/"
        return (path for path in self.manifest.paths() if path == top or path.startswith(inside))

    def _body(self, path: bytes) -> bytes:
        body = self.manifest.body(path)
        if body is None:
            raise Corrupt(f"{self.manifest.where} has lost a record", path=self.manifest.where)
        return body

    def _fill(self, place: _Place, attributes: Attributes) -> None:
        encoded = os.fsencode(place.path)
        raws = raw_entries(self._body(encoded))
        if not raws:
            return
        into, here = place.enter()
        for raw in raws.values():
            if is_plain_file(raw):
                self._plain(place, raw, here, into, attributes)
            else:
                self._make(place, decode_entry(encoded, raw), here, into, attributes)
        self.files += len(raws)
        if self.progress is not None:
            self.progress(self.files, self.bytes)

    def _plain(self, place: _Place, raw: bytes, here: int, into: int, attributes: Attributes) -> None:
        """Make what most entries are: a file without anything out of the ordinary."""
        encoded, meta, size = plain_file(raw)
        name = os.fsdecode(encoded)
        try:
            lost = self._file(place, NewFile(name, name, meta), size, here, into, attributes)
        except OSError as error:
            raise unwritable(place.target.where(place.new_path, name), error) from error
        self.bytes += size
        if lost:
            self._lose(os.fsencode(joined(place.path, name)), lost)

    def _make(
        self, place: _Place, entry: ManifestEntry, here: int, into: int, attributes: Attributes
    ) -> None:
        name = os.fsdecode(entry.name)
        first = self._first_name(entry, place.top)
        try:
            if first is not None and _link(place.target.root, first, into, name):
                lost = []
            elif entry.kind == "f":
                self.bytes += entry.size
                new = NewFile(name, name, meta_of_entry(entry), entry.xattrs)
                lost = self._file(place, new, entry.size, here, into, attributes)
                if first is not None:
                    lost.append(f"hard link to {shown(first)}")
                elif entry.first_link:
                    self._first_names[entry.first_link] = joined(place.new_path, name)
            else:
                lost = _other(entry, into, name, attributes)
        except OSError as error:
            raise unwritable(place.target.where(place.new_path, name), error) from error
        self._lose(entry.path, lost)

    def _first_name(self, entry: ManifestEntry, top: bytes) -> str | None:
        """Where the first name of the same file was made; None if this is it."""
        if not entry.first_link:
            return None
        if not top or entry.first_link.startswith(top + b"/"):
            return _relative(entry.first_link, top)
        return self._first_names.get(entry.first_link)  # it is outside of what is made here

    def _lose(self, path: bytes, what: list[str]) -> None:
        self.not_preserved += [f"{shown(os.fsdecode(path)) or '.'}: {each}" for each in what]

    def _file(
        self, place: _Place, new: NewFile, size: int, here: int, into: int, attributes: Attributes
    ) -> list[str]:
        try:
            found, lost = place_file(here, into, new, attributes)
        except (FileNotFoundError, IsADirectoryError):
            raise _missing(place.source.where(place.path, new.like)) from None
        if found != size:
            where = shown(place.source.where(place.path, new.like))
            raise Corrupt(f"{where} has {found} bytes, but the manifest says {size}", path=where)
        return lost

    def _complete(self, target: TreeWalker, path: bytes, new_path: str, attributes: Attributes) -> None:
        entry = directory_of(path, self._body(path))
        if entry.kind == "m":
            self.not_preserved.append(f"{shown(os.fsdecode(path))}: what is mounted there was not captured")
            return
        try:
            here = target.enter(new_path)
            lost = attributes.finish_directory(here, meta_of_entry(entry), entry.xattrs)
        except OSError as error:
            raise unwritable(target.where(new_path), error) from error
        self._lose(path, lost)

    # --- One file --------------------------------------------------------------------------------------

    def single(self, path: bytes) -> None:
        """Make one file of the tree the destination."""
        directory, name = split(os.fsdecode(path))
        body = self.manifest.body(os.fsencode(directory))
        raw = raw_entries(body).get(os.fsencode(name)) if body is not None else None
        if raw is None:
            raise NotFound(
                f"there is no {shown(os.fsdecode(path))} in the snapshot", path=shown(os.fsdecode(path))
            )
        entry = decode_entry(os.fsencode(directory), raw)
        with Stored(self.tree) as source, TreeWalker(self.destination.parent) as target:
            place = _Place(source, directory, target, "", b"")
            into, here = place.enter()
            attributes = Attributes(None, kept=False)
            try:
                new_name = self.destination.name
                if entry.kind == "f":
                    new = NewFile(name, new_name, meta_of_entry(entry), entry.xattrs)
                    lost = self._file(place, new, entry.size, here, into, attributes)
                else:
                    lost = _other(entry, into, new_name, attributes)
            except FileExistsError:
                raise AlreadyExists(
                    f"{self.destination} is there already", path=str(self.destination)
                ) from None
            except OSError as error:
                raise unwritable(os.fspath(self.destination), error) from error
        self.files, self.bytes = 1, entry.size
        self._lose(path, lost)

    # --- What the first capture of the new directory need not read -------------------------------------

    def write_cache(self, cache: Path) -> None:
        """Note what has just been made, once its times are old enough to be trusted."""
        time.sleep(_A_TICK)
        with (
            TreeWalker(self.destination) as way,
            suppress(OSError),
        ):  # without a cache it is slower, and no more
            here = way.enter("")
            status = calls.fstat(here)
            calls.utime(here, ns=(status.st_atime_ns, status.st_mtime_ns))  # so that its ctime is now
            status = calls.fstat(here)
            write_cache(cache, status.st_dev, self._known(way, status.st_ctime_ns))

    def _known(self, way: TreeWalker, now: int) -> Iterator[KnownDirectory]:
        for path, body in self.manifest.records():
            listing = look(way.enter(os.fsdecode(path)))
            if _is_true(body, listing):
                yield KnownDirectory(path, without_recent(listing.identity, listing, now), body)


def _is_true(body: bytes, listing: Listing) -> bool:
    """Whether a directory has become what its record says: not if the file system cannot keep all of it."""
    entries = raw_entries(body)
    if len(entries) != len(listing.names) or body[:HEAD_OF_BODY] != head_of_body(listing.own):
        return False
    return all(
        raw[:HEAD_OF_ENTRY] == head_of_entry(status) and name == os.fsencode(found)
        for (name, raw), found, status in zip(entries.items(), listing.names, listing.statuses, strict=True)
    )


def _missing(where: str) -> Corrupt:
    """What is raised for something that a snapshot has lost."""
    where = shown(where)
    return Corrupt(
        f"{where} is missing in the snapshot",
        hint="Restore another one, or bring it back from a copy; 'holdfast verify' finds what else is lost.",
        path=where,
    )


def _relative(path: bytes, top: bytes) -> str:
    return os.fsdecode(path[len(top) :].lstrip(b"/") if top else path)


def _make_directory(target: TreeWalker, parent: str, name: str) -> None:
    try:
        calls.mkdir(name, dir_fd=target.enter(parent))
    except OSError as error:
        raise unwritable(target.where(parent, name), error) from error


def _link(root: str, first: str, into: int, name: str) -> bool:
    """Give a file that was made before a second name; False where it cannot have one."""
    directory, first_name = split(first)
    with TreeWalker(root) as way:
        try:
            calls.link(
                first_name, name, src_dir_fd=way.enter(directory), dst_dir_fd=into, follow_symlinks=False
            )
        except OSError as error:
            if error.errno not in NO_LINK:
                raise
            return False
    return True


def _other(entry: ManifestEntry, into: int, name: str, attributes: Attributes) -> list[str]:
    """Make a symbolic link or something special; return what could not be."""
    if entry.kind == "l":
        calls.symlink(os.fsdecode(entry.target), name, dir_fd=into)
    else:
        try:
            calls.mknod(name, _KINDS[entry.kind] | 0o600, entry.device, dir_fd=into)
        except (PermissionError, KeyError):
            return [KIND_WORDS.get(entry.kind.encode(), "an entry of an unknown kind") + " could not be made"]
    return attributes.finish_other(into, name, meta_of_entry(entry), entry.xattrs)


_UNAVAILABLE = (errno.ENOSYS, errno.EINVAL, errno.EOPNOTSUPP, errno.ENOTTY)


def exchange(one: Path, other: Path) -> None:
    """Let two paths of one file system swap what they lead to. Commit point: the exchange; not synced.

    Where the system or the file system cannot: `ExchangeUnavailable`, and nothing has changed.
    """
    try:
        although_read_only(
            lambda: calls.rename_exchange(os.fspath(one), os.fspath(other)), {one: other, other: one}
        )
    except OSError as error:
        if error.errno in _UNAVAILABLE:
            raise ExchangeUnavailable(
                f"{one} and {other} cannot be swapped in one step here: {error.strerror}", path=str(one)
            ) from error
        raise io_failure("exchange", f"{one} and {other}", error) from error
