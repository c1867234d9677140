"""A projection of all issues: their summaries, kept up to date by the changes of the store.

A checkpoint saves the summaries and the cursor up to which they are known, so a command reads only what has changed
since. The checkpoint is a cache: it may be deleted, torn or outdated, and decides nothing. A claim still reads the
issue itself, in its transaction.

In plain files, a read is not as of one instant. The ids of a batch are listed together. So an issue that was not listed
before the read, but is listed after it, is left out: the read may have missed others of its batch. If a changed issue
refers to one that was not seen, everything is read once more.

Lists show unfinished issues. So the first file has these, and all changes since the second file was written. The second
file is read only when needed. The head has the length and the CRC-32 of each section of both files.

    first  = "issues 3\\n", u32 length of head, u32 CRC-32 of head, head, cursor, unfinished issues, their ranks, their
             order by urgency and which are in progress (as positions), the finished issues that they depend on; then,
             only of changed issues, the same as in the second file
    second = finished issues, their ranks, the texts of all issues for searches

In plain files, the index gives the order of the issues: each has a *rank*, its place in the index or in the note beside
it (`reading.IssueListing`). Elsewhere, and for issues that no list has, the order is that of their age.
"""

from __future__ import annotations

import contextlib
import math
import struct
import threading
import time
import zlib
from array import array
from collections.abc import Callable, Collection, Iterable, Mapping
from functools import cached_property, partial
from pathlib import Path
from typing import NamedTuple

import msgspec

from holdfast.clock import ClockReading
from holdfast.errors import Corrupt
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
from holdfast.issues.rules import Broken, IssueSet, Place, UrgencyOrder, place_of
from holdfast.store.layout import read_checkpoint, write_checkpoint
from holdfast.store.model import Changes, Store, Unreadable

CHECKPOINT, _REST = "issues", "issues.rest"
_MOST_BYTES = 2 << 30
_MOST_LOOKS = 5
_SAVE_EVERY = 5.0  # seconds, in one process; other processes read the changes since then again
_TOLERANT = ISSUES.tolerant()
UNLISTED = 1 << 60  # the rank of an issue that no list has
_MAGIC = b"issues 3\n"
_LENGTHS = struct.Struct("<II")
_SECTIONS, _SECOND = 12, 9  # their number, and the first of the second file
_MOST_CHANGED = 64  # issues, or one of so many: with more, the second file is written again

