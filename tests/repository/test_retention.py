"""The retention rules, which are pure functions: which snapshots are kept, and why."""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import holdfast
from holdfast.clock import format_instant
from holdfast.repository.context import Consistency, Descriptor, Operation, OperationKind, Pin, Reference
from holdfast.repository.retention import (
    EFFECTS,
    Collectable,
    Effect,
    GcRoots,
    Policy,
    Protection,
    RetentionDecision,
    Use,
    effect_of,
    line,
    retain,
    within_budget,
)
from holdfast.store.audit import AuditEntry
from proof.effort import rounds

NOW = 1_800_000_000.0
HOUR = 3600.0


def descriptor(
    snapshot_id: str, parent: str | None = None, *, age: float = 0.0, doomed_by: str | None = None
) -> Descriptor:
    return Descriptor(
        snapshot_id=snapshot_id,
        worktree_id="main",
        parent_id=parent,
        created_at=format_instant(NOW - age),
        consistency_level=Consistency.QUIESCED,
        engine="copy",
        payload_hash="",
        files=0,
        bytes=0,
        doomed_by=doomed_by,
    )


def history_of(*names: str) -> dict[str, Descriptor]:
    """Snapshots, each the parent of the next, an hour apart, the last one just taken."""
    parents = [None, *names]
    return {
        name: descriptor(name, parents[number], age=HOUR * (len(names) - 1 - number))
        for number, name in enumerate(names)
    }


def reference(snapshot_id: str) -> Reference:
    return Reference(name="v1", snapshot_id=snapshot_id, created_at=format_instant(NOW))


def pin(snapshot_id: str, *, left: float | None = None) -> Pin:
    until = None if left is None else format_instant(NOW + left)
    return Pin(pin_id="p", snapshot_id=snapshot_id, created_at=format_instant(NOW), until=until)


def operation(snapshot_id: str) -> Operation:
    return Operation(
        operation_id="o",
        kind=OperationKind.RESTORE,
        worktree_id="main",
        begun_at=format_instant(NOW),
        holder_id="h",
        snapshot_id=snapshot_id,
    )


def collectable(decision: RetentionDecision) -> list[str]:
    return [each.snapshot_id for each in decision.collectable]


def rules(decision: RetentionDecision, snapshot_id: str) -> set[Protection]:
    return {reason.protection for reason in decision.protected[snapshot_id]}


def test_without_a_policy_everything_reachable_from_a_head_is_kept() -> None:
    decision = retain(GcRoots(history_of("a", "b", "c"), {"main": "c"}), Policy(), NOW)
    assert collectable(decision) == []
    assert rules(decision, "c") == {Protection.HEAD, Protection.HISTORY}
    assert rules(decision, "a") == {Protection.HISTORY}


@pytest.mark.req("WT-11")
def test_unreachable_snapshots_may_go_oldest_first() -> None:
    decision = retain(GcRoots(history_of("a", "b", "c"), {"main": "a"}), Policy(), NOW)
    assert collectable(decision) == ["b", "c"]
    assert {each.why for each in decision.collectable} == {"no head leads to it"}


@pytest.mark.parametrize("keep", range(1, 6))
def test_the_newest_of_each_history_are_kept(keep: int) -> None:
    decision = retain(GcRoots(history_of(*"abcd"), {"main": "d"}), Policy(keep_last=keep), NOW)
    assert collectable(decision) == list("abcd")[: max(0, 4 - keep)]


def test_a_snapshot_is_kept_if_one_of_its_histories_keeps_it() -> None:
    roots = GcRoots(history_of(*"abcd"), {"main": "d", "dev": "b"})
    assert collectable(retain(roots, Policy(keep_last=1), NOW)) == ["a", "c"]
    assert collectable(retain(roots, Policy(keep_last=2), NOW)) == []


def test_young_snapshots_are_kept_whether_reachable_or_not() -> None:
    roots = GcRoots(history_of(*"abcd"), {"main": "b"})
    assert collectable(retain(roots, Policy(keep_for=1.5 * HOUR), NOW)) == ["a"]
    assert collectable(retain(roots, Policy(keep_for=0.5 * HOUR), NOW)) == ["c", "a"]


def test_a_snapshot_from_the_future_is_young_and_one_without_a_valid_time_is_kept() -> None:
    strange = msgspec.structs.replace(descriptor("x"), created_at="?")
    roots = GcRoots({"x": strange, "y": descriptor("y", age=-HOUR)}, {})
    decision = retain(roots, Policy(keep_for=60.0), NOW)
    assert rules(decision, "x") == {Protection.CLOCK}
    assert rules(decision, "y") == {Protection.KEEP_FOR}


