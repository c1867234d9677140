"""A race to explore, schedules as text, and the violations that were found."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import groupby
from pathlib import Path

from proof.explorer.run import KILL, LATE, RUN, Choice, Guide, Histories, Result, Run, TaskFunction

Check = Callable[[Path, Sequence[Result]], object]


@dataclass(frozen=True, slots=True)
class Race:
    """The tasks to explore, their initial directory, the kills and timeouts allowed, and the checks."""

    tasks: Sequence[TaskFunction]
    prepare: Callable[[Path], object]
    check: Check
    invariant: Callable[[Path], object] | None
    kills: int
    timeouts: int
    names: frozenset[str]
    began_at: float

    def execute(self, directory: Path, guide: Guide, histories: Histories) -> Run:
        """Run the tasks in the prepared directory."""
        run = Run(directory, self.tasks, guide, histories, names=self.names, began_at=self.began_at)
        run.execute()
        return run

    def judge(self, run: Run) -> str | None:
        """Return the problem after all tasks have ended, or None. An AssertionError in a task counts."""
        results = [task.result for task in run.tasks if task.result is not None]
        for task, result in zip(run.tasks, results, strict=True):
            if isinstance(result.error, AssertionError):
                return f"in task {task.name}: {_problem(result.error)}"
        return problem_of(lambda: self.check(run.directory, results))


@dataclass(frozen=True, slots=True)
class Violation:
    """A problem after one schedule (in the middle of it, for an invariant or a deadlock)."""

    problem: str
    schedule: str
    steps: tuple[str, ...]

    @property
    def switches(self) -> int:
        """How often the running task changes: the fewer, the easier to understand."""
        return len(self.schedule.split())

    def __str__(self) -> str:
        steps = "\n".join(f"        {step}" for step in self.steps)
        return f"{self.problem}\n      schedule: {self.schedule}\n{steps}"


# --- Schedules ----------------------------------------------------------------------------------------


def written_schedule(choices: Sequence[Choice]) -> str:
    """Choices as text: `0*12 1*3 kill:0 1*20`."""
    words = []
    for choice, group in groupby(choices):
        count = len(list(group))
        words += [f"{choice.task}*{count}"] if choice.kind == RUN else [f"{choice.kind}:{choice.task}"] * count
    return " ".join(words)


def read_schedule(text: str) -> list[Choice]:
    """The choices that `written_schedule` wrote."""
    choices: list[Choice] = []
    for word in text.split():
        if "*" in word:
            task, times = word.split("*")
            choices += [Choice(int(task))] * int(times)
        else:
            kind, task = word.split(":")
            choices.append(Choice(int(task), {KILL: KILL, LATE: LATE}[kind]))
    return choices


def violation(run: Run, problem: str) -> Violation:
    """Make a violation of a problem and the schedule that led to it."""
    return Violation(problem, written_schedule([choice for choice, _ in run.trace]), tuple(run.steps()))


def problem_of(check: Callable[[], object]) -> str | None:
    """Run a check; return its exception as one line, or None."""
    try:
        check()
    except Exception as error:
        return _problem(error)
    return None


def _problem(error: Exception) -> str:
    first_line = str(error).partition("\n")[0]
    return f"{type(error).__name__}: {first_line}"
