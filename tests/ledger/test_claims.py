"""Claims through the service, on both stores, with a manual clock."""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from holdfast.clock import ManualClock, format_instant
from holdfast.errors import (
    LockExpired,
    LockNotHeld,
    LockTimeout,
    NameInvalid,
    NodeLocked,
    NotFound,
    SettingInvalid,
    UsageFailure,
)
from holdfast.ledger import log, projection
from holdfast.ledger.log import EVENTS, Ledger, is_under, node_id, order
from holdfast.ledger.service import Claims
from holdfast.locks.identity import current_holder, described
from holdfast.locks.ledger_lock import LedgerLock
from holdfast.store.files import FileStore
from holdfast.store.memory import MemoryStore
from holdfast.store.model import Create, Decision, Store
from tests.ledger.ledgers import acquired, append_raw, claims_on
from tests.locks.workers import wait_until


@pytest.fixture
def claims(ledger: Ledger) -> Claims:
    return Claims(ledger)


def kinds(ledger: Ledger, after: int = 0) -> list[str]:
    return [each.event["type"] for each in ledger.events(after=after)]


# --- Taking, extending, releasing --------------------------------------------------------------------------


@pytest.mark.req("LG-06")
def test_claim_events_have_the_specified_fields(claims: Claims, clock: ManualClock) -> None:
    start = clock.wall()
    held = claims.claim("1.2.3", "agent-1", ttl=60)
    claims.release("1.2.3", "agent-1")
    claims.claim("1.2.3", "agent-2", ttl=60)
    clock.advance(61)
    claims.reap()

    taken, released, again, reaped = (each.event for each in claims.ledger.events())
    assert taken == {
        "type": "lock_acquired",
        "timestamp": format_instant(start),
        "node_id": "1.2.3",
        "owner": "agent-1",
        "expires_at": format_instant(start + 60),
        "claim_id": held.claim.claim_id,
        "holder": described(current_holder()),
        "id": taken["id"],
    }
    assert {"type", "timestamp", "node_id", "owner"} <= released.keys() & reaped.keys()
    assert (released["type"], released["owner"]) == ("lock_released", "agent-1")
    assert (reaped["type"], reaped["owner"]) == ("lock_reaped", "agent-2")
    assert again["type"] == "lock_acquired"


@pytest.mark.req("LG-15")
def test_a_node_that_another_has_claimed_is_already_locked(claims: Claims, clock: ManualClock) -> None:
    claims.claim("1.2", "a", ttl=60)
    clock.advance(20)
    with pytest.raises(NodeLocked, match="node already locked") as caught:
        claims.claim("1.2", "b")
    assert caught.value.facts["actor"] == "a"
    assert caught.value.facts["time_left"] == pytest.approx(40)
    assert "ledger claim 1.2 --actor" in caught.value.hint
    with pytest.raises(NodeLocked):
        claims.claim("1.2", "a")  # a second process of the same agent is refused too
    assert claims.claim("1.2.1", "b").claim.owner == "b"
    assert kinds(claims.ledger) == ["lock_acquired"] * 2


@pytest.mark.req("LG-15")
def test_only_the_owner_releases_or_extends(claims: Claims) -> None:
    held = claims.claim("1", "a").claim
    for act in (claims.release, claims.extend):
        for owner, claim_id in (("b", ""), ("a", "another"), ("b", held.claim_id)):
            with pytest.raises(LockNotHeld):
                act("1", owner, claim_id=claim_id)
        with pytest.raises(LockNotHeld):
            act("2", "a")
    assert kinds(claims.ledger) == ["lock_acquired"]
    assert claims.extend("1", "a", claim_id=held.claim_id).claim_id == held.claim_id
    assert claims.release("1", "a", claim_id=held.claim_id).owner == "a"


def test_extending_a_claim_restarts_its_ttl(claims: Claims, clock: ManualClock) -> None:
    first = claims.claim("1", "a", ttl=60).claim
    clock.advance(50)
    second = claims.extend("1", "a", ttl=100)

    assert second.acquired_at == first.acquired_at
    assert second.expiry() == pytest.approx(clock.wall() + 100)
    clock.advance(99)
    assert claims.active() == [second]
    clock.advance(1)
    assert claims.active() == []
    with pytest.raises(LockExpired):
        claims.extend("1", "a")
    assert claims.release("1", "a") == second  # nobody has reaped it yet


