"""An open directory, in which names are looked up, and the way down to one that no link can divert.

A path that is checked and then used may lead somewhere else by the time it is used. So everything
that writes opens the directory first, once, and from then on names files *in that directory*: where
its path leads meanwhile does not matter. `beneath` opens a directory below another one step by step
and refuses symbolic links at each step, so there is no moment between the check and the use.
"""

from __future__ import annotations

import contextlib
import errno
import os
import stat
import sys
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Self

from holdfast.errors import AlreadyExists, IoFailure, NotDurable, NotFound, NotWritable, PathEscape
from holdfast.fs import calls
from holdfast.fs.names import split_relative

TYPE_CHECKING = False  # what checkers take for true; importing `typing` costs time

if TYPE_CHECKING:
    from types import TracebackType


def write_all(fd: int, content: bytes | memoryview) -> None:
    """Write all of it, however little the system takes at a time."""
    written = calls.write(fd, content)
    while written < len(content):
        written += calls.write(fd, memoryview(content)[written:])


def close_quietly(fd: int) -> None:
    """Close a descriptor behind which nothing waits to be written: an error loses nothing then."""
    try:  # noqa: SIM105 - once or twice per file of a tree: a context manager would take longer than the call
        calls.close(fd)
    except OSError:
        pass


class Closing:
    """Something that is closed at the end of a `with` block."""

    __slots__ = ()

    def close(self) -> None:
        """Let go of what it has open."""
        raise NotImplementedError

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


_DIRECTORY = 0
if sys.platform != "win32":
    _DIRECTORY = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC
_DENIED = (errno.EACCES, errno.EPERM, errno.EROFS)


_FULL = (errno.ENOSPC, getattr(errno, "EDQUOT", errno.ENOSPC))
_FULL_HINT = "The disk, or your quota, is full. 'holdfast gc plan' shows what may be deleted in a repository."


def io_failure(action: str, path: object, error: OSError) -> IoFailure:
    """Turn the system's refusal into the failure that fits it."""
    if error.errno in _DENIED:
        return NotWritable(action, path, error)
    return IoFailure(action, path, error, hint=_FULL_HINT if error.errno in _FULL else None)


def is_there(path: str | os.PathLike[str]) -> bool:
    """Whether anything has this path, be it a link to nothing."""
    try:
        calls.stat(path, follow_symlinks=False)
    except FileNotFoundError:
        return False
    except OSError as error:
        raise io_failure("look at", path, error) from error
    return True


witness: Callable[[Directory], object] | None = None
"""Is shown each directory that is opened: for tests, in which one dies and its process lives on."""


