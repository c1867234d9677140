"""The test servers: they run as root and as another user, and never outlive the process that started them."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from pathlib import Path
from unittest import mock

import pytest

from tests.locks.workers import Line, Workers, wait_until
from tests.support import servers
from tests.support.servers import Etcd, Postgres, Server, is_root

pytest.importorskip("psycopg", reason="psycopg is not installed here")
pytestmark = pytest.mark.skipif(sys.platform == "win32", reason="the workers are forked")

KINDS: dict[str, Callable[[Path], Server]] = {"PostgreSQL": Postgres, "etcd": Etcd}


def _become(name: str) -> None:
    if sys.platform != "win32":
        import pwd

        user = pwd.getpwnam(name)
        os.setgroups([])
        os.setgid(user.pw_gid)
        os.setuid(user.pw_uid)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("user", ["this one", "nobody"])
@pytest.mark.sampled(2)
def test_a_server_ends_with_the_process_that_started_it(server_scratch: Path, kind: str, user: str) -> None:
    if user == "nobody" and not is_root():
        pytest.skip("needs root to become another user")
    if user == "nobody" and not servers._may_enter(Path(servers.__file__).parent):
        pytest.skip("another user cannot enter this directory")
    server_scratch.chmod(0o777)
    "".encode("idna")  # load the codec now: the other user may not be able to

    def work(line: Line) -> None:
        if user == "nobody":
            _become(user)
        directory = server_scratch / "server"
        directory.mkdir()
        server = KINDS[kind](directory)
        server.start()
        assert server.process is not None
        line.say((server.process.pid, server.answers()))
        line.wait()

    with Workers() as workers:
        worker = workers.start(work)
        pid, answers = worker.hear()
        assert answers
        assert _is_running(pid)
        worker.kill()
        worker.wait()
        wait_until(lambda: not _is_running(pid))


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.sampled(1)
def test_a_server_that_was_killed_restarts_with_its_data(server_scratch: Path, kind: str) -> None:
    from holdfast.store.model import Create
    from holdfast.store.open import open_address
    from holdfast.testing.backend import INDEX, Item, apply, number_of

    directory = server_scratch / "server"
    directory.mkdir()
    server = KINDS[kind](directory)
    server.start()
    store = open_address(server_scratch, server.store_url("x"))  # type: ignore[attr-defined]
    apply(store, Create(INDEX, Item(7)))
    server.restart()
    assert number_of(store, INDEX) == 7
    store.close()
    server.kill()


@pytest.mark.long
def test_programs_that_the_other_user_cannot_reach_are_copied(server_scratch: Path) -> None:
    if not is_root():
        pytest.skip("needs root: only then does PostgreSQL run as another user")
    directory = server_scratch / "server"
    directory.mkdir()
    with mock.patch.object(servers, "_may_enter", return_value=False):
        server = Postgres(directory)
    assert server.bin.is_relative_to(directory)
    server.start()
    server.kill()


def _is_running(pid: int) -> bool:
    """Whether this process is running, and not a zombie."""
    try:
        return " Z " not in Path(f"/proc/{pid}/stat").read_text()
    except OSError:
        return False
