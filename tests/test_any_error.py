"""Whatever a file system answers, what leaves the library is a `Failure`.

Each scenario uses a part of the public interface. A sweep makes its file system calls fail, reading ones included, with
the answer that JuiceFS gives for a file that another machine has replaced (EBADF).
"""

from __future__ import annotations

import contextlib
import errno
import sys
from pathlib import Path

import pytest

import holdfast
from holdfast.errors import Failure
from holdfast.fs import calls
from holdfast.issues.held_claim import HeldIssueClaim
from holdfast.issues.model import EVENTS
from holdfast.repository import usage
from holdfast.repository.restore import RestoreOptions
from proof.crash import Outcome, Scenario, error_points
from proof.effort import SHARE, chosen
from tests.repository.repositories import make_repository

pytestmark = pytest.mark.skipif(sys.platform == "win32", reason="the sweep counts calls in a fork")

_NEVER_RAISE = ("realpath", "access")
NAMES = tuple(name for name in calls.CHANGING + calls.READING if name not in _NEVER_RAISE)
ACTOR = "agent:tester"


class Using:
    """A scenario whose only rule is that errors are failures."""

    def prepare(self, directory: Path) -> None:
        with make_repository(directory / "r") as repository, repository.lease() as lease:
            (directory / "r/main/kept").mkdir()
            (directory / "r/main/kept/file").write_text("first")
            repository.snapshot(lease=lease)
            (directory / "r/main/kept/file").write_text("second")

    def operate(self, directory: Path) -> object:
        raise NotImplementedError

    def check(self, directory: Path, outcome: Outcome) -> None:
        assert outcome.error is None or isinstance(outcome.error, Failure), repr(outcome.error)


class Leasing(Using):
    def operate(self, directory: Path) -> None:
        with holdfast.Repository(directory / "r") as repository, repository.lease(wait=None) as lease:
            lease.renew()
            lease.check()
            repository.path()
            list(repository.worktrees.states())
            with pytest.raises(Failure), holdfast.Repository(directory / "r") as other:
                other.lease()
            list(repository.audit(verified=True).read())


class Saving(Using):
    def operate(self, directory: Path) -> None:
        with holdfast.Repository(directory / "r") as repository, repository.lease() as lease:
            first = repository.config().head_snapshot_id
            made = repository.snapshot(lease=lease, tag="saved").snapshot_id
            repository.snapshots.status("main")
            repository.snapshots.line("main")
            list(repository.snapshots.verify(made))
            list(repository.snapshots.patches(repository.snapshots.compare("main", first, made)))
            repository.snapshots.export(made, directory / "exported")


class Restoring(Using):
    def operate(self, directory: Path) -> None:
        with holdfast.Repository(directory / "r") as repository, repository.lease() as lease:
            repository.snapshots.plan("main", repository.config().head_snapshot_id or "", RestoreOptions(reason="test"))
            repository.restore(repository.config().head_snapshot_id or "", lease=lease, reason="test")
            repository.snapshots.restore(repository.config().head_snapshot_id or "")


class Branching(Using):
    def operate(self, directory: Path) -> None:
        with holdfast.Repository(directory / "r") as repository:
            repository.worktrees.create("old", snapshot=repository.config().head_snapshot_id)
            repository.worktrees.change_name("old", "new")
            (repository.path("new") / "unsaved").write_text("unsaved")
            repository.worktrees.usage("new")
            repository.remove_worktree("new")


class Collecting(Using):
    def prepare(self, directory: Path) -> None:
        super().prepare(directory)
        with holdfast.Repository(directory / "r") as repository:
            made = repository.worktrees.create("old", snapshot=repository.config().head_snapshot_id)
            (directory / "r/worktrees/old/file").write_text("collected")
            repository.remove_worktree(made.worktree_id)

    def operate(self, directory: Path) -> None:
        with holdfast.Repository(directory / "r") as repository:
            plan = repository.gc.plan().plan
            if plan.snapshots:
                repository.gc.run(plan.plan_id)


