"""The audit trail: a stream of which each entry carries the hash of the one before it.

An entry is appended in the transaction that it tells about, so there is no change without its entry
and no entry without its change. Altering, removing or reordering entries breaks the chain from there
on; `verify` names the place. (Cutting off the end, or writing the whole chain anew, does not show:
compare the last hash with one that was noted elsewhere.)
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Iterator, Mapping

import msgspec

from holdfast.clock import format_instant
from holdfast.errors import AuditChainBroken
from holdfast.store.records import Append, Entry, Stream, StructCodec, View

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
