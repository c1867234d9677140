"""Names of snapshots: which are valid, and what they resolve to."""

from __future__ import annotations

from pathlib import Path

import pytest

from holdfast.errors import Ambiguous, NameInvalid, NotFound, PartialSnapshot, Refused, UsageFailure
from holdfast.repository.context import RepositoryContext
from holdfast.repository.history import reference_name, resolve, resolve_usable
from tests.repository.repositories import add_reference, add_snapshot, add_worktree, make_repository

pytestmark = pytest.mark.both_homes

FIRST, SECOND, THIRD = "4f1c000000000001", "4f2d000000000002", "a000000000000003"


@pytest.fixture
def context(scratch: Path) -> RepositoryContext:
    """A chain of three snapshots in `main`, and a reference to the second."""
    context = make_repository(scratch).context
    add_snapshot(context, FIRST)
    add_snapshot(context, SECOND, parent=FIRST)
    add_snapshot(context, THIRD, parent=SECOND)
    add_reference(context, "v1", SECOND)
    return context


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        (FIRST, FIRST),
        ("4f1", FIRST),
        ("a", THIRD),
        ("v1", SECOND),
        ("head", THIRD),
        ("head~", SECOND),
        ("head~0", THIRD),
        ("head~2", FIRST),
        ("head~1~1", FIRST),
        ("v1~1", FIRST),
        ("4f2~", FIRST),
        ("main:head~1", SECOND),
    ],
)
def test_a_snapshot_is_named_by_its_id_a_prefix_a_reference_or_relative_to_a_head(
    context: RepositoryContext, text: str, expected: str
) -> None:
    assert resolve(context, text).snapshot_id == expected


def test_head_means_the_head_of_the_current_worktree(context: RepositoryContext) -> None:
    add_worktree(context, "dev", head=FIRST)
    assert resolve(context, "head", worktree="dev").snapshot_id == FIRST
    assert resolve(context, "main:head", worktree="dev").snapshot_id == THIRD
    assert resolve(context, "dev:head").snapshot_id == FIRST


def test_an_ambiguous_prefix_is_refused_and_all_candidates_are_listed(context: RepositoryContext) -> None:
    with pytest.raises(Ambiguous) as refused:
        resolve(context, "4f")
    assert refused.value.facts["candidates"] == [FIRST, SECOND]
    assert FIRST in refused.value.message


@pytest.mark.parametrize("text", ["nothing", "head~3", "b", "nowhere:head"])
def test_a_name_without_a_snapshot_is_not_found(context: RepositoryContext, text: str) -> None:
    with pytest.raises(NotFound):
        resolve(context, text)


@pytest.mark.parametrize("text", ["", "~1", "head~x", "../main", "a/b", "a b", "main:v1", ":head", "head^"])
def test_a_malformed_name_is_refused(context: RepositoryContext, text: str) -> None:
    with pytest.raises(NameInvalid):
        resolve(context, text)


def test_a_worktree_without_snapshots_has_no_head(context: RepositoryContext) -> None:
    add_worktree(context, "empty")
    with pytest.raises(NotFound, match="no snapshot yet"):
        resolve(context, "head", worktree="empty")


@pytest.mark.req("LC-27", "LC-29")
def test_the_name_of_a_partial_snapshot_is_refused_with_its_own_error(context: RepositoryContext) -> None:
    add_snapshot(context, "b000000000000001", ready=False, head=False)  # without .READY
    add_snapshot(context, "b100000000000002", tree=False, head=False)  # without a tree
    (context.paths.tree("b200000000000003") / "payload").mkdir(parents=True)  # crashed before it was published
    unpublished = context.paths.tree("b300000000000004")
    unpublished.mkdir()
    (unpublished / ".READY").touch()
    for name in ("b000000000000001", "b0", "b100000000000002", "b200000000000003", "b2", "b3"):
        with pytest.raises(PartialSnapshot) as refused:
            resolve(context, name)
        assert refused.value.code == "E_PARTIAL_SNAPSHOT"


@pytest.mark.req("LC-27")
def test_a_directory_named_ready_does_not_make_a_snapshot_complete(context: RepositoryContext) -> None:
    add_snapshot(context, "c000000000000001", ready=False, head=False)
    (context.paths.tree("c000000000000001") / ".READY").mkdir()
    with pytest.raises(PartialSnapshot):
        resolve(context, "c0")


def test_a_partial_tree_does_not_make_the_prefix_of_a_complete_one_ambiguous(
    context: RepositoryContext,
) -> None:
    context.paths.tree("4f1cffffffffffff").mkdir()
    assert resolve(context, "4f1c").snapshot_id == FIRST


def test_a_doomed_snapshot_resolves_but_cannot_be_used(context: RepositoryContext) -> None:
    add_snapshot(context, "d000000000000001", doomed_by="plan-7", head=False)
    assert resolve(context, "d0").doomed_by == "plan-7"
    with pytest.raises(Refused, match="plan-7"):
        resolve_usable(context, "d0")


@pytest.mark.parametrize("name", ["head", FIRST])
def test_a_reference_cannot_have_a_name_that_already_means_a_snapshot(name: str) -> None:
    with pytest.raises(UsageFailure):
        reference_name(name)
    assert reference_name("v1.2-rc_3") == "v1.2-rc_3"
