"""A projection of all issues: their summaries, kept up to date by the changes of the store.

A checkpoint saves the summaries and the cursor up to which they are known, so a command reads only what has changed
since. The checkpoint is a cache: it may be deleted, torn or outdated, and decides nothing. A claim still reads the
issue itself, in its transaction.

In plain files, a read is not as of one instant. The ids of a batch are listed together. So an issue that was not listed
before the read, but is listed after it, is left out: the read may have missed others of its batch. If a changed issue
refers to one that was not seen, everything is read once more.

Lists show unfinished issues, a claim needs the first few of them, and most commands find little changed. So the
checkpoint has three files. The first is written after each change: its head has what has changed in the second file
since that was written. The second has the unfinished issues, each of which can be found and decoded alone; the third is
read only when it is needed. The second has two names, used in turn: a process that read the checkpoint before it was
replaced may write the first file afterwards, which still fits the other one. The head has the length and the CRC-32 of
each section.

    first  = "issues 3 little\\n", u32 length of head, u32 CRC-32 of head, head, cursor; then, only of issues that have
             changed since the third file was written, the same as in that file
    second = unfinished issues, where each begins, their places by the CRC-32 of their ids, their ranks, their order by
             urgency (as places), the places of the notable ones (`rules.is_notable`), of those that depend on others;
             the finished issues that they depend on, where each begins, and their places by id
    third  = finished issues, their ranks, the texts of all issues for searches

In plain files, the index gives the order of the issues: each has a *rank*, its place in the index or in the note beside
it (`reading.IssueListing`). Elsewhere, and for issues that no list has, the order is that of their age.
"""

from __future__ import annotations

import math
import struct
import sys
import threading
import time
import zlib
from array import array
from bisect import bisect_left, insort
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence, ValuesView
from functools import cached_property, partial
from itertools import accumulate
from pathlib import Path
from typing import Any, NamedTuple

import msgspec

from holdfast.clock import ClockReading
from holdfast.errors import CheckpointDamaged, Corrupt
from holdfast.issues import rules
from holdfast.issues.model import (
    INDEX,
    ISSUES,
    RAW_INDEX,
    Index,
    Issue,
    IssueSummary,
    Unlisted,
    has_index,
    searched_text,
)
from holdfast.issues.reading import TOLERANT_INDEX, TOLERANT_UNLISTED, look_at, read_claims
from holdfast.issues.rules import Broken, IssueSet, Place, place_of
from holdfast.store.layout import read_checkpoint, write_checkpoint
from holdfast.store.model import Changes, Store, Unreadable

CHECKPOINT, _OPEN, _REST = "issues", ("issues.open.0", "issues.open.1"), "issues.rest"
_MOST_BYTES = 2 << 30
_MOST_LOOKS = 5
_SAVE_EVERY = 5.0  # seconds, in one process; other processes read the changes since then again
_TOLERANT = ISSUES.tolerant()
UNLISTED = 1 << 60  # the rank of an issue that no list has
_MAGIC = f"issues 3 {sys.byteorder}\n".encode()
_LENGTHS = struct.Struct("<II")
_SECTIONS = (4, 14, 17)  # where those of each file end
_MOST_CHANGED = 64  # issues, or one of so many: with more, the second or third file is written again
_MOST_PLACED = 512  # unfinished issues: of as many, one may have changed; finding its place costs more
_ONE_BY_ONE = 256  # issues of the queue; decoding one takes four times as long as one of all
_LIST = b"\xdd"  # of msgpack, before a number of four bytes

_decode_row: Callable[[memoryview], IssueSummary] = msgspec.msgpack.Decoder(IssueSummary).decode
_decode_rows: Callable[[bytes | memoryview], list[IssueSummary]] = msgspec.msgpack.Decoder(list[IssueSummary]).decode
_decode_texts: Callable[[memoryview], dict[str, str]] = msgspec.msgpack.Decoder(dict[str, str]).decode
_encode = msgspec.msgpack.Encoder().encode


class ListingBasis(msgspec.Struct, frozen=True, array_like=True):
    """The basis of ranks: the versions of the index and of the note beside it, how many ids the index lists, and
    the deleted ones. On a server there is neither."""

    index: str = ""
    noted: str = ""
    count: int = 0
    deleted: frozenset[str] = frozenset()


class _Head(msgspec.Struct, frozen=True, array_like=True):
    """The head of a checkpoint: the store, the basis of the ranks, the unreadable issues, those that no list has, those
    that have changed since the third file was written, and length and CRC-32 of each section. Of the unfinished issues:
    those that have changed since the second file was written (None: finished or gone), their ranks, and the finished
    issues that they depend on."""

    store: str
    listing: ListingBasis
    unreadable: dict[str, int]
    unlisted: set[str]
    changed: set[str]
    sections: list[tuple[int, int]]
    unfinished: dict[str, IssueSummary | None]
    ranks: dict[str, int]
    near: dict[str, IssueSummary]
    turn: int  # of the names of the second file


