"""Files that are written whole or not at all, and that survive a power cut.

Each function names its commit point. A crash before it leaves the old state, a crash after it the new one; a
leftover draft has a hidden name that no reader opens. When a function returns, its effect is on the disk. A sync that
fails is never repeated (the kernel may have dropped the data and called the pages clean): the draft is discarded and
the operation fails.

Functions that end in `_in` work in an open `Directory`; the others open the parent of a path first.
"""

from __future__ import annotations

import contextlib
import errno
import os
import stat
import zlib
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import NamedTuple, TypeVar

from holdfast.errors import (
    AlreadyExists,
    Corrupt,
    FilesystemUnsafe,
    JsonInvalid,
    NotDurable,
    NotFound,
    NotWritable,
    PathEscape,
    Refused,
    TooLarge,
    format_size,
)
from holdfast.fs import calls
from holdfast.fs.directory import Directory, close_quietly, failing_to, io_failure, not_a_path, write_all

_CLOEXEC = getattr(os, "O_CLOEXEC", 0) | getattr(os, "O_BINARY", 0)
_NOFOLLOW = getattr(os, "O_NOFOLLOW", 0)
_NONBLOCK = getattr(os, "O_NONBLOCK", 0)
_NOATIME = getattr(os, "O_NOATIME", 0)
"""Without it, reading changes the access time, which the next sync then has to write."""
_NO_LINKS = (errno.EPERM, errno.EOPNOTSUPP, errno.ENOSYS)
_NO_RENAME = (errno.ENOSYS, errno.EINVAL, errno.EOPNOTSUPP)
_GONE = (errno.ENOENT, errno.ESTALE, errno.EBADF)
"""Errors from reading an open file that another machine has replaced: NFS and JuiceFS report different ones."""
_MOST_LOOKUPS = 100
_CHUNK = 1 << 20
_COMPARED = 4096  # bytes of a fingerprint
LARGEST = 257 << 20
"""The most bytes that are read as a whole: enough for an index of some millions of issues."""
LONGEST_LINE = 16 << 20
"""The most bytes in one line of a log; the log itself may have any size."""

T = TypeVar("T")


class Appended(NamedTuple):
    """Where an appended record starts, and the torn bytes that were cut off before it."""

    offset: int
    torn: bytes


def create(path: Path, content: bytes, *, mode: int | None = None, durable: bool = True) -> None:
    with Directory.open(path.parent) as directory:
        create_in(directory, path.name, content, mode=mode, durable=durable)


def create_in(
    directory: Directory, name: str, content: bytes, *, mode: int | None = None, durable: bool = True
) -> None:
    """Create `name` with all of `content`; raise `AlreadyExists` if it exists.

    Commit point: the link, which never replaces anything. Durable when this returns, except with
    `durable=False`: for locks, which need not survive a power cut.
    """
    draft = write_draft(directory, name, content, mode=mode, durable=durable)  # 1. all bytes, private name
    publish_new(directory, draft, name)  # 2. commit point
    if durable:
        sync_names(directory, name)  # 3. the new name survives a power cut


def replace(path: Path, content: bytes, *, mode: int | None = None) -> None:
    with Directory.open(path.parent) as directory:
        replace_in(directory, path.name, content, mode=mode)


def replace_in(directory: Directory, name: str, content: bytes, *, mode: int | None = None) -> None:
    """Make `name` hold `content`; a crash leaves the old content or the new, never a mixture. Without a `mode`, the
    file keeps its mode and owner (see `write_draft`).

    Commit point: the rename. Durable when this returns.
    """
    draft = write_draft(directory, name, content, mode=mode)  # 1. all bytes on disk, private name
    publish(directory, draft, name)  # 2. commit point
    sync_names(directory, name)  # 3. the new name survives a power cut


