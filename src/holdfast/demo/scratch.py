"""A directory for the time of a `with` block."""

from __future__ import annotations

import contextlib
import os
import stat
from collections.abc import Iterator
from pathlib import Path

from holdfast.fs import calls
from holdfast.fs.directory import io_failure


@contextlib.contextmanager
def scratch_directory(parent: Path) -> Iterator[Path]:
    """Make an empty directory that nobody else may enter; remove it with all that is in it."""
    path = parent / f"holdfast-demo-{os.urandom(6).hex()}"
    try:
        calls.mkdir(path, 0o700)
    except OSError as error:
        raise io_failure("make the directory", path, error) from error
    try:
        yield path
    finally:
        _remove(path)


def _remove(path: Path) -> None:
    """Remove a directory and what is in it; a link is removed, not followed."""
    with calls.scandir(path) as entries:
        names = [entry.name for entry in entries]
    for name in names:
        below = path / name
        if stat.S_ISDIR(calls.stat(below, follow_symlinks=False).st_mode):
            _remove(below)
        else:
            calls.unlink(below)
    calls.rmdir(path)
