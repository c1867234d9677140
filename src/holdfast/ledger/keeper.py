"""The book of claims of one ledger, kept up to date: from a checkpoint on, then event by event."""

from __future__ import annotations

import threading
from collections.abc import Callable
from itertools import islice
from typing import TypeVar

from holdfast.errors import NotFound
from holdfast.ledger.claims import ClaimBook
from holdfast.ledger.events import Recorded
from holdfast.ledger.log import CHECKPOINT_EVERY, Ledger

NAME, VERSION = "claims", "1"
_AT_ONCE = 512

Answer = TypeVar("Answer")


class BookKeeper:
    """Reads each event once. Several threads may ask; a question sees a book that does not change.

    Events are never read while the book is locked: a store may hold locks of its own while it decides,
    and then ask us.
    """

    def __init__(self, ledger: Ledger) -> None:
        self._ledger = ledger
        self._lock = threading.Lock()
        self._book: ClaimBook | None = None
        self._kept = 0

    def look(self, ask: Callable[[ClaimBook], Answer], *, until: int | None = None) -> Answer:
        """What `ask` finds in the book as it is at the end, or behind the very event `until`."""
        last = self._catch_up(self._opened(until), until)
        with self._lock:
            book = self._book
            if book is not None and (until is None or book.sequence == until):
                self._keep(book, last, until)
                return ask(book)
        return ask(self._rebuilt(until))

    def at_sequence(self, sequence: int) -> ClaimBook:
        """The book as it was behind an event; `NotFound` if there is no such event yet."""
        book, _ = self._restored(sequence)
        for each in self._ledger.events(after=book.sequence, until=sequence):
            book.apply(each)
        if book.sequence != sequence:
            raise NotFound(
                f"the ledger has no event {sequence}; its last one is {book.sequence}", sequence=sequence
            )
        return book

    def _opened(self, until: int | None) -> int:
        """How far the book has come; the first time it is taken from its checkpoint."""
        with self._lock:
            if self._book is not None:
                return self._book.sequence
        book, kept = self._restored(until)
        with self._lock:
            if self._book is None:
                self._book, self._kept = book, kept
            return self._book.sequence

    def _catch_up(self, after: int, until: int | None) -> Recorded | None:
        """Take in what is new; the last event of it."""
        last: Recorded | None = None
        source = self._ledger.events(after=after, until=until)
        while chunk := list(islice(source, _AT_ONCE)):
            with self._lock:
                for each in chunk:
                    if self._book is not None and each.sequence > self._book.sequence:
                        self._book.apply(each)
            last = chunk[-1]
        return last

    def _keep(self, book: ClaimBook, last: Recorded | None, until: int | None) -> None:
        """Leave a checkpoint now and then; not in the middle of a transaction."""
        due = book.sequence - self._kept >= CHECKPOINT_EVERY
        if due and until is None and last is not None and last.sequence == book.sequence:
            self._ledger.keep(NAME, VERSION, last, book.as_record())
            self._kept = book.sequence

    def _rebuilt(self, until: int | None) -> ClaimBook:
        """The book behind `until` where ours is further: events were taken away, or came past the lock."""
        book = self.at_sequence(until or 0)
        with self._lock:
            self._book, self._kept = book, book.sequence
        return book

    def _restored(self, until: int | None) -> tuple[ClaimBook, int]:
        found = self._ledger.checkpoint(NAME, VERSION, until=until)
        book = ClaimBook.from_record(found.state, found.sequence) if found else None
        book = book or ClaimBook()
        return book, book.sequence
