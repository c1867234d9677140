"""Records on a server, files in a directory: the machines that are known to see them, and a restored server."""

from __future__ import annotations

import contextlib
import shutil
import uuid
from collections.abc import Callable, Iterator
from pathlib import Path
from unittest import mock

import pytest

from holdfast.errors import FilesUnproven, LockConflict, StoreRestored
from holdfast.locks.identity import Holder, current_holder
from holdfast.repository import site as sites
from holdfast.repository.context import OPERATIONS, OperationKind
from holdfast.repository.init import initialise
from holdfast.repository.payloads import in_use, scratch
from holdfast.repository.repository import Repository
from holdfast.repository.site import SITES
from holdfast.store.approvals import approve
from holdfast.store.model import Create, Decision
from tests.cli.commands import data, error, holdfast
from tests.support.servers import Etcd, Postgres

SERVERS = ("postgresql", "etcd")
pytestmark = pytest.mark.sampled(1)  # each test on one of them; a proof runs both


@pytest.fixture(autouse=True)
def no_caches(monkeypatch: pytest.MonkeyPatch) -> None:
    """The test's filesystem shows every change at once."""
    monkeypatch.setattr(sites, "CACHES_LAG", 0.0)
    monkeypatch.setattr(sites, "PROOF_LASTS", 0.0)


@pytest.fixture(params=SERVERS)
def served_url(request: pytest.FixtureRequest) -> str:
    url: str = request.getfixturevalue("postgres_url" if request.param == "postgresql" else "etcd_url")
    return url


@pytest.fixture
def root(tmp_path: Path, served_url: str) -> Path:
    path = tmp_path / "repository"
    initialise(path, store=served_url)
    (path / "main" / "file").write_text("content")
    return path


def machine(name: str) -> Holder:
    """A process on another machine, which has just booted."""
    return current_holder()._replace(host=name, machine_id=f"id-of-{name}", boot_id=str(uuid.uuid4()))


def copied(root: Path, to: Path) -> Path:
    """A copy of a directory, approved like the original."""
    shutil.copytree(root, to, symlinks=True)
    approve(to, store=data(holdfast("info", "--repo", root, "--json"))["store"])
    return to


def work(root: Path, holder: Holder | None = None) -> int:
    """Take a snapshot under a lease; return the token."""
    with Repository(root, holder=holder) as repository, repository.lease() as lease:
        repository.snapshot(lease=lease)
        return lease.token


# --- The same files ---------------------------------------------------------------------------------------


def test_a_copy_of_the_directory_gets_no_lease_and_says_so(root: Path, tmp_path: Path) -> None:
    work(root)
    copy = copied(root, tmp_path / "copy")

    refused = holdfast("lease", "acquire", "--repo", copy, "--json")
    assert error(refused)["code"] == "E_FILES_UNPROVEN"
    found = holdfast("doctor", "--repo", copy, "--json")
    assert "files-unproven" in found.stdout
    with pytest.raises(FilesUnproven, match="is not known to be the directory"), Repository(copy) as repository:
        repository.worktrees.create("other")
    assert work(root) == 2
    assert data(holdfast("doctor", "--repo", root, "--json"))["healthy"]


def test_the_lease_of_one_machine_publishes_nothing_from_a_copy(root: Path, tmp_path: Path) -> None:
    copy = copied(root, tmp_path / "copy")
    with Repository(root) as repository, repository.lease() as lease:
        proof = ["--lock-id", lease.lock_id]
        refused = holdfast("snapshot", "--repo", copy, *proof, "--json")
        assert error(refused)["code"] == "E_FILES_UNPROVEN"
        repository.snapshot(lease=lease)


def test_a_machine_that_shares_the_directory_becomes_known_by_itself(root: Path) -> None:
    assert [work(root), work(root, machine("b")), work(root, machine("c")), work(root)] == [1, 2, 3, 4]


def test_a_machine_that_comes_while_another_works_is_admitted_by_that_one(root: Path) -> None:
    other = machine("b")
    with Repository(root) as repository, repository.lease():
        with pytest.raises(FilesUnproven, match=current_holder().host), Repository(root, holder=other) as newcomer:
            newcomer.worktrees.create("w")
        with Repository(root, holder=other) as newcomer, pytest.raises(FilesUnproven):  # it does not ask twice
            newcomer.worktrees.create("w")
        holdfast("trust", "--repo", root, "--yes")
        with Repository(root, holder=other) as newcomer:
            newcomer.worktrees.create("w")
            with newcomer.lease("w") as lease:
                assert lease.token == 1


