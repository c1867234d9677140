"""Verifying a tree against its manifest, and comparing trees and directories."""

from __future__ import annotations

import os
import stat
from collections import defaultdict
from collections.abc import Callable, Generator, Iterator
from contextlib import ExitStack
from pathlib import Path

from holdfast.errors import Corrupt, Failure
from holdfast.fs import calls, strictjson
from holdfast.fs.directory import close_quietly
from holdfast.trees.capture_directories import DirectoryCapture, start_scan_worker
from holdfast.trees.capture_files import CaptureStats
from holdfast.trees.copy import hash_file
from holdfast.trees.manifest import (
    HOMES,
    KEPT_MODE,
    PAYLOAD,
    READY,
    Manifest,
    ManifestEntry,
    decode_entry,
    directory_of,
    raw_entries,
)
from holdfast.trees.payload import READ
from holdfast.trees.results import Change, Problem
from holdfast.trees.scan import StatCache
from holdfast.trees.shared_dirs import Stored, places_beside
from holdfast.trees.walker import TreeWalker, open_directory, read_whole, shown

_PERMISSIONS = 0o777
_KEPT = KEPT_MODE & ~0o400  # the owner can always read; snapshots of earlier versions let others write


def verify(tree: Path, payload_hash: str | None = None) -> Iterator[Problem]:
    """Read everything and yield the problems; none for a sound tree.

    `what` is `ready` (the `.READY` file), `manifest`, `homes` (the list of shared directories), `missing`,
    `extra`, `unreadable`, `kind`, `content`, `target`, `mode` or `mtime`.
    """
    yield from _verified(tree, payload_hash, _check_payload)


def verify_manifest(tree: Path, payload_hash: str | None = None) -> Iterator[Problem]:
    """Like `verify`, but read no file of the payload.

    Checks `.READY`, the manifest, the entries at the top, and the trees that store shared directories.
    """
    yield from _verified(tree, payload_hash, _check_top)


def _verified(
    tree: Path, payload_hash: str | None, check: Callable[[Path, Manifest], Iterator[Problem]]
) -> Iterator[Problem]:
    manifest = yield from _check_manifest(tree, payload_hash)
    if manifest is not None:
        try:
            yield from check(tree, manifest)
        except Corrupt as failure:
            yield Problem("manifest", "manifest", failure.message)


def _check_manifest(tree: Path, payload_hash: str | None) -> Generator[Problem, None, Manifest | None]:
    """Check `.READY` and the manifest; return the manifest if it is readable."""
    yield from _check_ready(tree, payload_hash)
    try:
        manifest = Manifest.read(tree)
        for _, body in manifest.records():
            raw_entries(body)
    except Failure as failure:
        yield Problem("manifest", "manifest", failure.message)
        return None
    found = manifest.payload_hash
    if payload_hash is not None and found != payload_hash:
        yield Problem("manifest", "manifest", f"its hash is {found}, not {payload_hash}")
    return manifest


def _check_ready(tree: Path, payload_hash: str | None) -> Iterator[Problem]:
    where = os.fspath(tree / READY)
    try:
        fields = strictjson.decode(read_whole(where), source=where)
        found = fields.get("payload_hash") if isinstance(fields, dict) else None
    except FileNotFoundError:
        yield Problem(READY, "ready", "the tree is not marked as complete")
    except (OSError, Failure) as error:
        yield Problem(READY, "ready", f"{READY} cannot be read: {error}")
    else:
        if payload_hash is not None and found != payload_hash:
            yield Problem(READY, "ready", f"it has the hash {found}, not {payload_hash}")