@pytest.mark.req("LG-08", "LG-17")
def test_an_expired_claim_is_not_active_and_can_be_taken_over(claims: Claims, clock: ManualClock) -> None:
    claims.claim("1", "a", ttl=10)
    clock.advance(9.999)
    with pytest.raises(NodeLocked):
        claims.claim("1", "b")
    clock.advance(0.001)
    assert claims.active() == []
    assert [each.owner for each in claims.expired()] == ["a"]
    assert claims.claim("1", "b").claim.owner == "b"
    assert kinds(claims.ledger) == ["lock_acquired", "lock_reaped", "lock_acquired"]
    with pytest.raises(LockNotHeld):
        claims.release("1", "a")


def test_the_claim_of_another_program_counts_like_ours(claims: Claims, clock: ManualClock) -> None:
    append_raw(claims.ledger, acquired("1.4", "go-tool", expires_in=60, at=clock.wall()))
    with pytest.raises(NodeLocked, match="go-tool"):
        claims.claim("1.4", "a")
    assert claims.extend("1.4", "go-tool", ttl=30).claim_id == ""
    assert claims.release("1.4", "go-tool").owner == "go-tool"
    assert claims.active() == []


@pytest.mark.req("LG-08")
@pytest.mark.parametrize("kind", ["lock_released", "lock_reaped"])
def test_a_release_or_reap_that_names_another_owner_ends_the_claim_as_in_the_replay_of_the_specification(
    claims: Claims, clock: ManualClock, kind: str
) -> None:
    held = claims.claim("1", "a")
    stamp = format_instant(clock.wall())
    append_raw(claims.ledger, {"type": kind, "timestamp": stamp, "node_id": "1", "owner": "b"})
    assert claims.active() == []
    with pytest.raises(LockNotHeld):
        held.extend()
    assert claims.claim("1", "c").owner == "c"


@pytest.mark.req("LG-06", "LG-08")
@pytest.mark.parametrize("form", ["2023-11-14t22:15:00z", "2023-11-14T22:14:60Z", "2023-11-14T22:14:60.5+00:00"])
@pytest.mark.parametrize("field", ["expires_at", "timestamp"])
def test_a_claim_of_another_program_counts_however_its_instants_are_written(
    claims: Claims, clock: ManualClock, field: str, form: str
) -> None:
    event = {**acquired("1", "go", expires_in=100, at=clock.wall()), field: form}
    append_raw(claims.ledger, event)
    with pytest.raises(NodeLocked, match="claimed by go"):
        claims.claim("1", "a")
    clock.advance(101)
    assert claims.claim("1", "a").owner == "a"


@pytest.mark.req("LG-08")
def test_a_claim_of_another_program_counts_even_if_its_timestamp_is_no_instant(
    claims: Claims, clock: ManualClock
) -> None:
    for node, stamp in (("1", "yesterday"), ("2", 7)):
        append_raw(claims.ledger, {**acquired(node, "go", expires_in=100, at=clock.wall()), "timestamp": stamp})
        with pytest.raises(NodeLocked, match="claimed by go"):
            claims.claim(node, "a")
        append_raw(claims.ledger, {"type": "lock_released", "node_id": node})
        assert claims.claim(node, "a").owner == "a"


@pytest.mark.req("LG-10")
def test_reaping_ends_each_expired_claim_once(claims: Claims, clock: ManualClock) -> None:
    for node, ttl in (("1.10", 10), ("1.2", 10), ("1.3", 100)):
        claims.claim(node, "a", ttl=ttl)
    assert claims.reap() == []
    clock.advance(20)
    assert [each.node_id for each in claims.reap()] == ["1.2", "1.10"]
    assert claims.reap() == []
    assert kinds(claims.ledger, after=3) == ["lock_reaped"] * 2
    assert [each.node_id for each in claims.active()] == ["1.3"]


