"""Counting what this process has open, without what earlier tests left to the garbage collector."""

from __future__ import annotations

import gc
import os


def open_descriptors() -> set[str]:
    """The descriptors of this process, as their numbers; none where the system does not list them."""
    gc.collect()
    return set(os.listdir("/proc/self/fd")) if os.path.isdir("/proc/self/fd") else set()
