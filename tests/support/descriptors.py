"""Open descriptors of this process.

Tests compare sets, not counts: the leftovers of an earlier test may be closed at any moment.
"""

from __future__ import annotations

import os
from pathlib import Path


def open_descriptors(under: Path | None = None) -> set[str]:
    """The open descriptors of this process, or of files below a path; empty where the system does not list them."""
    if not os.path.isdir("/proc/self/fd"):
        return set()
    own = os.open("/proc/self/fd", os.O_RDONLY)
    try:
        return {each for each in os.listdir(own) if each != str(own) and (under is None or _is_under(each, under))}
    finally:
        os.close(own)


def _is_under(descriptor: str, path: Path) -> bool:
    try:
        return Path(os.readlink(f"/proc/self/fd/{descriptor}")).is_relative_to(path)
    except OSError:  # closed since by another thread
        return False
