"""Migration from one store to another, in both directions, without loss."""

from __future__ import annotations

import contextlib
import json
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from holdfast.errors import Corrupt, Refused, StoreMoved
from holdfast.leases.service import LeaseService
from holdfast.repository.migration import RawCodec, migrate
from holdfast.store.audit import AuditTrail, verify
from holdfast.store.files import FileStore
from holdfast.store.layout import TABLE, Kind
from holdfast.store.memory import MemoryStore
from holdfast.store.model import Append, Create, Delete, Family, Key, Replace, Store, Stream
from holdfast.store.open import open_address, open_read_only, open_store
from holdfast.testing.backend import EVENTS, INDEX, ISSUES, Event, Item, apply, number_of
from tests.cli.commands import data, error, holdfast

MANY = 130
TRAIL = AuditTrail()


def fill(store: Store) -> None:
    """Put records into every row of the layout, and many into one."""
    for row in TABLE:
        content = json.dumps({"of": row.key, "text": "é\u2028\\"}, ensure_ascii=False).encode()
        if row.key.startswith(("jvs/leases", "jvs/named", "jvs/tokens", "jvs/queues", "jvs/audit", "ledger/archive")):
            continue
        if row.kind is Kind.DOCUMENT:
            names = [row.key.replace("{name}", each) for each in ("a", "a.json", "B")]
            apply(store, *(Create(Key(name, RawCodec()), content) for name in dict.fromkeys(names)))
        else:
            apply(store, *[Append(Stream(row.key, RawCodec()), content)] * 3)
    apply(store, *(Create(ISSUES.key(f"m{each}"), Item(each)) for each in range(MANY)))
    leases = LeaseService(store, TRAIL)
    lease = leases.acquire("main", leases.request(ttl=60)).lease
    leases.release("main", lease.lock_id)


def everything(store: Store) -> dict[str, object]:
    found: dict[str, object] = {}
    for row in TABLE:
        if row.kind is not Kind.DOCUMENT:
            stream: Stream[bytes] = Stream(row.key, RawCodec())
            found[row.key] = [each.record for each in store.entries(stream)]
        elif "{name}" in row.key:
            family = Family(row.key.removesuffix("/{name}"), RawCodec())
            found |= {f"{family.name}/{name}": each.record for name, each in store.scan(family)}
        elif document := store.read(Key(row.key, RawCodec())):
            found[row.key] = document.record
    return found


def without_index(store: Store) -> dict[str, object]:
    """Everything but the index of issues, which only files have: see `tests/issues/test_served_trackers.py`."""
    return {name: each for name, each in everything(store).items() if name not in ("jit/index", "jit/unlisted")}


@pytest.mark.sampled(1)
def test_everything_arrives_on_every_store_and_comes_back(tmp_path: Path, store_url: str) -> None:
    origin, back = FileStore(tmp_path / "origin"), FileStore(tmp_path / "back")
    fill(origin)
    there = open_address(tmp_path, store_url)

    moved = migrate(origin, there)
    assert (moved.copied_documents, moved.copied_records) == (moved.documents, moved.records)
    assert moved.documents > MANY
    migrate(there, back)

    assert without_index(origin) == without_index(there) == without_index(back)
    assert [entry.event for entry in verify(back.entries(TRAIL.stream))] == ["lock_acquired", "lock_released"]
    leases = LeaseService(back, TRAIL)
    assert leases.acquire("main", leases.request(ttl=60)).lease.fencing_token == 2  # the token counter was migrated too
    for store in (origin, there, back):
        store.close()


def test_an_interrupted_migration_resumes() -> None:
    source = MemoryStore()
    fill(source)

    class Interrupted(MemoryStore):
        commits = 0

        def transact(self, *arguments: Any, **options: Any) -> Any:
            type(self).commits += 1
            if self.commits == 5:
                raise KeyboardInterrupt
            return super().transact(*arguments, **options)

    target = Interrupted()
    with pytest.raises(KeyboardInterrupt):
        migrate(source, target)
    moved = migrate(source, target)

    assert 0 < moved.copied_documents < moved.documents
    assert everything(source) == everything(target)


INDEX_RAW = Key(INDEX.name, RawCodec())


def test_changes_to_the_source_during_the_migration_are_copied() -> None:
    source = MemoryStore()
    fill(source)

    class Busy(MemoryStore):
        changed = False

        def transact(self, keys: Any, *arguments: Any, **options: Any) -> Any:
            result = super().transact(keys, *arguments, **options)
            if not self.changed and EVENTS in keys:
                self.changed = True
                apply(source, Replace(INDEX_RAW, b"{}"), Delete(ISSUES.key("m0")), Append(EVENTS, Event(9)))
            return result

    target = Busy()
    moved = migrate(source, target)

    assert moved.passes == 3
    assert everything(source) == everything(target)


def test_a_dry_run_changes_nothing_and_counts_everything() -> None:
    source, target = MemoryStore(), MemoryStore()
    fill(source)
    moved = migrate(source, target, dry_run=True)

    assert moved.copied_documents == moved.documents > MANY
    assert not any(everything(target).values())


