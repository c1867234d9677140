"""Repair of damaged snapshots: lost or changed blobs are restored from worktree files that have the same hash.

git reads an object from a pack first, and from a loose file if the pack is damaged. So a repaired blob is always a
loose file. Commits and trees are not repaired: nothing else has their content.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

from holdfast.errors import Failure, GitFailed
from holdfast.fs import calls, durable
from holdfast.fs.directory import Directory, make_directories, rename
from holdfast.git.contents import TreeEntry, damaged_entries
from holdfast.git.program import Git
from holdfast.trees.repair import RepairedFile
from holdfast.trees.walker import shown

_WRITTEN = ("core.fsync=loose-object", "core.fsyncMethod=fsync", "core.bigFileThreshold=1024g")  # loose, no pack


def repair(git: Git, commits: Iterable[str], worktrees: Iterable[Path], room: Path) -> list[RepairedFile]:
    """Repair blobs of these commits, and return those that were repaired. `room` is a new directory on the filesystem
    of the repository. After a kill, each blob is either as before or repaired."""
    places = [each for each in worktrees if calls.is_directory(each)]
    found: dict[str, RepairedFile] = {}
    for commit in commits:
        try:
            damaged = [each for each in damaged_entries(git, commit) if each.oid not in found]
        except GitFailed:
            continue  # one of its trees is missing
        for entry in damaged:
            candidates = _candidates(git, entry, places)
            source = next((each for each in candidates if _bring(git, entry, *each, room)), None)
            if source is not None:
                where = shown(os.path.join(source[0], os.fsdecode(source[1])))
                found[entry.oid] = RepairedFile(shown(os.fsdecode(entry.path)), where)
    return list(found.values())


def _candidates(git: Git, entry: TreeEntry, worktrees: list[Path]) -> Iterator[tuple[Path, bytes]]:
    """Files that may have the content: those at the same path, then those that an index lists with this blob."""
    yield from ((top, entry.path) for top in worktrees)
    for top in worktrees:
        for record in git.run("ls-files", "-s", "-z", worktree=top).split(b"\0"):
            facts, _, path = record.partition(b"\t")
            if path != entry.path and entry.oid.encode() in facts.split():
                yield top, path


def _bring(git: Git, entry: TreeEntry, top: Path, path: bytes, room: Path) -> bool:
    """Write the blob of a file to scratch, and move it into the repository if it is the one that is needed."""
    try:
        oid = _hashed(git, entry, top, path, room)
    except (Failure, OSError):  # it is gone, or something else
        return False
    if oid != entry.oid:
        return False
    target = git.objects / oid[:2]
    make_directories(target)
    rename(room / oid[:2] / oid[2:], target / oid[2:])
    with Directory.open(target) as directory:
        durable.sync_names(directory)
    return True


def _hashed(git: Git, entry: TreeEntry, top: Path, path: bytes, room: Path) -> str:
    name, content = os.fsdecode(path), None
    words: tuple[str, ...] = ("--", f"./{name}")
    if entry.kind == "l":
        with Directory.open((top / name).parent) as above:
            words, content = ("--stdin",), os.fsencode(calls.readlink(above.at((top / name).name), dir_fd=above.fd))
    command = ("hash-object", "-w", *words)
    where: dict[str, Any] = {"worktree": top, "objects": room, "alone": True}
    return git.run(*command, **where, content=content, settings=_WRITTEN, private=True).decode().strip()
