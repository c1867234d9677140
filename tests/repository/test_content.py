"""A plain home whose content is in a content store, on two machines."""

from __future__ import annotations

import os
import sys
from collections.abc import Collection, Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest

from holdfast.errors import (
    AlreadyExists,
    ContentStoreUnsafe,
    Corrupt,
    NotApproved,
    NotFound,
    Refused,
    SettingInvalid,
    SnapshotElsewhere,
    StoreUnavailable,
    WorktreeElsewhere,
)
from holdfast.repository import content as contents
from holdfast.repository import repository as opening
from holdfast.repository.context import DESCRIPTORS, FORMAT, MAIN, Proof
from holdfast.repository.init import configure_content
from holdfast.repository.migration import migrate
from holdfast.repository.repository import Repository
from holdfast.repository.restore import RestoreOptions
from holdfast.store.content import ContentStore, hash_in
from holdfast.store.files import FileStore
from holdfast.store.model import Decision, Replace
from holdfast.store.open import read_config
from holdfast.trees import chunks
from holdfast.trees.chunks import StoredFile
from holdfast.trees.manifest import Manifest
from holdfast.trees.shared_dirs import Stored
from proof.crash import Outcome, Scenario, kill_points
from proof.effort import SHARE
from tests.repository.machines import Machine
from tests.repository.stages import LASTING, files_in, put_files
from tests.support.homes import make_repository
from tests.support.s3 import S3Server

pytestmark = pytest.mark.skipif(sys.platform == "win32", reason="the servers are started on POSIX systems")
KINDS = ("postgres", "s3")
FILES = {"README": "read me", "src/a": "a\n" * 9, "src/b": "b\n" * 9, "src/deep/c": "c", "empty": ""}


@pytest.fixture(params=KINDS)
def address(request: pytest.FixtureRequest) -> str:
    """The address of a content store of each kind."""
    if request.param == "postgres":
        return "postgres:"
    server: S3Server = request.getfixturevalue("s3_server")
    return server.bucket()


@pytest.fixture
def first(scratch: Path, postgres_url: str, address: str) -> Machine:
    machine = Machine(scratch / "first")
    machine.create(postgres_url, address)
    return machine


@pytest.fixture
def second(scratch: Path, first: Machine, postgres_url: str, address: str) -> Machine:
    machine = Machine(scratch / "second")
    machine.join(postgres_url, "beta")
    contents.approve(machine.root, address)
    return machine


def findings(machine: Machine) -> list[str]:
    return [str(each) for each in machine.repository.examine(strict=True)]


# --- Joining ------------------------------------------------------------------------------------------


def test_a_machine_joins_with_an_empty_directory_and_gets_the_content(first: Machine, second: Machine) -> None:
    taken = first.take(MAIN, FILES)
    repository = second.repository
    assert repository.context.paths.main == repository.worktree_around(second.root) == "beta"
    assert not repository.context.home.is_here(taken.snapshot_id)
    assert repository.snapshots.named(taken.snapshot_id[:6]).snapshot_id == taken.snapshot_id
    repository.worktrees.create("work", snapshot=f"{MAIN}:head")
    assert files_in(repository.path("work")) == FILES
    assert list(repository.snapshots.verify(taken.snapshot_id)) == []

    more = second.take("work", {"src/d": "from the second"})

    assert more.content
    assert more.clone == "beta"
    compared = first.repository.snapshots.compare(MAIN, taken.snapshot_id, more.snapshot_id)
    assert {each.path for each in compared.changes if each.kind == "f"} == {b"src/d"}
    assert findings(first) == findings(second) == []


def test_the_directories_and_leases_of_a_machine_are_its_own(first: Machine, second: Machine) -> None:
    with pytest.raises(WorktreeElsewhere, match="in the clone beta"):
        first.repository.path("beta")
    with pytest.raises(WorktreeElsewhere):
        second.repository.lease(MAIN)
    second.repository.worktrees.create("work")
    second.repository.worktrees.change_name("work", "renamed")
    states = {each.config.worktree_id: each for each in first.repository.worktrees.states()}
    assert (states["renamed"].clone, states["renamed"].path) == ("beta", second.root / "worktrees/renamed")
    with pytest.raises(Refused, match="garbage is collected in the clone main"):
        second.repository.gc.run("any")


def test_joining_again_changes_nothing_and_other_names_are_refused(
    scratch: Path, second: Machine, postgres_url: str
) -> None:
    assert second.join(postgres_url).is_new is False
    with pytest.raises(AlreadyExists, match="already joined, as beta"):
        second.join(postgres_url, "gamma")
    third = Machine(scratch / "third")
    with pytest.raises(AlreadyExists, match="beta"):
        third.join(postgres_url, "beta")
    assert third.join(postgres_url, "gamma").is_new


