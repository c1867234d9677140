"""A repository whose store is unusable can still be described and examined, as far as possible without it.

A store that does not work from the start leaves nothing behind.
"""

from __future__ import annotations

import os
import re
import sys
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any
from unittest import mock

import pytest

from holdfast.cli.entry import run
from holdfast.errors import AlreadyExists, Failure, NotFound, StoreUnavailable
from holdfast.findings import Finding, Severity
from holdfast.repository.init import initialise
from holdfast.repository.overview import describe
from holdfast.repository.repository import Repository
from holdfast.store.etcd import EtcdStore
from holdfast.store.etcd_gateway import encoded
from holdfast.store.open import CONFIG, configure_store
from tests.cli.commands import Result, data, envelope, error, holdfast
from tests.support.guarded import PASSWORD, QUOTED, GuardedPostgres
from tests.support.servers import Etcd, Postgres, free_port

psycopg = pytest.importorskip("psycopg", reason="psycopg is not installed here")
pytestmark = pytest.mark.skipif(sys.platform == "win32", reason="the servers are started on POSIX systems")

from holdfast.store.postgres import PostgresStore  # noqa: E402

LOCAL = {"records", "remnants", "drafts", "links", "permissions", "owners", "filesystem", "disk"}
"""The checks that need no store."""


@pytest.fixture(autouse=True)
def short_timeouts() -> Iterator[None]:
    """Give up quickly on servers that are down, in this process."""
    with (
        mock.patch.object(PostgresStore.__init__, "__kwdefaults__", _with_short_timeout(PostgresStore)),
        mock.patch.object(EtcdStore.__init__, "__kwdefaults__", _with_short_timeout(EtcdStore)),
    ):
        yield


def _with_short_timeout(store: type) -> dict[str, Any]:
    return {**store.__init__.__kwdefaults__, "timeout": 0.5}  # type: ignore[misc]


RISKY = "store-risky"  # the etcd of these tests


def examined(root: Path) -> dict[str, Finding]:
    with Repository(root, to_examine=True) as repository:
        return {each.code: each for each in repository.examine() if each.code != RISKY}


def plant(root: Path) -> None:
    """Cause damage that is visible without a store: a draft of a dead process, and open permissions."""
    draft = root / ".jvs" / ".thing-0123456789ab.tmp"
    draft.write_text("never published")
    os.utime(draft, (time.time() - 7200,) * 2)
    (root / ".jvs" / "guards").chmod(0o777)


# --- Findings about an unusable store -------------------------------------------------------------------


class Broken:
    """A repository on a working server, and ways to break it."""

    def __init__(self, root: Path, url: str) -> None:
        self.root = root
        self.url = url
        initialise(root, store=url)
        (root / "main" / "file").write_text("kept")
        with Repository(root) as repository, repository.lease() as lease:
            repository.snapshot(lease=lease)

    def move_to(self, url: str) -> None:
        """Configure another address from now on."""
        configure_store(self.root, url, check=False)

    def run_sql(self, statement: str) -> None:
        with psycopg.connect(self.url.partition("?")[0], autocommit=True) as connection:
            connection.execute(statement.format(schema=self.url.partition("schema=")[2]))

    def put_schema_of_etcd(self, version: bytes) -> None:
        with EtcdStore(self.url) as store:
            gateway, key = store.engine.gateway, store.engine.keys.schema  # type: ignore[attr-defined]
            gateway.ask("/v3/kv/put", {"key": encoded(key), "value": encoded(version)})


Breakage = Callable[[Broken], object]

