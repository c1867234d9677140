"""A store that may be away, for those who want to look at what there is all the same.

Once it could not be used it is not asked again: everything raises that first failure, at once. So whoever
asks twenty questions of a server that is away waits once, not twenty times, and can tell which of them were
left without an answer for this reason: those that raised `trouble`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, TypeVar

from holdfast.errors import Failure, StoreIncompatible, StoreUnavailable
from holdfast.store.base import Decide, Store, Watch, Watched
from holdfast.store.records import (
    Commit,
    Document,
    Entry,
    Family,
    Key,
    Record,
    Result,
    Stream,
    View,
)

Answer = TypeVar("Answer")


class FailingFast:
    """A store that `open_it` opens when it is first asked. `trouble` is why it cannot be used, or None."""

    def __init__(self, open_it: Callable[[], Store]) -> None:
        self._open_it = open_it
        self._store: Store | None = None
        self.trouble: Failure | None = None

    def read(self, key: Key[Record]) -> Document[Record] | None:
        return self._ask(lambda store: store.read(key))

    def read_together(self, keys: Sequence[Key[Any]]) -> View:
        return self._ask(lambda store: store.read_together(keys))

    def scan(self, family: Family[Record]) -> Iterator[tuple[str, Document[Record]]]:
        return self._each(lambda store: store.scan(family))

    def entries(self, stream: Stream[Record], *, after: int = 0) -> Iterator[Entry[Record]]:
        return self._each(lambda store: store.entries(stream, after=after))

    def transact(
        self,
        keys: Iterable[Key[Any] | Stream[Any]],
        decide: Decide[Result],
        *,
        commit_id: str | None = None,
    ) -> Commit[Result]:
        return self._ask(lambda store: store.transact(keys, decide, commit_id=commit_id))

    def watch(self, what: Watched) -> Watch:
        return self._ask(lambda store: store.watch(what))

    def now(self) -> float:
        return self._ask(lambda store: store.now())

    def close(self) -> None:
        """Let go of the store, if it was ever opened."""
        close = getattr(self._store, "close", None)
        if close is not None:
            close()

    def _ask(self, question: Callable[[Store], Answer]) -> Answer:
        store = self._opened()
        try:
            return question(store)
        except (StoreUnavailable, StoreIncompatible) as failure:
            self.trouble = failure
            raise

    def _each(self, question: Callable[[Store], Iterator[Answer]]) -> Iterator[Answer]:
        store = self._opened()
        try:
            yield from question(store)
        except (StoreUnavailable, StoreIncompatible) as failure:
            self.trouble = failure
            raise

    def _opened(self) -> Store:
        if self.trouble is not None:
            raise self.trouble.with_traceback(None)
        if self._store is None:
            try:
                self._store = self._open_it()
            except Failure as failure:
                self.trouble = failure
                raise
        return self._store
