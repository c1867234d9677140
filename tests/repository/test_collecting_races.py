"""Collection while other processes start to use snapshots: a snapshot in use never vanishes.

One process keeps taking snapshots, one collects everything that it may, and others reference, pin, read and
restore arbitrary snapshots. Random file system calls are delayed.
"""

from __future__ import annotations

import random
import sys
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import pytest

from holdfast.errors import Failure, LockConflict, NotFound, PartialSnapshot, PlanMismatch, Refused
from holdfast.repository import compare, gc, gc_plan, history, payloads, worktree_changes, worktrees
from holdfast.repository.context import DESCRIPTORS, MAIN, WORKTREES, Isolation, RepositoryContext
from holdfast.repository.history import usable, visible
from holdfast.repository.patches import patches
from holdfast.repository.repository import Repository
from holdfast.repository.restore import RestoreOptions, restore_in_place
from holdfast.repository.retention import GcPlan, Policy
from holdfast.repository.snapshot_service import Snapshots
from holdfast.repository.snapshots import SnapshotOptions, snapshot
from holdfast.store.audit import check_chain
from proof.effort import rounds, until
from tests.locks.race_rounds import delay_calls
from tests.locks.workers import Line, Worker, Workers
from tests.repository import damage
from tests.repository.kept import keep, parents_of, require_whole, snapshots_of
from tests.repository.repositories import add_worktree
from tests.support.homes import make_repository

pytestmark = [
    pytest.mark.both_homes,
    pytest.mark.skipif(sys.platform == "win32", reason="the workers are forked"),
]

TARGET = "target"
SUCCESSES = rounds(25)
ALIVE = "alive"
PAUSE = 0.005  # of idle workers: they must not starve the others
ROUNDS = 200
"""Successes that each user needs in the storm, pauses of idle workers, and rounds of the other race."""

TOO_LATE = (NotFound, Refused, PartialSnapshot, LockConflict)
"""Failures that are expected when a snapshot is being collected, or is gone."""


class Tally(NamedTuple):
    """The counts and violations of one worker."""

    succeeded: int
    refused: int
    violations: tuple[str, ...] = ()


def make_shared(root: Path) -> RepositoryContext:
    """A new repository whose `main` everybody may write without a lease."""
    context = make_repository(root).context
    damage.change(context, WORKTREES.key(MAIN), isolation=Isolation.SHARED)
    return context


def pick_collectable(context: RepositoryContext) -> str | None:
    """The id of a snapshot that may be collected at any moment: an old one that is no head."""
    heads = {document.record.head_snapshot_id for _, document in context.store.scan(WORKTREES)}
    found = [document.record for _, document in context.store.scan(DESCRIPTORS)]
    old = sorted((each.created_at, each.snapshot_id) for each in found if each.snapshot_id not in heads)
    return random.choice(old[:4])[1] if old else None


def require_intact(context: RepositoryContext, snapshot_id: str) -> None:
    document = context.store.read(DESCRIPTORS.key(snapshot_id))
    assert document is not None, f"{snapshot_id} has no descriptor"
    assert document.record.doomed_by is None or context.home.is_ready(snapshot_id), "its tree is gone"
    problems = list(context.home.verify(document.record))
    assert problems == [], f"{snapshot_id}: {problems}"


def refer(context: RepositoryContext, snapshot_id: str, round_: int) -> None:
    name = f"ref-{round_}"
    history.create_reference(context, name, snapshot_id)
    require_intact(context, snapshot_id)
    history.delete_reference(context, name)


def pin(context: RepositoryContext, snapshot_id: str, round_: int) -> None:
    made = history.add_pin(context, snapshot_id)
    require_intact(context, snapshot_id)
    history.remove_pin(context, made.pin_id)


def use(context: RepositoryContext, snapshot_id: str, round_: int) -> None:
    """Use it as a snapshot uses its parent and a restore its source: write the intent, check, work."""
    with payloads.scratch(context, "restore", uses=[snapshot_id]) as room:
        found = usable(visible(context, snapshot_id))
        made = context.home.materialise(snapshot_id, room.path / "payload")
        assert (made.files, made.bytes) == (found.files, found.bytes)
        require_intact(context, snapshot_id)


def create(context: RepositoryContext, snapshot_id: str, round_: int) -> None:
    name = f"made-{round_}"
    worktrees.create(context, worktrees.CreateOptions(name, snapshot_id, Isolation.SHARED))
    require_intact(context, snapshot_id)
    assert context.config(name).head_snapshot_id == snapshot_id
    worktree_changes.remove(context, name, save=None, force=True, keep_for=0.0)


