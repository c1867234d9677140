"""Bringing a tree to the disk: all of it at its end, and much of it sooner, while the rest is written."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from holdfast.errors import Failure
from holdfast.fs import calls
from holdfast.fs.directory import Directory, io_failure


@contextmanager
def synced(place: Path) -> Iterator[None]:
    """What this block writes to the file system of `place` is on the disk after it; one call for all of it.

    The call is made through what was opened before the block: the system tells an error of the disk to
    everybody who had something open then, but to those who come later only if nobody was told yet.
    """
    with Directory.open(place) as directory:
        yield
        _sync(directory, place)


def sync_tree(tree: Path) -> None:
    """Bring to the disk what was written to the file system of a tree."""
    with synced(tree):
        pass


def _sync(directory: Directory, tree: Path) -> None:
    if directory.fd is None:
        return
    try:
        calls.sync_filesystem(directory.fd)
    except OSError as error:
        raise io_failure("sync", tree, error) from error


class EarlySync:
    """Syncs a tree in a thread of its own, so that less is left to do at the end.

    The system tells an error of the disk once, to whoever syncs first. So it must not be lost here: who
    marks the tree as complete asks for it before.
    """

    def __init__(self, tree: Path) -> None:
        self._tree = tree
        self._directory = Directory.open(tree)
        self._failure: Exception | None = None
        self._thread = threading.Thread(target=self._run, daemon=True)

    def _run(self) -> None:
        try:
            with self._directory as directory:
                _sync(directory, self._tree)
        except Exception as failure:
            self._failure = failure

    @classmethod
    def start(cls, tree: Path) -> EarlySync | None:
        """Begin; None where there can be no more threads, or no more open files."""
        try:
            syncing = cls(tree)
        except Failure:
            return None
        try:
            syncing._thread.start()
        except RuntimeError:
            syncing._directory.close()
            return None
        return syncing

    def finish(self) -> None:
        """Wait until it is done, and raise what went wrong."""
        self._thread.join()
        if self._failure is not None:
            raise self._failure

    def close(self) -> None:
        """Wait until it is done, whatever comes of it: something else has gone wrong."""
        self._thread.join()
