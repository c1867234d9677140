"""Commands in a git home, compared with plain git.

Both sides are measured as commands, from start to end. Each has its own copy of one repository and gets the same
changes; they take turns at being first. The figures contain what a command syncs by itself: Holdfast syncs all that a
snapshot needs, and git leaves loose objects and files to the system.
"""

from __future__ import annotations

import os
import shutil
import subprocess
from collections.abc import Callable
from functools import partial
from pathlib import Path
from statistics import median
from time import perf_counter, sleep
from typing import NamedTuple

from bench.measure import interleave, ratio, rotated
from bench.report import Column, Report, Table, at_most
from bench.report import number as written
from bench.snapshots import SETTLED, change_one_percent, remove_all, scratch, small_files
from bench.snapshots import Size as Source
from bench.startup import holdfast_command
from bench.timing import Cost, say
from holdfast.trees.walker import sync_tree

OURS, THEIRS = "holdfast", "git"
_VARIABLES = {"GIT_CONFIG_GLOBAL": os.devnull, "GIT_CONFIG_NOSYSTEM": "1"} | {
    f"GIT_{role}_{fact}": "bench@localhost" for role in ("AUTHOR", "COMMITTER") for fact in ("NAME", "EMAIL")
}


class Size(NamedTuple):
    """How much to measure."""

    rounds: int = 7
    files: int = 100_000
    directories: int = 5_000
    worktrees: int = 3


FULL = Size()
QUICK = Size(rounds=1, files=2_000, directories=100, worktrees=1)

LIMITS = {
    "init": 1.5,
    "status": 1.2,
    "status, 1 % changed": 1.2,
    "snapshot, unchanged": 1.2,
    "snapshot, 1 % changed": 1.2,
    "restore of 1 % in place": 1.5,
    "worktree create": 1.2,
}
"""The most that the time of a command may be, as a multiple of git's."""


class Side:
    """A copy of the repository, and the program that is measured in it."""

    def __init__(self, top: Path, program: list[str]) -> None:
        self.top, self.program = top, program

    def call(self, *arguments: str, **variables: str) -> str:
        return _run([*self.program, *arguments], self.top, variables)

    def git(self, *arguments: str, **variables: str) -> str:
        return _run(["git", *arguments], self.top, variables)

    def change(self, number: int) -> None:
        for each in self.top.glob("g*"):
            change_one_percent(each, number)

    def commit(self) -> None:
        self.git("add", "-A")
        self.git("commit", "-q", "--allow-empty", "-m", "a commit")

    def store(self) -> None:
        """What plain git needs for a snapshot, through an index of its own."""
        own = {"GIT_INDEX_FILE": os.fspath(self.top / ".git/private-index")}
        self.git("add", "-A", **own)
        tree = self.git("write-tree", **own).strip()
        self.git("commit-tree", "-p", "HEAD", "-m", "a snapshot", tree)


def _run(argv: list[str], directory: Path, variables: dict[str, str]) -> str:
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONDONTWRITEBYTECODE"}
    done = subprocess.run(
        argv,
        cwd=directory,
        env=environment | _VARIABLES | variables,
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        check=False,
    )
    if done.returncode:
        raise ChildProcessError(f"`{' '.join(argv)}` ended with status {done.returncode}: {done.stderr[-500:]}")
    return done.stdout


Action = Callable[[], object]


class Match:
    """Both sides, and the costs of each command by its name."""

    def __init__(self, ours: Side, theirs: Side, report: Report) -> None:
        self.ours, self.theirs, self.report = ours, theirs, report
        self.costs: dict[str, list[tuple[Cost, Cost]]] = {}

    def both(self, action: Callable[[Side], object]) -> None:
        """Let both sides do the same, unmeasured."""
        for side in (self.ours, self.theirs):
            action(side)

    def measure(self, name: str, ours: Action, theirs: Action) -> None:
        """Perform and time one command of each side."""
        done = self.costs.setdefault(name, [])
        sleep(SETTLED)
        sync_tree(self.ours.top)
        actions = {OURS: ours, THEIRS: theirs}
        order = rotated([*actions], len(done))
        found = interleave({side: partial(cost_of, actions[side]) for side in order}, 1)
        self.report.note_failures(name, found.failures)
        if not found.failures:
            done.append((found.series[OURS][0], found.series[THEIRS][0]))


