"""Which store keeps what is shared below a directory."""

from __future__ import annotations

import os

from holdfast.store.base import Store
from holdfast.store.files import FileStore


def open_store(root: str | os.PathLike[str]) -> Store:
    """The store of the directory `root`: plain files."""
    return FileStore(root)
