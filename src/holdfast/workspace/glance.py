"""A glance at whether a path may be written to, loading next to nothing: a hook asks before every write.

What can be told from a few small files is told here, by the rules that leases have; for everything else
(a store that is not files, a commit that is being carried out, a record that cannot be read) the answer
is None: ask `Repository`, which takes longer because it knows more.
"""

from __future__ import annotations

import json
import os
import stat
from collections.abc import Mapping
from typing import Any, NamedTuple

from holdfast.errors import LockConflict
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


def glance(place: Place, lock_id: str | None) -> LockConflict | bool | None:
    """True if nobody else has leased the worktree, the conflict if somebody has; None if it takes more.

    A lease is ours if we name its `lock_id`, or if its holder (or the agent that a server holds it for)
    is a process that this one descends from.
    """
    if not _is_settled(place.root):
        return None
    try:
        lease = json.loads(_content(os.path.join(place.root, ".jvs", "locks", f"{place.worktree}.json")))
        if lock_id and lease["lock_id"] == lock_id:
            return True
        return _judged(place, lease)
    except FileNotFoundError:
        return True
    except (OSError, ValueError, KeyError, TypeError):
        return None


def conflict(place: Place, lease: Mapping[str, Any], time_left: float) -> LockConflict:
    """Why not to write into a worktree."""
    purpose = f", for: {lease['purpose']}" if lease.get("purpose") else ""
    return LockConflict(
        f"{place.worktree} is leased by {lease['holder_id']} since {lease['created_at']}{purpose}: "
        "do not write there",
        hint="Work in a worktree of your own ('holdfast worktree create NAME'), or wait: "
        f"'holdfast lock acquire --worktree {place.worktree} --wait 10m'.",
        worktree=place.worktree,
        root=place.root,
        holder_id=lease["holder_id"],
        purpose=lease.get("purpose", ""),
        since=lease["created_at"],
        expires_at=lease["lease_expires_at"],
        time_left=time_left,
    )


def _judged(place: Place, lease: Mapping[str, Any]) -> LockConflict | bool:
    from holdfast.clock import SYSTEM_CLOCK, parse_instant
    from holdfast.leases.moments import BootMark, Reading
    from holdfast.locks.callers import is_ours
    from holdfast.locks.holders import Holder, boot_clock_id

    mark = BootMark(*lease["boot_expires_at"]) if lease.get("boot_expires_at") else None
    moment = Reading(boot_clock_id(), SYSTEM_CLOCK.boot()).at(SYSTEM_CLOCK.wall())
    left = moment.until(parse_instant(lease["lease_expires_at"]), mark, margin=True)
    if left <= 0:
        return True
    for each in (lease["holder_id"], lease.get("on_behalf_of")):
        holder = Holder.from_record({"holder_id": each, **lease["identity"]}) if each else None
        if holder is not None and is_ours(holder):
            return True
    return conflict(place, lease, left)


def _is_settled(root: str) -> bool:
    """Whether the files say all: the store is files, and no commit waits to be carried out."""
    ours = os.path.join(root, ".holdfast")
    return "config.json" not in _names(ours) and all(
        name.endswith(".done") for name in _names(os.path.join(ours, "intents"))
    )


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
