"""The directories of worktrees: found without being led astray, and told apart by their inodes.

A name is checked before it becomes a path, and the path is walked without following a link: `main` or
`worktrees/<name>` that is a symbolic link would lead work, or its removal, to some other place.
"""

from __future__ import annotations

import contextlib
import errno
import os
import secrets
import stat
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

import msgspec

from holdfast.clock import format_instant
from holdfast.errors import (
    AlreadyExists,
    Corrupt,
    DirectoryReplaced,
    Failure,
    IoFailure,
    LockConflict,
    LockNotHeld,
    NotDurable,
    NotFound,
    NotWritable,
    Refused,
)
from holdfast.fs import calls, durable
from holdfast.fs.directory import Directory, close_quietly, io_failure, is_there, make_directories
from holdfast.fs.mounts import mounts_beneath
from holdfast.fs.names import is_safe_name, safe_name
from holdfast.leases.rules import Identity, Lease
from holdfast.leases.service import HeldLease, acquire
from holdfast.locks import flock
from holdfast.locks.file_lock import FileLocker, LockGuard
from holdfast.repository.context import RepositoryContext, RepositoryPaths, being_changed
from holdfast.repository.records import MAIN, OPERATIONS, Isolation, WorktreeConfig
from holdfast.store.model import StructCodec, View


def worktree_name(text: str) -> str:
    """The text as the name of a worktree, or `NameInvalid`: it is checked before anything is looked up."""
    return safe_name(text, what="name of a worktree")


def other_than_main(name: str, doing: str) -> str:
    """The name, unless it is that of `main`, to which this is never done."""
    if name == MAIN:
        raise Refused(
            f"{MAIN} cannot be {doing}: every repository has it",
            hint="Work in another worktree if you want one that comes and goes: 'holdfast worktree create'.",
            worktree=MAIN,
        )
    return name


def parent_of(places: RepositoryPaths, worktree: str) -> Directory:
    """The open directory in which the worktree's directory has its name; a link is refused."""
    with Directory.open(places.root) as root:
        if worktree != MAIN:
            return root.enter("worktrees")
    return Directory.open(places.root)


def status_of(places: RepositoryPaths, worktree: str) -> os.stat_result | None:
    """The status of what stands at a worktree's path (a link is not followed), or None if nothing does."""
    with parent_of(places, worktree) as parent:
        return parent.status(places.payload(worktree).name)


def directory_of(control: RepositoryContext, worktree: str) -> Path:
    """The path of a worktree's directory, which is there and is neither a link nor a file."""
    with parent_of(control.places, worktree) as parent:
        name = control.places.payload(worktree).name
        try:
            parent.enter(name).close()
        except IoFailure as failure:
            status = parent.status(name)
            if status is None or stat.S_ISDIR(status.st_mode):
                raise
            raise DirectoryReplaced(
                f"where the directory of {worktree} should be stands something else: {parent.where(name)}",
                worktree=worktree,
                path=parent.where(name),
            ) from failure
        except NotFound:
            raise NotFound(
                f"the worktree {worktree} has lost its directory {control.places.payload(worktree)}",
                hint="Somebody moved or deleted it by hand. Put it back, or restore a snapshot in place.",
                worktree=worktree,
                path=str(control.places.payload(worktree)),
            ) from None
    return control.places.payload(worktree)


def refuse_replaced(control: RepositoryContext, worktree: str) -> None:
    """Refuse a worktree whose directory somebody has replaced, by a link or a file; none at all is fine."""
    with contextlib.suppress(NotFound):
        directory_of(control, worktree)


