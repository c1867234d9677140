"""`holdfast land --all` beside the bare git commands that make the same merges; and how many checks a queue needs.

The entries are queued before: every one changes a file of its own. The floor merges them one after the other with
`git merge-tree`, `git commit-tree` and `git update-ref`: it has no queue, no record and no lock, leaves the checkout
behind, and loses what it was doing when it is killed. As git does by default, it syncs packs only; a second floor syncs
objects and references too (`core.fsync=all`), as Holdfast does before it says that work has landed.
"""

from __future__ import annotations

from functools import partial
from pathlib import Path
from statistics import median
from typing import NamedTuple

from bench.git import Side, cost_of, make, measured_in_scratch
from bench.git import Size as Source
from bench.measure import interleave, ratio
from bench.report import Column, Report, Table, at_most
from bench.report import number as written
from bench.timing import Cost, say

OURS, FLOOR, SYNCED = "holdfast land --all", "merge-tree, commit-tree, update-ref", "the same, synced"
_SYNC = ("-c", "core.fsync=all", "-c", "core.fsyncMethod=fsync")
MOST_RUNS = 12


class Size(NamedTuple):
    """How much to measure."""

    rounds: int = 3
    entries: int = 64
    files: int = 10_000
    directories: int = 500
    check: str = "sleep 1; test ! -e bad"


FULL = Size()
QUICK = Size(rounds=1, entries=4, files=200, directories=10, check="test ! -e bad")


class Queue(Side):
    """A repository and a queue for its branch `target`, which nobody has checked out."""

    def prepare(self, size: Size) -> None:
        make(self.top, Source(files=size.files, directories=size.directories))
        self.call("init")
        self.git("branch", "target")

    def commits(self, number: int, size: Size, *, culprit: int | None = None) -> list[str]:
        """Commits on the tip that each change a file of their own; one of them breaks the check."""
        tip, found = self.git("rev-parse", "target").strip(), []
        index = {"GIT_INDEX_FILE": str(self.top / ".git/bench-index")}
        blob = self._blob()
        for each in range(size.entries):
            self.git("read-tree", tip, **index)
            name = "bad" if each == culprit else f"g0/new-{number}-{each}"
            self.git("update-index", "--add", "--cacheinfo", f"100644,{blob},{name}", **index)
            tree = self.git("write-tree", **index).strip()
            found.append(self.git("commit-tree", "-p", tip, "-m", f"work {each}", tree).strip())
        return found

    def _blob(self) -> str:
        path = self.top / ".git/bench-content"
        path.write_text("new\n")
        return self.git("hash-object", "-w", str(path)).strip()

    def queue(self, commits: list[str]) -> None:
        from holdfast.repository.landing import Landings
        from holdfast.repository.landing_changes import NewLanding
        from holdfast.repository.landing_records import Landing, new_landing_id
        from holdfast.repository.repository import Repository

        with Repository(self.top) as repository:
            changes = Landings(repository, actor="agent:bench").changes
            for commit in commits:
                landing = Landing(
                    landing_id=new_landing_id(),
                    target="target",
                    branch="target",
                    commit=commit,
                    sequence=0,
                    queued_at="",
                )
                changes.enqueue(NewLanding(landing, None, None))

    def runs(self) -> int:
        """How many runs of the checks there were."""
        from holdfast.repository.landing_checks import check_runs
        from holdfast.repository.repository import Repository

        with Repository(self.top) as repository:
            return len(list(check_runs(repository.context.paths)))

    def merge(self, commits: list[str], *settings: str) -> None:
        """The floor."""
        tip = self.git("rev-parse", "target").strip()
        for commit in commits:
            tree = self.git(*settings, "merge-tree", "--write-tree", tip, commit).split()[0]
            new = self.git(*settings, "commit-tree", "-p", tip, "-p", commit, "-m", "a merge", tree).strip()
            self.git(*settings, "update-ref", "refs/heads/target", new, tip)
            tip = new


def run_all(program: list[str], size: Size, top: Path, report: Report) -> None:
    ours, floor, synced = (Queue(top / name, program) for name in ("ours", "floor", "synced"))
    say("landing: making repositories")
    for side in (ours, floor, synced):
        side.prepare(size)
    found: dict[str, list[Cost]] = {OURS: [], FLOOR: [], SYNCED: []}
    for number in range(size.rounds):
        say(f"landing: round {number + 1} of {size.rounds}")
        ours.queue(ours.commits(number, size))
        contenders = {
            OURS: partial(cost_of, partial(ours.call, "land", "--all")),
            FLOOR: partial(cost_of, partial(floor.merge, floor.commits(number, size))),
            SYNCED: partial(cost_of, partial(synced.merge, synced.commits(number, size), *_SYNC)),
        }
        done = interleave(contenders, 1)
        report.note_failures("landing", done.failures)
        for name, costs in done.series.items():
            found[name] += costs
    _judge(found, size, report)
    _count_checks(ours, size, report)


def _judge(found: dict[str, list[Cost]], size: Size, report: Report) -> None:
    columns = [Column("s", written(".3f")), Column("CPU s", written(".3f"))]
    table = Table(f"{size.entries} merges, {size.files} files, no checks; medians", columns)
    for name, costs in found.items():
        table.rows[name] = [median(getattr(each, kind) for each in costs) if costs else None for kind in Cost._fields]
    report.tables.append(table)
    for name, what in ((FLOOR, "bare git"), (SYNCED, "bare git that syncs")):
        for kind, text in enumerate(("wall time", "CPU time")):
            own, bare = ([each[kind] for each in found[side]] for side in (OURS, name))
            measured = ratio(own, bare).median if own and bare else None
            report.targets.append(at_most(1.5, f"landing without checks: {text} at most 1.5 times {what}", measured))


def _count_checks(side: Queue, size: Size, report: Report) -> None:
    """Land a queue with one culprit, and count the runs of the check."""
    say("landing: a queue with one culprit")
    side.call("config", "set", "land.checks", size.check)
    side.queue(side.commits(size.rounds, size, culprit=size.entries // 2))
    cost = cost_of(partial(side.call, "land", "--all"))
    table = Table(f"{size.entries} entries with a check and one culprit", [Column("runs"), Column("s", written(".1f"))])
    runs = side.runs()
    table.rows["all but one land"] = [runs, cost[0]]
    report.tables.append(table)
    report.targets.append(at_most(MOST_RUNS, f"runs of the check: at most {MOST_RUNS}", float(runs)))


def run(*, quick: bool) -> Report:
    """Run the whole suite; its directories are removed after the report."""
    size = QUICK if quick else FULL
    return measured_in_scratch("landing", lambda *given: run_all(given[0], size, *given[1:]))