def append_in(
    directory: Directory,
    name: str,
    *records: bytes,
    at: int | None = None,
    unlock: Callable[[], object] | None = None,
) -> Appended:
    """Add each record as one line to the file `name`, whose lock the caller holds.

    A line exists once it has its newline: readers ignore the bytes after the last one, and an append cuts off and
    returns a tail that a crash has torn. A tail that is a whole record is kept: another program ended its file there,
    and only its newline is missing. Commit point: the sync. A failed write is undone. With `at`, the lines must
    end exactly there. A file with a line has a durable name, because only this function makes lines.

    `unlock` is called between writing and syncing, so that others append meanwhile. From then on, a failure is not
    undone: the caller must be able to write the lines again.
    """
    if any(b"\n" in each for each in records):
        raise Refused(f"cannot append to {directory.where(name)}: the record contains a line break")
    flags = os.O_RDWR | os.O_CREAT | _NOFOLLOW | _CLOEXEC
    fd = _open(directory, name, flags, action="append to")
    try:
        with failing_to("read", directory.where(name)):
            _require_regular(fd, directory.where(name))
            end, torn = _end_of_lines(fd, directory.where(name))  # 1. where the last whole line ends
        lines, offset = b"".join(each + b"\n" for each in records), end
        if torn != records[0] and is_record(torn):
            end, torn, lines, offset = end + len(torn), b"", b"\n" + lines, end + len(torn) + 1
        if at is not None and offset != at:
            raise Corrupt(f"{directory.where(name)} ends at {offset}, not at {at}", path=directory.where(name))
        may_undo = True
        try:
            if end == 0:
                sync_names(directory, name)  # 2. the name survives a power cut
            if torn:
                calls.ftruncate(fd, end)  # 3. cut off a torn tail
            calls.lseek(fd, end, os.SEEK_SET)
            write_all(fd, lines)  # 4. the lines
            if unlock is not None:
                may_undo = False
                unlock()
            calls.fsync(fd)  # 5. commit point
        except BaseException as error:
            if may_undo:
                _cut_back(fd, end, directory.where(name))
            if isinstance(error, OSError):
                raise io_failure("append to", directory.where(name), error) from error
            raise
    finally:
        close_quietly(fd)
    return Appended(offset, torn)


def read(path: Path, *, limit: int = LARGEST) -> bytes:
    with Directory.open(path.parent) as directory:
        return read_in(directory, path.name, limit=limit)


def read_in(directory: Directory, name: str, *, limit: int = LARGEST) -> bytes:
    """The content of the regular file `name`; `TooLarge` if it has more than `limit` bytes.

    On some network filesystems an open file vanishes when another machine replaces it; its name is looked up again.
    """

    def whole(fd: int, size: int) -> bytes:
        if size > limit:
            raise TooLarge(directory.where(name), size, limit)
        return _read_all(fd, limit, directory.where(name), expected=size)

    try:
        return _read_found(directory, name, whole, flags=_NOATIME)
    except NotWritable:  # O_NOATIME is for the owner only
        return _read_found(directory, name, whole)


def _read_found(directory: Directory, name: str, read_open: Callable[[int, int], T], *, flags: int = 0) -> T:
    """Call `read_open` with the descriptor and size of the regular file `name`, and return its result. If the file
    vanishes, look it up again. Anything else, such as a pipe, is refused without waiting for it."""
    for _ in range(_MOST_LOOKUPS):
        fd = _open(directory, name, os.O_RDONLY | _NOFOLLOW | _CLOEXEC | _NONBLOCK | flags, action="read")
        try:
            return read_open(fd, _require_regular(fd, directory.where(name)))
        except OSError as error:
            if error.errno not in _GONE:
                raise io_failure("read", directory.where(name), error) from error
        finally:
            close_quietly(fd)
    raise io_failure("read", directory.where(name), OSError(errno.ESTALE, os.strerror(errno.ESTALE)))


