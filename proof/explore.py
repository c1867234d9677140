"""Try every order in which a few tasks can make their file system calls, and every place to die.

    explored = explore([taker, taker], prepare=stale_lock, check=one_winner, kills=1)
    explored.require_clean(at_least=50)

A task is a function of a directory and stands for a process: tasks share nothing but the directory,
so each makes its own stores and lockers, and what it saw it returns. Before each of its calls it can
be overtaken, or killed. A violation comes with its schedule, a text that `replay` runs again.

Every schedule is an execution from the prepared directory on: it follows the choices made so far and
takes another one at the end, depth first. Three things keep the number small, and nothing is lost:

1. *Equal states.* A state is all that is in the directory (names, contents, which names are one
   inode), what each task has seen in all its calls so far, who is dead. Locks held, open files and
   where a task stands follow from what it has seen. A state that was there before is not gone on from.
2. *Calls that nobody can notice.* Over all executions it is noted which things (a name, a content, a
   lock: see `explorer.footprints`) one task changes and another touches. A call that touches none of
   these is made at once, without trying the others first. For take any schedule in which others move
   first. Until one of them touches the same thing, they do the same if the call comes before them: so
   among those with the call first there is an equal one, or one in which the two meet. A meeting that
   is new begins the search again, with the thing added. Whoever looks at the directory in between is
   a reader too: with an `invariant`, or while somebody may still be killed, a call that changes a file
   is never passed over. A task is killed only before calls that change something: killed before
   another one, it leaves what it leaves if killed after it; killed after the last, what it leaves if not.
3. *Choices that are settled.* Where two calls do not meet at this moment, the second order leads to
   the same state as the first: what was tried at a state is not tried again after a call that it does
   not meet ("sleep sets"; a state that is reached again with less settled is gone on from with that).

Time passes only for who waits. A sleeper goes on when another has changed something; when nobody can
move, it oversleeps, so that a time limit is reached. When all who live wait for each other's locks,
that is a deadlock, time limit or not. With `timeouts`, so many waits end late though others could move.

Not tried are calls that are torn (a write of a half: see `crash`), power cuts (see `powercut`), and
what depends on the times of files, or on the size and the number of links of directories.
"""

from __future__ import annotations

import gc
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

from holdfast.fs import calls
from proof import effort
from proof.crash import fresh, scratch
from proof.explorer.files import Image
from proof.explorer.race import Check, Race, Violation, read_schedule
from proof.explorer.run import Result, TaskFunction
from proof.explorer.search import Follower, Search, waiting
from proof.explorer.world import world_of_tasks

__all__ = ["Exploration", "Replayed", "Result", "Violation", "explore"]

ALL_CALLS = (*calls.CHANGING, *calls.READING)


@dataclass(frozen=True, slots=True)
class Replayed:
    """One schedule, run again. The result of a task that waits for ever is None."""

    problem: str | None
    results: tuple[Result | None, ...]
    steps: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Exploration:
    """What was found. `exhausted` is False if not every schedule was tried, and `capped` says why.

    `schedules` are the executions since the search began for the last time.
    `states` are the distinct states at which there was a choice, somebody had just died, or all was
    over; of a chain of states without a choice only the end counts.
    """

    schedules: int
    states: int
    exhausted: bool
    capped: str
    race: Race = field(repr=False)
    violations: list[Violation] = field(default_factory=list)
    deadlocks: list[Violation] = field(default_factory=list)

    def require_clean(self, *, at_least: int = 1) -> None:
        """Raise an AssertionError unless all was tried, at least so many states, and nothing was found."""
        if self.violations or self.deadlocks or not self.exhausted or self.states < at_least:
            raise AssertionError(f"{self}\n(at least {at_least} states were asked for)")

    def replay(self, schedule: str, directory: Path | None = None) -> Replayed:
        """Run one schedule again; in an empty `directory` of your choice, which is left to be looked at.

        Where the schedule ends too early, the tasks go on one after the other.
        """
        if directory is None:
            with scratch() as base, fresh(base) as made:
                return self.replay(schedule, made)
        self.race.prepare(directory)
        with world_of_tasks(), _undisturbed():
            run = self.race.execute(directory.resolve(), Follower(read_schedule(schedule)), {})
            problem = f"deadlock: {waiting(run)}" if run.live else self.race.judge(run)
        return Replayed(problem, tuple(task.result for task in run.tasks), tuple(run.steps()))

    def __str__(self) -> str:
        found = f"{len(self.violations)} violations, {len(self.deadlocks)} deadlocks"
        capped = [] if self.exhausted else [f"NOT EVERYTHING WAS TRIED: {self.capped}"]
        shown = [*map(str, self.deadlocks[:1]), *map(str, self.violations[:2])]
        lines = [f"{self.schedules} schedules, {self.states} distinct states, {found}", *capped, *shown]
        return "\n  ".join(lines)


def explore(
    tasks: Sequence[TaskFunction],
    *,
    check: Check,
    prepare: Callable[[Path], object] = lambda directory: None,
    invariant: Callable[[Path], object] | None = None,
    kills: int = 0,
    timeouts: int = 0,
    names: Sequence[str] = ALL_CALLS,
    reduced: bool = True,
    most_schedules: int = 20_000,
    most_violations: int = 100,
) -> Exploration:
    """Try all schedules of the tasks, with at most so many `kills` and waits that end with `timeouts`.

    `prepare` builds the directory, once. `check` raises if the directory and the results of the tasks
    do not fit together when all have ended, `invariant` if the directory is wrong at any moment. An
    AssertionError in a task counts too.

    With `names`, tasks are switched at these calls only (and at locks): less than everything is tried
    then, by your own choice. Unless it is `reduced`, calls that nobody can notice are tried in every
    order too: far slower, and nothing else may come of it.
    """
    if sys.platform == "win32":
        raise NotImplementedError("there is no flock on Windows")
    race = Race(tasks, prepare, check, invariant, kills, timeouts, frozenset(names), time.time())
    search = Search(race, reduced=reduced, most_schedules=most_schedules, most_violations=most_violations)
    with scratch() as base, fresh(base.resolve()) as directory:
        prepare(directory)
        with world_of_tasks(), _undisturbed():
            search.search(directory, Image(directory))
    effort.tried["schedules"] += search.schedules
    return Exploration(
        search.schedules,
        search.states,
        not search.capped,
        search.capped,
        race,
        sorted(search.violations, key=lambda each: each.switches),
        sorted(search.deadlocks, key=lambda each: each.switches),
    )


@contextmanager
def _undisturbed() -> Iterator[None]:
    """Until the end of the block, no objects are collected in the middle of somebody's calls.

    Those that dead tasks left behind go at the end, while they still cannot touch anything.
    """
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
        gc.collect(1)
    finally:
        if enabled:
            gc.enable()
