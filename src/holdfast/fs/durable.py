"""Files that are written whole or not at all, and that are still there after a power cut.

Each function names its commit point. A crash before it leaves the old state, a crash after it the
new one; what may be left over is a draft, under a hidden name that nobody reads. When a function
returns, its effect is on the disk. A sync that fails is never tried again (the kernel may have
dropped the data while calling the pages clean): the draft is discarded and the operation fails.

Functions that end in `_in` work in an open `Directory`; the others open the parent of a path first.
"""

from __future__ import annotations

import contextlib
import errno
import os
import stat
from collections.abc import Iterable
from pathlib import Path
from typing import NamedTuple

from holdfast.errors import (
    AlreadyExists,
    Corrupt,
    FilesystemUnsafe,
    NotDurable,
    NotFound,
    NotWritable,
    PathEscape,
    Refused,
    TooLarge,
)
from holdfast.fs import calls
from holdfast.fs.directory import Directory, close_quietly, io_failure, write_all

_CLOEXEC = getattr(os, "O_CLOEXEC", 0) | getattr(os, "O_BINARY", 0)
_NOFOLLOW = getattr(os, "O_NOFOLLOW", 0)
_NONBLOCK = getattr(os, "O_NONBLOCK", 0)
_NOATIME = getattr(os, "O_NOATIME", 0)
"""Without this, reading changes the file: the time of access, which the next sync has to write as well."""
_NO_LINKS = (errno.EPERM, errno.EOPNOTSUPP, errno.ENOSYS)
_NO_RENAME = (errno.ENOSYS, errno.EINVAL, errno.EOPNOTSUPP)
_GONE = (errno.ENOENT, errno.ESTALE)
_LOOKS = 100
_CHUNK = 1 << 20


class Appended(NamedTuple):
    """What an append did: where the record starts, and the torn bytes that were cut off before it."""

    offset: int
    torn: bytes


def create(path: Path, content: bytes, *, mode: int = 0o666, durable: bool = True) -> None:
    """Make `path` hold `content` if nothing is there; see `create_in`."""
    with Directory.open(path.parent) as directory:
        create_in(directory, path.name, content, mode=mode, durable=durable)


def create_in(
    directory: Directory, name: str, content: bytes, *, mode: int = 0o666, durable: bool = True
) -> None:
    """Make `name` hold `content`, complete from its first moment; raise `AlreadyExists` if it is there.

    Commit point: the link, which never replaces anything. Durable when this returns, unless the
    caller does without (`durable=False`: for locks, which need not outlive a power cut).
    """
    draft = write_draft(directory, name, content, mode=mode, durable=durable)  # 1. all bytes, private name
    publish_new(directory, draft, name)  # 2. commit point
    if durable:
        sync_names(directory, name)  # 3. the new name survives a power cut


def replace(path: Path, content: bytes, *, mode: int = 0o666) -> None:
    """Make `path` hold `content`; see `replace_in`."""
    with Directory.open(path.parent) as directory:
        replace_in(directory, path.name, content, mode=mode)


def replace_in(directory: Directory, name: str, content: bytes, *, mode: int = 0o666) -> None:
    """Make `name` hold `content`; a crash leaves the old content or the new, never a mixture.

    Commit point: the rename. Durable when this returns.
    """
    draft = write_draft(directory, name, content, mode=mode)  # 1. all bytes on disk, private name
    publish(directory, draft, name)  # 2. commit point
    sync_names(directory, name)  # 3. the new name survives a power cut


def append(path: Path, record: bytes, *, mode: int = 0o666) -> Appended:
    """Add one line to the file at `path`; see `append_in`."""
    with Directory.open(path.parent) as directory:
        return append_in(directory, path.name, record, mode=mode)


