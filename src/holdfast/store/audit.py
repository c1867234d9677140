"""The audit trail: a stream of which each entry carries the hash of the one before it.

An entry is appended in the transaction that it tells about, so there is no change without its entry
and no entry without its change. Altering, removing or reordering entries breaks the chain from there
on; `verify` names the place. (Cutting off the end, or writing the whole chain anew, does not show:
compare the last hash with one that was noted elsewhere.)
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Iterator, Mapping
from typing import NamedTuple

import msgspec

from holdfast.clock import format_instant
from holdfast.errors import AuditChainBroken, Corrupt
from holdfast.store.model import Append, Entry, Store, Stream, StructCodec, View

START = "0" * 64
"""What the first entry has in the place of the hash of the one before it."""


class AuditEntry(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """One thing that was done. `number` counts from 1; `hash` covers all other fields."""

    number: int
    at: str
    event: str
    actor: str
    facts: dict[str, object]
    previous: str
    hash: str = ""


class AuditTrail:
    """The audit trail of one repository."""

    def __init__(self, name: str = "jvs/audit") -> None:
        self.stream: Stream[AuditEntry] = Stream(name, StructCodec(AuditEntry, pretty=False))

    def entry(self, view: View, now: float, event: str, *, actor: str, facts: Mapping[str, object]) -> Append:
        """The change that records an event; the transaction must name the stream. Pure."""
        last = view.last(self.stream)
        number, previous = (1, START) if last is None else (last.record.number + 1, last.record.hash)
        entry = AuditEntry(number, format_instant(now), event, actor, dict(facts), previous)
        return Append(self.stream, msgspec.structs.replace(entry, hash=hash_of(entry)))


def hash_of(entry: AuditEntry) -> str:
    """The hash that belongs into an entry: over everything but itself, keys in order."""
    bare = msgspec.structs.replace(entry, hash="")
    return hashlib.sha256(msgspec.json.encode(bare, order="sorted")).hexdigest()


def verify(entries: Iterable[Entry[AuditEntry]], *, after: AuditEntry | None = None) -> Iterator[AuditEntry]:
    """Give the entries on as long as they follow from each other; raise at the first that does not.

    They are those from the first on, or those behind `after`.
    """
    number, previous = (0, START) if after is None else (after.number, after.hash)
    for position, entry in entries:
        problem = ""
        if entry.number != number + 1:
            problem = f"entry {entry.number} follows entry {number}"
        elif entry.previous != previous:
            problem = f"entry {entry.number} does not follow from the one before it"
        elif entry.hash != hash_of(entry):
            problem = f"entry {entry.number} was changed after it was written"
        if problem:
            raise AuditChainBroken(problem, number=number + 1, position=position)
        number, previous = entry.number, entry.hash
        yield entry


class ChainEnd(NamedTuple):
    """How far a chain was followed: so many entries, and the hash of the last, to be noted elsewhere."""

    entries: int
    hash: str


class AuditReader:
    """Reads one trail from its beginning, then what is new. With `verified`, each entry is checked."""

    def __init__(self, store: Store, trail: AuditTrail, *, verified: bool = False) -> None:
        self._store = store
        self._stream = trail.stream
        self._verified = verified
        self._position = 0
        self._last: AuditEntry | None = None

    @property
    def end(self) -> ChainEnd:
        """Where the reader is."""
        return ChainEnd(0, START) if self._last is None else ChainEnd(self._last.number, self._last.hash)

    def read(self) -> Iterator[AuditEntry]:
        """The entries that have not been read yet, up to the end as of now.

        `AuditChainBroken` at the first entry that does not follow, or that cannot be understood. What
        follows the last line break was torn by a crash: it was never acknowledged, and is left out.
        """
        after = self._last
        entries = self._noted(self._store.entries(self._stream, after=self._position))
        try:
            bare = (each.record for each in entries)
            for entry in verify(entries, after=after) if self._verified else bare:
                self._last = entry
                yield entry
        except AuditChainBroken:
            raise
        except Corrupt as failure:
            raise AuditChainBroken(
                f"what follows entry {self.end.entries} cannot be understood: {failure.message}",
                number=self.end.entries + 1,
                position=self._position,
            ) from failure

    def _noted(self, entries: Iterator[Entry[AuditEntry]]) -> Iterator[Entry[AuditEntry]]:
        for entry in entries:
            self._position = entry.position
            yield entry


def check_chain(store: Store, trail: AuditTrail) -> ChainEnd:
    """Follow the whole chain; `AuditChainBroken` names the place where it does not hold."""
    reader = AuditReader(store, trail, verified=True)
    for _ in reader.read():
        pass
    return reader.end