def refuse_if_mounted(control: RepositoryContext, worktree: str, doing: str, path: str | None = None) -> None:
    """Refuse to move or delete a directory, or the part `path` of it, in which something is mounted.

    What is mounted is not part of it: it would vanish from where its users look for it, or be deleted too.
    """
    if status_of(control.places, worktree) is None:
        return
    with Directory.open(directory_of(control, worktree)) as directory:
        mounted = sorted(mounts_beneath(directory.fd)) if directory.fd is not None else []
    if path is not None:
        mounted = [each for each in mounted if each == path or each.startswith(f"{path}/")]
    if mounted:
        raise Refused(
            f"{worktree} cannot be {doing}: something is mounted at {ascii(mounted[0])[1:-1]} in it",
            hint="Unmount it first.",
            worktree=worktree,
        )


def refuse_if_fixed(control: RepositoryContext, worktree: str) -> None:
    """Refuse to begin what moves a worktree's directory if we may not change the directory that it is in.

    What was decided and cannot be carried out would keep everybody from the worktree.
    """
    with parent_of(control.places, worktree) as parent:
        if not calls.access(parent.shown, os.W_OK | os.X_OK):
            refused = PermissionError(errno.EACCES, os.strerror(errno.EACCES))
            raise NotWritable("move", control.places.payload(worktree), refused)


def inode_of(status: os.stat_result | None) -> str | None:
    """What tells a directory from every other one that exists at the same time; None for other things."""
    if status is None or not stat.S_ISDIR(status.st_mode):
        return None
    return f"{status.st_dev}:{status.st_ino}"


def which_has(inode: str | None, found: Sequence[os.stat_result], *, same_boot: bool) -> int | None:
    """Which of these directories, all of one repository, is the one of this inode; None if it cannot be told.

    The number of the device may be another one after a reboot, so it counts only where it must: several roots
    of btrfs subvolumes, which all have the same inode.
    """
    number = (inode or "").rpartition(":")[2]
    candidates = [index for index, each in enumerate(found) if str(each.st_ino) == number]
    if len(candidates) > 1 and same_boot:
        candidates = [index for index in candidates if inode_of(found[index]) == inode]
    return candidates[0] if len(candidates) == 1 else None


def sync_names(places: RepositoryPaths, worktree: str) -> None:
    """Make the name of a worktree's directory, or its absence, survive a power cut."""
    with parent_of(places, worktree) as parent:
        try:
            parent.sync()
        except OSError as error:
            raise NotDurable("sync the directory", parent.shown, error) from error


def drop_empty_home(places: RepositoryPaths, worktree: str) -> None:
    """Remove the directory that the record of a worktree was in. The caller holds the payload lock, so
    nobody is about to put a new one there; if it stays, after a kill, it means nothing."""
    with contextlib.suppress(OSError):
        calls.rmdir(places.root / ".jvs" / "worktrees" / worktree)


def drop_cache(places: RepositoryPaths, worktree: str) -> None:
    """Forget what is cached about a worktree's files, which costs only time."""
    with contextlib.suppress(NotFound):
        durable.remove(places.stat_cache(worktree))


def already_there(name: str) -> AlreadyExists:
    """What to say of a worktree's name that is taken."""
    return AlreadyExists(f"there is a worktree {name} already", worktree=name)


def stranger(path: Path) -> AlreadyExists:
    """What to say of something at a worktree's path that belongs to no worktree."""
    return AlreadyExists(
        f"something stands at {path} that belongs to no worktree",
        hint="Move it away, or choose another name. Holdfast does not touch what it did not make.",
        path=str(path),
    )


@contextlib.contextmanager
def payload_locked(control: RepositoryContext, *worktrees: str) -> Iterator[None]:
    """Hold the payload locks of these worktrees, in the order of their names, for the block.

    Never waits: somebody who holds one is at work there, which is a conflict, named if it can be.
    """
    make_directories(control.places.guards)
    locker = FileLocker()
    with contextlib.ExitStack() as held:
        for worktree in sorted(set(worktrees)):
            guard = locker.try_lock_exclusive(control.places.guards / f"payload-{worktree}.lock")
            if guard is None:
                raise _in_use(control, worktree)
            held.enter_context(guard)
        yield


