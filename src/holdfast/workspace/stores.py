"""Which store keeps what is shared below a directory."""

from __future__ import annotations

import os

from holdfast.locks.file_locker import DEFAULT_TIMEOUT
from holdfast.store.base import Store
from holdfast.store.files import FileStore


def open_store(root: str | os.PathLike[str], *, timeout: float | None = DEFAULT_TIMEOUT) -> Store:
    """The store of the directory `root`: plain files. `timeout` is how long to wait for a lock."""
    return FileStore(root, timeout=timeout)
