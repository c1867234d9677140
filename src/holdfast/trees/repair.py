"""Repair of damaged trees: lost and changed files are restored from another place that has their content.

Trees link each other's files, so a damaged file is repaired under every name that any tree has for it:

1. Find the damaged files, and every place that may have the same content: in all trees, and in other directories.
2. Copy the content into a scratch directory, compare the hash of the copy, sync.
3. Rename the copy into place; last reset the times of the directories: otherwise they would not be shared again.

A kill leaves each name with the old file or the repaired one. Directories and symbolic links are restored from the
manifest.
"""

from __future__ import annotations

import os
import stat
import struct
from collections import defaultdict
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from itertools import groupby
from pathlib import Path
from typing import NamedTuple

from holdfast.errors import Failure
from holdfast.fs import calls
from holdfast.fs.directory import close_quietly, make_directories, open_directly, opened, parent_of
from holdfast.trees.copy import NewFile, hash_file, place_file
from holdfast.trees.manifest import (
    KEPT_MODE,
    Manifest,
    ManifestEntry,
    decode_entry,
    directory_of,
    meta_of_directory,
    raw_entries,
)
from holdfast.trees.payload import READ, Attributes
from holdfast.trees.scan import scan_directory
from holdfast.trees.shared_dirs import Stored, ready_fields
from holdfast.trees.verify import check_entry
from holdfast.trees.walker import TreeWalker, joined, shown, sync_tree, synced, writing


class RepairedFile(NamedTuple):
    """A stored file that has its content again, and where the content comes from."""

    path: str
    source: str


class _Name(NamedTuple):
    """A name of a stored file, symbolic link or directory: its path, its entry, and the body of its directory, or its
    own body if it is a directory."""

    path: str
    body: bytes
    entry: ManifestEntry
    is_damaged: bool

    @property
    def directory(self) -> str:
        return self.path if self.entry.kind == "d" else os.path.dirname(self.path)


def repair(
    damaged: Iterable[Path], trees: Iterable[Path], directories: Iterable[Path], room: Path
) -> list[RepairedFile]:
    """Repair trees with content from all `trees` and `directories`; return the repaired files.

    `room` is a new directory on the filesystem of the trees. The caller makes sure that no tree is moved.
    """
    bad, records = list[_Name](), dict[str, bytes]()
    for name in _names(damaged, None):  # 1
        records[name.directory] = name.body
        bad += [name] if name.is_damaged else []
    wanted = {name.entry.sha256 for name in bad if name.entry.sha256}
    names = {name.path: name for name in (*_names(trees, wanted), *bad)}
    sources = _sources(names.values(), directories) if bad else {}
    written: list[tuple[Path, _Name, str]] = []
    with synced(room):
        for number, name in enumerate(each for each in names.values() if each.is_damaged):
            source, draft = sources.get(name.entry.sha256), room / f"repaired-{number}"
            if source is not None and _write(draft, name.entry, source):  # 2
                written.append((draft, name, source))
    placed = [(name, source) for draft, name, source in written if _place(draft, name)]  # 3
    records |= {name.directory: name.body for name, _ in placed}
    changed = {each for name, _ in placed for each in (name.directory, os.path.dirname(name.path)) if each in records}
    for each in sorted(changed, reverse=True):  # those below first
        with writing(each), _entered(each) as here:
            found = set(map(os.fsencode, scan_directory(here).names))
            if found <= raw_entries(records[each]).keys():  # else it must not be shared: it has extra files
                Attributes(None, kept=True).finish_directory(here, *meta_of_directory(records[each]))
    sync_tree(room)
    return [RepairedFile(shown(name.path), shown(source)) for name, source in placed]


def _names(trees: Iterable[Path], wanted: set[str] | None) -> Iterator[_Name]:
    """The names of wanted content (None: of all) in these trees. Trees whose manifest was changed are left out."""
    seen: set[str] = set()
    for tree in trees:
        with suppress(Failure, ValueError, struct.error), Stored(tree) as stored:  # verifying reports it
            manifest = Manifest.read(tree)
            if ready_fields(tree).get("payload_hash") != manifest.payload_hash:
                continue
            for path, body in manifest.records():
                directory = stored.where(os.fsdecode(path))
                if directory in seen or directory_of(path, body).kind == "m":
                    continue
                seen.add(directory)
                if wanted is None:
                    yield _Name(directory, body, directory_of(path, body), _is_lost(stored, path))
                for raw in raw_entries(body).values():
                    entry = decode_entry(path, raw)
                    if entry.kind in "fl" and (wanted is None or entry.sha256 in wanted):
                        name = joined(directory, os.fsdecode(entry.name))
                        yield _Name(name, body, entry, _is_damaged(stored, path, entry))


