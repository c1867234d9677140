"""`holdfast conflicts` in a git home with many worktrees: without its cache, with it, and after one change.

Every worktree has a commit of its own and uncommitted work; a few of them conflict. The floor is `git status` in each
worktree, as many at once as Holdfast starts: no search can tell what has changed with less.
"""

from __future__ import annotations

import os
import shutil
import subprocess
from collections.abc import Callable
from functools import partial
from pathlib import Path
from statistics import median
from time import sleep
from typing import NamedTuple

from bench.git import Side, cost_of, make, measured_in_scratch
from bench.git import Size as Source
from bench.measure import interleave
from bench.report import Column, Report, Table, at_most
from bench.report import number as written
from bench.snapshots import SETTLED
from bench.timing import Cost, say
from holdfast.git.program import side_by_side

COLD, WARM, ONE_CHANGED, FLOOR = "no cache", "nothing changed", "one worktree changed", "git status"
LIMITS = {COLD: 2.0, WARM: 0.2}
"""The most seconds of a search of 20 worktrees with 10,000 files each."""


class Size(NamedTuple):
    """How much to measure."""

    rounds: int = 5
    worktrees: int = 20
    files: int = 10_000
    directories: int = 500


FULL = Size()
QUICK = Size(rounds=1, worktrees=3, files=200, directories=10)


def prepare(side: Side, size: Size) -> list[Path]:
    """Make the repository and its worktrees."""
    say("conflicts: making worktrees")
    make(side.top, Source(files=size.files, directories=size.directories))
    side.call("init")
    [first, *_] = sorted(each for each in side.top.glob("g*/**/*") if each.is_file())
    places = []
    for number in range(size.worktrees):
        side.call("worktree", "create", f"w{number}")
        place = side.top.with_name(f"{side.top.name}.worktrees") / f"w{number}"
        (place / f"own-{number}").write_text("committed\n")
        Side(place, []).commit()
        (place / f"new-{number}").write_text("not committed\n")
        if number < size.worktrees // 5:
            (place / first.relative_to(side.top)).write_text(f"line of {number}\n")
        Side(place, []).git("status")
        places.append(place)
    return places


def run_all(program: list[str], size: Size, top: Path, report: Report) -> dict[str, list[Cost]]:
    """Measure the searches, and the floor, in every round."""
    side = Side(top / "project", program)
    places = prepare(side, size)
    found: dict[str, list[Cost]] = {}
    for number in range(size.rounds):
        say(f"conflicts: round {number + 1} of {size.rounds}")
        for name, before, measured in _steps(side, places, number):
            before()
            sleep(SETTLED)
            done = interleave({name: partial(cost_of, measured)}, 1)
            report.note_failures(name, done.failures)
            if not done.failures:
                found.setdefault(name, []).append(done.series[name][0])
    return found


def _steps(side: Side, places: list[Path], number: int) -> list[tuple[str, Callable[[], object], Callable[[], object]]]:
    caches = side.top / ".git/holdfast/.jvs/cache"
    search = partial(side.call, "conflicts")
    command = ["git", "--no-optional-locks", "status", "--porcelain=v2", "-z", "--untracked-files=all"]

    def status(place: Path) -> None:
        subprocess.run(command, cwd=place, stdout=subprocess.DEVNULL, check=True)

    return [
        (COLD, lambda: shutil.rmtree(caches, ignore_errors=True), search),
        (WARM, lambda: None, search),
        (FLOOR, lambda: None, lambda: side_by_side(status, places)),
        (ONE_CHANGED, lambda: (places[0] / "new-0").write_text(f"changed {number}\n"), search),
    ]


def judge(found: dict[str, list[Cost]], size: Size, report: Report) -> None:
    """Add the table, and the targets, which are about wall time on idle processors."""
    columns = [Column("s", written(".3f")), Column("CPU s", written(".3f")), Column("limit", written("g"))]
    table = Table(f"{size.worktrees} worktrees, {size.files} files, {os.cpu_count()} processors; medians", columns)
    for name, costs in found.items():
        wall, cpu = (median(getattr(each, kind) for each in costs) for kind in Cost._fields)
        table.rows[name] = [wall, cpu, LIMITS.get(name)]
    for name, limit in LIMITS.items():
        report.targets.append(at_most(limit, f"conflicts, {name}: at most {limit:g} s", _median(found.get(name))))
    report.tables.append(table)


def _median(costs: list[Cost] | None) -> float | None:
    return None if not costs else median(each[0] for each in costs)


def run(*, quick: bool) -> Report:
    """Run the whole suite; its directories are removed after the report."""
    size = QUICK if quick else FULL
    return measured_in_scratch("conflicts", lambda *given: judge(run_all(given[0], size, *given[1:]), size, given[2]))
