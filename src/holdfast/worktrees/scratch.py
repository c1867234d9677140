"""Scratch: where trees are made before anybody may see them, and how others tell whether one is in use.

`.jvs/tmp/<id>/` holds `lock` (locked by the process that works there, so the kernel frees it when that
dies), `intent.json` (what it is for and which snapshots it needs), and what is being made. Nobody
judges by age or by pid: a scratch whose lock can be had is abandoned, and is removed.

A snapshot that a scratch names in `uses` is not collected while the scratch is in use. The order of
steps on both sides makes that certain: who begins writes its intent first and looks afterwards
whether the snapshot is doomed; who collects dooms the snapshot first and looks at the intents after
that. One of them sees the other.
"""

from __future__ import annotations

import contextlib
import errno
import os
import secrets
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

import msgspec

from holdfast.clock import format_instant
from holdfast.errors import AlreadyExists, Corrupt, Failure, IoFailure, NotFound
from holdfast.fs import calls, durable
from holdfast.fs.directory import Directory, close_quietly, io_failure, is_there, make_directories
from holdfast.fs.names import is_safe_name
from holdfast.leases.rules import Identity
from holdfast.locks import flock
from holdfast.locks.file_lock import FileLocker, LockGuard
from holdfast.store.model import StructCodec
from holdfast.worktrees.control import Control, Places
from holdfast.worktrees.records import OPERATIONS

LOCK, INTENT, SWEPT = "lock", "intent.json", ".swept"
_ATTEMPTS = 100


class ScratchIntent(msgspec.Struct, frozen=True, kw_only=True):
    """What a scratch is for."""

    scratch_id: str
    purpose: str
    begun_at: str
    holder_id: str
    worktree_id: str | None = None
    uses: tuple[str, ...] = ()
    identity: Identity = Identity()


class Scratch(NamedTuple):
    """A scratch that this process works in."""

    scratch_id: str
    path: Path

    @property
    def tree(self) -> Path:
        """Where to make a tree; renamed away when it is complete."""
        return self.path / "tree"


class Abandoned(NamedTuple):
    """A scratch whose process is gone. `intent` is None if it was not written or cannot be read."""

    scratch_id: str
    path: Path
    intent: ScratchIntent | None


_CODEC: StructCodec[ScratchIntent] = StructCodec(ScratchIntent)


@contextlib.contextmanager
def scratch(
    control: Control,
    purpose: str,
    *,
    worktree: str | None = None,
    uses: Sequence[str] = (),
    scratch_id: str | None = None,
) -> Iterator[Scratch]:
    """A scratch of our own, under lock until the block ends; what is left in it then is removed.

    A kill leaves it for whoever sweeps next. The name is never used again. As long as an operation
    of the same id is pending on the worktree, its scratch is what it will be finished with: it stays.
    """
    scratch_id = scratch_id or secrets.token_hex(8)
    path = control.places.scratch / scratch_id
    with _locked(path):  # 1. before there is anything that could look abandoned
        intent = ScratchIntent(
            scratch_id=scratch_id,
            purpose=purpose,
            begun_at=format_instant(control.store.now()),
            holder_id=control.holder.holder_id,
            worktree_id=worktree,
            uses=tuple(uses),
            identity=Identity.of(control.holder),
        )
        with contextlib.suppress(AlreadyExists):  # of the one whose operation we finish in its scratch
            durable.create(path / INTENT, _CODEC.encode(intent), durable=False)  # 2. counts while we live
        try:
            yield Scratch(scratch_id, path)
        finally:
            if worktree is None or not is_needed(control, scratch_id, worktree):
                with contextlib.suppress(Failure):  # what was done is done; this is litter then
                    _discard(path)


def _locked(path: Path) -> LockGuard:
    """Make a scratch and lock it. One who sweeps may take it for abandoned before we have locked it."""
    while True:
        make_directories(path)
        with contextlib.suppress(NotFound):
            return FileLocker().lock_exclusive(path / LOCK)


