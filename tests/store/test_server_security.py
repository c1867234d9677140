"""Users, passwords and certificates: passed on to the server, and told apart from a server that is away."""

from __future__ import annotations

import os
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from holdfast.errors import Refused, SettingInvalid, StoreUnavailable
from holdfast.store.etcd import EtcdEngine, EtcdStore
from holdfast.store.etcd_gateway import coded
from holdfast.store.records import Create
from holdfast.testing.contract_clients import INDEX, Item, apply, number_of
from tests.support.servers import Etcd, Postgres

psycopg = pytest.importorskip("psycopg", reason="psycopg is not installed here")

from holdfast.store.postgres import PostgresStore  # noqa: E402

PASSWORD = "s3cret:@/"
QUOTED = "s3cret%3A%40%2F"


@pytest.fixture
def directory(server_scratch: Path) -> Path:
    made = server_scratch / "server"
    made.mkdir()
    return made


# --- PostgreSQL -----------------------------------------------------------------------------------


@pytest.fixture
def guarded_postgres(directory: Path) -> Iterator[str]:
    """The address of a database for a user with a password, without the password."""
    server = Postgres(directory)
    server.start()
    with psycopg.connect(server.url, autocommit=True) as connection:
        connection.execute(f"CREATE ROLE agent LOGIN PASSWORD '{PASSWORD}'")
        connection.execute("CREATE DATABASE work OWNER agent")
    hba = "host all holdfast all trust\nhost all all all scram-sha-256\n"
    (server.data / "pg_hba.conf").write_text(hba)
    server.restart()
    yield f"postgresql://agent@127.0.0.1:{server.port}/work"
    server.kill()