def test_a_home_without_a_content_store_is_refused(scratch: Path, postgres_url: str) -> None:
    Machine(scratch / "first").create(postgres_url, content=None)
    second = Machine(scratch / "second")
    with pytest.raises(Refused, match="on one filesystem") as raised:
        second.join(postgres_url)
    assert "--content" in raised.value.hint
    assert not second.root.exists()
    with pytest.raises(NotFound, match="no repository"):
        second.join(f"{postgres_url}_other" if "schema=" in postgres_url else f"{postgres_url}?schema=other")


def test_only_an_empty_directory_outside_repositories_joins(scratch: Path, first: Machine, postgres_url: str) -> None:
    put_files(scratch / "full", {"mine": "stays"})
    with pytest.raises(NotFound):
        Machine(scratch / "full").join(postgres_url)
    assert files_in(scratch / "full") == {"mine": "stays"}
    with pytest.raises(Refused, match="inside the repository"):
        Machine(first.root / "main" / "inside").join(postgres_url)


class Join(Scenario):
    """A join with an empty directory. After a kill, the next join finishes it."""

    def __init__(self, first: Machine, store: str) -> None:
        self._first, self._store = first, store

    def prepare(self, directory: Path) -> None:
        pass

    def operate(self, directory: Path) -> object:
        return Machine(directory / "machine").join(self._store)

    def check(self, directory: Path, outcome: Outcome) -> None:
        machine = Machine(directory / "machine")
        done = machine.join(self._store)
        identity = read_config(machine.root).clone_id
        found = [
            each
            for each in self._first.repository.worktrees.configs()
            if each.plain and each.plain.clone_id == identity
        ]
        assert [each.worktree_id for each in found] == [done.name]
        assert findings(machine) == []
        self._first.repository.worktrees.forget(done.name)


@pytest.mark.sampled(1)
def test_a_killed_join_is_finished_by_the_next(first: Machine, postgres_url: str) -> None:
    kill_points(Join(first, postgres_url), names=LASTING, share=SHARE).require_clean(at_least=3)