class _Sections:
    """The sections of a checkpoint, each checked when it is read; `read` reads the second or third file."""

    def __init__(self, first: memoryview, head: _Head, read: Callable[[str], bytes]) -> None:
        self.sizes, self._read = head.sections, read
        self._files: list[memoryview | None] = [first, None, None]
        self._names = ("", _OPEN[head.turn % 2], _REST)

    def get(self, number: int) -> memoryview:
        if len(self.sizes) != _SECTIONS[-1]:
            raise CheckpointDamaged
        file = sum(number >= each for each in _SECTIONS)
        if (content := self._files[file]) is None:
            content = self._files[file] = memoryview(self._read(self._names[file]))
        begin = _SECTIONS[file - 1] if file else 0
        start, (length, check) = sum(length for length, _ in self.sizes[begin:number]), self.sizes[number]
        found = content[start : start + length]
        if len(found) != length or zlib.crc32(found) != check:
            raise CheckpointDamaged
        return found

    def unfinished(self) -> tuple[OpenIssues, SavedRows]:
        """The unfinished issues of the second file, and the finished ones that they depend on."""
        views = [self.get(number) for number in range(_SECTIONS[0], _SECTIONS[1])]
        try:
            return OpenIssues(views[:-3]), SavedRows(*views[-3:])
        except (TypeError, ValueError) as error:  # not a number of integers
            raise CheckpointDamaged from error

    def ranked(self, number: int) -> Ranked:
        try:
            rows, ranks = _decode_rows(self.get(number)), array("q", bytes(self.get(number + 1)))
            by_id = {each.id: each for each in rows}
            listed = zip(by_id, ranks, strict=True) if ranks else ()
        except (msgspec.MsgspecError, ValueError) as error:
            raise CheckpointDamaged from error
        return Ranked(by_id, {issue_id: rank for issue_id, rank in listed if rank != UNLISTED})

    def texts(self, number: int) -> dict[str, str]:
        try:
            return _decode_texts(self.get(number))
        except msgspec.MsgspecError as error:
            raise CheckpointDamaged from error


def _sizes(sections: Iterable[bytes]) -> list[tuple[int, int]]:
    return [(len(each), zlib.crc32(each)) for each in sections]


class Ranked(NamedTuple):
    """Summaries by id, and their ranks. Summaries without a rank come last, by age."""

    rows: dict[str, IssueSummary]
    ranks: dict[str, int]

    def in_order(self) -> dict[str, IssueSummary]:
        place = partial(_age, self.ranks)
        return {each.id: each for each in sorted(self.rows.values(), key=place)}

    def encoded(self) -> tuple[bytes, bytes]:
        rows = list(self.rows.values())
        return _encode(rows), _packed_ranks(rows, self.ranks)


def _age(ranks: Mapping[str, int], issue: IssueSummary) -> tuple[int, str, str]:
    return ranks.get(issue.id, UNLISTED), issue.created_at, issue.id


def _packed_ranks(rows: list[IssueSummary], ranks: Mapping[str, int]) -> bytes:
    return array("q", [ranks.get(each.id, UNLISTED) for each in rows] if ranks else []).tobytes()


class SavedRows:
    """Summaries as they are in a checkpoint, each of which is decoded when it is asked for."""

    def __init__(self, rows: bytes | memoryview, starts: bytes | memoryview, index: bytes | memoryview) -> None:
        self._rows = memoryview(rows)
        self._starts, self._index = memoryview(starts).cast("I"), memoryview(index).cast("Q")
        self._asked = 0
        if len(self._starts) != len(self._index) + 1:
            raise CheckpointDamaged

    @classmethod
    def encoded(cls, rows: list[IssueSummary]) -> list[bytes]:
        """The three sections of these rows."""
        each = list(map(_encode, rows))
        starts = array("I", accumulate(map(len, each), initial=0))
        index = array("Q", sorted(_hash(row.id) << 32 | at for at, row in enumerate(rows)))
        return [b"".join(each), starts.tobytes(), index.tobytes()]

    def __len__(self) -> int:
        return len(self._index)

    def row(self, at: int) -> IssueSummary:
        try:
            return _decode_row(self._rows[self._starts[at] : self._starts[at + 1]])
        except (msgspec.MsgspecError, IndexError) as error:
            raise CheckpointDamaged from error

    def get(self, issue_id: str) -> IssueSummary | None:
        """An issue by its id; after some, all are decoded at once."""
        self._asked += 1
        if self._asked > _ONE_BY_ONE:
            return self.by_id.get(issue_id)
        at = self.find(issue_id)
        return None if at is None else self.row(at)

    def find(self, issue_id: str) -> int | None:
        """The place of an issue."""
        wanted, index = _hash(issue_id), self._index
        for at in range(bisect_left(index, wanted << 32), len(index)):
            hashed, place = divmod(index[at], 1 << 32)
            if hashed != wanted:
                break
            if self.row(place).id == issue_id:
                return place
        return None

    @cached_property
    def rows(self) -> list[IssueSummary]:
        """All of them."""
        try:
            rows = _decode_rows(b"".join((_LIST, len(self).to_bytes(4, "big"), self._rows)))
        except msgspec.MsgspecError as error:
            raise CheckpointDamaged from error
        if len({each.id for each in rows}) != len(self):
            raise CheckpointDamaged
        return rows

    @cached_property
    def by_id(self) -> dict[str, IssueSummary]:
        return {each.id: each for each in self.rows}


