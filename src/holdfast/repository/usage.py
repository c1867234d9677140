"""The running processes that use a directory: as their current directory, by open files, or by mapped files.

Found in `/proc` on Linux, by `psutil` elsewhere. Other users' processes may be hidden; their number is reported. A
process in another mount namespace (a container) sees the directory under another path, so its current directory is
followed upwards by inode.
"""

from __future__ import annotations

import contextlib
import os
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

from holdfast.errors import Failure, InUse
from holdfast.fs import calls, durable
from holdfast.fs.directory import failing_to
from holdfast.locks import identity

MOST_SHOWN = 5
_DEEPEST = 64


class User(NamedTuple):
    """A process that uses a directory: how, and by which path."""

    pid: int
    command: str
    how: str
    path: str

    def as_record(self) -> dict[str, object]:
        return self._asdict()

    def __str__(self) -> str:
        return f"pid {self.pid} ({self.command}): {self.how} {self.path}"


class Usage(NamedTuple):
    """The processes that use a directory; `hidden` is the number of uninspectable processes."""

    users: tuple[User, ...]
    hidden: int


class _Hidden(Exception):
    """Raised if a process cannot be inspected."""


def usage_of(directory: Path) -> Usage:
    """The processes, other than this one, that use the directory or something below it."""
    users: list[User] = []
    hidden = 0
    for pid in _pids():
        try:
            users += _first(pid, _uses(pid, directory))
        except _Hidden:
            hidden += 1
    return Usage(tuple(users), hidden)


def standing_in(directory: Path) -> tuple[User, ...]:
    """The processes, other than this one, whose current directory is this one or below it."""
    users: list[User] = []
    for pid in _pids():
        with contextlib.suppress(_Hidden):
            users += _first(pid, _stands(pid, directory))
    return tuple(users)


def refuse_if_used(directory: Path, worktree: str, doing: str) -> None:
    """Raise `InUse` if a running process uses the directory."""
    _refuse(usage_of(directory).users, directory, worktree, doing)


def refuse_if_written(directory: Path, worktree: str, doing: str, *, foreign: Sequence[Path]) -> None:
    """Raise `InUse` if a running process has the file, or files in the directory, open for writing: its later writes
    would be lost. A process that only has it as its current directory loses nothing, nor does one that writes below
    a directory that is not part of the content (`foreign`). Linux only."""
    users: list[User] = []
    for pid in _pids() if sys.platform == "linux" else []:
        with contextlib.suppress(_Hidden):
            users += _first(pid, _writes(pid, directory, foreign))
    _refuse(users, directory, worktree, doing)


def _first(pid: int, uses: Iterator[tuple[str, str]]) -> list[User]:
    found = None if pid == os.getpid() else next(uses, None)
    return [] if found is None else [User(pid, identity.command_of(pid) or "?", *found)]


def _refuse(users: Sequence[User], directory: Path, worktree: str, doing: str) -> None:
    if users:
        shown = "; ".join(str(each) for each in users[:MOST_SHOWN])
        more = f"; and {len(users) - MOST_SHOWN} more" if len(users) > MOST_SHOWN else ""
        message = f"{worktree} cannot be {doing} while processes use it: {shown}{more}"
        processes = [each.as_record() for each in users]
        raise InUse(message, worktree=worktree, path=str(directory), processes=processes)


def _is_within(path: str, directory: str) -> bool:
    return path == directory or path.startswith(directory.rstrip(os.sep) + os.sep)


