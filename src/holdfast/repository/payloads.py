"""The directories of worktrees, the lease and the lock to change them under, and scratch directories.

A name is checked before it becomes a path, and the path is walked without following links: a symbolic link
at `main` or `worktrees/<name>` would lead work, or its removal, elsewhere.
"""

from __future__ import annotations

import contextlib
import errno
import os
import secrets
import stat
from collections.abc import Iterator, Sequence
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
from holdfast.fs.directory import Directory, close_quietly, entry_exists, io_failure, make_directories
from holdfast.fs.mounts import mounts_beneath
from holdfast.fs.names import is_safe_name, safe_name
from holdfast.leases.rules import Identity
from holdfast.leases.service import HeldLease, acquire
from holdfast.locks import flock
from holdfast.locks.file_lock import FileLocker, LockGuard
from holdfast.repository.context import (
    MAIN,
    OPERATIONS,
    Isolation,
    RepositoryContext,
    RepositoryPaths,
    WorktreeConfig,
    operation_pending,
)
from holdfast.store.model import StructCodec


def worktree_name(text: str) -> str:
    """The text as the name of a worktree, or `NameInvalid`: checked before anything is looked up."""
    return safe_name(text, what="name of a worktree")


def refuse_main(name: str, doing: str) -> str:
    """The name, unless it is `main`."""
    if name == MAIN:
        raise Refused(
            f"{MAIN} cannot be {doing}: every repository has it",
            hint="Create another worktree for temporary work: 'holdfast worktree create NAME'.",
            worktree=MAIN,
        )
    return name


def worktree_exists(name: str) -> AlreadyExists:
    return AlreadyExists(f"the worktree {name} already exists", worktree=name)


def path_taken(path: Path) -> AlreadyExists:
    return AlreadyExists(
        f"{path} already exists and belongs to no worktree",
        hint="Move it away, or choose another name. Holdfast does not touch what it did not create.",
        path=str(path),
    )


# --- Finding directories, and telling them apart ------------------------------------------------------


def parent_of(paths: RepositoryPaths, worktree: str) -> Directory:
    """The open directory that contains the worktree's directory; a link is refused."""
    with Directory.open(paths.root) as root:
        if worktree != MAIN:
            return root.enter("worktrees")
    return Directory.open(paths.root)


def status_of(paths: RepositoryPaths, worktree: str) -> os.stat_result | None:
    """The status of a worktree's path (of a link itself, not its target); None if nothing is there."""
    with parent_of(paths, worktree) as parent:
        return parent.status(paths.payload(worktree).name)


def directory_of(context: RepositoryContext, worktree: str) -> Path:
    """The path of a worktree's directory, which exists and is neither a link nor a file."""
    path = context.places.payload(worktree)
    with parent_of(context.places, worktree) as parent:
        try:
            parent.enter(path.name).close()
        except IoFailure as failure:
            status = parent.status(path.name)
            if status is None or stat.S_ISDIR(status.st_mode):
                raise
            raise DirectoryReplaced(
                f"the path of the worktree {worktree} is not a directory: {parent.where(path.name)}",
                worktree=worktree,
                path=parent.where(path.name),
            ) from failure
        except NotFound:
            raise NotFound(
                f"the worktree {worktree} has lost its directory {path}",
                hint="Somebody moved or deleted it by hand. Put it back, or restore a snapshot in place.",
                worktree=worktree,
                path=str(path),
            ) from None
    return path


def refuse_replaced(context: RepositoryContext, worktree: str) -> None:
    """Refuse a worktree whose directory was replaced by a link or a file; a missing one is fine."""
    with contextlib.suppress(NotFound):
        directory_of(context, worktree)


def refuse_if_mounted(context: RepositoryContext, worktree: str, doing: str, path: str | None = None) -> None:
    """Refuse to move or delete a directory, or the part `path` of it, that contains a mount point. The mounted
    filesystem is not part of it: it would vanish from its users' sight, or be deleted too."""
    if status_of(context.places, worktree) is None:
        return
    with Directory.open(directory_of(context, worktree)) as directory:
        mounted = sorted(mounts_beneath(directory.fd)) if directory.fd is not None else []
    if path is not None:
        mounted = [each for each in mounted if each == path or each.startswith(f"{path}/")]
    if mounted:
        raise Refused(
            f"{worktree} cannot be {doing}: something is mounted at {ascii(mounted[0])[1:-1]} in it",
            hint="Unmount it first.",
            worktree=worktree,
        )


def refuse_if_fixed(context: RepositoryContext, worktree: str) -> None:
    """Refuse to decide a move that the parent directory's permissions forbid. A decided operation that cannot be
    carried out would block the worktree for everybody."""
    with parent_of(context.places, worktree) as parent:
        if not calls.access(parent.shown, os.W_OK | os.X_OK):
            refused = PermissionError(errno.EACCES, os.strerror(errno.EACCES))
            raise NotWritable("move", context.places.payload(worktree), refused)


