"""Closing descriptors whose closing cannot matter."""

from __future__ import annotations

from holdfast.fs import calls


def close_quietly(fd: int) -> None:
    """Close a descriptor behind which nothing waits to be written: an error loses nothing then."""
    try:  # noqa: SIM105 - once or twice per file of a tree: a context manager would take longer than the call
        calls.close(fd)
    except OSError:
        pass