def test_active_claims_can_be_queried_at_an_earlier_sequence(claims: Claims, clock: ManualClock) -> None:
    claims.claim("1", "a", ttl=10)
    clock.advance(5)
    claims.claim("2", "b", ttl=60)
    clock.advance(10)
    claims.ledger.append({"type": "note"})
    claims.reap()

    def owners(sequence: int) -> list[str]:
        return [each.owner for each in claims.active(at_sequence=sequence)]

    assert [owners(number) for number in range(5)] == [[], ["a"], ["a", "b"], ["b"], ["b"]]
    with pytest.raises(NotFound):
        claims.active(at_sequence=5)


def test_claims_are_listed_by_subtree_and_each_node_has_a_history(claims: Claims) -> None:
    for node in ("1", "1.2", "1.2.3", "1.23", "2"):
        claims.claim(node, "a")
    claims.release("1.2", "a")

    assert [each.node_id for each in claims.active(under="1.2")] == ["1.2.3"]
    assert [each.node_id for each in claims.active(under="1")] == ["1", "1.2.3", "1.23"]
    assert [each.event["type"] for each in claims.history("1.2")] == ["lock_acquired", "lock_released"]


def test_an_event_whose_type_is_no_text_is_in_no_history(claims: Claims) -> None:
    append_raw(claims.ledger, {"type": ["lock_acquired"], "node_id": "1.2"})

    assert claims.history("1.2") == []


def test_an_event_can_be_appended_under_a_valid_claim_only(claims: Claims, clock: ManualClock) -> None:
    held = claims.claim("1", "a", ttl=10)
    assert held.append({"type": "result"}).event["type"] == "result"
    clock.advance(11)
    with pytest.raises(LockExpired):
        held.append({"type": "result"})
    claims.claim("1", "b", ttl=10)
    with pytest.raises(LockNotHeld):
        held.append({"type": "result"})
    assert kinds(claims.ledger).count("result") == 1


@pytest.mark.parametrize("owner", ["", "  ", "a\nb", "x" * 257])
def test_an_invalid_owner_is_refused(claims: Claims, owner: str) -> None:
    with pytest.raises(UsageFailure):
        claims.claim("1", owner)


# --- Node ids, and how long claims last ---------------------------------------------------------------------


@pytest.mark.req("LG-18")
def test_node_ids_are_numbers_joined_by_dots(claims: Claims) -> None:
    for good in ("1", "12", "1.2.3", "1.10.999999999", ".".join(["1"] * 64)):
        assert node_id(good) == good
    bad = [
        "",
        ".",
        "0",
        "1.0",
        "01",
        "1.",
        ".1",
        "1..2",
        "a",
        "1.a",
        "-1",
        "1,2",
        " 1",
        "1\n",
        "../1",
        "\u0661",
        "1/2",
    ]
    for wrong in [*bad, ".".join(["1"] * 65), "1" * 10]:
        for act in (claims.claim, claims.extend, claims.release):
            with pytest.raises(NameInvalid, match="not the id of a node"):
                act(wrong, "a")
    with pytest.raises(NameInvalid):
        claims.history("x")
    assert claims.ledger.sequence == 0


@pytest.mark.req("LG-18")
def test_nodes_have_a_hierarchy_and_an_order() -> None:
    assert is_under("1.2.3", "1.2")
    assert is_under("1.2", "1.2")
    assert not is_under("1.23", "1.2")
    assert sorted(["1.10", "1.9", "2", "1"], key=order) == ["1", "1.9", "1.10", "2"]


def put_meta(store: Store, record: dict[str, Any]) -> None:
    store.transact([log.META], lambda view, now: Decision([Create(log.META, record)], None))


@pytest.mark.req("LG-07")
@pytest.mark.parametrize(
    ("record", "seconds"),
    [
        (None, 300),
        ({}, 300),
        ({"lock_timeout": "5m"}, 300),
        ({"lock_timeout": "1s"}, 1),
        ({"lock_timeout": "1h", "author": "another program"}, 3600),
        ({"lock_timeout": "1m0s"}, 60),
    ],
)
def test_claims_last_as_long_as_meta_json_says(
    claims: Claims, clock: ManualClock, record: dict[str, Any] | None, seconds: int
) -> None:
    if record is not None:
        put_meta(claims.ledger.store, record)
    held = claims.claim("1", "a").claim
    assert held.expiry() == pytest.approx(clock.wall() + seconds)
    assert claims.claim("2", "a", ttl=7).claim.expiry() == pytest.approx(clock.wall() + 7)


