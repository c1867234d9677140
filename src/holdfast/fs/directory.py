"""An open directory in which names are looked up, and durable moves between directories.

A path that is checked and then used may lead somewhere else by the time it is used. So every writer opens
the directory once and from then on names files *in that directory*, wherever its path leads meanwhile.
`open` and `beneath` descend step by step and refuse a symbolic link at each step, with no gap between check and use.
"""

from __future__ import annotations

import contextlib
import errno
import os
import stat
import sys
from collections.abc import Callable, Iterator, Mapping
from itertools import takewhile
from pathlib import Path
from typing import Self

from holdfast.errors import AlreadyExists, IoFailure, NotDurable, NotFound, NotWritable, PathEscape
from holdfast.fs import calls
from holdfast.fs.names import split_relative

_ENTER = 0
if sys.platform != "win32":
    _ENTER = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC
_DENIED = (errno.EACCES, errno.EPERM, errno.EROFS)
NO_SPACE = (errno.ENOSPC, getattr(errno, "EDQUOT", errno.ENOSPC))
_FULL_HINT = "The disk or your quota is full. 'holdfast gc plan' shows what a repository can free."
_NOT_OFFERED = (errno.ENOSYS, errno.EINVAL, errno.EOPNOTSUPP)
_MOST_ATTEMPTS = 100
_SHARED = stat.S_ISGID | stat.S_IWGRP
_PRIVATE = frozenset([".jvs", ".holdfast"])
"""Our own directories: only the owner, and the group that shares them, may enter."""


def io_failure(action: str, path: object, error: OSError) -> IoFailure:
    """The `Failure` for an `OSError` of `action` on `path`."""
    if error.errno in _DENIED:
        return NotWritable(action, path, error)
    return IoFailure(action, path, error, hint=_FULL_HINT if error.errno in NO_SPACE else None)


def not_a_path(path: object) -> PathEscape:
    """The failure for a path with a NUL or a lone surrogate, which no file can have."""
    shown = ascii(str(path))[:160]
    return PathEscape(f"{shown} cannot be the path of a file", path=shown)


@contextlib.contextmanager
def failing_to(action: str, path: object) -> Iterator[None]:
    """Turn an `OSError` in the block into the `io_failure` of `action` on `path`."""
    try:
        yield
    except OSError as error:
        raise io_failure(action, path, error) from error


@contextlib.contextmanager
def opened(path: str | os.PathLike[str], flags: int, mode: int = 0o666, *, dir_fd: int | None = None) -> Iterator[int]:
    """Open a file for the block; closing one that was written to may raise."""
    fd = calls.open(path, flags, mode, dir_fd=dir_fd)
    try:
        yield fd
    finally:
        (calls.close if flags & (os.O_WRONLY | os.O_RDWR) else close_quietly)(fd)


def status_at(path: str | os.PathLike[str]) -> os.stat_result | None:
    """The status of a path (a link is not followed); None if it does not exist. A link above it is refused."""
    above, name = os.path.split(path)
    try:
        with Directory.open(above) as parent:
            return parent.status(name)
    except NotFound:
        return None
    except IoFailure as failure:
        if failure.facts.get("errno") == errno.ENOTDIR:
            return None
        raise


def entry_exists(path: str | os.PathLike[str]) -> bool:
    """Whether `path` exists, dangling links included; a link above it is refused."""
    return status_at(path) is not None


def is_directory(path: str | os.PathLike[str]) -> bool:
    """Whether `path` is a directory, not a link to one; a link above it is refused."""
    status = status_at(path)
    return status is not None and stat.S_ISDIR(status.st_mode)


def write_all(fd: int, content: bytes | memoryview) -> None:
    """Write all of `content`, in as many calls as the system needs."""
    written = calls.write(fd, content)
    while written < len(content):
        written += calls.write(fd, memoryview(content)[written:])


def close_quietly(fd: int) -> None:
    """Close a descriptor that has nothing left to write: an error loses nothing."""
    try:  # noqa: SIM105 - called per file of a tree: a context manager would cost more than the call
        calls.close(fd)
    except OSError:
        pass


class Closing:
    """Base class of objects that a `with` block closes."""

    __slots__ = ()

    def close(self) -> None:
        raise NotImplementedError

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def open_directly(path: str) -> int:
    """Open a directory as `Directory.open` does; return its descriptor. Raises `PathEscape` or `OSError`."""
    full = path if path.startswith("/") else f"{os.getcwd()}/{path}".removesuffix("/.")
    if "/.." in full and ".." in full.split("/"):
        raise PathEscape(f"{path} has a '..' in it", path=path)
    try:
        return calls.open_without_links(full)
    except OSError as error:
        if error.errno == errno.ELOOP:
            raise _is_a_link(str(error.filename)) from None
        raise


