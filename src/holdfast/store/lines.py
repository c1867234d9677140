"""Streams of lines: reading them from any position, and writing lines of a commit that they do not have yet."""

from __future__ import annotations

import os
from collections.abc import Callable, Generator, Iterator, Sequence
from typing import NamedTuple

from holdfast.errors import NotDurable, UsageFailure
from holdfast.fs import calls, durable
from holdfast.fs.directory import Directory
from holdfast.store.layout import Location

_CHUNK = 1 << 20
_BACK = 1 << 20  # bytes before the noted end that are searched, too
_MOST_LOOKS = 20
USUAL_LENGTH = 300  # bytes


def read(
    opened: Callable[[], Directory | None],
    location: Location,
    after: int,
    await_lines: Callable[[], Sequence[tuple[int, bytes]]],
) -> Iterator[tuple[int, bytes]]:
    """The lines after the offset `after`; the position of a line is the offset of its end.

    `await_lines` waits until the lines of all commits until then are in the stream, and returns those that cannot be
    added. Then the stream is read on until nothing new follows. So a reader that has seen one record of a commit sees
    all of them (unless others write faster than it reads). The lines that cannot be added come last. If their position
    is not certain (0), they get that of the end: a reader that continues there sees them again with each line that
    follows.
    """
    directory = opened()
    if after and not _is_boundary(directory, location, after):
        announced = [at for at, _ in await_lines()]
        if after not in announced and not _is_boundary(directory, location, after):
            raise not_a_position(location, after)
    position = yield from published_lines(directory, location, after)
    for _ in range(_MOST_LOOKS):
        left, begun, directory = await_lines(), position, directory or opened()
        position = yield from published_lines(directory, location, position)
        if position == begun:
            break
    for at, line in left:
        if at > position or (not at and (position > after or not after)):
            yield at or position, line


class End(NamedTuple):
    """Where the lines of a stream end, and the fingerprint of the bytes before."""

    at: int
    before: str = ""


def search_from(directory: Directory, location: Location, end: End) -> int:
    """Where to begin the search for the lines of a commit before which the stream ended at `end`.

    If the author did not hold the lock of the stream, a power cut may have taken lines away that were not synced yet,
    and others may have been written in their place. So the search begins well before; and if something else precedes
    the end now, at the beginning.
    """
    if not end.before:
        return end.at
    if durable.fingerprint_in(directory, location.file, end.at) != end.before:
        return 0
    return line_before(directory, location, end.at, _BACK)


class Waiting(NamedTuple):
    """The `lines` of a commit that are not in their stream yet. Those that it has are from `first` to `start`, perhaps
    with others in between."""

    first: int
    start: int
    lines: tuple[bytes, ...]


def find_waiting(directory: Directory, location: Location, after: int, lines: Sequence[bytes]) -> Waiting:
    """Which lines of a commit the stream does not have after an offset. Each is recognised by its content."""
    first = start = after
    left = list(lines)
    for end, line in published_lines(directory, location, after):
        if line in left:
            first = end - len(line) - 1 if len(left) == len(lines) else first
            start = end
            left.remove(line)
            if not left:
                break
    return Waiting(first, start, tuple(left))


def write_missing(
    directory: Directory,
    location: Location,
    after: int,
    lines: Sequence[bytes],
    *,
    unlock: Callable[[], object] | None = None,
) -> None:
    """Append the lines that the stream does not have after an offset, durably, as `append_in` does. The caller holds
    its lock. Those that it has may have been written by a process that was killed before it could sync them."""
    first, start, missing = find_waiting(directory, location, after, lines)
    if start > first:
        written = durable.read_lines_in(directory, location.file, after=first, limit=start - first)
        _overwrite(directory, location, first, written)
    if missing:
        at, torn = _torn(directory, location, start, missing[0])
        if torn:
            _overwrite(directory, location, at, b" " * torn)
        durable.append_in(directory, location.file, *missing, unlock=unlock)


def _torn(directory: Directory, location: Location, after: int, line: bytes) -> tuple[int, int]:
    """Where, and how many bytes of a line, a killed process left before another program's line. Once they are blanks,
    that line can be parsed again."""
    for end, found in published_lines(directory, location, after):
        starts = (at for at in range(1, len(found)) if found[at : at + 1] == b"{" and line.startswith(found[:at]))
        if found[:1] == line[:1] and (torn := next((at for at in starts if durable.is_record(found[at:])), 0)):
            return end - len(found) - 1, torn
    return 0, 0


def _overwrite(directory: Directory, location: Location, at: int, content: bytes) -> None:
    """Write to the middle of a stream and sync it. The write may change nothing, but it makes the sync write the bytes
    again and report a failure."""
    flags = os.O_RDWR | sum(getattr(os, name, 0) for name in ("O_CLOEXEC", "O_NOFOLLOW", "O_NONBLOCK", "O_BINARY"))
    try:
        fd = calls.open(directory.at(location.file), flags, dir_fd=directory.fd)
        try:
            calls.lseek(fd, at, os.SEEK_SET)
            calls.write(fd, content)
            calls.fsync(fd)
        finally:
            calls.close(fd)
    except OSError as error:
        raise NotDurable("sync", directory.where(location.file), error) from error


def published_lines(
    directory: Directory | None, location: Location, position: int
) -> Generator[tuple[int, bytes], None, int]:
    """The published lines from `position` on; return their end. Empty lines, which other programs may leave, are
    skipped."""
    while directory is not None and (block := _whole_lines(directory, location, position)):
        for line in block[:-1].split(b"\n"):
            position += len(line) + 1
            if line:
                yield position, line
    return position


def _whole_lines(directory: Directory, location: Location, after: int) -> bytes:
    limit = _CHUNK
    while True:
        block = durable.read_lines_in(directory, location.file, after=after, limit=limit)
        if block:
            # A writer may just have replaced a torn tail with a whole line, and the block may mix the two. Complete
            # lines never change: read them again.
            return durable.read_lines_in(directory, location.file, after=after, limit=len(block))
        if durable.end_of_lines_in(directory, location.file)[0] <= after:
            return b""
        if limit >= durable.LONGEST_LINE:
            raise durable.line_too_long(directory.where(location.file))
        limit *= 2  # a line longer than the chunk


def line_before(directory: Directory, location: Location, end: int | None, size: int) -> int:
    """The first offset of a line in the `size` bytes before `end`, or before the end of the last line; 0 if these are
    all."""
    end = durable.end_of_lines_in(directory, location.file)[0] if end is None else end
    while size < end:
        start = end - size
        cut = durable.read_lines_in(directory, location.file, after=start, limit=size).find(b"\n") + 1
        if 0 < cut < size:
            return start + cut
        size *= 2  # a line longer than that
    return 0


def _is_boundary(directory: Directory | None, location: Location, after: int) -> bool:
    if directory is None or after < 0:
        return False
    if durable.read_lines_in(directory, location.file, after=after - 1, limit=1) == b"\n":
        return True
    last = durable.last_line_in(directory, location.file)
    return last is not None and last[0] == after  # the last line, which lacks its newline


def not_a_position(location: Location, after: int) -> UsageFailure:
    return UsageFailure(f"{after} is not a position of {location.name}", stream=location.name, position=after)