_decode_rows: Callable[[memoryview], list[IssueSummary]] = msgspec.msgpack.Decoder(list[IssueSummary]).decode
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
    that have changed since the second file was written, and length and CRC-32 of each section."""

    store: str
    listing: ListingBasis
    unreadable: dict[str, int]
    unlisted: set[str]
    changed: set[str]
    sections: list[tuple[int, int]]


class CheckpointDamaged(Exception):
    """A section of the checkpoint is not what was written."""


class _Sections:
    """The sections of a checkpoint, each checked when it is read; `read_second` reads the second file."""

    def __init__(self, first: memoryview, sizes: list[tuple[int, int]], read_second: Callable[[], bytes]) -> None:
        self._first, self._sizes, self._read_second = first, sizes, read_second
        self._second: memoryview | None = None

    def get(self, number: int) -> memoryview:
        if len(self._sizes) != _SECTIONS:
            raise CheckpointDamaged
        if number < _SECOND:
            content, earlier = self._first, self._sizes[:number]
        else:
            self._second = memoryview(self._read_second()) if self._second is None else self._second
            content, earlier = self._second, self._sizes[_SECOND:number]
        start, (length, check) = sum(length for length, _ in earlier), self._sizes[number]
        found = content[start : start + length]
        if len(found) != length or zlib.crc32(found) != check:
            raise CheckpointDamaged
        return found

    def ranked(self, number: int) -> Ranked:
        try:
            rows, packed = _decode_rows(self.get(number)), array("q", self.get(number + 1).tobytes())
        except (msgspec.MsgspecError, ValueError) as error:
            raise CheckpointDamaged from error
        by_id = {each.id: each for each in rows}
        if packed and len(packed) != len(by_id):
            raise CheckpointDamaged
        return Ranked(by_id, packed)

    def positions(self, number: int) -> array[int]:
        return array("I", self.get(number).tobytes())

    def texts(self, number: int) -> dict[str, str]:
        try:
            return _decode_texts(self.get(number))
        except msgspec.MsgspecError as error:
            raise CheckpointDamaged from error


def _sizes(sections: Iterable[bytes]) -> list[tuple[int, int]]:
    return [(len(each), zlib.crc32(each)) for each in sections]


class Ranked:
    """Summaries by id, and their ranks. Summaries without a rank come last, by age."""

    def __init__(self, rows: dict[str, IssueSummary], ranks: dict[str, int] | array[int]) -> None:
        self.rows, self._ranks = rows, ranks

    @cached_property
    def ranks(self) -> dict[str, int]:
        """The ranks by id. They are decoded on first use, before the rows change."""
        if isinstance(self._ranks, dict):
            return self._ranks
        return {each: rank for each, rank in zip(self.rows, self._ranks, strict=bool(self._ranks)) if rank != UNLISTED}

    def copy(self) -> Ranked:
        return Ranked(self.rows.copy(), self.ranks.copy())

    def in_order(self) -> list[IssueSummary]:
        ranks = self.ranks
        return sorted(self.rows.values(), key=lambda each: (ranks.get(each.id, UNLISTED), each.created_at, each.id))

    def encoded(self) -> tuple[bytes, bytes]:
        ranks = array("q", [self.ranks.get(each, UNLISTED) for each in self.rows] if self.ranks else [])
        return _encode(list(self.rows.values())), ranks.tobytes()


class SummaryState:
    """The projection as of one read. The next read makes a new one, so users of this one are not disturbed.

    `open` are the unfinished issues. With `sections`, `closed` and `texts` are only what changed since the checkpoint.
    """

    def __init__(self, sections: _Sections | None = None) -> None:
        self.sections = sections
        self._second: list[
            tuple[int, int]
        ] = []  # length and CRC-32 of the sections of the second file, if there is one
        self.cursor = b""
        self.listing = ListingBasis()
        self.open = Ranked({}, {})
        self.closed = Ranked({}, {})
        self.near: dict[str, IssueSummary] = {}  # finished issues of the checkpoint that others depend on
        self.texts: dict[str, str] = {}
        self.unreadable: dict[str, int] = {}  # and their ranks
        self.unlisted: set[str] = set()
        self._new: set[str] = set()  # issues that were not looked up in the lists yet
        self.changed: set[str] = set()  # since the second file was written
        self.is_sorted = True
        self._order: UrgencyOrder | None = None  # of the unfinished issues, made on first use
        self._saved_order: tuple[array[int], array[int]] | None = None  # the same in the checkpoint

    @classmethod
    def decoded(cls, content: bytes, store: str, read_second: Callable[[], bytes]) -> SummaryState | None:
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
            sections = _Sections(memoryview(content)[start + length :], head.sections, read_second)
            state = cls(sections)
            state.cursor, state.open = bytes(sections.get(0)), sections.ranked(1)
            state._saved_order = sections.positions(3), sections.positions(4)
            state.near = {each.id: each for each in _decode_rows(sections.get(5))}
            state.closed, state.texts = sections.ranked(6), sections.texts(8)
        except (msgspec.MsgspecError, ValueError, CheckpointDamaged):
            return None
        state.listing, state.unreadable, state.unlisted = head.listing, head.unreadable, head.unlisted
        state.changed, state._second = head.changed, head.sections[_SECOND:]
        return state if head.store == store else None

    def encoded(self, store: str) -> tuple[bytes, bytes | None]:
        """The content of the first file, and of the second one, unless that stays as it is."""
        sections: list[bytes] = []
        if not self._second or len(self.changed) > _MOST_CHANGED + self.count // _MOST_CHANGED:
            self.decode_rest()
            sections = [*self.closed.encoded(), _encode(self.texts)]
            self.changed, self._second = set(), _sizes(sections)
        needed = {each for issue in self.open.rows.values() for each in issue.dependencies}
        near = [found for each in needed if each not in self.open.rows and (found := self.lookup(each)) is not None]
        closed = Ranked(
            {each: row for each, row in self.closed.rows.items() if each in self.changed}, self.closed.ranks
        )
        texts = {each: text for each, text in self.texts.items() if each in self.changed}
        self._sort()
        order, at = self.order(), {each: number for number, each in enumerate(self.open.rows)}
        positions = (array("I", map(at.__getitem__, each)).tobytes() for each in (order.ids, order.working))
        first = [self.cursor, *self.open.encoded(), *positions, _encode(near), *closed.encoded(), _encode(texts)]
        head = _encode(
            _Head(store, self.listing, self.unreadable, self.unlisted, self.changed, [*_sizes(first), *self._second])
        )
        lengths = _LENGTHS.pack(len(head), zlib.crc32(head))
        return b"".join((_MAGIC, lengths, head, *first)), b"".join(sections) if sections else None

    def copy(self) -> SummaryState:
        made = SummaryState(self.sections)
        made.cursor, made.listing, made.near, made._second = self.cursor, self.listing, self.near, self._second
        made.open, made.closed = self.open.copy(), self.closed.copy()
        made.texts, made.unreadable = dict(self.texts), dict(self.unreadable)
        made.unlisted, made.changed, made.is_sorted = set(self.unlisted), set(self.changed), self.is_sorted
        made._new = set(self._new)
        if self._order is not None or self._saved_order is not None:
            made._order = self.order().copy()
        return made

    def decode_rest(self) -> None:
        """Decode the finished issues and the texts of the checkpoint; `CheckpointDamaged` if that is impossible."""
        if self.sections is None:
            return
        closed, texts = self.sections.ranked(_SECOND), self.sections.texts(_SECOND + 2)
        for each in self.changed:
            for known in (closed.rows, closed.ranks, texts):
                known.pop(each, None)
        self.closed = Ranked(closed.rows | self.closed.rows, closed.ranks | self.closed.ranks)
        self.texts, self.sections = texts | self.texts, None

    def lookup(self, issue_id: str) -> IssueSummary | None:
        found = self.open.rows.get(issue_id) or self.closed.rows.get(issue_id)
        if found is not None or self.sections is None or issue_id in self.changed:
            return found
        if (found := self.near.get(issue_id)) is None:
            self.decode_rest()
            found = self.closed.rows.get(issue_id)
        return found

    @property
    def count(self) -> int:
        """About how many issues there are."""
        return max(self.listing.count, len(self.open.rows) + len(self.closed.rows))

    @property
    def is_unranked(self) -> bool:
        """Whether an issue may need a rank."""
        return bool(self._new)

    @property
    def has_any(self) -> bool:
        """Whether the tracker has any issue."""
        return bool(self.open.rows or self.closed.rows or self.unreadable or self.sections is not None)

    def shown(self, left_out: Collection[str], *, finished: bool) -> dict[str, IssueSummary]:
        """The issues in their order, without some; `finished` ones only if they are decoded."""
        if finished:
            everything = Ranked(self.open.rows | self.closed.rows, self.open.ranks | self.closed.ranks)
            return {each.id: each for each in everything.in_order() if each.id not in left_out}
        self._sort()
        if not left_out:
            return self.open.rows
        return {issue_id: each for issue_id, each in self.open.rows.items() if issue_id not in left_out}

    def _sort(self) -> None:
        if not self.is_sorted:
            rows = {each.id: each for each in self.open.in_order()}
            self.open, self.is_sorted = Ranked(rows, self.open.ranks), True

    def order(self) -> UrgencyOrder:
        """The unfinished issues by urgency."""
        if self._order is None and self._saved_order is not None:
            ids, (order, working) = list(self.open.rows), self._saved_order
            with contextlib.suppress(IndexError):
                self._order = UrgencyOrder([ids[at] for at in order], {ids[at] for at in working})
        if self._order is None or len(self._order.ids) != len(self.open.rows):
            ranks = self.open.ranks
            self._order = UrgencyOrder.of((each, ranks.get(each.id, UNLISTED)) for each in self.open.rows.values())
        return self._order

    def _place(self, issue_id: str) -> Place:
        return place_of(self.open.rows[issue_id], self.open.ranks.get(issue_id, UNLISTED))

    def text(self, issue_id: str) -> str:
        """The text of an issue in which words are searched."""
        if issue_id not in self.texts:
            self.decode_rest()
        return self.texts.get(issue_id, "")

    def put(self, issue: Issue) -> None:
        """Enter an issue as it is now."""
        summary, before = IssueSummary.of(issue), self.open.rows.get(issue.id)
        is_open = issue.state not in rules.FINISHED
        if is_open and before is not None and before.created_at == issue.created_at:  # its place stays
            self.changed.add(issue.id)
            self._leave_order(issue.id)
            self.open.rows[issue.id] = summary
            rank = self.open.ranks.get(issue.id)
        else:
            rank = self._rank(issue.id)
            self.drop(issue.id)
            into = self.open if is_open else self.closed
            into.rows[issue.id] = summary
            self.is_sorted = self.is_sorted and not is_open
            if rank is not None:
                into.ranks[issue.id] = rank
            else:
                self.unlisted.add(issue.id)
                self._new.add(issue.id)
        if is_open and self._order is not None:
            self._order.add(summary, self._place)
        self.texts[issue.id] = searched_text(issue)

    def put_unreadable(self, issue_id: str) -> None:
        rank = self._rank(issue_id)
        self.drop(issue_id)
        self.unreadable[issue_id] = UNLISTED if rank is None else rank
        if rank is None:
            self._new.add(issue_id)

    def drop(self, issue_id: str) -> None:
        self.changed.add(issue_id)
        self.unlisted.discard(issue_id)
        self._leave_order(issue_id)
        for each in (self.open, self.closed):
            each.ranks.pop(issue_id, None)
            each.rows.pop(issue_id, None)
        self.texts.pop(issue_id, None)
        self.unreadable.pop(issue_id, None)

    def _leave_order(self, issue_id: str) -> None:
        if issue_id in self.open.rows and self._order is not None and not self._order.remove(issue_id, self._place):
            self._order = None  # it was damaged

    def _rank(self, issue_id: str) -> int | None:
        """The rank that an issue has; None if it is new, or perhaps in a section that is not decoded."""
        known = (each.get(issue_id) for each in (self.open.ranks, self.closed.ranks, self.unreadable))
        return next((each for each in known if each is not None and each != UNLISTED), None)

    # --- Ranks --------------------------------------------------------------------------------------

    def rank_all(self, basis: ListingBasis, ids: Iterable[str]) -> None:
        """Rank all issues again."""
        self.decode_rest()
        self._order = self._saved_order = None
        self._second, self._new = [], set()  # the ranks in the second file are those of another index
        for known in (self.open, self.closed):
            known.ranks.clear()
        self.unlisted = {*self.open.rows, *self.closed.rows}
        self.unreadable = dict.fromkeys(self.unreadable, UNLISTED)
        self.is_sorted = False  # also if no list has any of them: then they are in the order of their age
        self._give({each: at for at, each in enumerate(dict.fromkeys(ids))})
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
            self._leave_order(each)
            (self.open if each in self.open.rows else self.closed).ranks[each] = ranks[each]
            if each in self.open.rows and self._order is not None:
                self._order.add(self.open.rows[each], self._place)
            self.unlisted.discard(each)
            self.is_sorted = False
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
        return IssueSet(rows, reading.at(at), broken, claims=claims, lookup=lookup, text=text, order=state.order)

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
        state = SummaryState.decoded(content, self._name, self._read_rest) if content else None
        return SummaryState() if state is None else state

    def _read_rest(self) -> bytes:
        return (None if self._root is None else read_checkpoint(self._root, _REST, limit=_MOST_BYTES)) or b""

    def _save(self, state: SummaryState) -> None:
        """Write a checkpoint, if this process has not done so lately."""
        now = time.monotonic()
        if self._root is None or now < self._save_after:
            return
        first, rest = state.encoded(self._name)
        if rest is not None:
            write_checkpoint(self._root, _REST, rest)
        write_checkpoint(self._root, CHECKPOINT, first)
        self._save_after = now + _SAVE_EVERY

    def _follow(self, state: SummaryState) -> tuple[SummaryState, float]:
        """The state after all changes, and the store's time."""
        for _ in range(_MOST_LOOKS):
            changes = self._store.changes(_TOLERANT, state.cursor)
            if not changes.is_whole and not changes.changed and not changes.removed and changes.cursor == state.cursor:
                break
            state = SummaryState() if changes.is_whole else state.copy()
            lost = _apply(state, changes)
            if not lost or self._store.files is None:
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
            rows = (*state.open.rows.values(), *state.closed.rows.values())
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
            rows = (*state.open.rows.values(), *state.closed.rows.values())
            needed = {on for each in rows for on in each.dependencies}
            named = [each for each in state.unreadable if each in named or each in needed]
        looks = ((each, look_at(self._store, each)) for each in named)
        return {issue_id: found for issue_id, found in looks if isinstance(found, Broken)}


def projection_of(store: Store, root: Path | None) -> IssueProjection:
    """The projection of a store's issues. `root` is the directory for checkpoints, if the store is not in files."""
    files, server = store.files, store.server
    return IssueProjection(store, files.path if files else root, server.address if server else "")


def _apply(state: SummaryState, changes: Changes[Issue | Unreadable]) -> bool:
    """Apply changes. Returns whether an issue refers to one that was not seen, although it may exist by now: it has
    changed, or the other one is gone."""
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
    referring: list[Issue | IssueSummary] = [*changed, *(state.open.rows.values() if changes.removed else ())]
    missing = (on for each in referring for on in each.dependencies if state.lookup(on) is None)
    return any(on not in state.unreadable for on in missing)
