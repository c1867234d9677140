"""The demo of landing: agents change one file of a git repository, some are killed, and everything lands once.

Every issue adds a line to one list, always at its end, so agents that work at the same time conflict. The next attempt
merges the branch and keeps both lines. At the end, the branch, the issues and the checkout are compared.
"""

from __future__ import annotations

import contextlib
import os
import random
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import NamedTuple

from holdfast.demo.agents import Agent
from holdfast.errors import GitFailed
from holdfast.fs import durable
from holdfast.fs.directory import make_directories
from holdfast.git.program import HOLDFAST, Git
from holdfast.issues.creating import NewIssue
from holdfast.issues.model import State
from holdfast.repository.git_init import adopt_checkout
from holdfast.repository.landing import Landings
from holdfast.repository.landing_records import LandingState
from holdfast.repository.repository import Repository
from holdfast.repository.settings import CHECKS, change

BRANCH, LIST, EDITED = "main", "parts.txt", "notes.txt"
CHECK = f'test "$(sort -u {LIST})" = "$(sort {LIST})"'  # no part is listed twice
KILLS = 5
POLL = 0.1
LONGEST = 300.0
ACTOR = "auto:demo"

Tell = Callable[[str], object]
Command = Callable[[Path, str], list[str]]
"""The command line of the agent with this name in a repository."""


class LandingReport(NamedTuple):
    """The result: passed if there are no findings. `graph` is the history of the branch, for people."""

    seconds: float
    issues: int
    attempts: int
    kills: int
    conflicts: int
    findings: tuple[str, ...]
    graph: tuple[str, ...]


def _git(top: Path) -> Git:
    return Git(top / ".git")


def set_up(top: Path, issues: int) -> None:
    """Create a git repository with a commit, adopt it, and add the issues."""
    make_directories(top / ".git")
    git = _git(top)
    git.run("init", "--quiet", f"--initial-branch={BRANCH}", os.fspath(top))
    for name, content in ((LIST, b""), (EDITED, b"notes of a person\n")):
        durable.replace(top / name, content)
    git.run("add", "--all", worktree=top)
    git.run("commit", "--quiet", "-m", "The beginning", worktree=top, author=HOLDFAST)
    adopt_checkout(top)
    with Repository(top) as repository:
        change(repository.root, CHECKS, [CHECK])
        tracker = Landings(repository, actor=ACTOR).changes.tracker
        tracker.initialise()
        tracker.create_all([NewIssue(title=f"Part {number}") for number in range(1, issues + 1)])
    durable.replace(top / EDITED, b"notes of a person, who has not committed this\n")


def work(directory: Path, *, issue: str, seed: int) -> None:
    """The task of an agent: merge the branch if an earlier attempt conflicted, and add the line of the issue."""
    time.sleep(random.Random(f"{seed}/{issue}").uniform(0.0, 0.3))
    git = Git(_common(directory))
    with contextlib.suppress(GitFailed):
        git.run("merge", "--quiet", "-m", f"Merge {BRANCH}", BRANCH, worktree=directory, author=HOLDFAST)
    sides = [durable.read(directory / LIST).decode()]
    if git.run("ls-files", "--unmerged", worktree=directory):
        sides = [git.run("show", f":{stage}:{LIST}", worktree=directory).decode() for stage in (3, 2)]
    lines = dict.fromkeys([*(line for side in sides for line in side.splitlines()), issue])
    durable.replace(directory / LIST, "".join(f"{line}\n" for line in lines).encode())
    git.run("add", LIST, worktree=directory)


def _common(directory: Path) -> Path:
    from holdfast.git.checkout import find_checkout

    found = find_checkout(os.fspath(directory))
    assert found is not None
    return Path(found.common)