def test_a_password_is_taken_from_the_address_or_from_where_libpq_looks(
    guarded_postgres: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with PostgresStore(guarded_postgres.replace("agent@", f"agent:{QUOTED}@")) as store:
        apply(store, Create(INDEX, Item(1)))
        assert PASSWORD not in store.place
        assert QUOTED not in store.place

    passfile = tmp_path / "pgpass"
    passfile.write_text(f"127.0.0.1:*:*:agent:{PASSWORD.replace(':', chr(92) + ':')}\n")
    passfile.chmod(0o600)
    monkeypatch.setenv("PGPASSFILE", os.fspath(passfile))
    with PostgresStore(guarded_postgres) as store:
        assert number_of(store, INDEX) == 1


@pytest.mark.parametrize("user", ["agent:wrong", "nobody-known:wrong"])
def test_a_wrong_password_is_said_at_once(guarded_postgres: str, user: str) -> None:
    store = PostgresStore(guarded_postgres.replace("agent@", f"{user}@"), timeout=600.0)
    with pytest.raises(StoreUnavailable, match="password authentication failed"):
        store.read(INDEX)


def test_a_user_who_may_not_make_tables_is_told_who_may(guarded_postgres: str) -> None:
    address = guarded_postgres.replace("agent@", f"agent:{QUOTED}@").replace("/work", "/postgres")
    with pytest.raises(Refused, match="permission denied") as raised:
        PostgresStore(address).read(INDEX)

    assert "grant" in raised.value.hint.lower()


def test_a_server_without_encryption_is_refused_if_it_was_asked_for(guarded_postgres: str) -> None:
    store = PostgresStore(f"{guarded_postgres}?sslmode=require", timeout=0.5)
    with pytest.raises(StoreUnavailable, match="SSL"):
        store.read(INDEX)


# --- etcd -------------------------------------------------------------------------------------------


@pytest.fixture
def guarded_etcd(directory: Path) -> Iterator[Etcd]:
    """An etcd with users: root, and one who may use one prefix."""
    server = Etcd(directory)
    server.start()
    with EtcdStore(f"{server.url}/x") as store:
        assert isinstance(store.engine, EtcdEngine)
        ask = store.engine.gateway.ask
        for user in ("root", "agent"):
            ask("/v3/auth/user/add", {"name": user, "password": PASSWORD})
            ask("/v3/auth/role/add", {"name": user})
            ask("/v3/auth/user/grant", {"user": user, "role": user})
        permission = {"permType": "READWRITE", "key": coded(b"work/"), "range_end": coded(b"work0")}
        ask("/v3/auth/role/grant", {"name": "agent", "perm": permission})
        ask("/v3/auth/enable", {})
    yield server
    server.kill()


def test_a_user_of_etcd_works_below_its_prefix_and_nowhere_else(guarded_etcd: Etcd) -> None:
    with EtcdStore(f"etcd://agent:{QUOTED}@{guarded_etcd.endpoint}/work") as store:
        apply(store, Create(INDEX, Item(1)))
        assert number_of(store, INDEX) == 1
        assert isinstance(store.engine, EtcdEngine)
        store.engine.gateway._token = "has run out"
        assert number_of(store, INDEX) == 1

    with (
        EtcdStore(f"etcd://agent:{QUOTED}@{guarded_etcd.endpoint}/elsewhere") as store,
        pytest.raises(Refused),
    ):
        store.read(INDEX)


@pytest.mark.parametrize("user", ["agent:wrong@", ""], ids=["a wrong password", "no user"])
def test_who_is_not_let_in_by_etcd_is_told_at_once(guarded_etcd: Etcd, user: str) -> None:
    store = EtcdStore(f"etcd://{user}{guarded_etcd.endpoint}/work", timeout=600.0)
    with pytest.raises(Refused) as raised:
        store.read(INDEX)

    assert "wrong" not in raised.value.message


def _openssl(directory: Path, *arguments: str) -> None:
    subprocess.run(["openssl", *arguments], cwd=directory, check=True, capture_output=True)


@pytest.fixture
def certificates(tmp_path: Path) -> Path:
    """A certificate authority, and certificates of a server and a client."""
    if shutil.which("openssl") is None:
        pytest.skip("openssl is not installed: no certificates")
    key = ("-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:P-256", "-nodes")
    _openssl(
        tmp_path, "req", "-x509", *key, "-keyout", "ca.key", "-out", "ca.pem", "-subj", "/CN=ca", "-days", "2"
    )
    for name in ("server", "client"):
        (tmp_path / "extensions").write_text("subjectAltName=IP:127.0.0.1\n")
        _openssl(
            tmp_path, "req", *key, "-keyout", f"{name}.key", "-out", f"{name}.csr", "-subj", f"/CN={name}"
        )
        signing = ("-CA", "ca.pem", "-CAkey", "ca.key", "-CAcreateserial", "-days", "2")
        _openssl(
            tmp_path,
            "x509",
            "-req",
            "-in",
            f"{name}.csr",
            *signing,
            "-extfile",
            "extensions",
            "-out",
            f"{name}.pem",
        )
    return tmp_path


def test_certificates_are_shown_and_checked(directory: Path, certificates: Path) -> None:
    server = EncryptedEtcd(directory, certificates)
    server.start()
    try:
        shown = f"cacert={certificates}/ca.pem&cert={certificates}/client.pem&key={certificates}/client.key"
        with EtcdStore(f"etcd://{server.endpoint}/work?{shown}") as store, store.watch(INDEX) as watch:
            apply(store, Create(INDEX, Item(1)))
            assert watch.wait(30) == {INDEX.name}
            assert number_of(store, INDEX) == 1
        for less in (f"cacert={certificates}/ca.pem", "tls=true"):
            with pytest.raises(StoreUnavailable):
                EtcdStore(f"etcd://{server.endpoint}/work?{less}", timeout=0.3).read(INDEX)
        with pytest.raises(SettingInvalid):
            EtcdStore(f"etcd://{server.endpoint}/work?cert={certificates}/none.pem")
    finally:
        server.kill()


class EncryptedEtcd(Etcd):
    """An etcd that wants to see a certificate, and shows one."""

    def __init__(self, directory: Path, certificates: Path) -> None:
        files = {"cert-file": "server.pem", "key-file": "server.key", "trusted-ca-file": "ca.pem"}
        options = [each for name, file in files.items() for each in (f"--{name}", str(certificates / file))]
        super().__init__(directory, options=[*options, "--client-cert-auth"])

    def command(self) -> list[str]:
        return [
            each.replace(f"http://{self.endpoint}", f"https://{self.endpoint}") for each in super().command()
        ]

    def answers(self) -> bool:
        return self._connects()
