"""Crash sweeps: kill an operation at each of its file system calls, or make that call fail, and check the result.

A `Scenario` prepares a directory, runs an operation on it, and checks the result. `kill_points` runs it once
per call, in a child that dies by SIGKILL just before the call, just after it, or halfway through a write.
`error_points` runs it in this process, once per call and error.

Every call goes through `holdfast.fs.calls`, so anything built on that module can be swept. A violation has the
index of its call: `run_killed` and `run_faulted` repeat that one point in a directory of your choice, and leave
the directory for inspection.
"""

from __future__ import annotations

import errno
import gc
import json
import os
import shutil
import signal
import sys
import tempfile
import traceback
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from enum import Enum
from itertools import count
from pathlib import Path
from typing import Any, NoReturn, Protocol

from holdfast.fs import calls
from holdfast.fs import directory as directories_opened
from holdfast.fs.directory import Directory
from holdfast.locks.flock import _all as _descriptions
from proof import effort
from proof.effort import chosen
from proof.interpose import (
    SHORT_WRITE,
    Attempt,
    Call,
    Deadly,
    Death,
    Fate,
    Fault,
    Faulty,
    Kill,
    interposed,
    listening,
    mark,
    raise_death,
    shown,
)

__all__ = [
    "Scenario",
    "Outcome",
    "Ending",
    "Report",
    "Violation",
    "kill_points",
    "error_points",
    "judge",
    "indexes",
    "mark",
    "run_killed",
    "run_faulted",
    "cut_short",
    "Kill",
    "Fault",
    "SHORT_WRITE",
    "ERRORS",
    "LASTING_ERRORS",
    "Attempt",
    "Call",
    "interposed",
    "listening",
    "scratch",
    "fresh",
]

ERRORS = (errno.ENOSPC, errno.EIO, errno.EDQUOT, errno.EINTR)
LASTING_ERRORS = (errno.ENOSPC, errno.EIO)

_TIMEOUT = 60  # seconds until a hung child is killed


class Scenario(Protocol):
    """An initial state, an operation on it, and a check of the resulting state.

    `check` must rely on the directory and the outcome alone, and not on attributes that `operate` has set:
    the operation may have run in another process, or once for many outcomes.
    """

    def prepare(self, directory: Path) -> None:
        """Build the old state in the empty `directory`."""

    def operate(self, directory: Path) -> object:
        """Run the operation under test. It must succeed if nothing disturbs it."""

    def check(self, directory: Path, outcome: Outcome) -> None:
        """Raise if the state is illegal after this outcome, preferably an AssertionError that says why."""


class Ending(Enum):
    """How one run of the operation ended."""

    KILLED = "killed"
    FAILED = "failed"
    SUCCEEDED = "succeeded"
    POWER_CUT = "power cut"


@dataclass(frozen=True, slots=True)
class Outcome:
    """The outcome of one run: how it ended, which fault hit which call, and what the operation had promised.

    `acknowledged` says whether the operation had returned to its caller. `marks` are the parts that it had
    announced as done (see `mark`). `left_open` are the calls whose descriptors it never closed.
    """

    ending: Ending
    fault: str = "undisturbed"
    call: Call | None = None
    error: Exception | None = None
    marks: tuple[str, ...] = ()
    acknowledged: bool = False
    left_open: tuple[Call, ...] = ()

    def __str__(self) -> str:
        where = self.fault if self.call is None else f"{self.fault} {self.call}"
        return where if self.error is None else f"{where}, raised {self.error!r}"


@dataclass(frozen=True, slots=True)
class Violation:
    """An illegal state: the outcome that led to it, the problem, and the content of the directory."""

    outcome: Outcome
    problem: str
    listing: str

    def __str__(self) -> str:
        return f"{self.outcome}\n    {self.problem}\n    in the directory: {self.listing}"