def restore(context: RepositoryContext, snapshot_id: str, round_: int) -> None:
    """Restore in place: publish a new head with the same content, and discard unsaved work."""
    how = RestoreOptions(reason="tested", allow_shared=True, keep=False)
    done = restore_in_place(context, TARGET, snapshot_id, None, how)
    assert done.published is not None
    assert done.published.payload_hash == done.source.payload_hash
    assert context.config(TARGET).head_snapshot_id == done.published.snapshot_id
    require_intact(context, done.published.snapshot_id)


USERS: dict[str, Callable[[RepositoryContext, str, int], None]] = {
    "refer": refer,
    "pin": pin,
    "use": use,
    "create": create,
    "restore": restore,
}


def user(root: Path, act: Callable[[RepositoryContext, str, int], None]) -> Callable[[Line], None]:
    def task(line: Line) -> None:
        delay_calls(most=0.001)
        context, succeeded, refused, violations = Repository(root).context, 0, 0, list[str]()
        round_ = 0
        while succeeded < SUCCESSES and not violations and not line.has_news():
            round_ += 1
            snapshot_id = pick_collectable(context)
            if snapshot_id is None:
                time.sleep(PAUSE)
                continue
            try:
                act(context, snapshot_id, round_)
                succeeded += 1
            except TOO_LATE:
                refused += 1
            except (AssertionError, Failure) as problem:
                violations.append(repr(problem))
            if round_ % 5 == 0:
                line.say(ALIVE)  # the whole storm may take longer than anybody waits for one message
        line.say(tuple(Tally(succeeded, refused, tuple(violations))))

    return task


def result_of(worker: Worker) -> Tally:
    while (said := worker.hear()) == ALIVE:
        pass
    return Tally(*said)


def writer(root: Path) -> Callable[[Line], None]:
    """Take snapshots, so that there is always something to collect."""

    def task(line: Line) -> None:
        context, count = Repository(root).context, 0
        while not line.has_news():
            if len(snapshots_of(context)) < 20:
                count += 1
                (context.paths.payload(MAIN) / "id").write_text(f"{count}")
                parent = context.config(MAIN).head_snapshot_id
                made = snapshot(context, MAIN, None, SnapshotOptions(note=f"{count}"))
                assert made.parent_id == parent
            else:
                time.sleep(PAUSE)
        line.say(tuple(Tally(count, 0)))

    return task


def collector(root: Path) -> Callable[[Line], None]:
    def task(line: Line) -> None:
        delay_calls(most=0.001)
        context, deleted, refused = Repository(root).context, 0, 0
        while not (deleted and line.has_news()):  # at the end nobody else changes anything: then it succeeds
            try:
                plan = gc_plan.propose(context).plan
                if plan.snapshots:
                    deleted += len(gc.run(context, plan.plan_id).snapshots)
                else:
                    time.sleep(PAUSE)
            except (PlanMismatch, LockConflict):
                refused += 1
        line.say(tuple(Tally(deleted, refused)))

    return task


def test_a_snapshot_in_use_never_vanishes(scratch: Path) -> None:
    root = scratch / "repository"
    context = make_shared(root)
    gc_plan.set_policy(context, Policy(keep_last=1))
    keep(context, {"id": "0"}, note="0")
    add_worktree(context, TARGET, isolation=Isolation.SHARED)
    with Workers() as workers:
        users = [workers.start(user(root, act)) for act in USERS.values()]
        others = [workers.start(writer(root)), workers.start(collector(root))]
        try:
            seen = {name: result_of(worker) for name, worker in zip(USERS, users, strict=True)}
        except AssertionError:
            for each in others:  # if one of them failed, its error explains why the users got stuck
                if each.line.has_news():
                    each.hear()
            raise
        _, collected = (Tally(*worker.ask("enough")) for worker in others)
    assert not any(each.violations for each in seen.values()), seen
    assert all(each.succeeded == SUCCESSES for each in seen.values())
    assert collected.succeeded >= 1
    require_whole(context)
    parents_of(context, context.config(MAIN).head_snapshot_id)
    check_chain(context.store, context.trail)
    assert Repository(root).examine(strict=True) == []


# --- Round by round ---------------------------------------------------------------------------------


def hold_reference(context: RepositoryContext, snapshot_id: str) -> None:
    history.create_reference(context, "held", snapshot_id)


def hold_pin(context: RepositoryContext, snapshot_id: str) -> None:
    history.add_pin(context, snapshot_id)


def hold_worktree(context: RepositoryContext, snapshot_id: str) -> None:
    worktrees.create(context, worktrees.CreateOptions("held", snapshot_id, Isolation.SHARED))


def read_only(context: RepositoryContext, snapshot_id: str) -> None:
    use(context, snapshot_id, 0)


