"""Reading the audit trail: what is there, whether the chain holds, and what is added to it."""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

from holdfast.audit.chain import START, AuditEntry, AuditTrail, verify
from holdfast.errors import AuditChainBroken, Corrupt
from holdfast.store.base import Store
from holdfast.store.records import Entry


class ChainEnd(NamedTuple):
    """How far a chain was followed: so many entries, and the hash of the last, to be noted elsewhere."""

    entries: int
    hash: str


class Reader:
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
    reader = Reader(store, trail, verified=True)
    for _ in reader.read():
        pass
    return reader.end
