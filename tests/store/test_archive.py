"""Archived streams on real servers: kills at each step, races with readers and sealers, damaged segments."""

from __future__ import annotations

import contextlib
import hashlib
import itertools
import os
import re
import signal
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import msgspec
import pytest

from holdfast.errors import Archived, AuditChainBroken, Changed, Corrupt, Failure, Refused, StoreIncompatible
from holdfast.fs import calls
from holdfast.ledger import projection
from holdfast.ledger.log import CODEC, EVENTS, Ledger, Recorded
from holdfast.ledger.service import Claims
from holdfast.ledger.verify import verify
from holdfast.repository.migration import migrate
from holdfast.store import archive as archiving
from holdfast.store import audit, etcd, postgres_sql, served
from holdfast.store.archive import ARCHIVES, TOMBSTONE, Archive, Segment, archive, archive_of
from holdfast.store.audit import AuditReader, AuditTrail, check_chain, check_segments
from holdfast.store.etcd_gateway import encoded
from holdfast.store.files import FileStore
from holdfast.store.memory import MemoryStore
from holdfast.store.model import Append, Decision, Replace, Store, Stream, View
from holdfast.store.open import open_address
from holdfast.store.served import Attempt, ServedStore

pytestmark = pytest.mark.skipif(sys.platform == "win32", reason="needs fork")

TRAIL = AuditTrail()
ME = "host:me:1:1"
Client = Callable[..., ServedStore]


@pytest.fixture(params=["postgresql", "etcd"])
def client(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Client]:
    url = request.getfixturevalue("postgres_url" if request.param == "postgresql" else "etcd_url")
    with contextlib.ExitStack() as opened:

        def open_it(suffix: str = "") -> ServedStore:
            store = open_address(tmp_path, re.sub(r"(test[-_]\d+)", rf"\1{suffix}", url))
            assert isinstance(store, ServedStore)
            return opened.enter_context(store)

        open_it().now()
        yield open_it


def fill(store: Store, count: int = 20) -> Ledger:
    """A ledger with claims and waiters, and an audit trail, of `count` records each."""
    ledger = Ledger(store)
    claims = Claims(ledger, patience=3600.0)
    claims.claim("1", "alice", ttl=3600.0, purpose="the parser")
    claims.claim("2", "bob", ttl=3600.0)
    claims.join_queue(claims.request("2", "carol"))
    claims.release("1", "alice")
    ledger.append_many(
        [{"type": "note", "number": each, "text": "é\n\r\u2028"} for each in range(ledger.sequence, count)]
    )

    note(store, *(f"x{each}" for each in range(count)))
    return ledger


def note(store: Store, *events: str) -> None:
    """Append entries to the audit trail."""

    def decide(view: View, now: float) -> Decision[None]:
        return Decision([TRAIL.entry(view, now, each, actor=ME, facts={}) for each in events], None)

    store.transact([TRAIL.stream], decide)


def archive_ledger(store: Store, directory: Path, keep: int = 5, **options: Any) -> list[Segment]:
    return archive(store, projection.archivable(), directory, keep=keep, holder_id=ME, **options)


def archive_audit(store: Store, directory: Path, keep: int = 5, **options: Any) -> list[Segment]:
    return archive(store, audit.archivable(TRAIL), directory, keep=keep, holder_id=ME, **options)


def segments_of(store: Store, stream: Stream[Any]) -> list[Path]:
    found = archive_of(store, stream.name)
    return [Path(each.file) for each in found.segments] if found else []


def whole_ledger(store: Store) -> list[Recorded]:
    """All events: the archived ones from their segments, the others from the server."""
    found = archive_of(store, EVENTS.name)
    lines = archiving.read_segments(found, segments_of(store, EVENTS))
    return [*map(projection.archived_event, lines), *Ledger(store).events(after=found.last if found else 0)]


def claims_of(store: Store) -> object:
    """The claims and waiters as a new process sees them."""
    return projection.ClaimProjection(Ledger(store)).query(lambda state: vars(state).copy())


def whole_trail(store: Store) -> list[str]:
    """The events of the audit trail, all verified."""
    found, names = archive_of(store, TRAIL.stream.name), list[str]()
    for number, line in enumerate(archiving.read_segments(found, segments_of(store, TRAIL.stream)), 1):
        names.append(TRAIL.stream.codec.decode(line, str(number)).event)
    check_segments(store, TRAIL, segments_of(store, TRAIL.stream))
    check_chain(store, TRAIL)
    return names + [each.record.event for each in store.entries(TRAIL.stream, after=found.last if found else 0)]


