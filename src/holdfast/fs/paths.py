"""Questions about one path that load nothing but `calls`: the guard asks them before every write."""

from __future__ import annotations

import os
import stat

from holdfast.fs import calls

TYPE_CHECKING = False  # checkers take it for true; importing `typing` costs time

if TYPE_CHECKING:
    from collections.abc import Callable

_FLAGS = os.O_RDONLY | getattr(os, "O_CLOEXEC", 0) | getattr(os, "O_BINARY", 0)


def exists(path: str | os.PathLike[str]) -> bool:
    """Whether something is at `path`, links followed; what this user may not see does not exist."""
    try:
        calls.stat(path)
    except OSError:
        return False
    return True


def is_directory(path: str | os.PathLike[str]) -> bool:
    """Whether `path` is a directory, not a link to one; what this user may not see is none."""
    try:
        return stat.S_ISDIR(calls.stat(path, follow_symlinks=False).st_mode)
    except OSError:
        return False


def read_small(path: str, limit: int) -> bytes:
    """The first `limit` bytes of a file; raises the system's own `OSError`."""
    descriptor = calls.open(path, _FLAGS)
    try:
        content = b""
        while len(content) < limit and (more := calls.read(descriptor, limit - len(content))):
            content += more
        return content
    finally:
        calls.close(descriptor)


def find_upwards(start: str | os.PathLike[str], is_root: Callable[[str], bool]) -> str | None:
    """The nearest directory that is a root: `start`, or one above it; None if there is none."""
    here = os.path.abspath(start)
    while not is_root(here):
        above = os.path.dirname(here)
        if above == here:
            return None
        here = above
    return here


def is_repository(path: str | os.PathLike[str]) -> bool:
    """Whether a directory has `.jvs/`, which is not a symbolic link."""
    return is_directory(os.path.join(path, ".jvs"))
