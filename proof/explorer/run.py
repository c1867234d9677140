"""One execution of a few tasks, each in its own thread, of which exactly one runs at a time.

A task runs until its next file system call and is parked just before it. Then the guide chooses which task
continues, or dies. A task stands for a process: when it is killed, its files are closed and its locks are
released, as after SIGKILL. Its thread stays parked until the execution is over, and its cleanup has no effect.

Everything that differs between two runs of a program is made deterministic for tasks: random bytes are counted,
clocks stand still and advance only by the task's own sleeps, directories are listed in order. Calls outside the
directory (`/proc`), and calls of threads that are not tasks, are left alone.
"""

from __future__ import annotations

import errno
import hashlib
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple, Protocol

from proof.crash import Ending
from proof.explorer.calls import LOCKS, Performer
from proof.explorer.files import Descriptors, Tree
from proof.explorer.footprints import NOTHING, Footprint, Footprints
from proof.explorer.world import Death, Unexplorable, call_after_death, current
from proof.interpose import Attempt

RUN, KILL, LATE = "run", "kill", "late"
START, EXIT, SLEEP = "start", "exit", "sleep"

_TIMEOUT = 60.0
"""Seconds until an execution counts as stuck: a task waits for something that is not a file lock."""
_LATE = 10.0
"""Seconds that pass for a task whose wait ends late: longer than most timeouts."""

TaskFunction = Callable[[Path], object]
Histories = dict[tuple[int, object], int]
"""Numbers for histories: a history is the history before it and the next observation of a task."""


class Choice(NamedTuple):
    """Which task moves, and how: it makes the call at which it is parked, is killed there, or oversleeps."""

    task: int
    kind: str = RUN


class Move(NamedTuple):
    """A choice, and whether it changes something that sleeping tasks may be waiting for."""

    choice: Choice
    wakes: bool = True


class Pending(NamedTuple):
    """The next step of a task: a call, or its start, a sleep, or its exit."""

    name: str
    attempt: Attempt | None = None


@dataclass(frozen=True, slots=True)
class Result:
    """How one task ended."""

    ending: Ending
    returned: object = None
    error: Exception | None = None

    @property
    def killed(self) -> bool:
        return self.ending is Ending.KILLED

    @property
    def value(self) -> Any:
        """The return value of the task; raises the exception of a task that failed."""
        if self.error is not None:
            raise self.error
        if self.killed:
            raise AssertionError("the task was killed")
        return self.returned


class Guide(Protocol):
    """Decides what happens next, whenever all tasks are parked."""

    def choose(self, run: Run) -> Move | None:
        """The next move; None ends the execution."""
        ...


class Task:
    """One task of one execution. `history` identifies everything that it has seen so far."""

    def __init__(self, run: Run, index: int, function: TaskFunction) -> None:
        self.index = index
        self.function = function
        self.name = f"{index} {getattr(function, '__name__', 'task')}"
        self.began_at = run.began_at
        self.baton = threading.Lock()
        self.pending = Pending(START)
        self.history = 0
        self.result: Result | None = None
        self.woken = False
        self.late = False
        self.times_late = 0
        self.slept = 0.0
        self.remembered: dict[object, Any] = {}
        self._run = run
        self._drawn = 0

    @property
    def live(self) -> bool:
        """Whether it has neither ended nor been killed."""
        return self.result is None

    @property
    def asleep(self) -> bool:
        """Whether it sleeps, and nothing has changed since it last looked."""
        return self.pending.name == SLEEP and not self.woken

    def call(self, attempt: Attempt) -> Any:
        """Make a call when it is this task's turn."""
        return self._run.call(self, attempt)

    def sleep(self, seconds: float) -> None:
        """Let other tasks run until one has changed something since the last sleep; time passes for this task."""
        self._run.park(self, Pending(SLEEP))
        self.woken = False
        self._run.remember(self, (SLEEP, self.late))
        if self.late:
            self.end_wait()
        else:
            self.slept += seconds

    def end_wait(self) -> tuple[int, object]:
        """End a wait late, like a call that is interrupted long after it began."""
        self.late = False
        self.slept += _LATE
        return errno.EINTR, errno.EINTR

    def draw(self, size: int) -> bytes:
        """Bytes that no other draw of any task returns, the same in every execution."""
        self._drawn += 1
        return hashlib.shake_128(f"{self.index}/{self._drawn}".encode()).digest(size)