class _ListedIssues(ValuesView[IssueSummary]):
    def __init__(self, issues: OpenIssues) -> None:
        super().__init__(issues)
        self._issues = issues

    def __iter__(self) -> Iterator[IssueSummary]:
        return self._issues.listed()


def _hash(issue_id: str) -> int:
    return zlib.crc32(issue_id.encode("utf-8", "surrogatepass"))


class OpenIssues(Mapping[str, IssueSummary]):
    """The unfinished issues: those of a checkpoint, and what has changed since."""

    def __init__(self, sections: list[bytes] | list[memoryview] | None = None) -> None:
        """`sections` are those of `encoded`."""
        self.sections = sections or self.encoded([], {})
        views = [memoryview(each) for each in self.sections]
        self._saved, self._ranks = SavedRows(*views[:3]), views[3].cast("q")
        self._queue, self._notable, self._dependent = (each.cast("I") for each in views[4:])
        if len(self._queue) != len(self._saved) or len(self._ranks) not in (0, len(self._saved)):
            raise CheckpointDamaged
        self.own: dict[str, IssueSummary | None] = {}  # what has changed; None: no longer among them
        self.own_ranks: dict[str, int] = {}
        self._placed: list[tuple[Place, int]] | None = None  # of `own`: where they are in the queue, when it is needed

    @staticmethod
    def encoded(rows: list[IssueSummary], ranks: Mapping[str, int]) -> list[bytes]:
        """The sections of these issues, which are in their order."""
        urgency = [place_of(each, ranks.get(each.id, UNLISTED)) for each in rows]
        queue = array("I", sorted(range(len(rows)), key=urgency.__getitem__))
        notable = array("I", [at for at, each in enumerate(rows) if rules.is_notable(each)])
        dependent = array("I", [at for at, each in enumerate(rows) if each.dependencies])
        places = (each.tobytes() for each in (queue, notable, dependent))
        return [*SavedRows.encoded(rows), _packed_ranks(rows, ranks), *places]

    @property
    def has_changed_much(self) -> bool:
        return len(self.own) > _MOST_CHANGED + self.about // _MOST_PLACED

    def save(self) -> None:
        """Make sections of all issues."""
        if self.own:
            self.__init__(self.encoded(list(self.values()), self.all_ranks()))  # type: ignore[misc]

    def copy(self) -> OpenIssues:
        made = OpenIssues(self.sections)
        made._saved = self._saved  # with what it has decoded
        made.own, made.own_ranks = self.own.copy(), self.own_ranks.copy()
        made._placed = None if self._placed is None else self._placed.copy()
        return made

    # --- Reading ------------------------------------------------------------------------------------

    def get(self, issue_id: str, default: Any = None) -> Any:
        found = self.own[issue_id] if issue_id in self.own else self._saved.get(issue_id)
        return default if found is None else found

    def __getitem__(self, issue_id: str) -> IssueSummary:
        found: IssueSummary | None = self.get(issue_id)
        if found is None:
            raise KeyError(issue_id)
        return found

    def __contains__(self, issue_id: object) -> bool:
        return self.get(str(issue_id)) is not None

    def __len__(self) -> int:
        return len(self.by_id)

    def __iter__(self) -> Iterator[str]:
        return (each.id for each in self.listed())

    def listed(self) -> Iterator[IssueSummary]:
        """All in their order; decoded one by one, and after some, all at once."""
        if "by_id" in self.__dict__ or len(self.own) > _ONE_BY_ONE:
            return iter(self.by_id.values())
        return self._merged(every := range(len(self._saved)), self._placed_in(every))

    def values(self) -> ValuesView[IssueSummary]:
        return _ListedIssues(self)

    @cached_property
    def by_id(self) -> dict[str, IssueSummary]:
        if not self.own:
            return self._saved.by_id
        rows, place = [each for each in self._saved.rows if each.id not in self.own], partial(_age, self.all_ranks())
        new = [each for each in self.own.values() if each is not None]
        if len(new) > len(rows) // _MOST_CHANGED:
            rows = sorted([*rows, *new], key=place)
        else:
            for each in new:
                insort(rows, each, key=place)
        return {each.id: each for each in rows}

    @property
    def about(self) -> int:
        """About how many there are."""
        return max(len(self._saved), sum(each is not None for each in self.own.values()))

    def rank(self, issue_id: str) -> int | None:
        if issue_id in self.own:
            return self.own_ranks.get(issue_id)
        at = self._saved.find(issue_id) if self._ranks else None
        return None if at is None or self._ranks[at] == UNLISTED else self._ranks[at]

    def all_ranks(self) -> dict[str, int]:
        ids = self._saved.by_id if self._ranks else ()
        ranked = {each: rank for each, rank in zip(ids, self._ranks, strict=True) if rank != UNLISTED}
        for each in self.own:
            ranked.pop(each, None)
        return ranked | self.own_ranks

    def queue(self) -> Iterator[IssueSummary]:
        """The most urgent first; decoded one by one, and after some, all at once."""
        if self._placed is None:
            self._placed = sorted(map(self._place, filter(None, self.own.values())))
        return self._merged(self._queue, self._placed)

    def _merged(
        self, order: Sequence[int] | memoryview[int], placed: Sequence[tuple[tuple[Any, ...], int]]
    ) -> Iterator[IssueSummary]:
        """The saved issues in an order, without those that have changed, which are `placed` among them: each with its
        id, and the number of saved ones before it."""
        start = 0
        for (*_, issue_id), end in [*placed, ((None,), len(order))]:
            one_by_one = min(end, max(start, _ONE_BY_ONE))
            found = map(self._saved.row, order[start:one_by_one])
            yield from (each for each in found if each.id not in self.own)
            if one_by_one < end:
                try:
                    found = map(self._saved.rows.__getitem__, order[one_by_one:end])
                    yield from (each for each in found if each.id not in self.own) if self.own else found
                except IndexError as error:
                    raise CheckpointDamaged from error
            start = end
            if issue_id is not None and (own := self.own[issue_id]) is not None:
                yield own

    def notable(self) -> Iterator[IssueSummary]:
        """The notable ones, in any order."""
        saved = map(self._saved.row, self._notable)
        yield from (each for each in saved if each.id not in self.own)
        yield from (each for each in self.own.values() if each is not None and rules.is_notable(each))

    def dependent(self) -> Iterator[IssueSummary]:
        """Those that depend on others, in the order of lists."""
        return (each for each in self._merged(self._dependent, self._placed_in(self._dependent)) if each.dependencies)

    # --- Changing -----------------------------------------------------------------------------------

    def put(self, issue: IssueSummary, rank: int | None) -> None:
        self.drop(issue.id)
        self.own[issue.id] = issue
        if rank is not None:
            self.own_ranks[issue.id] = rank
        if self._placed is not None:
            insort(self._placed, self._place(issue))

    def drop(self, issue_id: str) -> None:
        self.__dict__.pop("by_id", None)
        before = self.own.get(issue_id)
        if before is not None and self._placed is not None:
            self._placed.remove(self._place(before))
        self.own_ranks.pop(issue_id, None)
        if self._saved.find(issue_id) is None:
            self.own.pop(issue_id, None)
        else:
            self.own[issue_id] = None

    def rank_again(self, ranks: Mapping[str, int]) -> None:
        """Forget all ranks, and give new ones."""
        self.own |= {each.id: each for each in self.listed()}
        self.own_ranks = {each: ranks[each] for each, row in self.own.items() if row is not None and each in ranks}
        self._placed = None
        self.__dict__.pop("by_id", None)

    def _place(self, issue: IssueSummary) -> tuple[Place, int]:
        """The place of one of `own` in the queue, and how many of the saved ones are before it."""
        place = place_of(issue, self.own_ranks.get(issue.id, UNLISTED))
        return place, bisect_left(self._queue, place, key=self._saved_place)

    def _saved_place(self, at: int) -> Place:
        return place_of(self._saved.row(at), self._ranks[at] if self._ranks else UNLISTED)

    def _placed_in(self, order: Sequence[int] | memoryview[int]) -> list[tuple[tuple[int, str, str], int]]:
        """The places of all of `own` among saved ones that are in the order of lists."""
        places = sorted(_age(self.own_ranks, each) for each in self.own.values() if each is not None)
        return [(place, bisect_left(order, place, key=self._saved_age)) for place in places]

    def _saved_age(self, at: int) -> tuple[int, str, str]:
        row = self._saved.row(at)
        return self._ranks[at] if self._ranks else UNLISTED, row.created_at, row.id


