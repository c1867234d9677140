"""Snapshots and restores to kill or fail at any call, and the invariants of the state that remains.

A repository is built once and copied for each crash point. Its worktree `main` has two snapshots, a held
lease, and unsaved work: a new file, a changed one, a deleted one.
"""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import NamedTuple

from holdfast.fs import calls
from holdfast.repository.context import DESCRIPTORS, MAIN, OPERATIONS, WORKTREES, Proof, RepositoryContext
from holdfast.repository.history import worktree_history
from holdfast.repository.repository import Repository
from holdfast.repository.restore import RestoreOptions, differs_from_head, restore_in_place
from holdfast.repository.snapshot_service import Snapshots
from holdfast.repository.snapshots import SnapshotOptions, snapshot
from holdfast.repository.worktrees import settle
from holdfast.store.files import FileStore
from holdfast.trees.verify import verify
from proof.crash import (
    Ending,
    Fault,
    Kill,
    Outcome,
    Report,
    Scenario,
    fresh,
    indexes,
    judge,
    run_faulted,
    run_killed,
)
from proof.crash import scratch as swept_directory
from tests.repository.repositories import make_repository
from tests.repository.stages import files_kept

Content = dict[str, str]

FIRST: Content = {"file": "first", "directory/below": "first", ".READY": "mine", "gone": "by now"}
SECOND: Content = {**FIRST, "file": "second"}
UNSAVED: Content = {"file": "unsaved", "directory/below": "first", ".READY": "mine", "new": "unsaved"}
PART: Content = {**UNSAVED, "gone": "by now"}


class Contents(NamedTuple):
    """The content of `main` at its two snapshots, and now."""

    first: Content
    second: Content
    unsaved: Content


MANY = Contents(FIRST, SECOND, UNSAVED)
FEW = Contents({"file": "first"}, {"file": "second"}, {"file": "unsaved"})


class World(NamedTuple):
    """The repository to copy: its root, the proof of its lease, and its snapshots."""

    root: Path
    proof: Proof
    first: str
    second: str
    contents: Contents


@contextmanager
def world(contents: Contents = MANY) -> Iterator[World]:
    memory = "/dev/shm" if Path("/dev/shm").is_dir() else None
    with tempfile.TemporaryDirectory(prefix="holdfast-", dir=memory) as directory:
        root = Path(directory) / "repository"
        repository = make_repository(root)
        lease = repository.leases.acquire(MAIN, repository.leases.request(ttl=24 * 3600.0)).lease
        proof = Proof(lease.lock_id, lease.fencing_token)
        payload = repository.context.paths.payload(MAIN)
        write(payload, contents.first)
        first = snapshot(repository.context, MAIN, proof, SnapshotOptions(note="first")).snapshot_id
        write(payload, contents.second)
        second = snapshot(repository.context, MAIN, proof, SnapshotOptions(note="second")).snapshot_id
        write(payload, contents.unsaved)
        yield World(root, proof, first, second, contents)


def write(directory: Path, content: Content) -> None:
    """Replace all files of a directory."""
    for path in [each for each in directory.rglob("*") if each.is_file() and each.name != ".git"]:
        path.unlink()
    for name, text in content.items():
        (directory / name).parent.mkdir(parents=True, exist_ok=True)
        (directory / name).write_text(text)


def content_of(directory: Path) -> Content:
    """The files of a directory and their text; empty directories do not count."""
    files = [path for path in directory.rglob("*") if path.is_file() and path.name != ".git"]
    return {str(path.relative_to(directory)): path.read_text() for path in files}


@contextmanager
def opened(directory: Path) -> Iterator[RepositoryContext]:
    context = Repository(directory).context
    assert isinstance(context.store, FileStore)
    with context.store:
        yield context


