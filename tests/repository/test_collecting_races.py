"""Collecting while others begin to need snapshots: what somebody uses never vanishes under them.

One process takes snapshots all the time, one collects all that may be collected, and others refer to,
pin, read and restore from whatever they find. Their file systems take their time now and then.
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
from holdfast.repository.context import DESCRIPTORS, MAIN, WORKTREES, Isolation, RepositoryContext, is_ready
from holdfast.repository.history import usable, visible
from holdfast.repository.repository import Repository
from holdfast.repository.restore import InPlace, restore_in_place
from holdfast.repository.retention import GcPlan, Policy
from holdfast.repository.snapshot_service import Snapshots
from holdfast.repository.snapshots import SnapshotOptions, snapshot
from holdfast.store.audit import check_chain
from holdfast.trees.restore import materialise
from holdfast.trees.verify import changes, verify
from proof.effort import rounds, until
from tests.locks.race_rounds import delay_calls
from tests.locks.workers import Line, Workers
from tests.repository.kept import keep, parents_of, require_whole, snapshots_of
from tests.repository.repositories import add_worktree, make_repository

pytestmark = pytest.mark.skipif(sys.platform == "win32", reason="the workers are forked")

TARGET = "target"
SUCCESSES = rounds(25)
PAUSE = 0.005  # of those who have nothing to do: they must not keep the others from working
ROUNDS = 200
"""How often each of the users of the storm must have had its way; how many rounds there are."""

TOO_LATE = (NotFound, Refused, PartialSnapshot, LockConflict)
"""What one is told who comes when a snapshot is going, or gone."""


class Tally(NamedTuple):
    """What one worker has seen."""

    succeeded: int
    refused: int
    violations: tuple[str, ...] = ()


def take_any(control: RepositoryContext) -> str | None:
    """The id of some snapshot that may be collected any moment: an old one, and no head."""
    heads = {document.record.head_snapshot_id for _, document in control.store.scan(WORKTREES)}
    found = [document.record for _, document in control.store.scan(DESCRIPTORS)]
    old = sorted((each.created_at, each.snapshot_id) for each in found if each.snapshot_id not in heads)
    return random.choice(old[:4])[1] if old else None


def require_there(control: RepositoryContext, snapshot_id: str) -> None:
    document = control.store.read(DESCRIPTORS.key(snapshot_id))
    assert document is not None, f"{snapshot_id} has no descriptor any more"
    assert document.record.doomed_by is None or is_ready(control.places, snapshot_id), "its tree is gone"
    problems = list(verify(control.places.tree(snapshot_id), document.record.payload_hash))
    assert problems == [], f"{snapshot_id}: {problems}"


def refer(control: RepositoryContext, snapshot_id: str, round_: int) -> None:
    name = f"ref-{round_}"
    history.create_reference(control, name, snapshot_id)
    require_there(control, snapshot_id)
    history.delete_reference(control, name)


def pin(control: RepositoryContext, snapshot_id: str, round_: int) -> None:
    made = history.add_pin(control, snapshot_id)
    require_there(control, snapshot_id)
    history.remove_pin(control, made.pin_id)


def use(control: RepositoryContext, snapshot_id: str, round_: int) -> None:
    """As a snapshot does with its parent, and a restore with what it restores: intent, look, work."""
    with payloads.scratch(control, "restore", uses=[snapshot_id]) as room:
        usable(visible(control, snapshot_id))
        tree = control.places.tree(snapshot_id)
        materialise(tree, room.path / "payload")
        assert list(changes(room.path / "payload", tree)) == []
        require_there(control, snapshot_id)


def create(control: RepositoryContext, snapshot_id: str, round_: int) -> None:
    name = f"made-{round_}"
    worktrees.create(control, worktrees.CreateOptions(name, snapshot_id, Isolation.SHARED))
    require_there(control, snapshot_id)
    assert control.config(name).head_snapshot_id == snapshot_id
    worktree_changes.remove(control, name, save=None, force=True)


def restore(control: RepositoryContext, snapshot_id: str, round_: int) -> None:
    """In place, which makes a new head with the same content; nothing that was there is kept."""
    how = InPlace(reason="tested", allow_shared=True, keep=False)
    done = restore_in_place(control, TARGET, snapshot_id, None, how)
    assert done.published is not None
    assert done.published.payload_hash == done.source.payload_hash
    assert control.config(TARGET).head_snapshot_id == done.published.snapshot_id
    require_there(control, done.published.snapshot_id)


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
        control, succeeded, refused, violations = Repository(root).control, 0, 0, list[str]()
        round_ = 0
        while succeeded < SUCCESSES and not violations and not line.has_news():
            round_ += 1
            snapshot_id = take_any(control)
            if snapshot_id is None:
                time.sleep(PAUSE)
                continue
            try:
                act(control, snapshot_id, round_)
                succeeded += 1
            except TOO_LATE:
                refused += 1
            except (AssertionError, Failure) as problem:
                violations.append(repr(problem))
        line.say(tuple(Tally(succeeded, refused, tuple(violations))))

    return task


def writer(root: Path) -> Callable[[Line], None]:
    """Takes snapshots, so that there is always something to collect."""

    def task(line: Line) -> None:
        control, count = Repository(root).control, 0
        while not line.has_news():
            if len(snapshots_of(control)) < 20:
                count += 1
                (control.places.payload(MAIN) / "id").write_text(f"{count}")
                parent = control.config(MAIN).head_snapshot_id
                made = snapshot(control, MAIN, None, SnapshotOptions(note=f"{count}"))
                assert made.parent_id == parent
            else:
                time.sleep(PAUSE)
        line.say(tuple(Tally(count, 0)))

    return task


def collector(root: Path) -> Callable[[Line], None]:
    def task(line: Line) -> None:
        delay_calls(most=0.001)
        control, deleted, refused = Repository(root).control, 0, 0
        while not line.has_news():
            try:
                plan = gc_plan.propose(control).plan
                if plan.snapshots:
                    deleted += len(gc.run(control, plan.plan_id).snapshots)
                else:
                    time.sleep(PAUSE)
            except (PlanMismatch, LockConflict):
                refused += 1
        line.say(tuple(Tally(deleted, refused)))

    return task


def test_a_snapshot_that_somebody_uses_never_vanishes(scratch: Path) -> None:
    root = scratch / "repository"
    control = make_repository(root, isolation=Isolation.SHARED).control
    gc_plan.set_policy(control, Policy(keep_last=1))
    keep(control, {"id": "0"}, note="0")
    add_worktree(control, TARGET, isolation=Isolation.SHARED)
    with Workers() as workers:
        users = [workers.start(user(root, act)) for act in USERS.values()]
        others = [workers.start(writer(root)), workers.start(collector(root))]
        try:
            seen = {name: Tally(*worker.hear()) for name, worker in zip(USERS, users, strict=True)}
        except AssertionError:
            for each in others:  # one that failed tells why nobody gets any further
                if each.line.has_news():
                    each.hear()
            raise
        _, collected = (Tally(*worker.ask("enough")) for worker in others)
    assert not any(each.violations for each in seen.values()), seen
    assert all(each.succeeded == SUCCESSES for each in seen.values())
    assert collected.succeeded >= 1
    require_whole(control)
    parents_of(control, control.config(MAIN).head_snapshot_id)
    check_chain(control.store, control.trail)
    assert Repository(root).examine(strict=True) == []


# --- Round by round ---------------------------------------------------------------------------------


def hold_reference(control: RepositoryContext, snapshot_id: str) -> None:
    history.create_reference(control, "held", snapshot_id)


def hold_pin(control: RepositoryContext, snapshot_id: str) -> None:
    history.add_pin(control, snapshot_id)


def hold_worktree(control: RepositoryContext, snapshot_id: str) -> None:
    worktrees.create(control, worktrees.CreateOptions("held", snapshot_id, Isolation.SHARED))


def read_only(control: RepositoryContext, snapshot_id: str) -> None:
    use(control, snapshot_id, 0)


def look(control: RepositoryContext, snapshot_id: str) -> None:
    """Without keeping it: what is seen is right, or it is said that it is being collected."""
    found = compare.compare(control, MAIN, snapshot_id, "head")
    assert all(each.lines is not None for each in compare.patches(control, found))
    assert list(Snapshots(control).verify(snapshot_id)) == []


HOLDERS = [hold_reference, hold_pin, hold_worktree]


def in_turn(root: Path, act: Callable[[RepositoryContext, str], object]) -> Callable[[Line], None]:
    """A worker that does what it is told, and answers with the code of the failure that it met, or ""."""

    def task(line: Line) -> None:
        delay_calls(most=0.001)
        control = Repository(root).control
        while True:
            wanted, delay = line.wait()
            time.sleep(delay)
            try:
                act(control, wanted)
                line.say("")
            except Failure as failure:
                line.say(failure.code)

    return task


def let_go(control: RepositoryContext) -> None:
    for reference in history.references(control):
        history.delete_reference(control, reference.name)
    for each in history.pins(control):
        history.remove_pin(control, each.pin_id)
    if control.store.read(WORKTREES.key("held")) is not None:
        worktree_changes.remove(control, "held", save=None, force=True)


def test_of_one_who_collects_and_those_who_begin_to_need_it_not_both_have_their_way(scratch: Path) -> None:
    """Each round: one snapshot that may go, all told at once, all answer, the answers are judged."""
    root = scratch / "repository"
    control = make_repository(root, isolation=Isolation.SHARED).control
    keep(control, {"id": "0"})
    outcomes: Counter[str] = Counter()
    with Workers() as workers:
        collecting_ = workers.start(in_turn(root, gc.run))
        holders = [workers.start(in_turn(root, act)) for act in HOLDERS]
        reader = workers.start(in_turn(root, read_only))
        watcher = workers.start(in_turn(root, look))
        met = ("held", "collected", "refused", "looked")
        for round_ in until(lambda: all(outcomes[each] for each in met), ROUNDS):
            snapshot_id = keep(control, {"id": f"{round_}"}, head=False)
            plan = gc_plan.propose(control).plan
            assert plan.snapshots == (snapshot_id,)
            taking_part = random.sample(holders, k=random.choice([0, 1, 1, 1, 2, 3]))
            collecting_.say((plan.plan_id, 0.0))
            for worker in [*taking_part, reader, watcher]:
                worker.say((snapshot_id, random.uniform(0.0, 0.04)))  # before, amidst, or behind the doom
            answers = [worker.hear() for worker in taking_part]
            read, collected = reader.hear(), collecting_.hear()
            looked = watcher.hear()
            told = {"", "E_NOT_FOUND", "E_REFUSED", "E_SNAPSHOT_COLLECTED"}
            assert {*answers, read, looked} <= told, (answers, read, looked)
            if "" in answers:
                assert collected == "E_GC_PLAN_MISMATCH"
                require_there(control, snapshot_id)
                assert snapshots_of(control)[snapshot_id].doomed_by is None
                outcomes["held"] += 1
            else:
                assert collected in ("", "E_GC_PLAN_MISMATCH")  # both may see each other, and both step back
                outcomes["collected" if collected == "" else "neither"] += 1
            outcomes["refused"] += sum(each != "" for each in (*answers, read, looked))
            outcomes["looked"] += looked == ""
            outcomes["overtaken"] += looked == "E_SNAPSHOT_COLLECTED"
            require_whole(control)
            let_go(control)
            if (rest := gc_plan.propose(control)).stored:
                gc.run(control, rest.plan.plan_id)
            assert snapshot_id not in snapshots_of(control)
    assert Repository(root).examine(strict=True) == []


def test_the_race_is_found_if_a_collector_does_not_look_again(
    scratch: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A planted fault: it looks once, before it dooms."""
    looked: list[str] = []
    check_again = gc._check_again

    def once(control: RepositoryContext, plan: GcPlan) -> None:
        if plan.plan_id not in looked:
            looked.append(plan.plan_id)
            check_again(control, plan)

    monkeypatch.setattr(gc, "_check_again", once)
    doom = gc._mark

    def slowly(control: RepositoryContext, plan: GcPlan) -> None:
        history.create_reference(control, "meanwhile", plan.snapshots[0])
        doom(control, plan)

    monkeypatch.setattr(gc, "_mark", slowly)
    control = make_repository(scratch / "repository").control
    first = keep(control, {"id": "0"})
    keep(control, {"id": "1"})
    gc_plan.set_policy(control, Policy(keep_last=1))
    gc.run(control, gc_plan.propose(control).plan.plan_id)
    with pytest.raises(AssertionError, match="no descriptor"):
        require_there(control, first)
