"""Interposition: intercepts the file system calls of an operation, to watch them, fail them, or kill the operation.

`interposed` passes every call of `holdfast.fs.calls` to a function that decides its outcome. A `Fate` decides by
the index of the call: `Faulty` makes one fail, `Deadly` ends the operation there.
"""

from __future__ import annotations

import errno
import gc
import os
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from enum import Enum
from typing import Any, NoReturn

from holdfast.fs import calls

_NEEDING_THE_DISK = (
    *("write", "fsync", "sync_directory", "sync_filesystem"),
    *("link", "mkdir", "symlink", "mknod", "clone", "snapshot_subvolume", "setxattr"),
)


# --- Calls and faults -------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Call:
    """One call of the operation, for messages; the first has the index 1."""

    index: int
    name: str
    arguments: str

    def __str__(self) -> str:
        return f"call {self.index}, {self.name}({self.arguments})"


class Kill(Enum):
    """When a process dies, relative to one of its calls."""

    BEFORE = "killed before"
    AFTER = "killed after"
    HALFWAY = "killed halfway through"


@dataclass(frozen=True, slots=True)
class Fault:
    """A fault at one call: an error, once or from then on; without a code, a short write."""

    code: int | None
    lasting: bool = False

    def __str__(self) -> str:
        if self.code is None:
            return "short write at"
        return f"{errno.errorcode[self.code]} {'from' if self.lasting else 'at'}"


SHORT_WRITE = Fault(None)