def cost_of(action: Action) -> Cost:
    started, used = perf_counter(), sum(os.times()[:4])
    action()
    return Cost(perf_counter() - started, sum(os.times()[:4]) - used)


def make(top: Path, size: Size) -> None:
    """Create the repository: one commit, packed, and a directory that git ignores."""
    small_files(top, Source(files=size.files, directories=size.directories))
    (top / ".gitignore").write_text("/ignored\n")
    (top / "ignored").mkdir()
    (top / "ignored" / "file").touch()
    side = Side(top, [])
    side.git("init", "-q", "-b", "trunk", ".")
    side.commit()
    side.git("repack", "-a", "-d", "-q")


def run_all(program: list[str], size: Size, top: Path, report: Report) -> Match:
    """Measure every command."""
    say("git: making repositories")
    make(top / THEIRS, size)
    shutil.copytree(top / THEIRS, top / OURS, symlinks=True)
    match = Match(Side(top / OURS, program), Side(top / THEIRS, ["git"]), report)
    match.both(lambda side: side.git("status"))
    for number in range(size.rounds):
        say(f"git: init, round {number + 1} of {size.rounds}")
        if number:
            match.ours.call("deinit", "--force")
        match.measure("init", lambda: match.ours.call("init"), lambda: match.theirs.git("status"))
    match.ours.call("snapshot")
    match.theirs.store()
    for number in range(size.rounds):
        say(f"git: snapshots, round {number + 1} of {size.rounds}")
        _round(match, number)
    match.both(Side.commit)
    for number in range(size.worktrees):
        say(f"git: worktree create, round {number + 1} of {size.worktrees}")
        _create(match, f"w{number}")
    return match


def _round(match: Match, number: int) -> None:
    """Change, look, take a snapshot, look again, and go back."""
    ours, theirs = match.ours, match.theirs
    match.both(lambda side: side.change(number))
    match.measure("status, 1 % changed", lambda: ours.call("status"), lambda: theirs.git("status"))
    match.measure("snapshot, 1 % changed", lambda: ours.call("snapshot"), theirs.store)
    match.both(Side.commit)
    match.measure("status", lambda: ours.call("status"), lambda: theirs.git("status"))
    match.measure("snapshot, unchanged", lambda: ours.call("snapshot"), lambda: theirs.git("status"))
    match.measure(
        "restore of 1 % in place",
        lambda: ours.call("restore", "head~1", "--inplace", "--reason", "to measure it"),
        lambda: theirs.git("checkout", "-q", "HEAD~1"),
    )


def _create(match: Match, name: str) -> None:
    match.measure(
        "worktree create",
        lambda: match.ours.call("worktree", "create", name),
        lambda: match.theirs.git("worktree", "add", "-q", "-b", name, f"../linked-{name}"),
    )


def judge(match: Match, size: Size) -> None:
    """Add the table, and the targets, which are about wall time."""
    columns = [*(Column(f"{side} s", written(".3f")) for side in (OURS, THEIRS)), Column("ours /"), Column("in CPU /")]
    table = Table(f"{size.files} files, one process after another; medians", [*columns, Column("limit", written("g"))])
    for name, limit in LIMITS.items():
        found = None
        if pairs := match.costs.get(name):
            wall, cpu = ([[getattr(each[side], kind) for each in pairs] for side in (0, 1)] for kind in Cost._fields)
            found = ratio(*wall)
            table.rows[name] = [median(wall[0]), median(wall[1]), found, ratio(*cpu), limit]
        text = f"{name}: at most {limit:g} times git"
        match.report.targets.append(at_most(limit, text, found and found.median))
    match.report.tables.append(table)


def run(*, quick: bool) -> Report:
    """Run the whole suite; its directories are removed after the report."""
    size = QUICK if quick else FULL
    return measured_in_scratch("git", lambda *given: judge(run_all(given[0], size, *given[1:]), size))


def measured_in_scratch(suite: str, measure: Callable[[list[str], Path, Report], object]) -> Report:
    """The report of a suite that gets the command line, and a directory that is removed after the report."""
    report = Report()
    program = holdfast_command(report)
    if program is None or shutil.which("git") is None:
        report.notes.append(f"{suite}: it needs git and the command line")
        return report
    rubbish: list[Path] = []
    report.afterwards.append(lambda: remove_all(rubbish))
    try:
        with scratch(rubbish) as top:
            measure(program, top, report)
    except BaseException:  # there will be no report
        remove_all(rubbish)
        raise
    return report
