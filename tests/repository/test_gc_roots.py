"""The look at what protects snapshots misses nothing, whatever moves while it looks."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import msgspec
import pytest

from holdfast.errors import LockConflict
from holdfast.repository import gc_plan
from holdfast.repository.context import DESCRIPTORS, WORKTREES, RepositoryContext
from holdfast.repository.retention import GcRoots, Policy, retain
from holdfast.store.files import FileStore
from holdfast.store.model import Create, Decision, Delete, Replace, View
from tests.repository.kept import line_of, snapshots_of
from tests.repository.repositories import add_snapshot, add_worktree, make_repository

Meddle = Callable[[], object]


@pytest.fixture
def control(scratch: Path) -> RepositoryContext:
    return make_repository(scratch / "repository").control


def between_listing_and_reading(
    control: RepositoryContext,
    monkeypatch: pytest.MonkeyPatch,
    family: str,
    meddle: Meddle,
    *,
    times: int = 1,
) -> None:
    """Do something when the members of a family have been listed, and none of them read."""
    store, left = control.store, [meddle] * times
    assert isinstance(store, FileStore)
    listed = store._members

    def members(name: str) -> set[str]:
        found = listed(name)
        if name == family and left:
            left.pop()()
        return found

    monkeypatch.setattr(store, "_members", members)


def rename(control: RepositoryContext, old: str, new: str) -> None:
    keys = WORKTREES.key(old), WORKTREES.key(new)

    def decide(view: View, now: float) -> Decision[None]:
        config = view.get(keys[0])
        assert config is not None
        moved = msgspec.structs.replace(config, worktree_id=new)
        entry = control.audit(view, now, "worktree_renamed", worktree_id=old, renamed_to=new)
        return Decision([Delete(keys[0]), Create(keys[1], moved), entry], None)

    control.store.transact([*keys, control.trail.stream], decide)


def test_a_head_that_moves_to_another_name_is_seen(
    control: RepositoryContext, monkeypatch: pytest.MonkeyPatch
) -> None:
    head = line_of(control, 1)[-1]
    add_worktree(control, "dev", head=head)
    renames = iter([("dev", "new"), ("new", "newer")])
    between_listing_and_reading(
        control, monkeypatch, "jvs/worktrees", lambda: rename(control, *next(renames)), times=2
    )
    assert "dev" not in gc_plan._read_roots(control).heads  # one look alone would miss it
    assert gc_plan.find_roots(control).heads["newer"] == head


def test_renames_without_end_are_a_conflict(
    control: RepositoryContext, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(gc_plan, "MAX_READS", 3)
    add_worktree(control, "a")
    names = iter("abcdefgh")
    current = [next(names)]

    def meddle() -> None:
        current.append(next(names))
        rename(control, *current[-2:])

    between_listing_and_reading(control, monkeypatch, "jvs/worktrees", meddle, times=3)
    with pytest.raises(LockConflict):
        gc_plan.find_roots(control)


def relink(control: RepositoryContext, child: str, parent: str | None, *, without: str | None = None) -> None:
    """What a collection does: a child gets another parent, and the one between is deleted."""
    keys = [DESCRIPTORS.key(child), *([DESCRIPTORS.key(without)] if without else [])]

    def decide(view: View, now: float) -> Decision[None]:
        descriptor = view.get(keys[0])
        assert descriptor is not None
        linked = Replace(keys[0], msgspec.structs.replace(descriptor, parent_id=parent))
        return Decision([linked, *(Delete(key) for key in keys[1:])], None)

    control.store.transact(keys, decide)


def test_a_line_that_is_linked_anew_while_it_is_read_stays_whole(control: RepositoryContext) -> None:
    for number, name in enumerate(["b", "c", "a"]):  # read in the order of their names: a before its parents
        add_snapshot(control, name, parent=["", "b", "c"][number] or None)
    descriptors = snapshots_of(control)
    relink(control, "a", "b", without="c")
    del descriptors["c"]  # the child as it was, the parent as it is
    found = gc_plan.completed(control, descriptors)
    assert found["a"].parent_id == "b"
    decision = retain(GcRoots(found, {"main": "a"}), Policy(), 0.0)
    assert decision.collectable == ()


def test_a_snapshot_that_is_put_between_two_while_they_are_read_is_seen(
    control: RepositoryContext, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As a restore does with what was written at the last moment."""
    add_snapshot(control, "b")
    add_snapshot(control, "a", parent="b")

    def put_between() -> None:
        add_snapshot(control, "late", parent="b", head=False)
        relink(control, "a", "late")

    between_listing_and_reading(control, monkeypatch, "jvs/descriptors", put_between)
    roots = gc_plan.find_roots(control)
    assert set(roots.descriptors) == {"a", "b", "late"}
    assert retain(roots, Policy(), 0.0).collectable == ()


def test_a_parent_that_is_really_missing_ends_the_line(control: RepositoryContext) -> None:
    add_snapshot(control, "a", parent="gone")
    assert set(gc_plan.find_roots(control).descriptors) == {"a"}