class SummaryState:
    """The projection as of one read. The next read makes a new one, so users of this one are not disturbed.

    With `sections`, `closed` and `texts` are only what changed since the third file of the checkpoint was written.
    """

    def __init__(self, sections: _Sections | None = None) -> None:
        self.sections = sections
        self._sizes: list[list[tuple[int, int]]] = [[], []]  # of the sections of the second and third file
        self._turn = 0
        self.cursor = b""
        self.listing = ListingBasis()
        self.open = OpenIssues()
        self.closed = Ranked({}, {})
        self.near: dict[str, IssueSummary] = {}  # finished issues that others depend on, besides
        self._saved_near = SavedRows(*SavedRows.encoded([]))
        self.texts: dict[str, str] = {}
        self.unreadable: dict[str, int] = {}  # and their ranks
        self.unlisted: set[str] = set()
        self._new: set[str] = set()  # issues that were not looked up in the lists yet
        self.changed: set[str] = set()  # since the third file was written

    @classmethod
    def decoded(cls, content: bytes, store: str, read: Callable[[str], bytes]) -> SummaryState | None:
        """The state of a checkpoint; None if it cannot be used."""
        start = len(_MAGIC) + _LENGTHS.size
        if not content.startswith(_MAGIC) or len(content) < start:
            return None
        length, check = _LENGTHS.unpack_from(content, len(_MAGIC))
        encoded = content[start : start + length]
        try:
            if zlib.crc32(encoded) != check:
                return None
            head = msgspec.msgpack.decode(encoded, type=_Head)
            state = cls(sections := _Sections(memoryview(content)[start + length :], head, read))
            state.cursor, state.closed, state.texts = bytes(sections.get(0)), sections.ranked(1), sections.texts(3)
            state.open, state._saved_near = sections.unfinished()
        except (msgspec.MsgspecError, CheckpointDamaged):
            return None
        if any(each is not None and each.id != issue_id for issue_id, each in head.unfinished.items()):
            return None
        state.open.own, state.open.own_ranks, state.near = head.unfinished, head.ranks, head.near
        state.listing, state.unreadable, state.unlisted = head.listing, head.unreadable, head.unlisted
        state.changed, state._turn = head.changed, head.turn
        state._sizes = [head.sections[slice(*_SECTIONS[:2])], head.sections[_SECTIONS[1] :]]
        return state if head.store == store else None

    def encoded(self, store: str) -> dict[str, bytes]:
        """The content of the files; those that stay as they are are missing."""
        files: dict[str, bytes] = {}
        if not self._sizes[1] or len(self.changed) > _MOST_CHANGED + self.count // _MOST_CHANGED:
            self.decode_rest()
            sections = [*self.closed.encoded(), _encode(self.texts)]
            self.changed, self._sizes[1], files[_REST] = set(), _sizes(sections), b"".join(sections)
        if not self._sizes[0] or self.open.has_changed_much or files:  # its finished issues may be out of date, too
            self.open.save()
            near = list(self._needed(self.open.by_id.values(), self.open.by_id).values())
            sections = [*map(bytes, self.open.sections), *(near_sections := SavedRows.encoded(near))]
            self._saved_near, self.near = SavedRows(*near_sections), {}
            self._turn = 1 - self._turn % 2
            self._sizes[0], files[_OPEN[self._turn]] = _sizes(sections), b"".join(sections)
        self.near |= self._needed((each for each in self.open.own.values() if each is not None), ())
        closed = Ranked(
            {each: row for each, row in self.closed.rows.items() if each in self.changed}, self.closed.ranks
        )
        texts = {each: text for each, text in self.texts.items() if each in self.changed}
        first = [self.cursor, *closed.encoded(), _encode(texts)]
        sizes = [*_sizes(first), *self._sizes[0], *self._sizes[1]]
        known = (store, self.listing, self.unreadable, self.unlisted, self.changed, sizes)
        head = _encode(_Head(*known, self.open.own, self.open.own_ranks, self.near, self._turn))
        lengths = _LENGTHS.pack(len(head), zlib.crc32(head))
        return {**files, CHECKPOINT: b"".join((_MAGIC, lengths, head, *first))}

    def _needed(self, issues: Iterable[IssueSummary], open_: Collection[str]) -> dict[str, IssueSummary]:
        """The finished issues that these depend on; `open_` are known to be unfinished."""
        needed = {each for issue in issues for each in issue.dependencies}.difference(open_)
        rows = ((each, self.lookup(each)) for each in needed)
        return {each: row for each, row in rows if row is not None and row.state in rules.FINISHED}

    def copy(self) -> SummaryState:
        made = SummaryState(self.sections)
        made.cursor, made.listing, made._saved_near = self.cursor, self.listing, self._saved_near
        made.open, made.closed = self.open.copy(), Ranked(dict(self.closed.rows), dict(self.closed.ranks))
        made._turn = self._turn
        made._sizes, made.near, made.texts = list(self._sizes), dict(self.near), dict(self.texts)
        made.unreadable, made.unlisted = dict(self.unreadable), set(self.unlisted)
        made.changed, made._new = set(self.changed), set(self._new)
        return made

    def decode_rest(self) -> None:
        """Decode the finished issues and the texts of the checkpoint; `CheckpointDamaged` if that is impossible."""
        if self.sections is None:
            return
        closed, texts = self.sections.ranked(_SECTIONS[1]), self.sections.texts(_SECTIONS[2] - 1)
        for each in self.changed:
            for known in (closed.rows, closed.ranks, texts):
                known.pop(each, None)
        self.closed = Ranked(closed.rows | self.closed.rows, closed.ranks | self.closed.ranks)
        self.texts, self.sections = texts | self.texts, None

    def lookup(self, issue_id: str) -> IssueSummary | None:
        found: IssueSummary | None = self.open.get(issue_id) or self.closed.rows.get(issue_id)
        if found is not None or self.sections is None or issue_id in self.changed:
            return found
        if (found := self.near.get(issue_id) or self._saved_near.get(issue_id)) is None:
            self.decode_rest()
            found = self.closed.rows.get(issue_id)
        return found

    @property
    def count(self) -> int:
        """About how many issues there are."""
        return max(self.listing.count, self.open.about + len(self.closed.rows))

    @property
    def is_unranked(self) -> bool:
        """Whether an issue may need a rank."""
        return bool(self._new)

    @property
    def has_any(self) -> bool:
        """Whether the tracker has any issue."""
        return bool(self.open.about or self.closed.rows or self.unreadable or self.sections is not None)

    def shown(self, left_out: Collection[str], *, finished: bool) -> Mapping[str, IssueSummary]:
        """The issues in their order, without some; `finished` ones only if they are decoded."""
        rows: Mapping[str, IssueSummary] = self.open
        if finished:
            rows = {each.id: each for each in self.open.listed()} | self.closed.rows
            rows = Ranked(rows, self.open.all_ranks() | self.closed.ranks).in_order()
        return {each.id: each for each in rows.values() if each.id not in left_out} if left_out else rows

    def text(self, issue_id: str) -> str:
        """The text of an issue in which words are searched."""
        if issue_id not in self.texts:
            self.decode_rest()
        return self.texts.get(issue_id, "")

    def put(self, issue: Issue) -> None:
        """Enter an issue as it is now."""
        summary, before = IssueSummary.of(issue), self.open.get(issue.id)
        if before is not None and issue.state not in rules.FINISHED and before.created_at == issue.created_at:
            self.changed.add(issue.id)
            self.open.put(summary, self.open.rank(issue.id))  # whether a list has it is known
        else:
            rank = self._rank(issue.id)
            self.drop(issue.id)
            self._put(summary, rank)
            if rank is None:
                self.unlisted.add(issue.id)
                self._new.add(issue.id)
        self.texts[issue.id] = searched_text(issue)

    def _put(self, summary: IssueSummary, rank: int | None) -> None:
        if summary.state not in rules.FINISHED:
            self.open.put(summary, rank)
            return
        self.closed.rows[summary.id] = summary
        if rank is not None:
            self.closed.ranks[summary.id] = rank

    def put_unreadable(self, issue_id: str) -> None:
        rank = self._rank(issue_id)
        self.drop(issue_id)
        self.unreadable[issue_id] = UNLISTED if rank is None else rank
        if rank is None:
            self._new.add(issue_id)

    def drop(self, issue_id: str) -> None:
        self.changed.add(issue_id)
        self.unlisted.discard(issue_id)
        self.open.drop(issue_id)
        for known in (*self.closed, self.near, self.texts, self.unreadable):
            known.pop(issue_id, None)

    def _rank(self, issue_id: str) -> int | None:
        """The rank that an issue has; None if it is new, or perhaps in a section that is not decoded."""
        known = (self.open.rank(issue_id), self.closed.ranks.get(issue_id), self.unreadable.get(issue_id))
        return next((each for each in known if each is not None and each != UNLISTED), None)

    # --- Ranks --------------------------------------------------------------------------------------

    def rank_all(self, basis: ListingBasis, ids: Iterable[str]) -> None:
        """Rank all issues again."""
        self.decode_rest()
        self._sizes, self._new = [[], []], set()  # the ranks in the files are those of another index
        ranks = {each: at for at, each in enumerate(dict.fromkeys(ids))}
        self.open.rank_again(ranks)
        self.closed.ranks.clear()
        self.closed.ranks.update((each, ranks[each]) for each in self.closed.rows if each in ranks)
        self.unlisted = {*self.open, *self.closed.rows}.difference(ranks)
        self.unreadable = {each: ranks.get(each, UNLISTED) for each in self.unreadable}
        self.listing = basis

    def rank_new(self, basis: ListingBasis, noted: Iterable[str], listed: Callable[[], Iterable[str]]) -> None:
        """Rank the issues that have no rank yet: the index is the same, and the note beside it only grows. `listed`
        decodes the index."""
        ranks = {each: basis.count + at for at, each in enumerate(dict.fromkeys(noted))}
        if not ranks.keys() >= self._new:  # an issue was reopened, or its file has come back
            ranks |= {each: at for at, each in enumerate(dict.fromkeys(listed()))}
        self._give(ranks)
        self.listing, self._new = basis, set()

    def leave_unranked(self) -> None:
        """Forget which issues are unlisted: this store has no lists."""
        self.unlisted, self._new = set(), set()

    def _give(self, ranks: Mapping[str, int]) -> None:
        """Give ranks to issues that have none."""
        for each in [each for each in self.unlisted if each in ranks]:
            found = self.open.get(each) or self.closed.rows.get(each)
            if found is not None:
                self._put(found, ranks[each])
            self.unlisted.discard(each)
        for each, rank in self.unreadable.items():
            if rank == UNLISTED and each in ranks:
                self.unreadable[each] = ranks[each]


