"""Helpers for the tests of the repository lock: locks that other programs wrote, and ways to probe a lock."""

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
needs_modes = pytest.mark.skipif(sys.platform == "win32", reason="Windows has no file modes")
needs_links = pytest.mark.skipif(sys.platform == "win32", reason="making a link needs a privilege on Windows")

ALIVE, DEAD, UNKNOWN = Liveness


def locker(data_dir: Path, clock: ManualClock, alive: Liveness = ALIVE) -> RepoLock:
    """A locker that goes by `clock` and judges every holder to be `alive`."""
    return RepoLock(data_dir, clock=clock, liveness_check=lambda _: alive)


def put(data_dir: Path, content: str | bytes, *, age: float | None = None) -> Path:
    """Write a lock file as another program would; with `age`, that long before NOW."""
    path = data_dir / "repos" / REPO / ".lock"
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(content.encode() if isinstance(content, str) else content)
    if age is not None:
        os.utime(path, (NOW - age, NOW - age))
    return path


def record(*, pid: object = 4711, created_at: object = None, **more: object) -> str:
    """A record as another program writes it."""
    return json.dumps({"pid": pid, "created_at": created_at or format_instant(NOW), **more})


def start_with(workers: Workers, take: Callable[[], object]) -> Worker:
    """Start a worker that calls `take` and keeps the result."""

    def task(line: Line) -> None:
        kept = take()
        line.say("taken")
        line.wait()
        del kept

    worker = workers.start(task)
    assert worker.hear() == "taken"
    return worker


def is_held(lock: RepoLock) -> bool:
    """Whether `lock` is refused; if not, it is taken and released."""
    try:
        lock.lock(REPO).unlock()
    except RepoLocked:
        return True
    return False
