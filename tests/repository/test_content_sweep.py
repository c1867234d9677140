"""The collector and the publishers of a content store: every order of their steps, kills, and a process that stands
still."""

from __future__ import annotations

import os
import shutil
import signal
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest

from holdfast.errors import Corrupt, LockConflict
from holdfast.repository import content, content_sweep
from holdfast.repository.content import CONTENT, UPLOADS, Contents, Upload
from holdfast.repository.content_sweep import sweep
from holdfast.repository.context import DESCRIPTORS, MAIN, WORKTREES, Descriptor, RepositoryContext
from holdfast.repository.repository import Repository
from holdfast.repository.retention import Policy
from holdfast.store.model import Decision, Delete, Replace
from holdfast.trees.chunks import hash_of
from proof.effort import chosen
from tests.repository.machines import Machine
from tests.repository.stages import expire

pytestmark = pytest.mark.skipif(sys.platform == "win32", reason="the servers are started on POSIX systems")


@pytest.fixture
def machine(scratch: Path, postgres_url: str) -> Machine:
    found = Machine(scratch / "first")
    found.create(postgres_url)
    return found


@pytest.fixture
def other(scratch: Path, machine: Machine, postgres_url: str) -> Machine:
    found = Machine(scratch / "other")
    found.join(postgres_url, "beta")
    return found


def names_of(machine: Machine, text: str) -> list[str]:
    return machine.contents.store.names([hash_of(text.encode())]).get(hash_of(text.encode()), [])


def require_complete(machine: Machine) -> None:
    """Fetch every visible snapshot anew: nothing of it may be missing."""
    repository = machine.repository
    shutil.rmtree(repository.context.paths.snapshots, ignore_errors=True)
    for each in repository.snapshots.everything().entries:
        problems = list(repository.snapshots.verify(each.descriptor.snapshot_id))
        assert problems == [], problems


# --- Collection ---------------------------------------------------------------------------------------


def test_a_collection_deletes_the_chunks_that_nothing_needs(machine: Machine, other: Machine) -> None:
    machine.take(MAIN, {"a": "first", "b": "stays"})
    machine.take(MAIN, {"a": "second"})
    repository = machine.repository
    repository.gc.set_policy(Policy(keep_last=1))
    repository.gc.run(repository.gc.plan().plan.plan_id)
    assert names_of(machine, "first") == []
    assert names_of(machine, "second") != []
    assert repository.context.store.read(CONTENT).record == content.ContentState(epoch=1)  # type: ignore[union-attr]
    require_complete(other)
    assert sweep(machine.contents) == 0


def test_chunks_of_an_unfinished_upload_stay_until_it_expires(
    machine: Machine, monkeypatch: pytest.MonkeyPatch
) -> None:
    taken = machine.take(MAIN, {"a": "first"})
    main = machine.repository.path(MAIN)
    (main / "a").write_text("second")
    upload = send_only(machine)
    assert sweep(machine.contents) == 0
    assert names_of(machine, "second") != []
    monkeypatch.setattr(content_sweep, "parse_instant", lambda text: 0.0)
    assert sweep(machine.contents) > 0
    assert names_of(machine, "second") == []
    assert not list(machine.repository.context.store.scan(UPLOADS))
    assert upload.content
    assert list(machine.repository.snapshots.verify(taken.snapshot_id)) == []


def send_only(machine: Machine) -> Upload:
    """Send a snapshot of `main` without publishing it, as a process that is killed before its commit."""
    found: list[Upload] = []

    class Stopped(BaseException):
        pass

    def stop(self: Upload, view: object) -> list[Any]:
        found.append(self)
        raise Stopped

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Upload, "changes", stop)
        patch.setattr(Upload, "forget", lambda self: None)
        with pytest.raises(Stopped):
            machine.take(MAIN)
    return found[0]


def test_nothing_is_deleted_if_the_needs_of_a_snapshot_cannot_be_read(machine: Machine) -> None:
    one = machine.take(MAIN, {"a": "first"})
    forget(machine.repository.context, machine.take(MAIN, {"a": "second"}))
    store = machine.contents.store
    store.delete(store.names([str(one.content)])[str(one.content)])
    with pytest.raises(Corrupt, match="lost or changed"):
        sweep(machine.contents)
    assert names_of(machine, "second") != []
    machine.repository.snapshots.push(names=[one.snapshot_id])  # the tree is still here
    assert sweep(machine.contents) > 0
    assert names_of(machine, "second") == []


def forget(context: RepositoryContext, descriptor: Descriptor) -> None:
    """Delete a descriptor, as a collection does before it sweeps; the head may lead nowhere."""
    key = DESCRIPTORS.key(descriptor.snapshot_id)
    context.store.transact([key], lambda view, now: Decision([Delete(key)], None))


# --- Schedules ----------------------------------------------------------------------------------------


