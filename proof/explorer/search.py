"""The search through all schedules: the choices at each point, the states visited, the violations found."""

from __future__ import annotations

import gc
from dataclasses import dataclass, field
from itertools import count
from pathlib import Path

from proof.explorer.files import Image
from proof.explorer.footprints import Conflicts, Footprint
from proof.explorer.race import Race, Violation, problem_of, violation
from proof.explorer.run import EXIT, KILL, LATE, RUN, SLEEP, Choice, Histories, Move, Run, Task
from proof.explorer.world import not_a_task

_MOST_STEPS = 5_000
_MOST_LATE = 20
_COLLECT_EVERY = 64
_PROBE_AFTER = 20


class Follower:
    """The guide that follows one schedule, and then lets the tasks continue one after the other."""

    def __init__(self, choices: list[Choice]) -> None:
        self._choices = choices

    def choose(self, run: Run) -> Move | None:
        if len(run.trace) < len(self._choices):
            choice = self._choices[len(run.trace)]
            task = run.tasks[choice.task]
            if not task.live or (choice.kind == RUN and not task.asleep and not run.is_enabled(task)):
                raise ValueError(f"this schedule does not fit: {choice} is not possible\n{run}")
            return Move(choice)
        able = [Move(Choice(task.index)) for task in _by_turn(run) if run.is_enabled(task)]
        return able[0] if able else _late(run)


class _Probe:
    """A guide that stops or kills one task before one of its changes, to find conflicts with the others.

    The search finds any conflict that this misses, but then it has to restart.
    """

    def __init__(self, conflicts: Conflicts, task: int, change: int, *, kill: bool) -> None:
        self.arrived = False
        self._conflicts = conflicts
        self._task = task
        self._left = change
        self._kill = kill

    def choose(self, run: Run) -> Move | None:
        for task in run.live:
            self._conflicts.note(task.index, run.footprint(task), sleeps=task.pending.name == SLEEP)
        able = [task for task in run.live if run.is_enabled(task)]
        if not able or len(run.trace) >= _MOST_STEPS:
            return _late(run)
        chosen = run.tasks[self._task]
        if chosen in able and not self.arrived:
            self._left -= run.footprint(chosen).changes_files
            self.arrived = self._left < 0
            if not self.arrived:
                return Move(Choice(chosen.index))
            if self._kill:
                return Move(Choice(chosen.index, KILL))
        return Move(Choice(next((task for task in able if task is not chosen), chosen).index))


# --- The search ---------------------------------------------------------------------------------------


@dataclass(slots=True)
class _Frame:
    """One state on the current path: the choices to try there, one after the other, and those to skip.

    `settled` are choices that were tried before, here or earlier on the path, with everything that can follow:
    they need not be tried again after a choice that does not conflict with them.
    """

    pending: tuple[str, ...]
    settled: frozenset[Choice]
    footprints: dict[Choice, Footprint]
    moves: list[Move] = field(default_factory=list)
    index: int = 0

    @property
    def move(self) -> Move:
        """The move being tried."""
        return self.moves[self.index]

    def settled_after(self) -> frozenset[Choice]:
        """The settled choices in the state after the move being tried."""
        before = self.settled.union(move.choice for move in self.moves[: self.index])
        return frozenset(each for each in before if self._commute(each, self.move.choice))

    def _commute(self, one: Choice, other: Choice) -> bool:
        if one.task == other.task or LATE in (one.kind, other.kind) or one.kind == other.kind == KILL:
            return False
        if SLEEP in (self.pending[one.task], self.pending[other.task]):
            return False  # a change wakes sleeping tasks
        return not self.footprints[one].conflicts_with(self.footprints[other])