def play(directory: Path, command: Command, *, issues: int, workers: int, seed: int, tell: Tell) -> LandingReport:
    """Run the demo in an empty directory, and check the result."""
    top, logs = directory / "project", directory / "logs"
    make_directories(top)
    make_directories(logs)
    set_up(top, issues)
    crew = _Crew(top, logs, command, workers, random.Random(seed), tell)
    try:
        finished = crew.run()
    finally:
        crew.end()
    with Repository(top) as repository:
        Landings(repository, actor=ACTOR).work_off()
        findings = (*(() if finished else ("it took too long",)), *_findings(repository, top, issues))
        entries = Landings(repository, actor=ACTOR).all()
    graph = _git(top).run("log", "--graph", "--format=%s", BRANCH).decode().splitlines()
    conflicts = sum(each.state is LandingState.CONFLICT for each in entries)
    return LandingReport(
        crew.elapsed(), issues, crew.started, crew.kills, conflicts, findings, tuple(line.rstrip() for line in graph)
    )


class _Crew:
    """Runs the agents, and kills some of them."""

    def __init__(
        self, top: Path, logs: Path, command: Command, workers: int, chance: random.Random, tell: Tell
    ) -> None:
        self.started = self.kills = 0
        self._top, self._logs, self._command, self._workers = top, logs, command, workers
        self._chance, self._tell = chance, tell
        self._agents: dict[int, Agent] = {}
        self._began = time.monotonic()
        self._next_kill = 1.0

    def elapsed(self) -> float:
        return time.monotonic() - self._began

    def run(self) -> bool:
        """Run until all issues are done; False if that takes too long."""
        with Repository(self._top) as repository:
            landings = Landings(repository, actor=ACTOR)
            tracker = landings.changes.tracker
            while self.elapsed() < LONGEST:
                self._agents = {number: each for number, each in self._agents.items() if not each.has_ended()}
                seen = tracker.snapshot()
                if all(issue.state is State.DONE for issue in seen) and not self._agents:
                    return True
                idle = [number for number in range(self._workers) if number not in self._agents]
                for number in idle[: len(seen.ready())]:
                    self.started += 1
                    name = f"agent:{number}-{self.started}"
                    log = self._logs / f"{name.replace(':', '-')}.log"
                    self._agents[number] = Agent(number, name, self._command(self._top, name), log)
                if not self._agents:
                    landings.work_off()  # the agents whose work is still queued were killed
                self._kill_one()
                time.sleep(POLL)
        return False

    def _kill_one(self) -> None:
        if self.kills < KILLS and self._agents and self.elapsed() >= self._next_kill:
            self.kills += 1
            number = self._chance.choice(sorted(self._agents))
            self._agents.pop(number).kill()
            self._next_kill = self.elapsed() + self._chance.uniform(0.5, 1.5)
            self._tell(f"{self.elapsed():5.1f} s  agent {number} is killed: the next one continues")

    def end(self) -> None:
        for agent in self._agents.values():
            agent.end()


def _findings(repository: Repository, top: Path, issues: int) -> Iterator[str]:
    landings, git = Landings(repository, actor=ACTOR), _git(top)
    if landings.queued() or any(each.intent for each in landings.targets()):
        yield "something is still queued"
    status = git.run("status", "--porcelain", worktree=top).decode().strip()
    if status != f"M {EDITED}":
        yield f"the person's checkout has changes that are not theirs: {status}"
    yield from _findings_on_branch(landings, git, issues)


def _findings_on_branch(landings: Landings, git: Git, issues: int) -> Iterator[str]:
    all_issues = list(landings.changes.tracker.snapshot())
    for issue in all_issues:
        if issue.state is not State.DONE:
            yield f"{issue.title} is {issue.state.value}"
    listed = git.run("show", f"{BRANCH}:{LIST}").decode().split()
    for issue in all_issues:
        if listed.count(issue.id) != 1:
            yield f"the work of {issue.title} is on {BRANCH} {listed.count(issue.id)} times"
    form = "--format=%(trailers:key=Holdfast-Issue,valueonly,separator=%x2C)"
    landed = git.run("log", "--first-parent", form, BRANCH).decode().split()
    if sorted(landed) != sorted(issue.id for issue in all_issues) or len(landed) != issues:
        yield f"{len(landed)} landings for {issues} issues"
    for commit in git.run("rev-list", "--first-parent", BRANCH).decode().split():
        lines = git.run("show", f"{commit}:{LIST}").decode().split()
        if len(lines) != len(set(lines)):
            yield f"the commit {commit[:12]} does not pass the check"
