"""The directories of worktrees, the lease and the lock that protect their changes, and scratch directories.

A name is checked before it becomes a path, and the path is walked without following links: a symbolic link at `main` or
`worktrees/<name>` would redirect work, or its removal.
"""

from __future__ import annotations

import contextlib
import errno
import os
import secrets
import stat
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

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
    NameInvalid,
    NotDurable,
    NotFound,
    NotWritable,
    Refused,
)
from holdfast.fs import calls, durable
from holdfast.fs.directory import (
    Directory,
    entry_exists,
    io_failure,
    make_directories,
    opened,
    rename,
    resolved,
    status_at,
)
from holdfast.fs.mounts import mounts_beneath
from holdfast.fs.names import is_draft_name, is_safe_name, safe_name
from holdfast.leases.rules import Identity
from holdfast.leases.service import OWN_TTL, HeldLease, acquire
from holdfast.locks import flock
from holdfast.locks.file_lock import FileLocker, LockGuard
from holdfast.repository.context import (
    MAIN,
    Isolation,
    Operation,
    RepositoryContext,
    RepositoryPaths,
    WorktreeConfig,
    operation_pending,
    require_here,
)
from holdfast.store.model import SafeName, StructCodec

if TYPE_CHECKING:
    from holdfast.trees.engines import Engine
    from holdfast.trees.scan import Progress

RESERVED = (".jvs", ".jit", ".holdfast", ".git")  # in any case: not all filesystems tell the cases apart


def worktree_name(text: str, *, new: bool = False) -> str:
    """The text, if it is a valid name of a worktree; else `NameInvalid`. A new name cannot be that of a draft or a
    control directory, nor look like an option; an existing worktree with such a name can be renamed and removed."""
    name = safe_name(text, what="name of a worktree")
    if new and (name.lower() in RESERVED or name.startswith("-")):
        hint = f"Choose a name that does not begin with '-'. {', '.join(RESERVED)} are reserved."
        raise NameInvalid(f"the worktree name {name!a} is reserved", hint=hint, name=name)
    if new and is_draft_name(name):
        hint = "Choose a name that does not end in '.tmp'."
        raise NameInvalid(f"the worktree name {name!a} has the form of a draft's name", hint=hint, name=name)
    return name


def lease_name(text: str) -> str:
    """The text, if it is a valid name of a named lease; else `NameInvalid`."""
    return safe_name(text, what="name of a lease")


def require_changeable(context: RepositoryContext, name: str, doing: str) -> None:
    """Refuse a worktree that is the checkout of a clone, or whose directory is in another clone."""
    config = context.config(name)
    if config.clone == name:
        hint = "Create another worktree for temporary work: 'holdfast worktree create NAME'."
        why = "every repository has it" if name == MAIN else "it is the checkout of a clone"
        raise Refused(f"{name} cannot be {doing}: {why}", hint=hint, worktree=name)
    require_here(config, context.paths.main)


def worktree_exists(name: str) -> AlreadyExists:
    return AlreadyExists(f"the worktree {name} already exists", worktree=name)


def path_taken(path: Path) -> AlreadyExists:
    hint = "Move it away, or choose another name. Holdfast does not touch what it did not create."
    return AlreadyExists(f"{path} already exists and belongs to no worktree", hint=hint, path=str(path))


# --- Finding and identifying directories --------------------------------------------------------------


def status_of(paths: RepositoryPaths, worktree: str) -> os.stat_result | None:
    """The status of a worktree's path (of a link itself, not its target); None if it does not exist."""
    with paths.above(worktree) as parent:
        return parent.status(paths.payload(worktree).name)


def directory_of(context: RepositoryContext, worktree: str) -> Path:
    """The path of a worktree's directory, which exists and is neither a link nor a file."""
    path = context.paths.payload(worktree)
    with context.paths.above(worktree) as parent:
        try:
            parent.enter(path.name).close()
        except IoFailure as failure:
            status = parent.status(path.name)
            if status is None or stat.S_ISDIR(status.st_mode):
                raise
            where = parent.where(path.name)
            message = f"the path of the worktree {worktree} is not a directory: {where}"
            raise DirectoryReplaced(message, worktree=worktree, path=where) from failure
        except NotFound:
            raise _directory_lost(worktree, path) from None
    try:
        context.paths.check(worktree, path)
    except DirectoryReplaced:
        if status_of(context.paths, worktree) is None:  # it has been moved away meanwhile
            raise _directory_lost(worktree, path) from None
        raise
    return path


