"""The histories of processes on a store on a server are linearizable, even if some of them are killed, others are
stopped and continued, and answers are cut."""

from __future__ import annotations

import random
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from unittest import mock

import pytest

from holdfast.store import postgres_sql as statements
from holdfast.store.etcd import EtcdEngine, EtcdStore
from holdfast.store.served import CommitPlan, ServedStore, ServerEngine
from proof.effort import rounds
from proof.linearizability import Check, CheckResult, Operation
from tests.store.test_file_store import (
    RICH,
    Act,
    act_on_accounts,
    act_on_registers,
    judge_accounts,
    judge_registers,
    record,
)
from tests.support.proxy import Proxy
from tests.support.servers import Server

pytest.importorskip("psycopg", reason="psycopg is not installed here")

from holdfast.store.postgres import PostgresEngine, PostgresStore

pytestmark = pytest.mark.skipif(sys.platform == "win32", reason="the workers are forked")

Open = Callable[[Path], ServedStore]


LONGER_THAN_A_TURN = 0.8


class Cutting(Proxy):
    """Cuts some of the answers, each at a random byte."""

    cuts = 0

    def passing(self, chunk: bytes) -> bytes:
        if random.random() < 0.005:
            self.cuts += 1
            self.cut_after = random.randrange(len(chunk))
        return super().passing(chunk)


@pytest.fixture(params=["postgresql", "etcd"])
def open_store(request: pytest.FixtureRequest) -> Iterator[Open]:
    url: str = request.getfixturevalue(f"{request.param.removesuffix('ql')}_url")
    server: Server = request.getfixturevalue(f"{request.param.removesuffix('ql')}_server")
    with Cutting(server.port) as proxy:
        through = url.replace(f":{server.port}/", f":{proxy.port}/")
        yield lambda path: PostgresStore(through) if request.param == "postgresql" else EtcdStore(through)
    assert proxy.cuts


@pytest.mark.parametrize(
    ("act", "start", "judge"),
    [(act_on_accounts, RICH, judge_accounts), (act_on_registers, 0, judge_registers)],
    ids=["several documents", "single documents"],
)
@pytest.mark.sampled(1)
def test_histories_are_linearizable_even_if_processes_are_killed_or_stopped_and_answers_are_cut(
    scratch: Path, open_store: Open, act: Act, start: int, judge: Callable[[list[Operation]], Check]
) -> None:
    kills = rounds(20, least=8)
    history = record(scratch, open_store, act, start, kills=kills, each=15, stop_for=LONGER_THAN_A_TURN)  # type: ignore[arg-type]

    judge(history).require()


class PostgresWithoutVersions(PostgresEngine):
    """Locks the rows that it has read, but does not compare versions."""

    BROKEN = statements.COMMIT_AND_NOTIFY.replace("AND d.version = n.version", "").replace(
        "CASE WHEN d.version = ANY(%(versions)s::text[]) THEN excluded.version END", "excluded.version"
    )

    def commit(self, connection: object, plan: CommitPlan) -> bool:
        with mock.patch.object(statements, "COMMIT_AND_NOTIFY", self.BROKEN):
            return super().commit(connection, plan)


class EtcdComparesOne(EtcdEngine):
    """Compares the version of the first document only."""

    def commit(self, plan: CommitPlan) -> bool:
        return super().commit(plan._replace(named=plan.named[:1]))


class StaleReads(EtcdEngine):
    """Caches reads, and sometimes returns a stale one."""

    def fetch(self, named: object) -> object:  # type: ignore[override]
        key = tuple(each.name for each in named)  # type: ignore[attr-defined]
        known = self.__dict__.setdefault("known", {})
        if key in known and len(key) == 1:
            return known.pop(key)
        known[key] = super().fetch(named)  # type: ignore[arg-type]
        return known[key]


@pytest.mark.long
@pytest.mark.sampled(1)
@pytest.mark.parametrize("broken", [PostgresWithoutVersions, EtcdComparesOne, StaleReads])
def test_a_broken_engine_is_found(
    scratch: Path, broken: Callable[[str], ServerEngine], postgres_url: str, etcd_url: str
) -> None:
    found = []
    for attempt in range(10):
        url = postgres_url if broken == PostgresWithoutVersions else etcd_url.replace("?", f"-{attempt}?")
        place = scratch / str(attempt)
        place.mkdir()
        try:
            history = record(
                place,
                lambda path: ServedStore(broken(url)),  # type: ignore[arg-type,return-value]  # noqa: B023
                act_on_accounts,
                RICH,
                kills=3,
                each=20,
            )
        except AssertionError:  # the store failed outright
            return
        found.append(judge_accounts(history).result)
        if found[-1] is CheckResult.NOT_LINEARIZABLE:
            return
    raise AssertionError(f"no violation was found: {found}")