@dataclass(slots=True)
class Report:
    """The results of a sweep. `capped` names each point at which not every state was tried.

    `skipped` counts the points that were left out because only a share was requested.
    """

    scenario: str
    kind: str = "points"
    points: int = 0
    skipped: int = 0
    calls: set[str] = field(default_factory=set)
    violations: list[Violation] = field(default_factory=list)
    capped: list[str] = field(default_factory=list)

    def add(self, outcome: Outcome, problem: str | None, listing: str) -> None:
        """Count one point, and keep it if it has a problem."""
        self.points += 1
        effort.tried[self.kind] += 1
        if outcome.call is not None:
            self.calls.add(outcome.call.name)
        if problem is not None:
            self.violations.append(Violation(outcome, problem, listing))

    def require_clean(self, *, at_least: int = 1) -> None:
        """Raise an AssertionError if there are violations, or if the sweep was capped or too short.

        The minimum does not apply to a sweep of a share.
        """
        if self.violations or self.capped or (self.points < at_least and not self.skipped):
            raise AssertionError(f"{self}\n(at least {at_least} points were required)")

    def __str__(self) -> str:
        skipped = f" ({self.skipped} left out)" if self.skipped else ""
        seen = f"{self.points} points{skipped}, {len(self.calls)} kinds of calls"
        capped = [f"NOT EVERYTHING WAS TRIED: {each}" for each in self.capped]
        found = f"{len(self.violations)} violations"
        return "\n  ".join([f"{self.scenario}: {seen}, {found}", *capped, *map(str, self.violations[:10])])


# --- Sweeps -----------------------------------------------------------------------------------------


def kill_points(scenario: Scenario, *, names: Sequence[str] = calls.CHANGING, share: float = 1.0) -> Report:
    """Kill the operation before, after and (for writes) halfway through each of its calls; check each time.

    With a `share` below 1, only that share of the calls is tried, chosen by `effort.SEED`.
    """
    report = Report(type(scenario).__name__, "kills at a call")
    with scratch() as base:
        for index in indexes(scenario, base, names, share, report):
            at_write = False
            for when in Kill:
                if when is Kill.HALFWAY and not at_write:
                    continue
                with fresh(base) as directory:
                    outcome = run_killed(scenario, directory, when, index, names=names)
                    problem = judge(scenario, directory, outcome)
                    report.add(outcome, problem, _listing(directory) if problem else "")
                if outcome.call is None:
                    return report
                at_write = outcome.call.name == "write"
    return report


def error_points(
    scenario: Scenario,
    errnos: Sequence[int] = ERRORS,
    *,
    lasting: Sequence[int] = LASTING_ERRORS,
    names: Sequence[str] = calls.CHANGING,
    descriptors: bool = True,
    share: float = 1.0,
) -> Report:
    """Inject faults at each call: each error once, a short write, and a permanent error. Check each time.

    `lasting` are the errors of a disk that stays full or broken: from one call on, every call that needs
    the disk fails (removals do not). A short write is not a failure: the operation must succeed.
    With `descriptors`, the operation must also close every descriptor that it opens. `share` is as in
    `kill_points`.
    """
    if not errnos:
        raise ValueError("at least one error is needed: the sweep ends at the first call that it does not hit")
    faults = [*map(Fault, errnos), SHORT_WRITE, *(Fault(code, lasting=True) for code in lasting)]
    report = Report(type(scenario).__name__, "errors at a call")
    with scratch() as base:
        for index in indexes(scenario, base, names, share, report, each=len(errnos)):
            for fault in faults:
                with fresh(base) as directory:
                    outcome = run_faulted(scenario, directory, fault, index, names=names)
                    over = outcome.call is None and fault is faults[0]
                    if over or (outcome.call is not None and outcome.call.index == index):
                        problem = judge(scenario, directory, outcome)
                        problem = problem or _broken_rule(outcome, fault, descriptors=descriptors)
                        report.add(outcome, problem, _listing(directory) if problem else "")
                if over:
                    return report
    return report


def indexes(
    scenario: Scenario, base: Path, names: Sequence[str], share: float, report: Report, *, each: int = 2
) -> Iterator[int]:
    """Yield the indexes of the calls to disturb, and one past the last call. The report counts those left out."""
    if share >= 1:
        yield from count(1)
        return
    with fresh(base) as directory:
        made = _count_calls(scenario, directory, names, report)
    selected = chosen(range(1, made + 1), share=share, salt=report.scenario)
    report.skipped = each * (made - len(selected))
    yield from selected
    yield made + 1