# --- Readers --------------------------------------------------------------------------------------


def test_claims_and_later_events_are_the_same_with_and_without_the_archived_ones(
    client: Client, tmp_path: Path
) -> None:
    store = client()
    ledger = fill(store)
    before, claims, checkpoints = whole_ledger(store), claims_of(store), tmp_path / "checkpoints"
    old = projection.ClaimProjection(ledger)
    behind = projection.ClaimProjection(Ledger(store))
    behind._catch_up(behind._open(3), 3)  # a process that has read only the first events
    old.query(lambda state: None)
    made = archive_ledger(store, tmp_path / "a")
    assert [(each.first, each.last) for each in made] == [(1, 15)]
    assert store.engine.page_of_stream(EVENTS.name, 0, 99)[0] == (15, TOMBSTONE)
    assert whole_ledger(store) == before
    for each in (old, behind, projection.ClaimProjection(Ledger(store, checkpoint_root=checkpoints))):
        assert each.query(lambda state: vars(state).copy()) == claims
    held = Claims(Ledger(store))
    assert [each.owner for each in held.active()] == ["bob"]
    assert [each.owner for each in held.waiting("2")] == ["carol"]
    held.release("2", "bob")
    assert ledger.append({"type": "note"}).sequence == 22
    assert projection.ClaimProjection(Ledger(store)).at_sequence(15).claims.keys() == {"2"}
    with pytest.raises(Archived):
        projection.ClaimProjection(Ledger(store)).at_sequence(14)
    assert verify(ledger).findings == verify(ledger, segments=segments_of(store, EVENTS)).findings == []
    assert (verify(ledger).events, verify(ledger, segments=segments_of(store, EVENTS)).events) == (7, 22)


def test_reading_an_archived_event_names_its_file(client: Client, tmp_path: Path) -> None:
    store = client()
    ledger = fill(store)
    first = ledger.read(1)
    archive_ledger(store, tmp_path / "a", keep=10)
    archive_ledger(store, tmp_path / "b", keep=5)
    for number, name in ((1, "a/ledger-1-10.jsonl"), (10, "a/ledger-1-10.jsonl"), (11, "b/ledger-11-15.jsonl")):
        with pytest.raises(Archived, match=name):
            ledger.read(number)
        with pytest.raises(Archived, match=name):
            list(ledger.events(after=number - 1))
    assert ledger.read(16).sequence == 16
    assert [each.sequence for each in ledger.latest()] == [16, 17, 18, 19, 20]
    assert ledger.archived == 15
    assert [each.sequence for each in ledger.latest(2)] == [19, 20]
    assert [each.sequence for each in ledger.watch(after=15, timeout=0.05)] == [16, 17, 18, 19, 20]
    assert ledger.find(ledger.read(20).event["id"]) == ledger.read(20)
    with pytest.raises(Archived):  # it may be there: "it was not appended" would be wrong
        ledger.find(first.event["id"])
    assert ledger.find("unknown", after=15) is None
    with pytest.raises(Archived):
        ledger.fold(lambda count, _: count + 1, 0)


def test_the_audit_trail_goes_on_after_its_archived_entries(client: Client, tmp_path: Path) -> None:
    store = client()
    fill(store)
    before = whole_trail(store)
    follower = AuditReader(store, TRAIL)
    lagging = AuditReader(store, TRAIL, verified=True)
    first = next(lagging.read())
    assert first.number == 1
    list(follower.read())
    archive_audit(store, tmp_path, keep=10)
    archive_audit(store, tmp_path, keep=5)
    assert whole_trail(store) == before
    assert check_chain(store, TRAIL).entries == 20
    for verified in (True, False):
        reader = AuditReader(store, TRAIL, verified=verified)
        assert [each.number for each in reader.read()] == [16, 17, 18, 19, 20]
        assert (reader.archived, reader.end.entries) == (15, 20)
    assert [each.number for each in AuditReader(store, TRAIL, last=2).read()] == [19, 20]
    assert [each.number for each in AuditReader(store, TRAIL, last=20).read()] == [16, 17, 18, 19, 20]
    assert [each.number for each in lagging.read()] == [16, 17, 18, 19, 20]
    note(store, "later")
    assert [each.number for each in follower.read()] == [21]


