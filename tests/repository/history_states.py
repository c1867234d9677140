"""The state of a directory, in enough detail to reveal any change."""

from __future__ import annotations

from pathlib import Path


def state_of(root: Path) -> dict[str, tuple[int, ...]]:
    """Inode, mode, size and times of each file and directory."""
    return {
        str(path): (status.st_ino, status.st_mode, status.st_size, status.st_mtime_ns, status.st_ctime_ns)
        for path in [root, *root.rglob("*")]
        for status in [path.lstat()]
    }
