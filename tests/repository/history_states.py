"""Everything about a directory that would show that something in it was changed."""

from __future__ import annotations

from pathlib import Path


def state_of(root: Path) -> dict[str, tuple[int, ...]]:
    """Of each file and directory: inode, mode, size, times."""
    return {
        str(path): (status.st_ino, status.st_mode, status.st_size, status.st_mtime_ns, status.st_ctime_ns)
        for path in [root, *root.rglob("*")]
        for status in [path.lstat()]
    }
