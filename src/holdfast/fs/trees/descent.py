"""The way to the directories of a tree for who answers to people: what goes wrong is told in words."""

from __future__ import annotations

import os

from holdfast.errors import IoFailure, NotFound, NotReadable
from holdfast.fs.directory import io_failure
from holdfast.fs.trees.way import Way, open_top


class Descent(Way):
    """The way below a root that a caller named."""

    @staticmethod
    def _open_top(root: str) -> int:
        return open_directory(root)


def open_directory(path: str) -> int:
    """Open the directory that a caller named; links on the way are the caller's own choice."""
    try:
        return open_top(path)
    except (FileNotFoundError, NotADirectoryError):
        raise NotFound(f"there is no directory {path}", path=path) from None
    except OSError as error:
        raise unreadable(path, error) from error


def unreadable(path: str, error: OSError) -> IoFailure:
    """The failure for something that must be read and cannot be."""
    if isinstance(error, PermissionError):
        return NotReadable("read", shown(path), error)
    return io_failure("read", shown(path), error)


def unwritable(path: str, error: OSError) -> IoFailure:
    """The failure for something that must be written and cannot be."""
    return io_failure("write", shown(path), error)


def split(path: str) -> tuple[str, str]:
    """The directory and the name in it."""
    directory, _, name = path.rpartition("/")
    return directory, name


def shown(path: str) -> str:
    """A path for people and for JSON: bytes that are no text are written as `\\xNN`."""
    return os.fsencode(path).decode("utf-8", "backslashreplace")