def test_a_copy_on_another_machine_that_has_missed_something_is_refused(root: Path, tmp_path: Path) -> None:
    work(root)
    copy, other = copied(root, tmp_path / "copy"), machine("b")
    work(root)

    with pytest.raises(FilesUnproven):
        work(copy, other)
    with Repository(root) as repository:
        repository.context.prove_site()  # which does not find the mark of the copy
    with pytest.raises(FilesUnproven):
        work(copy, other)
    assert work(root) == 3


def test_of_two_machines_with_equal_copies_only_one_goes_on(root: Path, tmp_path: Path) -> None:
    work(root)
    copy, other = copied(root, tmp_path / "copy"), machine("b")
    assert work(copy, other) == 2

    with pytest.raises(FilesUnproven, match=r"known to see them: .*\bb\b"):
        work(root)
    assert work(copy, other) == 3


@pytest.mark.parametrize("boots", [1, 2])
def test_a_kill_between_the_files_and_the_store_is_completed(root: Path, boots: int) -> None:
    """At the first mark, and when it is replaced after a reboot."""
    for number in range(boots):
        with Repository(root, holder=machine("a")) as repository:
            site = repository.context.site
            assert site is not None
            killed = mock.patch.object(repository.context.store, "transact", side_effect=KeyboardInterrupt)
            with killed if number == boots - 1 else contextlib.nullcontext(), contextlib.suppress(KeyboardInterrupt):
                site.prove()
    assert work(root, machine("a")) == 1


def test_a_machine_that_has_booted_again_is_still_known(root: Path) -> None:
    work(root, machine("a"))
    assert work(root, machine("a")) == 2


def test_of_two_clones_of_one_machine_only_one_goes_on(root: Path, tmp_path: Path) -> None:
    one, two = machine("a"), machine("a")
    work(root, one)
    copy = copied(root, tmp_path / "copy")
    assert work(copy, two) == 2

    with pytest.raises(FilesUnproven):
        work(root, one)


def test_a_person_declares_which_files_are_the_right_ones(root: Path, tmp_path: Path) -> None:
    work(root)
    copy = copied(root, tmp_path / "copy")
    assert data(holdfast("trust", "--repo", copy, "--files", "--yes", "--json"))["epoch"] == 2

    assert work(copy) == 2
    with pytest.raises(FilesUnproven):
        work(root)


def test_files_are_not_declared_the_right_ones_while_another_machine_works(root: Path) -> None:
    with (
        Repository(root, holder=machine("a")) as repository,
        repository.lease(),
        Repository(root, holder=machine("b")) as other,
        pytest.raises(LockConflict, match="on another machine"),
    ):
        other.adopt_files()


# --- Locks that do not reach ------------------------------------------------------------------------------


def begin_operation(root: Path, holder: Holder) -> None:
    """Decide the removal of a worktree, and die."""
    with Repository(root, holder=holder) as repository:
        repository.worktrees.create("w")
        context = repository.context

        def decide(view: object, now: float) -> Decision[None]:
            operation = context.operation(OperationKind.REMOVE, "0" * 16, "w", now)
            return Decision([Create(OPERATIONS.key("w"), operation)], None)

        context.store.transact([OPERATIONS.key("w")], decide)


def test_an_operation_of_another_machine_is_not_judged_by_a_lock(root: Path) -> None:
    begin_operation(root, machine("b"))

    with Repository(root) as repository:
        with pytest.raises(LockConflict, match="is being removed"):
            repository.lease("w")
        assert "operation-unfinished" not in [each.code for each in repository.examine()]
        repository.adopt_files()  # that machine is gone
    with Repository(root) as repository:
        assert "operation-unfinished" in [each.code for each in repository.examine()]
        repository.repair()
        assert repository.context.pending("w") is None


def test_an_operation_of_the_same_machine_is_finished(root: Path) -> None:
    begin_operation(root, machine("b"))
    with Repository(root, holder=machine("b")) as repository:
        repository.repair()
        assert repository.context.pending("w") is None


