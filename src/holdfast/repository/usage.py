"""Which running processes work in a directory: standing in it, with open files in it, or mapping them.

On Linux it is read from `/proc`, elsewhere it is asked of `psutil`. What belongs to other users may be
hidden from us; how many processes that concerns is said too. A process in another mount namespace (a
container) sees the directory under another path, so where it stands is followed upwards by inode.
"""

from __future__ import annotations

import contextlib
import os
import sys
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

from holdfast.errors import Failure, InUse
from holdfast.fs import calls, durable
from holdfast.locks import identity

MOST_SHOWN = 5
_DEEPEST = 64


class User(NamedTuple):
    """A process that uses a directory, how it does, and by which path."""

    pid: int
    command: str
    how: str
    path: str

    def as_record(self) -> dict[str, object]:
        return {"pid": self.pid, "command": self.command, "how": self.how, "path": self.path}

    def __str__(self) -> str:
        return f"pid {self.pid} ({self.command}): {self.how} {self.path}"


class Usage(NamedTuple):
    """Who uses a directory. `hidden` processes could not be looked into."""

    users: tuple[User, ...]
    hidden: int


class _Hidden(Exception):
    """A process may not be looked into."""


def usage_of(directory: Path, *, besides: Iterable[int] = ()) -> Usage:
    """Who uses the directory or something below it, other than this process and `besides`."""
    left_out = {os.getpid(), *besides}
    users: list[User] = []
    hidden = 0
    for pid in _pids():
        if pid in left_out:
            continue
        try:
            found = next(_uses(pid, directory), None)
        except _Hidden:
            hidden += 1
            continue
        if found is not None:
            how, path = found
            users.append(User(pid, identity.command_of(pid) or "?", how, path))
    return Usage(tuple(users), hidden)


def refuse_if_used(directory: Path, worktree: str, doing: str) -> None:
    """Raise `InUse` if a running process works in the directory."""
    _refuse(usage_of(directory).users, directory, worktree, doing)


def refuse_if_written(directory: Path, worktree: str, doing: str) -> None:
    """Raise `InUse` if a running process can write into the directory, or the file, by what it has open.

    What it writes behind our back would be lost. Who merely stands in it loses nothing. Linux alone tells.
    """
    users: list[User] = []
    for pid in _pids() if sys.platform == "linux" else []:
        with contextlib.suppress(_Hidden):
            found = None if pid == os.getpid() else next(_writes(pid, directory), None)
            if found is not None:
                users.append(User(pid, identity.command_of(pid) or "?", *found))
    _refuse(users, directory, worktree, doing)


def _refuse(users: Sequence[User], directory: Path, worktree: str, doing: str) -> None:
    if not users:
        return
    shown = "; ".join(str(each) for each in users[:MOST_SHOWN])
    more = f"; and {len(users) - MOST_SHOWN} more" if len(users) > MOST_SHOWN else ""
    raise InUse(
        f"{worktree} cannot be {doing} while processes work in it: {shown}{more}",
        worktree=worktree,
        path=str(directory),
        processes=[each.as_record() for each in users],
    )


def _is_within(path: str, directory: str) -> bool:
    return path == directory or path.startswith(directory.rstrip(os.sep) + os.sep)


if sys.platform == "linux":
    _PROC = Path("/proc")
    _WAYS = (("cwd", "stands in"), ("root", "has as its root"), ("exe", "runs"))

    def _pids() -> list[int]:
        with calls.scandir(_PROC) as entries:
            return [int(entry.name) for entry in entries if entry.name.isdigit()]

    def _uses(pid: int, directory: Path) -> Iterator[tuple[str, str]]:
        """How a process uses the directory, one way after the other; `_Hidden` if that cannot be known."""
        here, wanted = _PROC / str(pid), str(directory)
        for name, how in _WAYS:
            path = _link(here / name)
            if path is not None and _is_within(path, wanted):
                yield how, path
        if _stands_below(here, directory):
            yield "stands in", f"{directory} (by another path)"
        for path in _open_files(here):
            if _is_within(path, wanted):
                yield "has open", path
        for path in _mapped_files(here):
            if _is_within(path, wanted):
                yield "has mapped", path

    def _writes(pid: int, directory: Path) -> Iterator[tuple[str, str]]:
        """How a process can write into the directory; `_Hidden` if that cannot be known."""
        here, wanted = _PROC / str(pid), str(directory)
        for number, path in _descriptors(here):
            if path.endswith(" (deleted)"):
                continue  # nobody will find there what is written to it, restored or not
            if _is_within(path, wanted) and _is_for_writing(here, number):
                yield "writes to", path
        for path in _mapped_files(here, writable=True):
            if _is_within(path, wanted):
                yield "has mapped for writing", path

    def _is_for_writing(process: Path, number: str) -> bool:
        with contextlib.suppress(Failure, ValueError):
            for line in durable.read(process / "fdinfo" / number).split(b"\n"):
                if line.startswith(b"flags:"):
                    return int(line.split()[1], 8) & os.O_ACCMODE != os.O_RDONLY
        return False

    def _link(path: Path) -> str | None:
        try:
            return calls.readlink(path)
        except PermissionError:
            raise _Hidden from None
        except OSError:  # it has ended, or is a thread of the kernel
            return None

    def _stands_below(process: Path, directory: Path) -> bool:
        """Whether a process of another mount namespace stands in the directory, however it calls it."""
        if _link(process / "ns" / "mnt") in (None, _link(_PROC / "self" / "ns" / "mnt")):
            return False
        with contextlib.suppress(OSError):
            wanted, here = calls.stat(directory), f"{process}/cwd"
            before = None
            for _ in range(_DEEPEST):
                found = calls.stat(here)
                if (found.st_dev, found.st_ino) == (wanted.st_dev, wanted.st_ino):
                    return True
                if (found.st_dev, found.st_ino) == before:
                    return False
                before, here = (found.st_dev, found.st_ino), f"{here}/.."
        return False

    def _open_files(process: Path) -> Iterator[str]:
        return (path for _, path in _descriptors(process))

    def _descriptors(process: Path) -> Iterator[tuple[str, str]]:
        try:
            with calls.scandir(process / "fd") as entries:
                names = [entry.name for entry in entries]
        except PermissionError:
            raise _Hidden from None
        except OSError:
            return
        for name in names:
            path = _link(process / "fd" / name)
            if path is not None:
                yield name, path

    def _mapped_files(process: Path, *, writable: bool = False) -> Iterator[str]:
        with contextlib.suppress(Failure):
            for line in durable.read(process / "maps").decode("utf-8", "surrogateescape").splitlines():
                fields = line.split(maxsplit=5)
                if len(fields) != 6 or not fields[5].startswith("/"):
                    continue
                if not writable or (fields[1][1] == "w" and fields[1][3] == "s"):
                    yield fields[5]

else:

    def _writes(pid: int, directory: Path) -> Iterator[tuple[str, str]]:
        """It cannot be told."""
        return iter(())

    def _pids() -> list[int]:
        import psutil

        return psutil.pids()

    def _uses(pid: int, directory: Path) -> Iterator[tuple[str, str]]:
        """How a process uses the directory, one way after the other; `_Hidden` if that cannot be known."""
        import psutil

        wanted = str(directory)
        try:
            process = psutil.Process(pid)
            if _is_within(process.cwd(), wanted):
                yield "stands in", process.cwd()
            for each in process.open_files():
                if _is_within(each.path, wanted):
                    yield "has open", each.path
        except psutil.AccessDenied:
            raise _Hidden from None
        except psutil.Error:
            return