BREAKAGES: dict[str, tuple[str, str, Breakage]] = {
    "postgresql, nobody there": (
        "postgres_url",
        "store-away",
        lambda it: it.move_to(f"postgresql://127.0.0.1:{free_port()}/x"),
    ),
    "etcd, nobody there": (
        "etcd_url",
        "store-away",
        lambda it: it.move_to(f"etcd://127.0.0.1:{free_port()},127.0.0.1:{free_port()}/x"),
    ),
    "postgresql, no such database": (
        "postgres_url",
        "store-missing",
        lambda it: it.move_to(it.url.replace("/postgres?", "/elsewhere?")),
    ),
    "postgresql, no such user": (
        "postgres_url",
        "store-refused",
        lambda it: it.move_to(it.url.replace("holdfast@", "stranger@")),
    ),
    "postgresql, no encryption": (
        "postgres_url",
        "store-untrusted",
        lambda it: it.move_to(f"{it.url}&sslmode=require"),
    ),
    "postgresql, another version": (
        "postgres_url",
        "store-incompatible",
        lambda it: it.run_sql("UPDATE {schema}.settings SET value = '9'"),
    ),
    "etcd, another version": (
        "etcd_url",
        "store-incompatible",
        lambda it: it.put_schema_of_etcd(b"9"),
    ),
    "postgresql, nothing in it": (
        "postgres_url",
        "store-empty",
        lambda it: it.run_sql("DROP SCHEMA {schema} CASCADE"),
    ),
    "etcd, nothing in it": (
        "etcd_url",
        "store-empty",
        lambda it: it.move_to(it.url.replace("?", "-other?")),
    ),
    "a config that cannot be read": (
        "etcd_url",
        "store-unusable",
        lambda it: (it.root / CONFIG).write_text("{"),
    ),
    "an address that cannot be read": (
        "etcd_url",
        "store-unusable",
        lambda it: (it.root / CONFIG).write_text('{"store":"mysql://x/y"}'),
    ),
}


@pytest.mark.req("LC-28")
@pytest.mark.parametrize("name", BREAKAGES)
@pytest.mark.sampled(1)
def test_an_unusable_store_is_a_finding_and_everything_else_is_examined(
    tmp_path: Path, request: pytest.FixtureRequest, name: str
) -> None:
    server, code, break_it = BREAKAGES[name]
    broken = Broken(tmp_path / "repository", request.getfixturevalue(server))
    assert examined(broken.root) == {}
    break_it(broken)
    plant(broken.root)

    found = examined(broken.root)

    assert found.keys() == {code, "checks-not-made", "draft-left", "permissions-open"}
    assert found[code].severity is Severity.ERROR
    assert found[code].meaning
    assert found[code].remedy.startswith("nothing: ")
    assert len(found[code].remedy) > 30
    not_made = found["checks-not-made"].facts["checks"]
    assert {"trees", "heads", "leases", "audit", "clock", "ledger", "issues"} <= set(not_made)  # type: ignore[call-overload]
    assert not LOCAL & set(not_made)  # type: ignore[call-overload]
    _check_description(broken.root)


def _check_description(root: Path) -> None:
    with Repository(root, to_examine=True) as repository:
        told = describe(repository)
        assert told.trouble is not None
        assert told.trouble.message in told.warnings()
        assert (told.format, told.worktrees, told.snapshots) == (None, (), None)
        assert told.directories == ("main",)
        assert told.root == root
        repaired = repository.repair()  # repairs only damage that needs no store
        assert [each.code for each in repaired.fixed] == ["draft-left"]
    with pytest.raises(Failure) as raised:
        Repository(root)  # any other use fails
    assert raised.value.hint == told.trouble.hint


def test_the_finding_lists_every_check_that_needs_the_store(tmp_path: Path, etcd_url: str) -> None:
    from holdfast.repository.checks import all_checks
    from holdfast.repository.context import RepositoryPaths
    from holdfast.repository.home import PlainHome

    broken = Broken(tmp_path / "repository", etcd_url)
    broken.move_to(etcd_url.replace("?", "-other?"))
    not_made = examined(broken.root)["checks-not-made"].facts["checks"]

    made = LOCAL | {"store", "commits"}  # one found the problem, the other is about plain files only
    assert set(not_made) == {each.name for each in all_checks(PlainHome(RepositoryPaths(broken.root)))} - made  # type: ignore[call-overload]


def test_nothing_is_created_on_a_server_without_records_of_the_repository(tmp_path: Path, postgres_url: str) -> None:
    broken = Broken(tmp_path / "repository", postgres_url)
    broken.run_sql("DROP SCHEMA {schema} CASCADE")
    examined(broken.root)
    with pytest.raises(NotFound, match="has no records of"):
        Repository(broken.root)

    with pytest.raises(psycopg.errors.InvalidSchemaName):
        broken.run_sql("CREATE TABLE {schema}.thing (x int)")


def test_a_store_that_goes_down_during_an_examination_is_reported_once(tmp_path: Path, etcd_url: str) -> None:
    """The server answers when the examination begins, then stops answering."""
    from holdfast.store.fail_fast import FailFastStore

    root = tmp_path / "repository"
    initialise(root, store=etcd_url)
    with Repository(root, to_examine=True) as repository:
        store = repository.context.store
        assert isinstance(store, FailFastStore)
        repository.context.config("main")
        assert store._store is not None
        with mock.patch.object(store._store, "scan", side_effect=StoreUnavailable("it", "gone")) as scan:
            findings = repository.examine()
        assert scan.call_count == 1
    assert [each.code for each in findings if each.code != RISKY] == ["checks-not-made"]


