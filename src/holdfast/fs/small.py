"""Small files, read with next to nothing loaded: for what must be quick, and for what the system tells."""

from __future__ import annotations

import os

from holdfast.fs import calls

_FLAGS = os.O_RDONLY | getattr(os, "O_CLOEXEC", 0) | getattr(os, "O_BINARY", 0)


def read(path: str, limit: int) -> bytes:
    """The content of a file, of a longer one the first `limit` bytes; raises `OSError` as it is."""
    descriptor = calls.open(path, _FLAGS)
    try:
        content = b""
        while len(content) < limit and (more := calls.read(descriptor, limit - len(content))):
            content += more
        return content
    finally:
        calls.close(descriptor)
