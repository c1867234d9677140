"""Merges of commits without a work tree: the merged tree, or the paths that conflict.

`git merge-tree` merges as `git merge` does, with renames and merge drivers. No checkout, index or reference changes.
New objects go to the repository, where nothing refers to them, or to a directory in scratch. Like every git command, it
reads `.gitattributes` from a work tree, not from the commits; `write_attributes` creates one with those of a commit.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterable
from pathlib import Path
from typing import NamedTuple

from holdfast.errors import GitFailed
from holdfast.fs import durable
from holdfast.fs.directory import make_directories
from holdfast.fs.names import split_relative
from holdfast.git.contents import TREE, TreeEntry, entries
from holdfast.git.program import Git
from holdfast.git.resolutions import Unmerged, resolve

_LARGEST_ATTRIBUTES = 100 << 20  # bytes
_CONFLICT = "CONFLICT"
_OF_CONTENTS = "CONFLICT (contents)"  # git calls an add/add conflict this too; its text tells them apart
_AUTOMATIC = "Auto-merging"


class Merged(NamedTuple):
    """The result of a merge: its tree, or None and the paths that conflict.

    `messages` are git's, for people. `resolved` are paths whose conflicts a recorded resolution settled (`git rerere`).
    """

    tree: str | None
    conflicts: tuple[str, ...] = ()
    messages: tuple[str, ...] = ()
    resolved: tuple[str, ...] = ()


class Message(NamedTuple):
    """A message of git about some paths; `kind` is one of its fixed short descriptions."""

    paths: tuple[bytes, ...]
    kind: str
    text: str

    @property
    def is_conflict(self) -> bool:
        return self.kind.startswith(_CONFLICT)


class _Answer(NamedTuple):
    """The output of `git merge-tree`. The tree has conflict markers in files whose contents conflict."""

    is_clean: bool
    tree: str
    unmerged: dict[bytes, Unmerged]
    messages: list[Message]


def merge(git: Git, tip: str, commit: str, *, objects: Path | None = None, attributes: Path | None = None) -> Merged:
    """Merge `commit` into `tip`.

    If only contents conflict, and `git rerere` has a resolution for every file, the tree contains the resolutions.
    With `objects`, new objects go to this directory, and commits that exist only there are found. `attributes` is a
    directory with the `.gitattributes` files that apply. Raises `GitFailed` if a commit does not exist, or if the two
    have no common ancestor.
    """
    found = _merge_tree(git, tip, commit, objects, attributes)
    told = tuple(each.text for each in found.messages if each.kind != _AUTOMATIC)
    if found.is_clean:
        return Merged(found.tree, messages=told)
    if _only_contents(found):
        resolved = resolve(git, found.tree, found.unmerged, objects=objects)
        if resolved is not None:
            tree = replace_files(git, found.tree, resolved, objects=objects)
            return Merged(tree, messages=told, resolved=_names(resolved))
    named = (path for each in found.messages if each.is_conflict for path in each.paths)
    return Merged(None, _names(_without_side(each, (tip, commit)) for each in (*found.unmerged, *named)), told)


def write_attributes(git: Git, commit: str, directory: Path, *, objects: Path | None = None) -> None:
    """Create `directory` with the `.gitattributes` files of a commit, where `git merge` would find them."""
    make_directories(directory)
    for each in entries(git, commit, objects=objects):
        if is_attributes(each):
            *above, name = split_relative(os.fsdecode(each.path))
            place = directory.joinpath(*above)
            make_directories(place)
            durable.create(place / name, git.run("cat-file", "blob", each.oid, objects=objects), durable=False)


def is_attributes(entry: TreeEntry) -> bool:
    """Whether git would read attributes from this file: it ignores larger ones."""
    is_small = entry.size < _LARGEST_ATTRIBUTES
    return entry.kind == "f" and is_small and entry.path.rpartition(b"/")[2] == b".gitattributes"


def replace_files(git: Git, tree: str, oids: dict[bytes, str], *, objects: Path | None = None) -> str:
    """Write a tree in which some files have new contents, given as objects by path, and the same modes."""
    here = {path: oid for path, oid in oids.items() if b"/" not in path}
    below: dict[bytes, dict[bytes, str]] = {}
    for path, oid in oids.items():
        name, is_below, rest = path.partition(b"/")
        if is_below:
            below.setdefault(name, {})[rest] = oid
    records = []
    for record in git.run("ls-tree", "-z", tree, objects=objects).split(b"\0"):
        facts, _, name = record.partition(b"\t")
        if name in below and facts.startswith(TREE.encode()):
            made = replace_files(git, facts.split()[2].decode(), below[name], objects=objects)
            records.append(b"%s tree %s\t%s" % (TREE.encode(), made.encode(), name))
        elif name in here:
            records.append(b"%s blob %s\t%s" % (facts.split()[0], here[name].encode(), name))
        else:
            records.append(record)
    return git.run("mktree", "-z", objects=objects, content=b"\0".join(records)).decode().strip()


def _names(paths: Iterable[bytes]) -> tuple[str, ...]:
    return tuple(os.fsdecode(path) for path in sorted(set(paths)))


def _without_side(path: bytes, sides: tuple[str, str]) -> bytes:
    """The path of a file that git renamed because a directory has its name: to `PATH~SIDE`, perhaps with a number."""
    names = "|".join(re.escape(side.replace("/", "_")) for side in sides)
    return re.sub(f"~({names})(_[0-9]+)?$".encode(), b"", path)


# --- The output of git --------------------------------------------------------------------------------


def _merge_tree(git: Git, tip: str, commit: str, objects: Path | None, attributes: Path | None) -> _Answer:
    try:
        raw = git.run(
            *("merge-tree", "--write-tree", "-z", "--messages", tip, commit),
            worktree=attributes,
            git_dir=git.common,
            objects=objects,
            settings=("core.fsync=none",) if objects else (),
        )
        return _parsed(raw, is_clean=True)
    except GitFailed as failure:
        if failure.facts["status"] != 1:
            raise
        return _parsed(failure.output, is_clean=False)


def _parsed(raw: bytes, *, is_clean: bool) -> _Answer:
    """Parse TREE NUL, then for each unmerged entry `MODE OID STAGE TAB PATH NUL`, then NUL, then for each message the
    number of its paths, the paths, the kind and the text, each followed by a NUL."""
    fields = iter(raw.split(b"\0"))
    tree = next(fields).decode()
    unmerged: dict[bytes, Unmerged] = {}
    for field in fields:
        if not field:
            break
        facts, _, path = field.partition(b"\t")
        mode, oid, stage = facts.decode().split()
        unmerged.setdefault(path, {})[int(stage)] = (mode, oid)
    return _Answer(is_clean, tree, unmerged, list(_messages(list(fields))))


def _messages(fields: list[bytes]) -> list[Message]:
    found = []
    at = 0
    while at < len(fields) and fields[at].isdigit():
        end = at + 1 + int(fields[at])
        kind, text = (os.fsdecode(each) for each in fields[end : end + 2])
        found.append(Message(tuple(fields[at + 1 : end]), kind, text.strip()))
        at = end + 2
    return found


def _only_contents(found: _Answer) -> bool:
    return bool(found.unmerged) and all(each.kind == _OF_CONTENTS for each in found.messages if each.is_conflict)
