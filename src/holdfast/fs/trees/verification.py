"""Whether a snapshot's tree is still what it was when it was taken."""

from __future__ import annotations

import os
import stat
from collections.abc import Generator, Iterator
from pathlib import Path
from typing import NamedTuple

from holdfast.errors import Corrupt, Failure
from holdfast.fs import calls, strictjson
from holdfast.fs.directory import close_quietly
from holdfast.fs.trees.content import READ
from holdfast.fs.trees.copying import hash_file
from holdfast.fs.trees.descent import shown
from holdfast.fs.trees.homes import Stored, places_beside
from holdfast.fs.trees.layout import HOMES, PAYLOAD, READY
from holdfast.fs.trees.manifest import (
    Manifest,
    ManifestEntry,
    decode_entry,
    directory_of,
    raw_entries,
    read_whole,
)

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
            if not any(_is_directory(place / PAYLOAD) for place in places_beside(tree, name))
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


def _is_directory(path: Path) -> bool:
    try:
        return stat.S_ISDIR(calls.stat(path, follow_symlinks=False).st_mode)
    except OSError:
        return False