def _is_lost(stored: Stored, path: bytes) -> bool:
    try:
        stored.enter(os.fsdecode(path))
    except OSError:
        return True
    return False


def _is_damaged(stored: Stored, path: bytes, entry: ManifestEntry) -> bool:
    try:
        return any(check_entry(stored.enter(os.fsdecode(path)), entry))
    except OSError:
        return True


def _sources(names: Iterable[_Name], directories: Iterable[Path]) -> dict[str, str]:
    """For each hash, a file with that content. A symbolic link or directory has no hash and needs only its entry."""
    found = {"": "the manifest"}
    hashes: defaultdict[int, set[str]] = defaultdict(set)
    for name in names:
        hashes[name.entry.size].add(name.entry.sha256)
    for here, file, path in _files(names, directories):
        with suppress(OSError):
            status = calls.stat(file, dir_fd=here, follow_symlinks=False)
            if stat.S_ISREG(status.st_mode) and not hashes[status.st_size] <= found.keys():
                with opened(file, READ, dir_fd=here) as reading:
                    found.setdefault(hash_file(reading, status.st_size).digest.hex(), path)
    return found


@contextmanager
def _entered(path: str) -> Iterator[int]:
    """Open a directory for the block. Raises `OSError`, or `PathEscape` at a link in the path."""
    here = open_directly(path)
    try:
        yield here
    finally:
        close_quietly(here)


def _files(names: Iterable[_Name], directories: Iterable[Path]) -> Iterator[tuple[int, str, str]]:
    """These names, then everything below the directories, except directories, as far as it can be listed.

    Each is given by the descriptor of its directory, its name and its path.
    """
    for directory, inside in groupby(names, lambda name: os.path.dirname(name.path)):
        with suppress(OSError, Failure), _entered(directory) as here:
            yield from ((here, os.path.basename(name.path), name.path) for name in inside)
    for top in directories:
        with suppress(Failure), TreeWalker(top) as walker:
            waiting = [""]
            while waiting:
                path, below = waiting.pop(), dict[str, bool]()
                with suppress(OSError):
                    here = walker.enter(path)
                    with calls.scandir(here) as listed:
                        below = {each.name: each.is_dir(follow_symlinks=False) for each in listed}
                waiting += [joined(path, name) for name, is_directory in below.items() if is_directory]
                for name in [name for name, is_directory in below.items() if not is_directory]:
                    yield here, name, walker.where(path, name)


def _write(draft: Path, entry: ManifestEntry, source: str) -> bool:
    """Create the repaired file or symbolic link under a private name; False if the source has changed."""
    if entry.kind == "d":
        return True  # there is nothing to prepare
    attributes = Attributes(None, kept=True)
    with writing(draft), parent_of(draft) as (room, _):
        if entry.kind == "l":
            calls.symlink(os.fsdecode(entry.target), draft.name, dir_fd=room)
            attributes.finish_other(room, draft.name, entry.meta, entry.xattrs)
            return True
        with suppress(FileNotFoundError, IsADirectoryError), parent_of(source) as (here, name):
            digest, _ = place_file(here, room, NewFile(name, draft.name, entry.meta, entry.xattrs), attributes)
            return digest.hex() == entry.sha256
    return False


def _place(draft: Path, name: _Name) -> bool:
    """Move the repaired file to its name; False if a directory is in its place, or a file in place of its directory."""
    with writing(name.path), suppress(IsADirectoryError, NotADirectoryError):
        make_directories(Path(name.directory), mode=KEPT_MODE)
        with parent_of(draft) as (room, _), _entered(name.directory) as here:
            if name.entry.kind != "d":
                calls.rename(draft.name, os.path.basename(name.path), src_dir_fd=room, dst_dir_fd=here)
        return True
    return False