class Directory(Closing):
    """One directory, held open. `path` is for messages; lookups go through the descriptor.

    On Windows, which cannot look names up in an open directory, they go through the path.
    """

    __slots__ = ("fd", "shown")

    def __init__(self, path: str, fd: int | None) -> None:
        self.shown = path
        self.fd = fd
        if witness is not None:
            witness(self)

    @property
    def path(self) -> Path:
        """Where this directory was when it was opened."""
        from pathlib import Path

        return Path(self.shown)

    def where(self, name: str) -> str:
        """The path of something in this directory, for messages."""
        return f"{self.shown}/{name}"

    @classmethod
    def open(cls, path: str | os.PathLike[str]) -> Self:
        """Open the directory at `path`; links on the way are followed, as the caller chose the path."""
        where = os.fspath(path)
        if sys.platform == "win32":
            _require_directory(where)
            return cls(where, None)
        try:
            return cls(where, calls.open(where, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC))
        except FileNotFoundError:
            raise NotFound(f"there is no directory {where}", path=where) from None
        except OSError as error:
            raise io_failure("open the directory", where, error) from error

    def beneath(self, relative: str, *, create: bool = False, mode: int = 0o777) -> Directory:
        """Open the directory `relative` below this one, refusing every symbolic link on the way."""
        here: Directory = self
        for name in split_relative(relative):
            try:
                below = here.enter(name, create=create, mode=mode)
            finally:
                if here is not self:
                    here.close()
            here = below
        return here

    def enter(self, name: str, *, create: bool = False, mode: int = 0o777) -> Directory:
        """Open the directory `name` in this one, refusing a symbolic link; `create` makes it if need be."""
        try:
            return self._enter(name)
        except NotFound:
            if not create:
                raise
        self.make(name, mode=mode)
        return self._enter(name)

    def _enter(self, name: str) -> Directory:
        where = self.where(name)
        if sys.platform == "win32":
            if self.is_link(name):
                raise PathEscape(f"{where} is a link", path=where)
            _require_directory(where)
            return Directory(where, None)
        try:
            return Directory(where, calls.open(name, _DIRECTORY, dir_fd=self.fd))
        except FileNotFoundError:
            raise NotFound(f"there is no directory {where}", path=where) from None
        except OSError as error:
            if error.errno in (errno.ELOOP, errno.ENOTDIR) and self.is_link(name):
                raise PathEscape(
                    f"{where} is a symbolic link; following it could lead out of {self.shown}", path=where
                ) from None
            raise io_failure("open the directory", where, error) from error

    def make(self, name: str, *, mode: int = 0o777) -> bool:
        """Make the directory `name` here, durably; False if it is there already.

        One that is there may have been made by a process that died before its name was durable: who
        keeps something precious in it syncs this directory too.
        """
        try:
            calls.mkdir(self.at(name), mode, dir_fd=self.fd)
        except FileExistsError:
            return False
        except OSError as error:
            raise io_failure("make the directory", self.where(name), error) from error
        try:
            self.sync()
        except OSError as error:
            raise NotDurable("sync the directory", self.shown, error) from error
        return True

    def at(self, name: str) -> str:
        """The string to hand to a system call, together with `dir_fd=self.fd`, to mean `name` here."""
        return name if self.fd is not None else self.where(name)

    def status(self, name: str) -> os.stat_result | None:
        """The status of `name` itself (a link is not followed), or None if it is not there."""
        try:
            return calls.stat(self.at(name), dir_fd=self.fd, follow_symlinks=False)
        except FileNotFoundError:
            return None
        except OSError as error:
            raise io_failure("look at", self.where(name), error) from error

    def is_link(self, name: str) -> bool:
        """Whether `name` is a symbolic link (on Windows also a junction)."""
        status = self.status(name)
        if status is None:
            return False
        if sys.platform == "win32" and status.st_file_attributes & stat.FILE_ATTRIBUTE_REPARSE_POINT:
            return True
        return stat.S_ISLNK(status.st_mode)

    def names(self) -> list[str]:
        """The names of everything in this directory, in no order."""
        return [entry.name for entry in self._entries()]

    def directories(self) -> list[str]:
        """The names of the directories in this one, links to directories left out, in order."""
        return sorted(entry.name for entry in self._entries() if entry.is_dir(follow_symlinks=False))

    def _entries(self) -> Iterator[os.DirEntry[str]]:
        try:
            with calls.scandir(self.shown if self.fd is None else self.fd) as entries:
                yield from entries
        except OSError as error:
            raise io_failure("list", self.shown, error) from error

    def sync(self) -> None:
        """Make the names in this directory survive a power cut."""
        if self.fd is not None:
            calls.sync_directory(self.fd)

    def close(self) -> None:
        """Let go of the descriptor; twice is fine."""
        fd = self.fd
        if fd is not None and fd >= 0:
            self.fd = -1  # not None: who uses a closed directory gets an error, not the current directory
            close_quietly(fd)

    def hand_over(self) -> int | None:
        """The descriptor, which is the caller's from now on."""
        fd, self.fd = self.fd, -1
        return fd

    def __del__(self) -> None:
        # Who has dropped it cannot close it any more. Not through the seam: this happens at any moment.
        fd = getattr(self, "fd", None)
        if fd is not None and fd >= 0:
            try:
                os.close(fd)
            except OSError:
                return

    def __repr__(self) -> str:
        return f"Directory({self.shown!r})"


