"""What a backend's test file gives to the contract."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator
from contextlib import AbstractContextManager
from functools import partial
from typing import Any, ClassVar, Literal

import pytest

from holdfast.store.model import Key, Store
from holdfast.testing.contract_clients import Recipe, Task, run_processes, run_threads

When = Literal["before", "after"]


class Backend:
    """What a backend fills in."""

    many: ClassVar[int] = 100_000
    """How many documents "many" are."""
    many_within: ClassVar[float] = 60.0
    """In how many seconds they are created, found, read and changed."""

    def seconds(self) -> float:
        """The clock for that. A store that does all its work in this process may take its CPU time."""
        return time.monotonic()

    def open_store(self) -> Store:
        """A store on fresh state."""
        raise NotImplementedError

    def reopen(self, store: Store) -> Store:
        """A second client of the same state."""
        raise NotImplementedError

    def process_target(self, store: Store) -> Recipe | None:
        """How another process opens the same state; None if none can, and threads are to do."""
        return None

    def losing_answers(self, store: Store, when: When) -> AbstractContextManager[None]:
        """Within, the answer to the next commit gets lost: before the commit was made, or after."""
        raise NotImplementedError

    def damage(self, store: Store, key: Key[Any], content: bytes) -> None:
        """Put this content in the place of a document, past the store."""
        raise NotImplementedError

    def stored(self, store: Store, key: Key[Any]) -> bytes:
        """What is stored in the place of a document."""
        raise NotImplementedError

    def disturbed(self) -> AbstractContextManager[None]:
        """Within, things take a little longer now and then, at the moments at which it hurts most."""
        return contextlib.nullcontext()

    def close(self, store: Store) -> None:
        """Let go of a store."""
        close = getattr(store, "close", None)
        if close is not None:
            close()

    # --- What the contract makes of it ----------------------------------------------------------------

    @pytest.fixture
    def store(self) -> Iterator[Store]:
        """The store of one test."""
        store = self.open_store()
        yield store
        self.close(store)

    @contextlib.contextmanager
    def client(self, store: Store) -> Iterator[Store]:
        """A second client for a while."""
        second = self.reopen(store)
        try:
            yield second
        finally:
            self.close(second)

    @contextlib.contextmanager
    def clients(self, store: Store, count: int) -> Iterator[list[Store]]:
        """Several more clients for a while."""
        with contextlib.ExitStack() as opened:
            yield [opened.enter_context(self.client(store)) for _ in range(count)]

    def elsewhere(self, store: Store, *tasks: Task) -> list[Any]:
        """Let each task run in another process, or in a thread if other processes cannot open the store."""
        recipe = self.process_target(store)
        if recipe is not None:
            return run_processes(recipe, *tasks)
        with self.clients(store, len(tasks)) as clients:
            return run_threads(
                *(partial(task.do, each, *task.arguments) for task, each in zip(tasks, clients, strict=True))
            )
