"""The directory of the worktrees of a git home: beside the checkout, or where the setting `worktree.directory` says.

A directory inside the checkout is kept out of git's sight by a line in `info/exclude`, which is the user's file. A
comment above it says whose it is, so that `deinit` finds it again.
"""

from __future__ import annotations

import os
from pathlib import Path

from holdfast.errors import NotFound, Refused
from holdfast.fs import durable
from holdfast.fs.directory import make_directories
from holdfast.git.program import Git
from holdfast.repository.git_paths import GitPaths
from holdfast.repository.settings import DIRECTORY, read_settings, require_approved

_COMMENT = b"# Worktrees of Holdfast, until 'holdfast deinit':"
_EXCLUDE = ("info", "exclude")
_SPECIAL = "\\*?["


def require_place(paths: GitPaths, git: Git) -> None:
    """Raise `NotApproved` or `Refused` if worktrees cannot be created where the setting says. If that is inside the
    checkout, exclude it from git."""
    settings = read_settings(paths.root)
    if settings.directory is None:
        return
    require_approved(paths.root, settings, DIRECTORY)
    place, main = paths.worktrees, paths.payload(paths.main)
    hint = f"Choose another one: 'holdfast config set {DIRECTORY} PATH'."
    if place.is_relative_to(paths.common) or main.is_relative_to(place):
        raise Refused(f"worktrees cannot be in {place}: that is the checkout, or git's own directory", hint=hint)
    for name, each in paths.registrations():
        if name != paths.main and each.top is not None and place.is_relative_to(each.top):
            raise Refused(f"worktrees cannot be in {place}: that is inside the worktree {name}", hint=hint)
    if place.is_relative_to(main):
        relative = os.fspath(place.relative_to(main))
        if git.run("--literal-pathspecs", "ls-files", "-z", "--", relative, worktree=main):
            raise Refused(f"worktrees cannot be in {place}: git tracks files there", hint=hint)
        _exclude(git, relative)


def _exclude(git: Git, relative: str) -> None:
    escaped = "".join(f"\\{each}" if each in _SPECIAL else each for each in relative)
    line = os.fsencode(f"/{escaped}/")
    lines = _lines(git)
    if line in lines:
        return
    make_directories(git.common / _EXCLUDE[0], mode=0o777)
    durable.replace(_file(git), b"".join(each + b"\n" for each in (*lines, _COMMENT, line)))


def include_again(git: Git) -> None:
    """Remove our lines from `info/exclude`."""
    lines = _lines(git)
    ours = {number + offset for number, line in enumerate(lines) if line == _COMMENT for offset in (0, 1)}
    if ours:
        kept = (line for number, line in enumerate(lines) if number not in ours)
        durable.replace(_file(git), b"".join(each + b"\n" for each in kept))


def _lines(git: Git) -> list[bytes]:
    try:
        return durable.read(_file(git), limit=1 << 20).splitlines()
    except NotFound:
        return []


def _file(git: Git) -> Path:
    return git.common.joinpath(*_EXCLUDE)
