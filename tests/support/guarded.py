"""Servers with access control: passwords, certificates, encryption.

The PostgreSQL of the wheel is built without TLS. `TlsDoor` sits in front of it as a pooler or a load balancer
does: clients see a server that encrypts and presents a certificate.
"""

from __future__ import annotations

import contextlib
import shutil
import socket
import ssl
import subprocess
from collections.abc import Iterator
from pathlib import Path
from urllib.parse import quote

import pytest

from tests.support.proxy import Door
from tests.support.servers import PATIENCE, Etcd, Postgres

PASSWORD = "s3cret:@/"
QUOTED = quote(PASSWORD, safe="")
_SSL_REQUEST = b"\x00\x00\x00\x08\x04\xd2\x16\x2f"


class GuardedPostgres(Postgres):
    """A PostgreSQL server with the user `agent`, who has a password and owns the database `work`."""

    def guard(self) -> None:
        """Create the user and the database, and require a password from everyone but the superuser."""
        import psycopg

        with psycopg.connect(self.url, autocommit=True) as connection:
            connection.execute(f"CREATE ROLE agent LOGIN PASSWORD '{PASSWORD}'")
            connection.execute("CREATE DATABASE work OWNER agent")
        rules = "host all holdfast all trust\nhost all all all scram-sha-256\n"
        (self.data / "pg_hba.conf").write_text(rules)
        self.restart()

    @property
    def address(self) -> str:
        """The address of the database for the user, without the password."""
        return f"postgresql://agent@127.0.0.1:{self.port}/work"

    @property
    def whole_address(self) -> str:
        return self.address.replace("agent@", f"agent:{QUOTED}@")


@pytest.fixture(scope="session")
def guarded_postgres(server_directory: Path) -> Iterator[GuardedPostgres]:
    """A server with a user who has a password."""
    pytest.importorskip("psycopg", reason="psycopg is not installed here")
    directory = server_directory / "guarded-postgres"
    directory.mkdir()
    server = GuardedPostgres(directory)
    server.start()
    server.guard()
    yield server
    server.kill()


@pytest.fixture(scope="session")
def guarded_etcd(server_directory: Path) -> Iterator[Etcd]:
    """An etcd with authentication: the users are root and `agent`, who may use the prefix `work`."""
    from holdfast.store.etcd import EtcdEngine, EtcdStore
    from holdfast.store.etcd_gateway import encoded

    directory = server_directory / "guarded-etcd"
    directory.mkdir()
    server = Etcd(directory)
    server.start()
    with EtcdStore(server.store_url("x"), timeout=PATIENCE) as store:  # hashing a password may take long
        assert isinstance(store.engine, EtcdEngine)
        ask = store.engine.gateway.ask
        for user in ("root", "agent"):
            ask("/v3/auth/user/add", {"name": user, "password": PASSWORD})
            ask("/v3/auth/role/add", {"name": user})
            ask("/v3/auth/user/grant", {"user": user, "role": user})
        permission = {"permType": "READWRITE", "key": encoded(b"work/"), "range_end": encoded(b"work0")}
        ask("/v3/auth/role/grant", {"name": "agent", "perm": permission})
        ask("/v3/auth/enable", {})
    yield server
    server.kill()


# --- Certificates -----------------------------------------------------------------------------------


def _openssl(directory: Path, *arguments: str) -> None:
    subprocess.run(["openssl", *arguments], cwd=directory, check=True, capture_output=True)


def _make_authority(directory: Path, name: str) -> None:
    key = ("-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:P-256", "-nodes")
    files = ("-keyout", f"{name}.key", "-out", f"{name}.pem")
    _openssl(directory, "req", "-x509", *key, *files, "-subj", f"/CN={name}", "-days", "2")


def _make_certificate(directory: Path, name: str, subject: str = "") -> None:
    key = ("-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:P-256", "-nodes")
    request = ("-keyout", f"{name}.key", "-out", f"{name}.csr", "-subj", subject or f"/CN={name}")
    _openssl(directory, "req", *key, *request)
    (directory / "extensions").write_text("subjectAltName=IP:127.0.0.1\n")
    signing = ("-CA", "ca.pem", "-CAkey", "ca.key", "-CAcreateserial", "-days", "2", "-extfile", "extensions")
    _openssl(directory, "x509", "-req", "-in", f"{name}.csr", *signing, "-out", f"{name}.pem")
    (directory / f"{name}.key").chmod(0o600)  # libpq refuses a key that others can read


@pytest.fixture
def certificates(tmp_path: Path) -> Path:
    """A certificate authority `ca`, its certificates for a `server`, a `client` and a `nameless` one, and an untrusted
    `stranger`."""
    if shutil.which("openssl") is None:
        pytest.skip("openssl is not installed: no certificates")
    directory = tmp_path / "certificates"
    directory.mkdir()
    for name in ("ca", "stranger"):
        _make_authority(directory, name)
    for name in ("server", "client"):
        _make_certificate(directory, name)
    _make_certificate(directory, "nameless", "/O=holdfast")
    return directory


class EncryptedEtcd(Etcd):
    """An etcd with mutual TLS."""

    def __init__(self, directory: Path, certificates: Path) -> None:
        files = {"cert-file": "server.pem", "key-file": "server.key", "trusted-ca-file": "ca.pem"}
        options = [each for name, file in files.items() for each in (f"--{name}", str(certificates / file))]
        super().__init__(directory, options=[*options, "--client-cert-auth"])

    def command(self) -> list[str]:
        return [each.replace(f"http://{self.endpoint}", f"https://{self.endpoint}") for each in super().command()]

    def answers(self) -> bool:
        return self._connects()


class TlsDoor(Door):
    """Terminates TLS for PostgreSQL clients and forwards the plaintext to a server on loopback.

    With `mutual`, it rejects clients without a certificate.
    """

    def __init__(self, port: int, certificates: Path, *, mutual: bool = False) -> None:
        self._target = port
        self._context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        self._context.load_cert_chain(certificates / "server.pem", certificates / "server.key")
        if mutual:
            self._context.verify_mode = ssl.CERT_REQUIRED
            self._context.load_verify_locations(certificates / "ca.pem")
        super().__init__()

    def serve(self, client: socket.socket) -> None:
        with contextlib.suppress(OSError), client:
            if client.recv(8, socket.MSG_WAITALL) != _SSL_REQUEST:
                return  # a plaintext client
            client.sendall(b"S")
            with (
                self._context.wrap_socket(client, server_side=True) as safe,
                socket.create_connection(("127.0.0.1", self._target)) as server,
            ):
                safe.settimeout(0.01)  # one thread has to serve both directions of a TLS connection
                _forward(safe, server)


def _forward(safe: ssl.SSLSocket, server: socket.socket) -> None:
    """Forward in both directions until one side hangs up."""
    server.settimeout(0.01)
    while True:
        for source, sink in ((safe, server), (server, safe)):
            try:
                chunk = source.recv(1 << 16)
            except TimeoutError:
                continue
            if not chunk:
                return
            sink.sendall(chunk)