class Task:
    """A function in a thread, which stops before each of its steps until it may take it."""

    def __init__(self, work: Callable[[Task], object]) -> None:
        self._go, self._stopped = threading.Semaphore(0), threading.Semaphore(0)
        self.done, self.steps, self.failure = False, 0, None
        self._thread = threading.Thread(target=self._run, args=(work,), daemon=True)
        self._thread.start()
        assert self._stopped.acquire(timeout=60)

    failure: BaseException | None

    def _run(self, work: Callable[[Task], object]) -> None:
        try:
            work(self)
        except BaseException as failure:
            self.failure = failure
        self.done = True
        self._stopped.release()

    def step(self) -> None:
        """Called by the work before each step."""
        self.steps += 1
        self._stopped.release()
        self._go.acquire()

    def advance(self, steps: int = 1 << 30) -> None:
        """Let it take some steps, or all that are left."""
        while steps > 0 and not self.done:
            self._go.release()
            assert self._stopped.acquire(timeout=60)
            steps -= 1


class Stepping:
    """Stops the task before each call of a content store or of a store of records."""

    def __init__(self, inner: Any, task: Task, *names: str) -> None:
        self._inner, self._task, self._names = inner, task, names

    def __getattr__(self, name: str) -> Any:
        found = getattr(self._inner, name)
        if name not in self._names:
            return found

        def call(*arguments: Any, **options: Any) -> Any:
            self._task.step()
            result = found(*arguments, **options)
            return list(result) if isinstance(result, Iterator) else result

        return call


def stepping(machine: Machine, task: Task) -> Repository:
    """The repository, in which the content store and its records stop the task before each call."""
    repository = machine.repository
    contents = repository.context.home.contents
    assert contents is not None
    contents.__dict__["store"] = Stepping(contents.store, task, "names", "put", "get", "delete", "every_name")
    records = Stepping(repository.context.store, task, "read", "scan", "transact")
    contents.context = repository.context._replace(store=records)
    return repository


def publisher(machine: Machine, taken: list[Descriptor]) -> Task:
    """Takes a snapshot of `main`; its content is on the server already, but nothing needs it."""

    def work(task: Task) -> None:
        repository = stepping(machine, task)
        sending = Upload.send

        def send_and_stop(self: Upload) -> None:
            sending(self)
            task.step()  # before the publishing transaction

        with pytest.MonkeyPatch.context() as patch, repository.lease(MAIN) as lease:
            patch.setattr(Upload, "send", send_and_stop)
            taken.append(repository.snapshot(MAIN, lease))

    return Task(work)


def sweeper(machine: Machine) -> Task:
    def work(task: Task) -> None:
        contents = stepping(machine, task).context.home.contents
        assert contents is not None
        sweep(contents)

    return Task(work)


class Stage:
    """A machine on whose server the content of the next snapshot is garbage."""

    def __init__(self, machine: Machine, other: Machine) -> None:
        self.machine, self.other = machine, other
        self._number = 0

    def prepare(self) -> None:
        self._number += 1
        text = f"content {self._number}"
        lost = self.machine.take(MAIN, {"shared": text})
        context = self.machine.repository.context
        forget(context, lost)
        shutil.rmtree(context.paths.tree(lost.snapshot_id))
        key = WORKTREES.key(MAIN)
        config = msgspec.structs.replace(context.config(MAIN), head_snapshot_id=None, base_snapshot_id=None)
        context.store.transact([key], lambda view, now: Decision([Replace(key, config)], None))

    def check(self, taken: list[Descriptor]) -> None:
        """Nothing of the published snapshot may be missing on another machine."""
        (made,) = taken
        problems = list(self.other.repository.snapshots.verify(made.snapshot_id))
        assert problems == [], problems


@pytest.fixture
def stage(machine: Machine, other: Machine) -> Stage:
    return Stage(machine, other)


def run(stage: Stage, before: int, within: int) -> tuple[int, int]:
    """The publisher takes some steps, then the sweeper, then the publisher the rest, then the sweeper the rest. Returns
    how many steps there were."""
    stage.prepare()
    taken: list[Descriptor] = []
    publishing = publisher(stage.machine, taken)
    publishing.advance(before)
    sweeping = sweeper(stage.machine)
    sweeping.advance(within)
    publishing.advance()
    sweeping.advance()
    assert publishing.failure is None, publishing.failure
    assert sweeping.failure is None or isinstance(sweeping.failure, LockConflict), sweeping.failure
    stage.check(taken)
    sweep(stage.machine.contents)
    stage.check(taken)
    return publishing.steps, sweeping.steps


def schedules(stage: Stage) -> Iterator[tuple[int, int]]:
    most, others = run(stage, 0, 0)
    yield from chosen([(one, other) for one in range(most + 2) for other in range(others + 4)], least=12)


def test_in_every_order_of_their_steps_no_chunk_of_a_visible_snapshot_is_deleted(stage: Stage) -> None:
    for before, within in schedules(stage):
        run(stage, before, within)