if sys.platform == "linux":
    _PROC = "/proc"
    _LINKS = (("root", "has as its root"), ("exe", "runs"))

    def _pids() -> list[int]:
        with failing_to("list", _PROC), calls.scandir(_PROC) as entries:
            return [int(entry.name) for entry in entries if entry.name.isdigit()]

    def _uses(pid: int, directory: Path) -> Iterator[tuple[str, str]]:
        """How a process uses the directory, and by which path; `_Hidden` if that is unknown."""
        process, top = f"{_PROC}/{pid}", str(directory)
        yield from _stands(pid, directory)
        for name, how in _LINKS:
            path = _link(f"{process}/{name}")
            if path is not None and _is_within(path, top):
                yield how, path
        for _, path in _descriptors(process):
            if _is_within(path, top):
                yield "has open", path
        for path in _mapped_files(process, top):
            yield "has mapped", path

    def _stands(pid: int, directory: Path) -> Iterator[tuple[str, str]]:
        process = f"{_PROC}/{pid}"
        path = _link(f"{process}/cwd")
        if path is not None and _is_within(path, str(directory)):
            yield "has as its current directory", path
        elif _stands_below(process, directory):
            yield "has as its current directory", f"{directory} (by another path)"

    def _writes(pid: int, directory: Path, foreign: Sequence[Path]) -> Iterator[tuple[str, str]]:
        """How a process can write to the directory; `_Hidden` if that is unknown."""
        process, top = f"{_PROC}/{pid}", str(directory)
        for number, path in _descriptors(process):
            if path.endswith(" (deleted)") or any(_is_within(path, str(each)) for each in foreign):
                continue  # its writes are lost in any case, or stay
            if _is_within(path, top) and _is_for_writing(process, number):
                yield "writes to", path
        for path in _mapped_files(process, top, writable=True):
            yield "has mapped for writing", path

    def _is_for_writing(process: str, number: str) -> bool:
        with contextlib.suppress(Failure, ValueError):
            for line in durable.read(Path(process, "fdinfo", number)).split(b"\n"):
                if line.startswith(b"flags:"):
                    return int(line.split()[1], 8) & os.O_ACCMODE != os.O_RDONLY
        return False

    def _link(path: str) -> str | None:
        try:
            return calls.readlink(path)
        except PermissionError:
            raise _Hidden from None
        except OSError:  # it has ended, or is a kernel thread
            return None

    def _stands_below(process: str, directory: Path) -> bool:
        """Whether a process of another mount namespace has its current directory in this one."""
        if _link(f"{process}/ns/mnt") in (None, _link(f"{_PROC}/self/ns/mnt")):
            return False
        with contextlib.suppress(OSError):
            top, here, child = calls.stat(directory), f"{process}/cwd", None
            for _ in range(_DEEPEST):
                found = calls.stat(here)
                if os.path.samestat(found, top):
                    return True
                if child is not None and os.path.samestat(found, child):
                    return False
                child, here = found, f"{here}/.."
        return False

    def _descriptors(process: str) -> Iterator[tuple[str, str]]:
        try:
            with calls.scandir(f"{process}/fd") as entries:
                names = [entry.name for entry in entries]
        except PermissionError:
            raise _Hidden from None
        except OSError:
            return
        for name in names:
            path = _link(f"{process}/fd/{name}")
            if path is not None:
                yield name, path

    def _mapped_files(process: str, top: str, *, writable: bool = False) -> Iterator[str]:
        content = b""
        with contextlib.suppress(Failure):
            content = durable.read(Path(process, "maps"))
        if os.fsencode(top) not in content:  # the usual case: there may be thousands of lines
            return
        for line in os.fsdecode(content).splitlines():
            fields = line.split(maxsplit=5)
            if len(fields) != 6 or not _is_within(fields[5], top):
                continue
            if not writable or (fields[1][1] == "w" and fields[1][3] == "s"):
                yield fields[5]

else:

    def _writes(pid: int, directory: Path, foreign: Sequence[Path]) -> Iterator[tuple[str, str]]:
        return iter(())  # unknown

    def _pids() -> list[int]:
        import psutil

        return psutil.pids()

    def _stands(pid: int, directory: Path) -> Iterator[tuple[str, str]]:
        return _uses(pid, directory, files=False)

    def _uses(pid: int, directory: Path, *, files: bool = True) -> Iterator[tuple[str, str]]:
        import psutil

        top = str(directory)
        try:
            process = psutil.Process(pid)
            if _is_within(process.cwd(), top):
                yield "has as its current directory", process.cwd()
            for each in process.open_files() if files else ():
                if _is_within(each.path, top):
                    yield "has open", each.path
        except psutil.AccessDenied:
            raise _Hidden from None
        except psutil.Error:
            return
