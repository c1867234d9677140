"""What this process has open. Tests compare sets: what an earlier test left may be closed at any moment."""

from __future__ import annotations

import os


def open_descriptors() -> set[str]:
    """The open descriptors of this process; none where the system does not list them."""
    if not os.path.isdir("/proc/self/fd"):
        return set()
    own = os.open("/proc/self/fd", os.O_RDONLY)
    try:
        return set(os.listdir(own)) - {str(own)}
    finally:
        os.close(own)
