"""Schedule explorer: tries every order of the file system calls of a few tasks, and every point at which to kill one.

    explored = explore([taker, taker], prepare=stale_lock, check=one_winner, kills=1)
    explored.require_clean(at_least=50)

A task is a function of a directory and stands for a process. Tasks share nothing but the directory: each opens its
own stores and lockers, and returns what it observed. Before each of its calls, a task can be overtaken or killed. A
violation comes with its schedule, a text that `replay` runs again.

Each schedule is an execution that starts from the prepared directory, repeats the choices made so far, and then
makes a new one, depth first. Three reductions keep the number of schedules small and lose no violation:

1. *Equal states.* A state consists of the directory (names, contents, hard links), everything that each task has
   seen in its calls so far, and which tasks are dead. Held locks, open files and the position of a task follow from
   what it has seen. The search does not continue from a state that it has already visited.
2. *Invisible calls.* Across all executions, the search records which things (a name, a content, a lock: see
   `explorer.footprints`) one task changes and another touches. A call that touches none of them is made at once,
   without trying the other tasks first. This is safe: take any schedule in which others move first. Until one of
   them touches the same thing, they behave the same if the call comes before them. So among the schedules with the
   call first, there is an equal one, or one in which the two conflict. A new conflict restarts the search with the
   thing added. Anything that inspects the directory in between is a reader too: with an `invariant`, or while a task
   may still be killed, calls that change a file are never skipped in this way. A task is killed only before calls
   that change something: a kill before any other call leaves the same state as a kill after it, and a kill after
   the last change leaves the same state as no kill.
3. *Settled choices.* If two calls do not conflict, both orders lead to the same state. A choice that was tried at a
   state is not tried again after a call that it does not conflict with ("sleep sets"). If a state is reached again
   with fewer settled choices, the search continues from it with the missing ones.

Time passes only for waiting tasks. A sleeping task continues when another one has changed something; if no task can
move, it oversleeps, so that a time limit is reached. If all live tasks wait for each other's locks, that is a
deadlock, even if their waits have a time limit. With `timeouts`, that many waits end late although other tasks
could move.

Not explored: torn calls (half a write: see `crash`), power cuts (see `powercut`), and anything that depends on file
times, or on the size and link count of directories.
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
    """One schedule, run again. The result of a task that waits forever is None."""

    problem: str | None
    results: tuple[Result | None, ...]
    steps: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Exploration:
    """The result of a search. `exhausted` is False if not every schedule was tried, and `capped` says why.

    `schedules` counts the executions since the last restart of the search.
    `states` counts the distinct states at which there was a choice, a task had just died, or everything had
    ended; of a chain of states without a choice, only the last one counts.
    """

    schedules: int
    states: int
    exhausted: bool
    capped: str
    race: Race = field(repr=False)
    violations: list[Violation] = field(default_factory=list)
    deadlocks: list[Violation] = field(default_factory=list)

    def require_clean(self, *, at_least: int = 1) -> None:
        """Raise an AssertionError if there are violations or deadlocks, or if the search was capped or too small."""
        if self.violations or self.deadlocks or not self.exhausted or self.states < at_least:
            raise AssertionError(f"{self}\n(at least {at_least} states were required)")

    def replay(self, schedule: str, directory: Path | None = None) -> Replayed:
        """Run one schedule again; in an empty `directory` of your choice, which is left for inspection.

        If the schedule ends too early, the tasks continue one after the other.
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
    """Try all schedules of the tasks, with at most `kills` killed tasks, and at most `timeouts` waits that end late.

    `prepare` builds the directory, once. When all tasks have ended, `check` raises if the directory does not
    match the results of the tasks; `invariant` raises if the directory is wrong at any point. An AssertionError
    in a task counts too.

    With `names`, tasks are switched only at these calls (and at locks): the search is then incomplete by
    choice. Without `reduced`, invisible calls are tried in every order too: far slower, with the same
    results.
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
    """Inside the block, no garbage is collected in the middle of a task's calls.

    The leftovers of dead tasks are collected at the end, while they still cannot touch anything.
    """
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
        gc.collect(1)
    finally:
        if enabled:
            gc.enable()
