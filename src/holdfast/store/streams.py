"""Reading streams from files: lines of one file, or one numbered file per record.

Both ask for the records that are decided but not yet in place (`decided`: position and content) when they
have come to the end of what is in place, and give them too. If there are none, they look whether the end
is still the end: what was about to be put in place when they passed may be there by now. So a reader who has
seen one record of a commit sees all of them.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from typing import Any, Literal, NamedTuple

from holdfast.errors import UsageFailure
from holdfast.fs import calls, durable
from holdfast.fs.directory import Directory, io_failure
from holdfast.store.intents import Intent, Step, are_many, encode, intent_name, publish_number, read_if_there
from holdfast.store.layout import Kind, Location
from holdfast.store.model import Append, Change, Create, Delete, Key, Replace, Stream, View

_CHUNK = 1 << 20

Decided = Callable[[], Sequence[tuple[int, bytes]]]


def lines(
    directory: Directory | None, place: Location, after: int, decided: Decided
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
    directory: Directory | None, place: Location, position: int
) -> Generator[tuple[int, bytes], None, int]:
    """The lines from `position` on that are in place; where they end."""
    while directory is not None and (block := _whole_lines(directory, place, position)):
        for line in block[:-1].split(b"\n"):
            position += len(line) + 1
            yield position, line
    return position


def _is_end_of_lines(directory: Directory | None, place: Location, position: int) -> bool:
    return directory is None or durable.end_of_lines_in(directory, place.file) <= position


def numbered_files(
    directory: Directory | None, place: Location, after: int, decided: Decided
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
    directory: Directory | None, place: Location, number: int
) -> Generator[tuple[int, bytes], None, int]:
    """The records from `number` on that are in place; the number that is missing."""
    if directory is not None:
        while (content := read_if_there(directory, place.numbered(number))) is not None:
            yield number, content
            number += 1
    return number


def _is_end_of_numbers(directory: Directory | None, place: Location, number: int) -> bool:
    return directory is None or directory.status(place.numbered(number)) is None


def last_line(directory: Directory, place: Location) -> tuple[int, bytes] | None:
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

    def remember_durable(self, place: Location, number: int) -> None:
        """Note a number whose name, like all names before it, we have brought to the disk ourselves."""
        self._last[place.name] = self._durable[place.name] = number

    def are_ours(self, place: Location) -> bool:
        """Whether some of the numbers are ours."""
        return place.name in self._durable

    def is_durable(self, place: Location) -> bool:
        """Whether the last number, as it was found last, is durable by our own doing."""
        return place.kind is Kind.NUMBERED and self._last.get(place.name, 0) == self._durable.get(place.name)

    def find(self, directory: Directory, place: Location) -> int:
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


def _whole_lines(directory: Directory, place: Location, after: int) -> bytes:
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


def _check_boundary(directory: Directory | None, place: Location, after: int) -> None:
    if (
        directory is None
        or after < 0
        or durable.read_lines_in(directory, place.file, after=after - 1, limit=1) != b"\n"
    ):
        raise _not_a_position(place, after)


def _not_a_position(place: Location, after: int) -> UsageFailure:
    return UsageFailure(f"{after} is not a position of {place.name}", stream=place.name, position=after)


class Planned(NamedTuple):
    """One change as it will be carried out. `before` is the version of what a document held, `at` is where
    an append goes."""

    place: Location
    operation: Literal["put", "remove", "append"]
    content: bytes = b""
    before: str = ""
    at: int = 0

    def as_step(self) -> Step:
        """The same, as an intent has it."""
        return Step(self.place.name, self.operation, self.content.decode(), self.before, self.at)

    def behind(self) -> int:
        """Where an append behind this one goes; for a line that is also its own position."""
        return self.at + (len(self.content) + 1 if self.place.kind is Kind.LINES else 1)


def plan(
    changes: Sequence[Change], view: View, places: Mapping[Key[Any] | Stream[Any], Location]
) -> list[Planned]:
    """The changes in the order in which they were decided."""
    planned: list[Planned] = []
    ends: dict[Stream[Any], int] = {}
    for change in changes:
        if isinstance(change, Append):
            stream = change.stream
            place, at = places[stream], ends.get(stream)
            if at is None:
                at = view.end(stream) + (place.kind is Kind.NUMBERED)
            step = Planned(place, "append", stream.codec.encode(change.record), "", at)
            if place.kind is Kind.LINES and b"\n" in step.content:
                raise UsageFailure(f"a record for {stream.name} is coded with a line break")
            ends[stream] = step.behind()
        else:
            step = _put_or_remove(change, places[change.key], view)
        planned.append(step)
    return planned


def _put_or_remove(change: Create | Replace | Delete, place: Location, view: View) -> Planned:
    document = view.document(change.key)
    before = "" if document is None else document.version
    if isinstance(change, Delete):
        return Planned(place, "remove", before=before)
    return Planned(place, "put", change.key.codec.encode(change.record) + b"\n", before)


def in_order(planned: list[Planned]) -> list[Planned]:
    """The order of applying: what is pointed to before what points to it, and removals the other way.

    Pointers (an index) come early in the order of locks and what they point to later: so documents
    are put in reverse order, appends follow as they came, and removals go in order at the end.
    """

    def rank(each: Planned) -> tuple[int, str]:
        return each.place.rank

    puts = sorted((each for each in planned if each.operation == "put"), key=rank, reverse=True)
    appends = [each for each in planned if each.operation == "append"]
    removals = sorted((each for each in planned if each.operation == "remove"), key=rank)
    return [*puts, *appends, *removals]


def is_batch(planned: Sequence[Planned]) -> bool:
    """Whether these are records for one and the same numbered stream, and nothing else."""
    place = planned[0].place
    return place.kind is Kind.NUMBERED and all(each.place is place for each in planned)


class Batch:
    """One such commit, in the hands of its author, who holds the guard of the stream."""

    def __init__(
        self, commit_id: str, planned: Sequence[Planned], records: Directory, intents: Directory
    ) -> None:
        """`records` is the directory of the stream, `intents` that of all intents."""
        self._id = commit_id
        self._planned = planned
        self._place = planned[0].place
        self._records = records
        self._intents = intents
        self._drafts: list[str] = []
        self._draft_of_intent = ""

    def write(self) -> None:
        """Step 1."""
        mark, numbered = durable.new_mark(), self._place.numbered
        intent = Intent(self._id, tuple(each.as_step() for each in self._planned), drafts=mark)
        content = encode(intent)
        try:
            bulk = are_many(len(self._planned)) and _on_one_file_system(self._records, self._intents)
            contents = ((numbered(each.at), each.content) for each in self._planned)
            if bulk:
                self._drafts = durable.write_drafts(self._records, contents, mark)
            else:
                for name, record in contents:
                    self._drafts.append(durable.write_draft(self._records, name, record, mark=mark))
            self._draft_of_intent = durable.write_draft(
                self._intents, intent_name(self._id), content, durable=not bulk, mark=mark
            )
            if bulk:
                _sync_file_system(self._records)
        except BaseException:
            self._discard()
            raise

    def decide(self) -> None:
        """Step 2: from here on it will be carried out, by us or by another."""
        draft, self._draft_of_intent = self._draft_of_intent, ""  # published or discarded
        try:
            durable.publish_new(self._intents, draft, intent_name(self._id), often=True)
            durable.sync_names(self._intents, intent_name(self._id))
        except BaseException:
            self._discard()
            raise

    def carry_out(self) -> list[int]:
        """Steps 3 and 4; the numbers that the records have now, in order."""
        numbers: list[int] = []
        numbered, rename = self._place.numbered, durable.rename_new
        number = 0
        try:
            for each, draft in zip(self._planned, self._drafts, strict=True):
                number = max(each.at, number + 1)
                try:
                    done = rename(self._records, draft, numbered(number))
                except FileExistsError:
                    done = False
                if not done:
                    number = publish_number(self._records, self._place, draft, number, each.content)
                numbers.append(number)
        except BaseException:
            self._discard()
            raise
        durable.sync_names(self._records)
        durable.remove_in(self._intents, intent_name(self._id), durable=False)
        return numbers

    def _discard(self) -> None:
        """Leave nothing behind; drafts that were published have another name by now."""
        if self._draft_of_intent:
            durable.discard(self._intents, self._draft_of_intent)
        for draft in self._drafts:
            durable.discard(self._records, draft)


def _on_one_file_system(one: Directory, other: Directory) -> bool:
    if one.fd is None or other.fd is None:
        return False
    try:
        return calls.fstat(one.fd).st_dev == calls.fstat(other.fd).st_dev
    except OSError as error:
        raise io_failure("look at", one.shown, error) from error


def _sync_file_system(directory: Directory) -> None:
    try:
        calls.sync_filesystem(directory.fd or 0)
    except OSError as error:
        raise io_failure("sync the file system of", directory.shown, error) from error