def look(context: RepositoryContext, snapshot_id: str) -> None:
    """Read it unprotected: the result is right, or the failure says that it is being collected."""
    found = compare.compare(context, MAIN, snapshot_id, "head")
    assert all(each.lines is not None for each in patches(context, found))
    assert list(Snapshots(context).verify(snapshot_id)) == []


HOLDERS = [hold_reference, hold_pin, hold_worktree]


def in_turn(root: Path, act: Callable[[RepositoryContext, str], object]) -> Callable[[Line], None]:
    """A worker that acts on request, and answers with the code of the failure, or "" for success."""

    def task(line: Line) -> None:
        delay_calls(most=0.001)
        context = Repository(root).context
        while True:
            wanted, delay = line.wait()
            time.sleep(delay)
            try:
                act(context, wanted)
                line.say("")
            except Failure as failure:
                line.say(failure.code)

    return task


def release_all(context: RepositoryContext) -> None:
    for reference in history.references(context):
        history.delete_reference(context, reference.name)
    for each in history.pins(context):
        history.remove_pin(context, each.pin_id)
    if context.store.read(WORKTREES.key("held")) is not None:
        worktree_changes.remove(context, "held", save=None, force=True, keep_for=0.0)


def test_a_collector_and_a_new_user_of_a_snapshot_never_both_succeed(scratch: Path) -> None:
    """In each round all workers act on one collectable snapshot at once, and their answers are compared."""
    root = scratch / "repository"
    context = make_shared(root)
    keep(context, {"id": "0"})
    outcomes: Counter[str] = Counter()
    with Workers() as workers:
        collecting_ = workers.start(in_turn(root, gc.run))
        holders = [workers.start(in_turn(root, act)) for act in HOLDERS]
        reader = workers.start(in_turn(root, read_only))
        watcher = workers.start(in_turn(root, look))
        met = ("held", "collected", "refused", "looked")
        for round_ in until(lambda: all(outcomes[each] for each in met), ROUNDS):
            snapshot_id = keep(context, {"id": f"{round_}"}, head=False)
            plan = gc_plan.propose(context).plan
            assert plan.snapshots == (snapshot_id,)
            taking_part = random.sample(holders, k=random.choice([0, 1, 1, 1, 2, 3]))
            collecting_.say((plan.plan_id, 0.0))
            for worker in [*taking_part, reader, watcher]:
                worker.say((snapshot_id, random.uniform(0.0, 0.04)))  # before, during, or after the doom
            answers = [worker.hear() for worker in taking_part]
            read, collected = reader.hear(), collecting_.hear()
            looked = watcher.hear()
            expected = {"", "E_NOT_FOUND", "E_REFUSED", "E_SNAPSHOT_COLLECTED"}
            assert {*answers, read, looked} <= expected, (answers, read, looked)
            if "" in answers:
                assert collected == "E_GC_PLAN_MISMATCH"
                require_intact(context, snapshot_id)
                assert snapshots_of(context)[snapshot_id].doomed_by is None
                outcomes["held"] += 1
            else:
                assert collected in ("", "E_GC_PLAN_MISMATCH")  # both may see each other and back off
                outcomes["collected" if collected == "" else "neither"] += 1
            outcomes["refused"] += sum(each != "" for each in (*answers, read, looked))
            outcomes["looked"] += looked == ""
            outcomes["overtaken"] += looked == "E_SNAPSHOT_COLLECTED"
            require_whole(context)
            release_all(context)
            if (rest := gc_plan.propose(context)).stored:
                gc.run(context, rest.plan.plan_id)
            assert snapshot_id not in snapshots_of(context)
    assert Repository(root).examine(strict=True) == []


def test_the_race_is_found_if_a_collector_does_not_check_again(scratch: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A planted bug: it checks once, before it dooms."""
    looked: list[str] = []
    check_again = gc._check_again

    def once(context: RepositoryContext, plan: GcPlan) -> None:
        if plan.plan_id not in looked:
            looked.append(plan.plan_id)
            check_again(context, plan)

    monkeypatch.setattr(gc, "_check_again", once)
    doom = gc._mark

    def slowly(context: RepositoryContext, plan: GcPlan) -> None:
        history.create_reference(context, "meanwhile", plan.snapshots[0])
        doom(context, plan)

    monkeypatch.setattr(gc, "_mark", slowly)
    context = make_repository(scratch / "repository").context
    first = keep(context, {"id": "0"})
    keep(context, {"id": "1"})
    gc_plan.set_policy(context, Policy(keep_last=1))
    gc.run(context, gc_plan.propose(context).plan.plan_id)
    with pytest.raises(AssertionError, match="no descriptor"):
        require_intact(context, first)