def append_in(
    directory: Directory, name: str, record: bytes, *, mode: int = 0o666, at: int | None = None
) -> Appended:
    """Add `record` as one line to the file `name`. The caller holds the lock that guards the file.

    A line counts from its newline on: readers leave out what comes after the last one, and a tail
    that a crash has torn is cut off here before anything is added, and returned. Commit point: the
    sync. If writing fails, what it wrote is taken back. With `at`, the lines must end just there. All
    lines of the file are made by this function: it sees to it that a file with a line has a durable name.
    """
    if b"\n" in record:
        raise Refused(f"a record for {directory.where(name)} contains a line break")
    flags = os.O_RDWR | os.O_CREAT | _NOFOLLOW | _CLOEXEC
    fd = _open(directory, name, flags, mode, action="append to")
    try:
        end, torn = _end_of_lines(fd, directory.where(name))  # 1. where the last whole line ends
        if at is not None and end != at:
            raise Corrupt(f"{directory.where(name)} ends at {end}, not at {at}", path=directory.where(name))
        try:
            if end == 0:
                sync_names(directory, name)  # 2. a file that has a line has a name that survives a power cut
            if torn:
                calls.ftruncate(fd, end)  # 3. cut off what a crash has torn
            calls.lseek(fd, end, os.SEEK_SET)
            write_all(fd, record + b"\n")  # 4. the line
            calls.fsync(fd)  # 5. commit point
        except BaseException as error:
            _cut_back(fd, end, directory.where(name))
            if isinstance(error, OSError):
                raise io_failure("append to", directory.where(name), error) from error
            raise
    finally:
        close_quietly(fd)
    return Appended(end, torn)


def read(path: Path, *, limit: int | None = None) -> bytes:
    """The content of the file at `path`; see `read_in`."""
    with Directory.open(path.parent) as directory:
        return read_in(directory, path.name, limit=limit)


def read_in(directory: Directory, name: str, *, limit: int | None = None) -> bytes:
    """The content of the regular file `name`; more than `limit` bytes are refused, not read.

    On some network filesystems an open file is gone when another machine replaces or removes it: then the
    name is looked up again.
    """
    for _ in range(_LOOKS):
        content = _read_found(directory, name, limit)
        if content is not None:
            return content
    raise io_failure("read", directory.where(name), OSError(errno.ESTALE, os.strerror(errno.ESTALE)))


def _read_found(directory: Directory, name: str, limit: int | None) -> bytes | None:
    """The content; None if the file has vanished since it was opened."""
    fd = _open_to_read(directory, name)
    try:
        status = calls.fstat(fd)
        if not stat.S_ISREG(status.st_mode):
            raise Refused(
                f"{directory.where(name)} is not a regular file",
                hint="Name a file: a directory has no content, and reading a device may never end.",
                path=directory.where(name),
            )
        if limit is not None and status.st_size > limit:
            raise TooLarge(directory.where(name), status.st_size, limit)
        return _read_all(fd, limit, directory.where(name), expected=status.st_size)
    except OSError as error:
        if error.errno in _GONE:
            return None
        raise io_failure("read", directory.where(name), error) from error
    finally:
        close_quietly(fd)


def read_lines_in(directory: Directory, name: str, *, after: int = 0, limit: int | None = None) -> bytes:
    """The whole lines of the file `name` behind an offset, at most `limit` bytes; b"" if it is not there."""
    try:
        fd = _open(directory, name, os.O_RDONLY | _NOFOLLOW | _CLOEXEC, 0, action="read")
    except NotFound:
        return b""
    try:
        calls.lseek(fd, after, os.SEEK_SET)
        content = (
            _read_exactly(fd, limit) if limit is not None else _read_all(fd, None, directory.where(name))
        )
    except OSError as error:
        raise io_failure("read", directory.where(name), error) from error
    finally:
        close_quietly(fd)
    return content[: content.rfind(b"\n") + 1]


def end_of_lines_in(directory: Directory, name: str) -> int:
    """The offset at which the whole lines of the file `name` end; 0 if it is not there."""
    try:
        fd = _open(directory, name, os.O_RDONLY | _NOFOLLOW | _CLOEXEC, 0, action="read")
    except NotFound:
        return 0
    try:
        return _end_of_lines(fd, directory.where(name))[0]
    finally:
        close_quietly(fd)


def remove(path: Path) -> bool:
    """Remove the file at `path`; see `remove_in`."""
    with Directory.open(path.parent) as directory:
        return remove_in(directory, path.name)


def remove_in(directory: Directory, name: str, *, durable: bool = True) -> bool:
    """Remove the file `name`; False if it was not there. Commit point: the unlink."""
    try:
        calls.unlink(directory.at(name), dir_fd=directory.fd)
        removed = True
    except FileNotFoundError:
        removed = False  # perhaps by one who died before it was durable
    except OSError as error:
        raise io_failure("remove", directory.where(name), error) from error
    if durable:
        sync_names(directory, name)
    return removed