def _in_use(control: RepositoryContext, worktree: str) -> LockConflict:
    pending = control.store.read(OPERATIONS.key(worktree))
    if pending is not None:
        return being_changed(pending.record)
    return LockConflict(
        f"another process is about to change the directory of {worktree}",
        hint="Try again in a moment.",
        worktree=worktree,
    )


TTL = 60.0


class Right(NamedTuple):
    """The right to change a worktree; `lease` is None if it is shared."""

    config: WorktreeConfig
    lease: HeldLease | None
    control: RepositoryContext

    def validator(self) -> Callable[[View, float], Lease | None]:
        """For the decide function of the transaction that makes use of the right; it raises if it is gone.

        The transaction must name the lease's documents. The clock is read now.
        """
        if self.lease is None:
            return lambda view, now: None
        self.lease.check()
        return self.control.desk.validator(self.lease.worktree, self.lease.lock_id, self.lease.token)


@contextlib.contextmanager
def guarded(
    control: RepositoryContext, worktree: str, purpose: str, *, lock_id: str | None = None
) -> Iterator[Right]:
    """Hold the lease of a worktree for the block: acquired now, or the caller's own if it has it.

    A lease that somebody else holds is a conflict. The caller's own is kept alive meanwhile, and is still
    there afterwards unless the block has deleted it.
    """
    config = control.config(worktree)
    if config.isolation is Isolation.SHARED:
        yield Right(config, None, control)
        return
    own = None if lock_id is None else _own(control, worktree, lock_id)
    if own is not None:
        try:
            yield Right(config, own.beat(), control)
        finally:
            own.hand_on()
        return
    request = control.desk.request(ttl=TTL, purpose=purpose)
    with acquire(control.desk, worktree, request) as held:
        yield Right(config, held, control)


def _own(control: RepositoryContext, worktree: str, lock_id: str) -> HeldLease | None:
    """The caller's lease, if that is what the worktree is locked with."""
    try:
        return HeldLease(control.desk, control.desk.renew(worktree, lock_id))
    except LockNotHeld:
        return None


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


class AbandonedScratch(NamedTuple):
    """A scratch whose process is gone. `intent` is None if it was not written or cannot be read."""

    scratch_id: str
    path: Path
    intent: ScratchIntent | None


_CODEC: StructCodec[ScratchIntent] = StructCodec(ScratchIntent)


@contextlib.contextmanager
def scratch(
    control: RepositoryContext,
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


def is_needed(control: RepositoryContext, scratch_id: str, worktree: str) -> bool:
    """Whether an operation that is not at its end needs this scratch; what cannot be known counts as yes."""
    try:
        pending = control.store.read(OPERATIONS.key(worktree))
    except Failure:
        return True
    return pending is not None and pending.record.operation_id == scratch_id


def in_use(places: RepositoryPaths) -> Iterator[ScratchIntent]:
    """What is being made at this moment, by processes that live."""
    for scratch_id in _scratch_ids(places):
        path = places.scratch / scratch_id
        if not is_abandoned(path):
            intent = _intent_of(path)
            if intent is not None:
                yield intent


def abandoned(places: RepositoryPaths) -> Iterator[AbandonedScratch]:
    """What dead processes have left."""
    for scratch_id in _scratch_ids(places):
        path = places.scratch / scratch_id
        if is_abandoned(path):
            yield AbandonedScratch(scratch_id, path, _intent_of(path))


def is_left(places: RepositoryPaths, scratch_id: str) -> bool:
    """Whether there is still something of a scratch: who worked in it has not come to its end."""
    path = places.scratch / scratch_id
    return is_there(path) or is_there(path.with_name(scratch_id + SWEPT))


def sweep(places: RepositoryPaths, scratch_id: str) -> bool:
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
    from holdfast.trees.walker import remove_tree

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


def _scratch_ids(places: RepositoryPaths) -> list[str]:
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