class Search:
    """A depth-first search through all choices, with one execution per path, which it guides itself."""

    def __init__(self, race: Race, *, reduced: bool, most_schedules: int, most_violations: int) -> None:
        self.schedules = 0
        self.violations: list[Violation] = []
        self.deadlocks: list[Violation] = []
        self.capped = ""
        self._race = race
        self._reduced = reduced
        self._most_schedules = most_schedules
        self._most_violations = most_violations
        self._conflicts = Conflicts(everything=not reduced)
        self._histories: Histories = {}
        self._contents: dict[object, int] = {}
        self._content = (-1, -1)
        self._seen: dict[object, frozenset[Choice]] = {}
        self._path: list[_Frame] = []
        self._finished = False

    @property
    def states(self) -> int:
        """The number of distinct states."""
        return len(self._seen)

    def search(self, directory: Path, image: Image) -> None:
        """Execute until there is nothing left to try, or a limit is reached."""
        executions, probed = 0, False
        while not self.capped:
            image.restore(directory)
            self._execute(directory)
            executions += 1
            if executions % _COLLECT_EVERY == 0:
                gc.collect(0)
            if self._conflicts.absorb():
                if self.schedules > _PROBE_AFTER and not probed:
                    probed = True
                    self._probe(directory, image)
                self._begin_again()
            elif not self._advance():
                break
            if executions >= self._most_schedules:
                self.capped = f"stopped after {executions} executions"
            elif len(self.violations) + len(self.deadlocks) >= self._most_violations:
                self.capped = f"stopped after {self._most_violations} findings"

    def _execute(self, directory: Path) -> None:
        self._content, self._finished = (-1, -1), False
        run = self._race.execute(directory, self, self._histories)
        self.schedules += 1
        if self._finished and (problem := self._race.judge(run)) is not None:
            self.violations.append(violation(run, problem))

    def _begin_again(self) -> None:
        self.schedules = 0
        self.violations.clear()
        self.deadlocks.clear()
        self._path.clear()
        self._seen.clear()

    def _probe(self, directory: Path, image: Image) -> None:
        """Find likely conflicts in advance, so that the search need not restart for each."""
        for task in range(len(self._race.tasks)):
            for kill in [False, True][: 1 + min(self._race.kills, 1)]:
                for change in count():
                    probe = _Probe(self._conflicts, task, change, kill=kill)
                    image.restore(directory)
                    self._race.execute(directory, probe, self._histories)
                    if not probe.arrived:
                        break
        self._conflicts.absorb()

    def _advance(self) -> bool:
        """Go to the next untried choice, the deepest first; False if there is none."""
        while self._path:
            frame = self._path[-1]
            frame.index += 1
            if frame.index < len(frame.moves):
                return True
            self._path.pop()
        return False

    def choose(self, run: Run) -> Move | None:
        """Follow the current path; at its end, determine the moves to try there."""
        if len(run.trace) == len(self._path):
            frame = self._reach(run)
            if not frame.moves:
                return None
            self._path.append(frame)
        frame = self._path[len(run.trace)]
        task = run.tasks[frame.move.choice.task]
        if task.pending.name != frame.pending[task.index]:
            before = frame.pending[task.index]
            raise RuntimeError(f"a task is not deterministic: first {before}, now {run.described(task.pending)}\n{run}")
        return frame.move

    # --- One state -------------------------------------------------------------------------------------

    def _reach(self, run: Run) -> _Frame:
        """The state at the end of the path. If there is nothing to try there, the execution ends."""
        tasks = _by_turn(run)
        footprints = {Choice(task.index): run.footprint(task) for task in tasks}
        footprints |= {Choice(task.index, KILL): run.footprint_of_end(task) for task in tasks}
        settled = self._path[-1].settled_after() if self._reduced and self._path else frozenset[Choice]()
        frame = _Frame(tuple(task.pending.name for task in run.tasks), settled, footprints)
        for task in tasks:
            self._conflicts.note(task.index, footprints[Choice(task.index)], sleeps=task.pending.name == SLEEP)
        if len(run.trace) >= _MOST_STEPS:
            self.violations.append(violation(run, f"no end after {_MOST_STEPS} steps"))
            return frame
        able = [task for task in tasks if run.is_enabled(task)]
        only = self._invisible_move(run, frame, able)
        if only is not None:
            frame.moves = [only] if only.choice not in settled else []
            return frame
        going = [self._run_move(task, frame) for task in able]
        if not going and (late := _late(run)):
            going = [late]
        moves = going + [move for move in self._disturbances(run, frame, able) if move not in going]
        if len(moves) == len(going) == 1 and not self._is_watched(run) and not _has_just_died(run):
            untried = moves  # no choice to remember: a later state stands for this one
        else:
            untried = self._untried(run, frame, moves, stuck=bool(tasks) and not going)
        frame.moves = [move for move in untried if move.choice not in frame.settled]
        return frame

    def _invisible_move(self, run: Run, frame: _Frame, able: list[Task]) -> Move | None:
        """A move that can be made at once, because no task can tell when it was made."""
        for task in able:
            footprint = frame.footprints[Choice(task.index)]
            if footprint.boundless or self._conflicts.concern(footprint.reads + footprint.writes):
                continue
            if not (footprint.changes_files and self._is_watched(run)):
                return self._run_move(task, frame)
        return None

    def _run_move(self, task: Task, frame: _Frame) -> Move:
        choice = Choice(task.index)
        wakes = task.pending.name == EXIT or self._conflicts.concern(frame.footprints[choice].writes)
        return Move(choice, wakes)

    def _disturbances(self, run: Run, frame: _Frame, able: list[Task]) -> list[Move]:
        """The late waits and kills that the race still allows here."""
        disturbances: list[Move] = []
        if run.times_late < self._race.timeouts:
            disturbances += [_late_move(task) for task in run.live if run.can_be_late(task)]
        if self._can_be_killed(run):
            worth = [task for task in run.live if task not in able or self._matters(task, frame)]
            disturbances += [Move(Choice(task.index, KILL)) for task in worth]
        return disturbances

    def _can_be_killed(self, run: Run) -> bool:
        return run.kills < self._race.kills

    def _matters(self, task: Task, frame: _Frame) -> bool:
        """Whether it matters if a task dies before or after its next call."""
        footprint = frame.footprints[Choice(task.index)]
        return footprint.changes_files or self._conflicts.concern(footprint.writes)

    def _is_watched(self, run: Run) -> bool:
        """Whether the directory may be inspected at any point: by an invariant, or by the survivors of a kill."""
        return self._race.invariant is not None or self._can_be_killed(run)

    def _untried(self, run: Run, frame: _Frame, moves: list[Move], *, stuck: bool) -> list[Move]:
        """The moves that were never tried in an equal state. A new state is also judged."""
        state = self._state(run)
        known = self._seen.get(state)
        if known is not None:
            tried_now = known - frame.settled  # settled on the first visit, but not this time
            frame.settled &= known
            self._seen[state] = frame.settled
            return [move for move in moves if move.choice in tried_now]
        self._seen[state] = frame.settled
        if self._breaks_invariant(run):
            return []
        self._finished = not run.live
        if stuck:
            self.deadlocks.append(violation(run, f"deadlock: {waiting(run)}"))
        return moves

    def _state(self, run: Run) -> object:
        """Everything that later steps depend on."""
        if self._content[0] != run.performer.changes:
            content = (run.tree.snapshot(), run.descriptors.nameless())
            number = self._contents.setdefault(content, len(self._contents))
            self._content = (run.performer.changes, number)
        tasks = tuple(
            None
            if task.result and task.result.killed
            else (task.history, task.live, task.woken and self._conflicts.sleeps(task.index))
            for task in run.tasks
        )
        return (self._content[1], tasks, run.times_late)

    def _breaks_invariant(self, run: Run) -> bool:
        invariant = self._race.invariant
        if invariant is None:
            return False
        with not_a_task():
            problem = problem_of(lambda: invariant(run.directory))
        if problem is not None:
            self.violations.append(violation(run, problem))
        return problem is not None


# --- Helpers ------------------------------------------------------------------------------------------


def waiting(run: Run) -> str:
    """The waiting tasks, and the calls at which they wait."""
    return "; ".join(f"{task.name} waits at {run.described(task.pending)}" for task in run.live)


def _by_turn(run: Run) -> list[Task]:
    """The live tasks, the one that moved last first, so that the first schedules switch seldom."""
    last = run.trace[-1][0].task if run.trace else 0
    return sorted(run.live, key=lambda task: (task.index != last, task.index))


def _has_just_died(run: Run) -> bool:
    return bool(run.trace) and run.trace[-1][0].kind == KILL


def _late(run: Run) -> Move | None:
    """If no task can move, time passes for the one that has overslept least often."""
    sleepers = [task for task in run.live if task.asleep and task.times_late < _MOST_LATE]
    return _late_move(min(sleepers, key=lambda task: task.times_late)) if sleepers else None


def _late_move(task: Task) -> Move:
    return Move(Choice(task.index, LATE), wakes=False)
