"""Checks of a git directory before git starts in it, and of a running git that may wait for a pipe in vain.

git follows symbolic links in its own directory, and waits forever for the other end of a pipe in place of a file. So a
stranger's repository could make it write elsewhere, or block a command (`docs/decisions/0012`).
"""

from __future__ import annotations

import contextlib
import os
import stat
import sys
import time
from functools import partial
from pathlib import Path

from holdfast.errors import NotFound, PathEscape, Refused
from holdfast.fs import calls
from holdfast.fs.directory import Directory, is_link
from holdfast.fs.names import printable

_PLACES = (
    *("", "info", "logs", "objects", "objects/info", "objects/pack", "refs", "refs/holdfast", "reftable", "worktrees"),
)
"""The directories in a git directory in which git writes under names of its own choice; the worktrees' below the last.
`require_plain_reference` examines the others in `refs` and `logs`."""
_UNUSED = "hooks"  # git is told to look for hooks elsewhere
_SETTLED = 50_000_000  # nanoseconds after which a change gives a directory other times
_WAITS_FOR_A_PIPE = b"wait_for_partner"

Stamp = tuple[int, int, int]
_sound: dict[str, tuple[Stamp, list[str]]] = {}
"""The directories that this process has found sound, with their stamps and subdirectories at that time."""


def require_sound(git_dir: Path, *, every_object: bool) -> None:
    """Raise `PathEscape` if a link is in place of anything that git writes in its own directory, `Refused` for a pipe
    or device; a directory is listed again after a change.

    Everything but directories, regular files and sockets (of a monitor of the file system, which no git opens as a
    file) is refused, so it does not matter which names git uses. `every_object` examines the files of objects too: git
    touches one that it would write again.
    """
    here = os.fspath(git_dir)
    for place in _PLACES:
        below = _require_sound(here, place)
        if below and (place == "worktrees" or (place == "objects" and every_object)):
            with contextlib.suppress(NotFound), Directory.open(os.path.join(here, place)) as parent:
                for name in filter(partial(_has_changed, parent, os.path.join(here, place, "")), below):
                    _require_sound(here, f"{place}/{name}", parent)


def _has_changed(parent: Directory, prefix: str, name: str) -> bool:
    """Whether a directory is not as this process has found it: there may be hundreds, and most stay as they are."""
    try:
        status = calls.stat(prefix + name if parent.fd is None else name, dir_fd=parent.fd, follow_symlinks=False)
    except OSError:
        return False  # git creates it
    known = _sound.get(prefix + name)
    return known is None or known[0] != (status.st_ino, status.st_mtime_ns, status.st_ctime_ns)


def _require_sound(git_dir: str, place: str, parent: Directory | None = None) -> list[str]:
    """Check one directory, in its parent if that is open, unless it is as it was; return its subdirectories."""
    where = os.path.join(git_dir, place) if place else git_dir
    try:
        status = calls.stat(where, follow_symlinks=False)
    except OSError:
        return []  # git creates it
    stamp = status.st_ino, status.st_mtime_ns, status.st_ctime_ns
    if where in _sound and _sound[where][0] == stamp:
        return _sound[where][1]
    _require_plain(status, where)
    if not stat.S_ISDIR(status.st_mode):
        return []  # git will say that it is no directory
    looked_at = time.time_ns()
    try:
        with Directory.open(where) if parent is None else parent.enter(os.path.basename(place)) as directory:
            below, others = directory.sorted_out()
    except NotFound:
        return []  # a `git gc` or a command on worktrees has just removed it
    for name, other in others.items():
        if not (name == _UNUSED and not place) and not stat.S_ISSOCK(other.st_mode):
            _require_plain(other, directory.where(name))
    if looked_at - max(stamp[1:]) > _SETTLED:
        _sound[where] = stamp, below
    return below


def require_plain_reference(common: Path, name: str) -> None:
    """Raise as `require_sound` does if a part of a reference's path, or of its log's, is a link or no file: git would
    follow a link in place of a directory at any depth, and write or delete elsewhere. Likewise if a part leads up."""
    if not {"", ".", ".."}.isdisjoint(name.split("/")):
        raise PathEscape(f"{printable(name)} is not the name of a reference", path=name)
    for place in (common, common / "logs"):
        here = os.fspath(place)
        for part in name.split("/"):
            here = os.path.join(here, part)
            try:
                status = calls.stat(here, follow_symlinks=False)
            except OSError:
                break
            _require_plain(status, here)


def _require_plain(status: os.stat_result, where: str) -> None:
    if is_link(status):
        hint = "Replace the link with what it leads to. For content on another disk, use a bind mount."
        raise PathEscape(f"{where} is a symbolic link; git would follow it", hint=hint, path=where)
    if not stat.S_ISDIR(status.st_mode) and not stat.S_ISREG(status.st_mode):
        raise Refused(f"{where} is not a file or directory; git would wait for it", hint="Remove it.", path=where)


def end_if_it_waits_for_a_pipe(process: int) -> bool:
    """Kill a git process and its children if one of them waits to open a named pipe whose other end nobody has opened.
    Returns whether it killed them; False where the system does not tell."""
    if sys.platform != "linux":
        return False
    import psutil  # seldom needed: only if git takes long

    try:
        started = psutil.Process(process)
        family = [started, *started.children(recursive=True)]
        is_waiting = any(each.name() == "git" and _waits_for_a_pipe(each.pid) for each in family)
    except psutil.Error:
        return False  # it has just ended
    if is_waiting:
        for each in family:
            with contextlib.suppress(psutil.Error):
                each.kill()
    return is_waiting


def _waits_for_a_pipe(process: int) -> bool:
    try:
        return calls.read_small(f"/proc/{process}/wchan", 64) == _WAITS_FOR_A_PIPE
    except OSError:
        return False