def is_within(path: Path, directory: os.stat_result) -> bool:
    """Whether `path`, which need not exist, is this directory or below it, whatever links lead there."""
    real = Path(calls.realpath(path))
    for each in (real, *real.parents):
        with contextlib.suppress(OSError):
            if os.path.samestat(calls.stat(each), directory):
                return True
    return False


def inode_of(status: os.stat_result | None) -> str | None:
    """Identifies a directory among all that exist at the same time; None for anything else."""
    if status is None or not stat.S_ISDIR(status.st_mode):
        return None
    return f"{status.st_dev}:{status.st_ino}"


def index_of_inode(inode: str | None, found: Sequence[os.stat_result], *, same_boot: bool) -> int | None:
    """Which of these directories of one repository has this inode; None if that is uncertain. The device number may
    change with a reboot, so it counts only where it must: roots of btrfs subvolumes all have the same inode."""
    number = (inode or "").rpartition(":")[2]
    candidates = [index for index, each in enumerate(found) if str(each.st_ino) == number]
    if len(candidates) > 1 and same_boot:
        candidates = [index for index in candidates if inode_of(found[index]) == inode]
    return candidates[0] if len(candidates) == 1 else None


def sync_names(paths: RepositoryPaths, worktree: str) -> None:
    """Make the name of a worktree's directory, or its absence, survive a power cut."""
    with parent_of(paths, worktree) as parent:
        try:
            parent.sync()
        except OSError as error:
            raise NotDurable("sync the directory", parent.shown, error) from error


def drop_record_directory(paths: RepositoryPaths, worktree: str) -> None:
    """Remove the empty directory of a deleted record; after a kill it may stay, and means nothing. The caller holds the
    payload lock, so nobody is creating a record in it."""
    with contextlib.suppress(OSError):
        calls.rmdir(paths.root / ".jvs" / "worktrees" / worktree)


def drop_cache(paths: RepositoryPaths, worktree: str) -> None:
    with contextlib.suppress(NotFound):
        durable.remove(paths.stat_cache(worktree))


# --- Payload lock and lease ---------------------------------------------------------------------------

TTL = 60.0


@contextlib.contextmanager
def payload_locked(context: RepositoryContext, *worktrees: str) -> Iterator[None]:
    """Hold the payload locks of these worktrees, taken in name order, for the block. Never waits: a lock that is held
    means that its holder is changing the directory, which is a conflict."""
    make_directories(context.places.guards)
    locker = FileLocker()
    with contextlib.ExitStack() as held:
        for worktree in sorted(set(worktrees)):
            lock = locker.try_lock_exclusive(context.places.guards / f"payload-{worktree}.lock")
            if lock is None:
                pending = context.store.read(OPERATIONS.key(worktree))
                if pending is not None:
                    raise operation_pending(pending.record)
                raise LockConflict(
                    f"another process is about to change the directory of {worktree}",
                    hint="Try again in a moment.",
                    worktree=worktree,
                )
            held.enter_context(lock)
        yield


class LeasedWorktree(NamedTuple):
    """A worktree and the lease that it is changed under; `lease` is None if the worktree is shared."""

    config: WorktreeConfig
    lease: HeldLease | None


@contextlib.contextmanager
def leased(
    context: RepositoryContext, worktree: str, purpose: str, *, lock_id: str | None = None
) -> Iterator[LeasedWorktree]:
    """Hold the lease of a worktree for the block: acquired now, or the caller's own (`lock_id`). Another holder's lease
    is a conflict. The caller's own is renewed meanwhile, and survives the block unless the block deletes it."""
    config = context.config(worktree)
    if config.isolation is Isolation.SHARED:
        yield LeasedWorktree(config, None)
        return
    own = None
    with contextlib.suppress(LockNotHeld):
        if lock_id is not None:
            own = HeldLease(context.desk, context.desk.renew(worktree, lock_id))
    if own is not None:
        try:
            yield LeasedWorktree(config, own.beat())
        finally:
            own.hand_on()
        return
    request = context.desk.request(ttl=TTL, purpose=purpose)
    with acquire(context.desk, worktree, request) as held:
        yield LeasedWorktree(config, held)


# --- Scratch directories ------------------------------------------------------------------------------

LOCK, INTENT, SWEPT = "lock", "intent.json", ".swept"
_ATTEMPTS = 100


class ScratchIntent(msgspec.Struct, frozen=True, kw_only=True):
    """The purpose of a scratch directory, and the snapshots that it uses: those are gc roots."""

    scratch_id: str
    purpose: str
    begun_at: str
    holder_id: str
    worktree_id: str | None = None
    uses: tuple[str, ...] = ()
    identity: Identity = Identity()


_CODEC: StructCodec[ScratchIntent] = StructCodec(ScratchIntent)


class Scratch(NamedTuple):
    """A scratch directory that this process works in."""

    scratch_id: str
    path: Path

    @property
    def tree(self) -> Path:
        """Where to build a tree; renamed away when it is complete."""
        return self.path / "tree"


