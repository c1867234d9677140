"""The store in memory, which is the model, keeps the contract."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator
from typing import Any
from unittest import mock

from holdfast.errors import OutcomeUnknown
from holdfast.store.memory import MemoryStore
from holdfast.store.model import Commit, Key, Store
from holdfast.testing import Backend, StoreContract, When
from proof.effort import rounds
from proof.model import StoreSubject, run_state_machine


class MemoryBackend(Backend):
    """Runs the contract on the store in memory. All clients are the same object."""

    def seconds(self) -> float:
        return time.process_time()

    def open_store(self) -> MemoryStore:
        return MemoryStore()

    def reopen(self, store: Store) -> Store:
        return store

    @contextlib.contextmanager
    def losing_answers(self, store: Store, when: When) -> Iterator[None]:
        transact = store.transact

        def lose(*arguments: Any, commit_id: str, **rest: Any) -> Commit[Any]:
            if when == "after":
                transact(*arguments, commit_id=commit_id, **rest)
            raise OutcomeUnknown(commit_id, "the answer was lost")

        with mock.patch.object(store, "transact", lose):
            yield

    def damage(self, store: Store, key: Key[Any], content: bytes) -> None:
        assert isinstance(store, MemoryStore)
        store._documents[key.name] = content, -1

    def stored(self, store: Store, key: Key[Any]) -> bytes:
        assert isinstance(store, MemoryStore)
        return store._documents[key.name][0]


class TestMemoryStore(MemoryBackend, StoreContract):
    many = rounds(100_000, least=500)


def test_the_comparison_of_the_model_with_itself_finds_nothing() -> None:
    def fresh() -> StoreSubject:
        store = MemoryStore()
        return StoreSubject(store, lambda: store)

    run_state_machine(fresh, examples=rounds(20, least=5))
