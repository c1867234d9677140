"""Resolutions that `git rerere` has recorded, applied to a merge without a work tree.

git keeps them in `rr-cache` of the common directory, which all worktrees share. The hash of the conflicting sides names
a directory with the file as it conflicted (`preimage`), the file as the user resolved it (`postimage`), and more
pairs (`preimage.1`). The hash and the normal form of conflicts are git's. This module only reads there.

Resolutions of files that a checkout converts (line endings, filters) are not found: their bytes differ.
"""

from __future__ import annotations

import hashlib
import os
import re
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple, TypeAlias

from holdfast.errors import Failure, GitFailed
from holdfast.fs import calls, durable
from holdfast.fs.directory import Directory
from holdfast.git.contents import commit_tree
from holdfast.git.program import Git

Unmerged: TypeAlias = dict[int, tuple[str, str]]
"""The mode and object of each stage of a path that conflicts: 1 the common ancestor, 2 and 3 the sides."""

RESOLUTIONS = "rr-cache"
_LARGEST = 64 << 20
_SHA256 = 64
_REGULAR = ("100644", "100755")
_DEEPEST = 50
_LINES = re.compile(rb"[^\n]*\n|[^\n]+")
_VARIANT = re.compile(r"postimage(\.[1-9][0-9]{0,3})?")


class NormalConflict(NamedTuple):
    """A file with conflicts in git's normal form: no labels, no common ancestor, the sides of each conflict in order.
    `sides` are those of all conflicts; they identify the resolution."""

    text: bytes
    sides: tuple[bytes, ...]


def resolve(git: Git, tree: str, unmerged: dict[bytes, Unmerged], *, objects: Path | None) -> dict[bytes, str] | None:
    """The object with the resolved content of each conflicting path of a merge; None if one has no resolution.

    `tree` has the conflict markers. A repository in which `git rerere` is switched off has no resolutions.
    """
    place = git.common / RESOLUTIONS
    if not calls.is_directory(place) or not all(map(_can_resolve, unmerged.values())) or not _is_enabled(git):
        return None
    found = {}
    for path in unmerged:
        oid = _resolve_one(git, place, tree, path, objects)
        if oid is None:
            return None
        found[path] = oid
    return found


def _can_resolve(stages: Unmerged) -> bool:
    """Whether git would look for a resolution: both sides are regular files. If both sides add the file with different
    modes, the modes conflict too, and no resolution settles that."""
    sides = [stages[stage][0] for stage in (2, 3) if stage in stages]
    return len(sides) == 2 and set(sides) <= set(_REGULAR) and (1 in stages or len(set(sides)) == 1)


def _is_enabled(git: Git) -> bool:
    """Whether `git rerere` is enabled; without a setting it is, because its directory exists."""
    try:
        return git.run("config", "--type=bool", "--get", "rerere.enabled").strip() == b"true"
    except GitFailed as failure:
        if failure.facts["status"] != 1:
            raise
        return True


def _resolve_one(git: Git, place: Path, tree: str, path: bytes, objects: Path | None) -> str | None:
    content = git.run("cat-file", "blob", f"{tree}:{os.fsdecode(path)}", objects=objects)
    this = normalized(content)
    if this is None:
        return None
    for before, after in _recorded(place / conflict_id(this, is_sha256=len(tree) == _SHA256)):
        oid = _apply(git, path, (before, this.text, after), objects)
        if oid is not None:
            return oid
    return None


def _recorded(directory: Path) -> Iterator[tuple[bytes, bytes]]:
    """The recorded resolutions of one conflict: the file before and after each."""
    try:
        with Directory.open(directory) as place:
            for name in sorted(place.names()):
                if _VARIANT.fullmatch(name):
                    after = durable.read_in(place, name, limit=_LARGEST)
                    yield durable.read_in(place, name.replace("post", "pre"), limit=_LARGEST), after
    except Failure:  # there is none, or it was pruned meanwhile: then the conflict is unresolved
        return


def _apply(git: Git, path: bytes, contents: tuple[bytes, bytes, bytes], objects: Path | None) -> str | None:
    """Merge what changed from `preimage` to `postimage` into this file, as git does; None if that conflicts.

    It is a merge of commits that have this file only, because `git merge-file` needs files.
    """
    commits: list[str] = []
    name = path.rpartition(b"/")[2]
    for content in contents:
        oid = git.run("hash-object", "-w", "--stdin", objects=objects, content=content).strip()
        tree = git.run("mktree", "-z", objects=objects, content=b"100644 blob %s\t%s\0" % (oid, name)).decode().strip()
        commits.append(commit_tree(git, tree, commits[:1], objects=objects))
    try:
        merged = git.run("merge-tree", "--write-tree", commits[1], commits[2], objects=objects).decode().strip()
    except GitFailed as failure:
        if failure.facts["status"] != 1:
            raise
        return None
    return git.run("rev-parse", "--verify", f"{merged}:{os.fsdecode(name)}", objects=objects).decode().strip()


# --- Conflicts in git's normal form -------------------------------------------------------------------


def conflict_id(conflict: NormalConflict, *, is_sha256: bool) -> str:
    """The name of the directory that has the resolutions of these conflicts."""
    digest = hashlib.sha256() if is_sha256 else hashlib.sha1()
    for side in conflict.sides:
        digest.update(side + b"\0")
    return digest.hexdigest()


def normalized(content: bytes) -> NormalConflict | None:
    """The normal form of a file with conflict markers; None if it has none, or markers that do not match."""
    if b"\0" in content or len(content) > _LARGEST:
        return None
    lines = (each[0] for each in _LINES.finditer(content))  # a list of short lines would be many times larger
    text = bytearray()
    sides: list[bytes] = []
    for line in lines:
        if not _is_marker(line, b"<"):
            text += line
            continue
        found = _one_conflict(lines)
        if found is None:
            return None
        sides += found
        text += _written(found)
    return NormalConflict(bytes(text), tuple(sides)) if sides else None


def _one_conflict(lines: Iterator[bytes], depth: int = 0) -> tuple[bytes, bytes] | None:
    """The two sides, the smaller first, of the conflict whose first marker was just read; None if it does not end, or
    has too many conflicts in each other."""
    sides = {"<": bytearray(), "|": bytearray(), "=": bytearray()}
    side = "<"
    for line in lines:
        if _is_marker(line, b"<"):
            inner = _one_conflict(lines, depth + 1) if depth < _DEEPEST else None
            if inner is None:
                return None
            sides[side if side == "<" else "="] += _written(inner)
        elif _is_marker(line, b"|"):
            if side != "<":
                return None
            side = "|"
        elif _is_marker(line, b"="):
            if side == "=":
                return None
            side = "="
        elif _is_marker(line, b">"):
            if side != "=":
                return None
            one, two = sorted((bytes(sides["<"]), bytes(sides["="])))
            return one, two
        else:
            sides[side] += line
    return None


def _written(sides: tuple[bytes, bytes]) -> bytes:
    return b"<<<<<<<\n%s=======\n%s>>>>>>>\n" % sides


def _is_marker(line: bytes, character: bytes) -> bool:
    """Whether a line is a conflict marker; those that begin and end a conflict have a label."""
    after = line[7:8]
    return line.startswith(character * 7) and (after == b" " if character in b"<>" else after.isspace())
