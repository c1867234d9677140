"""A landing queue for tests: entries without worktrees, processes that die or stop at a step, and a verdict.

A *step* is the moment before or after a start of git, or before or after a call that changes a name: a link, a rename
or an unlink. What happens between two of them leaves nothing behind that others could see.
"""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
from collections.abc import Callable, Iterator
from functools import cache, partial
from pathlib import Path
from typing import Any

import pytest

from holdfast.fs import calls
from holdfast.git import landing as frozen
from holdfast.git import program
from holdfast.issues.creating import NewIssue
from holdfast.issues.model import State
from holdfast.issues.tracker import Tracker
from holdfast.repository import git_init
from holdfast.repository.git_init import adopt_checkout
from holdfast.repository.landing import Landings
from holdfast.repository.landing_changes import NewLanding
from holdfast.repository.landing_records import (
    Landing,
    LandingState,
    LandingStyle,
    lease_of,
    new_landing_id,
    target_name,
)
from holdfast.repository.repository import Repository
from holdfast.store.files import FileStore
from tests.support.homes import SAFE, copied, git

NAMES = ("link", "rename", "replace", "unlink")
ACTOR = "agent:tester"


@cache
def _with_files(count: int) -> Callable[[Path], None]:
    """What `copied` builds: the same object for the same number of files."""
    return partial(_make_project, count)


def _make_project(files: int, top: Path) -> None:
    git("init", "-q", "-b", "trunk", top)
    for setting in ("user.name=person", "user.email=person@example", "gc.auto=0", "core.fsync=none"):
        git("config", *setting.split("="), at=top)
    (top / "src").mkdir()
    for number in range(files):
        (top / f"src/f{number}").write_text(f"{number}\n" * 9)
    git("add", "-A", at=top)
    git("commit", "-qm", "first", at=top)


class Project:
    """A repository with a main checkout on `trunk`, adopted, with an issue tracker."""

    def __init__(self, directory: Path, *, files: int = 4) -> None:
        self.top = directory / "project"
        copied(_with_files(files), self.top)
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(git_init, "require_safe", lambda directory, records_elsewhere: SAFE)
            adopt_checkout(self.top)
        repository = Repository(self.top)
        self.root = repository.root
        Tracker(repository.context.store, actor=ACTOR, root=repository.root).initialise()
        repository.close()
        self._number = 0

    def write(self, path: str, content: str) -> None:
        where = self.top / path
        where.parent.mkdir(parents=True, exist_ok=True)
        where.write_text(content)

    def landings(self) -> Landings:
        """The queues, opened anew as another process would."""
        return Landings(Repository(self.top), actor=ACTOR)

    def tip(self, branch: str = "trunk") -> str:
        return git("rev-parse", f"refs/heads/{branch}", at=self.top)

    def commit(self, changes: dict[str, str | None], *, on: str | None = None) -> str:
        """A commit with other contents of files (None: without the file), made without a checkout."""
        self._number += 1
        index = self.root / f"test-index-{os.getpid()}-{self._number}"
        parent = on or self.tip()
        lines = b""
        for path, content in changes.items():
            if content is None:
                lines += f"0 {'0' * 40}\t{path}\n".encode()
            else:
                oid = _run(self.top, "hash-object", "-w", "--stdin", content=content.encode())
                lines += f"100644 {oid}\t{path}\n".encode()
        _run(self.top, "read-tree", parent, index=index)
        _run(self.top, "update-index", "--index-info", content=lines, index=index)
        tree = _run(self.top, "write-tree", index=index)
        index.unlink()
        return _run(self.top, "commit-tree", "-p", parent, "-m", f"work {self._number}", tree)

    def issue(self, title: str, *depends_on: str) -> str:
        tracker = self.landings().changes.tracker
        return tracker.create(NewIssue(title=title, depends_on=depends_on)).id

    def queue(
        self,
        commit: str,
        *,
        issue_id: str | None = None,
        branch: str = "trunk",
        priority: int = 0,
        style: LandingStyle = LandingStyle.MERGE,
    ) -> Landing:
        """Queue a commit; its issue is claimed for it."""
        landings = self.landings()
        landing = Landing(
            landing_id=new_landing_id(),
            target=target_name(branch),
            branch=branch,
            commit=commit,
            sequence=0,
            queued_at="",
            issue_id=issue_id,
            title=f"work {commit[:8]}",
            priority=priority,
            style=style,
            actor=ACTOR,
        )
        frozen.keep(landings.git, landing.landing_id, commit)
        return landings.changes.enqueue(NewLanding(landing, None, None))

    def entry(self, entry: Landing) -> Landing:
        return self.landings().changes.landing(entry.landing_id)

    def landed(self, branch: str = "trunk") -> list[str]:
        """The ids of the landings on a branch, by the trailers of its first parents, the oldest first."""
        form = "--format=%(trailers:key=Holdfast-Landing,valueonly,separator=%x2C)"
        return git("log", "--first-parent", "--reverse", form, branch, at=self.top).split()

    def status(self) -> str:
        return git("status", "--porcelain", at=self.top)

    def end_lease(self, branch: str = "trunk") -> None:
        """End the landing lease as if its time were up: its holder is dead, or stopped."""
        service = Repository(self.top).named_leases
        state = service.state(lease_of(target_name(branch)))
        if state is not None:
            service.release(state.lease.subject, state.lease.lock_id)

    def verdict(self, *, edits: str = "") -> None:
        """Nothing is half done: no intent, no lock, no reference too many; the checkout has exactly these edits."""
        landings = self.landings()
        for target in landings.targets():
            assert target.intent is None
            assert list(target.queue) == [each.landing_id for each in landings.changes.queued(target)]
        assert not (self.top / ".git/index.lock").exists()
        assert self.status() == edits
        entries = {each.landing_id: each for each in landings.all()}
        for branch in {each.branch for each in entries.values()}:
            wanted = [each for each in entries.values() if each.branch == branch and each.state is LandingState.LANDED]
            assert sorted(self.landed(branch)) == sorted(each.landing_id for each in wanted)
        for each in entries.values():
            if each.issue_id is not None:
                done = landings.changes.tracker.issue(each.issue_id).state is State.DONE
                assert done is (each.state is LandingState.LANDED), f"{each.state} but done is {done}"
        left = set(git("for-each-ref", "--format=%(refname:lstrip=3)", "refs/holdfast/landing", at=self.top).split())
        assert left <= {each.landing_id for each in entries.values()}
        assert not list((self.root / ".jvs/index").glob("landing-*"))


