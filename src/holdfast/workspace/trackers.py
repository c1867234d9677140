"""Opening the issue tracker of a directory."""

from __future__ import annotations

import os
from pathlib import Path

from holdfast.clock import SKEW
from holdfast.errors import NotInitialised
from holdfast.fs.directory import exists
from holdfast.issues.tracker import Tracker
from holdfast.locks.file_lock import DEFAULT_TIMEOUT
from holdfast.locks.retry import RetryConfig
from holdfast.store.open import open_store, skew_of

MARKS = (".jit", ".holdfast")
"""What a directory has in it that is the root of a tracker: its files, or else those of a store elsewhere."""


def find_root(start: Path) -> Path:
    """The directory with a tracker in it, this one or the nearest above it; else `NotInitialised`."""
    for mark in MARKS:
        for directory in (start, *start.parents):
            if exists(directory / mark):
                return directory
    raise NotInitialised(f"there is no issue tracker in {start}, nor above it", path=str(start))


def open_tracker(
    root: str | os.PathLike[str],
    *,
    actor: str,
    address: str | None = None,
    timeout: float | None = DEFAULT_TIMEOUT,
    retry: RetryConfig | None = None,
) -> Tracker:
    """The tracker of the directory `root`, kept at this address if one is given, for who acts on it.

    `actor` is who that is, such as `agent:alice`. A new one is to be initialised first.
    """
    store = open_store(root, address, timeout=timeout)
    skew = skew_of(store)
    return Tracker(
        store,
        actor=actor,
        root=Path(os.path.abspath(root)),
        retry=retry,
        skew=SKEW if skew is None else skew,
    )