def test_a_foreign_record_in_the_target_is_not_overwritten() -> None:
    source, target = MemoryStore(), MemoryStore()
    fill(source)
    apply(target, Create(ISSUES.key("m7"), Item(-7)))

    with pytest.raises(Refused, match="jit/issues/m7"):
        migrate(source, target)
    assert number_of(target, ISSUES.key("m7")) == -7


def test_a_store_with_a_held_lease_is_not_migrated() -> None:
    source = MemoryStore()
    fill(source)
    leases = LeaseService(source, TRAIL)
    leases.acquire("main", leases.request(ttl=60))

    with pytest.raises(Refused, match="main is leased"):
        migrate(source, MemoryStore())


def test_damage_is_reported_and_not_copied(tmp_path: Path) -> None:
    source, target = FileStore(tmp_path / "source"), MemoryStore()
    fill(source)
    (tmp_path / "source/.jit/index.json").write_text("{")

    with pytest.raises(Corrupt, match="index"):
        migrate(source, target)


@pytest.mark.sampled(1)
def test_the_command_migrates_a_repository_and_switches_it_over(tmp_path: Path, store_url: str) -> None:
    root = tmp_path / "repository"
    fill(FileStore(root))
    tried = data(holdfast("migrate", root, "--to", store_url, "--dry-run", "--json"))
    assert tried["copied_documents"] > MANY
    assert not (root / ".holdfast/config.json").exists()
    assert isinstance(open_read_only(root, store_url), MemoryStore)  # the dry run created nothing

    done = holdfast("migrate", root, "--to", store_url)
    assert "now uses the new store" in done.stdout, done.stderr
    store = open_store(root)
    assert without_index(store) == without_index(FileStore(root))
    apply(store, Replace(INDEX_RAW, b"{}"))
    store.close()

    again = holdfast("migrate", root, "--to", store_url, "--json")
    assert error(again)["code"] == "E_USAGE"
    refused = holdfast("migrate", root, "--to", "files", "--json")
    assert (refused.returncode, error(refused)["code"]) == (7, "E_REFUSED")
    back = data(holdfast("migrate", root, "--to", "files", "--overwrite", "--json"))
    assert back["copied_documents"] == (1 if store_url.startswith("file") else 2)  # 2: the note beside the index too
    assert isinstance(open_store(root), FileStore)


def test_the_store_set_in_the_environment_is_the_source(tmp_path: Path) -> None:
    fill(FileStore(tmp_path / "origin"))
    env = {"HOLDFAST_STORE": (tmp_path / "origin").as_uri()}
    moved = data(holdfast("migrate", tmp_path / "repository", "--to", "files", "--json", env=env))
    told = holdfast("migrate", tmp_path / "repository", "--to", "files", env=env).stdout

    assert moved["copied_documents"] > MANY
    assert "HOLDFAST_STORE is set" in told
    assert everything(FileStore(tmp_path / "repository")) == everything(FileStore(tmp_path / "origin"))


def test_a_process_that_still_uses_the_old_store_is_told_where_the_records_are(tmp_path: Path, store_url: str) -> None:
    root, target = tmp_path / "repository", (tmp_path / "target").as_uri()
    late = open_address(root, store_url)
    apply(late, Create(ISSUES.key("a"), Item(1)), Create(ISSUES.key("b"), Item(1)))

    data(holdfast("migrate", root, "--from", store_url, "--to", target, "--json"))
    for changes in ([Replace(ISSUES.key("a"), Item(2))], [Create(ISSUES.key("c"), Item(2)), Append(EVENTS, Event(2))]):
        with pytest.raises(StoreMoved, match="target") as refused:
            apply(late, *changes)
        assert refused.value.facts["moved_to"] == target
    assert number_of(late, ISSUES.key("a")) == 1  # it can still be read

    data(holdfast("migrate", root, "--to", store_url, "--overwrite", "--json"))
    apply(late, Replace(ISSUES.key("a"), Item(3)))
    late.close()


def test_commits_during_a_migration_are_copied_or_refused(tmp_path: Path, store_url: str) -> None:
    source, writer, target = open_address(tmp_path, store_url), open_address(tmp_path, store_url), MemoryStore()
    apply(source, Create(ISSUES.key("a"), Item(0)))
    acknowledged: list[int] = []
    refused: list[bool] = []
    started = threading.Event()

    def write() -> None:
        with contextlib.suppress(StoreMoved):
            while True:
                apply(writer, Append(EVENTS, Event(len(acknowledged))))
                acknowledged.append(len(acknowledged))
                started.set()
        refused.append(True)

    with ThreadPoolExecutor() as pool:
        ended = pool.submit(write)
        assert started.wait(60)
        source.set_moved("etcd://elsewhere/")
        migrate(source, target)
        ended.result(60)
    assert refused
    assert [each.record.number for each in target.entries(EVENTS)] == acknowledged
    source.close()
    writer.close()


def test_a_migration_that_cannot_be_completed_leaves_the_old_store_in_use() -> None:
    source = MemoryStore()
    fill(source)

    def fail() -> None:
        raise Refused("no")

    with pytest.raises(Refused, match="no"):
        migrate(source, MemoryStore(), address="elsewhere", switch=fail)
    apply(source, Append(EVENTS, Event(9)))
