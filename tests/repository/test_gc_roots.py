"""The search for GC roots misses none, even if they move meanwhile."""

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
def context(scratch: Path) -> RepositoryContext:
    return make_repository(scratch / "repository").context


def between_listing_and_reading(
    context: RepositoryContext,
    monkeypatch: pytest.MonkeyPatch,
    family: str,
    meddle: Meddle,
    *,
    times: int = 1,
) -> None:
    """Call `meddle` after the members of a family were listed and before any of them is read."""
    store, left = context.store, [meddle] * times
    assert isinstance(store, FileStore)
    listed = store._members

    def members(name: str) -> set[str]:
        found = listed(name)
        if name == family and left:
            left.pop()()
        return found

    monkeypatch.setattr(store, "_members", members)


def rename(context: RepositoryContext, old: str, new: str) -> None:
    keys = WORKTREES.key(old), WORKTREES.key(new)

    def decide(view: View, now: float) -> Decision[None]:
        config = view.get(keys[0])
        assert config is not None
        moved = msgspec.structs.replace(config, worktree_id=new)
        entry = context.audit(view, now, "worktree_renamed", worktree_id=old, renamed_to=new)
        return Decision([Delete(keys[0]), Create(keys[1], moved), entry], None)

    context.store.transact([*keys, context.trail.stream], decide)


def test_a_head_that_moves_to_another_name_is_not_missed(
    context: RepositoryContext, monkeypatch: pytest.MonkeyPatch
) -> None:
    head = line_of(context, 1)[-1]
    add_worktree(context, "dev", head=head)
    renames = iter([("dev", "new"), ("new", "newer")])
    between_listing_and_reading(context, monkeypatch, "jvs/worktrees", lambda: rename(context, *next(renames)), times=2)
    assert "dev" not in gc_plan._read_roots(context).heads  # a single read misses it
    assert gc_plan.find_roots(context).heads["newer"] == head


def test_endless_renames_are_a_conflict(context: RepositoryContext, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gc_plan, "MAX_READS", 3)
    add_worktree(context, "a")
    names = iter("abcdefgh")
    current = [next(names)]

    def meddle() -> None:
        current.append(next(names))
        rename(context, *current[-2:])

    between_listing_and_reading(context, monkeypatch, "jvs/worktrees", meddle, times=3)
    with pytest.raises(LockConflict):
        gc_plan.find_roots(context)


def relink(context: RepositoryContext, child: str, parent: str | None, *, without: str | None = None) -> None:
    """Give a child another parent and delete the one between, as a collection does."""
    keys = [DESCRIPTORS.key(child), *([DESCRIPTORS.key(without)] if without else [])]

    def decide(view: View, now: float) -> Decision[None]:
        descriptor = view.get(keys[0])
        assert descriptor is not None
        linked = Replace(keys[0], msgspec.structs.replace(descriptor, parent_id=parent))
        return Decision([linked, *(Delete(key) for key in keys[1:])], None)

    context.store.transact(keys, decide)


def test_a_history_that_is_relinked_while_it_is_read_has_no_gap(context: RepositoryContext) -> None:
    for number, name in enumerate(["b", "c", "a"]):  # read in the order of their names: a before its parents
        add_snapshot(context, name, parent=["", "b", "c"][number] or None)
    descriptors = snapshots_of(context)
    relink(context, "a", "b", without="c")
    del descriptors["c"]  # the child was read before the change, the parent after it
    found = gc_plan.completed(context, descriptors)
    assert found["a"].parent_id == "b"
    decision = retain(GcRoots(found, {"main": "a"}), Policy(), 0.0)
    assert decision.collectable == ()


def test_a_snapshot_inserted_between_two_while_they_are_read_is_not_missed(
    context: RepositoryContext, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A restore inserts a snapshot of late writes in this way."""
    add_snapshot(context, "b")
    add_snapshot(context, "a", parent="b")

    def insert() -> None:
        add_snapshot(context, "late", parent="b", head=False)
        relink(context, "a", "late")

    between_listing_and_reading(context, monkeypatch, "jvs/descriptors", insert)
    roots = gc_plan.find_roots(context)
    assert set(roots.descriptors) == {"a", "b", "late"}
    assert retain(roots, Policy(), 0.0).collectable == ()


def test_a_missing_parent_ends_the_history(context: RepositoryContext) -> None:
    add_snapshot(context, "a", parent="gone")
    assert set(gc_plan.find_roots(context).descriptors) == {"a"}
