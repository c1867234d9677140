"""The etcd store keeps the contract on a real server, and behaves like the model."""

from __future__ import annotations

import contextlib
import random
import time
from collections.abc import Iterator
from functools import partial
from itertools import count
from typing import Any
from unittest import mock

import pytest

from holdfast.store.etcd import EtcdEngine, EtcdStore
from holdfast.store.etcd_gateway import Gateway, NotSent, decoded, encoded
from holdfast.store.model import Key, Store
from holdfast.store.served import AnswerLost
from holdfast.testing import Backend, Recipe, StoreContract, When
from proof.effort import rounds
from proof.model import StoreSubject, run_state_machine
from tests.support.servers import Etcd


def _engine(store: Store) -> EtcdEngine:
    assert isinstance(store, EtcdStore)
    assert isinstance(store.engine, EtcdEngine)
    return store.engine


class EtcdBackend(Backend):
    """Runs the contract on etcd."""

    many_within = 600.0  # the machine may be busy
    url: str

    def open_store(self) -> EtcdStore:
        return EtcdStore(self.url)

    def reopen(self, store: Store) -> EtcdStore:
        return EtcdStore(self.url)

    def process_target(self, store: Store) -> Recipe:
        return Recipe(EtcdStore, (self.url,))

    @contextlib.contextmanager
    def losing_answers(self, store: Store, when: When) -> Iterator[None]:
        """The connection breaks before the commit is sent or before the answer arrives; reconnecting fails."""
        engine = _engine(store)
        send = engine._send_once
        lost: list[bool] = []

        def lose(request: object) -> Any:
            if when == "after":
                send(request)
            engine.gateway.close()
            lost.append(True)
            raise AnswerLost("the connection is gone")

        def connect() -> Any:
            if lost:
                raise NotSent("the server is gone")
            return original()

        original = engine.gateway.connect
        with (
            mock.patch.object(engine, "_send_once", lose),
            mock.patch.object(engine.gateway, "connect", connect),
            mock.patch.object(engine.gateway, "timeout", 0.005),
        ):
            yield

    def damage(self, store: Store, key: Key[Any], content: bytes) -> None:
        engine = _engine(store)
        request = {"key": encoded(engine.keys.document(key.name)), "value": encoded(content)}
        engine.gateway.ask("/v3/kv/put", request)

    def stored(self, store: Store, key: Key[Any]) -> bytes:
        engine = _engine(store)
        answer = engine.gateway.ask("/v3/kv/range", {"key": encoded(engine.keys.document(key.name))})
        return decoded(answer["kvs"][0].get("value", ""))

    @contextlib.contextmanager
    def disturbed(self) -> Iterator[None]:
        ask = Gateway.ask_once

        def ask_late(self: Gateway, path: str, request: object) -> Any:
            if random.random() < 0.2:
                time.sleep(random.random() * 0.004)
            return ask(self, path, request)

        with mock.patch.object(Gateway, "ask_once", ask_late):
            yield


class TestEtcdStore(EtcdBackend, StoreContract):
    many = rounds(100_000, least=500)

    @pytest.fixture(autouse=True)
    def place(self, etcd_url: str) -> None:
        self.url = etcd_url


def test_it_behaves_like_the_model(etcd_server: Etcd) -> None:
    numbers = count()

    def fresh() -> StoreSubject:
        url = etcd_server.store_url(f"model-{next(numbers)}")
        return StoreSubject(EtcdStore(url), partial(EtcdStore, url))

    run_state_machine(fresh, examples=rounds(12, least=4))