def _directory_lost(worktree: str, path: Path) -> NotFound:
    hint = "It was moved or deleted. Put it back, or restore a snapshot in place."
    message = f"the worktree {worktree} has lost its directory {path}"
    return NotFound(message, hint=hint, worktree=worktree, path=str(path))


def refuse_replaced(context: RepositoryContext, worktree: str) -> None:
    """Refuse a worktree whose directory was replaced by a link or a file; a missing one is fine."""
    with contextlib.suppress(NotFound):
        directory_of(context, worktree)


def refuse_if_mounted(context: RepositoryContext, worktree: str, doing: str, path: str | None = None) -> None:
    """Refuse to move or delete a directory, or the part `path` of it, that contains a mount point: the mounted
    filesystem would disappear for its users, or be deleted too."""
    if status_of(context.paths, worktree) is None:
        return
    with Directory.open(directory_of(context, worktree)) as directory:
        mounted = sorted(mounts_beneath(directory.fd)) if directory.fd is not None else []
    if path is not None:
        mounted = [each for each in mounted if each == path or each.startswith(f"{path}/")]
    if mounted:
        message = f"{worktree} cannot be {doing}: something is mounted at {ascii(mounted[0])[1:-1]} in it"
        raise Refused(message, hint="Unmount it first.", worktree=worktree)


def refuse_if_fixed(context: RepositoryContext, worktree: str) -> None:
    """Refuse a move that the permissions of the parent directory, or of another user's directory, forbid: once decided,
    an operation that cannot be carried out would block the worktree."""
    path = context.paths.payload(worktree)
    with context.paths.above(worktree) as parent:
        names = ["." if parent.fd is not None else parent.shown]
        found = parent.status(path.name)
        if found is not None and stat.S_ISDIR(found.st_mode) and found.st_uid != _own_id(found):
            names.append(parent.at(path.name))  # our own can be made writable
        if not all(calls.access(each, os.W_OK | os.X_OK, dir_fd=parent.fd) for each in names):
            refused = PermissionError(errno.EACCES, os.strerror(errno.EACCES))
            raise NotWritable("move", path, refused)


def _own_id(otherwise: os.stat_result) -> int:
    """The id of this user; on Windows, which has none, that of `otherwise`."""
    if sys.platform == "win32":
        return otherwise.st_uid
    return os.geteuid()


def is_within(path: Path, directory: os.stat_result) -> bool:
    """Whether `path`, which need not exist, is this directory or below it, through any links."""
    real = resolved(path)
    for each in (real, *real.parents):
        found = status_at(each)
        if found is not None and os.path.samestat(found, directory):
            return True
    return False


def inode_of(status: os.stat_result | None) -> str | None:
    """Identifies a directory among all that exist at the same time; None for anything else."""
    return f"{status.st_dev}:{status.st_ino}" if status and stat.S_ISDIR(status.st_mode) else None


def index_of_inode(inode: str | None, found: Sequence[os.stat_result], *, same_boot: bool) -> int | None:
    """The index of the directory that has this inode; None if that is uncertain. The device number may change with a
    reboot, so it counts only where it must: roots of btrfs subvolumes all have the same inode."""
    number = (inode or "").rpartition(":")[2]
    candidates = [index for index, each in enumerate(found) if str(each.st_ino) == number]
    if len(candidates) > 1 and same_boot:
        candidates = [index for index in candidates if inode_of(found[index]) == inode]
    return candidates[0] if len(candidates) == 1 else None


def is_moved(context: RepositoryContext, operation: Operation, old: str, new: str) -> bool:
    """Whether the directory has its new name. If both names have a directory, the inode decides; if it cannot (in a
    copy of the repository, say), nothing is guessed: the user must decide."""
    at_old, at_new = (status_of(context.paths, name) for name in (old, new))
    if not (at_new and stat.S_ISDIR(at_new.st_mode)):
        return False
    if not (at_old and stat.S_ISDIR(at_old.st_mode)):
        return True
    same_boot = operation.identity.boot_id == Identity.of(context.holder).boot_id
    index = index_of_inode(operation.inode, (at_old, at_new), same_boot=same_boot)
    if index is None:
        raise Refused(
            f"{operation.holder_id} died while it renamed {old} to {new}, and now both names have a directory: "
            "Holdfast cannot tell which of them is the worktree",
            hint=f"Move the directory that is not the worktree out of {context.paths.worktrees}. Then try again.",
            worktree=old,
            renamed_to=new,
            operation_id=operation.operation_id,
        )
    return index == 1


