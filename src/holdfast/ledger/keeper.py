"""The book of claims of one ledger, kept up to date: from a checkpoint on, then event by event."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import TypeVar

from holdfast.errors import NotFound
from holdfast.ledger.claims import ClaimBook
from holdfast.ledger.events import Recorded
from holdfast.ledger.log import CHECKPOINT_EVERY, Ledger

NAME, VERSION = "claims", "1"

Answer = TypeVar("Answer")


class BookKeeper:
    """Reads each event once. Several threads may ask; a question sees a book that does not change."""

    def __init__(self, ledger: Ledger) -> None:
        self._ledger = ledger
        self._lock = threading.Lock()
        self._book: ClaimBook | None = None
        self._kept = 0

    def look(self, ask: Callable[[ClaimBook], Answer], *, until: int | None = None) -> Answer:
        """What `ask` finds in the book as it is at the end, or behind the event `until`."""
        with self._lock:
            return ask(self._caught_up(until))

    def at_sequence(self, sequence: int) -> ClaimBook:
        """The book as it was behind an event; `NotFound` if there is no such event yet."""
        book = self._restored(sequence)
        for each in self._ledger.events(after=book.sequence, until=sequence):
            book.apply(each)
        if book.sequence != sequence:
            raise NotFound(
                f"the ledger has no event {sequence}; its last one is {book.sequence}", sequence=sequence
            )
        return book

    def _caught_up(self, until: int | None) -> ClaimBook:
        book = self._book
        if book is None or (
            until is not None and book.sequence > until
        ):  # new here; or events were taken away
            book = self._restored(until)
        self._book = book
        last: Recorded | None = None
        for each in self._ledger.events(after=book.sequence, until=until):
            book.apply(each)
            last = each
        if last is not None and until is None and book.sequence - self._kept >= CHECKPOINT_EVERY:
            self._ledger.keep(NAME, VERSION, last, book.as_record())
            self._kept = book.sequence
        return book

    def _restored(self, until: int | None) -> ClaimBook:
        found = self._ledger.checkpoint(NAME, VERSION, until=until)
        book = ClaimBook.from_record(found.state, found.sequence) if found else None
        book = book or ClaimBook()
        self._kept = book.sequence
        return book
