"""Many landers at once, killed at random; and a person who uses git in the main checkout meanwhile."""

from __future__ import annotations

import contextlib
import os
import random
import signal
import subprocess
import sys
import time
from functools import partial
from pathlib import Path

import pytest

from holdfast.repository import landing
from holdfast.repository.context import Proof
from holdfast.repository.landing import LandOptions
from holdfast.repository.landing_records import Landing, LandingState
from holdfast.repository.repository import Repository
from holdfast.repository.settings import CHECKS, change
from proof import effort
from tests.repository.landings import ACTOR, Project, ended, forked
from tests.support.homes import git

pytestmark = pytest.mark.skipif(sys.platform == "win32", reason="forks and kills")

LANDERS = 8
CHECK = "test ! -e bad"


class Branches:
    """Twenty entries: two fail the check, three conflict with the tip, one depends on a later one."""

    def __init__(self, project: Project) -> None:
        self.project = project
        change(project.root, CHECKS, [CHECK])
        old = project.tip()
        tip = project.commit({"src/f0": "somebody else was here\n"})
        git("update-ref", "refs/heads/trunk", tip, at=project.top)
        git("reset", "-q", "--hard", at=project.top)
        self.good, self.bad, self.conflicting = [], [], []
        self.worktrees: dict[str, Path] = {}  # of the entries that must not land
        for number in range(15):
            commit = project.commit({f"good/{number}": f"{number}\n"}, on=old if number % 2 else tip)
            self.good.append(project.queue(commit, issue_id=project.issue(f"good {number}")))
            if number % 7 == 3:
                self.bad.append(self.worktree(f"bad-{number}", "bad", tip))
            if number % 5 == 1:
                self.conflicting.append(self.worktree(f"conflicting-{number}", "src/f0", old))
        self.depends = self.good[2], self.good[9]
        ids = [str(each.issue_id) for each in self.depends]
        project.landings().changes.tracker.dependencies.add(*ids)
        self.before = self.states()

    def worktree(self, name: str, path: str, start: str) -> Landing:
        """The uncommitted work of a worktree, queued as `land` does."""
        with Repository(self.project.top) as repository:
            repository.worktrees.create(name, snapshot=start)
            self.worktrees[name] = repository.path(name)
            (self.worktrees[name] / path).write_text(f"of {name}\n")
            with repository.lease(name) as lease:
                options = LandOptions(issue_id=self.project.issue(name))
                return landing.Landings(repository, actor=ACTOR).enqueue(name, Proof.of(lease), options)

    def states(self) -> dict[str, tuple[str, str]]:
        """What each worktree has checked out and in its files."""
        return {
            name: (git("log", "-1", "--format=%H %D", at=path), git("status", "--porcelain", "--ignored", at=path))
            for name, path in self.worktrees.items()
        }

    def verdict(self) -> None:
        project = self.project
        for entries, state in (
            (self.good, LandingState.LANDED),
            (self.bad, LandingState.FAILED),
            (self.conflicting, LandingState.CONFLICT),
        ):
            assert {project.entry(each).state for each in entries} == {state}
        assert self.states() == self.before
        project.verdict()
        landed = project.landed()
        assert len(landed) == len(self.good) == 15
        assert landed.index(self.depends[1].landing_id) < landed.index(self.depends[0].landing_id)
        for commit in git("rev-list", "--first-parent", "trunk", at=project.top).split():
            assert "bad" not in git("ls-tree", "--name-only", commit, at=project.top).split()
        assert {each.name for each in (project.top / "good").iterdir()} == {str(number) for number in range(15)}


def wait_for(project: Project, entry: Landing) -> None:
    project.landings().wait(entry.landing_id)