def is_needed(control: Control, scratch_id: str, worktree: str) -> bool:
    """Whether an operation that is not at its end needs this scratch; what cannot be known counts as yes."""
    try:
        pending = control.store.read(OPERATIONS.key(worktree))
    except Failure:
        return True
    return pending is not None and pending.record.operation_id == scratch_id


def in_use(places: Places) -> Iterator[ScratchIntent]:
    """What is being made at this moment, by processes that live."""
    for scratch_id in _scratch_ids(places):
        path = places.scratch / scratch_id
        if not is_abandoned(path):
            intent = _intent_of(path)
            if intent is not None:
                yield intent


def abandoned(places: Places) -> Iterator[Abandoned]:
    """What dead processes have left."""
    for scratch_id in _scratch_ids(places):
        path = places.scratch / scratch_id
        if is_abandoned(path):
            yield Abandoned(scratch_id, path, _intent_of(path))


def is_left(places: Places, scratch_id: str) -> bool:
    """Whether there is still something of a scratch: who worked in it has not come to its end."""
    path = places.scratch / scratch_id
    return is_there(path) or is_there(path.with_name(scratch_id + SWEPT))


def sweep(places: Places, scratch_id: str) -> bool:
    """Remove a scratch if nobody works in it; False if somebody does. Not there is fine."""
    path = places.scratch / scratch_id
    if scratch_id.endswith(SWEPT):  # nobody begins there any more
        if not is_abandoned(path):
            return not is_there(path)
        _remove(path)
        return True
    try:
        guard = FileLocker().try_lock_exclusive(path / LOCK)
    except NotFound:
        return True
    if guard is None:
        return False
    with guard:
        _discard(path)
    return True


def _discard(path: Path) -> None:
    """Remove a scratch that we have locked.

    It gets another name first. Should somebody be about to begin in it, they find it gone and make it
    anew; and who looks whether it is in use makes no lock file in what is being removed.
    """
    swept = path.with_name(path.name + SWEPT)
    if is_there(swept):
        _remove(swept)  # left by an earlier one that was killed
    try:
        calls.rename(path, swept)
    except FileNotFoundError:
        return
    except OSError as error:
        raise io_failure("move away", path, error) from error
    _remove(swept)


def _remove(swept: Path) -> None:
    """The lock goes last: as long as it is held, what is there is not abandoned.

    One who was about to begin here may make the lock once more, and finds then that it is gone.
    """
    from holdfast.trees import remove_tree

    with contextlib.suppress(NotFound), Directory.open(swept) as directory:
        for name in directory.names():
            if name != LOCK:
                remove_tree(swept / name)
    for attempt in range(_ATTEMPTS):
        try:
            remove_tree(swept)
        except IoFailure as failure:
            if attempt + 1 == _ATTEMPTS or failure.facts["errno"] != errno.ENOTEMPTY:
                raise
        else:
            return


def _scratch_ids(places: Places) -> list[str]:
    try:
        with Directory.open(places.scratch) as directory:
            return [name for name in directory.directories() if is_safe_name(name)]
    except NotFound:
        return []


def is_abandoned(path: Path) -> bool:
    """Whether nobody works there. Makes nothing: it may be about to be removed."""
    try:
        fd = calls.open(path / LOCK, os.O_RDWR | getattr(os, "O_CLOEXEC", 0))
    except FileNotFoundError:
        return is_there(path)  # its process died, or is about to lock it, or to remove it
    except OSError as error:
        raise io_failure("look at", path / LOCK, error) from error
    try:
        return flock.try_lock(fd, shared=True)
    except OSError as error:
        raise io_failure("look at", path / LOCK, error) from error
    finally:
        close_quietly(fd)


def _intent_of(path: Path) -> ScratchIntent | None:
    try:
        return _CODEC.decode(durable.read(path / INTENT, limit=1 << 20), str(path / INTENT))
    except (NotFound, Corrupt):
        return None
