"""Moving directories: a read-only directory can be moved and stays read-only."""

from __future__ import annotations

import errno
import os
import stat
import sys
from pathlib import Path
from typing import Any

import pytest

from holdfast.errors import NotWritable
from holdfast.fs.directory import move
from holdfast.trees.restore import exchange
from proof.interpose import Attempt, interposed

pytestmark = pytest.mark.skipif(sys.platform == "win32", reason="needs POSIX modes")
RENAMES = ("rename_noreplace", "rename_exchange")


def as_unprivileged(attempt: Attempt) -> Any:
    """Behave as for everyone but root: moving a directory to another parent needs write access to it."""
    both = zip(attempt.arguments, (attempt.options.get(name) for name in ("src_dir_fd", "dst_dir_fd")), strict=True)
    for path, directory in list(both)[: 2 if attempt.name == "rename_exchange" else 1]:
        if not os.stat(path, dir_fd=directory).st_mode & stat.S_IWUSR:
            raise PermissionError(errno.EACCES, os.strerror(errno.EACCES))
    return attempt.perform()


def read_only(path: Path, name: str) -> Path:
    path.mkdir(parents=True)
    (path / name).write_text(name)
    path.chmod(0o555)
    return path


def mode(path: Path) -> int:
    return stat.S_IMODE(path.stat().st_mode)


def test_a_read_only_directory_is_moved_and_stays_read_only(scratch: Path) -> None:
    source, target = read_only(scratch / "a/source", "file"), scratch / "b/target"
    target.parent.mkdir()
    with interposed(as_unprivileged, RENAMES):
        move(source, target)
    assert (mode(target), (target / "file").read_text()) == (0o555, "file")


def test_read_only_directories_are_exchanged_and_each_keeps_its_mode(scratch: Path) -> None:
    one, other = read_only(scratch / "a/one", "one"), read_only(scratch / "b/other", "other")
    other.chmod(0o511)
    with interposed(as_unprivileged, RENAMES):
        exchange(one, other)
    assert ((one / "other").exists(), mode(one)) == (True, 0o511)
    assert ((other / "one").exists(), mode(other)) == (True, 0o555)


def test_a_directory_that_cannot_be_moved_keeps_its_mode(scratch: Path) -> None:
    def refuse(attempt: Attempt) -> Any:
        raise PermissionError(errno.EACCES, os.strerror(errno.EACCES))

    source = read_only(scratch / "a/source", "file")
    with interposed(refuse, RENAMES), pytest.raises(NotWritable):
        move(source, scratch / "target")
    assert mode(source) == 0o555
