"""Directory trees by descriptor: walk, remove and sync them, never following a symbolic link."""

from __future__ import annotations

import contextlib
import errno
import os
import stat
import sys
from itertools import count

from holdfast.errors import IoFailure, NotFound, NotReadable, Refused, format_size
from holdfast.fs import calls
from holdfast.fs.directory import (
    Closing,
    Directory,
    close_quietly,
    failing_to,
    io_failure,
    not_a_path,
    open_directly,
    opened,
    parent_of,
)

TYPE_CHECKING = False  # true for type checkers; importing `typing` costs time

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

NOFOLLOW: int = getattr(os, "O_NOFOLLOW", 0) | getattr(os, "O_CLOEXEC", 0)
GONE = (errno.ENOENT, errno.ENOTDIR, errno.ELOOP, errno.ESTALE)
NO_LINK = (errno.EMLINK, errno.EXDEV, errno.EPERM, errno.EACCES, errno.EOPNOTSUPP, errno.ENOENT)
DIRECTORY: int = os.O_RDONLY | getattr(os, "O_DIRECTORY", 0) | NOFOLLOW
_BLOCK = 512
_LARGEST = 2 << 30  # bytes: the manifest of some ten million files
_CLOSED = -1
_ALL_OPEN = 64  # levels of which every descriptor stays open
_DEEP = 4096
_REMOVED_LEVELS = 256


def joined(path: str, name: str) -> str:
    """The path of `name` in the directory `path` of a tree; "" is the root."""
    return f"{path}/{name}" if path else name


def split(path: str) -> tuple[str, str]:
    directory, _, name = path.rpartition("/")
    return directory, name


def shown(path: str) -> str:
    """A path for messages and JSON: bytes that are not UTF-8 are written as `\\xNN`."""
    return os.fsencode(path).decode("utf-8", "backslashreplace")


def unreadable(path: str, error: OSError) -> IoFailure:
    if isinstance(error, PermissionError):
        return NotReadable("read", shown(path), error)
    return io_failure("read", shown(path), error)


def unwritable(path: str, error: OSError) -> IoFailure:
    return io_failure("write", shown(path), error)


def writing(path: str | os.PathLike[str]) -> contextlib.AbstractContextManager[None]:
    """Turn an `OSError` in the block into the failure to write `path`."""
    return failing_to("write", shown(os.fspath(path)))


def open_directory(path: str) -> int:
    """Open a directory; `PathEscape` if its path has a symbolic link."""
    try:
        return open_directly(path)
    except (FileNotFoundError, NotADirectoryError):
        raise NotFound(f"there is no directory {path}", path=path) from None
    except OSError as error:
        raise unreadable(path, error) from error
    except ValueError:
        raise not_a_path(path) from None


def read_whole(path: str) -> bytes:
    """The content of a regular file that fits into memory. Raises `OSError`, or `PathEscape` at a link in the path."""
    flags = os.O_RDONLY | NOFOLLOW | getattr(os, "O_NONBLOCK", 0)
    with parent_of(path) as (here, name), opened(name, flags, dir_fd=here) as descriptor:
        status = calls.fstat(descriptor)
        if not stat.S_ISREG(status.st_mode):
            raise OSError(errno.EINVAL, "it is not a regular file", path)
        if status.st_size > _LARGEST:
            sizes = f"it has {format_size(status.st_size)}; the limit is {format_size(_LARGEST)}"
            raise OSError(errno.EFBIG, sizes, path)
        parts = []
        while chunk := calls.read(descriptor, max(1 << 16, calls.fstat(descriptor).st_size + 1)):
            parts.append(chunk)
        return parts[0] if len(parts) == 1 else b"".join(parts)


def allocated(status: os.stat_result) -> int:
    """How many bytes a file occupies on disk."""
    if sys.platform == "win32":
        return status.st_size
    return status.st_blocks * _BLOCK


