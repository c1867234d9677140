"""Choosing a store: its configured address, which never has secrets, and servers that are down."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from unittest import mock

import pytest

from holdfast.errors import (
    Corrupt,
    ExtraMissing,
    SettingInvalid,
    StoreIncompatible,
    StoreUnavailable,
)
from holdfast.store.addresses import has_secrets, without_secrets
from holdfast.store.files import FileStore
from holdfast.store.model import Create, Store
from holdfast.store.open import (
    CONFIG,
    FILES,
    address_of,
    check_store,
    configure_store,
    open_address,
    open_store,
    same_store,
)
from holdfast.testing.backend import INDEX, Item, apply, number_of
from tests.support.servers import free_port


def test_the_default_store_is_plain_files(tmp_path: Path) -> None:
    store = open_store(tmp_path)

    assert isinstance(store, FileStore)
    assert store.path == tmp_path
    assert address_of(tmp_path) == FILES


def test_the_configured_store_is_the_default_and_an_explicit_address_overrides_it(
    tmp_path: Path, store_url: str
) -> None:
    assert configure_store(tmp_path, store_url) == store_url
    first, second = open_store(tmp_path), open_store(tmp_path)
    apply(first, Create(INDEX, Item(7)))
    other = open_store(tmp_path, (tmp_path / "other").as_uri())

    assert number_of(second, INDEX) == 7
    assert other.read(INDEX) is None
    assert not (tmp_path / ".jit").exists()
    for store in (first, second, other):
        store.close()


def test_the_health_of_a_store_has_its_address_latency_and_clock_difference(tmp_path: Path, store_url: str) -> None:
    health = check_store(open_address(tmp_path, store_url), store_url)

    assert health.address == store_url
    assert health.seconds >= 0
    assert abs(health.clock_difference) < 3 + health.seconds  # servers and test share a machine


# --- Secrets ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("address", "kept"),
    [
        ("postgresql://me:secret@db/work", "postgresql://me@db/work"),
        ("postgresql://me@db/work?password=secret&schema=s", "postgresql://me@db/work?schema=s"),
        (
            "postgresql://db/work?sslmode=verify-full&sslkey=/k&sslpassword=secret",
            "postgresql://db/work?sslmode=verify-full&sslkey=/k",
        ),
        ("etcd://me:secret@a:1,b:2/p?cacert=/ca.pem", "etcd://me@a:1,b:2/p?cacert=/ca.pem"),
        ("etcd://a:1/p?password=secret", "etcd://a:1/p"),
        ("postgresql:///work?host=/run/postgresql", "postgresql:///work?host=/run/postgresql"),
    ],
)
def test_secrets_are_neither_written_nor_shown(tmp_path: Path, address: str, kept: str) -> None:
    assert without_secrets(address) == kept
    assert has_secrets(address) is ("secret" in address)
    assert configure_store(tmp_path, address, check=False) == address_of(tmp_path) == kept
    assert "secret" not in (tmp_path / CONFIG).read_text()


def test_the_address_of_plain_files_is_shown_as_it_is_written() -> None:
    assert without_secrets("files") == "files"


@pytest.mark.parametrize("kind", ["postgresql", "etcd"])
def test_a_failure_does_not_reveal_the_password(tmp_path: Path, kind: str) -> None:
    pytest.importorskip("psycopg", reason="psycopg is not installed here")
    address = f"{kind}://me:secret@127.0.0.1:{free_port()}/work"
    with pytest.raises(StoreUnavailable) as raised:
        _open_with_short_timeout(tmp_path, address).read(INDEX)

    assert "secret" not in json.dumps(raised.value.as_record())
    assert f"{kind}://me@127.0.0.1" in raised.value.message
    assert raised.value.retryable


def test_a_server_that_is_down_leaves_the_configuration_unchanged(tmp_path: Path) -> None:
    from holdfast.store.etcd import EtcdStore

    short_timeout = {**(EtcdStore.__init__.__kwdefaults__ or {}), "timeout": 0.2}
    with mock.patch.object(EtcdStore.__init__, "__kwdefaults__", short_timeout), pytest.raises(StoreUnavailable):
        configure_store(tmp_path, "etcd://127.0.0.1:1/p?tls=1")

    assert not (tmp_path / CONFIG).exists()


def _open_with_short_timeout(root: Path, address: str) -> Store:
    from holdfast.store.etcd import EtcdStore
    from holdfast.store.postgres import PostgresStore

    kind = EtcdStore if address.startswith("etcd") else PostgresStore
    return kind(address, timeout=0.2)


# --- Refusals -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "content",
    ['{"schema_version":1,"store":"files","colour":"red"}', '{"store":7}', "{", '{"schema_version":1,"x":1}'],
)
def test_a_config_that_is_not_understood_is_refused(tmp_path: Path, content: str) -> None:
    (tmp_path / CONFIG).parent.mkdir()
    (tmp_path / CONFIG).write_text(content)

    with pytest.raises(Corrupt):
        open_store(tmp_path)


def test_a_config_of_a_later_version_is_refused(tmp_path: Path) -> None:
    (tmp_path / CONFIG).parent.mkdir()
    (tmp_path / CONFIG).write_text('{"schema_version":2,"store":"files"}')

    with pytest.raises(SettingInvalid):
        open_store(tmp_path)


@pytest.mark.parametrize(
    "address",
    [
        "mysql://db/work",
        "work",
        "etcd:///prefix",
        "etcd://a:0/p",
        "etcd://a:x/p",
        "etcd://a/p?colour=red",
        "postgresql://db/work?schema=a-b",
        "postgresql://db/work?schema=",
        "postgresql://db/work?colour=red",
        "file://elsewhere/x",
        "etcd://a/p?cacert=/does/not/exist",
    ],
)
def test_an_address_that_is_not_understood_is_refused(tmp_path: Path, address: str) -> None:
    pytest.importorskip("psycopg", reason="psycopg is not installed here")
    with pytest.raises(SettingInvalid):
        configure_store(tmp_path, address)


def test_a_schema_of_a_later_version_is_refused(tmp_path: Path, postgres_url: str, etcd_url: str) -> None:
    from holdfast.store.etcd import EtcdStore
    from holdfast.store.etcd_gateway import encoded
    from holdfast.store.postgres import PostgresStore

    with PostgresStore(postgres_url) as postgres:
        postgres.engine.connections.run(  # type: ignore[attr-defined]
            lambda connection: connection.execute("UPDATE holdfast.settings SET value = '9'")
        )
    with EtcdStore(etcd_url) as etcd:
        key = etcd.engine.keys.schema  # type: ignore[attr-defined]
        etcd.engine.gateway.ask("/v3/kv/put", {"key": encoded(key), "value": encoded(b"9")})  # type: ignore[attr-defined]

    for address in (postgres_url, etcd_url):
        with pytest.raises(StoreIncompatible, match="schema version 9"):
            open_address(tmp_path, address).read(INDEX)


def test_a_missing_extra_is_reported_with_the_package_to_install(tmp_path: Path) -> None:
    program = f"""
import sys
sys.modules["psycopg"] = None
from holdfast.errors import ExtraMissing
from holdfast.store.open import open_address
try:
    open_address({str(tmp_path)!r}, "postgresql://db/work")
except ExtraMissing as failure:
    print(failure.code, failure.hint)
"""
    result = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)

    assert result.stdout.startswith(ExtraMissing.code)
    assert "psycopg[binary]" in result.stdout


def test_plain_files_load_no_server_code(tmp_path: Path) -> None:
    program = (
        "import sys\nfrom holdfast.store.open import open_store\n"
        f"open_store({str(tmp_path)!r})\n"
        "print([name for name in sys.modules if 'psycopg' in name or 'etcd' in name])"
    )
    result = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)

    assert result.stdout.strip() == "[]"


def test_two_addresses_of_one_store_are_recognised_as_the_same(tmp_path: Path) -> None:
    assert same_store(tmp_path, FILES, tmp_path.as_uri())
    assert same_store(tmp_path, "etcd://me:x@a/p/", "etcd://me:y@a/p")
    assert not same_store(tmp_path, "etcd://a/p", "etcd://a/q")