def test_references_pins_uses_and_operations_keep_otherwise_unprotected_snapshots() -> None:
    descriptors = {name: descriptor(name) for name in "abcde"}
    roots = GcRoots(
        descriptors,
        {},
        references=[reference("a")],
        pins=[pin("b", left=1.0)],
        uses=[Use("c", "restore")],
        operations=[operation("d")],
    )
    decision = retain(roots, Policy(), NOW)
    assert collectable(decision) == ["e"]
    assert [rules(decision, each) for each in "abcd"] == [
        {Protection.REFERENCE},
        {Protection.PIN},
        {Protection.IN_USE},
        {Protection.OPERATION},
    ]


def test_a_pending_restore_keeps_the_parent_of_the_snapshot_it_published() -> None:
    """It may still insert a snapshot between the two, so the parent must stay until then."""
    pending = msgspec.structs.replace(operation("a"), operation_id="d")
    roots = GcRoots(history_of(*"abcd"), {"main": "d"}, operations=[pending])
    decision = retain(roots, Policy(keep_last=1), NOW)
    assert rules(decision, "c") == {Protection.OPERATION}
    assert collectable(decision) == ["b"]


def test_an_expired_pin_keeps_nothing_and_an_unreadable_one_keeps_its_snapshot() -> None:
    unreadable = Pin(pin_id="p", snapshot_id="b", created_at="", until="some day")
    descriptors = {"a": descriptor("a"), "b": descriptor("b")}
    roots = GcRoots(descriptors, {}, pins=[pin("a", left=0.0), unreadable])
    assert collectable(retain(roots, Policy(), NOW)) == ["a"]


def test_a_snapshot_doomed_by_another_plan_is_left_to_that_plan() -> None:
    roots = GcRoots({"a": descriptor("a", doomed_by="one")}, {})
    assert rules(retain(roots, Policy(), NOW), "a") == {Protection.DOOMED}
    assert collectable(retain(roots, Policy(), NOW, plan_id="one")) == ["a"]
    assert collectable(retain(roots, Policy(), NOW, plan_id="two")) == []


def test_snapshots_that_a_broken_history_may_have_led_to_are_kept() -> None:
    """A lost descriptor makes the older history of the worktree look like garbage."""
    found = history_of("a", "b", "lost", "c", "d")
    del found["lost"]
    younger = descriptor("younger", age=0.0)
    decision = retain(GcRoots({**found, "younger": younger}, {"main": "d"}), Policy(), NOW)
    assert [each.snapshot_id for each in decision.collectable] == ["younger"]
    assert [decision.protected[each][0].protection for each in "ab"] == [Protection.BROKEN] * 2
    del found["d"]
    decision = retain(GcRoots({**found, "younger": younger}, {"main": "d"}), Policy(), NOW)
    assert decision.collectable == ()


def test_walking_a_cycle_of_parents_terminates() -> None:
    cycle = {"a": descriptor("a", "b"), "b": descriptor("b", "a")}
    assert list(line(cycle, "a")) == ["a", "b"]
    assert collectable(retain(GcRoots(cycle, {"main": "a"}), Policy(keep_last=1), NOW)) == ["b"]


@pytest.mark.parametrize(("budget", "count"), [(100, 0), (99, 1), (90, 1), (89, 2), (0, 10), (None, 10)])
def test_only_as_many_go_as_the_budget_requires(budget: int | None, count: int) -> None:
    candidates = [Collectable(str(number), "") for number in range(10)]
    found = within_budget(candidates, Policy(max_bytes=budget), 100, lambda ids: 10 * len(ids))
    assert found == count


def test_all_go_if_even_that_does_not_meet_the_budget() -> None:
    candidates = [Collectable("a", ""), Collectable("b", "")]
    assert within_budget(candidates, Policy(max_bytes=5), 100, len) == 2


def test_with_only_a_budget_all_but_heads_may_go() -> None:
    decision = retain(GcRoots(history_of(*"abc"), {"main": "b"}), Policy(max_bytes=0), NOW)
    assert collectable(decision) == ["c", "a"]  # unreachable snapshots come first


# --- Properties -------------------------------------------------------------------------------------

IDS = [f"s{number}" for number in range(12)]
anything = st.sampled_from(IDS)
times_left = st.sampled_from([-1.0, 1.0])


@st.composite
def any_roots(draw: st.DrawFn) -> GcRoots:
    """Snapshots with arbitrary parents, dooms and ages, and everything that may refer to them, even if dangling."""
    present = draw(st.lists(anything, unique=True))
    descriptors = {
        each: descriptor(
            each,
            draw(st.none() | anything),
            age=draw(st.integers(-2, 50)) * HOUR,
            doomed_by=draw(st.none() | st.just("other")) if draw(st.integers(0, 9)) == 0 else None,
        )
        for each in present
    }
    return GcRoots(
        descriptors,
        draw(st.dictionaries(st.sampled_from(["main", "dev", "old"]), anything)),
        references=[reference(each) for each in draw(st.lists(anything, max_size=2))],
        pins=[pin(each, left=left) for each, left in draw(st.lists(st.tuples(anything, times_left), max_size=2))],
        uses=[Use(each, "snapshot") for each in draw(st.lists(anything, max_size=2))],
        operations=[
            msgspec.structs.replace(operation(each), operation_id=made)
            for each, made in draw(st.lists(st.tuples(anything, anything), max_size=1))
        ],
    )