class Walker(Closing):
    """Opens directories below a root; the ancestors of the current one stay open.

    Each step from the top of the filesystem refuses a symbolic link, even if the tree changes meanwhile. On a very deep
    path, only some descriptors are kept, so neither their number nor the length of a path limits the depth.
    """

    _open_root = staticmethod(open_directly)

    def __init__(self, root: str | os.PathLike[str]) -> None:
        self.root = os.fspath(root)
        self._names: list[str] = []
        self._path: str | None = ""
        self._open = [self._open_root(self.root)]

    def enter(self, path: str) -> int:
        """The descriptor of a directory ("" is the root), valid until the next call. Raises `OSError`."""
        if path == self._path:
            return self._open[-1]
        common, rest = self._shared_with(path)
        self._leave(common)
        self._path = None  # until `path` is reached
        level = common
        while self._open[level] == _CLOSED:
            level -= 1
        for depth, name in enumerate([*self._names[level:], *rest], level):
            self._step(depth, name)
        self._path = path
        return self._open[-1]

    def root_status(self) -> os.stat_result:
        try:
            return calls.fstat(self.enter(""))
        except OSError as error:
            raise unreadable(self.root, error) from error

    def _shared_with(self, path: str) -> tuple[int, list[str]]:
        """The number of levels that the current path shares with `path`, and the names that follow.

        Most paths lie below the current directory or beside it; those two cases avoid splitting the path.
        """
        here = self._path or ""
        if here and path.startswith(here) and path[len(here)] == "/":
            return len(self._names), path[len(here) + 1 :].split("/")
        parent = here.rpartition("/")[0]
        if here and path.startswith(parent) and (not parent or path[len(parent) : len(parent) + 1] == "/"):
            rest = path[len(parent) + 1 :] if parent else path
            return len(self._names) - 1, rest.split("/") if rest else []
        names = path.split("/") if path else []
        common = 0
        for mine, theirs in zip(self._names, names, strict=False):
            if mine != theirs:
                break
            common += 1
        return common, names[common:]

    def _step(self, depth: int, name: str) -> None:
        found = calls.open(name, DIRECTORY, dir_fd=self._open[depth])
        if depth + 1 < len(self._open):
            self._open[depth + 1] = found
        else:
            self._open.append(found)
            self._names.append(name)
        if depth >= _ALL_OPEN and depth % (_ALL_OPEN if depth < _DEEP else _DEEP):
            close_quietly(self._open[depth])
            self._open[depth] = _CLOSED

    def _leave(self, level: int) -> None:
        for each in self._open[level + 1 :]:
            if each != _CLOSED:
                close_quietly(each)
        del self._open[level + 1 :], self._names[level:]

    def top(self) -> int:
        """The descriptor of the root, valid until the walker is closed."""
        return self._open[0]

    def where(self, path: str, name: str = "") -> str:
        return "/".join(filter(None, (self.root, path, name)))

    def close(self) -> None:
        self._leave(0)
        self._path = None
        if self._open[0] != _CLOSED:
            close_quietly(self._open[0])
            self._open[0] = _CLOSED


class TreeWalker(Walker):
    """A walker that raises `NotFound` or `IoFailure` if its root cannot be opened."""

    _open_root = staticmethod(open_directory)


def remove_tree(path: Path) -> bool:
    """Remove `path` with everything in it; False if it did not exist.

    Refuses a tree with a mount in it. Makes read-only directories writable first, as far as permitted. An interrupted
    removal is finished by the next one.
    """
    where = os.fspath(path)
    try:
        with parent_of(where) as (here, name):
            _remove(here, name, where)
    except FileNotFoundError:
        return False
    except OSError as error:
        raise io_failure("remove", shown(where), error) from error
    return True


def _remove(here: int, name: str, where: str) -> None:
    if not stat.S_ISDIR(calls.stat(name, dir_fd=here, follow_symlinks=False).st_mode):
        calls.unlink(name, dir_fd=here)
        return
    top = _open_writable(name, here)
    try:
        refuse_mounts(top, where, "removed")
        numbers = count(1)
        while _empty(top, numbers):
            pass  # the directories that were moved up come next
    finally:
        close_quietly(top)
    calls.rmdir(name, dir_fd=here)


def refuse_mounts(top: int, where: str, action: str) -> None:
    from holdfast.fs.mounts import mounts_beneath

    if mounted := mounts_beneath(top):
        message = f"{shown(where)} is not {action}: something is mounted at {shown(min(mounted))} in it"
        raise Refused(message, path=where)