def test_a_reader_that_meets_the_deletion_gets_all_events_or_a_failure(
    client: Client, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Readers run at each step of a deletion in small pieces; the trail is sealed there, too."""
    monkeypatch.setattr(served, "_DROPPED_AT_ONCE", 2)
    monkeypatch.setattr(served, "_FIRST_PAGE", 4)
    store, other = client(), client()
    fill(store, 30)
    readers = [(Ledger(other).events(), list[int]()) for _ in range(20)]
    ended: list[int] = []

    def read_some() -> None:
        for number, (source, seen) in enumerate(readers):
            if len(seen) <= number and number not in ended:
                try:
                    seen.append(next(source).sequence)
                except Archived:
                    ended.append(number)
            assert seen == list(range(1, len(seen) + 1))
        note(other, "meanwhile")
        assert check_chain(other, TRAIL).entries
        assert len(whole_ledger(other)) == 30

    with stepping(store, lambda what: read_some()):
        archive_ledger(store, tmp_path)
        archive_audit(store, tmp_path)
    for number, (source, seen) in enumerate(readers):
        try:
            seen += [each.sequence for each in source]
        except Archived:
            ended.append(number)
        assert seen == list(range(1, len(seen) + 1))
    assert ended


@pytest.mark.parametrize("keep", [12, 3])
def test_a_verification_goes_on_after_what_is_archived_meanwhile(
    client: Client, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, keep: int
) -> None:
    monkeypatch.setattr(served, "_FIRST_PAGE", 4)
    store, other = client(), client()
    ledger, original = Ledger(store, checkpoint_root=tmp_path), projection.ClaimState.apply
    fill(other)

    keeps = [keep]

    def apply(state: projection.ClaimState, recorded: Recorded) -> None:
        if recorded.sequence == 2 and keeps:
            archive_ledger(other, tmp_path, keep=keeps.pop())
        original(state, recorded)

    with mock.patch.object(projection.ClaimState, "apply", apply):
        assert verify(ledger).findings == []
    assert verify(ledger).findings == []


@contextlib.contextmanager
def stepping(store: ServedStore, do: Callable[[str], object]) -> Iterator[None]:
    """Call `do` before and after each change on disk and on the server."""
    engine: Any = store.engine

    def stepped(name: str, original: Callable[..., Any]) -> Callable[..., Any]:
        def call(*arguments: Any, **options: Any) -> Any:
            do(f"before {name}")
            answer = original(*arguments, **options)
            do(f"after {name}")
            return answer

        return call

    @contextlib.contextmanager
    def attempt(*arguments: Any, **options: Any) -> Iterator[Attempt]:
        with type(engine).attempt(engine, *arguments, **options) as made:
            yield made._replace(commit=stepped("commit", made.commit))

    with contextlib.ExitStack() as stack:
        for owner, names in ((engine, ("bury", "drop_records")), (calls, ("fsync", "link", "replace", "unlink"))):
            for name in names:
                stack.enter_context(mock.patch.object(owner, name, stepped(name, getattr(owner, name))))
        stack.enter_context(mock.patch.object(engine, "attempt", attempt))
        yield


# --- Kills ----------------------------------------------------------------------------------------


def kill_at_each_step(
    client: Client, act: Callable[[ServedStore], object], check: Callable[[ServedStore, ServedStore], None]
) -> int:
    """Run `act` on equal stores, each time in a process that is killed one step later than the last. After each kill,
    compare with a store on which it was never run; do it again; compare again."""
    control = client("control")
    fill(control)
    for number in range(1, 200):
        store = client(f"k{number}")
        copy(control, store)
        child = os.fork()
        if child == 0:
            steps = itertools.count(1)

            def step(what: str, number: int = number, steps: Iterator[int] = steps) -> None:
                if next(steps) == number:
                    os.kill(os.getpid(), signal.SIGKILL)

            status = 1
            with contextlib.suppress(BaseException):
                mine = client(f"k{number}")
                with stepping(mine, step):
                    act(mine)
                status = 0
            os._exit(status)
        status = os.waitpid(child, 0)[1]
        check(store, control)
        act(store)
        assert store.unfinished_archives() == {}
        check(store, control)
        if status == 0:
            return number - 1
        assert os.WIFSIGNALED(status), status
    raise AssertionError("it never ends")


def copy(source: Store, target: Store) -> None:
    """Copy the ledger and the trail."""
    plain = AuditTrail()
    plain.stream.chain = None
    list(source.entries(TRAIL.stream))  # seals
    streams: list[Stream[Any]] = [EVENTS, plain.stream]
    for stream in streams:
        changes = [Append(stream, each.record) for each in source.entries(stream)]
        target.transact([stream], lambda view, now: Decision(changes, None))  # noqa: B023 (called at once)


def check_whole(store: ServedStore, control: ServedStore) -> None:
    """Nothing is lost or altered, and claims and verification are as they were."""
    assert whole_ledger(store) == whole_ledger(control)
    assert whole_trail(store)[:20] == whole_trail(control)
    assert claims_of(store) == claims_of(control)
    assert verify(Ledger(store), segments=segments_of(store, EVENTS)).sound


@pytest.mark.sampled(1)
@pytest.mark.parametrize("stream", ["ledger", "audit"])
def test_a_kill_at_any_step_loses_nothing(
    client: Client, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, stream: str
) -> None:
    monkeypatch.setattr(served, "_DROPPED_AT_ONCE", 3)
    monkeypatch.setattr(archiving, "MOST_BYTES", 3000)  # several segments
    archive_it = archive_ledger if stream == "ledger" else archive_audit

    def act(store: ServedStore) -> None:
        archive_it(store, tmp_path / store.address.rpartition("k")[2])

    assert kill_at_each_step(client, act, check_whole) > 20


def test_a_deletion_before_the_commit_point_is_found(
    client: Client, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The planted fault."""
    original = archiving._commit

    def commit(store: Any, key: Any, before: Any, after: Archive, also: Any) -> None:
        store.drop(EVENTS.name, after.last)
        original(store, key, before, after, also)

    monkeypatch.setattr(archiving, "_commit", commit)
    with pytest.raises((AssertionError, Corrupt)):
        kill_at_each_step(client, lambda store: archive_ledger(store, tmp_path), check_whole)


def test_an_unfinished_deletion_is_finished_by_the_next_archive(client: Client, tmp_path: Path) -> None:
    store = client()
    fill(store)
    with mock.patch.object(ServedStore, "drop"):
        archive_ledger(store, tmp_path)
    assert store.unfinished_archives() == {EVENTS.name: 15}
    assert [each.sequence for each in Ledger(store).latest()] == list(range(1, 21))
    assert verify(Ledger(store)).findings == []
    assert archive_ledger(store, tmp_path) == []
    assert store.unfinished_archives() == {}


# --- Commits --------------------------------------------------------------------------------------


def test_a_client_that_was_frozen_while_its_end_was_archived_cannot_commit(client: Client, tmp_path: Path) -> None:
    store, frozen = client(), client()
    ledger = fill(store, 10)
    tries: list[int] = []

    def decide(view: View, now: float) -> Decision[None]:
        tries.append(view.end(EVENTS))
        if len(tries) == 1:
            ledger.append_many([{"type": "note"}] * 20)
            archive_ledger(store, tmp_path, keep=3)
        return Decision([Append(EVENTS, {"type": "late"})], None)

    assert frozen.transact([EVENTS], decide).positions == (31,)
    assert tries == [10, 30]
    assert [each.sequence for each in ledger.latest()] == [28, 29, 30, 31]


def test_a_client_that_was_frozen_before_the_first_event_cannot_commit(client: Client, tmp_path: Path) -> None:
    store, frozen = client(), client()
    tries: list[int] = []

    def decide(view: View, now: float) -> Decision[None]:
        tries.append(view.end(EVENTS))
        if len(tries) == 1:
            Ledger(store).append_many([{"type": "note"}] * 10)
            archive_ledger(store, tmp_path, keep=3)
        return Decision([Append(EVENTS, {"type": "late"})], None)

    assert frozen.transact([EVENTS], decide).positions == (11,)


def test_a_claim_that_was_frozen_while_what_it_read_was_archived_is_decided_again(
    client: Client, tmp_path: Path
) -> None:
    store, other = client(), client()
    ledger, claims, frozen = fill(other, 10), Claims(Ledger(store)), list[None]()
    claims.active()
    ledger.append({"type": "note"})  # the claim has to read it
    original = type(store.engine).attempt

    @contextlib.contextmanager
    def attempt(*arguments: Any, **options: Any) -> Iterator[Attempt]:
        with original(store.engine, *arguments, **options) as made:
            if not frozen:
                frozen.append(None)
                ledger.append_many([{"type": "note"}] * 10)
                archive_ledger(other, tmp_path, keep=3)
                with mock.patch.object(claims._projection, "_state", None):
                    yield made
            else:
                yield made

    with mock.patch.object(store.engine, "attempt", attempt):
        assert claims.claim("3", "dave").claim.sequence == 22
    assert {each.owner for each in claims.active()} == {"bob", "dave"}


def test_of_two_processes_that_archive_at_once_one_is_refused(client: Client, tmp_path: Path) -> None:
    store, other = client(), client()
    fill(store)
    original = archiving._commit

    def commit(*arguments: Any) -> None:
        with mock.patch.object(archiving, "_commit", original):
            archive_ledger(other, tmp_path / "other", keep=8)
        original(*arguments)

    with mock.patch.object(archiving, "_commit", commit), pytest.raises(Changed):
        archive_ledger(store, tmp_path / "mine")
    assert segments_of(store, EVENTS) == [tmp_path / "other/ledger-1-12.jsonl"]
    assert verify(Ledger(store), segments=segments_of(store, EVENTS)).sound


def test_the_last_record_is_never_archived(client: Client, tmp_path: Path) -> None:
    store = client()
    fill(store)
    archive_ledger(store, tmp_path, keep=0)
    assert [each.sequence for each in Ledger(store).latest()] == [20]
    assert archive_ledger(store, tmp_path, keep=0) == []
    assert Ledger(store).append({"type": "note"}).sequence == 21


def test_only_what_is_older_is_archived(client: Client, tmp_path: Path) -> None:
    ledger = Ledger(client())
    times = ["2024-01-01T00:00:00Z", "2024-01-02T00:00:00Z", "2024-03-01T00:00:00Z", "2024-01-03T00:00:00Z"]
    ledger.append_many([{"type": "note", "timestamp": each} for each in times])
    february = 1_706_745_600.0
    made = archive_ledger(ledger.store, tmp_path, keep=1, before=february, dry_run=True)
    assert (archive_of(ledger.store, EVENTS.name), list(tmp_path.glob("ledger*"))) == (None, [])
    assert archive_ledger(ledger.store, tmp_path, keep=1, before=february)[0].sha256 == made[0].sha256
    assert [each.sequence for each in ledger.latest()] == [3, 4]


# --- Damage ---------------------------------------------------------------------------------------


def _alter(path: Path) -> None:
    path.write_bytes(path.read_bytes().replace(b"alice", b"mallo").replace(b'"x1"', b'"y1"'))


@pytest.mark.parametrize("damage", [_alter, Path.unlink, lambda path: path.write_bytes(b"")])
def test_a_damaged_segment_is_found(client: Client, tmp_path: Path, damage: Callable[[Path], object]) -> None:
    store = client()
    fill(store)
    for archive_it, stream in ((archive_ledger, EVENTS), (archive_audit, TRAIL.stream)):
        archive_it(store, tmp_path, keep=12)
        archive_it(store, tmp_path, keep=5)
        damage(segments_of(store, stream)[0])
    left = [each for each in segments_of(store, EVENTS) if each.exists()]
    (finding,) = verify(Ledger(store), segments=left).findings
    assert (finding.code, finding.subject) == ("segment", str(tmp_path / "ledger-1-8.jsonl"))
    with pytest.raises(Corrupt, match=r"audit-1-8\.jsonl"):
        check_segments(store, TRAIL, [each for each in segments_of(store, TRAIL.stream) if each.exists()])
    assert check_chain(store, TRAIL).entries == 20


def test_a_file_that_is_no_segment_is_found(client: Client, tmp_path: Path) -> None:
    store = client()
    fill(store)
    archive_audit(store, tmp_path)
    with pytest.raises(Corrupt, match="is not a segment"):
        check_segments(store, TRAIL, [*segments_of(store, TRAIL.stream), tmp_path / "other"])


def test_a_segment_with_other_entries_does_not_join_to_the_rest(client: Client, tmp_path: Path) -> None:
    """Even if the forger has changed the list of segments."""
    store = client()
    fill(store)
    archive_audit(store, tmp_path)
    key, path = ARCHIVES[TRAIL.stream.name], tmp_path / "audit-1-15.jsonl"
    forged = MemoryStore()
    fill(forged)
    path.write_bytes(
        b"".join(TRAIL.stream.codec.encode(each.record) + b"\n" for each in list(forged.entries(TRAIL.stream))[:15])
    )
    found = archive_of(store, TRAIL.stream.name)
    assert found is not None
    segment = msgspec.structs.replace(found.segments[0], sha256=hashlib.sha256(path.read_bytes()).hexdigest())
    store.transact([key], lambda view, now: Decision([Replace(key, Archive((segment,), found.state))], None))
    with pytest.raises(AuditChainBroken):
        check_segments(store, TRAIL, [path])


def test_a_broken_chain_is_not_archived(client: Client, tmp_path: Path) -> None:
    store = client()
    plain = AuditTrail()
    plain.stream.chain = None
    entry = audit.AuditEntry(1, "2026-01-01T00:00:00Z", "x", ME, {}, audit.START, "wrong")
    store.transact([plain.stream], lambda view, now: Decision([Append(plain.stream, entry)] * 3, None))
    with pytest.raises(AuditChainBroken):
        archive_audit(store, tmp_path, keep=1)
    assert list(tmp_path.glob("audit*")) == []


def test_another_file_in_the_place_of_a_segment_is_kept(client: Client, tmp_path: Path) -> None:
    store = client()
    fill(store)
    (tmp_path / "ledger-1-15.jsonl").write_text("mine")
    with pytest.raises(Failure, match="already exists, with other content"):
        archive_ledger(store, tmp_path)
    assert (tmp_path / "ledger-1-15.jsonl").read_text() == "mine"
    assert len(whole_ledger(store)) == 20


# --- Other stores and versions --------------------------------------------------------------------


@pytest.mark.parametrize("archive_it", [archive_ledger, archive_audit])
def test_plain_files_are_refused(tmp_path: Path, archive_it: Callable[..., object]) -> None:
    with FileStore(tmp_path) as store:
        fill(store)
        with pytest.raises(Refused, match="plain files"):
            archive_it(store, tmp_path)


def test_an_archived_store_is_not_migrated(client: Client, tmp_path: Path) -> None:
    store = client()
    fill(store)
    archive_audit(store, tmp_path)
    for source, target in ((store, MemoryStore()), (MemoryStore(), store)):
        with pytest.raises(Refused, match="archived"):
            migrate(source, target)


def test_an_older_version_refuses_an_archived_store_or_fails_at_the_tombstone(
    client: Client, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store, running = client(), client()
    fill(store)
    running.now()
    archive_ledger(store, tmp_path)
    with mock.patch.object(archiving, "TOMBSTONE", b"unknown"):
        for after in (0, 7, 14):
            with pytest.raises(Corrupt):
                list(running.entries(EVENTS, after=after))
        assert next(running.entries(EVENTS, after=15)).position == 16
    with pytest.raises(Corrupt):
        CODEC.decode(TOMBSTONE, "here")
    for module in (etcd, postgres_sql):
        monkeypatch.setattr(module, "SCHEMA_VERSION", 2)
    with pytest.raises(StoreIncompatible):
        client().now()


def test_a_store_of_etcd_that_was_archived_is_not_set_back_by_the_upgrade_from_version_1(
    etcd_url: str, tmp_path: Path
) -> None:
    """A client that has found version 1 appends after another client has archived."""
    with etcd.EtcdStore(etcd_url) as store:
        fill(store)
        gateway, keys = store.engine.gateway, store.engine.keys  # type: ignore[attr-defined]
        gateway.ask("/v3/kv/txn", {"success": [etcd._put(keys.schema, b"1")]})
        with etcd.EtcdStore(etcd_url) as late:
            late.now()
            archive_ledger(store, tmp_path)
            Ledger(late).append({"type": "note"})
        rows = gateway.ask("/v3/kv/range", {"key": encoded(keys.schema)})["kvs"]
        assert etcd._value(rows[0]) == b"%d" % etcd.FIRST_WITH_ARCHIVES


def test_a_tombstone_without_an_archive_is_damage(client: Client) -> None:
    store = client()
    fill(store)
    store.drop(EVENTS.name, 10)
    with pytest.raises(Corrupt, match="no archive lists them"):
        list(store.entries(EVENTS))