class Case:
    """One operation on a copy of the world.

    `steps` are the payloads of the snapshots that it adds, in order; `after` is the final content of the worktree.
    """

    def __init__(
        self,
        world: World,
        operation: Callable[[RepositoryContext, World], object],
        steps: list[Content],
        after: Content,
    ) -> None:
        self.world = world
        self.operation = operation
        self.steps = steps
        self.after = after
        self.unknown: tuple[str, ...] = ()
        """Aspects of files that are undefined, and so not checked."""

    def prepare(self, directory: Path) -> None:
        shutil.copytree(self.world.root, directory, symlinks=True, dirs_exist_ok=True)

    def operate(self, directory: Path) -> None:
        with opened(directory) as context:
            self.operation(context, self.world)

    def check(self, directory: Path, outcome: Outcome) -> None:
        with opened(directory) as context:
            self._check(context, outcome)

    def _check(self, context: RepositoryContext, outcome: Outcome) -> None:
        payload = context.paths.payload(MAIN)
        added = self.added(context)
        unsaved = self.world.contents.unsaved
        assert content_of(payload) in (unsaved, self.after), "the worktree is neither old nor new"
        if outcome.ending is Ending.SUCCEEDED:
            assert len(added) == len(self.steps), "it succeeded, but snapshots are missing"
            assert content_of(payload) == self.after
        self.settled(context)
        assert self.added(context) == added
        done = content_of(payload) == self.after
        assert done or content_of(payload) == unsaved
        if self.after not in (unsaved, PART):
            assert done is (len(added) == len(self.steps)), "the worktree does not match the history"
        self.next(context)

    def added(self, context: RepositoryContext) -> list[str]:
        """The new snapshots, which must be intact and a prefix of the expected ones."""
        found = [each.descriptor for each in worktree_history(context, MAIN).entries][::-1]
        assert [each.snapshot_id for each in found[:2]] == [self.world.first, self.world.second]
        for each in found:
            tree = context.paths.tree(each.snapshot_id)
            problems = [problem for problem in verify(tree, each.payload_hash) if problem.what not in self.unknown]
            assert problems == [], f"{each.snapshot_id} does not verify: {problems}"
        trees = [files_kept(context.paths.tree(each.snapshot_id)) for each in found]
        assert trees == [*self.world.contents[:2], *self.steps][: len(trees)]
        assert {name for name, _ in context.store.scan(DESCRIPTORS)} == {each.snapshot_id for each in found}
        return [each.snapshot_id for each in found[2:]]

    def settled(self, context: RepositoryContext) -> None:
        settle(context, MAIN)
        assert context.store.read(OPERATIONS.key(MAIN)) is None

    def next(self, context: RepositoryContext) -> None:
        """The next operation succeeds, on top of the whole history."""
        before = worktree_history(context, MAIN).entries
        made = snapshot(context, MAIN, self.world.proof, SnapshotOptions(note="next"))
        entries = worktree_history(context, MAIN).entries
        assert entries[0].descriptor == made
        assert [each.descriptor for each in entries[1:]] == [each.descriptor for each in before]
        assert not differs_from_head(context, context.config(MAIN))


def cases(world: World) -> dict[str, Case]:
    def take(context: RepositoryContext, world: World) -> None:
        snapshot(context, MAIN, world.proof, SnapshotOptions(note="taken", tag="v1"))

    def restore(**how: object) -> Callable[[RepositoryContext, World], object]:
        wanted = RestoreOptions(**{"reason": "tested", **how})  # type: ignore[arg-type]
        return lambda context, world: restore_in_place(context, MAIN, world.first, world.proof, wanted)

    first, _, unsaved = world.contents
    return {
        "snapshot": Case(world, take, [unsaved], unsaved),
        "restore in place": Case(world, restore(), [unsaved, first], first),
        "restore in place, nothing kept": Case(world, restore(keep=False), [first], first),
        "restore a path": Case(world, restore(path="gone"), [unsaved], PART),
        "restore": NewWorktree(world),
    }


class NewWorktree(Case):
    """A restore into a new worktree, which is complete or does not exist; nothing else is touched."""

    def __init__(self, world: World) -> None:
        super().__init__(world, self.restore, [], world.contents.unsaved)

    @staticmethod
    def restore(context: RepositoryContext, world: World) -> None:
        Snapshots(context).restore(world.first, "new")

    def _check(self, context: RepositoryContext, outcome: Outcome) -> None:
        settle(context, "new")
        new = context.paths.payload("new")
        made = context.store.read(WORKTREES.key("new"))
        assert (made is not None) is new.exists()
        if made is not None:
            assert made.record.head_snapshot_id == self.world.first
            assert content_of(new) == self.world.contents.first
        assert made is not None or outcome.ending is not Ending.SUCCEEDED
        super()._check(context, outcome)
        if made is None:
            self.restore(context, self.world)
        assert content_of(new) == self.world.contents.first


# --- Sweeps -----------------------------------------------------------------------------------------

_UNSEEN = ("open", "close", "fsync", "sync_directory", "sync_filesystem", "flock", "flock_interruptible")
SEEN = tuple(name for name in calls.CHANGING if name not in _UNSEEN)
"""Calls with a lasting effect; a kill before any other call leaves the state of an earlier one."""
FAILING = tuple(name for name in calls.CHANGING if name not in ("open", "close", "flock", "flock_interruptible"))
"""Calls that fail on a full or broken disk."""


def killed_everywhere(case: Scenario, names: Sequence[str] = SEEN, *, share: float = 1.0) -> Report:
    """Kill the operation before each of its calls, and halfway through writes."""
    report = Report("killed")
    with swept_directory() as base:
        for index in indexes(case, base, names, share, report, each=1):
            for when in (Kill.BEFORE, Kill.HALFWAY):
                with fresh(base) as directory:
                    outcome = run_killed(case, directory, when, index, names=names)
                    report.add(outcome, judge(case, directory, outcome), "")
                if outcome.call is None or outcome.call.name != "write":
                    break
            if outcome.call is None:
                break
    return report


def failed_everywhere(case: Scenario, faults: list[Fault], *, share: float = 1.0) -> Report:
    """Fail each call of the operation, with these faults in turn."""
    report = Report("failed")
    with swept_directory() as base:
        for index in indexes(case, base, FAILING, share, report, each=1):
            fault = faults[index % len(faults)]
            with fresh(base) as directory:
                outcome = run_faulted(case, directory, fault, index, names=FAILING)
                problem = judge(case, directory, outcome)
                if outcome.left_open:
                    problem = problem or f"never closed: {outcome.left_open}"
                report.add(outcome, problem, "")
            if outcome.call is None:
                break
    return report
