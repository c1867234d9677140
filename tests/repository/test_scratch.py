"""Scratch directories: in use while their process lives, abandoned and removable once it is dead."""

from __future__ import annotations

import errno
import os
import sys
from pathlib import Path
from typing import Any

import pytest

from holdfast.errors import Failure
from holdfast.locks.file_lock import FileLocker
from holdfast.repository import payloads as scratches
from holdfast.repository.context import RepositoryContext
from holdfast.repository.repository import Repository
from proof.effort import rounds
from proof.interpose import Attempt, interposed
from tests.locks.race_rounds import delay_calls
from tests.locks.workers import Line, Workers
from tests.repository.repositories import make_repository

pytestmark = pytest.mark.both_homes

ROUNDS = rounds(100, least=10)


@pytest.fixture
def context(scratch: Path) -> RepositoryContext:
    return make_repository(scratch / "repository").context


def left_over(context: RepositoryContext) -> list[str]:
    return [path.name for path in context.paths.scratch.iterdir()]


def test_a_scratch_is_in_use_until_its_block_ends(context: RepositoryContext) -> None:
    with scratches.scratch(context, "test", uses=["a", "b"]) as room:
        (intent,) = scratches.in_use(context.paths)
        assert (intent.scratch_id, intent.purpose, intent.uses) == (room.scratch_id, "test", ("a", "b"))
        assert list(scratches.abandoned(context.paths)) == []
        assert scratches.sweep(context.paths, room.scratch_id) is False
        assert room.path.is_dir()
    assert left_over(context) == []
    assert list(scratches.in_use(context.paths)) == []


def test_a_scratch_that_cannot_be_removed_does_not_undo_its_operation(context: RepositoryContext) -> None:
    """For example because of an immutable file: the scratch is left as litter, to be swept later."""

    def refuse(attempt: Attempt) -> Any:
        raise PermissionError(errno.EPERM, os.strerror(errno.EPERM))

    with interposed(refuse, ("unlink",)), scratches.scratch(context, "test") as room:
        (room.path / "file").write_text("x")
    (litter,) = scratches.abandoned(context.paths)
    assert scratches.sweep(context.paths, litter.scratch_id)
    assert left_over(context) == []


def test_listing_scratches_creates_nothing_in_them(context: RepositoryContext) -> None:
    place = context.paths.scratch / "bare"
    place.mkdir(parents=True)
    (found,) = scratches.abandoned(context.paths)
    assert (found.scratch_id, found.intent) == ("bare", None)
    assert list(place.iterdir()) == []
    assert scratches.sweep(context.paths, "bare")
    assert scratches.sweep(context.paths, "bare")  # idempotent
    assert left_over(context) == []


def test_the_next_sweep_finishes_one_that_was_killed(context: RepositoryContext) -> None:
    for name in ("dead", "dead" + scratches.SWEPT):
        place = context.paths.scratch / name
        (place / "tree").mkdir(parents=True)
        (place / scratches.LOCK).touch()
    assert {each.scratch_id for each in scratches.abandoned(context.paths)} == {"dead", "dead.swept"}
    assert scratches.sweep(context.paths, "dead")
    assert scratches.sweep(context.paths, "dead.swept")
    assert left_over(context) == []


def test_a_scratch_that_another_process_is_removing_is_left_alone(context: RepositoryContext) -> None:
    place = context.paths.scratch / ("gone" + scratches.SWEPT)
    place.mkdir(parents=True)
    with FileLocker().lock_exclusive(place / scratches.LOCK):
        assert list(scratches.abandoned(context.paths)) == []
        assert scratches.sweep(context.paths, place.name) is False
    assert scratches.sweep(context.paths, place.name)


@pytest.mark.skipif(sys.platform == "win32", reason="the workers are forked")
def test_sweepers_never_disturb_scratches_in_use(scratch: Path) -> None:
    """Three workers use scratches with a file that must stay, while two others sweep all that they can."""
    root = scratch / "repository"
    context = make_repository(root).context

    def work(line: Line) -> None:
        delay_calls(("open", "rename", "mkdir", "unlink", "rmdir"), most=0.0005)
        own = Repository(root).context
        problems: list[str] = []
        for _ in range(ROUNDS):
            try:
                with scratches.scratch(own, "work") as room:
                    (room.path / "file").write_text("mine")
                    assert (room.path / "file").read_text() == "mine"
                    assert (room.path / scratches.INTENT).is_file()
            except (Failure, OSError, AssertionError) as problem:
                problems.append(repr(problem))
        line.say(problems)

    def sweep(line: Line) -> None:
        delay_calls(("open", "rename", "mkdir", "unlink", "rmdir"), most=0.0005)
        own, swept = Repository(root).context, 0
        while not line.has_news():
            sum(1 for _ in scratches.in_use(own.paths))
            for each in scratches.abandoned(own.paths):
                swept += scratches.sweep(own.paths, each.scratch_id)
        line.say(swept)

    with Workers() as workers:
        sweeping = workers.start_many(2, sweep)
        working = workers.start_many(3, work)
        assert [worker.hear() for worker in working] == [[], [], []]
        assert all(worker.ask("enough") >= 0 for worker in sweeping)
    for each in scratches.abandoned(context.paths):
        scratches.sweep(context.paths, each.scratch_id)
    assert left_over(context) == []