class AbandonedScratch(NamedTuple):
    """The scratch directory of a dead process; `intent` is None if it is missing or unreadable."""

    scratch_id: str
    path: Path
    intent: ScratchIntent | None


@contextlib.contextmanager
def scratch(
    context: RepositoryContext,
    purpose: str,
    *,
    worktree: str | None = None,
    uses: Sequence[str] = (),
    scratch_id: str | None = None,
) -> Iterator[Scratch]:
    """A new scratch directory, locked until the block ends and removed then.

    After a kill, the next sweep removes it. Its name is never reused. It stays while an operation with the
    same id is pending on the worktree: the operation is finished from it.
    """
    scratch_id = scratch_id or secrets.token_hex(8)
    path = context.places.scratch / scratch_id
    with _create_locked(path):  # 1. before it could look abandoned
        intent = ScratchIntent(
            scratch_id=scratch_id,
            purpose=purpose,
            begun_at=format_instant(context.store.now()),
            holder_id=context.holder.holder_id,
            worktree_id=worktree,
            uses=tuple(uses),
            identity=Identity.of(context.holder),
        )
        with contextlib.suppress(AlreadyExists):  # a finisher works in the scratch of the operation
            durable.create(path / INTENT, _CODEC.encode(intent), durable=False)  # 2. counts while we live
        try:
            yield Scratch(scratch_id, path)
        finally:
            if worktree is None or not is_needed(context, scratch_id, worktree):
                with contextlib.suppress(Failure):  # the block has succeeded or failed; this is litter
                    _discard(path)


def _create_locked(path: Path) -> LockGuard:
    """Create and lock a scratch directory; a sweeper may remove it in between, as abandoned."""
    while True:
        make_directories(path)
        with contextlib.suppress(NotFound):
            return FileLocker().lock_exclusive(path / LOCK)


def is_needed(context: RepositoryContext, scratch_id: str, worktree: str) -> bool:
    """Whether a pending operation needs this scratch directory; if that is unknown, yes."""
    try:
        pending = context.store.read(OPERATIONS.key(worktree))
    except Failure:
        return True
    return pending is not None and pending.record.operation_id == scratch_id


def in_use(paths: RepositoryPaths) -> Iterator[ScratchIntent]:
    """The intents of living processes."""
    for path in _scratch_directories(paths):
        if not is_abandoned(path):
            intent = _intent_of(path)
            if intent is not None:
                yield intent


def abandoned(paths: RepositoryPaths) -> Iterator[AbandonedScratch]:
    """The scratch directories of dead processes."""
    for path in _scratch_directories(paths):
        if is_abandoned(path):
            yield AbandonedScratch(path.name, path, _intent_of(path))


def is_left(paths: RepositoryPaths, scratch_id: str) -> bool:
    """Whether anything of a scratch directory still exists."""
    path = paths.scratch / scratch_id
    return entry_exists(path) or entry_exists(path.with_name(scratch_id + SWEPT))


def sweep(paths: RepositoryPaths, scratch_id: str) -> bool:
    """Remove an abandoned scratch directory; False if a process works in it. A missing one is fine."""
    path = paths.scratch / scratch_id
    if scratch_id.endswith(SWEPT):  # nobody begins to work in it any more
        if not is_abandoned(path):
            return not entry_exists(path)
        _remove(path)
        return True
    try:
        lock = FileLocker().try_lock_exclusive(path / LOCK)
    except NotFound:
        return True
    if lock is None:
        return False
    with lock:
        _discard(path)
    return True


def _discard(path: Path) -> None:
    """Remove a scratch directory that we have locked, under another name. So a process that is about to lock it finds
    it gone and creates it again, and `is_abandoned` creates no lock file in a directory that is being removed."""
    swept = path.with_name(path.name + SWEPT)
    if entry_exists(swept):
        _remove(swept)  # left by a killed sweeper
    try:
        calls.rename(path, swept)
    except FileNotFoundError:
        return
    except OSError as error:
        raise io_failure("move away", path, error) from error
    _remove(swept)


def _remove(swept: Path) -> None:
    """Remove everything, the lock last: while it is held, the directory does not look abandoned. A process that was
    about to lock it may create the lock file once more, hence the attempts."""
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


def _scratch_directories(paths: RepositoryPaths) -> list[Path]:
    try:
        with Directory.open(paths.scratch) as directory:
            return [paths.scratch / name for name in directory.directories() if is_safe_name(name)]
    except NotFound:
        return []


def is_abandoned(path: Path) -> bool:
    """Whether no process works in a scratch directory. Creates nothing: it may be about to be removed."""
    try:
        fd = calls.open(path / LOCK, os.O_RDWR | getattr(os, "O_CLOEXEC", 0))
    except FileNotFoundError:
        return entry_exists(path)  # its process died, or is about to lock it, or to remove it
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