@pytest.mark.req("LG-07")
@pytest.mark.parametrize("value", ["0s", "999ms", "3601s", "2h", "never", "", "-5m", 300, ["5m"]])
def test_a_lock_timeout_outside_one_second_to_one_hour_is_refused(claims: Claims, value: Any) -> None:
    put_meta(claims.ledger.store, {"lock_timeout": value})
    with pytest.raises(SettingInvalid, match=r"lock_timeout in meta.json.*from 1s to 1h"):
        claims.claim("1", "a")
    assert claims.ledger.sequence == 0


@pytest.mark.req("LG-07")
@pytest.mark.parametrize("ttl", [0.5, 3601.0, 0.0, -1.0, float("nan"), float("inf")])
def test_a_ttl_outside_that_range_is_refused_too(claims: Claims, ttl: float) -> None:
    with pytest.raises(SettingInvalid):
        claims.claim("1", "a", ttl=ttl)


# --- Waiting ------------------------------------------------------------------------------------------------


def test_a_waiter_gets_the_claim_when_it_is_released() -> None:
    claims = claims_on(MemoryStore())
    held = claims.claim("1", "a")
    got: list[str] = []
    waiter = threading.Thread(target=lambda: got.append(claims.claim("1", "b", wait=60.0).owner))
    waiter.start()
    wait_until(claims.waiting)
    with pytest.raises(NodeLocked):
        claims.claim("1", "c")
    held.release()
    waiter.join(60.0)
    assert got == ["b"]
    assert kinds(claims.ledger) == ["lock_acquired", "lock_requested", "lock_released", "lock_acquired"]


def test_a_waiter_that_times_out_is_told_who_holds_the_node_and_leaves_the_queue(claims: Claims) -> None:
    claims.claim("1", "a")
    with pytest.raises(LockTimeout, match=r"the node 1 .*held by a"):
        claims.claim("1", "b", wait=0.02)
    assert claims.waiting() == []
    assert kinds(claims.ledger) == ["lock_acquired", "lock_requested", "lock_withdrawn"]


@pytest.mark.req("LG-19")
def test_nobody_jumps_the_queue_for_a_free_node(claims: Claims, clock: ManualClock) -> None:
    claims.claim("1", "a")
    requests = {
        name: claims.request("1", name, priority=priority)
        for name, priority in (("b", 0), ("c", 5), ("d", 0), ("e", 5))
    }
    for request in requests.values():
        claims.join_queue(request)
    assert [each.owner for each in claims.waiting("1")] == ["c", "e", "b", "d"]
    claims.release("1", "a")
    with pytest.raises(NodeLocked, match="c waits for it and comes first"):
        claims.claim("1", "x", priority=5)
    served: list[str] = []
    while requests:
        for name in sorted(requests, reverse=True):
            if (claim := claims.join_queue(requests[name])) and getattr(claim, "owner", None) == name:
                served.append(name)
                claims.release("1", name)
                del requests[name]
    assert served == ["c", "e", "b", "d"]
    assert claims.claim("1", "x").owner == "x"


@pytest.mark.req("LG-19")
def test_a_request_with_a_higher_priority_goes_first(claims: Claims) -> None:
    claims.claim("1", "a")
    claims.join_queue(claims.request("1", "b", priority=1))
    claims.release("1", "a")
    assert claims.claim("1", "c", priority=2).owner == "c"


@pytest.mark.req("LG-19")
def test_a_waiter_without_heartbeats_loses_its_place(claims: Claims, clock: ManualClock) -> None:
    claims.claim("1", "a", ttl=100)
    claims.join_queue(claims.request("1", "b"))
    patient = claims.request("1", "c")
    for _ in range(4):
        claims.join_queue(patient)
        clock.advance(5)  # `c` sends heartbeats, `b` does not
    assert [each.owner for each in claims.waiting()] == ["c"]
    claims.release("1", "a")
    assert getattr(claims.join_queue(patient), "owner", None) == "c"


