"""Content stores keep their contract on real servers."""

from __future__ import annotations

import sys
import threading
from collections.abc import Iterator
from functools import partial

import pytest

from holdfast.errors import SettingInvalid, StoreUnavailable
from holdfast.store import content_postgres, content_s3
from holdfast.store.content import ContentStore, checked_address
from holdfast.store.open import open_address, open_content
from holdfast.trees.chunks import hash_of
from tests.support.s3 import S3Server

pytestmark = pytest.mark.skipif(sys.platform == "win32", reason="the servers are started on POSIX systems")


@pytest.fixture(params=["postgres", "s3"])
def store(request: pytest.FixtureRequest, postgres_url: str, monkeypatch: pytest.MonkeyPatch) -> Iterator[ContentStore]:
    monkeypatch.setattr(content_postgres, "_PAGE", 7)
    monkeypatch.setattr(content_s3, "_FEW", 100)
    address = "postgres:"
    if request.param == "s3":
        server: S3Server = request.getfixturevalue("s3_server")
        address = server.bucket()
    with open_address(".", postgres_url) as records:  # type: ignore[attr-defined]
        found = open_content(address, records)
        found.prepare()
        yield found


def name(data: bytes, upload: str = "aa") -> str:
    return f"{hash_of(data)}-{upload}"


def test_chunks_are_stored_found_listed_and_deleted(store: ContentStore) -> None:
    chunks = {name(data): data for data in (b"%d" % number for number in range(150))}
    store.put(chunks)
    store.prepare()  # again
    assert set(store.every_name()) == set(chunks)
    assert store.get(list(chunks)) == chunks
    hashes = [each.partition("-")[0] for each in chunks]
    assert store.names([*hashes, "f" * 64]) == {each: [f"{each}-aa"] for each in hashes}
    assert store.names(hashes[:3]) == {each: [f"{each}-aa"] for each in hashes[:3]}
    store.delete([*list(chunks)[1:], name(b"missing")])
    assert list(store.every_name()) == [next(iter(chunks))]
    assert store.get([name(b"1")]) == {}


def test_a_stored_chunk_stays_as_it_is_and_may_have_several_names(store: ContentStore) -> None:
    store.put({name(b"one"): b"one"})
    store.put({name(b"one"): b"changed", name(b"one", "bb"): b"one"})
    assert store.get([name(b"one"), name(b"one", "bb")]) == {name(b"one"): b"one", name(b"one", "bb"): b"one"}
    assert sorted(store.names([hash_of(b"one")])[hash_of(b"one")]) == [name(b"one"), name(b"one", "bb")]


def test_nothing_is_asked_for_nothing(store: ContentStore) -> None:
    store.put({})
    store.delete([])
    assert (store.get([]), store.names([]), list(store.every_name())) == ({}, {}, [])


def test_of_many_who_store_the_same_chunk_all_succeed(store: ContentStore) -> None:
    failures: list[BaseException] = []

    def put() -> None:
        try:
            store.put({name(b"same"): b"same"})
        except BaseException as failure:
            failures.append(failure)

    threads = [threading.Thread(target=put) for _ in range(8)]
    for each in threads:
        each.start()
    for each in threads:
        each.join()
    assert failures == []
    assert store.get([name(b"same")]) == {name(b"same"): b"same"}


def test_a_stopped_object_storage_is_unavailable(postgres_url: str, s3_server: S3Server) -> None:
    with open_address(".", postgres_url) as records:  # type: ignore[attr-defined]
        store = open_content("s3://bucket?endpoint=http://127.0.0.1:1&region=us-east-1", records)
        put, delete = partial(store.put, {name(b"x"): b"x"}), partial(store.delete, [name(b"x")])
        for ask in (partial(store.names, ["f" * 64]), put, delete):
            with pytest.raises(StoreUnavailable) as raised:
                ask()
            assert raised.value.retryable


def test_postgres_content_needs_records_on_postgresql(etcd_url: str) -> None:
    with open_address(".", etcd_url) as records, pytest.raises(SettingInvalid, match="not on PostgreSQL"):  # type: ignore[attr-defined]
        open_content("postgres:", records)


@pytest.mark.parametrize(
    "address",
    [
        "",
        "postgres",
        "postgresql://db/x",
        "s3://",
        "s3://u:p@b",
        "s3://b?endpoint=ftp://x",
        "s3://b?secret=1",
        "s3://b#x",
    ],
)
def test_invalid_addresses_are_refused_and_not_quoted(address: str) -> None:
    with pytest.raises(SettingInvalid) as raised:
        checked_address(address)
    assert "u:p" not in str(raised.value)
