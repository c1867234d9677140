"""The guard: the check, before a write, whether another holder has leased the worktree that a path is in.

A hook calls it before every write of an agent, so importing this module loads next to nothing. Reading a few small
files almost always suffices. Otherwise (a store that is not files, a commit in progress) `check` opens the repository,
which takes longer. A lease that cannot be read or understood counts as held. The answer to each case is in the table
of `docs/protocols/leases.md`.
"""

from __future__ import annotations

import os

from holdfast.fs import calls
from holdfast.repository.locating import (
    find_repository_root,
    git_home_of,
    git_worktree_at,
    is_git_home,
    main_worktree,
)

TYPE_CHECKING = False  # type checkers assume that it is true; importing `typing` costs time

if TYPE_CHECKING:
    from collections.abc import Mapping
    from typing import Any, Literal

    from holdfast.errors import LockConflict
    from holdfast.locks.identity import Holder, Liveness

MOST_BYTES = 1 << 16
LONGEST_PATH = 1 << 14  # several times what any system accepts
_NOT_A_LEASE = (ValueError, KeyError, TypeError, AttributeError, OverflowError, RecursionError)


class WorktreePath:
    """A worktree of a repository. (No NamedTuple: that costs an import.)"""

    __slots__ = ("root", "worktree")

    def __init__(self, root: str, worktree: str) -> None:
        self.root = root
        self.worktree = worktree

    def __eq__(self, other: object) -> bool:
        return isinstance(other, WorktreePath) and (self.root, self.worktree) == (other.root, other.worktree)

    def __hash__(self) -> int:
        return hash((self.root, self.worktree))

    def __repr__(self) -> str:
        return f"WorktreePath({self.root!r}, {self.worktree!r})"


def worktrees_of(path: str) -> list[WorktreePath]:
    """The worktrees that a path is in after following links, the innermost first: one for each repository around it. A
    git worktree may be inside another worktree of the same repository, and is not part of that one."""
    real = calls.realpath(possible_path(path))
    found, here, above = list[WorktreePath](), "", real
    while here != above:
        here, above = above, os.path.dirname(above)
        below = real[len(here) :].strip(os.sep).split(os.sep)
        if below[0] == "main" and calls.is_repository(here):
            found.append(WorktreePath(here, "main"))
        elif below[0] == "worktrees" and len(below) > 1 and calls.is_repository(here):
            found.append(WorktreePath(here, below[1]))
        root = git_home_of(here)
        if root is not None and all(each.root != root for each in found):
            name = git_worktree_at(here, root)
            found += [] if name is None else [WorktreePath(root, name)]
    return found


def worktrees_at(directory: str) -> list[WorktreePath]:
    """The worktrees that a write from this directory may go to: those it is in, else all those of its repository."""
    real = calls.realpath(possible_path(directory))
    found, root = worktrees_of(real), find_repository_root(real)
    if root is not None and not any(each.root == root for each in found):
        at = os.path.join(root, ".jvs" if is_git_home(root) else "", "worktrees")  # of a git home, the records
        main = main_worktree(root)
        names = [main, *sorted(_names(at) - {main})]
        found += [WorktreePath(root, name) for name in names]
    return found


def possible_path(path: str) -> str:
    """The path, with a question mark for each character that no path can have; the directories before it are kept."""
    usable = path[:LONGEST_PATH].replace("\0", "?")
    try:
        os.fsencode(usable)
    except UnicodeEncodeError:
        usable = "".join("?" if "\ud800" <= each < "\udc80" or "\udcff" < each <= "\udfff" else each for each in usable)
    return usable


def check(place: WorktreePath, lock_id: str | None, actor: str | None = None) -> None:
    """Raise `LockConflict` if another holder has the lease of this worktree."""
    answer = quick_check(place, lock_id, actor)
    if answer is None:
        full_check(place, lock_id, actor)
    elif answer is not True:
        raise answer


def quick_check(
    place: WorktreePath, lock_id: str | None, actor: str | None = None
) -> LockConflict | Literal[True] | None:
    """True if the caller may write, the conflict if another holder has leased the worktree; None if files cannot tell.

    A lease is the caller's own if it has this `lock_id`, or if the caller acts under it: see `acts_under`.
    """
    try:
        if not _files_tell_all(place.root):
            return None
    except OSError:
        return None
    leases = os.path.join(place.root, ".jvs", "locks")
    try:
        content = calls.read_small(os.path.join(leases, f"{place.worktree}.json"), MOST_BYTES, follow=False)
    except FileNotFoundError:
        is_link = not calls.is_directory(leases) and calls.exists(leases)
        return _unreadable(place, f"{leases} is a link") if is_link else True
    except (OSError, ValueError) as error:
        return _unreadable(place, str(error))
    import json

    try:
        lease = json.loads(content)
        if lock_id and lease["lock_id"] == lock_id:
            return True
        return _judge(place, lease, actor)
    except (OSError, *_NOT_A_LEASE) as error:
        return _unreadable(place, f"{type(error).__name__}: {error}")


