"""Snapshot and restore, killed or failed at every call: the history is old or new, and no work is lost."""

from __future__ import annotations

import contextlib
import errno
import sys
from collections.abc import Iterator

import pytest

from holdfast.repository import snapshots
from holdfast.repository.context import Descriptor, RepositoryContext, WorktreeConfig
from holdfast.repository.snapshots import publish_changes
from holdfast.store.model import Append, Decision
from proof.crash import Fault, Report
from proof.effort import SHARE
from proof.powercut import power_cuts
from tests.repository.interruptions import FEW, World, cases, failed_everywhere, killed_everywhere, world

pytestmark = [
    pytest.mark.both_homes,
    pytest.mark.skipif(sys.platform == "win32", reason="needs fork and an atomic exchange of directories"),
]

IN_PLACE, GIVING_UP = "restore in place", "restore in place, nothing kept"
OPERATIONS = ["snapshot", "restore", IN_PLACE, GIVING_UP, "restore a path"]


@pytest.fixture(scope="module")
def old() -> Iterator[World]:
    with world() as made:
        yield made


@pytest.mark.req("LC-30", "WT-09")
@pytest.mark.parametrize("name", OPERATIONS)
@pytest.mark.sampled(1)
def test_a_kill_at_any_call_leaves_the_old_state_or_the_new_and_the_next_operation_works(old: World, name: str) -> None:
    report = killed_everywhere(cases(old)[name], share=SHARE)
    report.require_clean(at_least=20)


@pytest.mark.parametrize("name", [name for name in OPERATIONS if name != IN_PLACE])  # it combines two of the others
@pytest.mark.sampled(1)
def test_an_error_at_any_call_leaves_the_old_state_or_the_new_and_the_next_operation_works(
    old: World, name: str
) -> None:
    faults = [Fault(errno.EIO), Fault(errno.ENOSPC, lasting=True), Fault(errno.ENOSPC)]
    report = failed_everywhere(cases(old)[name], faults, share=SHARE)
    report.require_clean(at_least=50)


def publish_in_two_steps(
    context: RepositoryContext, config: WorktreeConfig, descriptor: Descriptor, proof: object, tag: object
) -> Descriptor:
    """The planted bug: the descriptor in one commit, the head in the next."""
    (created, moved), published = publish_changes(config, descriptor)
    assert not isinstance(created, Append)
    assert not isinstance(moved, Append)
    context.store.transact([created.key], lambda view, now: Decision([created], None))
    context.store.transact([moved.key], lambda view, now: Decision([moved], None))
    return published


def test_kills_find_a_head_that_is_moved_in_another_commit_than_its_descriptor(
    old: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(snapshots, "_publish", publish_in_two_steps)
    assert killed_everywhere(cases(old)["snapshot"], ("link", "replace", "rename")).violations


# --- Power cuts -------------------------------------------------------------------------------------


def cut_off(few: World, name: str, *, limit: int, share: float = 1.0) -> Report:
    """Sweep power cuts, with at most `limit` states each; they leave modes and times undefined."""
    case = cases(few)[name]
    case.unknown = ("mode", "mtime")
    return power_cuts(case, limit=limit, share=share)


@pytest.fixture(scope="module")
def few() -> Iterator[World]:
    with world(FEW) as made:
        yield made


@pytest.mark.parametrize("name", ["snapshot", GIVING_UP])
def test_a_power_cut_at_any_moment_leaves_the_old_state_or_the_new(few: World, name: str) -> None:
    report = cut_off(few, name, limit=8, share=SHARE)
    assert report.violations == [], str(report)
    assert report.points + report.skipped >= 200


@pytest.mark.long
@pytest.mark.parametrize("name", ["snapshot", GIVING_UP])
def test_power_cuts_find_a_tree_that_is_published_before_it_is_synced(
    few: World, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("holdfast.trees.walker.synced", lambda _: contextlib.nullcontext())
    assert cut_off(few, name, limit=2).violations