def _check_top(tree: Path, manifest: Manifest) -> Iterator[Problem]:
    stored = yield from _opened(tree)
    if stored is None:
        return
    with stored:
        is_whole = True
        for name in sorted({each.tree for each in stored.shared.values()}):
            if not any(_is_directory(each / PAYLOAD) for each in places_beside(tree, name)):
                is_whole = False
                yield Problem(HOMES, "missing", f"the tree {name}, which stores some of its files, is gone")
        if not is_whole:
            return
        try:
            files = _names(stored.enter(""))
            directories = _names(stored.own.top())
        except OSError as error:
            yield Problem(PAYLOAD, "missing", f"the directory cannot be read: {error.strerror}")
            return
    lost = {
        name
        for name, raw in raw_entries(manifest.body(b"") or b"").items()
        if decode_entry(b"", raw).kind in "fl" and name not in files
    }
    lost |= {
        path
        for path, body in manifest.records()
        if path and b"/" not in path and path not in stored.shared and path not in directories
        if directory_of(path, body).kind != "m"
    }
    for path in sorted(lost):
        yield _problem(path, "missing", "it is in the manifest but does not exist")


def _opened(tree: Path) -> Generator[Problem, None, Stored | None]:
    try:
        return Stored(tree)
    except Corrupt as failure:
        yield Problem(HOMES, "homes", failure.message)
    except Failure as failure:
        yield Problem(PAYLOAD, "missing", failure.message)
    return None


def _is_directory(path: Path) -> bool:
    try:
        close_quietly(open_directory(os.fspath(path)))
    except Failure:
        return False
    return True


def _names(here: int) -> set[bytes]:
    with calls.scandir(here) as listed:
        return {os.fsencode(each.name) for each in listed}


def _check_payload(tree: Path, manifest: Manifest) -> Iterator[Problem]:
    stored = yield from _opened(tree)
    if stored is None:
        return
    below: defaultdict[bytes, set[bytes]] = defaultdict(set)
    for path in manifest.paths():
        parent, _, name = path.rpartition(b"/")
        below[parent].add(name)
    with stored:
        for path, body in manifest.records():
            if directory_of(path, body).kind != "m":
                yield from _check_directory(stored, path, raw_entries(body), below[path])


def _check_directory(stored: Stored, path: bytes, entries: dict[bytes, bytes], below: set[bytes]) -> Iterator[Problem]:
    elsewhere = path in stored.shared  # subdirectories there belong to that tree
    try:
        here = stored.enter(os.fsdecode(path))
        with calls.scandir(here) as listed:
            present = {
                os.fsencode(entry.name) for entry in listed if not (elsewhere and entry.is_dir(follow_symlinks=False))
            }
    except OSError as error:
        yield _problem(path, "missing", f"the directory cannot be read: {error.strerror}")
        return
    for name in sorted(present - entries.keys() - below):
        yield _problem(path + b"/" + name if path else name, "extra", "it is not in the manifest")
    for name, raw in entries.items():
        entry = decode_entry(path, raw)
        if name in present or entry.kind in "fl":
            yield from check_entry(here, entry)


def check_entry(here: int, entry: ManifestEntry) -> Iterator[Problem]:
    """The problems of a file or symbolic link in an open directory of a payload."""
    name = os.fsdecode(entry.name)
    try:
        status = calls.stat(name, dir_fd=here, follow_symlinks=False)
        if entry.kind == "l":
            if not stat.S_ISLNK(status.st_mode):
                yield _problem(entry.path, "kind", "it is not a symbolic link")
            elif os.fsencode(calls.readlink(name, dir_fd=here)) != entry.target:
                yield _problem(entry.path, "target", "the symbolic link has another target")
        elif entry.kind == "f":
            if not stat.S_ISREG(status.st_mode):
                yield _problem(entry.path, "kind", "it is not a file")
            else:
                yield from _check_file(here, name, entry, status)
    except FileNotFoundError:
        yield _problem(entry.path, "missing", "it is in the manifest but does not exist")
    except OSError as error:
        yield _problem(entry.path, "unreadable", f"it cannot be read: {error.strerror}")


def _check_file(here: int, name: str, entry: ManifestEntry, status: os.stat_result) -> Iterator[Problem]:
    if status.st_size != entry.size:
        yield _problem(entry.path, "content", f"it has {status.st_size} bytes, not {entry.size}")
        return
    reading = calls.open(name, READ, dir_fd=here)
    try:
        if hash_file(reading, status.st_size).digest.hex() != entry.sha256:
            yield _problem(entry.path, "content", "its content differs from what was captured")
    finally:
        close_quietly(reading)
    if (status.st_mode ^ entry.mode) & _KEPT or status.st_mode & ~entry.mode & _PERMISSIONS & ~KEPT_MODE:
        yield _problem(entry.path, "mode", f"its mode is {stat.S_IMODE(status.st_mode):04o}")
    if status.st_mtime_ns != entry.mtime_ns:
        yield _problem(entry.path, "mtime", "its modification time differs")