limits = st.none() | st.integers(1, 14)
policies = st.builds(
    lambda last, hours, size: Policy(keep_last=last, keep_for=None if hours is None else hours * HOUR, max_bytes=size),
    limits,
    limits,
    st.none() | st.just(0),
)


def untouchable(roots: GcRoots) -> set[str]:
    """Snapshots that no policy may release, computed independently of the rules."""
    live_pins = [each for each in roots.pins if each.until is None or each.until > format_instant(NOW)]
    named: Sequence[str] = [
        *roots.heads.values(),
        *(each.snapshot_id for each in roots.references),
        *(each.snapshot_id for each in live_pins),
        *(each.snapshot_id for each in roots.uses),
        *(each.snapshot_id for each in roots.operations if each.snapshot_id),
        *(
            made.parent_id
            for each in roots.operations
            if (made := roots.descriptors.get(each.operation_id)) and made.parent_id
        ),
        *(each.snapshot_id for each in roots.descriptors.values() if each.doomed_by),
    ]
    return set(named) & roots.descriptors.keys()


@settings(max_examples=rounds(300, least=5), deadline=None)
@given(any_roots(), policies)
def test_every_snapshot_is_protected_or_collectable_and_a_needed_one_never_goes(roots: GcRoots, policy: Policy) -> None:
    decision = retain(roots, policy, NOW)
    going = collectable(decision)
    assert len(going) == len(set(going))
    assert decision.protected.keys() & set(going) == set()
    assert decision.protected.keys() | set(going) == roots.descriptors.keys()
    assert all(decision.protected.values())
    assert untouchable(roots) <= decision.protected.keys()
    if policy.keeps_all_history:
        for head in roots.heads.values():
            assert not set(line(roots.descriptors, head)) & set(going)


@settings(max_examples=rounds(300, least=5), deadline=None)
@given(any_roots(), policies, st.integers(0, 5), st.integers(0, 5))
def test_a_more_generous_policy_never_keeps_less(roots: GcRoots, policy: Policy, more: int, longer: int) -> None:
    generous = Policy(
        keep_last=None if policy.keep_last is None else policy.keep_last + more,
        keep_for=None if policy.keep_for is None else policy.keep_for + longer * HOUR,
        max_bytes=policy.max_bytes,
    )
    kept = retain(roots, policy, NOW).protected.keys()
    assert kept <= retain(roots, generous, NOW).protected.keys()


@settings(max_examples=rounds(200, least=5), deadline=None)
@given(st.lists(st.integers(0, 9), max_size=20), st.integers(0, 200), st.integers(0, 50))
def test_a_larger_budget_never_releases_more_and_none_releases_more_than_it_requires(
    sizes: list[int], budget: int, more: int
) -> None:
    candidates = [Collectable(str(number), "") for number in range(len(sizes))]

    def freed(ids: Sequence[str]) -> int:
        return sum(sizes[int(each)] for each in ids)

    total = sum(sizes) + 30
    count = within_budget(candidates, Policy(max_bytes=budget), total, freed)
    assert within_budget(candidates, Policy(max_bytes=budget + more), total, freed) <= count
    rest = total - sum(sizes[:count])
    assert rest <= budget or count == len(sizes)
    assert count == 0 or total - sum(sizes[: count - 1]) > budget


# --- Effects of audit events on gc --------------------------------------------------------------------


def test_the_effect_of_every_event_is_known() -> None:
    """An unknown event may move a root, so all roots are read again, which costs time."""
    source = "".join(path.read_text() for path in Path(holdfast.__file__).parent.rglob("*.py"))
    written = set(re.findall(r'(?:\baudit\(\s*view, now,|AuditEvent\()\s*"([a-z_]+)"', source))
    assert len(written) > 15
    assert written <= EFFECTS.keys()


def test_only_renames_and_unknown_events_move_a_root() -> None:
    def effect(event: str) -> Effect:
        return effect_of(AuditEntry(1, "", event, "", {}, ""))

    assert effect("worktree_renamed").moves_root
    assert effect("of_a_later_version").moves_root
    assert not effect("lock_acquired").moves_root
    assert {event for event in EFFECTS if effect(event).deletes_snapshot} == {
        "snapshots_collected",
        "tree_removed",
    }
