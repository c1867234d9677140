"""A store for reports about a server that may be away: after the first failure, every use fails immediately."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

from holdfast.clock import SKEW
from holdfast.errors import Failure, StoreIncompatible, StoreUnavailable
from holdfast.store import model
from holdfast.store.model import Decide, Document, Family, Key, Record, Result, Store, Stream
from holdfast.store.served import ServedStore


class FailFastStore:
    """A store that is opened at its first use. Once the server has failed, every use raises this failure, `trouble`."""

    files = None

    def __init__(self, open_it: Callable[[], Store]) -> None:
        self._open_it = open_it
        self._store: Store | None = None
        self.trouble: Failure | None = None

    @property
    def skew(self) -> float:
        return SKEW if self._store is None else self._store.skew

    @property
    def server(self) -> model.ServerVersion | None:
        return None if self._store is None else self._store.server

    @property
    def opened(self) -> Store | None:
        """The store, if it was used already."""
        return self._store

    def read(self, key: Key[Record]) -> Document[Record] | None:
        with self._using() as store:
            return store.read(key)

    def read_together(self, keys: Sequence[Key[Any]]) -> model.View:
        with self._using() as store:
            return store.read_together(keys)

    def read_each(self, keys: Sequence[Key[Any]]) -> model.View:
        with self._using() as store:
            return store.read_each(keys)

    def changes(self, family: Family[Record], cursor: bytes = b"") -> model.Changes[Record]:
        with self._using() as store:
            return store.changes(family, cursor)

    def scan(self, family: Family[Record], *, after: str = "") -> Iterator[tuple[str, Document[Record]]]:
        with self._using() as store:
            yield from store.scan(family, after=after)

    def entries(self, stream: Stream[Record], *, after: int = 0) -> Iterator[model.Entry[Record]]:
        with self._using() as store:
            yield from store.entries(stream, after=after)

    def transact(
        self, keys: Iterable[Key[Any] | Stream[Any]], decide: Decide[Result], *, commit_id: str | None = None
    ) -> model.Commit[Result]:
        with self._using() as store:
            return store.transact(keys, decide, commit_id=commit_id)

    def set_moved(self, target: str | None) -> None:
        with self._using() as store:
            store.set_moved(target)

    def watch(self, what: model.Watched) -> model.Watch:
        with self._using() as store:
            return store.watch(what)

    def now(self) -> float:
        with self._using() as store:
            return store.now()

    def moved_to(self) -> str | None:
        with self._using() as store:
            return store.moved_to() if isinstance(store, ServedStore) else None

    def space(self) -> model.ServerSpace | None:
        with self._using() as store:
            return store.space() if isinstance(store, ServedStore) else None

    def close(self) -> None:
        if self._store is not None:
            self._store.close()

    @contextlib.contextmanager
    def _using(self) -> Iterator[Store]:
        if self.trouble is not None:
            raise self.trouble.with_traceback(None)
        try:
            if self._store is None:
                self._store = self._open_it()
            yield self._store
        except Failure as failure:
            if self._store is None or isinstance(failure, StoreUnavailable | StoreIncompatible):
                self.trouble = failure
            raise