def test_a_publish_that_skips_the_epoch_is_found(stage: Stage, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Upload, "changes", lambda self, view: self._forgetting(view))
    found = []
    for before in range(30):
        try:
            run(stage, before, 1 << 30)
        except (Corrupt, AssertionError) as failure:
            found.append(failure)
            break
    assert found


def test_a_sweep_that_does_not_look_again_is_found(stage: Stage, monkeypatch: pytest.MonkeyPatch) -> None:
    """The planted sweep deletes what it has condemned without step 3."""

    def finish(contents: Contents, need: Any, state: content.ContentState) -> int:
        contents.store.delete(state.condemned)
        content_sweep._change(contents, state, content.ContentState(epoch=state.epoch))
        return len(state.condemned)

    monkeypatch.setattr(content_sweep, "_finish", finish)
    found = []
    for within in range(30):
        try:
            run(stage, 0, within)
        except (Corrupt, AssertionError) as failure:
            found.append(failure)
            break
    assert found


def test_a_sweeper_that_stood_still_deletes_nothing_that_was_stored_since(stage: Stage) -> None:
    """It continues after another sweeper has finished its work, and the same content was published again."""
    stage.prepare()
    steps = sweeper(stage.machine)
    steps.advance()
    for within in chosen(range(steps.steps + 1), least=6):
        stage.prepare()
        late = sweeper(stage.machine)
        late.advance(within)
        sweep(stage.machine.contents)
        taken: list[Descriptor] = []
        publisher(stage.machine, taken).advance()
        late.advance()
        assert late.failure is None or isinstance(late.failure, LockConflict), late.failure
        stage.check(taken)


# --- Kills --------------------------------------------------------------------------------------------


def killed(machine: Machine, work: Callable[[Repository], object], at: int, *, after: bool) -> bool:
    """Do the work in a child that is killed before or after the `at`-th call that changes records or chunks, or fetches
    chunks; False if it ended before that."""
    child = os.fork()
    if child == 0:
        try:
            repository = machine.repository
            contents, left = repository.context.home.contents, [at]
            assert contents is not None
            for name in ("put", "delete", "get"):
                setattr(contents.store, name, deadly(getattr(contents.store, name), left, after=after))
            records: Any = repository.context.store
            records.transact = deadly(records.transact, left, after=after)
            work(repository)
        finally:
            os._exit(0)
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == -signal.SIGKILL


def deadly(function: Callable[..., Any], left: list[int], *, after: bool) -> Callable[..., Any]:
    def call(*arguments: Any, **options: Any) -> Any:
        left[0] -= 1
        if left[0] == 0 and not after:
            os.kill(os.getpid(), signal.SIGKILL)
        result = function(*arguments, **options)
        if left[0] == 0:
            os.kill(os.getpid(), signal.SIGKILL)
        return result

    return call


def points() -> Iterator[tuple[int, bool]]:
    """Every call, and whether to kill before or after it."""
    return ((at, after) for at in range(1, 100) for after in (False, True))


def swept(repository: Repository) -> object:
    contents = repository.context.home.contents
    assert contents is not None
    return sweep(contents)


def taking(repository: Repository) -> object:
    with repository.lease(MAIN) as lease:
        return repository.snapshot(MAIN, lease)


def test_a_killed_sweep_is_finished_by_the_next(stage: Stage) -> None:
    for at, after in points():
        stage.prepare()
        was_killed = killed(stage.machine, swept, at, after=after)
        sweep(stage.machine.contents)
        state = stage.machine.repository.context.store.read(CONTENT)
        assert state is not None
        assert state.record.condemned == ()
        if not was_killed:
            break
    assert at > 3
    require_complete(stage.other)


def test_a_killed_fetch_leaves_nothing_visible_and_the_next_one_fetches(machine: Machine, other: Machine) -> None:
    taken = machine.take(MAIN, {"a": "one", "b": "two", "c/d": "three"})
    for at, after in points():
        home = other.repository.context.home
        shutil.rmtree(home.paths.snapshots, ignore_errors=True)
        was_killed = killed(other, lambda each: list(each.snapshots.entries(taken.snapshot_id)), at, after=after)
        assert list(other.repository.snapshots.verify(taken.snapshot_id)) == []
        if not was_killed:
            break
    assert at > 3
    other.repository.repair()
    assert [str(each) for each in other.repository.examine(strict=True)] == []


def test_a_killed_publish_loses_nothing_and_the_next_one_succeeds(machine: Machine, other: Machine) -> None:
    main = machine.repository.path(MAIN)
    for at, after in points():
        text = f"killed {at} {after}"
        (main / "a").write_text(text)
        was_killed = killed(machine, taking, at, after=after)
        if machine.repository.leases.state(MAIN) is not None:
            expire(machine.repository)
        machine.take(MAIN)
        assert names_of(machine, text) != []
        if not was_killed:
            break
    assert at > 5
    machine.repository.repair()
    assert [str(each) for each in machine.repository.examine(strict=True)] == []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(content_sweep, "parse_instant", lambda text: 0.0)  # all uploads have expired
        sweep(machine.contents)
    require_complete(other)
