"""Migration from one store to another: copies every row of the layout byte for byte, except the index of issues, which
only files have.

1. Refuse if a lease is held: its holder would continue to write to the abandoned store.
2. Copy the differences in small commits. The target must contain a prefix of the source, so an interrupted
   migration continues, and no foreign content is overwritten.
3. Read both again and compare. If the source has changed meanwhile, repeat from 2.
4. Mark the source as moved: from here on, it refuses every commit of a process that still uses it, and names the
   target. Repeat 1 and 3; if that fails, take the mark back.
5. Switch: the directory is configured to use the target.

After a kill between 4 and 5, the source says that it was moved, and the migration can be repeated.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial
from itertools import zip_longest
from typing import TYPE_CHECKING, Any, NamedTuple

from holdfast.errors import Corrupt, Failure, Refused, TooManyRetries
from holdfast.fs import strictjson
from holdfast.issues.index import index_of_copy
from holdfast.issues.model import EVENTS, INDEX, UNLISTED
from holdfast.leases.service import LeaseService
from holdfast.repository.context import FORMAT, has_several_clones
from holdfast.store import model
from holdfast.store.archive import ARCHIVES, archive_of
from holdfast.store.audit import AuditTrail
from holdfast.store.content import POSTGRES
from holdfast.store.layout import TABLE, Kind, Row
from holdfast.store.model import Append, Change, Decision, Delete, Family, Key, Replace, Store, Stream

if TYPE_CHECKING:
    from holdfast.trees.scan import Progress

MOST_CHANGES = 40  # each may also need two changes of the queue of issues
MOST_AT_ONCE = 512 << 10  # the largest commit that every server accepts; a larger record goes alone

PASSES = 5


class RawCodec:
    """Passes strict JSON through as bytes, without the final line break, in which stores may differ."""

    def encode(self, record: bytes) -> bytes:
        return record

    def decode(self, content: bytes, source: str) -> bytes:
        content = content.removesuffix(b"\n")
        strictjson.decode(content, source=source, limit=len(content))  # an index may be large
        return content


_RAW = RawCodec()
_LEASES = frozenset(["jvs/leases/{name}", "jvs/named-leases/{name}"])


class Moved(NamedTuple):
    """The numbers of documents and records, of those that were copied, and of passes."""

    documents: int
    records: int
    copied_documents: int
    copied_records: int
    passes: int


class _Pass:
    """One walk over both stores."""

    def __init__(self, source: Store, target: Store, written: set[str], *, dry_run: bool, overwrite: bool) -> None:
        self._source, self._target, self._written = source, target, written
        self._dry_run, self._overwrite = dry_run, overwrite
        self.documents = self.records = self.copied_documents = self.copied_records = 0

    def documents_of(self, row: Row) -> None:
        changes: list[Change] = []
        source, target = self._wanted(row), _contents(self._target, row)
        self.documents += len(source)
        for name in sorted(source.keys() | target.keys()):
            if source.get(name) == target.get(name):
                continue
            if name in target and not (self._overwrite or name in self._written):
                raise _foreign(name)
            self._written.add(name)
            self.copied_documents += 1
            key = Key(name, _RAW)
            if name not in source:
                changes.append(Delete(key))
            else:
                changes.append((Replace if name in target else model.Create)(key, source[name]))
        self._apply(changes)

    def _wanted(self, row: Row) -> dict[str, bytes]:
        """The documents of a row that the target should have: the source's, except that only files have an index."""
        found = _contents(self._source, row)
        if row.key in (INDEX.name, UNLISTED.name):
            derived = index_of_copy(self._source, self._target)
            if derived is not None:
                return {name: content for name, content in derived.items() if name == row.key}
        return found

    def records_of(self, row: Row) -> None:
        stream: Stream[bytes] = Stream(row.key, _RAW)
        pairs = zip_longest(self._source.entries(stream), self._target.entries(stream))
        self._apply(self._missing(stream, pairs))

    def _missing(
        self, stream: Stream[bytes], pairs: Iterable[tuple[model.Entry[bytes] | None, model.Entry[bytes] | None]]
    ) -> Iterator[Append]:
        for mine, other in pairs:
            self.records += mine is not None
            if other is None and mine is not None:
                self.copied_records += 1
                yield Append(stream, mine.record)
            elif mine is None or other is None or mine.record != other.record:
                raise _foreign(stream.name)

    def _apply(self, changes: Iterable[Change]) -> None:
        batch: list[Change] = []
        size = 0
        for change in changes:
            more = 0 if isinstance(change, Delete) else len(change.record)  # type: ignore[arg-type]
            if batch and (len(batch) >= MOST_CHANGES or size + more > MOST_AT_ONCE):
                self._commit(batch)
                batch, size = [], 0
            batch.append(change)
            size += more
        self._commit(batch)

    def _commit(self, changes: Sequence[Change]) -> None:
        if changes and not self._dry_run:
            named = [each.stream if isinstance(each, Append) else each.key for each in changes]
            self._target.transact(named, lambda view, now: Decision(tuple(changes), None))