def read_lines_in(directory: Directory, name: str, *, after: int = 0, limit: int = LONGEST_LINE) -> bytes:
    """The complete lines of the file `name` after an offset, at most `limit` bytes; b"" if there is none."""

    def rest(fd: int, size: int) -> bytes:
        wanted = min(limit, max(0, size - after))
        if wanted > LARGEST:
            raise TooLarge(directory.where(name), wanted, LARGEST)
        calls.lseek(fd, after, os.SEEK_SET)
        return _read_exactly(fd, wanted)

    try:
        content = _read_found(directory, name, rest)
    except NotFound:
        return b""
    return content[: content.rfind(b"\n") + 1]


def end_of_lines_in(directory: Directory, name: str) -> tuple[int, bytes]:
    """The offset at which the complete lines of the file `name` end, 0 if there is none; and the record after it that
    lacks only its newline, usually b""."""
    try:
        end, tail = _read_found(directory, name, lambda fd, size: _end_of_lines(fd, directory.where(name)))
    except NotFound:
        return 0, b""
    return end, tail if is_record(tail) else b""


def fingerprint_in(directory: Directory, name: str, at: int) -> str:
    """A fingerprint of the bytes before an offset of the file `name`, at which a line ends."""
    start = max(0, at - _COMPARED)
    return f"{zlib.crc32(read_lines_in(directory, name, after=start, limit=at - start)):08x}"


def last_line_in(directory: Directory, name: str) -> tuple[int, bytes] | None:
    """The last line and its position; None if there is none. A record whose newline is missing counts: the next append
    adds the newline."""
    end, unended = end_of_lines_in(directory, name)
    if unended:
        return end + len(unended) + 1, unended
    size = 4096
    while end:
        if size > LONGEST_LINE:
            raise line_too_long(directory.where(name))
        start = max(0, end - size)
        block = read_lines_in(directory, name, after=start, limit=end - start)[:-1]
        cut = block.rfind(b"\n")
        if cut >= 0 or start == 0:
            return end, block[cut + 1 :]
        size *= 4
    return None


def remove(path: Path) -> bool:
    with Directory.open(path.parent) as directory:
        return remove_in(directory, path.name)


def remove_in(directory: Directory, name: str, *, durable: bool = True) -> bool:
    """Remove the file `name`; False if there was none. Commit point: the unlink."""
    try:
        calls.unlink(directory.at(name), dir_fd=directory.fd)
        removed = True
    except FileNotFoundError:
        removed = False  # perhaps by a process that died before this was durable
    except OSError as error:
        raise io_failure("remove", directory.where(name), error) from error
    if durable:
        sync_names(directory, name)
    return removed


def new_mark() -> str:
    """A suffix for the drafts of one writer."""
    return os.urandom(6).hex()


def draft_name(name: str, mark: str) -> str:
    """The private name of a draft of `name`; hidden from readers."""
    return f".{name}-{mark}.tmp"


def write_draft(
    directory: Directory,
    name: str,
    content: bytes,
    *,
    mode: int | None = None,
    durable: bool = True,
    mark: str | None = None,
    like: Directory | None = None,
) -> str:
    """Write and sync `content` under a private name beside `name`, and return that name.

    It is in the same directory, because a rename cannot cross filesystems. All drafts of one writer share a `mark`.
    Without a `mode`, the draft of an existing file gets that file's mode and, as far as the system allows, its owner
    and group; in a directory that a group shares, it gets the mode of a new file. It gets those of a new file of the
    directory `like`, where it will be published, if that is another one.
    """
    draft = draft_name(name, mark or new_mark())
    mode = mode if like is None else like.mode_of_new(0o666)
    replaced = directory.status(name) if mode is None else None
    if replaced is not None and not directory.is_shared():
        mode = replaced.st_mode & 0o777  # from the start: others must not read what they could not read before
    flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | _NOFOLLOW | _CLOEXEC
    fd = _open(directory, draft, flags, mode, action="write")
    try:
        try:
            if replaced is not None and not directory.is_shared():
                _keep_owner_and_mode(fd, replaced)
            if like is not None and mode is not None and like.adopts():
                like.adopt(fd, mode)
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
    """Write many drafts without syncing them, and return their names; on failure, remove them all.

    There may be thousands, so each costs only its system calls.
    """
    drafts: list[str] = []
    create, flags = directory.create, os.O_WRONLY | _NOFOLLOW | _CLOEXEC
    try:
        for name, content in contents:
            draft = draft_name(name, mark)
            file = create(draft, flags)
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
    """Remove a draft that will not be published, if possible."""
    with contextlib.suppress(OSError):
        calls.unlink(directory.at(draft), dir_fd=directory.fd)