def full_check(place: WorktreePath, lock_id: str | None, actor: str | None = None) -> None:
    """Like `check`, but asks the repository and its store."""
    import msgspec

    from holdfast.errors import NotFound
    from holdfast.locks.identity import acts_under
    from holdfast.repository.repository import Repository

    try:
        state = Repository(place.root).leases.state(place.worktree)
    except NotFound:
        return  # not a repository, or one that is being created
    if state is None or state.expired or state.lease.lock_id == lock_id:
        return
    if not acts_under(state.lease.holders(), state.lease.actor, actor):
        raise conflict(place, msgspec.to_builtins(state.lease), state.time_left, state.liveness)


def holds_nothing(start: str, lock_id: str | None, actor: str | None = None) -> bool:
    """Whether files alone prove that this agent has no lease in the repository that `start` is in."""
    root = find_repository_root(start)
    if root is None:
        return True
    leases = os.path.join(root, ".jvs", "locks")
    try:
        return _files_tell_all(root) and not any(
            _may_be_ours(os.path.join(leases, name), lock_id, actor)
            for name in _names(leases)
            if name.endswith(".json")
        )
    except OSError:
        return False


def conflict(place: WorktreePath, lease: Mapping[str, Any], time_left: float, liveness: Liveness) -> LockConflict:
    from holdfast.clock import format_ago, format_duration
    from holdfast.errors import LockConflict

    holder_id, actor = lease["holder_id"], lease.get("actor", "")
    purpose = f", for: {lease['purpose']}" if lease.get("purpose") else ""
    return LockConflict(
        f"do not write into {place.worktree}: it is leased by {f'{actor}, ' if actor else ''}{holder_id}{purpose}; "
        f"leased {format_ago(lease['created_at'])}, expires in {format_duration(time_left)} (holder {liveness.value})",
        hint="Work in a worktree of your own ('holdfast worktree create NAME'), or wait: "
        f"'holdfast lease acquire --worktree {place.worktree} --wait 10m'.",
        worktree=place.worktree,
        root=place.root,
        holder_id=holder_id,
        host=holder_id.partition(":")[0],
        actor=actor,
        liveness=liveness.value,
        purpose=lease.get("purpose", ""),
        created_at=lease["created_at"],
        expires_at=lease["lease_expires_at"],
        time_left=time_left,
    )


def _unreadable(place: WorktreePath, problem: str) -> LockConflict:
    """The conflict with a lease that cannot be read, and so may be anybody's."""
    from holdfast.errors import LockConflict

    return LockConflict(
        f"do not write into {place.worktree}: its lease cannot be read, so it counts as held ({problem[:160]})",
        hint="'holdfast doctor' says what is wrong with it, and 'holdfast doctor --fix' repairs what it can.",
        worktree=place.worktree,
        root=place.root,
        problem=problem[:160],
    )


def _judge(place: WorktreePath, lease: Mapping[str, Any], actor: str | None) -> LockConflict | Literal[True]:
    from holdfast.clock import SYSTEM_CLOCK, BootMark, ClockReading
    from holdfast.locks.identity import acts_under, boot_clock_id, liveness_behind

    mark = BootMark(*lease["boot_expires_at"]) if lease.get("boot_expires_at") else None
    now = ClockReading(boot_clock_id(), SYSTEM_CLOCK.boot()).at(SYSTEM_CLOCK.wall())
    left = now.until(lease["lease_expires_at"], mark, margin=True)
    if left <= 0:
        return True
    holders = _holders(lease, "holder_id", "on_behalf_of")
    if acts_under(holders, lease.get("actor"), actor):
        return True
    return conflict(place, lease, left, liveness_behind(holders[0], detached=bool(lease.get("detached"))))


def _may_be_ours(path: str, lock_id: str | None, actor: str | None) -> bool:
    import json

    from holdfast.locks.identity import acts_under

    try:
        lease = json.loads(calls.read_small(path, MOST_BYTES, follow=False))
        return bool(lock_id and lease["lock_id"] == lock_id) or acts_under(
            _holders(lease, "holder_id"), lease.get("actor"), actor
        )
    except FileNotFoundError:
        return False
    except (OSError, *_NOT_A_LEASE):
        return True


def _holders(lease: Mapping[str, Any], *fields: str) -> list[Holder | None]:
    from holdfast.locks.identity import Holder

    return [Holder.from_record({"holder_id": lease.get(each), **lease["identity"]}) for each in fields]


def _files_tell_all(root: str) -> bool:
    """Whether the store is files, and no commit waits to be carried out."""
    ours = os.path.join(root, ".holdfast")
    return "config.json" not in _names(ours) and all(
        name.endswith((".done", ".tmp"))
        for name in _names(os.path.join(ours, "intents"))  # a draft decides nothing
    )


def _names(path: str) -> set[str]:
    """The entries of a directory; none if it does not exist. An unreadable one raises `OSError`."""
    try:
        with calls.scandir(path) as entries:
            return {entry.name for entry in entries}
    except (FileNotFoundError, NotADirectoryError):
        return set()
