"""Whether a snapshot's tree is still what it was when it was taken."""

from __future__ import annotations

import os
import stat
from collections.abc import Generator, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import NamedTuple

from holdfast.errors import Corrupt, Failure
from holdfast.fs import calls, strictjson
from holdfast.fs.directory import close_quietly
from holdfast.fs.paths import is_directory
from holdfast.trees.capture_directories import DirectoryCapture
from holdfast.trees.copy import hash_file
from holdfast.trees.manifest import (
    HOMES,
    PAYLOAD,
    READY,
    Manifest,
    ManifestEntry,
    decode_entry,
    directory_of,
    raw_entries,
    read_whole,
)
from holdfast.trees.payload import READ
from holdfast.trees.scan import CaptureStats, TreeWalker, shown
from holdfast.trees.scan_worker import ScanWorker
from holdfast.trees.shared_dirs import Stored, places_beside
from holdfast.trees.stat_cache import StatCache

_PERMISSIONS = 0o777


class Problem(NamedTuple):
    """Something that is wrong with a tree. `what` is one word, `detail` a sentence for people."""

    path: str
    what: str
    detail: str

    def __str__(self) -> str:
        return f"{self.path}: {self.detail}"


def verify(tree: Path, payload_hash: str | None = None) -> Iterator[Problem]:
    """Read everything and yield what is wrong: nothing, for a sound tree.

    `what` is `ready` (the mark of completeness), `manifest`, `homes`, `missing`, `extra`, `unreadable`,
    `kind`, `content`, `target`, `mode` or `mtime`.
    """
    manifest = yield from _check_manifest(tree, payload_hash)
    if manifest is not None:
        bodies = {path: raw_entries(body) for path, body in manifest.records()}
        yield from _check_payload(tree, manifest, bodies)


def verify_manifest(tree: Path, payload_hash: str | None = None) -> Iterator[Problem]:
    """Like `verify`, but look only at the mark of completeness, at the manifest, whether what is at the top
    of the tree is there, and whether the trees are that have some of its directories: no file is read."""
    manifest = yield from _check_manifest(tree, payload_hash)
    if manifest is not None:
        yield from _check_top(tree, manifest)


def _check_manifest(tree: Path, payload_hash: str | None) -> Generator[Problem, None, Manifest | None]:
    """Check the mark and the manifest; return the manifest if it can be understood."""
    yield from _check_ready(tree, payload_hash)
    try:
        manifest = Manifest.read(tree)
        for _, body in manifest.records():
            raw_entries(body)
    except Failure as failure:
        yield Problem("manifest", "manifest", failure.message)
        return None
    except Exception as error:
        yield Problem("manifest", "manifest", f"the manifest has a broken record: {error}")
        return None
    found = manifest.payload_hash
    if payload_hash is not None and found != payload_hash:
        yield Problem("manifest", "manifest", f"its hash is {found}, but must be {payload_hash}")
    return manifest


def _check_ready(tree: Path, payload_hash: str | None) -> Iterator[Problem]:
    where = os.fspath(tree / READY)
    try:
        fields = strictjson.decode(read_whole(where), source=where)
        said = fields.get("payload_hash") if isinstance(fields, dict) else None
    except FileNotFoundError:
        yield Problem(READY, "ready", "the tree is not marked as complete")
    except (OSError, Failure) as error:
        yield Problem(READY, "ready", f"the mark of completeness cannot be read: {error}")
    else:
        if payload_hash is not None and said != payload_hash:
            yield Problem(READY, "ready", f"it names the hash {said}, but that must be {payload_hash}")


def _check_top(tree: Path, manifest: Manifest) -> Iterator[Problem]:
    stored = yield from _opened(tree)
    if stored is None:
        return
    with stored:
        lost_trees = [
            name
            for name in sorted({each.tree for each in stored.homes.values()})
            if not any(is_directory(place / PAYLOAD) for place in places_beside(tree, name))
        ]
        for name in lost_trees:
            yield Problem(HOMES, "missing", f"the tree {name}, which has some of its files, is gone")
        if lost_trees:
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
        if path and b"/" not in path and path not in stored.homes and path not in directories
        if directory_of(path, body).kind != "m"
    }
    for path in sorted(lost):
        yield _problem(path, "missing", "it is in the manifest, but not there")


def _opened(tree: Path) -> Generator[Problem, None, Stored | None]:
    """The way to what a tree has; None if there is none."""
    try:
        return Stored(tree)
    except Corrupt as failure:
        yield Problem(HOMES, "homes", failure.message)
    except Failure as failure:
        yield Problem(PAYLOAD, "missing", failure.message)
    return None


def _names(directory: int) -> set[bytes]:
    with calls.scandir(directory) as listed:
        return {os.fsencode(each.name) for each in listed}


def _check_payload(
    tree: Path, manifest: Manifest, bodies: dict[bytes, dict[bytes, bytes]]
) -> Iterator[Problem]:
    stored = yield from _opened(tree)
    if stored is None:
        return
    below: dict[bytes, set[bytes]] = {path: set() for path in bodies}
    for path in bodies:
        if path:
            parent, _, name = path.rpartition(b"/")
            below.setdefault(parent, set()).add(name)
    with stored:
        for path, entries in bodies.items():
            body = manifest.body(path) or b""
            if directory_of(path, body).kind != "m":
                yield from _check_directory(stored, path, entries, below[path])