@pytest.fixture
def stopped(server_scratch: Path, tmp_path: Path) -> list[Path]:
    """Two repositories, each on a real server of its own that has been stopped."""
    roots: list[Path] = []
    for kind in (Postgres, Etcd):
        directory = server_scratch / kind.__name__
        directory.mkdir()
        server = kind(directory)
        server.start()
        roots.append(tmp_path / kind.__name__)
        initialise(roots[-1], store=server.store_url("x"))
        plant(roots[-1])
        server.kill()
    return roots


@pytest.mark.long
def test_doctor_and_info_work_while_the_server_is_stopped(stopped: list[Path]) -> None:
    commands = (("doctor", "--json"), ("doctor",), ("info", "--json"), ("info",))
    asked = [(*command, "--repo", root) for root in stopped for command in commands]
    with ThreadPoolExecutor(len(asked)) as pool:  # each waits some seconds for its server
        results = list(pool.map(lambda each: holdfast(*each), asked))
    for number, root in enumerate(stopped):
        doctor, told, info, shown = results[4 * number : 4 * number + 4]
        _check_doctor(doctor, told)
        described = data(info)
        assert info.returncode == shown.returncode == 0
        assert described["store_error"]["code"] == "E_STORE_UNAVAILABLE"
        assert described["store"] == described["store_error"]["store"]
        assert described["directories"] == ["main"]
        for each in (str(root), described["store"], "cannot be reached"):
            assert each in shown.stdout


def _check_doctor(doctor: Result, told: Result) -> None:
    assert doctor.returncode == told.returncode == 6
    findings = {each["code"]: each for each in error(doctor)["findings"]}
    assert findings["store-away"]["facts"] == {"code": "E_STORE_UNAVAILABLE", "retryable": True}
    assert "heads" in findings["checks-not-made"]["facts"]["checks"]
    assert {"draft-left", "permissions-open"} < findings.keys()
    assert "store-away: the store" in told.stdout
    assert "checks could not run" in told.stdout


@pytest.mark.parametrize("kind", ["postgres_url", "etcd_url"])
@pytest.mark.parametrize("off", [-3600.0, 3600.0])
def test_a_clock_that_differs_from_that_of_the_store_is_a_finding(
    tmp_path: Path, request: pytest.FixtureRequest, kind: str, off: float
) -> None:
    root = tmp_path / "repository"
    initialise(root, store=request.getfixturevalue(kind))
    real = time.time

    def wrong() -> float:
        return real() + off

    with mock.patch("time.time", wrong):
        found = examined(root)

    assert found.keys() == {"clock-differs"}
    assert found["clock-differs"].severity is Severity.WARNING
    assert abs(float(str(found["clock-differs"].facts["clock_difference"])) + off) < 60


# --- Secrets ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["postgresql", "etcd"])
@pytest.mark.sampled(1)
def test_a_password_that_is_not_stored_comes_from_the_environment(
    tmp_path: Path, request: pytest.FixtureRequest, kind: str
) -> None:
    """The repository is created with the full address; later commands get the password from HOLDFAST_STORE."""
    root = tmp_path / "repository"
    if kind == "postgresql":
        server: Any = request.getfixturevalue("guarded_postgres")
        assert isinstance(server, GuardedPostgres)
        whole = f"{server.whole_address}?schema=from_environment"
    else:
        server = request.getfixturevalue("guarded_etcd")
        whole = server.store_url("work/from-environment", user=f"agent:{QUOTED}")
    made = holdfast("init", root, "--store", whole)
    assert "HOLDFAST_STORE" in made.stdout  # because the password is not stored
    assert PASSWORD not in (root / CONFIG).read_text()
    assert QUOTED not in (root / CONFIG).read_text()

    without = holdfast("doctor", "--repo", root, "--json")
    assert [each["code"] for each in error(without)["findings"]] == ["store-refused", "checks-not-made"]
    assert error(holdfast("worktree", "list", "--repo", root, "--json"))["code"] == "E_STORE_ACCESS_REFUSED"
    own = {"HOLDFAST_STORE": whole}
    assert holdfast("doctor", "--repo", root, env=own).returncode == 0
    ran = holdfast("run", "--repo", root, "--snapshot", "--", "touch", "it", env=own, cwd=root)
    assert ran.returncode == 0, ran
    assert holdfast("issue", "init", "--repo", root, env=own).returncode == 0
    told = holdfast("info", "--repo", root, "--json", env=own).stdout
    assert PASSWORD not in told
    assert QUOTED not in told


