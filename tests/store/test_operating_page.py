"""docs/how-to/operate-a-server.md does what it says, on real servers."""

from __future__ import annotations

import re
import shutil
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from holdfast.repository.context import CONTENT_VERSION, FORMAT_VERSION, JOINED_VERSION
from holdfast.repository.metrics import measure
from holdfast.store import etcd, postgres_sql
from tests.repository.clones import Clone, make_remote
from tests.support.guarded import EncryptedEtcd
from tests.support.servers import Postgres
from tests.test_how_tos import programs as programs
from tests.test_how_tos import run_page

psycopg = pytest.importorskip("psycopg", reason="psycopg is not installed here")
pytestmark = pytest.mark.skipif(sys.platform == "win32", reason="the servers are started on POSIX systems")

PAGE = (Path(__file__).parents[2] / "docs/how-to/operate-a-server.md").read_text()
KEPT = "```sh\n(cd project && holdfast run --snapshot -- sh -c 'echo kept > file')\n```\n"
LOST = """```sh
holdfast issue create --repo project 'after the backup'
(cd project && holdfast run --snapshot -- sh -c 'echo lost > file')
```
"""
LOOK = """```sh
holdfast issue list --repo project --field title
(cd project && holdfast export head ../exported > /dev/null && cat ../exported/file)
```
```text
Write the parser
kept
```
"""


def section(title: str) -> str:
    """A section of the page with blocks that run, and what is in the backup, and what is not."""
    found = re.search(rf"^## {title}\n(.*?)(?=^## )", PAGE, re.MULTILINE | re.DOTALL)
    assert found is not None
    text = found[1].replace("```shell", "```sh")
    saved = re.search(r"```sh\n[^`]*content.tar project\n```\n", text)
    restored = re.search(r"```sh\n[^`]*--extract[^`]*```\n", text)
    assert saved is not None
    assert restored is not None
    text = text.replace(saved[0], f"{KEPT}{saved[0]}{LOST}")
    return text.replace(restored[0], f"{restored[0]}{LOOK}")


def watching() -> str:
    return PAGE.partition("## Archive old records")[2].replace("```shell", "```sh")


@pytest.fixture
def work(tmp_path: Path) -> Path:
    """The directory of the page, with a clone of a project, and one of Alice's."""
    remote = make_remote(tmp_path / "remote.git")
    for name in ("project", "clone-of-alice"):
        Clone(tmp_path / "clones" / name, remote)
    return tmp_path / "clones"


@pytest.fixture
def database(postgres_server: Postgres) -> Iterator[Postgres]:
    """The server, on which the page makes a database and roles."""
    with psycopg.connect(postgres_server.url, autocommit=True) as admin:
        admin.execute("CREATE ROLE postgres SUPERUSER LOGIN")
        yield postgres_server
        admin.execute("DROP DATABASE IF EXISTS work WITH (FORCE)")
        for role in ("alice", "project_users", "project_owner", "postgres"):
            admin.execute(f"DROP ROLE IF EXISTS {role}")


def run(text: str, tmp_path: Path, programs: Path, work: Path) -> list[str]:
    arrived = f"```sh\ncp -a {work}/. .\n```\n"
    (tmp_path / "page").mkdir()
    return run_page(arrived + text, tmp_path / "page", programs)


def test_the_page_holds_on_postgresql(database: Postgres, work: Path, tmp_path: Path, programs: Path) -> None:
    for name in ("psql", "pg_dump", "pg_restore"):
        (programs / name).symlink_to(database.bin / name)
    port = str(database.port)
    text = (section("PostgreSQL") + watching()).replace("=db.example", f"=127.0.0.1 PGPORT={port}")
    text = text.replace("db.example", f"127.0.0.1:{port}")
    assert run(text, tmp_path, programs, work) == []


@pytest.mark.long
def test_the_page_holds_on_etcd(
    server_scratch: Path, certificates: Path, work: Path, tmp_path: Path, programs: Path
) -> None:
    server = EncryptedEtcd(server_scratch, certificates)
    tools = server.program.parent
    for name in ("etcdctl", "etcdutl"):
        (programs / name).symlink_to(tools / name)
    command = " ".join([*server.command(), "--bcrypt-cost", "4"]).replace(str(server_scratch / "data"), "$DATA")
    (programs / "systemctl").write_text(
        f"#!/bin/sh\nDATA={server_scratch}/etcd\ncase $1 in\n"
        f"stop) kill $(cat pid) && while kill -0 $(cat pid) 2> /dev/null; do sleep 0.05; done ;;\n"
        f"start) {command} > /dev/null 2>&1 & echo $! > pid\n"
        f"until etcdctl endpoint health > /dev/null 2>&1; do sleep 0.1; done ;;\nesac\n"
    )
    (programs / "systemctl").chmod(0o755)
    begun = "```sh\nexport ROOT_PASSWORD=root-secret ALICE_PASSWORD=alice-secret\n```\n"
    text = begun + (section("etcd") + watching()).replace(
        "etcdctl user add root", "systemctl start etcd\netcdctl user add root"
    )
    for old, new in (
        ("a.example:2379/project?", f"{server.endpoint}/project?accept-unsafe-server=true&"),
        ("a.example:2379", server.endpoint),
        ("/etc/etcd/client", f"{certificates}/nameless"),
        ("/etc/etcd", str(certificates)),
        ("/var/lib/etcd", str(server_scratch / "etcd")),
    ):
        text = text.replace(old, new)
    assert run(text, tmp_path, programs, work) == []


def test_the_versions_on_the_page_are_those_of_this_program() -> None:
    table = dict(
        re.findall(r"^\| (tables of PostgreSQL|keys of etcd|format of a repository) \| ([^|]*) \|", PAGE, re.MULTILINE)
    )
    newest = {what: int(re.findall(r"\d+", text)[-1]) for what, text in table.items()}
    assert newest == {
        "tables of PostgreSQL": postgres_sql.SCHEMA_VERSION,
        "keys of etcd": etcd.SCHEMA_VERSION,
        "format of a repository": CONTENT_VERSION,
    }
    with_others = f"{JOINED_VERSION} if several clones share it; {CONTENT_VERSION} with a content store"
    assert f"| {FORMAT_VERSION}; {with_others} |" in PAGE


def test_the_metrics_on_the_page_exist(scratch: Path, postgres_url: str) -> None:
    clone = Clone(scratch / "clone", make_remote(scratch / "remote.git"))
    clone.adopt(postgres_url)
    known = {each.name for each in measure(clone.repository)}
    named = set(re.findall(r"`(holdfast_\w+)`", PAGE))
    of_etcd = {each for each in named if each.endswith(("_bytes", "_revision", "_alarms"))}
    assert len(named) >= 12
    assert named - of_etcd <= known


def test_a_wrong_section_is_found(tmp_path: Path, programs: Path, work: Path) -> None:
    assert shutil.which("bash")
    assert run("```sh\nholdfast issue list --repo project\n```\n", tmp_path, programs, work) != []
