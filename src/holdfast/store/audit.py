"""The audit trail: a stream in which each entry carries the hash of the previous one.

An entry is appended in the transaction that it records, so there is no change without its entry and no entry
without its change. Altering, removing or reordering entries breaks the chain, and `verify` reports where. The same
transaction copies the last entry to the head of the stream. So a trail that was emptied, or cut at the end, is noticed
too, and the next entry continues from the head, which keeps the gap visible. A damaged head is reported until the next
entry replaces it.

On a server, an entry is loose at first: a separate record, written by the transaction that it records. Readers and,
every few commits, writers seal loose entries: one transaction gives them their numbers and hashes, in the order of
their commits, and moves them to the end of the chain. So unrelated commits do not wait for each other (decision 0018).
The first entries may be archived there (`archive`): the chain then continues from the number and hash of the last one.
Rewriting both the trail and its head goes unnoticed: compare the last hash with one noted elsewhere.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import msgspec

from holdfast.clock import format_instant
from holdfast.errors import Archived, AuditChainBroken, Corrupt
from holdfast.store.archive import Archivable, Archive, archive_of, read_segments
from holdfast.store.model import Append, Document, Entry, Instant, Key, Store, Stream, StructCodec, View, not_understood
from holdfast.store.served import ServedStore

START = "0" * 64  # the previous hash of the first entry


class AuditEntry(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """One recorded event. `number` counts from 1; `hash` covers all other fields."""

    number: int
    at: Instant
    event: str
    actor: str
    facts: dict[str, object]
    previous: str
    hash: str = ""


DAMAGED = AuditEntry(0, "", "", "", {}, "")
"""The placeholder for a head that cannot be decoded."""


class _HeadCodec(StructCodec[AuditEntry]):
    """Decodes a damaged head as `DAMAGED`: it must not block new entries, the next of which replaces it."""

    def decode(self, content: bytes, source: str) -> AuditEntry:
        try:
            return super().decode(content, source)
        except Corrupt:
            return DAMAGED


class AuditTrail:
    """The audit trail of one repository."""

    def __init__(self, name: str = "jvs/audit") -> None:
        self.head: Key[AuditEntry] = Key(f"{name}-head", _HeadCodec(AuditEntry, pretty=False))
        self.stream: Stream[AuditEntry] = Stream(
            name, StructCodec(AuditEntry, pretty=False), head=self.head, chain=self._chain
        )

    def entry(self, view: View, now: float, event: str, *, actor: str, facts: Mapping[str, object]) -> Append:
        """The change that records an event. Pure; the transaction must name the stream."""
        entry = AuditEntry(0, format_instant(now), event, actor, dict(facts), "")
        return Append(self.stream, entry if view.is_loose(self.stream) else _after(self._end(view), entry))

    def _chain(self, view: View, loose: Sequence[AuditEntry]) -> list[Append]:
        """The changes that seal loose entries after the last entry. Pure."""
        end, sealed = self._end(view), list[Append]()
        for each in loose:
            end = _after(end, each)
            sealed.append(Append(self.stream, end))
        return sealed

    def _end(self, view: View) -> AuditEntry | None:
        """The last entry ever written, even if the trail no longer has it."""
        last, head = view.last(self.stream), view.get(self.head)
        if last is None or (head is not None and head.number > last.record.number):
            return head
        return last.record


def _after(end: AuditEntry | None, entry: AuditEntry) -> AuditEntry:
    """The entry, numbered and hashed as the successor of `end`."""
    number, previous = (1, START) if end is None else (end.number + 1, end.hash)
    chained = msgspec.structs.replace(entry, number=number, previous=previous)
    return msgspec.structs.replace(chained, hash=_hash(chained))


def _hash(entry: AuditEntry) -> str:
    bare = msgspec.structs.replace(entry, hash="")
    return hashlib.sha256(msgspec.json.encode(bare, order="sorted")).hexdigest()


class ChainEnd(NamedTuple):
    """The end of a chain: the number of entries and the last hash, which can be noted elsewhere."""

    entries: int = 0
    hash: str = START


def verify(entries: Iterable[Entry[AuditEntry]], *, after: ChainEnd | None = None) -> Iterator[AuditEntry]:
    """Yield the entries that follow `after` (None: the start); `AuditChainBroken` at a break in the chain."""
    number, previous = after or ChainEnd()
    for position, entry in entries:
        problem = ""
        if entry.number != number + 1:
            problem = f"entry {entry.number} follows entry {number}"
        elif entry.previous != previous:
            problem = f"entry {entry.number} does not have the hash of the previous entry"
        elif entry.hash != _hash(entry):
            problem = f"entry {entry.number} was changed after it was written"
        if problem:
            raise AuditChainBroken(problem, number=number + 1, position=position)
        number, previous = entry.number, entry.hash
        yield entry


class AuditReader:
    """Reads a trail from the beginning, or after its archived entries; then only new entries. With `verified`, checks
    the chain. Without it, a store on a server may skip all but the `last` entries. `archived` is the number of the last
    entry that was not read because it is archived."""

    def __init__(self, store: Store, trail: AuditTrail, *, verified: bool = False, last: int | None = None) -> None:
        self._store = store
        self._stream = trail.stream
        self._head = trail.head
        self._verified = verified
        self._position = 0
        self.end = ChainEnd()  # of the entries read so far
        self.archived = 0
        if isinstance(store, ServedStore) and last is not None and not verified:
            store.seal(self._stream)
            self._position = max(0, store.end(self._stream) - last)

    def read(self) -> Iterator[AuditEntry]:
        """The entries not read yet, up to the current end.

        `AuditChainBroken` at the first entry that breaks the chain or cannot be decoded, and at the end if the last
        entries are missing. A last line without a newline was torn by a crash and never acknowledged: it is ignored.
        """
        head = self._store.read(self._head) if self._verified else None  # before the entries, which only grow
        while True:
            try:
                yield from self._read(head)
                return
            except Archived as archived:
                self._position, self.end = archive_end(archived.archive)
                self.archived = self.end.entries

    def _read(self, head: Document[AuditEntry] | None) -> Iterator[AuditEntry]:
        entries = self._track(self._store.entries(self._stream, after=self._position))
        try:
            unverified = (each.record for each in entries)
            for entry in verify(entries, after=self.end) if self._verified else unverified:
                self.end = ChainEnd(entry.number, entry.hash)
                if head is not None and entry.number == head.record.number and entry.hash != head.record.hash:
                    message = f"entry {entry.number} is not the one that was written"
                    raise AuditChainBroken(message, number=entry.number, position=self._position)
                yield entry
            message = ""
            if head is not None and head.record == DAMAGED:
                message = "the copy of the last entry cannot be understood"
            elif head is not None and self.end.entries < head.record.number:
                message = f"the trail ends with entry {self.end.entries}, but entry {head.record.number} was written"
            if message:
                raise AuditChainBroken(message, number=self.end.entries + 1, position=self._position)
        except AuditChainBroken:
            raise
        except Corrupt as failure:
            raise AuditChainBroken(
                f"the line after entry {self.end.entries} cannot be understood: {failure.message}",
                number=self.end.entries + 1,
                position=self._position,
            ) from failure

    def _track(self, entries: Iterator[Entry[AuditEntry]]) -> Iterator[Entry[AuditEntry]]:
        for entry in entries:
            self._position = entry.position
            yield entry


class ArchivedChain:
    """The end of the chain after the archived entries, which are verified before they are archived."""

    def __init__(self, archive: Archive | None) -> None:
        self.end = ChainEnd() if archive is None else archive_end(archive)[1]

    def add(self, entry: Entry[AuditEntry]) -> None:
        for each in verify([entry], after=self.end):
            self.end = ChainEnd(each.number, each.hash)

    def as_record(self) -> dict[str, Any]:
        return {"chain": list(self.end)}


def archive_end(archive: object) -> tuple[int, ChainEnd]:
    """The last archived position, and the end of the chain there."""
    assert isinstance(archive, Archive)
    try:
        return archive.last, msgspec.convert(archive.state.get("chain"), ChainEnd)
    except msgspec.ValidationError as error:
        raise not_understood("the archive of the audit trail", str(error)) from None


def archivable(trail: AuditTrail) -> Archivable[AuditEntry]:
    """How the trail is archived: in the lines that it has in files."""

    def line(entry: Entry[AuditEntry]) -> bytes:
        return trail.stream.codec.encode(entry.record)

    return Archivable(trail.stream, "audit", line, lambda entry: entry.at, ArchivedChain)


def check_segments(store: Store, trail: AuditTrail, files: Sequence[Path]) -> ChainEnd:
    """Verify the archived segments, their chain, and that the entries in the store continue it."""
    archive, codec = archive_of(store, trail.stream.name), trail.stream.codec
    chain = ArchivedChain(None)
    for number, line in enumerate(read_segments(archive, files), 1):
        chain.add(Entry(number, codec.decode(line, f"archived entry {number}")))
    if archive is not None and chain.as_record() != archive.state:
        message = f"the archived entries end with the hash {chain.end.hash}, but the next entry continues another"
        raise AuditChainBroken(message, number=chain.end.entries + 1, position=archive.last)
    return chain.end


def check_chain(store: Store, trail: AuditTrail) -> ChainEnd:
    """Verify the whole chain that is not archived; `AuditChainBroken` names the first break."""
    reader = AuditReader(store, trail, verified=True)
    for _ in reader.read():
        pass
    return reader.end
