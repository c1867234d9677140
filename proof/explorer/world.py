"""The world of a task: its own file system calls, clocks, random numbers and process-wide memory.

While the world exists, each of these is replaced for threads that are tasks (see `current`); for other threads,
nothing changes. Each task has its own copy of what the package keeps per process (caches, a lock), because it
stands for a process that has just started.
"""

from __future__ import annotations

import functools
import importlib
import os
import pkgutil
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import ModuleType
from typing import Any, Protocol

import holdfast.fs
import holdfast.locks
import holdfast.store
from holdfast.fs import calls
from holdfast.locks import flock as lock_descriptors
from proof.explorer.files import is_descriptor
from proof.interpose import Attempt, interposed

_FAR = 1e9
"""The start of the monotonic clock of tasks, far from any real deadline of this process."""


class TaskWorld(Protocol):
    """The world of one task. `slept` is the number of seconds that have passed for it, `history` changes with each
    of its calls, and `remembered` holds the caches of its process.
    """

    slept: float
    began_at: float
    history: int
    remembered: dict[object, Any]

    def call(self, attempt: Attempt) -> Any:
        """Make a file system call."""

    def sleep(self, seconds: float) -> None:
        """Let time pass."""

    def draw(self, size: int) -> bytes:
        """Random bytes."""


class _Current(threading.local):
    task: TaskWorld | None = None


current = _Current()
"""The task that the calling thread runs, if any."""


class Death(BaseException):
    """The end of a task, as an exception in its thread."""


class Unexplorable(BaseException):
    """A task does something that cannot be explored; no task should catch this."""


@contextmanager
def world_of_tasks() -> Iterator[None]:
    """Inside the block, threads that are tasks have their own calls, clocks and random numbers."""
    replacements = _replacements()
    saved = [(module, name, getattr(module, name)) for module, name, _ in replacements]
    try:
        for module, name, replacement in replacements:
            setattr(module, name, replacement)
        with interposed(_intercept, (*calls.CHANGING, *calls.READING)):
            yield
    finally:
        for module, name, original in saved:
            setattr(module, name, original)


@contextmanager
def not_a_task() -> Iterator[None]:
    """Inside the block, this thread is not a task."""
    task, current.task = current.task, None
    try:
        yield
    finally:
        current.task = task


def call_after_death(attempt: Attempt) -> None:
    """Give a call of a dead task no effect. Finalisers pass silently; any other call raises `Death` again."""
    if attempt.name == "close" and not is_descriptor(attempt.arguments[0]):
        attempt.perform()  # not an explored file
    elif attempt.name not in ("close", "flock"):
        raise Death


def _intercept(attempt: Attempt) -> Any:
    task = current.task
    if task is not None:
        return task.call(attempt)
    if attempt.arguments and is_descriptor(attempt.arguments[0]):
        return call_after_death(attempt)  # a leftover of a past execution is being finalised
    return attempt.perform()


class _NoLock:
    """Stands in for a lock of the process, because each task stands for a process of its own."""

    def acquire(self) -> bool:
        return True

    def release(self) -> None:
        pass

    def __enter__(self) -> None:
        pass

    def __exit__(self, *problem: object) -> None:
        pass


def _replacements() -> list[tuple[ModuleType, str, Any]]:
    sleep, urandom, wall, monotonic = time.sleep, os.urandom, time.time, time.monotonic

    def own_sleep(seconds: float) -> None:
        task = current.task
        return sleep(seconds) if task is None else task.sleep(seconds)

    def own_urandom(size: int) -> bytes:
        task = current.task
        return urandom(size) if task is None else task.draw(size)

    def own_wall() -> float:
        task = current.task
        return wall() if task is None else task.began_at + task.slept

    def own_monotonic() -> float:
        task = current.task
        return monotonic() if task is None else _FAR + task.slept

    replacements: list[tuple[ModuleType, str, Any]] = [
        (time, "sleep", own_sleep),
        (time, "time", own_wall),
        (time, "monotonic", own_monotonic),
        (os, "urandom", own_urandom),
        (lock_descriptors, "_forking", _NoLock()),
    ]
    if sys.platform != "win32":
        gettime = time.clock_gettime

        def own_gettime(clock: int) -> float:
            if current.task is None:
                return gettime(clock)
            return own_wall() if clock == time.CLOCK_REALTIME else own_monotonic()

        replacements.append((time, "clock_gettime", own_gettime))
    return replacements + [
        (module, name, _own_cache(value))
        for module in _modules()
        for name, value in vars(module).items()
        if hasattr(value, "cache_clear")
    ]


def _modules() -> Iterator[ModuleType]:
    """The modules of the package, including those that it loads on demand."""
    for package in (holdfast.fs, holdfast.locks, holdfast.store):
        for found in pkgutil.iter_modules(package.__path__, package.__name__ + "."):
            importlib.import_module(found.name)
    ours = [name for name in sys.modules if name.startswith("holdfast.")]
    return (sys.modules[name] for name in ours if not name.startswith("holdfast.testing"))


def _own_cache(cached: Any) -> Callable[..., Any]:
    """A cache for each task; results that do not depend on the directory are shared."""
    for_all: dict[object, Any] = {}

    def call(*arguments: Any, **options: Any) -> Any:
        task = current.task
        if task is None:
            return cached(*arguments, **options)
        key = (cached, arguments, *sorted(options.items()))
        for known in (for_all, task.remembered):
            if key in known:
                return known[key]
        before = task.history
        value = cached.__wrapped__(*arguments, **options)
        (for_all if task.history == before else task.remembered)[key] = value
        return value

    return functools.update_wrapper(call, cached)
