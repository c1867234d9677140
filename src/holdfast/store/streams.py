"""Reading streams from files: lines of one file, or one numbered file per record.

Both ask for the records that are decided but not yet in place (`decided`: position and content) when they
have come to the end of what is in place, and give them too. If there are none, they look whether the end
is still the end: what was about to be put in place when they passed may be there by now. So a reader who has
seen one record of a commit sees all of them.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterator, Sequence

from holdfast.errors import UsageFailure
from holdfast.fs import durable
from holdfast.fs.directory import Directory
from holdfast.store.intents import read_if_there
from holdfast.store.layout import Kind, Place

_CHUNK = 1 << 20

Decided = Callable[[], Sequence[tuple[int, bytes]]]


def lines(
    directory: Directory | None, place: Place, after: int, decided: Decided
) -> Iterator[tuple[int, bytes]]:
    """The lines behind the offset `after`; the position of a line is the offset at which it ends."""
    if after and after not in (at + len(content) + 1 for at, content in decided()):
        _check_boundary(directory, place, after)
    position = after
    while True:
        position = yield from _lines_in_place(directory, place, position)
        rest = [each for each in decided() if each[0] >= position]
        if rest or position == after or _is_end_of_lines(directory, place, position):
            yield from ((at + len(content) + 1, content) for at, content in rest)
            return


def _lines_in_place(
    directory: Directory | None, place: Place, position: int
) -> Generator[tuple[int, bytes], None, int]:
    """The lines from `position` on that are in place; where they end."""
    while directory is not None and (block := _whole_lines(directory, place, position)):
        for line in block[:-1].split(b"\n"):
            position += len(line) + 1
            yield position, line
    return position


def _is_end_of_lines(directory: Directory | None, place: Place, position: int) -> bool:
    return directory is None or durable.end_of_lines_in(directory, place.file) <= position


def numbered_files(
    directory: Directory | None, place: Place, after: int, decided: Decided
) -> Iterator[tuple[int, bytes]]:
    """The records with numbers behind `after`, up to the first that is missing."""
    if after < 0:
        raise _not_a_position(place, after)
    number = after + 1
    while True:
        number = yield from _numbers_in_place(directory, place, number)
        rest = [each for each in decided() if each[0] >= number]
        if rest or number == after + 1 or _is_end_of_numbers(directory, place, number):
            yield from rest
            return


def _numbers_in_place(
    directory: Directory | None, place: Place, number: int
) -> Generator[tuple[int, bytes], None, int]:
    """The records from `number` on that are in place; the number that is missing."""
    if directory is not None:
        while (content := read_if_there(directory, place.numbered(number))) is not None:
            yield number, content
            number += 1
    return number


def _is_end_of_numbers(directory: Directory | None, place: Place, number: int) -> bool:
    return directory is None or directory.status(place.numbered(number)) is None


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

    def are_ours(self, place: Place) -> bool:
        """Whether some of the numbers are ours."""
        return place.name in self._durable

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
