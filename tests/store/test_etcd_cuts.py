"""An answer of etcd that is cut anywhere counts as lost: no wrong answer, and nothing is done twice."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest

from holdfast.store import etcd, etcd_gateway
from holdfast.store.etcd import EtcdStore
from holdfast.store.model import Append, Create, Decision, View
from holdfast.testing.backend import EVENTS, INDEX, ISSUES, Event, Item, apply, increment
from proof.effort import chosen, tried
from tests.support.proxy import Proxy
from tests.support.servers import Etcd

ONE, TWO = ISSUES.key("one"), ISSUES.key("two")
FIRST = {ONE.name: Item(1), TWO.name: Item(2), INDEX.name: Item(0)}


def scan(store: EtcdStore) -> Any:
    return {f"{ISSUES.name}/{name}": document.record for name, document in store.scan(ISSUES)}


def log(store: EtcdStore) -> Any:
    return [(each.position, each.record.number) for each in store.entries(EVENTS)]


def together(store: EtcdStore) -> Any:
    view = store.read_together([ONE, TWO, INDEX])
    return {key.name: view.get(key) for key in (ONE, TWO, INDEX)}


def read(store: EtcdStore) -> Any:
    document = store.read(ONE)
    return None if document is None else document.record


def decide_nothing(store: EtcdStore) -> Any:
    def decide(view: View, now: float) -> Decision[Any]:
        return Decision([], (view.end(EVENTS), view.get(TWO)))

    return store.transact([EVENTS, TWO], decide).result


READS: tuple[tuple[Callable[[EtcdStore], Any], Any], ...] = (
    (scan, {ONE.name: Item(1), TWO.name: Item(2)}),
    (log, [(1, 1), (2, 2), (3, 3)]),
    (together, FIRST),
    (read, Item(1)),
    (decide_nothing, (3, Item(2))),
)


class Cutter:
    """A store behind a proxy that cuts answers, and the same store without one."""

    def __init__(self, server: Etcd, url: str) -> None:
        self.proxy = Proxy(server.port)
        self.store = EtcdStore(url.replace(f":{server.port}/", f":{self.proxy.port}/"), timeout=30.0)
        self.beside = EtcdStore(url)

    def each_cut(self, act: Callable[[], object], salt: str) -> Iterator[None]:
        """Let the caller act once for each byte of the answers to an action (a share of them in a short run), each
        time with a cut there. Every action connects anew, and asks for the server's version."""
        etcd_gateway._versions.clear()
        self.store.close()
        before = self.proxy.answered
        act()
        total = self.proxy.answered - before
        assert total > 200
        for at in chosen(range(total), least=6, salt=salt):
            etcd_gateway._versions.clear()
            self.store.close()
            self.proxy.cut_after = at
            yield
            assert self.proxy.cut_after is None, f"nothing was cut at {at} of {total}"
            tried["answers cut"] += 1


@pytest.fixture
def cutter(etcd_server: Etcd, etcd_url: str, monkeypatch: pytest.MonkeyPatch) -> Iterator[Cutter]:
    monkeypatch.setattr(etcd, "_FORGET_EVERY", 1 << 30)  # by chance, a commit also reads old notes: more answers
    made = Cutter(etcd_server, etcd_url)
    records = (Create(ONE, Item(1)), Create(TWO, Item(2)), Create(INDEX, Item(0)))
    apply(made.store, *records, *(Append(EVENTS, Event(each)) for each in (1, 2, 3)))
    yield made
    made.store.close()
    made.beside.close()
    made.proxy.close()


@pytest.mark.parametrize(("act", "expected"), READS, ids=lambda each: getattr(each, "__name__", ""))
def test_a_read_with_a_cut_answer_is_repeated(cutter: Cutter, act: Callable[[EtcdStore], Any], expected: Any) -> None:
    for _ in cutter.each_cut(lambda: act(cutter.store), act.__name__):
        assert act(cutter.store) == expected


def test_a_commit_with_a_cut_answer_is_made_once(cutter: Cutter) -> None:
    made = 1
    for _ in cutter.each_cut(lambda: increment(cutter.store, INDEX, EVENTS), "commit"):
        made += 1
        assert increment(cutter.store, INDEX, EVENTS) == made
        assert log(cutter.beside)[3:] == [(each + 3, each) for each in range(1, made + 1)]


def test_the_outcome_of_a_commit_is_found_although_the_answer_to_the_question_is_cut(cutter: Cutter) -> None:
    def commit(view: View, now: float) -> Decision[None]:
        return Decision([Append(EVENTS, Event(4))], None)

    cutter.store.transact([EVENTS], commit, commit_id="made")
    cutter.store.was_made("not-made")
    for _ in cutter.each_cut(lambda: cutter.store.was_made("made"), "outcome"):
        assert cutter.store.was_made("made")
    for _ in cutter.each_cut(lambda: cutter.store.was_made("not-made"), "no outcome"):
        assert not cutter.store.was_made("not-made")
