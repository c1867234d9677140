"""File and lock operations for explored tasks, made through `holdfast.fs.calls`."""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from holdfast.fs import calls
from proof.explorer.footprints import LOCK_EX

FRESH = os.O_WRONLY | os.O_CREAT | os.O_EXCL

Listing = tuple[tuple[str, bytes | None], ...]


def flock(fd: int, operation: int) -> None:
    if sys.platform != "win32":
        calls.flock(fd, operation)


@contextmanager
def opened(path: Path, flags: int = os.O_RDONLY) -> Iterator[int]:
    fd = calls.open(path, flags, 0o666)
    try:
        yield fd
    finally:
        calls.close(fd)


@contextmanager
def flocked(path: Path, mode: int = LOCK_EX) -> Iterator[None]:
    with opened(path, os.O_RDWR | os.O_CREAT) as fd:
        flock(fd, mode)
        yield


def load(path: Path) -> bytes:
    with opened(path) as fd:
        return calls.read(fd, 1000)


def save(path: Path, content: bytes, *, draft: str) -> None:
    with opened(path.with_name(draft), FRESH) as fd:
        calls.write(fd, content)
    calls.replace(path.with_name(draft), path)


def listing(directory: Path) -> Listing:
    return tuple(
        (path.relative_to(directory).as_posix(), None if path.is_dir() else path.read_bytes())
        for path in sorted(directory.rglob("*"))
    )


def wait_for_file(directory: Path) -> str:
    ends_at = time.monotonic() + 5.0
    while time.monotonic() < ends_at:
        try:
            return load(directory / "file").decode()
        except FileNotFoundError:
            time.sleep(0.01)
    return "too late"