def test_a_waiter_that_a_signal_ends_while_it_reads_its_own_request_leaves_the_queue(
    claims: Claims, monkeypatch: pytest.MonkeyPatch
) -> None:
    claims.claim("1", "a")

    def interrupted(event: log.Event) -> bool:
        if event["type"] == "lock_requested":
            monkeypatch.undo()
            raise KeyboardInterrupt
        return True

    monkeypatch.setattr(projection, "has_effect", interrupted)
    with pytest.raises(KeyboardInterrupt):
        claims.claim("1", "b", wait=60)
    assert kinds(claims.ledger) == ["lock_acquired", "lock_requested", "lock_withdrawn"]


def test_repeating_a_request_after_an_unknown_outcome_does_not_claim_twice(claims: Claims) -> None:
    request = claims.request("1", "a")
    assert claims.take(request) == claims.take(request)
    assert claims.ledger.sequence == 1


def test_a_claim_is_decided_on_the_state_read_under_the_lock(claims: Claims) -> None:
    """The last read before the lock shows a free node; the read under the lock decides."""
    store = claims.ledger.store
    other = claims_on(store)
    real = store.transact

    def late(keys: Any, decide: Any, **options: Any) -> Any:
        store.transact = real  # type: ignore[method-assign]
        other.claim("1", "faster")
        return real(keys, decide, **options)

    store.transact = late  # type: ignore[method-assign]
    with pytest.raises(NodeLocked, match="faster"):
        claims.claim("1", "slower")
    assert len([*store.entries(EVENTS)]) == 1


def test_threads_can_share_one_claims_object(store: Store) -> None:
    claims = claims_on(store)
    done: list[str] = []

    def work(number: int) -> None:
        for turn in range(25):
            held = claims.claim(f"1.{number}", f"agent-{number}")
            claims.active()
            held.append({"type": "work", "turn": turn})
            held.release()
        done.append(f"agent-{number}")

    threads = [threading.Thread(target=work, args=(number,), daemon=True) for number in range(1, 7)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60.0)
    assert len(done) == 6
    assert claims.ledger.sequence == 6 * 25 * 3


# --- The heartbeat ------------------------------------------------------------------------------------------


def test_a_claim_is_extended_while_its_block_runs_and_released_at_its_end() -> None:
    claims = claims_on(MemoryStore())
    with claims.claim("1", "a", ttl=2.0) as held:
        wait_until(lambda: kinds(claims.ledger).count("lock_acquired") >= 3)
        held.check()
        assert [each.owner for each in claims.active()] == ["a"]
    assert claims.active() == []
    with pytest.raises(LockNotHeld):
        held.check()
    held.release()
    found = kinds(claims.ledger)
    assert found[0] == "lock_acquired"
    assert found[-1] == "lock_released"
    assert found.count("lock_released") == 1


def test_a_claim_that_was_taken_over_is_lost() -> None:
    claims = claims_on(MemoryStore())
    with claims.claim("1", "a", ttl=3.0) as held:
        claims.release("1", "a")
        other = claims.claim("1", "b")
        assert held.lost.wait(60.0)
        with pytest.raises(LockNotHeld):
            held.check()
        with pytest.raises(LockNotHeld):
            held.append({"type": "result"})
    assert claims.active() == [other.claim]


def test_a_claim_that_could_not_be_extended_in_time_is_lost(claims: Claims, clock: ManualClock) -> None:
    held = claims.claim("1", "a", ttl=10, clock=clock)
    clock.advance(9)
    held.check()
    held.extend()
    clock.advance(9)
    held.check()
    clock.step_wall(-3600)  # has no effect: the boot clock counts
    clock.advance(1)
    with pytest.raises(LockExpired):
        held.check()
    assert held.lost.is_set()


def test_a_wait_for_a_claim_ends_at_its_own_time_limit_not_at_that_of_the_ledger_lock(scratch: Path) -> None:
    claims = Claims(Ledger(FileStore(scratch, timeout=3600.0)))
    claims.claim("1", "first").release()
    with LedgerLock(scratch / "ledger", "stopped").acquire(), ThreadPoolExecutor(1) as pool:
        failure = pool.submit(claims.claim, "1", "second", wait=0.3).exception(60)
    assert isinstance(failure, LockTimeout)
    assert failure.timeout == 0.3