@contextlib.contextmanager
def parent_of(path: str | os.PathLike[str]) -> Iterator[tuple[int, str]]:
    """Open the directory that holds `path`, as `open_directly` does; yield its descriptor and the last name."""
    above, name = os.path.split(path)
    descriptor = open_directly(above)
    try:
        yield descriptor, name
    finally:
        close_quietly(descriptor)


witness: Callable[[Directory], object] | None = None
"""Called with each directory that is opened, for tests that simulate the death of a process inside a living one."""


class Directory(Closing):
    """One open directory. Lookups go through the descriptor, on Windows through the path."""

    __slots__ = ("_own_status", "fd", "shown")

    def __init__(self, path: str, fd: int | None) -> None:
        self.shown = path
        self.fd = fd
        self._own_status: os.stat_result | None = None
        if witness is not None:
            witness(self)

    @property
    def path(self) -> Path:
        return Path(self.shown)

    def where(self, name: str) -> str:
        return f"{self.shown}/{name}"

    @classmethod
    def open(cls, path: str | os.PathLike[str]) -> Self:
        """Open the directory at a path that has no symbolic link in any of its parts; `PathEscape` at a link.

        For everything in a repository, whose root is resolved once: a link below it could lead anywhere.
        """
        where = os.fspath(path)
        if sys.platform == "win32":
            _refuse_links(where)
            _require_directory(where)
            return cls(where, None)
        try:
            return cls(where, open_directly(where))
        except ValueError:
            raise not_a_path(where) from None
        except FileNotFoundError:
            raise _no_directory(where) from None
        except OSError as error:
            raise io_failure("open the directory", where, error) from error

    @classmethod
    def follow(cls, path: str | os.PathLike[str]) -> Self:
        """Open the directory at a path that the user chose, following links, which the user chose too."""
        return cls.open(resolved(path))

    def beneath(self, relative: str, *, create: bool = False, mode: int | None = None) -> Directory:
        """Open the directory `relative` below this one, refusing every symbolic link in it."""
        here: Directory = self
        for name in split_relative(relative):
            try:
                below = here.enter(name, create=create, mode=mode)
            finally:
                if here is not self:
                    here.close()
            here = below
        return here

    def enter(self, name: str, *, create: bool = False, mode: int | None = None) -> Directory:
        """Open the directory `name` in this one, refusing a symbolic link; `create` makes a missing one."""
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
            _refuse_links(where, depth=1)
            _require_directory(where)
            return Directory(where, None)
        try:
            return Directory(where, calls.open(name, _ENTER, dir_fd=self.fd))
        except ValueError:
            raise not_a_path(where) from None
        except FileNotFoundError:
            raise _no_directory(where) from None
        except OSError as error:
            if error.errno in (errno.ELOOP, errno.ENOTDIR) and self.is_link(name):
                raise _is_a_link(where) from None
            raise io_failure("open the directory", where, error) from error

    def make(self, name: str, *, mode: int | None = None, durable: bool = True) -> bool:
        """Make the directory `name` durably; False if it already exists. Without a `mode`, it grants no more rights
        than this one.

        The process that made an existing directory may have died before its name was durable: a caller that relies on
        it syncs this directory too.
        """
        wanted = self.mode_of_new(0o700 if name in _PRIVATE else 0o777) if mode is None else self._widened(mode)
        adopts = self.adopts()
        try:
            calls.mkdir(self.at(name), wanted, dir_fd=self.fd)
            if adopts:
                with opened(name, _ENTER, dir_fd=self.fd) as made:
                    self.adopt(made, wanted)
        except FileExistsError:
            return False
        except OSError as error:
            raise io_failure("make the directory", self.where(name), error) from error
        if durable:
            try:
                self.sync()
            except OSError as error:
                raise NotDurable("sync the directory", self.shown, error) from error
        return True

    # --- Owner, group and mode of what is made here
    # A directory is *shared* by a group if it is setgid and the group may write to it. Then the group gets the rights
    # of the owner to everything that we make in it, whatever the umask. Elsewhere the umask counts, and nobody gets
    # rights that the directory does not give. Files that root makes belong to the owner of the directory, who would
    # otherwise be unable to change them.

    def mode_of_new(self, mode: int) -> int:
        """The mode of a new file or directory here: `mode`, without rights that this directory does not give."""
        here = self.own_status()
        return mode if here is None else self._widened(mode) & (here.st_mode | stat.S_IRWXU)

    def _widened(self, mode: int) -> int:
        """If a group shares this directory, `mode` with the owner's rights for the group too, and for others no more
        rights than they have here; no umask applies then. Else `mode`."""
        here = self.own_status()
        if here is None or here.st_mode & _SHARED != _SHARED:
            return mode
        return (mode | (mode & stat.S_IRWXU) >> 3) & (here.st_mode | stat.S_IRWXU)

    def is_shared(self) -> bool:
        """Whether a group shares this directory."""
        return is_shared(self.own_status())

    def adopts(self) -> bool:
        """Whether `adopt` has anything to do here."""
        here = self.own_status()
        return here is not None and (here.st_mode & _SHARED == _SHARED or (here.st_uid != 0 and _is_root()))

    def adopt(self, made: int, mode: int) -> None:
        """Give an open file or directory that we have just made here its owner, group and mode. Raises `OSError`."""
        if sys.platform == "win32":
            return
        here, found = self.own_status(), calls.fstat(made)
        if here is None or found.st_uid != os.geteuid():
            return  # replaced meanwhile
        if _is_root() and (here.st_uid, here.st_gid) != (found.st_uid, found.st_gid):
            calls.chown(made, here.st_uid, here.st_gid)
        if here.st_mode & _SHARED == _SHARED:
            calls.chmod(made, mode | (stat.S_ISGID if stat.S_ISDIR(found.st_mode) else 0))

    def create(self, name: str, flags: int, mode: int | None = None) -> int:
        """Create and open a file; for the default mode, see `mode_of_new`. Raises `OSError`."""
        wanted = self.mode_of_new(0o666) if mode is None else mode
        adopts = self.adopts()  # asks for the status, which may fail, before the file exists
        fd = calls.open(self.at(name), flags | os.O_CREAT | os.O_EXCL, wanted, dir_fd=self.fd)
        if adopts:
            try:
                self.adopt(fd, wanted)
            except BaseException:
                close_quietly(fd)
                raise
        return fd

    def open_or_create(self, name: str, flags: int) -> int:
        """Open a file that other processes may create at the same time. Raises `OSError`."""
        for _ in range(_MOST_ATTEMPTS):
            try:
                return calls.open(self.at(name), flags, dir_fd=self.fd)
            except FileNotFoundError:
                with contextlib.suppress(FileExistsError):
                    return self.create(name, flags)
        raise FileExistsError(errno.EEXIST, os.strerror(errno.EEXIST), self.where(name))

    def own_status(self) -> os.stat_result | None:
        """The status of this directory, as first read; None on Windows."""
        if self._own_status is None and self.fd is not None:
            with failing_to("examine", self.shown):
                self._own_status = calls.fstat(self.fd)
        return self._own_status

    def at(self, name: str) -> str:
        """The path to pass to a system call on `name` together with `dir_fd=self.fd`."""
        return name if self.fd is not None else self.where(name)

    def status(self, name: str) -> os.stat_result | None:
        """The status of `name` (a link is not followed), or None if it does not exist."""
        try:
            return calls.stat(self.at(name), dir_fd=self.fd, follow_symlinks=False)
        except ValueError:
            raise not_a_path(self.where(name)) from None
        except FileNotFoundError:
            return None
        except OSError as error:
            raise io_failure("examine", self.where(name), error) from error

    def is_link(self, name: str) -> bool:
        """Whether `name` is a symbolic link, on Windows also a junction."""
        return is_link(self.status(name))

    def is_directory(self, name: str) -> bool:
        """Whether `name` is a directory, not a link to one."""
        status = self.status(name)
        return status is not None and stat.S_ISDIR(status.st_mode)

    def names(self) -> list[str]:
        return [entry.name for entry in self._entries()]

    def directories(self) -> list[str]:
        """The sorted names of the subdirectories, without links to directories."""
        with failing_to("examine the entries of", self.shown):  # on some filesystems, each entry needs a stat
            return sorted(entry.name for entry in self._entries() if entry.is_dir(follow_symlinks=False))

    def sorted_out(self) -> tuple[list[str], dict[str, os.stat_result]]:
        """The names of the subdirectories, and the statuses of all entries that are neither directories nor regular
        files: links, pipes, sockets and devices."""
        directories: list[str] = []
        others: dict[str, os.stat_result] = {}
        with failing_to("examine the entries of", self.shown):
            for entry in self._entries():
                is_junction = sys.platform == "win32" and self.is_link(entry.name)
                if entry.is_dir(follow_symlinks=False) and not is_junction:
                    directories.append(entry.name)
                elif is_junction or not entry.is_file(follow_symlinks=False):
                    status = self.status(entry.name)
                    others |= {} if status is None else {entry.name: status}
        return directories, others

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
        fd = self.fd
        if fd is not None and fd >= 0:
            self.fd = -1  # not None: using a closed directory is an error, not the current directory
            close_quietly(fd)

    def hand_over(self) -> int | None:
        """Give up the descriptor: the caller closes it."""
        fd, self.fd = self.fd, -1
        return fd

    def __del__(self) -> None:
        fd = getattr(self, "fd", None)
        if fd is not None and fd >= 0:
            with contextlib.suppress(OSError):
                os.close(fd)  # not through `calls`: this can run at any time

    def __repr__(self) -> str:
        return f"Directory({self.shown!r})"