def _empty(top: int, numbers: Iterator[int]) -> bool:
    """Empty an open directory down to a depth limit; return whether deeper directories are left.

    They are moved up to the top, so neither the descriptors nor the stack grow with the depth.
    """
    moved = False
    stack: list[tuple[int, list[str], str]] = [(top, _unlink_files(top), "")]
    try:
        while True:
            here, below, name = stack[-1]
            if below:
                child = below.pop()
                if len(stack) > _REMOVED_LEVELS:
                    _move_up(here, child, top, numbers)
                    moved = True
                    continue
                try:
                    inner = _open_writable(child, here)
                except FileNotFoundError:
                    continue
                stack.append((inner, [], child))
                stack[-1][1].extend(_unlink_files(inner))
                continue
            if len(stack) == 1:
                return moved
            stack.pop()
            close_quietly(here)
            with contextlib.suppress(FileNotFoundError):
                calls.rmdir(name, dir_fd=stack[-1][0])
    finally:
        for descriptor, _, _ in stack[1:]:
            close_quietly(descriptor)


def _move_up(here: int, name: str, top: int, numbers: Iterator[int]) -> None:
    """Move a directory to the top, under a name that is free there."""
    with contextlib.suppress(FileNotFoundError):
        make_movable(here, name)
        for number in numbers:
            try:
                calls.rename(name, f".removed-{number}", src_dir_fd=here, dst_dir_fd=top)
                return
            except OSError as error:
                if error.errno not in (errno.EEXIST, errno.ENOTEMPTY, errno.ENOTDIR):
                    raise


def move_away(here: int, name: str, target: int, new_name: str, where: str) -> None:
    """Move a directory into the open directory `target`; or remove it at once if its tree is a subvolume, out of which
    nothing can be moved."""
    with contextlib.suppress(FileNotFoundError):
        make_movable(here, name)
        try:
            calls.rename(name, new_name, src_dir_fd=here, dst_dir_fd=target)
        except OSError as error:
            if error.errno != errno.EXDEV:
                raise
            _remove(here, name, where)


def _unlink_files(here: int) -> list[str]:
    """Remove everything except directories; return the names of the directories."""
    unlink = calls.unlink
    with calls.scandir(here) as entries:
        names = [(entry.name, entry.is_dir(follow_symlinks=False)) for entry in entries]
    for name, is_directory in names:
        if not is_directory:
            try:
                unlink(name, dir_fd=here)
            except FileNotFoundError:
                continue
    return [name for name, is_directory in names if is_directory]


def _open_writable(name: str, here: int) -> int:
    try:
        descriptor = calls.open(name, DIRECTORY, dir_fd=here)
    except PermissionError:
        status = calls.stat(name, dir_fd=here, follow_symlinks=False)
        if stat.S_ISDIR(status.st_mode):
            calls.chmod(name, stat.S_IMODE(status.st_mode) | stat.S_IRWXU, dir_fd=here)
        descriptor = calls.open(name, DIRECTORY, dir_fd=here)
    try:
        make_writable(descriptor)
    except BaseException:
        close_quietly(descriptor)
        raise
    return descriptor


def make_writable(here: int) -> None:
    """Give the owner of an open directory all permissions, if this process may."""
    mode = calls.fstat(here).st_mode
    if mode & stat.S_IRWXU != stat.S_IRWXU:
        with contextlib.suppress(PermissionError):  # not ours, but removing may still be allowed
            calls.chmod(here, stat.S_IMODE(mode) | stat.S_IRWXU)


def make_movable(here: int, name: str) -> None:
    """Make a directory writable: moving it to another parent writes to its `..`."""
    status = calls.stat(name, dir_fd=here, follow_symlinks=False)
    if stat.S_ISDIR(status.st_mode) and not status.st_mode & stat.S_IWUSR:
        calls.chmod(name, stat.S_IMODE(status.st_mode) | stat.S_IRWXU, dir_fd=here)


@contextlib.contextmanager
def synced(directory: Path) -> Iterator[None]:
    """Sync everything that the block writes to the filesystem of `directory`, with one syncfs.

    The descriptor is opened before the block: the system reports a disk error to every descriptor that was open at the
    time, but to later ones only if it has not been reported yet.
    """
    with Directory.open(directory) as opened:
        yield
        sync_filesystem(opened, directory)


def sync_tree(tree: Path) -> None:
    with synced(tree):
        pass


def sync_filesystem(directory: Directory, where: Path) -> None:
    if directory.fd is not None:
        with failing_to("sync", where):
            calls.sync_filesystem(directory.fd)