def _problem(path: bytes, what: str, detail: str) -> Problem:
    return Problem(shown(os.fsdecode(path)) or ".", what, detail)


_Records = Iterator[tuple[bytes, bytes]]


def compare(tree_a: Path, tree_b: Path) -> Iterator[Change]:
    """The changes from the first tree to the second, in the order of the path components."""
    yield from _compare(Manifest.read(tree_a).records(), Manifest.read(tree_b).records())


def changes(source: Path, tree: Path | None, *, cache: Path | None = None) -> Iterator[Change]:
    """The changes from a tree (None: from nothing) to a directory. Files that equal their cache record are not read."""
    records: _Records = iter(()) if tree is None else Manifest.read(tree).records()
    with ExitStack() as stack:
        walker = stack.enter_context(TreeWalker(source))
        worker = start_scan_worker(stack, walker, cache)
        known = StatCache.read(cache, walker.root_status().st_dev)
        directories = DirectoryCapture(walker, cache=known, stats=CaptureStats(), worker=worker)
        yield from _compare(records, ((each.encoded, each.body) for each in directories.capture_all()))


def _compare(old: _Records, new: _Records) -> Iterator[Change]:
    """Merge two sequences of directories; equal records are skipped as a whole."""
    one, other = next(old, None), next(new, None)
    while one is not None or other is not None:
        order = _order(one, other)
        if order == 0 and one is not None and other is not None:
            if one[1] != other[1]:
                yield from _compare_directories(one[0], one[1], other[1])
            one, other = next(old, None), next(new, None)
        elif order < 0 and one is not None:
            yield from _all(one, "removed")
            one = next(old, None)
        elif other is not None:
            yield from _all(other, "added")
            other = next(new, None)


def _order(one: tuple[bytes, bytes] | None, other: tuple[bytes, bytes] | None) -> int:
    if one is None or other is None:
        return 1 if one is None else -1
    mine, yours = one[0].split(b"/"), other[0].split(b"/")
    return (mine > yours) - (mine < yours)


def _all(record: tuple[bytes, bytes], what: str) -> Iterator[Change]:
    path, body = record
    yield Change(path, what, directory_of(path, body).kind)
    for raw in raw_entries(body).values():
        entry = decode_entry(path, raw)
        yield Change(entry.path, what, entry.kind, size=entry.size)


def _compare_directories(path: bytes, old: bytes, new: bytes) -> Iterator[Change]:
    aspects = _aspects(directory_of(path, old), directory_of(path, new))
    if aspects:
        yield Change(path, "modified", "d", aspects)
    before, after = raw_entries(old), raw_entries(new)
    for name in sorted(before.keys() | after.keys()):
        one, other = before.get(name), after.get(name)
        if one == other:
            continue
        if one is None or other is None:
            entry = decode_entry(path, other or one or b"")
            yield Change(entry.path, "added" if one is None else "removed", entry.kind, size=entry.size)
        else:
            entry = decode_entry(path, other)
            yield Change(entry.path, "modified", entry.kind, _aspects(decode_entry(path, one), entry), entry.size)


def _aspects(old: ManifestEntry, new: ManifestEntry) -> tuple[str, ...]:
    found = {
        "kind": old.kind != new.kind,
        "content": (old.size, old.sha256) != (new.size, new.sha256) and old.kind == new.kind,
        "mode": old.mode != new.mode,
        "owner": (old.uid, old.gid) != (new.uid, new.gid),
        "mtime": old.mtime_ns != new.mtime_ns,
        "target": old.target != new.target,
        "device": old.device != new.device,
        "xattrs": old.xattrs != new.xattrs,
        "links": old.first_link != new.first_link,
    }
    return tuple(aspect for aspect, different in found.items() if different)
