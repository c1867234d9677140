"""Users, passwords and certificates are passed to the server; a refusal is not mistaken for an outage."""

from __future__ import annotations

import os
import socket
import struct
from pathlib import Path

import pytest

from holdfast.errors import (
    SettingInvalid,
    StoreAccessRefused,
    StoreMissing,
    StoreUnavailable,
    StoreUntrusted,
)
from holdfast.store.etcd import EtcdEngine, EtcdStore
from holdfast.store.model import Create, Delete
from holdfast.testing.backend import INDEX, Item, apply, number_of
from tests.support.guarded import PASSWORD, QUOTED, EncryptedEtcd, GuardedPostgres, TlsDoor
from tests.support.proxy import Door
from tests.support.servers import Etcd

psycopg = pytest.importorskip("psycopg", reason="psycopg is not installed here")

from holdfast.store.postgres import PostgresStore  # noqa: E402

LONG = 60.0
"""The store would retry for this long if it mistook a refusal for an outage."""

# --- PostgreSQL -----------------------------------------------------------------------------------


def test_a_password_comes_from_the_address_or_from_the_sources_of_libpq(
    guarded_postgres: GuardedPostgres, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with PostgresStore(guarded_postgres.whole_address) as store:
        apply(store, Create(INDEX, Item(1)))
        assert PASSWORD not in store.address
        assert QUOTED not in store.address

    home = tmp_path / "home"
    home.mkdir()
    passfile = home / ".pgpass"
    passfile.write_text(f"127.0.0.1:*:*:agent:{PASSWORD.replace(':', chr(92) + ':')}\n")
    passfile.chmod(0o600)
    for name, value in (("HOME", home), ("PGPASSFILE", passfile)):
        with monkeypatch.context() as environment:
            environment.setenv(name, os.fspath(value))
            with PostgresStore(guarded_postgres.address) as store:
                assert number_of(store, INDEX) == 1
    with monkeypatch.context() as environment:
        environment.setenv("PGPASSWORD", PASSWORD)
        with PostgresStore(guarded_postgres.address) as store:
            apply(store, Delete(INDEX))


@pytest.mark.parametrize(
    ("change", "failure", "said"),
    [
        (("agent@", "agent:wrong@"), StoreAccessRefused, "password authentication failed"),
        (("agent@", "nobody-known:wrong@"), StoreAccessRefused, "password authentication failed"),
        (("agent@", "agent@"), StoreAccessRefused, "no password"),
        (("agent@", "stranger@"), StoreAccessRefused, "password"),
        (("/work", "/elsewhere"), StoreMissing, '"elsewhere" does not exist'),
        (("/work", "/work?sslmode=require"), StoreUntrusted, "SSL"),
        (("/work", "/work?sslmode=verify-full&sslrootcert=/no/such/file"), StoreUntrusted, "/no/such/file"),
        (("/work", "/work?sslmode=strict"), StoreUntrusted, "invalid sslmode value"),
    ],
)
def test_each_refusal_of_the_server_is_reported_at_once_as_its_own_failure(
    guarded_postgres: GuardedPostgres, change: tuple[str, str], failure: type[StoreUnavailable], said: str
) -> None:
    address = guarded_postgres.address if change[0] == "agent@" else guarded_postgres.whole_address
    with pytest.raises(failure, match=said) as raised:
        PostgresStore(address.replace(*change), timeout=LONG).read(INDEX)

    assert not raised.value.retryable
    assert PASSWORD not in raised.value.message


def test_a_user_who_may_not_create_tables_gets_a_hint_about_grants(guarded_postgres: GuardedPostgres) -> None:
    address = guarded_postgres.whole_address.replace("/work", "/postgres")
    with pytest.raises(StoreAccessRefused, match="permission denied") as raised:
        PostgresStore(address).read(INDEX)

    assert "grant" in raised.value.hint.lower()


def test_a_read_only_user_can_read_but_not_write(guarded_postgres: GuardedPostgres) -> None:
    owners = f"{guarded_postgres.url.replace('/postgres', '/work')}?schema=readable"
    with PostgresStore(owners) as store:
        apply(store, Create(INDEX, Item(1)))
        for what in ("USAGE ON SCHEMA readable", "SELECT ON ALL TABLES IN SCHEMA readable"):
            store.engine.connections.run(  # type: ignore[attr-defined]
                lambda each, what=what: each.execute(f"GRANT {what} TO agent")
            )
    with PostgresStore(f"{guarded_postgres.whole_address}?schema=readable", patience=LONG) as store:
        assert number_of(store, INDEX) == 1
        with pytest.raises(StoreAccessRefused, match="permission denied"):
            apply(store, Delete(INDEX))


def test_tls_settings_and_certificates_are_passed_to_postgresql(
    guarded_postgres: GuardedPostgres, certificates: Path
) -> None:
    """A TLS proxy stands in for an encrypting server: sound certificates are accepted, others refused."""
    ours = f"sslcert={certificates}/client.pem&sslkey={certificates}/client.key"
    trusted = f"sslmode=verify-full&sslrootcert={certificates}/ca.pem"
    for mutual in (False, True):
        with TlsDoor(guarded_postgres.port, certificates, mutual=mutual) as door:
            address = guarded_postgres.whole_address.replace(f":{guarded_postgres.port}/", f":{door.port}/")
            with PostgresStore(f"{address}?schema=tls&{trusted}&{ours}", timeout=LONG) as store:
                apply(store, Create(INDEX, Item(1)))
                assert _is_encrypted(store)
                with store.watch(INDEX) as watch:
                    apply(store, Delete(INDEX))
                    assert watch.wait(30) == {INDEX.name}
            less = trusted if mutual else trusted.replace("/ca.pem", "/stranger.pem")
            with pytest.raises(StoreUntrusted, match=r"certificate|alert"):
                PostgresStore(f"{address}?schema=tls&{less}&sslcert=/none", timeout=LONG).read(INDEX)


def test_the_certificates_of_the_system_decide_with_sslrootcert_system(
    guarded_postgres: GuardedPostgres, certificates: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """`SSL_CERT_FILE` names the certificates of the system to OpenSSL."""
    if psycopg.pq.version() < 160000:
        pytest.skip("this libpq does not know sslrootcert=system")
    with TlsDoor(guarded_postgres.port, certificates, mutual=False) as door:
        address = guarded_postgres.whole_address.replace(f":{guarded_postgres.port}/", f":{door.port}/")
        system = f"{address}?schema=system&sslrootcert=system"
        with pytest.raises(StoreUntrusted, match="certificate verify failed") as untrusted:
            PostgresStore(f"{system}&sslmode=verify-full", timeout=LONG).read(INDEX)
        with pytest.raises(StoreUntrusted, match='weak sslmode "require"'):
            PostgresStore(f"{system}&sslmode=require", timeout=LONG).read(INDEX)
        assert not untrusted.value.retryable
        assert PASSWORD not in untrusted.value.message
        monkeypatch.setenv("SSL_CERT_FILE", str(certificates / "ca.pem"))
        with PostgresStore(system, timeout=LONG) as store:  # libpq verifies in full, whatever else is the default
            apply(store, Create(INDEX, Item(1)))
            apply(store, Delete(INDEX))
            assert _is_encrypted(store)
            assert _parameters(store)["sslrootcert"] == "system"


def _parameters(store: PostgresStore) -> dict[str, str]:
    used: dict[str, str] = store.engine.connections.run(  # type: ignore[attr-defined]
        lambda connection: connection.info.get_parameters()
    )
    return used


def _is_encrypted(store: PostgresStore) -> bool:
    used: bool = store.engine.connections.run(  # type: ignore[attr-defined]
        lambda connection: connection.pgconn.ssl_in_use
    )
    return used


# --- etcd -------------------------------------------------------------------------------------------


def test_an_etcd_user_can_work_under_its_prefix_and_nowhere_else(guarded_etcd: Etcd) -> None:
    with EtcdStore(guarded_etcd.store_url("work", user=f"agent:{QUOTED}")) as store:
        apply(store, Create(INDEX, Item(1)))
        assert number_of(store, INDEX) == 1
        assert isinstance(store.engine, EtcdEngine)
        store.engine.gateway._token = "has run out"
        assert number_of(store, INDEX) == 1

    with (
        EtcdStore(guarded_etcd.store_url("elsewhere", user=f"agent:{QUOTED}")) as store,
        pytest.raises(StoreAccessRefused),
    ):
        store.read(INDEX)


@pytest.mark.parametrize("user", ["agent:wrong", ""], ids=["a wrong password", "no user"])
def test_a_refusal_by_etcd_is_reported_at_once(guarded_etcd: Etcd, user: str) -> None:
    store = EtcdStore(guarded_etcd.store_url("work", user=user), timeout=600.0)
    with pytest.raises(StoreAccessRefused) as raised:
        store.read(INDEX)

    assert "wrong" not in raised.value.message


class Resetting(Door):
    """Resets every connection, as a server may if the client speaks TLS and the server does not, or the reverse."""

    def serve(self, client: socket.socket) -> None:
        client.recv(1)
        client.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        client.close()


@pytest.mark.parametrize(("options", "hint"), [("?tls=true", "runs without TLS"), ("", "expects TLS")])
def test_a_reset_connection_gets_a_hint_about_tls(options: str, hint: str) -> None:
    with Resetting() as server, pytest.raises(StoreUnavailable) as reset:
        EtcdStore(f"etcd://127.0.0.1:{server.port}/work{options}", timeout=0.3).read(INDEX)
    assert "reset" in reset.value.message
    assert hint in reset.value.hint


def test_certificates_are_presented_to_etcd_and_verified(
    server_scratch: Path, certificates: Path, etcd_server: Etcd
) -> None:
    directory = server_scratch / "etcd"
    directory.mkdir()
    server = EncryptedEtcd(directory, certificates)
    server.start()
    try:
        shown = f"cacert={certificates}/ca.pem&cert={certificates}/client.pem&key={certificates}/client.key"
        with EtcdStore(server.store_url("work", shown)) as store, store.watch(INDEX) as watch:
            apply(store, Create(INDEX, Item(1)))
            assert watch.wait(30) == {INDEX.name}
            assert number_of(store, INDEX) == 1
        for less in (f"cacert={certificates}/ca.pem", "tls=true"):
            with pytest.raises(StoreUntrusted):
                EtcdStore(server.store_url("work", less), timeout=60.0).read(INDEX)
        with pytest.raises(StoreUnavailable) as plain:
            EtcdStore(server.store_url("work"), timeout=0.3).read(INDEX)
        assert "tls=true" in plain.value.hint
        with pytest.raises(StoreUnavailable) as silent:
            EtcdStore(etcd_server.store_url("work", "tls=true"), timeout=0.3).read(INDEX)
        assert "without TLS" in silent.value.hint
        with pytest.raises(SettingInvalid):
            EtcdStore(server.store_url("work", f"cert={certificates}/none.pem"))
    finally:
        server.kill()