def _check_directory(
    stored: Stored, path: bytes, entries: dict[bytes, bytes], below: set[bytes]
) -> Iterator[Problem]:
    elsewhere = path in stored.homes  # with directories below it that are that tree's own affair
    try:
        here = stored.enter(os.fsdecode(path))
        with calls.scandir(here) as listed:
            present = {
                os.fsencode(entry.name)
                for entry in listed
                if not (elsewhere and entry.is_dir(follow_symlinks=False))
            }
    except OSError as error:
        yield _problem(path, "missing", f"the directory cannot be read: {error.strerror}")
        return
    for name in sorted(present - entries.keys() - below):
        yield _problem(path + b"/" + name if path else name, "extra", "it is not in the manifest")
    for name, raw in entries.items():
        entry = decode_entry(path, raw)
        if name in present or entry.kind in "fl":
            yield from _check_entry(here, entry)


def _check_entry(here: int, entry: ManifestEntry) -> Iterator[Problem]:
    name = os.fsdecode(entry.name)
    try:
        status = calls.stat(name, dir_fd=here, follow_symlinks=False)
        if entry.kind == "l":
            if not stat.S_ISLNK(status.st_mode):
                yield _problem(entry.path, "kind", "it is not a symbolic link")
            elif os.fsencode(calls.readlink(name, dir_fd=here)) != entry.target:
                yield _problem(entry.path, "target", "the symbolic link leads elsewhere")
        elif entry.kind == "f":
            if not stat.S_ISREG(status.st_mode):
                yield _problem(entry.path, "kind", "it is not a file")
            else:
                yield from _check_file(here, name, entry, status)
    except FileNotFoundError:
        yield _problem(entry.path, "missing", "it is in the manifest, but not there")
    except OSError as error:
        yield _problem(entry.path, "unreadable", f"it cannot be read: {error.strerror}")


def _check_file(here: int, name: str, entry: ManifestEntry, status: os.stat_result) -> Iterator[Problem]:
    if status.st_size != entry.size:
        yield _problem(entry.path, "content", f"it has {status.st_size} bytes, but must have {entry.size}")
        return
    reading = calls.open(name, READ, dir_fd=here)
    try:
        if hash_file(reading, status.st_size).digest.hex() != entry.sha256:
            yield _problem(entry.path, "content", "its content is not what was captured")
    finally:
        close_quietly(reading)
    if status.st_mode & _PERMISSIONS | 0o400 != entry.mode & _PERMISSIONS | 0o400:
        yield _problem(entry.path, "mode", f"its mode is {stat.S_IMODE(status.st_mode):04o}")
    if status.st_mtime_ns != entry.mtime_ns:
        yield _problem(entry.path, "mtime", "its time of modification was changed")


def _problem(path: bytes, what: str, detail: str) -> Problem:
    return Problem(shown(os.fsdecode(path)) or ".", what, detail)


Records = Iterator[tuple[bytes, bytes]]


class Change(NamedTuple):
    """One difference. `what` is `added`, `removed` or `modified`; `aspects` say in what respect.

    Aspects: `kind`, `content`, `mode`, `owner`, `mtime`, `target`, `device`, `xattrs`, `links`.
    """

    path: bytes
    what: str
    kind: str
    aspects: tuple[str, ...] = ()
    size: int = 0


def compare(tree_a: Path, tree_b: Path) -> Iterator[Change]:
    """What is different in the second tree, in the order of the paths' parts."""
    yield from _compare(Manifest.read(tree_a).records(), Manifest.read(tree_b).records())


def changes(source: Path, tree: Path | None, *, cache: Path | None = None) -> Iterator[Change]:
    """What is different in a directory from what the snapshot holds; without one, all of it is added.

    Files that the cache of the directory's last capture knows are not read.
    """
    records: Records = iter(()) if tree is None else Manifest.read(tree).records()
    with ExitStack() as stack:
        way = stack.enter_context(TreeWalker(source))
        scout = ScanWorker.start(way, cache, None)
        if scout is not None:
            stack.enter_context(scout)
        yield from _compare(records, _scan(way, cache, scout))


def _scan(way: TreeWalker, cache: Path | None, scout: ScanWorker | None) -> Records:
    device = calls.fstat(way.enter("")).st_dev
    known = StatCache.read(cache, device)
    if scout is not None:
        scout.use(known)
    intake = DirectoryCapture(way, cache=known, tally=CaptureStats(), scout=scout)
    for taken in intake.take_all():
        yield taken.encoded, taken.body


def _compare(old: Records, new: Records) -> Iterator[Change]:
    """Merge two sequences of directories; equal ones are skipped as a whole."""
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
    if one[0] == other[0]:
        return 0
    return -1 if not one[0] or (other[0] and mine < yours) else 1


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
            yield Change(
                entry.path, "modified", entry.kind, _aspects(decode_entry(path, one), entry), entry.size
            )


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
