"""The doctor shows that an etcd is filling up before it refuses commits, and why it refuses them then."""

from __future__ import annotations

import base64
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from holdfast.errors import StoreAccessRefused, StoreFull
from holdfast.repository.checks import ALMOST_FULL
from holdfast.repository.init import initialise
from holdfast.repository.repository import Repository
from holdfast.store.etcd import EtcdEngine, EtcdStore
from holdfast.store.model import ServerSpace
from holdfast.testing.backend import INDEX, increment
from tests.support.servers import Etcd

QUOTA = 4 << 20
VALUE = base64.b64encode(b"x" * 50_000).decode()
RISKY = "store-risky"  # the etcd of these tests


@pytest.fixture
def server(server_scratch: Path) -> Iterator[Etcd]:
    # etcd compares its quota with the size at its last batch. Here, a batch ends only when a test says so.
    batches = ("--backend-batch-interval", "1h")
    made = Etcd(server_scratch, options=("--quota-backend-bytes", str(QUOTA), "--unsafe-no-fsync", *batches))
    made.start()
    yield made
    made.kill()


def found(root: Path) -> dict[str, Any]:
    with Repository(root, to_examine=True) as repository:
        return {each.code: each.facts for each in repository.examine() if each.code != RISKY}


def put(engine: EtcdEngine, number: int) -> None:
    key = base64.b64encode(f"other/{number}".encode()).decode()
    engine.gateway.ask("/v3/kv/put", {"key": key, "value": VALUE})


def size_now(engine: EtcdEngine) -> int:
    """The size of etcd's database. To compute a hash, etcd ends the batch first."""
    engine.gateway.ask("/v3/maintenance/hash", {})
    return engine.space().size


def test_a_filling_and_a_full_etcd_are_found(tmp_path: Path, server: Etcd) -> None:
    root, url = tmp_path / "repository", server.store_url("x")
    initialise(root, store=url)
    assert found(root) == {}
    with EtcdStore(url) as store:
        engine = store.engine
        assert isinstance(engine, EtcdEngine)
        filling = 0
        while size_now(engine) < ALMOST_FULL * QUOTA:
            put(engine, filling := filling + 1)
        facts = found(root)["store-filling"]
        assert facts["limit"] == QUOTA
        assert facts["size"] >= facts["in_use"] > ALMOST_FULL * QUOTA / 2
        assert (facts["revision"] > filling, facts["compacted"]) == (True, 0)
        increment(store, INDEX)  # still possible

        for number in range(filling + 1, filling + 50):  # one batch: else etcd refuses the value that would exceed it
            put(engine, number)
        assert size_now(engine) > QUOTA  # so it refuses reads too
        with pytest.raises(StoreFull):
            increment(store, INDEX)
        assert set(found(root)) == {"store-full", "checks-not-made"}

        for number in range(1000):  # there is space again, but nobody has disarmed the alarm
            key = base64.b64encode(f"other/{number}".encode()).decode()
            engine.gateway.ask("/v3/kv/deleterange", {"key": key})
        revision = engine.gateway.ask("/v3/kv/range", {"key": "YQ=="})["header"]["revision"]
        engine.gateway.ask("/v3/kv/compaction", {"revision": revision, "physical": True})
        server._ask("/v3/maintenance/defragment", "{}")  # the answer has no header
        assert set(found(root)) == {"store-full"}
        with pytest.raises(StoreFull):
            increment(store, INDEX)
        (alarm,) = engine.gateway.ask("/v3/maintenance/alarm", {"action": "GET"})["alarms"]
        engine.gateway.ask("/v3/maintenance/alarm", {"action": "DEACTIVATE", **alarm})
        assert found(root) == {}
        increment(store, INDEX)


def test_the_last_compaction_is_known(etcd_url: str) -> None:
    with EtcdStore(etcd_url) as store:
        increment(store, INDEX)
        before = store.space()
        assert before is not None
        engine = store.engine
        assert isinstance(engine, EtcdEngine)
        engine.gateway.ask("/v3/kv/compaction", {"revision": str(before.revision)})
        increment(store, INDEX)
        after = store.space()
        assert after is not None
        assert before.compacted < after.compacted == before.revision < after.revision
        assert 0 < after.in_use <= after.size


def test_another_alarm_is_found(tmp_path: Path, etcd_url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    root = tmp_path / "repository"
    initialise(root, store=etcd_url)
    monkeypatch.setattr(EtcdEngine, "space", lambda self: ServerSpace(1, 0, ("CORRUPT",)))
    assert set(found(root)) == {"store-alarm"}


def test_a_user_who_may_not_ask_gets_no_finding(tmp_path: Path, etcd_url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    root = tmp_path / "repository"
    initialise(root, store=etcd_url)

    def refuse(self: EtcdEngine) -> ServerSpace:
        raise StoreAccessRefused(self.address, "permission denied")

    monkeypatch.setattr(EtcdEngine, "space", refuse)
    assert found(root) == {}
