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
"""Where the monotonic clock of tasks starts: no real deadline of this process is near."""


class Inhabitant(Protocol):
    """A thread with a world of its own. `slept` is how many seconds have passed for it, `history` changes with
    each of its calls, and `remembered` is what its process has in caches.
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
    somebody: Inhabitant | None = None


current = _Current()
"""Who the calling thread is."""


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
def nobody() -> Iterator[None]:
    """Inside the block, this thread is not a task."""
    somebody, current.somebody = current.somebody, None
    try:
        yield
    finally:
        current.somebody = somebody


def call_of_the_dead(attempt: Attempt) -> None:
    """A call of a dead task has no effect. Finalisers pass silently; any other call raises `Death` again."""
    if attempt.name == "close" and not is_descriptor(attempt.arguments[0]):
        attempt.perform()  # it belongs to nothing that is explored
    elif attempt.name not in ("close", "flock"):
        raise Death


def _intercept(attempt: Attempt) -> Any:
    somebody = current.somebody
    if somebody is not None:
        return somebody.call(attempt)
    if attempt.arguments and is_descriptor(attempt.arguments[0]):
        return call_of_the_dead(attempt)  # an object of a past execution is being dropped
    return attempt.perform()


class _NoLock:
    """Replaces a lock of the process, because each task stands for its own process."""

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
        somebody = current.somebody
        return sleep(seconds) if somebody is None else somebody.sleep(seconds)

    def own_urandom(size: int) -> bytes:
        somebody = current.somebody
        return urandom(size) if somebody is None else somebody.draw(size)

    def own_wall() -> float:
        somebody = current.somebody
        return wall() if somebody is None else somebody.began_at + somebody.slept

    def own_monotonic() -> float:
        somebody = current.somebody
        return monotonic() if somebody is None else _FAR + somebody.slept

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
            if current.somebody is None:
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
        somebody = current.somebody
        if somebody is None:
            return cached(*arguments, **options)
        key = (cached, arguments, *sorted(options.items()))
        for known in (for_all, somebody.remembered):
            if key in known:
                return known[key]
        before = somebody.history
        value = cached.__wrapped__(*arguments, **options)
        (for_all if somebody.history == before else somebody.remembered)[key] = value
        return value

    return functools.update_wrapper(call, cached)
