"""The directories of worktrees, and files that do not belong where they are."""

from __future__ import annotations

import stat
from collections.abc import Iterator
from pathlib import Path

from holdfast.errors import NotFound
from holdfast.fs.directory import Directory
from holdfast.worktrees.doctor import Examination, Finding, Severity

_CONTROL_FILES = (".jvs", ".holdfast")
"""Names that are ours: in the root of a payload they lead commands astray."""


def worktrees(examination: Examination) -> Iterator[Finding]:
    """Worktrees without a directory, and directories without a worktree.

    The order is that of handing over: directories, then operations, then records. What is being
    created has an operation until the commit that makes its record.
    """
    places = examination.control.places
    there = _names(places.worktrees)
    pending = set(examination.operations())
    configs = examination.configs()
    for worktree in configs:
        path = places.payload(worktree)
        if _is_directory(path) or worktree in examination.operations():
            continue
        if examination.config(worktree) is not None and not _is_directory(path):
            instead = ", and something else stands there" if _exists(path) else ""
            yield Finding(
                "worktree-directory-missing",
                Severity.ERROR,
                worktree,
                f"the directory of {worktree} is not there{instead}: {path}",
                "Somebody moved or deleted it. What was saved is in its snapshots.",
                "nothing: put it back, or restore its head into a new worktree and remove this one",
                facts={"path": str(path)},
            )
    for name in there:
        if name in configs or name in pending:
            continue
        if not _exists(places.worktrees / name):
            continue
        yield Finding(
            "worktree-directory-unknown",
            Severity.WARNING,
            name,
            f"{places.worktrees / name} belongs to no worktree",
            "Somebody put it there. Holdfast does not look into it, and takes no snapshots of it.",
            "nothing: it may be somebody's work; move it elsewhere",
        )


def payloads(examination: Examination) -> Iterator[Finding]:
    """Control files among users' files."""
    for worktree in examination.configs():
        payload = examination.control.places.payload(worktree)
        for name in _CONTROL_FILES if _is_directory(payload) else ():
            if _exists(payload / name):
                yield Finding(
                    "control-file-in-payload",
                    Severity.WARNING,
                    f"{worktree}/{name}",
                    f"{payload / name} looks like a file of Holdfast, but is among the files of {worktree}",
                    "Commands that are run there may take it for the repository. It is in every snapshot.",
                    "nothing: it is among your files; move it away if it is not yours",
                )


def records(examination: Examination) -> Iterator[Finding]:
    """Files beside a worktree's record, which is the only source of what the worktree is."""
    directory = examination.control.places.root / ".jvs" / "worktrees"
    for worktree in _names(directory):
        for name in _names(directory / worktree):
            if name != "config.json" and not name.startswith("."):
                yield Finding(
                    "record-foreign",
                    Severity.WARNING,
                    f"{worktree}/{name}",
                    f"{directory / worktree / name} is not a file of this version of Holdfast",
                    "Nobody reads it: the record of a worktree is config.json alone.",
                    "nothing: it is not ours to remove",
                )


def _names(path: Path) -> list[str]:
    try:
        with Directory.open(path) as directory:
            return sorted(directory.names())
    except NotFound:
        return []


def _exists(path: Path) -> bool:
    return _status_mode(path) is not None


def _is_directory(path: Path) -> bool:
    mode = _status_mode(path)
    return mode is not None and stat.S_ISDIR(mode)


def _status_mode(path: Path) -> int | None:
    try:
        with Directory.open(path.parent) as directory:
            status = directory.status(path.name)
    except NotFound:
        return None
    return None if status is None else status.st_mode
