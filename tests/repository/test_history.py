"""The history of one worktree and of all; reading it leaves no trace."""

from __future__ import annotations

import os
import sys
import threading
from pathlib import Path
from typing import Any

import pytest

from holdfast.errors import NotFound
from holdfast.fs import calls
from holdfast.repository.context import DESCRIPTORS, Consistency, Descriptor, RepositoryContext
from holdfast.repository.history import History, all_history, worktree_history
from holdfast.repository.repository import Repository
from holdfast.store.files import FileStore
from holdfast.store.model import Decision, Delete, Replace
from proof.interpose import Attempt, interposed
from tests.repository.history_states import state_of
from tests.repository.repositories import BEGIN, add_reference, add_snapshot, add_worktree, make_repository

WRITING = os.O_WRONLY | os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_APPEND


@pytest.fixture
def context(scratch: Path) -> RepositoryContext:
    return make_repository(scratch).context


def ids(found: History) -> list[str]:
    return [entry.descriptor.snapshot_id for entry in found.entries]


def add_chain(context: RepositoryContext, *names: str, start: str | None = None, worktree: str = "main") -> None:
    for number, name in enumerate(names):
        add_snapshot(context, name, parent=start, worktree=worktree, at=BEGIN + number)
        start = name


def test_history_follows_the_parents_from_the_head(context: RepositoryContext) -> None:
    assert worktree_history(context, "main") == History(())
    add_chain(context, "s1", "s2", "s3")
    assert ids(worktree_history(context, "main")) == ["s3", "s2", "s1"]
    assert [entry.parent_id for entry in worktree_history(context, "main").entries] == ["s2", "s1", None]
    with pytest.raises(NotFound):
        worktree_history(context, "nowhere")


def test_a_limited_history_says_that_there_is_more(context: RepositoryContext) -> None:
    add_chain(context, "s1", "s2", "s3")
    short = worktree_history(context, "main", limit=2)
    assert ids(short) == ["s3", "s2"]
    assert short.more
    assert short.entries[-1].parent_id == "s1"
    assert not worktree_history(context, "main", limit=3).more
    assert all_history(context, limit=2).more


@pytest.mark.req("LC-27")
def test_incomplete_snapshots_are_skipped_and_the_history_continues(
    context: RepositoryContext,
) -> None:
    add_chain(context, "s1", "s2", "s3")
    (context.paths.tree("s2") / ".READY").unlink()
    context.paths.tree("unpublished").mkdir()
    (context.paths.tree("unpublished") / ".READY").touch()
    for found in (worktree_history(context, "main"), all_history(context)):
        assert ids(found) == ["s3", "s1"]
        assert found.entries[0].parent_id == "s1"
        assert found.missing == ()


def test_a_missing_parent_is_reported(context: RepositoryContext) -> None:
    add_chain(context, "s2", "s3", start="s1")
    assert worktree_history(context, "main").missing == ("s1",)
    assert all_history(context).missing == ("s1",)
    assert worktree_history(context, "main", limit=1).missing == ()


def test_a_cycle_of_parents_terminates_and_omits_nothing(context: RepositoryContext) -> None:
    add_chain(context, "s1", "s2", start="s2")
    assert ids(worktree_history(context, "main")) == ["s2", "s1"]
    assert sorted(ids(all_history(context))) == ["s1", "s2"]


def test_the_whole_history_lists_children_first_regardless_of_clocks(context: RepositoryContext) -> None:
    add_chain(context, "s1", "s2", "s3")
    add_worktree(context, "dev")
    add_snapshot(context, "d1", parent="s1", worktree="dev", at=BEGIN + 10)
    add_snapshot(context, "d2", parent="d1", worktree="dev", at=BEGIN - 99)  # a clock was set back
    add_reference(context, "v1", "s2")
    found = all_history(context)
    order = ids(found)
    assert sorted(order) == ["d1", "d2", "s1", "s2", "s3"]
    assert all(
        order.index(each.descriptor.snapshot_id) < order.index(each.parent_id)
        for each in found.entries
        if each.parent_id
    )
    marks = {entry.descriptor.snapshot_id: entry.marks for entry in found.entries}
    assert marks["s3"].heads == ("main",)
    assert marks["d2"].heads == ("dev",)
    assert marks["s2"].references == ("v1",)


@pytest.mark.req("LC-22")
def test_every_best_effort_snapshot_carries_a_warning(context: RepositoryContext) -> None:
    add_chain(context, "s1")
    add_snapshot(context, "s2", parent="s1", consistency=Consistency.BEST_EFFORT)
    assert [entry.warning for entry in worktree_history(context, "main").entries] == [True, False]


def test_a_snapshot_that_is_collected_meanwhile_is_skipped(
    context: RepositoryContext, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The parent is deleted and its child relinked between the reads of the two."""
    add_chain(context, "s1", "s2", "s3")

    def collect(snapshot_id: str) -> None:
        keys = [DESCRIPTORS.key(each) for each in ("s2", "s3")]

        def decide(view: Any, now: float) -> Decision[None]:
            child = view.get(keys[1])
            relinked = Descriptor(**{**{n: getattr(child, n) for n in child.__struct_fields__}, "parent_id": "s1"})
            return Decision([Delete(keys[0]), Replace(keys[1], relinked)], None)

        if context.store.read(keys[0]) is not None:
            context.store.transact(keys, decide)

    def ready(snapshot_id: str, known: Descriptor | None = None) -> bool:
        collect(snapshot_id)  # after s3 was read
        return True

    monkeypatch.setattr(context.home, "is_ready", ready)
    found = worktree_history(context, "main")
    assert ids(found) == ["s3", "s1"]
    assert found.missing == ()


@pytest.mark.req("LC-24")
@pytest.mark.skipif(sys.platform == "win32", reason="files are compared by their inodes")
def test_history_takes_no_lock_and_changes_nothing(context: RepositoryContext) -> None:
    add_chain(context, "s1", "s2")
    root = context.paths.root
    before = state_of(root)
    seen: list[str] = []
    here = threading.current_thread()  # threads that earlier tests left may still release locks

    def watch(attempt: Attempt) -> Any:
        if threading.current_thread() is here and (attempt.name not in ("open", "close") or attempt.flags & WRITING):
            seen.append(str(attempt.numbered(0)))
        return attempt.perform()

    with (
        FileStore(root) as store,
        store._locks.locked([store._locate(DESCRIPTORS.key("s1"))]),  # while another process holds the locks
        interposed(watch, calls.CHANGING),
    ):
        opened = Repository(root).context
        assert ids(worktree_history(opened, "main")) == ["s2", "s1"]
        assert ids(all_history(opened)) == ["s2", "s1"]
    assert seen == []
    assert state_of(root) == before
