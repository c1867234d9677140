"""Reading streams from files: lines of one file, or one numbered file per record.

Both take the records that are decided but not yet in place (`decided`: position and content), and
give them at the end, so that a reader sees a commit whole.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from holdfast.errors import UsageFailure
from holdfast.fs import durable
from holdfast.fs.directory import Directory
from holdfast.store.intents import read_if_there
from holdfast.store.layout import Kind, Place

_CHUNK = 1 << 20

Decided = Sequence[tuple[int, bytes]]


def lines(
    directory: Directory | None, place: Place, after: int, decided: Decided
) -> Iterator[tuple[int, bytes]]:
    """The lines behind the offset `after`; the position of a line is the offset at which it ends."""
    position = after
    if after not in (0, *(at + len(content) + 1 for at, content in decided)):
        _check_boundary(directory, place, after)
    if directory is not None:
        while block := _whole_lines(directory, place, position):
            for line in block[:-1].split(b"\n"):
                position += len(line) + 1
                yield position, line
    for at, content in decided:
        if at >= position:
            position = at + len(content) + 1
            yield position, content


def numbered_files(
    directory: Directory | None, place: Place, after: int, decided: Decided
) -> Iterator[tuple[int, bytes]]:
    """The records with numbers behind `after`, up to the first that is missing."""
    if after < 0:
        raise _not_a_position(place, after)
    number = after + 1
    if directory is not None:
        while (content := read_if_there(directory, place.numbered(number))) is not None:
            yield number, content
            number += 1
    for at, content in decided:
        if at >= number:
            yield at, content


def last_line(directory: Directory, place: Place) -> tuple[int, bytes] | None:
    """The last line and its position; None if there is none."""
    end = durable.end_of_lines_in(directory, place.file)
    size = 4096
    while end:
        start = max(0, end - size)
        block = durable.read_lines_in(directory, place.file, after=start, limit=end - start)[:-1]
        cut = block.rfind(b"\n")
        if cut >= 0 or start == 0:
            return end, block[cut + 1 :]
        size *= 4
    return None


class LastNumbers:
    """Finds the last number of a stream without listing it: from what is remembered, forward by leaps."""

    def __init__(self) -> None:
        self._last: dict[str, int] = {}
        self._durable: dict[str, int] = {}

    def remember_durable(self, place: Place, number: int) -> None:
        """Note a number whose name, like all names before it, we have brought to the disk ourselves."""
        self._last[place.name] = self._durable[place.name] = number

    def is_durable(self, place: Place) -> bool:
        """Whether the last number, as it was found last, is durable by our own doing."""
        return place.kind is Kind.NUMBERED and self._last.get(place.name, 0) == self._durable.get(place.name)

    def find(self, directory: Directory, place: Place) -> int:
        """The last number, 0 if there is none; a few looks, however many there are."""

        def exists(number: int) -> bool:
            return directory.status(place.numbered(number)) is not None

        known = self._last.get(place.name, 0)
        if known and not exists(known):
            known = 0
        leap = 1
        while exists(known + leap):
            known += leap
            leap *= 2
        while leap > 1:  # known exists, known + leap does not
            leap //= 2
            if exists(known + leap):
                known += leap
        self._last[place.name] = known
        return known


def _whole_lines(directory: Directory, place: Place, after: int) -> bytes:
    limit = _CHUNK
    while True:
        block = durable.read_lines_in(directory, place.file, after=after, limit=limit)
        if block:
            # A writer may just have replaced a torn tail by a whole line: what we have may be the
            # beginning of the one and the end of the other. Up to the end of a line nothing changes.
            return durable.read_lines_in(directory, place.file, after=after, limit=len(block))
        if durable.end_of_lines_in(directory, place.file) <= after:
            return b""
        limit *= 2  # a line longer than the chunk


def _check_boundary(directory: Directory | None, place: Place, after: int) -> None:
    if (
        directory is None
        or after < 0
        or durable.read_lines_in(directory, place.file, after=after - 1, limit=1) != b"\n"
    ):
        raise _not_a_position(place, after)


def _not_a_position(place: Place, after: int) -> UsageFailure:
    return UsageFailure(f"{after} is not a position of {place.name}", stream=place.name, position=after)