def _run(top: Path, *words: str, content: bytes = b"", index: Path | None = None) -> str:
    variables = {"GIT_INDEX_FILE": str(index)} if index else {}
    done = subprocess.run(["git", *words], cwd=top, env=os.environ | variables, input=content, capture_output=True)
    assert done.returncode == 0, done.stderr
    return done.stdout.decode().strip()


class Steps:
    """Counts the steps of this process from now on, and calls `act` at one of them."""

    def __init__(self, number: int, act: Callable[[], object], *, in_transactions: bool = True) -> None:
        self.number, self.act, self.count, self.starts = number, act, 0, 0
        self._counts_all, self._depth = in_transactions, 0

    def step(self) -> None:
        if self._depth and not self._counts_all:
            return  # a process that is stopped here has the locks of documents: everybody waits for it
        self.count += 1
        if self.count == self.number:
            self.act()

    def transacting(self, real: Callable[..., Any]) -> Callable[..., Any]:
        def called(*arguments: Any, **options: Any) -> Any:
            self.step()
            self._depth += 1
            try:
                return real(*arguments, **options)
            finally:
                self._depth -= 1
                self.step()

        return called

    def around(self, real: Callable[..., Any]) -> Callable[..., Any]:
        def called(*arguments: Any, **options: Any) -> Any:
            self.step()
            try:
                return real(*arguments, **options)
            finally:
                self.step()

        return called

    def starting(self, real: Callable[..., Any]) -> Callable[..., Any]:
        def started(*arguments: Any) -> Any:
            self.starts += 1
            return real(*arguments)

        return started

    def install(self) -> None:
        """Never undone: for a child that ends with it."""
        program._completed = self.around(self.starting(program._completed))
        for name in NAMES:
            setattr(calls, name, self.around(getattr(calls, name)))
        FileStore.transact = self.transacting(FileStore.transact)  # type: ignore[method-assign]


def steps_of(work: Callable[[], object], directory: Path, *, in_transactions: bool = True) -> int:
    """How many steps the work has, in a child that does it undisturbed."""
    noted = directory / "steps"

    def counted() -> None:
        steps = Steps(0, die, in_transactions=in_transactions)
        steps.install()
        work()
        assert steps.starts, "no step is at a start of git"
        noted.write_text(str(steps.count))

    assert ended(forked(counted)) == 0
    return int(noted.read_text())


def die() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def forked(work: Callable[[], object]) -> int:
    """Start a child that does the work; its process id. It ends with 0, or with 1 after an exception."""
    child = os.fork()
    if child:
        return child
    status = 1
    try:
        work()
        status = 0
    except BaseException:
        import traceback

        traceback.print_exc()
    finally:
        os._exit(status)


def ended(child: int) -> int:
    """Wait for a child; its exit status, negative for a signal."""
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])


@contextlib.contextmanager
def stopped_at(number: int, work: Callable[[], object]) -> Iterator[int | None]:
    """Do the work in a child that stops at a step; its id, or None if it has fewer steps. It continues, and has to end
    well, when the block ends."""

    def stop() -> None:
        os.kill(os.getpid(), signal.SIGSTOP)

    def start() -> None:
        Steps(number, stop, in_transactions=False).install()
        work()

    child = forked(start)
    _, status = os.waitpid(child, os.WUNTRACED)
    if not os.WIFSTOPPED(status):
        assert os.waitstatus_to_exitcode(status) == 0
        yield None
        return
    try:
        yield child
    finally:
        os.kill(child, signal.SIGCONT)
        assert ended(child) == 0
