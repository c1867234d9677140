"""Moving whole directories to where they belong, durably, without ever replacing anything."""

from __future__ import annotations

import contextlib
import errno
import os
import stat
from collections.abc import Callable, Mapping
from pathlib import Path

from holdfast.errors import AlreadyExists, NotDurable, NotFound
from holdfast.fs import calls
from holdfast.fs.directory import Directory, io_failure

_NOT_OFFERED = (errno.ENOSYS, errno.EINVAL, errno.EOPNOTSUPP)


def move(source: Path, target: Path) -> None:
    """Give what is at `source` the name `target`, on the same filesystem, if nothing has that name.

    Commit point: the rename. Durable when this returns. `NotDurable` means that it was made.
    """
    try:
        although_read_only(lambda: _rename(source, target), {source: target})
    except FileExistsError:
        raise AlreadyExists(f"{target} is there already", path=str(target)) from None
    except FileNotFoundError:
        raise NotFound(
            f"there is no {source} to move, or no directory {target.parent}", path=str(source)
        ) from None
    except OSError as error:
        if error.errno == errno.ENOTEMPTY:
            raise AlreadyExists(f"{target} is there already", path=str(target)) from None
        raise io_failure("move to", target, error) from error
    sync_parents(source, target)


def although_read_only(rename: Callable[[], object], going: Mapping[Path, Path]) -> None:
    """Rename directories; one that changes its parent is itself written to, so it must be writable meanwhile.

    `going` says where each of them goes. A crash may leave one of them writable, which is all it does.
    """
    try:
        rename()
    except PermissionError:
        modes = {source: mode for source in going if (mode := _read_only_mode(source)) is not None}
        if not modes:
            raise
        gone = False
        try:
            for source, mode in modes.items():
                calls.chmod(source, mode | stat.S_IWUSR)
            rename()
            gone = True
        finally:
            for source, mode in modes.items():
                calls.chmod(going[source] if gone else source, mode)


def _read_only_mode(path: Path) -> int | None:
    """The mode of a directory whose owner may not write to it; None for everything else."""
    try:
        mode = calls.stat(path, follow_symlinks=False).st_mode
    except FileNotFoundError:
        return None
    return stat.S_IMODE(mode) if stat.S_ISDIR(mode) and not mode & stat.S_IWUSR else None


def sync_parents(*paths: Path) -> None:
    """Make the names of these paths survive a power cut."""
    for parent in dict.fromkeys(path.parent for path in paths):
        with contextlib.suppress(NotFound), Directory.open(parent) as directory:
            try:
                directory.sync()
            except OSError as error:
                raise NotDurable("sync the directory", parent, error) from error


def _rename(source: Path, target: Path) -> None:
    try:
        calls.rename_noreplace(os.fspath(source), os.fspath(target))
    except OSError as error:
        if error.errno not in _NOT_OFFERED:
            raise
        if _is_there(target):
            raise FileExistsError(errno.EEXIST, os.strerror(errno.EEXIST), os.fspath(target)) from None
        calls.rename(source, target)


def _is_there(path: Path) -> bool:
    try:
        calls.stat(path, follow_symlinks=False)
    except FileNotFoundError:
        return False
    return True