@pytest.mark.long
def test_landers_that_are_killed_at_random_land_everything_once(scratch: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(landing, "OWN_TTL", 1.0)
    for number in range(effort.rounds(200, least=1)):
        effort.tried["rounds of races"] += 1
        chance = random.Random(f"{effort.SEED} storm {number}")
        project = Project(scratch / str(number))
        branches = Branches(project)
        entries = [*branches.good, *branches.bad, *branches.conflicting]
        for _ in range(3):
            waited_for = [chance.choice(entries) for _ in range(LANDERS)]
            children = [forked(partial(wait_for, project, each)) for each in waited_for]
            for child in chance.sample(children, LANDERS - 2):
                time.sleep(chance.random() * 0.3)  # the moment of the kill is what is random
                with contextlib.suppress(ProcessLookupError):
                    os.kill(child, signal.SIGKILL)
            statuses = [ended(child) for child in children]
            assert set(statuses) <= {0, -9}
        project.landings().work_off()
        branches.verdict()


LOCKED = (".lock", "cannot lock ref", "Unable to write index")
"""What git says if another git, or a landing, has a lock."""


class Person:
    """Edits, commits, stashes, rebases and switches branches in the main checkout, and knows what must be there."""

    def __init__(self, project: Project, seed: str) -> None:
        self.project, self.top, self.chance = project, project.top, random.Random(seed)
        self.number = 0
        self.said = ""  # by the git commands that failed
        self.kept: dict[str, str] = {}  # the contents of files that nobody else touches

    def git(self, *words: str) -> bool:
        """Run git as a person does: again if another git, or a landing, has the lock. `git stash` says nothing then."""
        for _ in range(200):
            done = subprocess.run(
                ["git", *words], cwd=self.top, capture_output=True, text=True, stdin=subprocess.DEVNULL, check=False
            )
            if done.returncode == 0:
                return True
            self.said += f"{words}: {done.stderr}"
            if done.stderr and not any(each in done.stderr for each in LOCKED):
                return False
            self.wait()
        raise AssertionError(f"git {words} did not get its lock: {done.stderr}")

    def wait(self) -> None:
        time.sleep(0.01)

    def act(self) -> None:
        self.number += 1
        name = f"person/{self.number}"
        self.project.write(name, f"{self.number}\n")
        self.kept[name] = f"{self.number}\n"
        getattr(self, self.chance.choice(["edit", "commit", "amend", "stash", "switch", "rebase", "overlap"]))(name)
        self.check()

    def edit(self, name: str) -> None:
        """The file stays uncommitted."""

    def commit(self, name: str) -> None:
        assert self.git("add", "person")
        assert self.git("commit", "-qm", f"by the person: {name}")

    def amend(self, name: str) -> None:
        self.commit(name)
        self.project.write(name, f"{self.number} again\n")
        self.kept[name] = f"{self.number} again\n"
        assert self.git("add", name)
        if git("log", "-1", "--format=%s", at=self.top) == f"by the person: {name}":
            self.git("commit", "-q", "--amend", "--no-edit")

    def stash(self, name: str) -> None:
        self.git("add", name)
        self.git("stash", "push", "-q", "--", name)
        while git(
            "stash", "list", at=self.top
        ):  # git stashes first and changes files then: a lock in between leaves both
            assert self.git("stash", "pop", "-q") or self.git("stash", "drop", "-q"), self.said

    def merge(self, branch: str) -> None:
        """Merge a branch. If the switch before it met a landing, git refuses until the checkout has followed."""
        ends_at = time.monotonic() + 60
        while not self.git("merge", "-q", "-m", f"merge {branch}", branch):
            assert "would be overwritten by merge" in self.said.rpartition("('merge'")[2], self.said
            assert time.monotonic() < ends_at, self.said
            self.wait()

    def switch(self, name: str) -> None:
        branch = f"side-{self.number}"
        assert self.git("switch", "-q", "-c", branch)
        self.commit(name)
        assert self.git("switch", "-q", "trunk")
        self.merge(branch)

    def rebase(self, name: str) -> None:
        branch = f"topic-{self.number}"
        assert self.git("switch", "-q", "-c", branch, "HEAD~1") or self.git("switch", "-q", "-c", branch)
        self.commit(name)
        assert self.git("rebase", "-q", "trunk")
        assert self.git("switch", "-q", "trunk")
        self.merge(branch)

    def overlap(self, name: str) -> None:
        """An edit of a file that work is about to change, for a moment."""
        path = self.top / "src/f1"
        before = path.read_text()
        path.write_text(before + "mine\n")
        assert path.read_text().endswith("mine\n")
        self.git("checkout", "--", "src/f1")

    def check(self) -> None:
        for name, content in self.kept.items():
            assert (self.top / name).read_text() == content, name


def test_a_person_gets_back_a_stash_whose_pop_met_a_landing(scratch: Path) -> None:
    project = Project(scratch)
    lock = project.top / ".git/index.lock"

    class Meeting(Person):
        def git(self, *words: str) -> bool:
            if words[:2] == ("stash", "pop"):
                lock.touch()
            return super().git(*words)

        def wait(self) -> None:
            lock.unlink()

    person = Meeting(project, "")
    project.write("person/1", "1\n")
    person.stash("person/1")
    assert project.status() == "A  person/1"


def test_a_person_who_works_in_the_main_checkout_loses_nothing(scratch: Path) -> None:
    project = Project(scratch)
    for setting in ("user.name=person", "user.email=person@example"):
        git("config", *setting.split("="), at=project.top)
    person = Person(project, f"{effort.SEED} person")

    def land() -> None:
        landings = project.landings()
        while not stop.exists():
            landings.work_off()
            time.sleep(0.02)

    stop = scratch / "stop"
    lander = forked(land)
    entries = []
    try:
        for number in range(effort.rounds(200, least=4)):
            entries.append(project.queue(project.commit({f"landed/{number}": "1\n", "src/f2": f"{number}\n"})))
            person.act()
            if number % 3 == 0:
                entries.append(project.queue(project.commit({"src/f1": f"{number}\n"})))
    finally:
        stop.touch()
        assert ended(lander) == 0
    person.git("add", "person")
    person.git("commit", "-q", "--allow-empty", "-m", "the rest")
    project.landings().work_off()
    person.check()
    landed = [each for each in entries if project.entry(each).state is LandingState.LANDED]
    assert {project.entry(each).state for each in entries} <= {LandingState.LANDED, LandingState.CONFLICT}
    assert landed
    project.verdict()
    assert not git("stash", "list", at=project.top)
    assert git("diff", "--stat", "HEAD", at=project.top) == ""
