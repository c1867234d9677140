"""What the tests of a repository's lock share: locks that others wrote, and how to ask for one."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from holdfast.clock import ManualClock, format_instant
from holdfast.errors import (
    RepoLocked,
)
from holdfast.locks.identity import Liveness
from holdfast.locks.repo_lock import RepoLock
from tests.locks.workers import Line, Worker, Workers

REPO = "repo"
NOW = 1_700_000_000.0

needs_fork = pytest.mark.skipif(sys.platform == "win32", reason="there is no fork on Windows")
needs_modes = pytest.mark.skipif(sys.platform == "win32", reason="Windows has no modes")
needs_links = pytest.mark.skipif(sys.platform == "win32", reason="making a link needs a privilege on Windows")

ALIVE, DEAD, UNKNOWN = Liveness


def locker(data_dir: Path, clock: ManualClock, alive: Liveness = ALIVE) -> RepoLock:
    """A locker for which it is the time of `clock`, and every holder as alive as `alive`."""
    return RepoLock(data_dir, clock=clock, liveness_check=lambda _: alive)


def put(data_dir: Path, content: str | bytes, *, age: float | None = None) -> Path:
    """Put a lock file there that somebody else wrote; with `age`, that long before NOW."""
    path = data_dir / "repos" / REPO / ".lock"
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(content.encode() if isinstance(content, str) else content)
    if age is not None:
        os.utime(path, (NOW - age, NOW - age))
    return path


def record(*, pid: object = 4711, created_at: object = None, **more: object) -> str:
    """What another program writes."""
    return json.dumps({"pid": pid, "created_at": created_at or format_instant(NOW), **more})


def start_with(workers: Workers, take: Callable[[], object]) -> Worker:
    """A worker that has what it took, and keeps it."""

    def task(line: Line) -> None:
        kept = take()
        line.say("taken")
        line.wait()
        del kept

    worker = workers.start(task)
    assert worker.hear() == "taken"
    return worker


def is_held(lock: RepoLock) -> bool:
    """Whether `lock` would be refused; if not, it is had and given back."""
    try:
        lock.lock(REPO).unlock()
    except RepoLocked:
        return True
    return False