def new_mark() -> str:
    """What the names of one writer's drafts end in."""
    return os.urandom(6).hex()


def draft_name(name: str, mark: str) -> str:
    """The private name beside `name`: hidden, because nobody is to read it."""
    return f".{name}-{mark}.tmp"


def write_draft(
    directory: Directory,
    name: str,
    content: bytes,
    *,
    mode: int = 0o666,
    durable: bool = True,
    mark: str | None = None,
) -> str:
    """Write `content` under a private name beside `name` and bring it to the disk; return that name.

    Same directory, because a rename cannot cross file systems. Who writes many gives all the same `mark`.
    """
    draft = draft_name(name, mark or new_mark())
    flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | _NOFOLLOW | _CLOEXEC
    fd = _open(directory, draft, flags, mode, action="write")
    try:
        try:
            write_all(fd, content)
            if durable:
                calls.fsync(fd)
        finally:
            calls.close(fd)
    except BaseException as error:
        discard(directory, draft)
        if isinstance(error, OSError):
            raise io_failure("write", directory.where(name), error) from error
        raise
    return draft


def write_drafts(directory: Directory, contents: Iterable[tuple[str, bytes]], mark: str) -> list[str]:
    """Write many drafts, each beside its name, and bring none of them to the disk; return their names.

    If one of them cannot be written none is left. There may be thousands: no detour for each of them.
    """
    drafts: list[str] = []
    fd, at, flags = directory.fd, directory.at, os.O_WRONLY | os.O_CREAT | os.O_EXCL | _NOFOLLOW | _CLOEXEC
    try:
        for name, content in contents:
            draft = draft_name(name, mark)
            file = calls.open(at(draft), flags, 0o666, dir_fd=fd)
            drafts.append(draft)
            try:
                write_all(file, content)
            finally:
                calls.close(file)
    except BaseException as error:
        for draft in drafts:
            discard(directory, draft)
        if isinstance(error, OSError):
            raise io_failure("write", directory.where(name), error) from error
        raise
    return drafts


def discard(directory: Directory, draft: str) -> None:
    """Remove a draft that will not be published; what cannot be removed is left as the litter it is."""
    with contextlib.suppress(OSError):
        calls.unlink(directory.at(draft), dir_fd=directory.fd)


def publish(directory: Directory, draft: str, name: str) -> None:
    """Give the draft its name, in the place of what has it now; a draft that cannot is discarded."""
    try:
        calls.replace(
            directory.at(draft), directory.at(name), src_dir_fd=directory.fd, dst_dir_fd=directory.fd
        )
    except BaseException as error:
        discard(directory, draft)
        if isinstance(error, OSError):
            raise io_failure("replace", directory.where(name), error) from error
        raise


def publish_new(
    directory: Directory, draft: str, name: str, *, keep_if_taken: bool = False, often: bool = False
) -> None:
    """Give the draft its name unless that is taken: by link, or where there are no links by rename.

    A draft that could not be published is discarded; one whose name is taken may be kept for another.
    `often` says that this is done again and again: then by a rename that replaces nothing, where there
    is one. It changes fewer blocks than a link and its undoing, but takes time to load.
    """
    try:
        if often and rename_new(directory, draft, name):
            return
        calls.link(
            directory.at(draft),
            directory.at(name),
            src_dir_fd=directory.fd,
            dst_dir_fd=directory.fd,
            follow_symlinks=False,
        )
    except BaseException as error:
        if isinstance(error, OSError) and error.errno in _NO_LINKS:
            _publish_without_links(directory, draft, name, keep_if_taken=keep_if_taken)
            return
        taken = isinstance(error, FileExistsError)
        if not (taken and keep_if_taken):
            discard(directory, draft)
        if taken:
            raise _taken(directory, name) from None
        if isinstance(error, OSError):
            raise io_failure("create", directory.where(name), error) from error
        raise
    discard(directory, draft)


def rename_new(directory: Directory, draft: str, name: str) -> bool:
    """Give the draft its name by a rename that replaces nothing; False where there is none.

    A name that is taken, or whatever else is wrong, is the system's own error.
    """
    try:
        calls.rename_noreplace(directory.at(draft), directory.at(name), directory=directory.fd)
    except OSError as error:
        if error.errno in _NO_RENAME:
            return False
        raise
    return True