def sync_names(paths: RepositoryPaths, worktree: str) -> None:
    """Make the name of a worktree's directory, or its absence, survive a power cut."""
    with paths.above(worktree) as parent:
        try:
            parent.sync()
        except OSError as error:
            raise NotDurable("sync the directory", parent.shown, error) from error


def drop_record_directory(paths: RepositoryPaths, worktree: str) -> None:
    """Remove the empty directory of a deleted record; one that is left after a kill is harmless. The caller holds the
    payload lock, so no process is creating a record in it."""
    records = paths.root / ".jvs" / "worktrees"
    with contextlib.suppress(OSError, NotFound), Directory.open(records) as directory:
        calls.rmdir(directory.at(worktree), dir_fd=directory.fd)


def drop_cache(paths: RepositoryPaths, worktree: str) -> None:
    with contextlib.suppress(NotFound):
        durable.remove(paths.stat_cache(worktree))


# --- Payload lock and lease ---------------------------------------------------------------------------


@contextlib.contextmanager
def payload_locked(context: RepositoryContext, *worktrees: str) -> Iterator[None]:
    """Hold the payload locks of these worktrees, taken in name order, for the block. Never waits: a held lock is a
    conflict, as its holder is changing the directory."""
    make_directories(context.paths.guards)
    locker = FileLocker(follow_links=False)
    with contextlib.ExitStack() as held:
        for worktree in sorted(set(worktrees)):
            lock = locker.try_lock_exclusive(context.paths.guards / f"payload-{worktree}.lock")
            if lock is None:
                pending = context.pending(worktree)
                if pending is not None:
                    raise operation_pending(pending)
                message = f"another process is about to change the directory of {worktree}"
                raise LockConflict(message, hint="Try again in a moment.", worktree=worktree)
            held.enter_context(lock)
        yield


class LeasedWorktree(NamedTuple):
    """A worktree and its lease, held for a change; `lease` is None if the worktree is shared."""

    config: WorktreeConfig
    lease: HeldLease | None


@contextlib.contextmanager
def leased(
    context: RepositoryContext, worktree: str, purpose: str, *, lock_id: str | None = None
) -> Iterator[LeasedWorktree]:
    """Hold the lease of a worktree for the block: acquired now, or the caller's own (`lock_id`). Another holder's lease
    is a conflict. The caller's own is renewed, and survives the block unless the block deletes it."""
    config = context.config(worktree)
    if config.isolation is Isolation.SHARED:
        yield LeasedWorktree(config, None)
        return
    own = None
    with contextlib.suppress(LockNotHeld):
        if lock_id is not None:
            own = HeldLease(context.leases, context.leases.renew(worktree, lock_id))
    if own is not None:
        try:
            yield LeasedWorktree(config, own.beat())
        finally:
            own.hand_on()
        return
    with acquire(context.leases, worktree, context.leases.request(ttl=OWN_TTL, purpose=purpose)) as held:
        yield LeasedWorktree(config, held)


# --- Scratch directories ------------------------------------------------------------------------------

LOCK, INTENT, SWEPT = "lock", "intent.json", ".swept"
_ATTEMPTS = 100
_OPEN_LOCK = os.O_RDWR | sum(getattr(os, name, 0) for name in ("O_CLOEXEC", "O_NOFOLLOW", "O_NONBLOCK"))


class ScratchIntent(msgspec.Struct, frozen=True, kw_only=True):
    """The purpose of a scratch directory, and the snapshots that it uses, which are gc roots."""

    scratch_id: SafeName
    purpose: str
    begun_at: str
    holder_id: str
    worktree_id: SafeName | None = None
    uses: tuple[SafeName, ...] = ()
    identity: Identity = Identity()


_CODEC: StructCodec[ScratchIntent] = StructCodec(ScratchIntent)


class Scratch(NamedTuple):
    """A scratch directory of this process."""

    scratch_id: str
    path: Path

    @property
    def tree(self) -> Path:
        """The path of the tree to build; renamed away when the tree is complete."""
        return self.path / "tree"


