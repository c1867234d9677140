"""Streams of lines: reading them from any position, including lines that are committed but not written yet.

Readers yield the published lines, then those of a pending intent. If none are pending, they check again for new lines:
a commit that was pending when they reached the end may have been published since. So a reader that has seen one record
of a commit sees all of them.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterator, Sequence
from itertools import accumulate, chain, takewhile
from typing import NamedTuple

import msgspec

from holdfast.errors import Corrupt, NotFound, UsageFailure
from holdfast.fs import durable
from holdfast.fs.directory import Directory
from holdfast.store.layout import Location

MOVED = ".holdfast/moved"  # for each stream, the lines that were written elsewhere than announced
_CHUNK = 1 << 20
USUAL_LENGTH = 300  # bytes

Pending = Callable[[], Sequence[tuple[int, bytes]]]


def read(
    directory: Directory | None, location: Location, after: int, pending: Pending, moved: Sequence[Waiting] = ()
) -> Iterator[tuple[int, bytes]]:
    """The lines after the offset `after`; the position of a line is the offset of its end.

    A pending line gets the position that it will have if no other program appends first. If one does, a reader that
    continues after such a position may see the line again, but misses no line.
    """
    position = after
    if after:
        waiting = find_waiting(directory, location, pending())
        shown = [
            seen for each in moved if (seen := each.shown_after(directory, location, after)) and seen[0] < each.end
        ]
        shown += [seen] if (seen := waiting.shown_after(directory, location, after)) else []
        position, count = min(shown, default=(after, 0))
        if count and position == waiting.end:
            yield from waiting.announced(position)[count:]
            return
        if not shown:
            _check_boundary(directory, location, after)
    begun = position
    while True:
        position = yield from published_lines(directory, location, position)
        waiting = find_waiting(directory, location, pending())
        if directory is None or (position == begun and not waiting.lines):
            yield from waiting.announced(position)
            return
        end, unended = durable.end_of_lines_in(directory, location.file)
        if end <= position:
            if end == position and waiting.lines and unended not in (b"", waiting.lines[0]):
                position += len(unended) + 1  # its newline is written before our lines
                yield position, unended
            yield from waiting.announced(position)
            return


class Waiting(NamedTuple):
    """Lines of an intent that are not in their stream yet: their intended offset, and the end of the stream now.

    If another program has appended in between, they go to the new end. Until they are written, readers get them after
    the current end of the stream. So the position that a reader gets for such a line may turn out to lie within a line
    of the other program, or to be the position of a line that the reader has not seen. `moved_lines` records this.
    """

    start: int
    end: int
    lengths: tuple[int, ...]
    lines: tuple[bytes, ...] = ()

    def announced(self, end: int) -> list[tuple[int, bytes]]:
        """The lines with the positions that they have if they are appended at `end`."""
        return [(end + length, line) for length, line in zip(accumulate(self.lengths), self.lines, strict=True)]

    def shown_after(self, directory: Directory | None, location: Location, position: int) -> tuple[int, int] | None:
        """For the position that a reader was given for a pending line: the end of the stream at that time, and how many
        of the lines the reader had by then. None if none of the lines has had this position."""
        if directory is not None and self.start < position <= self.end + sum(self.lengths):
            sums = list(accumulate(self.lengths))
            ends = (end for end, _ in published_lines(directory, location, self.start))
            whole = takewhile(lambda end: end <= self.end, ends)
            for boundary in chain((self.start,), whole, (self.end,)):  # the last line may lack its newline
                if position - boundary in sums:
                    return boundary, sums.index(position - boundary) + 1
        return None


def find_waiting(directory: Directory | None, location: Location, pending: Sequence[tuple[int, bytes]]) -> Waiting:
    """The pending lines that the stream does not have yet. They are written in order, from the planned offset on;
    other programs' lines may be in between. Each line is recognised by its content."""
    start = end = pending[0][0] if pending else 0
    left = [content for _, content in pending]
    for _, line in published_lines(directory if left else None, location, start):
        end += len(line) + 1
        if left and line == left[0]:
            start = end
            del left[0]
    if directory and left:
        whole, unended = durable.end_of_lines_in(directory, location.file)
        if unended not in (b"", left[0]):  # another program's record, whose newline is written first
            end = max(end, whole + len(unended) + 1)
    return Waiting(start, end, tuple(len(line) + 1 for line in left), tuple(left))


def moved_lines(root: Directory, location: Location) -> list[Waiting]:
    """The lines of a stream that were written elsewhere than at `start`, without their content."""
    try:
        with root.beneath(MOVED) as directory:
            content = durable.read_lines_in(directory, moved_name(location))
    except NotFound:
        return []
    try:
        return [msgspec.json.decode(line, type=Waiting) for line in content.splitlines()]
    except (msgspec.MsgspecError, ValueError, RecursionError) as error:
        where = root.where(f"{MOVED}/{moved_name(location)}")
        raise Corrupt(f"{where} cannot be understood: {error}", source=where, problem=str(error)) from None


def moved_name(location: Location) -> str:
    return location.name.replace("/", "-") + ".jsonl"


def published_lines(
    directory: Directory | None, location: Location, position: int
) -> Generator[tuple[int, bytes], None, int]:
    """The published lines from `position` on; return their end."""
    while directory is not None and (block := _whole_lines(directory, location, position)):
        for line in block[:-1].split(b"\n"):
            position += len(line) + 1
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
