"""The claims of docs/how-to/many-machines.md hold on real servers."""

from __future__ import annotations

import re
import shlex
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

import psutil
import pytest

from holdfast.repository.init import initialise
from holdfast.repository.repository import Repository
from holdfast.store.etcd import EtcdStore
from holdfast.store.model import Create
from holdfast.store.open import open_address
from holdfast.testing.backend import INDEX, ISSUES, Item, apply, increment, number_of
from tests.store.test_plain_sql import do_everything
from tests.support.guarded import EncryptedEtcd
from tests.support.servers import Postgres, free_port

psycopg = pytest.importorskip("psycopg", reason="psycopg is not installed here")
pytestmark = pytest.mark.skipif(sys.platform == "win32", reason="the servers are started on POSIX systems")

from holdfast.store import postgres  # noqa: E402
from holdfast.store.postgres import PostgresStore  # noqa: E402

PAGE = (Path(__file__).parents[2] / "docs/how-to/many-machines.md").read_text()


class EtcdOfThePage(EncryptedEtcd):
    """etcd with the options of the unit on the page, but as a single member on loopback, with our certificates."""

    def command(self) -> list[str]:
        started = re.search(r"ExecStart=\S+/etcd ((?:.*\\\n)*.*)\n", PAGE)
        assert started is not None
        options = shlex.split(started[1].replace("\\\n", " "))
        given = dict(_pairs(options))
        for name in given:
            if name.endswith("client-urls"):
                given[name] = f"https://{self.endpoint}"
            elif name.endswith("peer-urls"):
                given[name] = self._peer
        given |= {"--initial-cluster": f"a={self._peer}", "--data-dir": str(self.directory / "data")}
        for name, file in (("cert-file", "server.pem"), ("key-file", "server.key"), ("ca-file", "ca.pem")):
            for option in given:
                if option.endswith(name):
                    given[option] = str(self.certificates / file)
        words = [each for name, value in given.items() for each in ((name, value) if value else (name,))]
        return [str(self.program), *words, "--log-level", "error"]

    @property
    def _peer(self) -> str:
        return f"https://127.0.0.1:{self.peer_port}"

    def __init__(self, directory: Path, certificates: Path) -> None:
        super().__init__(directory, certificates)
        self.certificates = certificates


def _pairs(words: Sequence[str]) -> Iterator[tuple[str, str]]:
    """Options with their values; the value is empty if another option follows directly."""
    for word, following in zip(words, [*words[1:], "--"], strict=True):
        if word.startswith("--"):
            yield word, "" if following.startswith("--") else following


@pytest.mark.long
def test_etcd_runs_with_the_unit_of_the_page_and_accepts_its_address(server_scratch: Path, certificates: Path) -> None:
    directory = server_scratch / "etcd"
    directory.mkdir()
    server = EtcdOfThePage(directory, certificates)
    server.start()
    try:
        files = f"cacert={certificates}/ca.pem&cert={certificates}/client.pem&key={certificates}/client.key"
        assert "/prefix[?tls=true&cacert=FILE&cert=FILE&key=FILE]" in PAGE
        with EtcdStore(server.store_url("prefix", f"tls=true&{files}")) as store:
            many = [Create(ISSUES.key(f"one-{each}"), Item(each)) for each in range(1000)]
            apply(store, *many)  # as many as the options of the unit allow
            apply(store, Create(INDEX, Item(1, "x" * (3 << 20))))
    finally:
        server.kill()


@pytest.fixture
def stranger(postgres_server: Postgres, postgres_url: str) -> Iterator[str]:
    """The address of a user who has only the rights listed on the page, in a store of another user."""
    said = " ".join(PAGE.split())
    rights = re.search(r"all other users need `(\w+)` on the schema and `([\w, ]+)` on its tables", said)
    assert rights is not None
    schema = postgres_url.partition("schema=")[2]
    with PostgresStore(postgres_url) as store:
        store.now()
    with psycopg.connect(postgres_server.url, autocommit=True) as owner:
        owner.execute("CREATE ROLE stranger LOGIN")
        owner.execute(f"GRANT {rights[1]} ON SCHEMA {schema} TO stranger")
        owner.execute(f"GRANT {rights[2]} ON ALL TABLES IN SCHEMA {schema} TO stranger")
        yield postgres_url.replace("holdfast@", "stranger@")
        owner.execute("DROP OWNED BY stranger")
        owner.execute("DROP ROLE stranger")


def test_the_rights_listed_on_the_page_are_sufficient(stranger: str) -> None:
    do_everything(stranger)


def test_the_query_on_the_page_shows_documents(postgres_server: Postgres, postgres_url: str) -> None:
    look = re.search(r"`(SELECT convert_from[^`]*)`", PAGE)
    assert look is not None
    with PostgresStore(postgres_url) as store:
        apply(store, Create(INDEX, Item(7)))
    schema = postgres_url.partition("schema=")[2]
    with psycopg.connect(postgres_server.url) as connection:
        rows = connection.execute(" ".join(look[1].split()).replace("holdfast.", f"{schema}.")).fetchall()
    assert [name for name, content in rows if '"number":7' in content.replace(" ", "")] == [INDEX.name]


def test_an_address_may_list_several_hosts_and_one_may_be_down(
    postgres_server: Postgres, tmp_path: Path, postgres_url: str
) -> None:
    port = postgres_server.port
    several = postgres_url.replace(f"127.0.0.1:{port}", f"127.0.0.1:{free_port()},127.0.0.1:{port}")
    initialise(tmp_path / "repository", store=several)
    with Repository(tmp_path / "repository") as repository, repository.lease():
        pass


def test_a_process_uses_one_connection_and_a_second_one_while_it_waits(
    postgres_server: Postgres, postgres_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(postgres, "_FORGET_EVERY", 1)  # commits that are forgotten need no connection of their own
    url = f"{postgres_url}&application_name=counted"
    ports = "SELECT client_port FROM pg_stat_activity WHERE application_name = 'counted'"

    def open_connections() -> int:
        """Without those that this process has closed: the server shows them until it has noticed."""
        ours = {each.laddr.port for each in psutil.Process().net_connections("tcp") if each.status == "ESTABLISHED"}
        return sum(port in ours for (port,) in beside.execute(ports))

    with (
        psycopg.connect(postgres_server.url, autocommit=True) as beside,
        PostgresStore(url) as store,
    ):
        for _ in range(10):
            increment(store, INDEX)
            number_of(store, INDEX)
        assert open_connections() == 1
        with store.watch(INDEX):
            assert open_connections() == 2


def test_every_address_on_the_page_is_valid(tmp_path: Path) -> None:
    named = re.findall(r"'((?:postgresql|etcd)://[^']*)'", PAGE)
    assert len(named) >= 3
    for each in named:
        open_address(tmp_path, each)