class CaptureOptions(NamedTuple):
    """How to capture a directory. `base` is a snapshot to share files with, and `base_hash` is its hash; `cached` is a
    worktree whose stat cache knows the directory. `may_skip`: content that equals the base will not be published."""

    quiesced: bool
    base: str | None = None
    base_hash: str | None = None
    cached: str | None = None
    engine: Engine | None = None
    progress: Progress | None = None
    may_skip: bool = False


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
    """A new scratch directory, locked for the block and removed at its end.

    After a kill, the next sweep removes it. Its name is never reused. It stays while an operation with the same id is
    pending on the worktree: the operation is finished from it.
    """
    scratch_id = scratch_id or secrets.token_hex(8)
    path = context.paths.scratch / scratch_id
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
            durable.create(path / INTENT, _CODEC.encode(intent), durable=False)  # 2. a gc root while we live
        try:
            yield Scratch(scratch_id, path)
        finally:
            if worktree is None or not is_needed(context, scratch_id, worktree):
                with contextlib.suppress(Failure):  # only garbage is left
                    _discard(path)


def _create_locked(path: Path) -> LockGuard:
    """Create and lock a scratch directory; create it again if a sweep removes it in between as abandoned."""
    while True:
        make_directories(path, mode=0o700)  # it may get the content of private directories
        with contextlib.suppress(NotFound):
            return FileLocker(follow_links=False).lock_exclusive(path / LOCK)


def is_needed(context: RepositoryContext, scratch_id: str, worktree: str) -> bool:
    """Whether a pending operation needs this scratch directory; true if that is unknown."""
    try:
        pending = context.pending(worktree)
    except Failure:
        return True
    return pending is not None and pending.operation_id == scratch_id


def in_use(paths: RepositoryPaths) -> Iterator[ScratchIntent]:
    """The intents of living processes, and of those on other machines, which locks may not reach."""
    for path in _scratch_directories(paths):
        is_left = is_abandoned(path)
        if (intent := _intent_of(path)) is not None and (not is_left or paths.is_elsewhere(intent.identity)):
            yield intent


def abandoned(paths: RepositoryPaths) -> Iterator[AbandonedScratch]:
    for path in _scratch_directories(paths):
        if is_abandoned(path) and not ((intent := _intent_of(path)) and paths.is_elsewhere(intent.identity)):
            yield AbandonedScratch(path.name, path, intent)


def is_left(paths: RepositoryPaths, scratch_id: str) -> bool:
    """Whether a scratch directory still exists, under either name."""
    path = paths.scratch / scratch_id
    return entry_exists(path) or entry_exists(path.with_name(scratch_id + SWEPT))


def sweep(paths: RepositoryPaths, scratch_id: str) -> bool:
    """Remove an abandoned scratch directory, if it exists; False if a process works in it."""
    path = paths.scratch / scratch_id
    if scratch_id.endswith(SWEPT):  # no process begins to work in it
        if not is_abandoned(path):
            return not entry_exists(path)
        _remove(path)
        return True
    try:
        lock = FileLocker(follow_links=False).try_lock_exclusive(path / LOCK)
    except NotFound:
        return True
    if lock is None:
        return False
    with lock:
        _discard(path)
    return True


def _discard(path: Path) -> None:
    """Remove a scratch directory that we have locked, under another name: a process that is about to lock it finds it
    gone and creates it again, and no lock file appears in a directory that is being removed."""
    swept = path.with_name(path.name + SWEPT)
    if entry_exists(swept):
        _remove(swept)  # left by a killed sweep
    try:
        rename(path, swept)
    except (FileNotFoundError, NotFound):
        return
    except OSError as error:
        raise io_failure("move away", path, error) from error
    _remove(swept)


def _remove(swept: Path) -> None:
    """Remove everything, the lock file last: while it is locked, the directory does not look abandoned. A process that
    was about to lock it may create the lock file again, hence the attempts."""
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
        with Directory.open(path) as directory, opened(directory.at(LOCK), _OPEN_LOCK, dir_fd=directory.fd) as fd:
            return flock.try_lock(fd, shared=True)
    except (FileNotFoundError, NotFound):
        return entry_exists(path)  # its process died, or is about to lock it, or to remove it
    except OSError as error:
        raise io_failure("examine", path / LOCK, error) from error


def _intent_of(path: Path) -> ScratchIntent | None:
    try:
        return _CODEC.decode(durable.read(path / INTENT, limit=1 << 20), str(path / INTENT))
    except (NotFound, Corrupt):
        return None