@dataclass(frozen=True, slots=True)
class Attempt:
    """A call that is about to be made; its interceptor decides its outcome."""

    name: str
    original: Callable[..., Any]
    arguments: tuple[Any, ...]
    options: dict[str, Any]

    def perform(self) -> Any:
        """Make the call."""
        return self.original(*self.arguments, **self.options)

    def perform_half(self) -> Any:
        """Make this write with only the first half of its bytes."""
        descriptor, content = self.arguments
        return self.original(descriptor, content[: len(content) // 2])

    @property
    def divisible(self) -> bool:
        """Whether this is a write that can be halved."""
        return self.name == "write" and len(self.arguments[1]) > 1

    @property
    def needs_the_disk(self) -> bool:
        """Whether this fails on a full or broken disk: it writes, or creates something."""
        return self.name in _NEEDING_THE_DISK or (bool(self.flags & os.O_CREAT) and not self._exists())

    def _exists(self) -> bool:
        try:
            os.stat(self.arguments[0], dir_fd=self.options.get("dir_fd"), follow_symlinks=False)
        except FileNotFoundError:
            return False
        return True

    @property
    def flags(self) -> int:
        """The flags of an `open`; 0 for other calls."""
        if self.name != "open":
            return 0
        flags: int = self.arguments[1] if len(self.arguments) > 1 else self.options["flags"]
        return flags

    def numbered(self, index: int) -> Call:
        """Describe this call, as the operation's call `index`."""
        listed = [shown(each) for each in self.arguments]
        listed += [f"{key}={value!r}" for key, value in self.options.items() if value is not None]
        return Call(index, self.name, ", ".join(listed))


# --- Interception -----------------------------------------------------------------------------------


@contextmanager
def interposed(intercept: Callable[[Attempt], Any], names: Sequence[str] = calls.CHANGING) -> Iterator[None]:
    """Inside the block, pass each of the named calls to `intercept`, and return its result.

    A call made inside another one (`sync_directory` uses `fsync`) is part of that one. The garbage collector is off:
    it would close files that earlier code left open, as calls of this block.
    """
    collecting = gc.isenabled()
    inside = threading.local()

    def intercepted(name: str, original: Callable[..., Any]) -> Callable[..., Any]:
        def call(*arguments: Any, **options: Any) -> Any:
            if getattr(inside, "call", False):
                return original(*arguments, **options)
            inside.call = True
            try:
                return intercept(Attempt(name, original, arguments, options))
            finally:
                inside.call = False

        return call

    originals = {name: getattr(calls, name) for name in names if hasattr(calls, name)}
    gc.disable()
    try:
        for name, original in originals.items():
            setattr(calls, name, intercepted(name, original))
        yield
    finally:
        if collecting:
            gc.enable()
        for name, original in originals.items():
            setattr(calls, name, original)


@contextmanager
def listening(listener: Callable[[str], None]) -> Iterator[None]:
    """Pass each `mark` to `listener` inside the block."""
    _listeners.append(listener)
    try:
        yield
    finally:
        _listeners.pop()


def mark(label: str) -> None:
    """Announce, from within `operate`, that the part `label` is done and must survive from now on."""
    if _listeners:
        _listeners[-1](label)


_listeners: list[Callable[[str], None]] = []


# --- Fates ------------------------------------------------------------------------------------------


class Fate:
    """Counts the calls of an operation, and records its open descriptors and the first call that was hit."""

    def __init__(self, index: int) -> None:
        self.index = index
        self.count = 0
        self.made: list[str] = []
        self.struck: Call | None = None
        self.opened: dict[int, Call] = {}

    def perform(self, attempt: Attempt) -> Any:
        """Make the call, and record what it opens or closes."""
        self.made.append(attempt.name)
        if attempt.name == "close":
            self.opened.pop(attempt.arguments[0], None)  # before the call: a close that fails also closes
        result = attempt.perform()
        if attempt.name == "open":
            self.opened[result] = attempt.numbered(self.count)
        return result

    def close_all(self) -> list[int]:
        """Close all descriptors of the operation, as the system does for a dead process; return them."""
        left = list(self.opened)
        self.opened.clear()
        for descriptor in left:
            os.close(descriptor)
        return left


class Faulty(Fate):
    """Makes one call fail, or from one call on every call that needs the disk."""

    def __init__(self, fault: Fault, index: int) -> None:
        super().__init__(index)
        self.fault = fault

    def __call__(self, attempt: Attempt) -> Any:
        self.count += 1
        if not self._strikes(attempt):
            return self.perform(attempt)
        self.struck = self.struck or attempt.numbered(self.count)
        if self.fault.code is None:
            return attempt.perform_half()
        if attempt.name == "close":  # a close that fails closes nevertheless
            self.perform(attempt)
        if attempt.name == "flock_interruptible":  # the one call that returns its error
            return self.fault.code
        raise OSError(self.fault.code, os.strerror(self.fault.code))

    def _strikes(self, attempt: Attempt) -> bool:
        if self.fault.lasting:
            return self.count >= self.index and attempt.needs_the_disk
        return self.count == self.index and (self.fault.code is not None or attempt.divisible)


class Deadly(Fate):
    """Ends the operation at one call; if it continues nevertheless, no later call is made."""

    def __init__(self, when: Kill, index: int, die: Callable[[Call], NoReturn]) -> None:
        super().__init__(index)
        self.when = when
        self.die = die

    def __call__(self, attempt: Attempt) -> Any:
        self.count += 1
        if self.count < self.index:
            return self.perform(attempt)
        if self.struck is not None:
            self.die(self.struck)
        self.struck = attempt.numbered(self.count)
        try:
            if self.when is Kill.AFTER:
                self.perform(attempt)
            elif self.when is Kill.HALFWAY and attempt.divisible:
                attempt.perform_half()
        finally:
            self.die(self.struck)


class Death(BaseException):
    """Simulates the death of the process in `cut_short`."""


def raise_death(call: Call) -> NoReturn:
    """End the operation as if its process had died."""
    raise Death(str(call))


def shown(value: Any) -> str:
    """A value for messages; long content is shortened."""
    if isinstance(value, bytes | bytearray | memoryview):
        content = bytes(value)
        return repr(content) if len(content) <= 48 else f"{content[:40]!r}... {len(content)} bytes"
    return repr(str(value)) if isinstance(value, os.PathLike) else repr(value)