# --- Stores that do not work from the start -----------------------------------------------------------------


def all_paths(root: Path) -> list[str]:
    return sorted(str(each.relative_to(root)) for each in root.rglob("*"))


def bad_addresses(guarded: GuardedPostgres) -> dict[str, str]:
    return {
        "no kind of store": "mysql://db/work",
        "not an address": "postgresql://[db/work",
        "not an address either": "etcd://[a/b",
        "no address of libpq": f"postgresql://me:{QUOTED}%zz@db/work",
        "no option": "etcd://a/p?colour=red",
        "nobody there": f"postgresql://127.0.0.1:{free_port()}/work",
        "nobody there either": f"etcd://127.0.0.1:{free_port()}/work",
        "wrong password": guarded.address.replace("agent@", "agent:wrong@"),
        "no rights": guarded.whole_address.replace("/work", "/postgres"),
        "no database": guarded.whole_address.replace("/work", "/elsewhere"),
    }


@pytest.mark.long
def test_a_store_that_does_not_work_leaves_nothing_behind(tmp_path: Path, guarded_postgres: GuardedPostgres) -> None:
    root, here = tmp_path / "new", tmp_path / "here"
    here.mkdir()
    for store in bad_addresses(guarded_postgres).values():
        for place in (root, here):
            for _ in range(2):
                with pytest.raises(Failure) as raised:
                    initialise(place, store=store)
                assert raised.value.code in _CODES
                assert QUOTED not in raised.value.message
        assert all_paths(tmp_path) == ["here"]
    assert initialise(root, store=f"{guarded_postgres.whole_address}?schema=late").created
    assert initialise(here).created


@pytest.mark.parametrize("kind", ["postgres_url", "etcd_url"])
@pytest.mark.sampled(1)
def test_a_store_that_has_a_repository_cannot_be_used_for_another(
    tmp_path: Path, request: pytest.FixtureRequest, kind: str
) -> None:
    url = request.getfixturevalue(kind)
    assert initialise(tmp_path / "one", store=url).created
    assert not initialise(tmp_path / "one", store=url).created
    for _ in range(2):
        with pytest.raises(AlreadyExists, match="of another repository"):
            initialise(tmp_path / "other", store=url)
    assert not (tmp_path / "other").exists()
    assert examined(tmp_path / "one") == {}


@pytest.mark.parametrize("kind", ["postgres_url", "etcd_url"])
@pytest.mark.sampled(1)
def test_of_concurrent_inits_on_a_server_one_creates_the_repository_and_all_get_it(
    tmp_path: Path, request: pytest.FixtureRequest, kind: str
) -> None:
    url = request.getfixturevalue(kind)
    for number in range(3):
        root, store = tmp_path / str(number), re.sub(r"(test[-_]\d+)", rf"\1_{number}", url)
        with ThreadPoolExecutor(4) as pool:
            made = list(pool.map(lambda _: initialise(root, store=store), range(4)))  # noqa: B023
        assert [each.created for each in made].count(True) == 1
        assert len({each.format.repository_id for each in made}) == 1


_CODES = {
    *("E_SETTING_INVALID", "E_STORE_UNAVAILABLE", "E_STORE_ACCESS_REFUSED", "E_STORE_MISSING"),
    "E_STORE_UNTRUSTED",
}


def test_migrating_to_a_store_that_does_not_work_changes_nothing(
    tmp_path: Path, guarded_postgres: GuardedPostgres, capsys: pytest.CaptureFixture[str]
) -> None:
    root = tmp_path / "repository"
    assert run(["init", str(root)]) == 0
    before = all_paths(root)
    capsys.readouterr()

    for name, store in bad_addresses(guarded_postgres).items():
        for more in ((), ("--dry-run",)):
            if not (name == "no rights" and more):  # a dry run does not try to create anything
                assert run(["migrate", str(root), "--to", store, "--json", *more]) != 0
                told = envelope(capsys.readouterr().out)
                assert told["error"]["code"] in _CODES, told
    assert all_paths(root) == before
    assert examined(root) == {}
    good = f"{guarded_postgres.whole_address}?schema=moved"
    assert holdfast("migrate", root, "--to", good).returncode == 0
    assert examined(root).keys() == {"store-refused", "checks-not-made"}  # the password is missing
