"""Streams of lines: reading them from any position, and finding out which lines of a commit they have already."""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterator, Sequence
from typing import NamedTuple

from holdfast.errors import UsageFailure
from holdfast.fs import durable
from holdfast.fs.directory import Directory
from holdfast.store.layout import Location

_CHUNK = 1 << 20
USUAL_LENGTH = 300  # bytes


def read(
    opened: Callable[[], Directory | None], location: Location, after: int, await_lines: Callable[[], Sequence[bytes]]
) -> Iterator[tuple[int, bytes]]:
    """The lines after the offset `after`; the position of a line is the offset of its end.

    `await_lines` waits until the lines of all commits until then are in the stream, and returns those that cannot be
    added. What was added while the others were read comes next. So a reader that has seen one record of a commit sees
    all of them. The lines that could not be added come last, with the position of the end: a reader that continues
    there may see them again, but not before something follows.
    """
    directory = opened()
    if after:
        _check_boundary(directory, location, after)
    position = yield from published_lines(directory, location, after)
    left = list(await_lines())
    for end, line in published_lines(directory or opened(), location, position):
        yield end, line
        position = end
        if line in left:
            left.remove(line)
    if position > after or not after:
        yield from ((position, line) for line in left)


class End(NamedTuple):
    """Where the lines of a stream end, and the fingerprint of the bytes before."""

    at: int
    before: str = ""


class Waiting(NamedTuple):
    """The `lines` of a commit that are not in their stream yet. It was searched after the offset `after`. The lines
    that it has are from `first` to `start`, perhaps with others in between. It ends at `end`, or will, once the last
    line of another program has its newline."""

    after: int
    first: int
    start: int
    end: int
    lines: tuple[bytes, ...]


def find_waiting(directory: Directory | None, location: Location, end: End, lines: Sequence[bytes]) -> Waiting:
    """Which lines of a commit the stream does not have. They are written in order, perhaps with those of others in
    between. Each line is recognised by its content.

    `end` is the end of the stream before the commit. If something else precedes it now, a power cut has taken lines
    away that were not synced yet, and others may have been written in their place: all of the stream is searched.
    """
    after = end.at
    if directory is None or (end.before and durable.fingerprint_in(directory, location.file, end.at) != end.before):
        after = 0
    first = start = last = after
    left = list(lines)
    for last, line in published_lines(directory if left else None, location, after):
        if left and line == left[0]:
            first = last - len(line) - 1 if len(left) == len(lines) else first
            start = last
            del left[0]
    if directory and left:
        whole, unended = durable.end_of_lines_in(directory, location.file)
        if unended not in (b"", left[0]):  # another program's record, whose newline is written first
            last = max(last, whole + len(unended) + 1)
    return Waiting(after, first, start, last, tuple(left))


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


def _check_boundary(directory: Directory | None, location: Location, after: int) -> None:
    if directory is not None and after > 0:
        if durable.read_lines_in(directory, location.file, after=after - 1, limit=1) == b"\n":
            return
        last = durable.last_line_in(directory, location.file)
        if last is not None and last[0] == after:
            return  # the last line, which lacks its newline
    raise not_a_position(location, after)


def not_a_position(location: Location, after: int) -> UsageFailure:
    return UsageFailure(f"{after} is not a position of {location.name}", stream=location.name, position=after)
