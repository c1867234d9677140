"""A glance at whether a path may be written to, loading next to nothing: a hook asks before every write.

What can be told from two or three small files is told here; for everything else (a lease that somebody
else seems to hold, a store that is not files, a commit that is being carried out) the answer is None:
ask `Repository`, which takes longer because it knows more. So this can only ever say "nobody is in
your way", and says it by the same files.
"""

from __future__ import annotations

import json
import os
import stat
from typing import NamedTuple

from holdfast.fs import calls

MOST_BYTES = 1 << 16


class Place(NamedTuple):
    """A worktree of a repository, by the path of something in it."""

    root: str
    worktree: str


def place_of(path: str) -> Place | None:
    """The worktree that a path is in, wherever links on the way lead; None if it is in none."""
    here = calls.realpath(path)
    below: list[str] = []
    while True:
        if below and _is_directory(os.path.join(here, ".jvs")):
            return _worktree(here, below[::-1])
        above, name = os.path.split(here)
        if above == here:
            return None
        below.append(name)
        here = above


def nobody_in_the_way(place: Place, lock_id: str | None) -> bool | None:
    """True if the worktree is not leased, or under this lock id; None if that takes a closer look."""
    if _names(os.path.join(place.root, ".holdfast")) - {"intents"} or any(
        not name.endswith(".done") for name in _names(os.path.join(place.root, ".holdfast", "intents"))
    ):
        return None
    try:
        content = _content(os.path.join(place.root, ".jvs", "locks", f"{place.worktree}.json"))
    except FileNotFoundError:
        return True
    except OSError:
        return None
    try:
        lease = json.loads(content)
    except ValueError:
        return None
    return True if lock_id and isinstance(lease, dict) and lease.get("lock_id") == lock_id else None


def _worktree(root: str, below: list[str]) -> Place | None:
    if below[0] == "main":
        return Place(root, "main")
    if below[0] == "worktrees" and len(below) > 1:
        return Place(root, below[1])
    return None


def _is_directory(path: str) -> bool:
    try:
        return stat.S_ISDIR(calls.stat(path, follow_symlinks=False).st_mode)
    except OSError:
        return False


def _names(path: str) -> set[str]:
    try:
        with calls.scandir(path) as entries:
            return {entry.name for entry in entries}
    except OSError:
        return set()


def _content(path: str) -> bytes:
    descriptor = calls.open(path, os.O_RDONLY | getattr(os, "O_CLOEXEC", 0))
    try:
        return calls.read(descriptor, MOST_BYTES)
    finally:
        calls.close(descriptor)
