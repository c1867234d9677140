"""Checks of a git directory before git starts in it, and of a running git that may wait for a pipe in vain.

git follows symbolic links in its own directory, and waits forever for the other end of a pipe in place of a file. So a
stranger's repository could make it write elsewhere, or block a command (`docs/decisions/0012`).
"""

from __future__ import annotations

import contextlib
import os
import stat
import sys
from collections.abc import Mapping
from functools import cache
from pathlib import Path
from typing import Any

from holdfast.errors import PathEscape, Refused
from holdfast.fs import calls
from holdfast.fs.directory import Directory, is_link

_BRANCHES: Mapping[str, Any] = {"heads": {"hf": {}}, "holdfast": {"snapshots": {}, "incoming": {}}}
_WRITTEN: Mapping[str, Any] = {
    "HEAD": {},
    "config": {},
    "config.worktree": {},
    "packed-refs": {},
    "index": {},
    "shallow": {},
    "commondir": {},
    "gitdir": {},
    "objects": {"pack": {}, "info": {"alternates": {}}},
    "info": {"exclude": {}, "attributes": {}, "sparse-checkout": {}},
    "refs": _BRANCHES,
    "logs": {"HEAD": {}, "refs": _BRANCHES},
    "worktrees": {},
}
"""The names in a git directory that git writes, or reads at every start, down to where they become many."""
_REGISTERED: Mapping[str, Any] = {"HEAD": {}, "commondir": {}, "gitdir": {}, "logs": {}}
"""The same in the registration of a worktree: git reads all of them whenever it lists worktrees."""
_WAITS_FOR_A_PIPE = b"wait_for_partner"


@cache
def require_sound(git_dir: Path) -> None:
    """Raise `PathEscape` if git would follow a link from its own directory, `Refused` if it would open something other
    than a file. Checked once per process."""
    with Directory.open(git_dir) as directory:
        _check(directory, _WRITTEN)
        if directory.is_directory("worktrees"):
            with directory.enter("worktrees") as registrations:
                _check(registrations, dict.fromkeys(registrations.directories(), _REGISTERED))


def require_plain_reference(common: Path, name: str) -> None:
    """Raise as `require_sound` does if a part of a reference's path, or of its log's, is a link or no file: git would
    follow a link in place of a directory at any depth, and write or delete elsewhere."""
    for place in (common, common / "logs"):
        here = os.fspath(place)
        for part in name.split("/"):
            here = os.path.join(here, part)
            try:
                status = calls.stat(here, follow_symlinks=False)
            except OSError:
                break
            _require_plain(status, here)


def _check(directory: Directory, names: Mapping[str, Any]) -> None:
    for name, below in names.items():
        status = directory.status(name)
        if status is None:
            continue
        _require_plain(status, directory.where(name))
        if stat.S_ISDIR(status.st_mode) and below:
            with directory.enter(name) as inner:
                _check(inner, below)


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
