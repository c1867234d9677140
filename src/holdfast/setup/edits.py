"""Changes of files: worked out first, then made, each file in one step.

A file keeps its mode, and is left alone if it is right already.
"""

from __future__ import annotations

import contextlib
import stat
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import NamedTuple

from holdfast.errors import NotFound
from holdfast.fs import calls, durable
from holdfast.fs.directory import make_directories

MOST_BYTES = 4 << 20
_OUR_DIRECTORIES = (".claude", ".codex", ".cursor")


class Edit(NamedTuple):
    """One file, before and after; None where there is none."""

    path: Path
    before: bytes | None
    after: bytes | None
    mode: int = 0o644

    @property
    def changes(self) -> bool:
        return self.before != self.after


def look(path: Path) -> Edit:
    """A file as it is, with no change to it yet."""
    try:
        mode = stat.S_IMODE(calls.stat(path).st_mode)
        content = durable.read(path, limit=MOST_BYTES)
    except (FileNotFoundError, NotFound):
        return Edit(path, None, None)
    return Edit(path, content, content, mode)


def apply(project: Path, changes: Iterable[Edit]) -> None:
    """Make the changes, each file in one step; directories that were made for them go with them."""
    for edit in changes:
        if edit.after is None:
            durable.remove(edit.path)
            _remove_if_empty(project, edit.path.parent)
            continue
        make_directories(edit.path.parent)
        if edit.before is None:
            durable.create(edit.path, edit.after, mode=edit.mode)
        else:
            durable.replace(edit.path, edit.after, mode=edit.mode)


def _remove_if_empty(project: Path, directory: Path) -> None:
    if directory.parent == project and directory.name in _OUR_DIRECTORIES:
        with contextlib.suppress(OSError):
            calls.rmdir(directory)


def summary(changes: Sequence[Edit], project: Path) -> list[dict[str, str]]:
    """What will be or was done to which file, for people and programs."""
    return [
        {
            "path": str(edit.path.relative_to(project) if edit.path.is_relative_to(project) else edit.path),
            "action": "create" if edit.before is None else "remove" if edit.after is None else "change",
        }
        for edit in changes
    ]