def _count_calls(scenario: Scenario, directory: Path, names: Sequence[str], report: Report) -> int:
    """Count the calls of the undisturbed operation, and add their names to the report."""
    scenario.prepare(directory)
    status, said = _in_a_child(scenario, directory, Kill.BEFORE, sys.maxsize, names)
    found = [message["made"] for message in said if "made" in message]
    if status or not found:
        raise RuntimeError(f"{report.scenario} failed though nothing disturbed it: {said}")
    report.calls.update(found[0])
    return len(found[0])


def judge(scenario: Scenario, directory: Path, outcome: Outcome) -> str | None:
    """Return the problem that the scenario's check reports, or None. Any exception counts as a problem."""
    try:
        scenario.check(directory, outcome)
    except Exception as error:
        first_line = str(error).partition("\n")[0]
        return f"{type(error).__name__}: {first_line}"
    return None


# --- One point --------------------------------------------------------------------------------------


def run_killed(
    scenario: Scenario, directory: Path, when: Kill, index: int, *, names: Sequence[str] = calls.CHANGING
) -> Outcome:
    """Prepare the empty `directory` and run the operation in a child that dies at its call `index`.

    If the operation makes fewer calls, it succeeds. The child must die from our signal, at our call: any
    other end is an error in the scenario, not an outcome.
    """
    if sys.platform == "win32":
        raise NotImplementedError("there is no fork on Windows")
    scenario.prepare(directory)
    status, said = _in_a_child(scenario, directory, when, index, names)
    died_at = [Call(*each["call"]) for each in said if "call" in each]
    marks = tuple(each["mark"] for each in said if "mark" in each)
    if status == -signal.SIGKILL and died_at:
        return Outcome(Ending.KILLED, when.value, died_at[0], marks=marks)
    if status == 0 and not died_at:
        return Outcome(Ending.SUCCEEDED, marks=marks, acknowledged=True)
    raise RuntimeError(f"the child should have been {when.value} call {index}, but it ended with {status}: {said}")


def _in_a_child(
    scenario: Scenario, directory: Path, when: Kill, index: int, names: Sequence[str]
) -> tuple[int, list[dict[str, Any]]]:
    """Run the operation in a child that dies at its call `index`; return its exit status and its report."""
    if sys.platform == "win32":
        raise NotImplementedError("there is no fork on Windows")
    reader, writer = os.pipe()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # forking with threads is safe here: the child only dies
        child = os.fork()
    if child == 0:
        _operate_and_die(scenario, directory, when, index, names, writer)
    os.close(writer)
    with os.fdopen(reader, encoding="utf-8") as messages:
        said = [json.loads(line) for line in messages]
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), said


def run_faulted(
    scenario: Scenario, directory: Path, fault: Fault, index: int, *, names: Sequence[str] = calls.CHANGING
) -> Outcome:
    """Prepare the empty `directory` and run the operation here, with `fault` at its call `index`.

    The call of the outcome is the first one that the fault hit, or None.
    """
    scenario.prepare(directory)
    fate = Faulty(fault, index)
    marks: list[str] = []
    error: Exception | None = None
    with interposed(fate, names), listening(marks.append):
        try:
            scenario.operate(directory)
        except Exception as raised:
            error = raised
        if fate.opened:
            gc.collect()  # a context manager that failed in __exit__ may survive in a reference cycle
    if error is not None and fate.struck is None:
        raise RuntimeError(f"{type(scenario).__name__} failed though nothing disturbed it") from error
    ending = Ending.SUCCEEDED if error is None else Ending.FAILED
    done = "undisturbed" if fate.struck is None else str(fault)
    left_open = tuple(fate.opened.values())
    return Outcome(ending, done, fate.struck, error, tuple(marks), error is None, left_open)


def cut_short(
    operation: Callable[[], object], when: Kill, index: int, *, names: Sequence[str] = calls.CHANGING
) -> Call | None:
    """Run `operation` in this process as if it were killed at its call `index`; return that call.

    Later calls have no effect, not even those of its cleanup, and all its descriptors are closed. Returns None
    if the operation finished first. This is for scenarios that continue after the death of a process.
    """
    fate = Deadly(when, index, raise_death)
    with _opened_directories() as directories:
        try:
            with interposed(fate, names), _recording_directories(fate, names), _silent_finalisers():
                operation()
        except BaseException as end:  # keeps the operation's objects alive: none has closed its descriptor yet
            _disown(fate.close_all(), directories)
            if not isinstance(end, Death):
                raise
        else:
            _disown(fate.close_all(), directories)
    return fate.struck