class IndexUnusable(Exception):
    """The index is missing or cannot be understood: the issues must be read one by one, and the index rebuilt."""


class _Lists(NamedTuple):
    """The index, not decoded, and the note beside it; with their versions."""

    content: bytes
    index_version: str
    noted: list[str]
    noted_version: str

    @classmethod
    def read(cls, store: Store) -> _Lists:
        noted = store.read(TOLERANT_UNLISTED)  # first: ids only move from here to the index
        index = store.read(RAW_INDEX)
        if index is None:
            raise IndexUnusable
        ids = noted.record.ids if noted is not None and isinstance(noted.record, Unlisted) else []
        return cls(index.record, index.version, ids, "" if noted is None else noted.version)

    @property
    def versions(self) -> tuple[str, str]:
        return self.index_version, self.noted_version

    def decoded(self) -> Index:
        try:
            return INDEX.codec.decode(self.content, INDEX.name)
        except Corrupt as failure:
            raise IndexUnusable from failure

    def rank(self, state: SummaryState) -> None:
        if self.index_version == state.listing.index:
            basis = msgspec.structs.replace(state.listing, noted=self.noted_version)
            state.rank_new(basis, self.noted, lambda: self.decoded().all_ids)
            return
        found = self.decoded()
        basis = ListingBasis(*self.versions, len(found.all_ids), frozenset(found.deleted_ids))
        state.rank_all(basis, (*found.all_ids, *self.noted))