def publish(directory: Directory, draft: str, name: str) -> None:
    """Rename the draft to `name`, replacing an existing file; discard the draft on failure."""
    try:
        calls.replace(directory.at(draft), directory.at(name), src_dir_fd=directory.fd, dst_dir_fd=directory.fd)
    except BaseException as error:
        discard(directory, draft)
        if isinstance(error, OSError):
            raise io_failure("replace", directory.where(name), error) from error
        raise


def publish_new(
    directory: Directory,
    draft: str,
    name: str,
    *,
    drafts: Directory | None = None,
    keep_if_taken: bool = False,
    often: bool = False,
) -> None:
    """Publish the draft as `name` unless that exists, with a link or, where links are not supported, a rename.

    The draft is in the same directory or in `drafts`. One that cannot be published is discarded; `keep_if_taken` keeps
    it if the name is taken. Callers that publish `often` use the rename first: it changes fewer blocks than a link and
    an unlink, but takes time to load.
    """
    source = drafts or directory
    try:
        if not (often and rename_new(directory, draft, name, source)):
            _link_or_rename(directory, draft, name, source)
    except FileExistsError:
        if not keep_if_taken:
            discard(source, draft)
        where = directory.where(name)
        raise AlreadyExists(f"{where} already exists", path=where) from None
    except BaseException as error:
        discard(source, draft)
        if isinstance(error, OSError):
            raise io_failure("create", directory.where(name), error) from error
        raise


def _link_or_rename(directory: Directory, draft: str, name: str, source: Directory) -> None:
    before, after = source.at(draft), directory.at(name)
    try:
        calls.link(before, after, src_dir_fd=source.fd, dst_dir_fd=directory.fd, follow_symlinks=False)
    except OSError as error:
        if error.errno not in _NO_LINKS:
            raise
        if not rename_new(directory, draft, name, source):
            raise FilesystemUnsafe(
                f"cannot create {directory.where(name)}: the filesystem can neither link nor rename "
                "without replacing, so this could overwrite another file",
                path=str(directory.path),
            ) from error
    else:
        discard(source, draft)


def rename_new(directory: Directory, draft: str, name: str, source: Directory | None = None) -> bool:
    """Rename the draft, which is in `source` or in the same directory, without replacing anything; False if the system
    cannot. Raises `OSError`."""
    source = source or directory
    try:
        calls.rename_noreplace(source.at(draft), directory.at(name), src_dir_fd=source.fd, dst_dir_fd=directory.fd)
    except OSError as error:
        if error.errno in _NO_RENAME:
            return False
        raise
    return True


def sync_names(directory: Directory, name: str = "") -> None:
    """Make creations, renames and removals in the directory survive a power cut."""
    try:
        directory.sync()
    except OSError as error:
        raise NotDurable("sync the directory of", directory.where(name), error) from error


def sync_in(directory: Directory, name: str) -> None:
    """Sync the file `name`, whoever wrote it, if it exists."""
    try:
        fd = _open(directory, name, os.O_RDWR | _NOFOLLOW | _CLOEXEC, action="sync")
    except NotFound:
        return
    try:
        calls.fsync(fd)
    except OSError as error:
        raise NotDurable("sync", directory.where(name), error) from error
    finally:
        close_quietly(fd)