def _is_root() -> bool:
    return sys.platform != "win32" and os.geteuid() == 0


def make_directories(path: Path, *, mode: int | None = None) -> None:
    """Make `path` and its missing parents, each name durable before the next is made."""
    missing = list(takewhile(lambda each: not entry_exists(each), (path, *path.parents)))
    for each in reversed(missing):
        with Directory.open(each.parent) as parent:
            parent.make(each.name, mode=mode)


def _is_a_link(path: str) -> PathEscape:
    return PathEscape(f"{path} is a symbolic link; following it could lead out of the repository", path=path)


def _refuse_links(path: str, depth: int | None = None) -> None:
    """Raise `PathEscape` if one of the last `depth` parts of a path (all, if None) is a link or a junction."""
    full = Path(os.path.abspath(path))
    for each in (full, *full.parents)[:depth]:
        with contextlib.suppress(OSError):
            if is_link(calls.stat(each, follow_symlinks=False)):
                raise _is_a_link(str(each))


def is_shared(status: os.stat_result | None) -> bool:
    """Whether this is the status of a directory that a group shares."""
    return status is not None and status.st_mode & _SHARED == _SHARED


def is_link(status: os.stat_result | None) -> bool:
    """Whether this is the status of a symbolic link, on Windows also of a junction."""
    if sys.platform == "win32" and status and status.st_file_attributes & stat.FILE_ATTRIBUTE_REPARSE_POINT:
        return True
    return status is not None and stat.S_ISLNK(status.st_mode)