class IssueProjection:
    """The projection of one tracker's issues. Safe to use from several threads."""

    def __init__(self, store: Store, root: Path | None, name: str = "") -> None:
        """`root` is the directory with the checkpoint, if there is to be one; `name` is that of the store, because a
        directory may have several."""
        self._store, self._root, self._name = store, root, name
        self._lock = threading.Lock()
        self._state: SummaryState | None = None
        self._save_after = -math.inf

    def look(self, reading: ClockReading, *, finished: bool) -> IssueSet[IssueSummary]:
        """All issues as they are now, or only the unfinished ones. Raises `IndexUnusable` if the index cannot be
        used."""
        with self._lock:
            try:
                return self._look(reading, finished=finished)
            except CheckpointDamaged:  # or replaced by another process between the first file and the second
                self._state = None
            try:
                return self._look(reading, finished=finished)
            except CheckpointDamaged:
                self._state = SummaryState()
                return self._look(reading, finished=finished)

    def _look(self, reading: ClockReading, *, finished: bool) -> IssueSet[IssueSummary]:
        lists = _Lists.read(self._store) if has_index(self._store) else None
        before = self._load() if self._state is None else self._state
        state, at = self._follow(before)
        if lists is None and not state.has_any and self._store.read(TOLERANT_INDEX) is None:
            raise IndexUnusable
        left_out: set[str] = set()
        if lists is None:
            state.leave_unranked()
        else:
            if lists.versions != (state.listing.index, state.listing.noted) or state.is_unranked:
                state = state.copy()
                lists.rank(state)
            left_out = self._left_out(state, lists)
        if finished or left_out:
            state.decode_rest()
        if state is not before:
            self._save(state)
        self._state = state
        rows, broken = state.shown(left_out, finished=finished), self._broken(state, only_listed=lists is not None)
        lookup, text = partial(self._lookup, state), partial(self._text, state)
        claims = partial(read_claims, self._store)
        order = None if left_out else state.open
        return IssueSet(rows, reading.at(at), broken, claims=claims, lookup=lookup, text=text, order=order)

    def _lookup(self, state: SummaryState, issue_id: str) -> IssueSummary | None:
        try:
            return state.lookup(issue_id)
        except CheckpointDamaged:
            found = self._found(issue_id)
            return None if found is None else IssueSummary.of(found)

    def _text(self, state: SummaryState, issue_id: str) -> str:
        try:
            return state.text(issue_id)
        except CheckpointDamaged:
            found = self._found(issue_id)
            return "" if found is None else searched_text(found)

    def _found(self, issue_id: str) -> Issue | None:
        """The issue itself, read because the checkpoint is damaged; the checkpoint is not used again."""
        if self._root is not None:
            write_checkpoint(self._root, CHECKPOINT, b"")
        self._state, found = None, look_at(self._store, issue_id)
        return found if isinstance(found, Issue) else None

    def _load(self) -> SummaryState:
        content = None if self._root is None else read_checkpoint(self._root, CHECKPOINT, limit=_MOST_BYTES)
        state = SummaryState.decoded(content, self._name, self._read) if content else None
        return SummaryState() if state is None else state

    def _read(self, file: str) -> bytes:
        return (None if self._root is None else read_checkpoint(self._root, file, limit=_MOST_BYTES)) or b""

    def _save(self, state: SummaryState) -> None:
        """Write a checkpoint, if this process has not done so lately."""
        now = time.monotonic()
        if self._root is None and state.open.has_changed_much:
            state.open.save()
        if self._root is None or now < self._save_after:
            return
        for file, content in state.encoded(self._name).items():  # the first file last
            write_checkpoint(self._root, file, content)
        self._save_after = now + _SAVE_EVERY

    def _follow(self, state: SummaryState) -> tuple[SummaryState, float]:
        """The state after all changes, and the store's time."""
        for _ in range(_MOST_LOOKS):
            changes = self._store.changes(_TOLERANT, state.cursor)
            if not changes.is_whole and not changes.changed and not changes.removed and changes.cursor == state.cursor:
                break
            state = SummaryState() if changes.is_whole else state.copy()
            changed = _apply(state, changes)
            if self._store.files is None or not _has_lost(state, changed, changes.removed):
                break
        return state, changes.at

    def _left_out(self, state: SummaryState, lists: _Lists) -> set[str]:
        """The issues that were unlisted before the read and are listed or deleted now, except those that others depend
        on."""
        if not state.unlisted:
            return set()
        now = _Lists.read(self._store)
        listed = set(state.listing.deleted)
        if now.versions != lists.versions:
            index = now.decoded()
            listed = {*index.all_ids, *index.deleted_ids, *now.noted}
        left_out = state.unlisted & listed
        if left_out:
            state.decode_rest()
        while left_out:
            rows = (*state.open.values(), *state.closed.rows.values())
            needed = {on for each in rows if each.id not in left_out for on in each.dependencies}
            if not needed & left_out:
                break
            left_out -= needed
        return left_out

    def _broken(self, state: SummaryState, *, only_listed: bool) -> dict[str, Broken]:
        """The issues that cannot be read; in plain files, only those that are listed, or that others depend on: the
        rest may be any file."""
        named = [each for each, rank in state.unreadable.items() if not only_listed or rank != UNLISTED]
        if len(named) < len(state.unreadable):
            state.decode_rest()
            rows = (*state.open.values(), *state.closed.rows.values())
            needed = {on for each in rows for on in each.dependencies}
            named = [each for each in state.unreadable if each in named or each in needed]
        looks = ((each, look_at(self._store, each)) for each in named)
        return {issue_id: found for issue_id, found in looks if isinstance(found, Broken)}


def projection_of(store: Store, root: Path | None) -> IssueProjection:
    """The projection of a store's issues. `root` is the directory for checkpoints, if the store is not in files."""
    files, server = store.files, store.server
    return IssueProjection(store, files.path if files else root, server.address if server else "")


def _apply(state: SummaryState, changes: Changes[Issue | Unreadable]) -> list[Issue]:
    """Apply changes, and return the issues that have changed."""
    state.cursor = changes.cursor
    for issue_id in changes.removed:
        state.drop(issue_id)
    changed: list[Issue] = []
    for issue_id, document in changes.changed.items():
        if isinstance(document.record, Issue):
            state.put(document.record)
            changed.append(document.record)
        else:
            state.put_unreadable(issue_id)
    return changed


def _has_lost(state: SummaryState, changed: list[Issue], removed: Collection[str]) -> bool:
    """Whether an issue refers to one that was not seen, although it may exist by now: it has changed, or the other one
    is gone."""
    referring: list[Issue | IssueSummary] = [*changed, *(state.open.values() if removed else ())]
    missing = (on for each in referring for on in each.dependencies if state.lookup(on) is None)
    return any(on not in state.unreadable for on in missing)