def test_a_scratch_directory_of_another_machine_counts_as_in_use(root: Path) -> None:
    with Repository(root, holder=machine("b")) as other, scratch(other.context, "test") as room:
        other.context.prove_site()
        shutil.copytree(room.path, kept := room.path.with_name("f" * 16))
        (kept / "lock").unlink()
    with Repository(root) as repository:
        assert [each.purpose for each in in_use(repository.context.paths)] == ["test"]
        assert "scratch-abandoned" not in [each.code for each in repository.examine()]


# --- A store that was left ------------------------------------------------------------------------------------


def test_a_store_that_was_moved_is_a_finding(root: Path) -> None:
    with Repository(root) as repository:
        repository.context.store.set_moved("etcd://elsewhere/")
        found = {each.code: each for each in repository.examine()}
    assert found["store-moved"].facts == {"moved_to": "etcd://elsewhere/"}
    assert "store-moved" in holdfast("doctor", "--repo", root, "--json").stdout


# --- A server that was restored ---------------------------------------------------------------------------


@pytest.fixture
def backup(request: pytest.FixtureRequest, served_url: str) -> Iterator[Callable[[], Callable[[], None]]]:
    """Makes a backup of the store; the result restores it."""
    if served_url.startswith("etcd"):
        server = request.getfixturevalue("etcd_server")
        yield lambda: backup_of_etcd(server, served_url)
    else:
        yield lambda: backup_of_postgres(request.getfixturevalue("postgres_server"), served_url)


def backup_of_postgres(server: Postgres, url: str) -> Callable[[], None]:
    import psycopg

    schema = url.rpartition("schema=")[2].partition("&")[0]
    tables = ("documents", "entries", "commits")

    def run(*statements: str) -> None:
        with psycopg.connect(server.url) as connection:
            for each in statements:
                connection.execute(each)  # type: ignore[arg-type,unused-ignore]

    run(*(f"CREATE TABLE {schema}.old_{each} AS TABLE {schema}.{each}" for each in tables))
    restore = [f"TRUNCATE {schema}.{each}" for each in tables]
    restore += [f"INSERT INTO {schema}.{each} SELECT * FROM {schema}.old_{each}" for each in tables]
    return lambda: run(*restore)


def backup_of_etcd(server: Etcd, url: str) -> Callable[[], None]:
    from holdfast.store.etcd import EtcdStore
    from holdfast.store.etcd_gateway import encoded, end_of

    gateway = EtcdStore(url).engine.gateway  # type: ignore[attr-defined]
    prefix = url.rpartition("/")[2].partition("?")[0].encode() + b"/"
    everything = {"key": encoded(prefix), "range_end": encoded(end_of(prefix))}
    rows = gateway.ask("/v3/kv/range", everything)["kvs"]

    def restore() -> None:
        gateway.ask("/v3/kv/deleterange", everything)
        for row in rows:
            gateway.ask("/v3/kv/put", {"key": row["key"], "value": row["value"]})

    return restore


def test_a_restored_server_is_noticed_and_tokens_continue(root: Path, backup: Callable[[], Callable[[], None]]) -> None:
    work(root)
    restore = backup()
    assert [work(root), work(root)] == [2, 3]
    restore()

    with pytest.raises(StoreRestored, match="the last token of main is 1 there, but 3 was granted here"):
        work(root)
    assert "store-restored" in holdfast("doctor", "--repo", root, "--json").stdout
    assert error(holdfast("lease", "acquire", "--repo", root, "--json"))["code"] == "E_STORE_RESTORED"
    holdfast("trust", "--repo", root, "--files", "--yes")
    assert [work(root), work(root)] == [4, 5]
    restore()
    with pytest.raises(StoreRestored, match="epoch"):
        work(root)


def test_the_tokens_of_named_leases_continue_above_those_of_a_restored_server(
    root: Path, backup: Callable[[], Callable[[], None]]
) -> None:
    restore = backup()
    with Repository(root) as repository:
        with repository.lease(name="nightly"):
            pass
        restore()
        with repository.lease(name="nightly") as lease:
            assert lease.token == 2


def test_a_server_without_any_record_of_the_files_was_restored(
    root: Path, backup: Callable[[], Callable[[], None]]
) -> None:
    restore = backup()  # before the first lease
    work(root)
    restore()
    with pytest.raises(StoreRestored, match="no record of these files"):
        work(root)
    with Repository(root) as repository:
        assert repository.context.store.read(SITES.key("main")) is None
