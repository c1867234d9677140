"""Fixtures shared by all tests."""

from __future__ import annotations

import gc
import os
import shutil
import signal
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from holdfast.trees import engines

pytest_plugins = [
    "pytester",
    "tests.support.homes",
    "tests.requirements_plugin",
    "tests.support.juicefs",
    "tests.support.loop_mounts",
    "tests.support.s3",
    "tests.support.servers",
    "tests.support.guarded",
    "tests.support.machines",
    "tests.support.tmux",
    "tests.support.browser",
]

_MEMORY = Path("/dev/shm")
_TIMED = engines._TIMED
_OPEN, _MOST_OPEN = Path("/proc/self/fd"), 200


def pytest_configure() -> None:
    """Restore signal handling: a background job of a shell starts with SIGINT ignored."""
    for name in ("SIGINT", "SIGHUP", "SIGQUIT"):
        number = getattr(signal, name, None)  # Windows has only one of them
        if number is not None and signal.getsignal(number) is signal.SIG_IGN:
            signal.signal(number, signal.default_int_handler if name == "SIGINT" else signal.SIG_DFL)
    # Commands write to the data directory: keep them out of the user's own.
    os.environ["XDG_DATA_HOME"] = tempfile.mkdtemp(prefix="holdfast-data-")
    # Memory stands in for a disk, whose times tell what changed; `memory_as_memory` takes it for what it is.
    engines._TIMED = _TIMED | {"tmpfs"}
    gc.disable()


def pytest_collection_finish() -> None:
    """Exempt the modules and the collected tests from garbage collection. They stay anyway, and harnesses that collect
    after each fault, or fork, would visit or copy them every time."""
    gc.collect()
    gc.freeze()
    gc.enable()


def pytest_unconfigure() -> None:
    shutil.rmtree(os.environ["XDG_DATA_HOME"], ignore_errors=True)


@pytest.hookimpl(trylast=True)
def pytest_runtest_teardown() -> None:
    """Collect the stores that tests have left open before they use up the descriptors that `select` accepts, which are
    below 1024."""
    if _OPEN.is_dir() and len(os.listdir(_OPEN)) > _MOST_OPEN:
        gc.collect()


@pytest.fixture
def memory_as_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(engines, "_TIMED", _TIMED)


@pytest.fixture
def scratch(tmp_path: Path) -> Iterator[Path]:
    """An empty directory for many short-lived files: in memory if possible, otherwise on disk."""
    if not (_MEMORY.is_dir() and os.access(_MEMORY, os.W_OK | os.X_OK)):
        yield tmp_path
        return
    directory = Path(tempfile.mkdtemp(prefix="holdfast-", dir=_MEMORY))
    yield directory
    shutil.rmtree(directory, ignore_errors=True)