def test_older_programs_refuse_a_home_with_content(first: Machine, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(opening, "CONTENT_VERSION", 2)  # what an older program knows
    with pytest.raises(Refused, match="has format 3"):
        Repository(first.root)


# --- Naming a content store ---------------------------------------------------------------------------


def test_a_content_store_can_be_named_later_and_existing_snapshots_are_sent(
    scratch: Path, postgres_url: str, address: str
) -> None:
    first = Machine(scratch / "first")
    first.create(postgres_url, content=None)
    early = first.take(MAIN, FILES)
    assert not early.content
    configure_content(first.root, address)
    second = Machine(scratch / "second")
    second.join(postgres_url, "beta")
    contents.approve(second.root, address)
    with pytest.raises(SnapshotElsewhere) as raised:
        second.repository.snapshots.named(early.snapshot_id)
    assert "snapshot push" in raised.value.hint

    done = first.repository.snapshots.push()

    assert (done.remote, done.pushed, done.known) == (address, (early.snapshot_id,), ())
    assert first.repository.snapshots.push().known == (early.snapshot_id,)
    assert second.repository.snapshots.fetch().fetched[0].snapshot_id == early.snapshot_id
    assert second.repository.context.home.is_here(early.snapshot_id)
    assert findings(first) == findings(second) == []


def test_content_needs_a_server_and_a_valid_address_without_secrets(scratch: Path, postgres_url: str) -> None:
    alone = Machine(scratch / "alone")
    repository = make_repository(alone.root)
    with pytest.raises(Refused, match="needs records that other machines reach"):
        configure_content(repository.root, "postgres:")
    for address in ("mysql://x", "s3://key:secret@bucket/x", "s3://", "s3://b/x?password=secret"):
        with pytest.raises(SettingInvalid) as raised:
            configure_content(repository.root, address)
        assert "secret" not in str(raised.value) + raised.value.hint


def test_the_records_do_not_leave_the_server_that_has_the_content(scratch: Path, first: Machine) -> None:
    with pytest.raises(Refused, match="content"):
        migrate(first.repository.context.store, FileStore(scratch / "files"))


# --- Sending ------------------------------------------------------------------------------------------


@pytest.fixture
def sent(first: Machine, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The hashes of all chunks that are sent."""
    found: list[str] = []
    kind = type(first.contents.store)
    put = kind.put

    def noted(self: ContentStore, chunks: Any) -> None:
        found.extend(map(hash_in, chunks))
        put(self, chunks)

    monkeypatch.setattr(kind, "put", noted)
    return found


def test_only_missing_chunks_travel_and_unchanged_files_are_not_read(
    first: Machine, sent: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    first.take(MAIN, {**FILES, **{f"many/{number}": f"content {number}" for number in range(500)}})
    assert len(sent) > 500
    sent.clear()
    read: list[bytes] = []
    reading = StoredFile.read

    def noted(self: StoredFile, stored: Stored) -> Iterator[bytes]:
        read.append(self.name)
        return reading(self, stored)

    monkeypatch.setattr(StoredFile, "read", noted)
    first.take(MAIN, {"src/a": "changed"})
    assert read == [b"a"]
    assert len(sent) <= 4  # the file, parts of the manifest, the chunk list


def test_the_same_content_is_sent_once(first: Machine, second: Machine, sent: list[str]) -> None:
    first.take(MAIN, FILES)
    sent.clear()
    second.take("beta", FILES)
    assert not {chunks.hash_of(text.encode()) for text in FILES.values()} & set(sent)


def test_every_kind_of_entry_arrives(first: Machine, second: Machine, sent: list[str]) -> None:
    main = first.repository.path(MAIN)
    put_files(main, FILES)
    large = os.urandom(9 << 20)
    (main / "large").write_bytes(large)
    os.symlink("README", main / "link")
    os.link(main / "src/a", main / "src/hard")
    os.link(main / "src/b", main / "zz-hard")
    (main / "src/a").chmod(0o640)
    (main / "bin").mkdir()
    (main / "bin/run").write_text("#!/bin/sh")
    (main / "bin/run").chmod(0o755)
    os.mkfifo(main / "pipe")
    (main / os.fsdecode(b"\xff odd\n")).write_text("odd")
    taken = first.take(MAIN)
    repository = second.repository
    assert list(repository.snapshots.verify(taken.snapshot_id)) == []
    here, there = (each.context.paths.tree(taken.snapshot_id) for each in (repository, first.repository))
    assert Manifest.read(here).payload_hash == Manifest.read(there).payload_hash == taken.payload_hash
    repository.worktrees.create("work", snapshot=taken.snapshot_id)
    work = repository.path("work")
    assert (work / "large").read_bytes() == large
    assert os.readlink(work / "link") == "README"
    assert (work / "src/a").stat().st_ino == (work / "src/hard").stat().st_ino
    assert (work / "bin/run").stat().st_mode & 0o777 == 0o755
    sent.clear()
    with (work / "large").open("ab") as file:
        file.write(b"more")
    second.take("work")
    assert len([each for each in sent if each]) <= 6  # the last piece of the large file, and the manifest


def test_a_restore_in_place_needs_no_upload_and_fetches(first: Machine, second: Machine, sent: list[str]) -> None:
    taken = first.take(MAIN, FILES)
    repository = second.repository
    sent.clear()
    with repository.lease("beta") as lease:
        how = RestoreOptions(reason="test")
        done = repository.snapshots.restore_in_place("beta", taken.snapshot_id, Proof.of(lease), how)
    assert files_in(repository.path("beta")) == FILES
    assert done.published is not None
    assert done.published.content == taken.content
    assert not {chunks.hash_of(text.encode()) for text in FILES.values()} & set(sent)
    assert findings(second) == []


def test_a_later_snapshot_shares_directories_with_its_ancestor_here(
    first: Machine, second: Machine, monkeypatch: pytest.MonkeyPatch
) -> None:
    first.take(MAIN, FILES)
    repository = second.repository
    repository.worktrees.create("work", snapshot=f"{MAIN}:head")
    first.take(MAIN, {"README": "changed"})
    asked: list[str] = []
    kind = type(first.contents.store)
    names = kind.names

    def noted(self: ContentStore, hashes: Collection[str]) -> dict[str, list[str]]:
        asked.extend(hashes)
        return names(self, hashes)

    monkeypatch.setattr(kind, "names", noted)
    later = repository.snapshots.named(f"{MAIN}:head")
    assert list(repository.snapshots.verify(later.snapshot_id)) == []
    assert chunks.hash_of(FILES["src/a"].encode()) not in asked
    assert findings(second) == []


def test_export_and_diff_fetch_and_listing_does_not(scratch: Path, first: Machine, second: Machine) -> None:
    old, new = first.take(MAIN, FILES), first.take(MAIN, {"README": "changed"})
    snapshots = second.repository.snapshots
    assert [each.descriptor.snapshot_id for each in snapshots.everything().entries] == [
        new.snapshot_id,
        old.snapshot_id,
    ]
    home = second.repository.context.home
    assert not any(map(home.is_here, (old.snapshot_id, new.snapshot_id)))
    (patch,) = snapshots.patches(snapshots.compare("beta", old.snapshot_id, new.snapshot_id))
    assert "+changed" in "".join(patch.lines or ())
    third = first.take(MAIN, {"README": "again"})
    snapshots.export(third.snapshot_id, scratch / "exported")
    assert files_in(scratch / "exported") == {**FILES, "README": "again"}


# --- Damage -------------------------------------------------------------------------------------------


def damage(machine: Machine, text: str, data: bytes | None) -> None:
    """Cut, alter or remove a chunk on the server."""
    store = machine.contents.store
    names = store.names([chunks.hash_of(text.encode())])
    for name in next(iter(names.values())):
        store.delete([name])
        if data is not None:
            store.put({name: data})


@pytest.mark.parametrize("data", [None, b"", b"a\na\n", b"b\n" * 9])
def test_lost_cut_and_altered_chunks_are_refused_and_nothing_is_left(
    data: bytes | None, first: Machine, second: Machine
) -> None:
    taken = first.take(MAIN, FILES)
    damage(first, FILES["src/a"], data)
    repository = second.repository
    with pytest.raises(Corrupt, match="lost or changed the chunk"):
        repository.worktrees.create("work", snapshot=taken.snapshot_id)
    assert not repository.context.home.is_here(taken.snapshot_id)
    assert "work" not in [each.worktree_id for each in repository.worktrees.configs()]
    assert findings(second) == []


def test_another_manifest_than_that_of_the_descriptor_is_refused(first: Machine, second: Machine) -> None:
    one, other = first.take(MAIN, FILES), first.take(MAIN, {"README": "changed"})
    store = first.repository.context.store
    key = DESCRIPTORS.key(other.snapshot_id)
    forged = msgspec.structs.replace(other, content=one.content)
    store.transact([key], lambda view, now: Decision([Replace(key, forged)], None))
    with pytest.raises(Corrupt, match="another manifest"):
        second.repository.worktrees.create("work", snapshot=other.snapshot_id)


def test_a_damaged_file_is_not_sent(first: Machine) -> None:
    contents_of = first.take(MAIN, FILES)
    store = first.repository.context.store
    assert store.read(FORMAT) is not None
    tree = first.repository.context.paths.tree(contents_of.snapshot_id)
    stored = tree / "payload/src/a"
    stored.chmod(0o644)
    stored.write_text("A\n" * 9)
    damage(first, FILES["src/a"], None)
    upload = contents.Upload(first.contents, contents_of.snapshot_id, contents_of.payload_hash, None)
    with pytest.raises(Corrupt, match="src/a in the snapshot"):
        upload.send()


# --- Object storage -----------------------------------------------------------------------------------


def test_a_server_that_ignores_conditions_is_refused(scratch: Path, postgres_url: str, s3_server: S3Server) -> None:
    first = Machine(scratch / "first")
    first.create(postgres_url, content=None)
    s3_server.ignores_conditions = True
    with pytest.raises(ContentStoreUnsafe) as raised:
        configure_content(first.root, s3_server.bucket())
    assert "If-None-Match" in raised.value.hint
    assert not first.repository.format.content


def test_another_machine_approves_the_object_storage_first(
    scratch: Path, postgres_url: str, s3_server: S3Server
) -> None:
    address = s3_server.bucket()
    first, second = Machine(scratch / "first"), Machine(scratch / "second")
    first.create(postgres_url, address)
    taken = first.take(MAIN, FILES)
    second.join(postgres_url, "beta")
    with pytest.raises(NotApproved, match="content store") as raised:
        second.repository.worktrees.create("work", snapshot=taken.snapshot_id)
    assert "holdfast trust" in raised.value.hint
    contents.approve(second.root, address)
    second.repository.worktrees.create("work", snapshot=taken.snapshot_id)


def test_an_unreachable_or_refusing_object_storage_is_reported_without_secrets(
    scratch: Path, postgres_url: str, s3_server: S3Server
) -> None:
    first = Machine(scratch / "first")
    first.create(postgres_url, content=None)
    with pytest.raises(StoreUnavailable) as raised:
        configure_content(first.root, "s3://bucket?endpoint=http://127.0.0.1:1&region=us-east-1")
    assert "never shown" not in str(raised.value)
    with pytest.raises(StoreUnavailable):
        configure_content(first.root, f"s3://missing?endpoint={s3_server.endpoint}&region=us-east-1")
    assert not first.repository.format.content