def _publish_without_links(directory: Directory, draft: str, name: str, *, keep_if_taken: bool) -> None:
    try:
        calls.rename_noreplace(directory.at(draft), directory.at(name), directory=directory.fd)
    except BaseException as error:
        taken = isinstance(error, FileExistsError)
        if not (taken and keep_if_taken):
            discard(directory, draft)
        if taken:
            raise _taken(directory, name) from None
        if not isinstance(error, OSError):
            raise
        if error.errno not in _NO_RENAME:
            raise io_failure("create", directory.where(name), error) from error
        raise FilesystemUnsafe(
            f"{directory.path} can neither link nor rename without replacing, so nothing can be created "
            "there without the risk of overwriting somebody's file",
            path=str(directory.path),
        ) from error


def _taken(directory: Directory, name: str) -> AlreadyExists:
    where = directory.where(name)
    return AlreadyExists(f"{where} is there already", path=where)


def sync_names(directory: Directory, name: str = "") -> None:
    """Make what was created, renamed or removed in the directory survive a power cut."""
    try:
        directory.sync()
    except OSError as error:
        raise NotDurable("sync the directory of", directory.where(name), error) from error


def sync_in(directory: Directory, name: str) -> None:
    """Bring the content of the file `name` to the disk, whoever wrote it; nothing if it is not there."""
    try:
        fd = _open(directory, name, os.O_RDWR | _NOFOLLOW | _CLOEXEC, 0, action="sync")
    except NotFound:
        return
    try:
        calls.fsync(fd)
    except OSError as error:
        raise NotDurable("sync", directory.where(name), error) from error
    finally:
        close_quietly(fd)


def _open(directory: Directory, name: str, flags: int, mode: int, *, action: str) -> int:
    try:
        return calls.open(directory.at(name), flags, mode, dir_fd=directory.fd)
    except FileNotFoundError:
        where = directory.where(name)
        raise NotFound(f"there is no file {where}", path=where) from None
    except OSError as error:
        where = directory.where(name)
        if error.errno == errno.ELOOP:
            raise PathEscape(f"{where} is a symbolic link", path=where) from None
        raise io_failure(action, where, error) from error


def _open_to_read(directory: Directory, name: str) -> int:
    flags = os.O_RDONLY | _NOFOLLOW | _CLOEXEC | _NONBLOCK
    try:
        return _open(directory, name, flags | _NOATIME, 0, action="read")
    except NotWritable:  # only who owns a file may read it without a trace
        return _open(directory, name, flags, 0, action="read")


def _read_all(fd: int, limit: int | None, where: str, *, expected: int = 0) -> bytes:
    """Everything up to the end; `expected` bytes are most likely all, and then one call is enough."""
    chunks: list[bytes] = []
    size, wanted = 0, min(expected, _CHUNK) + 1
    while chunk := calls.read(fd, wanted):
        chunks.append(chunk)
        size += len(chunk)
        if limit is not None and size > limit:
            raise TooLarge(where, size, limit)
        if expected and len(chunk) < wanted:
            break  # a regular file gives less than was asked for at its end only
        wanted = _CHUNK
    return b"".join(chunks)


def _cut_back(fd: int, end: int, where: str) -> None:
    """Take back what a failed append may have written; if that fails too, nobody knows what is there.

    Durably: the line must not be back after a power cut, its writer was told that it failed.
    """
    try:
        calls.ftruncate(fd, end)
        calls.fsync(fd)
    except OSError as error:
        raise NotDurable("take back a failed append to", where, error) from error


def _end_of_lines(fd: int, where: str) -> tuple[int, bytes]:
    """Where the last whole line ends, and what comes after it."""
    try:
        return _find_end_of_lines(fd)
    except OSError as error:
        raise io_failure("read", where, error) from error


def _find_end_of_lines(fd: int) -> tuple[int, bytes]:
    start = calls.lseek(fd, 0, os.SEEK_END)
    tail = b""
    while start > 0:
        size = min(4096, start)
        start -= size
        calls.lseek(fd, start, os.SEEK_SET)
        tail = _read_exactly(fd, size) + tail
        cut = tail.rfind(b"\n")
        if cut >= 0:
            return start + cut + 1, tail[cut + 1 :]
    return 0, tail


def _read_exactly(fd: int, size: int) -> bytes:
    content = b""
    while len(content) < size:
        chunk = calls.read(fd, size - len(content))
        if not chunk:
            break
        content += chunk
    return content