class Examining(Using):
    def operate(self, directory: Path) -> None:
        with holdfast.Repository(directory / "r") as repository:
            repository.examine(strict=True)
            repository.repair()
        holdfast.look_around(directory / "r")


class Initialising(Using):
    def prepare(self, directory: Path) -> None:
        (directory / "source/below").mkdir(parents=True)
        (directory / "source/below/file").write_text("imported")

    def operate(self, directory: Path) -> None:
        holdfast.initialise(directory / "new", source=directory / "source")


class Tracking(Using):
    def prepare(self, directory: Path) -> None:
        tracker = holdfast.open_tracker(directory, actor=ACTOR)
        tracker.initialise()
        tracker.create(holdfast.NewIssue(title="first"))

    def operate(self, directory: Path) -> None:
        tracker = holdfast.open_tracker(directory, actor=ACTOR)
        with contextlib.closing(tracker.store), contextlib.closing(tracker.store.watch(EVENTS)) as watch:
            issue = tracker.create(holdfast.NewIssue(title="second"))
            claimed = tracker.claims.claim(issue.id, tracker.claims.request(ACTOR, ttl=60.0))
            claim = HeldIssueClaim(tracker.claims, claimed.claim).id
            tracker.update(issue.id, holdfast.Update(state=holdfast.State.DONE), claim=claim)
            watch.wait(0.0)
            list(tracker.snapshot())
            tracker.delete(issue.id)


class Recording(Using):
    def prepare(self, directory: Path) -> None:
        holdfast.init_ledger(directory, claim_files=True).close()

    def operate(self, directory: Path) -> None:
        with contextlib.closing(holdfast.open_ledger(directory)) as opened:
            opened.ledger.append_many([{"type": "made"}, {"type": "made"}])
            with opened.claims.claim("1", owner=ACTOR) as claim:
                claim.append({"type": "made"})
            list(opened.ledger.events())
            opened.verify()


class Locking(Using):
    def prepare(self, directory: Path) -> None:
        pass

    def operate(self, directory: Path) -> None:
        locker = holdfast.FileLocker(fair=True)
        with locker.lock_exclusive(directory / "file"):
            assert holdfast.FileLocker().try_lock_shared(directory / "file") is None
        locker.close()
        with holdfast.RepoLock(directory / "data").lock("repository"):
            holdfast.RepoLock(directory / "data").states()
        (directory / "ledger").mkdir(exist_ok=True)
        with holdfast.LedgerLock(directory / "ledger", ACTOR).acquire():
            holdfast.LedgerLock(directory / "ledger", ACTOR).state()


class Working(Using):
    def prepare(self, directory: Path) -> None:
        super().prepare(directory)
        Tracking().prepare(directory / "r")

    def operate(self, directory: Path) -> None:
        tracker = holdfast.open_tracker(directory / "r", actor=ACTOR)
        with contextlib.closing(tracker.store), holdfast.Repository(directory / "r") as repository:
            with holdfast.take_work(repository, tracker, holdfast.AssignmentOptions(assignee=ACTOR)) as assignment:
                (assignment.path / "work").write_text("done")
                assignment.succeed()
            assignment.remove_worktree()


SCENARIOS: list[Scenario] = [
    *(Leasing(), Saving(), Restoring(), Branching(), Collecting(), Examining()),
    *(Initialising(), Tracking(), Recording(), Locking(), Working()),
]


@pytest.mark.parametrize("scenario", chosen(SCENARIOS, least=4), ids=lambda each: type(each).__name__)
def test_an_error_at_any_call_leaves_the_library_as_a_failure(
    scenario: Scenario, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(usage, "_PROC", tmp_path)  # thousands of calls about processes, which are allowed to fail
    errors = (errno.EBADF,)
    error_points(scenario, errors, lasting=(), names=NAMES, descriptors=False, share=SHARE / 5).require_clean()


@pytest.mark.long
def test_an_error_at_any_look_at_an_open_file_leaves_the_doctor_as_a_failure(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(usage, "_PROC", tmp_path)
    error_points(Examining(), (errno.EBADF,), lasting=(), names=("fstat",), descriptors=False).require_clean(
        at_least=100
    )