class Run:
    """One execution."""

    def __init__(
        self,
        directory: Path,
        functions: Sequence[TaskFunction],
        guide: Guide,
        histories: Histories,
        *,
        names: frozenset[str],
        began_at: float,
    ) -> None:
        self.directory = directory
        self.began_at = began_at
        self.tree = Tree(directory)
        self.descriptors = Descriptors()
        self.performer = Performer(self.tree, self.descriptors)
        self._footprints = Footprints(self.tree, self.descriptors)
        self.tasks = [Task(self, index, each) for index, each in enumerate(functions)]
        self.trace: list[tuple[Choice, Pending]] = []
        self._guide = guide
        self._names = names
        self._histories = histories
        self._over = False
        self._failure: BaseException | None = None
        self._done = threading.Lock()

    # --- For guides ----------------------------------------------------------------------------------

    def execute(self) -> None:
        """Run the tasks as the guide decides, until all have ended or the guide stops."""
        self._done.acquire()
        threads = [threading.Thread(target=self._live, args=(each,), daemon=True) for each in self.tasks]
        for task, thread in zip(self.tasks, threads, strict=True):
            task.baton.acquire()
            thread.start()
        first = self._next()
        if first is not None:
            first.baton.release()
            if not self._done.acquire(timeout=_TIMEOUT):
                raise RuntimeError(f"stuck: a task waits for something that is not a file lock\n{self}")
        self._unwind(threads)
        if isinstance(self._failure, Unexplorable):
            raise RuntimeError(f"{self._failure}\n{self}") from self._failure
        if self._failure is not None:
            raise self._failure

    @property
    def live(self) -> list[Task]:
        """The tasks that have neither ended nor been killed."""
        return [task for task in self.tasks if task.live]

    @property
    def kills(self) -> int:
        """The number of tasks killed so far."""
        return sum(1 for task in self.tasks if task.result is not None and task.result.killed)

    @property
    def times_late(self) -> int:
        """The number of waits that have ended late so far."""
        return sum(task.times_late for task in self.tasks)

    def is_enabled(self, task: Task) -> bool:
        """Whether the task could move now."""
        if task.asleep:
            return False
        return task.pending.attempt is None or not self._footprints.is_blocked(task.pending.attempt)

    def can_be_late(self, task: Task) -> bool:
        """Whether the task is in a wait that can end by its time limit."""
        return task.asleep or (task.pending.name == "flock_interruptible" and not self.is_enabled(task))

    def footprint(self, task: Task) -> Footprint:
        """The footprint of the task's next move, if it is made now."""
        if task.pending.attempt is not None:
            return self._footprints.of(task.pending.attempt)
        return self.footprint_of_end(task) if task.pending.name == EXIT else NOTHING

    def footprint_of_end(self, task: Task) -> Footprint:
        """The footprint of the end of the task, if it ends now: its locks."""
        return self._footprints.of_end(task.index)

    # --- Passing the baton ---------------------------------------------------------------------------

    def _live(self, task: Task) -> None:
        """The thread of one task."""
        task.baton.acquire()
        try:
            self._require_alive(task)
            current.task = task
            self.remember(task, (START,))
            try:
                result = Result(Ending.SUCCEEDED, task.function(self.directory))
            except Exception as error:
                result = Result(Ending.FAILED, error=error)
            self.park(task, Pending(EXIT))
            self.remember(task, (EXIT,))
            self.descriptors.close_all(task.index)
            task.result = result
            self._pass_baton(self._next())
        except Death:
            pass
        except BaseException as error:
            self._failure, self._over = error, True
            self._pass_baton(None)
        finally:
            current.task = None

    def park(self, task: Task, pending: Pending) -> None:
        """Wait until it is this task's turn; raise `Death` if it is killed meanwhile."""
        self._require_alive(task)
        task.pending = pending
        chosen = self._next()
        if chosen is not task:
            self._pass_baton(chosen)
            task.baton.acquire()
            self._require_alive(task)

    def _pass_baton(self, chosen: Task | None) -> None:
        (self._done if chosen is None else chosen.baton).release()

    def _next(self) -> Task | None:
        """Let the guide choose, and carry out kills; return the task that runs, None if the execution is over."""
        try:
            while (move := self._guide.choose(self)) is not None:
                task = self.tasks[move.choice.task]
                self.trace.append((move.choice, task.pending))
                for other in self.tasks:
                    other.woken |= move.wakes and other is not task
                if move.choice.kind != KILL:
                    task.late = move.choice.kind == LATE
                    task.times_late += task.late
                    return task
                task.result = Result(Ending.KILLED)
                self.descriptors.close_all(task.index)
        except BaseException as error:
            self._failure = error
        self._over = True
        return None

    def _require_alive(self, task: Task) -> None:
        if self._over or not task.live:
            raise Death

    def _unwind(self, threads: list[threading.Thread]) -> None:
        """Unwind the parked threads, one by one; their calls have no effect."""
        self._over = True
        for task, thread in zip(self.tasks, threads, strict=True):
            if thread.is_alive() and task.baton.locked():
                task.baton.release()
            thread.join(_TIMEOUT)
            if thread.is_alive():
                raise RuntimeError(f"the thread of task {task.name} does not end")
            self.descriptors.close_all(task.index)

    # --- The calls of tasks --------------------------------------------------------------------------

    def call(self, task: Task, attempt: Attempt) -> Any:
        """Make a call of a task when it is its turn."""
        if self._over or not task.live:
            return call_after_death(attempt)
        if not self.performer.concerns(attempt):
            return attempt.perform()
        if attempt.name in self._names or attempt.name in LOCKS:
            self.park(task, Pending(attempt.name, attempt))
        try:
            result, seen = task.end_wait() if task.late else self.performer.perform(task.index, attempt)
        except OSError as error:
            self.remember(task, (attempt.name, "failed", error.errno))
            raise
        self.remember(task, (attempt.name, seen))
        return result

    def remember(self, task: Task, seen: tuple[object, ...]) -> None:
        """Add an observation to the history of a task."""
        task.history = self._histories.setdefault((task.history, seen), len(self._histories) + 1)

    # --- Descriptions --------------------------------------------------------------------------------

    def steps(self) -> list[str]:
        """The steps taken, one line per choice."""
        forms = {RUN: "{}", KILL: "KILLED before {}", LATE: "{}, late"}
        return [
            f"{self.tasks[choice.task].name}: {forms[choice.kind].format(self.described(what))}"
            for choice, what in self.trace
        ]

    def __str__(self) -> str:
        return "\n".join(self.steps())

    def described(self, what: Pending) -> str:
        """Describe a step of a task for a message."""
        return what.name if what.attempt is None else self.performer.described(what.attempt)