def make_directories(path: Path, *, mode: int = 0o777) -> None:
    """Make `path` and what is missing above it, each name durable before the next is made."""
    missing: list[Path] = []
    here = path
    while not _exists(here):
        missing.append(here)
        here = here.parent
    for each in reversed(missing):
        with Directory.open(each.parent) as parent:
            parent.make(each.name, mode=mode)


def _exists(path: Path) -> bool:
    try:
        calls.stat(path)
    except FileNotFoundError:
        return False
    except OSError as error:
        raise io_failure("look at", path, error) from error
    return True


def _require_directory(path: str) -> None:
    try:
        found = stat.S_ISDIR(calls.stat(path).st_mode)
    except FileNotFoundError:
        found = False
    if not found:
        raise NotFound(f"there is no directory {path}", path=path)


_NOT_OFFERED = (errno.ENOSYS, errno.EINVAL, errno.EOPNOTSUPP)


def move(source: Path, target: Path) -> None:
    """Give what is at `source` the name `target`, on the same filesystem, if nothing has that name.

    Commit point: the rename. Durable when this returns. `NotDurable` means that it was made.
    """
    try:
        although_read_only(lambda: _rename(source, target), {source: target})
    except FileExistsError:
        raise AlreadyExists(f"{target} is there already", path=str(target)) from None
    except FileNotFoundError:
        raise NotFound(
            f"there is no {source} to move, or no directory {target.parent}", path=str(source)
        ) from None
    except OSError as error:
        if error.errno == errno.ENOTEMPTY:
            raise AlreadyExists(f"{target} is there already", path=str(target)) from None
        raise io_failure("move to", target, error) from error
    sync_parents(source, target)


def although_read_only(rename: Callable[[], object], going: Mapping[Path, Path]) -> None:
    """Rename directories; one that changes its parent is itself written to, so it must be writable meanwhile.

    `going` says where each of them goes. A crash may leave one of them writable, which is all it does.
    """
    try:
        rename()
    except PermissionError:
        modes = {source: mode for source in going if (mode := _read_only_mode(source)) is not None}
        if not modes:
            raise
        gone = False
        try:
            for source, mode in modes.items():
                calls.chmod(source, mode | stat.S_IWUSR)
            rename()
            gone = True
        finally:
            for source, mode in modes.items():
                calls.chmod(going[source] if gone else source, mode)


def _read_only_mode(path: Path) -> int | None:
    """The mode of a directory whose owner may not write to it; None for everything else."""
    try:
        mode = calls.stat(path, follow_symlinks=False).st_mode
    except FileNotFoundError:
        return None
    return stat.S_IMODE(mode) if stat.S_ISDIR(mode) and not mode & stat.S_IWUSR else None


def sync_parents(*paths: Path) -> None:
    """Make the names of these paths survive a power cut."""
    for parent in dict.fromkeys(path.parent for path in paths):
        with contextlib.suppress(NotFound), Directory.open(parent) as directory:
            try:
                directory.sync()
            except OSError as error:
                raise NotDurable("sync the directory", parent, error) from error


def _rename(source: Path, target: Path) -> None:
    try:
        calls.rename_noreplace(os.fspath(source), os.fspath(target))
    except OSError as error:
        if error.errno not in _NOT_OFFERED:
            raise
        if _is_there(target):
            raise FileExistsError(errno.EEXIST, os.strerror(errno.EEXIST), os.fspath(target)) from None
        calls.rename(source, target)


def _is_there(path: Path) -> bool:
    try:
        calls.stat(path, follow_symlinks=False)
    except FileNotFoundError:
        return False
    return True


def exists(path: str | os.PathLike[str]) -> bool:
    """Whether something is at a path, as far as it can be seen: what we may not look at is not there."""
    try:
        calls.stat(path)
    except OSError:
        return False
    return True
