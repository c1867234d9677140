"""The directories of worktrees: found without being led astray, and told apart by their inodes.

A name is checked before it becomes a path, and the path is walked without following a link: `main` or
`worktrees/<name>` that is a symbolic link would lead work, or its removal, to some other place.
"""

from __future__ import annotations

import contextlib
import errno
import os
import stat
from collections.abc import Sequence
from pathlib import Path

from holdfast.errors import (
    AlreadyExists,
    DirectoryReplaced,
    IoFailure,
    NotDurable,
    NotFound,
    NotWritable,
    Refused,
)
from holdfast.fs import calls, durable
from holdfast.fs.directory import Directory
from holdfast.fs.names import safe_name
from holdfast.fs.probe import mounts_beneath
from holdfast.worktrees.control import Control, Places
from holdfast.worktrees.records import MAIN


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


def parent_of(places: Places, worktree: str) -> Directory:
    """The open directory in which the worktree's directory has its name; a link is refused."""
    with Directory.open(places.root) as root:
        if worktree != MAIN:
            return root.enter("worktrees")
    return Directory.open(places.root)


def status_of(places: Places, worktree: str) -> os.stat_result | None:
    """The status of what stands at a worktree's path (a link is not followed), or None if nothing does."""
    with parent_of(places, worktree) as parent:
        return parent.status(places.payload(worktree).name)


def directory_of(control: Control, worktree: str) -> Path:
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


def refuse_replaced(control: Control, worktree: str) -> None:
    """Refuse a worktree whose directory somebody has replaced, by a link or a file; none at all is fine."""
    with contextlib.suppress(NotFound):
        directory_of(control, worktree)


def refuse_if_mounted(control: Control, worktree: str, doing: str, path: str | None = None) -> None:
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


def refuse_if_fixed(control: Control, worktree: str) -> None:
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


def sync_names(places: Places, worktree: str) -> None:
    """Make the name of a worktree's directory, or its absence, survive a power cut."""
    with parent_of(places, worktree) as parent:
        try:
            parent.sync()
        except OSError as error:
            raise NotDurable("sync the directory", parent.shown, error) from error


def drop_empty_home(places: Places, worktree: str) -> None:
    """Remove the directory that the record of a worktree was in. The caller holds the payload lock, so
    nobody is about to put a new one there; if it stays, after a kill, it means nothing."""
    with contextlib.suppress(OSError):
        calls.rmdir(places.root / ".jvs" / "worktrees" / worktree)


def drop_cache(places: Places, worktree: str) -> None:
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
