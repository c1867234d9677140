"""A store for reports about a server that may be away: after the first failure, every use fails immediately."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, Self

from holdfast.clock import SKEW
from holdfast.errors import Failure, StoreIncompatible, StoreUnavailable
from holdfast.store import model
from holdfast.store.model import Decide, Document, Family, Key, Record, Result, Store, Stream


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
    def server(self) -> Self | None:
        return None if self._store is None or self._store.server is None else self

    @property
    def address(self) -> str:
        return self._server.address

    @property
    def version(self) -> model.ServerVersion | None:
        return self._server.version

    def space(self) -> model.ServerSpace | None:
        with self._using():
            return self._server.space()

    def moved_to(self) -> str | None:
        with self._using():
            return self._server.moved_to()

    def seal(self, stream: Stream[Any]) -> None:
        with self._using():
            self._server.seal(stream)

    def transact_once(self, work: model.Attempted[Result]) -> model.Commit[Result] | None:
        with self._using():
            return self._server.transact_once(work)

    def exceeded_limit(self, changes: int) -> int | None:
        with self._using():
            return self._server.exceeded_limit(changes)

    def end(self, stream: Stream[Any]) -> int:
        with self._using():
            return self._server.end(stream)

    def unfinished_archives(self) -> dict[str, int]:
        with self._using():
            return self._server.unfinished_archives()

    def drop(self, stream: str, last: int) -> None:
        with self._using():
            self._server.drop(stream, last)

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

    def close(self) -> None:
        if self._store is not None:
            self._store.close()

    @property
    def _server(self) -> model.StoreServer:
        server = None if self._store is None else self._store.server
        assert server is not None, "`server` is None until the store is open"
        return server

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