def _require_directory(path: str) -> None:
    try:
        found = stat.S_ISDIR(calls.stat(path).st_mode)
    except FileNotFoundError:
        found = False
    if not found:
        raise _no_directory(path)


def _no_directory(path: str) -> NotFound:
    return NotFound(f"there is no directory {path}", path=path)


def move(source: Path, target: Path) -> None:
    """Rename `source` to `target` on the same filesystem, unless `target` exists.

    Commit point: the rename. Durable when this returns; `NotDurable` means that the rename took place.
    """
    try:
        although_read_only(lambda: _rename(source, target), {source: target})
    except (FileNotFoundError, NotFound):
        problem = f"it or the directory {target.parent} does not exist"
        raise NotFound(f"cannot move {source}: {problem}", path=str(source)) from None
    except OSError as error:
        if error.errno in (errno.EEXIST, errno.ENOTEMPTY):
            raise AlreadyExists(f"{target} already exists", path=str(target)) from None
        raise io_failure("move to", target, error) from error
    sync_parents(source, target)


def although_read_only(rename: Callable[[], object], going: Mapping[Path, Path]) -> None:
    """Rename directories, making read-only ones writable meanwhile: a rename writes the new parent into them.

    `going` maps each directory to its target. A crash may leave one writable.
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
                _change_mode(source, mode | stat.S_IWUSR)
            rename()
            gone = True
        finally:
            for source, mode in modes.items():
                _change_mode(going[source] if gone else source, mode)


def _read_only_mode(path: Path) -> int | None:
    """The mode of a directory that its owner may not write to; None for anything else."""
    status = status_at(path)
    is_read_only = status is not None and stat.S_ISDIR(status.st_mode) and not status.st_mode & stat.S_IWUSR
    return stat.S_IMODE(status.st_mode) if status is not None and is_read_only else None


def _change_mode(path: Path, mode: int) -> None:
    with Directory.open(path.parent) as parent:
        calls.chmod(parent.at(path.name), mode, dir_fd=parent.fd)


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
        rename(source, target, calls.rename_noreplace)
    except OSError as error:
        if error.errno not in _NOT_OFFERED:
            raise
        if entry_exists(target):
            raise FileExistsError(errno.EEXIST, os.strerror(errno.EEXIST), os.fspath(target)) from None
        rename(source, target)


def rename(source: Path, target: Path, how: Callable[..., None] | None = None) -> None:
    """Rename with one of the three calls, `calls.rename` by default; a link above either path is refused. Not durable.

    Raises the system's own `OSError`, and `NotFound` if a directory above is missing.
    """
    with Directory.open(source.parent) as before, Directory.open(target.parent) as after:
        call = how or calls.rename
        call(before.at(source.name), after.at(target.name), src_dir_fd=before.fd, dst_dir_fd=after.fd)


def resolved(path: str | os.PathLike[str]) -> Path:
    """The absolute path of a root, its links resolved; it need not exist. From here on, no link is followed."""
    with failing_to("resolve", path):
        return Path(calls.realpath(path))


def chosen(path: str | os.PathLike[str]) -> Path:
    """A path that the user chose, links above its last part resolved: `Directory.open` accepts its parent."""
    above, name = os.path.split(os.path.abspath(path))
    return resolved(above) / name