def migrate(
    source: Store,
    target: Store,
    *,
    rows: Sequence[Row] = TABLE,
    dry_run: bool = False,
    overwrite: bool = False,
    progress: Progress | None = None,
    address: str | None = None,
    switch: Callable[[], object] = lambda: None,
) -> Moved:
    """Copy everything, and verify the copy. A dry run writes nothing, but makes the same checks. With the `address` of
    the target, the source then refuses further commits, and `switch` is called.

    With `overwrite`, documents of the target, such as an older copy of the source, are replaced. Its streams must
    still be a prefix of the source's.
    """
    _refuse_files_of_one(source, target)
    _refuse_archived(source)
    _refuse_archived(target)
    copy = partial(_copy, source, target, rows, overwrite=overwrite, progress=progress)
    tried = copy(set(), dry_run=True)
    if dry_run:
        return tried
    copy = partial(copy, total=tried.documents + tried.records)
    target.set_moved(None)  # if it was migrated from, its users have ended long ago
    written: set[str] = set()
    moved = copy(written, dry_run=False)
    if address is None:
        return moved
    try:
        source.set_moved(address)  # 4.
        last = copy(written, dry_run=False)
        switch()  # 5.
    except Failure:
        source.set_moved(None)
        raise
    copied = moved.copied_documents + last.copied_documents, moved.copied_records + last.copied_records
    return Moved(last.documents, last.records, *copied, moved.passes + last.passes)


def _copy(
    source: Store,
    target: Store,
    rows: Sequence[Row],
    written: set[str],
    *,
    dry_run: bool,
    overwrite: bool,
    progress: Progress | None,
    total: int = 0,
) -> Moved:
    _refuse_held_leases(source, rows)  # 1.
    copied_documents = copied_records = 0
    for number in range(1, PASSES + 1):
        if source.server is not None and not dry_run:
            source.server.seal(AuditTrail().stream)
            source.server.seal(EVENTS)
        current = _Pass(source, target, written, dry_run=dry_run, overwrite=overwrite)
        for row in rows:  # 2. and 3.: a pass that finds nothing to copy is the proof
            if row.kind is Kind.DOCUMENT:
                current.documents_of(row)
            else:
                current.records_of(row)
            if progress is not None:
                progress(current.documents + current.records, total)
        copied_documents += current.copied_documents
        copied_records += current.copied_records
        if dry_run or not (current.copied_documents or current.copied_records):
            return Moved(current.documents, current.records, copied_documents, copied_records, number)
    raise TooManyRetries(PASSES, Refused("the source changes faster than it can be copied"))


def _refuse_held_leases(store: Store, rows: Sequence[Row]) -> None:
    if not any(row.key in _LEASES for row in rows):
        return
    leases = LeaseService(store, AuditTrail())
    for service in (leases, leases.of_names()):
        for state in service.states():
            if not state.expired:
                subject, holder_id = state.lease.subject, state.lease.holder_id
                raise Refused(
                    f"{subject} is leased by {holder_id}: a store in use cannot be migrated",
                    hint="Wait until the lease is released or expires, and stop all users of the repository.",
                    holder_id=holder_id,
                    **service.keys(subject).facts(),
                )


def _refuse_files_of_one(source: Store, target: Store) -> None:
    """Refuse to move records that several clones share to files, which only one of them could read, or away from the
    server that has the content of their snapshots."""
    several, content = False, None
    with contextlib.suppress(Corrupt):  # the copy reports it
        known = source.read(FORMAT)
        content = known.record.content if known else None
        several = target.files is not None and has_several_clones(source)
    if several:
        hint = "Let all clones but 'main' leave first ('holdfast deinit'), or move to another server."
        raise Refused("several clones share this repository, so its records must be on a server", hint=hint)
    if content and (content == POSTGRES or target.files is not None):
        hint = "To move both to another server of the same kind, use the server's own tools, such as pg_dump."
        raise Refused(f"the content of snapshots is in {content}, which needs records on this server", hint=hint)


def _refuse_archived(store: Store) -> None:
    """Refuse a store without the beginning of a stream: the copy would give other numbers to the rest."""
    for stream in ARCHIVES:
        if (archive := archive_of(store, stream)) is not None:
            message = f"the records of {stream} up to {archive.last} are archived: this store cannot be migrated"
            hint = "To move it to another server of its kind, use the server's own backup and restore."
            raise Refused(message, hint=hint, stream=stream, archived=archive.last)


def _contents(store: Store, row: Row) -> dict[str, bytes]:
    """All documents of a row, by name."""
    if "{name}" not in row.key:
        document: Any = store.read(Key(row.key, _RAW))
        return {} if document is None else {row.key: document.record}
    family = Family(row.key.removesuffix("/{name}"), _RAW)
    return {f"{family.name}/{name}": document.record for name, document in store.scan(family)}


def _foreign(name: str) -> Refused:
    return Refused(
        f"the target has other content under {name}: it is not a copy of this store",
        hint="Choose an empty target: another schema or prefix; for an older copy: --overwrite.",
        key=name,
    )