def _open(directory: Directory, name: str, flags: int, mode: int | None = None, *, action: str) -> int:
    try:
        if not flags & os.O_CREAT:
            return calls.open(directory.at(name), flags, dir_fd=directory.fd)
        if flags & os.O_EXCL:
            try:
                return directory.create(name, flags, mode)
            except FileExistsError:
                raise
            except BaseException:
                discard(directory, name)  # a draft, which nobody else opens
                raise
        return directory.open_or_create(name, flags & ~os.O_CREAT)
    except OSError as error:
        where = directory.where(name)
        if error.errno == errno.ENOENT:
            raise NotFound(f"the file {where} does not exist", path=where) from None
        if error.errno == errno.ELOOP:
            raise PathEscape(f"cannot {action} {where}: it is a symbolic link", path=where) from None
        raise io_failure(action, where, error) from error
    except ValueError:
        raise not_a_path(directory.where(name)) from None


def _require_regular(fd: int, where: str) -> int:
    """The size of an open regular file; `Refused` for anything else."""
    status = calls.fstat(fd)
    if not stat.S_ISREG(status.st_mode):
        hint = "Name a regular file, not a directory, pipe or device."
        raise Refused(f"cannot read {where}: it is not a regular file", hint=hint, path=where)
    return status.st_size


def line_too_long(where: str) -> Corrupt:
    """The failure for a log with a line that is longer than any record."""
    return Corrupt(f"{where} has a line of more than {format_size(LONGEST_LINE)}", path=where)


def _read_all(fd: int, limit: int, where: str, *, expected: int = 0) -> bytes:
    """Read to the end, in one call if the `expected` size is right."""
    chunks: list[bytes] = []
    size, most = 0, expected + 1
    while chunk := calls.read(fd, most):
        chunks.append(chunk)
        size += len(chunk)
        if size > limit:
            raise TooLarge(where, size, limit)
        if expected and len(chunk) < most:
            break  # a regular file returns less only at its end
        most = _CHUNK
    return b"".join(chunks)


def _keep_owner_and_mode(fd: int, status: os.stat_result) -> None:
    """Give a draft the owner, group and mode of the file that it will replace. Only root can give files away."""
    draft = calls.fstat(fd)
    if (draft.st_uid, draft.st_gid) != (status.st_uid, status.st_gid):
        for owner in (status.st_uid, -1):
            with contextlib.suppress(OSError):
                calls.chown(fd, owner, status.st_gid)
                break
    if (draft.st_mode ^ status.st_mode) & 0o777:  # the umask applied to the draft
        calls.chmod(fd, status.st_mode & 0o777)


def is_record(tail: bytes) -> bool:
    """Whether the bytes, such as those after the last newline, are a whole JSON object."""
    if not tail.startswith(b"{"):
        return False  # the usual case
    from holdfast.fs import strictjson

    try:
        strictjson.decode(tail, limit=len(tail))
    except JsonInvalid:
        return False
    return True


def _cut_back(fd: int, end: int, where: str) -> None:
    """Durably undo a failed append, whose writer learns of the failure."""
    try:
        calls.ftruncate(fd, end)
        calls.fsync(fd)
    except OSError as error:
        raise NotDurable("undo a failed append to", where, error) from error


def _end_of_lines(fd: int, where: str) -> tuple[int, bytes]:
    """The offset at which the last complete line ends, and the torn bytes after it."""
    end = start = calls.lseek(fd, 0, os.SEEK_END)
    tail: list[bytes] = []
    while start > 0:
        size = min(4096 << min(8, len(tail)), start)
        start -= size
        calls.lseek(fd, start, os.SEEK_SET)
        block = _read_exactly(fd, size)
        cut = block.rfind(b"\n") + 1
        tail.insert(0, block[cut:])
        if cut:
            return start + cut, b"".join(tail)
        if end - start > LONGEST_LINE:
            raise line_too_long(where)
    return 0, b"".join(tail)


def _read_exactly(fd: int, size: int) -> bytes:
    content = b""
    while len(content) < size and (chunk := calls.read(fd, size - len(content))):
        content += chunk
    return content
