"""The index: the list of issues for other programs. It is derived, so it can always be rebuilt from the issues.

Other programs read files, so only a tracker in files has an index. Elsewhere the document exists, to show that there is
a tracker, and stays empty: one document with all ids would soon be as large as a server accepts.

Up to `MOST_EXACT` issues, a transaction that creates some also lists them in the index. Writing a larger index for
every new issue would take longer and longer, so the transaction notes them beside it (`jit/unlisted`), and every
`MOST_UNLISTED` of them are moved to the index together. Deleting an issue, and rebuilding, always write an exact index.
Readers of this package read both documents (`reading.read_listing`).
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING, Any, NamedTuple

import msgspec

from holdfast.errors import Changed, NotInitialised
from holdfast.issues.model import EVENTS, INDEX, UNLISTED, Index, Issue, Unlisted, has_index
from holdfast.issues.reading import TOLERANT_INDEX, TOLERANT_ISSUES, TOLERANT_UNLISTED, by_age, look_at, read_listing
from holdfast.store.model import Key, Store, Unreadable

if TYPE_CHECKING:
    from holdfast.issues.transactions import Draft, Transactions

MOST_EXACT = 2_000
MOST_UNLISTED = 256
MOST_DELETED = 256  # how many deleted ids the index keeps, the latest


class IndexChange(NamedTuple):
    """How a transaction changes the list of issues: by the index itself, or (`whole` is false) by the note beside it,
    or not at all where no index exists.

    `gone` are noted ids without an issue: git, or a person, has removed the files.
    """

    whole: bool = True
    gone: frozenset[str] = frozenset()
    exists: bool = True

    @property
    def keys(self) -> list[Key[Any]]:
        """The documents that the transaction must name."""
        if not self.exists:
            return []
        return [TOLERANT_INDEX, TOLERANT_UNLISTED] if self.whole else [TOLERANT_UNLISTED]

    def add(self, draft: Draft, ids: Iterable[str]) -> None:
        """List new issues."""
        if not self.exists:
            return
        new, (index, unlisted) = list(ids), self._current(draft)
        if self.whole:
            self._write(draft, index, [*index.all_ids, *unlisted.ids, *new])
        else:
            draft.set(UNLISTED, msgspec.structs.replace(unlisted, ids=[*unlisted.ids, *new]))

    def remove(self, draft: Draft, issue_id: str) -> None:
        """Remove a deleted issue from the list."""
        if not self.exists:
            return
        index, unlisted = self._current(draft)
        left = (each for each in (*index.all_ids, *unlisted.ids) if each != issue_id)
        self._write(draft, msgspec.structs.replace(index, deleted_ids=[*index.deleted_ids, issue_id]), left)

    def _write(self, draft: Draft, index: Index, ids: Iterable[str]) -> None:
        index, unlisted = _exact(index, (each for each in ids if each not in self.gone))
        draft.set(INDEX, index)
        draft.set(UNLISTED, unlisted)

    def _current(self, draft: Draft) -> tuple[Index, Unlisted]:
        index = draft.view.get(TOLERANT_INDEX) if self.whole else Index()
        unlisted = draft.view.get(TOLERANT_UNLISTED) or (Unlisted() if self.whole else None)
        if not isinstance(index, Index) or not isinstance(unlisted, Unlisted):
            raise Changed("the index was damaged meanwhile")
        return index, unlisted


def plan_index_change(transactions: Transactions, *, whole: bool = False) -> IndexChange:
    """How to list new issues: unless `whole`, at a cost that does not depend on their number. First rebuilds a damaged
    index."""
    store = transactions.store
    if not has_index(store):
        found = store.read(TOLERANT_INDEX)
        if found is None or not _is_empty(found.record):
            _empty_index(transactions)
        return IndexChange(exists=False)
    noted = store.read(TOLERANT_UNLISTED)
    record = noted.record if noted else None
    if isinstance(record, Unlisted) and len(record.ids) < MOST_UNLISTED and not whole:
        return IndexChange(whole=False)
    if isinstance(record, Unreadable) or read_listing(store).problem:
        rebuild_index(transactions)
        return plan_index_change(transactions, whole=whole)
    return IndexChange(gone=frozenset(each for each in (record.ids if record else ()) if look_at(store, each) is None))


def _is_empty(index: Index | Unreadable) -> bool:
    return isinstance(index, Index) and not (index.all_ids or index.deleted_ids)


def _empty_index(transactions: Transactions) -> None:
    """Make the index the empty one of a tracker that is not in files; `NotInitialised` if there is no tracker."""
    has_issues = any(True for _ in transactions.store.scan(TOLERANT_ISSUES))

    def body(draft: Draft) -> None:
        index = draft.view.get(TOLERANT_INDEX)
        if index is None and not has_issues:
            raise NotInitialised("there is no issue tracker here")
        known = index if isinstance(index, Index) else Index()
        draft.set(INDEX, msgspec.structs.replace(known, all_ids=[], deleted_ids=[]))
        draft.set(UNLISTED, None)
        if not isinstance(index, Index):
            draft.record("index_repaired", "", entered=0, removed=0)

    transactions.change(body, also=[TOLERANT_INDEX, TOLERANT_UNLISTED])


def index_of_copy(source: Store, target: Store) -> dict[str, bytes] | None:
    """The index, and the note beside it, of a copy of the tracker, by name; None if the source's are copied as they
    are."""
    if has_index(source) is has_index(target):
        return None
    found = source.read(TOLERANT_INDEX)
    if found is None:
        return {}
    known = found.record if isinstance(found.record, Index) else Index()
    index, noted = _exact(msgspec.structs.replace(known, deleted_ids=[]), by_age(source) if has_index(target) else ())
    documents = {INDEX.name: INDEX.codec.encode(index)}
    return documents if noted is None else documents | {UNLISTED.name: UNLISTED.codec.encode(noted)}


def _exact(index: Index, ids: Iterable[str]) -> tuple[Index, Unlisted | None]:
    """The index with exactly these ids, and what is beside it: a note only if the index is large."""
    listed = list(dict.fromkeys(ids))
    present = set(listed)
    deleted = [each for each in dict.fromkeys(index.deleted_ids) if each not in present][-MOST_DELETED:]
    index = msgspec.structs.replace(index, all_ids=listed, deleted_ids=deleted)
    return index, Unlisted() if len(listed) > MOST_EXACT else None


def deleted_issues(store: Store) -> set[str]:
    """The ids that the events call deleted. Merging two git branches keeps the events of both."""
    deleted: set[str] = set()
    for entry in store.entries(EVENTS):
        if entry.record.type == "issue_deleted":
            deleted.add(entry.record.issue_id)
        elif entry.record.type == "issue_created":
            deleted.discard(entry.record.issue_id)
    return deleted


def rebuild_index(transactions: Transactions) -> None:
    """Make the index list exactly the existing issues: known ids in their order, then the others by age.

    An issue that was deleted stays deleted, even if a merge has brought back its file. Raises `NotInitialised` if there
    is neither an index nor an issue, and `Changed` if another process has rebuilt the index meanwhile. The issues are
    read without locks; what is listed meanwhile stays listed. An index that lists nothing is made empty again.
    """
    (_list_all if has_index(transactions.store) else _empty_index)(transactions)


def _list_all(transactions: Transactions) -> None:
    store = transactions.store
    before = read_listing(store)
    earlier, found, ages = set(before.ids), set[str](), dict[str, str]()
    for name, document in store.scan(TOLERANT_ISSUES):
        found.add(name)
        if isinstance(document.record, Issue) and document.record.id == name:
            ages[name] = document.record.created_at
        elif isinstance(document.record, Unreadable) and before.problem:  # otherwise it may be any stray file
            ages[name] = ""
    if not (found or before.exists):
        raise NotInitialised("there is no issue tracker here")
    by_age, deleted = sorted(ages, key=lambda each: (ages[each], each)), deleted_issues(store)

    def body(draft: Draft) -> None:
        index, noted = draft.view.get(TOLERANT_INDEX), draft.view.get(TOLERANT_UNLISTED)
        is_sound = isinstance(index, Index)
        if is_sound is bool(before.problem):
            raise Changed("the index was changed meanwhile")
        known = index if isinstance(index, Index) else Index()
        more = noted.ids if isinstance(noted, Unlisted) else []
        listed, dead = {*known.all_ids, *more}, deleted.union(known.deleted_ids)

        def belongs(issue_id: str) -> bool:
            if issue_id in listed:
                return issue_id in found or issue_id not in earlier
            return issue_id not in earlier and issue_id not in dead

        order = [*known.all_ids, *more, *by_age] if is_sound else [*by_age, *more]
        ids = dict.fromkeys(filter(belongs, order))
        back = sorted((found & deleted).difference(ids))  # files that a merge has brought back
        exact = _exact(msgspec.structs.replace(known, deleted_ids=[*known.deleted_ids, *back]), ids)
        if exact != (index, noted):
            draft.set(INDEX, exact[0])
            draft.set(UNLISTED, exact[1])
            draft.record("index_repaired", "", entered=len(ids.keys() - listed), removed=len(listed.difference(ids)))

    transactions.change(body, also=[TOLERANT_INDEX, TOLERANT_UNLISTED])