@contextmanager
def _recording_directories(fate: Fate, names: Sequence[str]) -> Iterator[None]:
    """Record what is opened by a call that is no point of death: a dead operation cannot close it either."""

    def record(attempt: Attempt) -> Any:
        descriptor = attempt.perform()
        fate.opened[descriptor] = attempt.numbered(fate.count)
        return descriptor

    with interposed(record, ["open_without_links"] if "close" in names else []):
        yield


@contextmanager
def _opened_directories() -> Iterator[list[Directory]]:
    """Collect the directories that are opened inside the block."""
    opened: list[Directory] = []
    before, directories_opened.witness = directories_opened.witness, opened.append
    try:
        yield opened
    finally:
        directories_opened.witness = before


@contextmanager
def _silent_finalisers() -> Iterator[None]:
    """Keep Python from reporting finalisers that `Death` ends: they are meant to end that way."""
    report = sys.unraisablehook
    sys.unraisablehook = lambda seen: None if isinstance(seen.exc_value, Death) else report(seen)
    try:
        yield
    finally:
        sys.unraisablehook = report


def _disown(closed: Sequence[int], directories: Sequence[Directory]) -> None:
    """Keep the dead operation's objects from closing these descriptors again: the numbers may be reused by then."""
    for each in directories:
        if each.fd in closed:
            each.fd = -1
    for description in list(_descriptions):
        if description.fd in closed:
            description.fd = -1
            description.owner = None


def _operate_and_die(
    scenario: Scenario, directory: Path, when: Kill, index: int, names: Sequence[str], writer: int
) -> NoReturn:
    """Act as the child: report to the parent, and never return to the caller."""
    if sys.platform == "win32":
        raise NotImplementedError("there is no fork on Windows")

    def say(**message: object) -> None:
        os.write(writer, json.dumps(message).encode() + b"\n")

    def die(call: Call) -> NoReturn:
        say(call=[call.index, call.name, call.arguments])
        while True:
            os.kill(os.getpid(), signal.SIGKILL)

    status = 1
    try:
        signal.signal(signal.SIGALRM, signal.SIG_DFL)
        signal.alarm(_TIMEOUT)
        fate = Deadly(when, index, die)
        with interposed(fate, names), listening(lambda label: say(mark=label)):
            scenario.operate(directory)
        say(made=fate.made)
        status = 0
    except BaseException:
        say(error=traceback.format_exc())
    finally:
        os._exit(status)


def _broken_rule(outcome: Outcome, fault: Fault, *, descriptors: bool) -> str | None:
    """Return the rule that the operation broke, of those that hold for every scenario, or None."""
    if fault is SHORT_WRITE and outcome.ending is Ending.FAILED:
        return "a short write is not an error, but the operation failed"
    if descriptors and outcome.left_open:
        return "never closed: " + "; ".join(map(str, outcome.left_open))
    return None


# --- Directories ------------------------------------------------------------------------------------


@contextmanager
def scratch() -> Iterator[Path]:
    """A private directory, in memory if the system supports that."""
    memory = "/dev/shm" if os.access("/dev/shm", os.W_OK) else None
    with tempfile.TemporaryDirectory(prefix="holdfast-", dir=memory) as base:
        yield Path(base)


@contextmanager
def fresh(base: Path) -> Iterator[Path]:
    """An empty directory below `base`: always the same path, so that paths stored in files stay valid."""
    directory = base / "state"
    directory.mkdir()
    try:
        yield directory
    finally:
        shutil.rmtree(directory)


def _listing(directory: Path) -> str:
    lines = []
    for path in sorted(directory.rglob("*")):
        plain = path.is_file() and not path.is_symlink()
        lines.append(f"{path.relative_to(directory)}{'=' + shown(path.read_bytes()) if plain else '/'}")
    return ", ".join(lines) or "(empty)"
