"""Moving whole directories to where they belong, durably, without ever replacing anything."""

from __future__ import annotations

import contextlib
import errno
import os
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
        _rename(source, target)
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
