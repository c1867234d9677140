"""Power cuts: records an operation once, then checks every state that a power cut may leave at any point of it.

The operation of a `Scenario` runs once, for real, and its calls are recorded. Then, for a cut after each call,
every state that may be on the disk is built and checked. The rules are what POSIX promises, not what one file
system happens to do:

1. Everything that existed before the operation is on the disk.
2. The content of a file is on the disk as of its last fsync. Of later writes and truncations, any prefix may be on
   the disk too, down to half of one write. So a new file may be empty.
3. A change of names is on the disk once a directory that it touches was synced. Of the other changes, any subset
   may be on the disk, as far as each is possible after the earlier ones.
4. A rename is one change, both halves or neither, even between two directories.
5. A name that is on the disk has its inode, even if the name it was created under is not.

Syncing a file does not sync its name. Not modelled: writes to one file that overtake each other, and file systems
that show zeros or old blocks where content did not arrive.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path

from proof.crash import (
    Call,
    Ending,
    Outcome,
    Report,
    Scenario,
    fresh,
    interposed,
    judge,
    listening,
    mark,
    scratch,
)
from proof.disk import LIMIT, Disk, Mark, State, Sync, Trace, build, describe
from proof.effort import sometimes
from proof.recorder import Recorder, verify

__all__ = [
    "Case",
    "Disk",
    "State",
    "Sync",
    "Trace",
    "build",
    "mark",
    "power_cuts",
    "record",
    "redundant_syncs",
]


Case = tuple[tuple[str, ...], bool, State]
"""The promises made (marks, and whether the operation had returned), and the state that is left."""


def power_cuts(
    scenario: Scenario,
    *,
    limit: int = LIMIT,
    checked: set[Case] | None = None,
    since_mark: bool = False,
    share: float = 1.0,
    in_order: bool = False,
    enough: int | None = None,
) -> Report:
    """Record the operation once, then check every state that a power cut after any of its calls may leave.

    The points of the report are the distinct states. A state that several cuts may leave is checked
    once for each set of promises. Sweeps that share `checked` do not repeat each other's checks.
    With `since_mark`, only the cuts after the first `mark` are tried: the part before it is swept elsewhere.
    With `in_order`, instead of rule 3, a sync of a directory puts all changes of names so far on the disk, and of the
    later ones the first ones may be there too: for code that relies on that. With a `share` below 1, only that share of
    the states is checked, chosen by `effort.SEED`. After `enough` violations, the rest is left out.
    """
    with _recorded(scenario) as (trace, base):
        cuts = _cuts(trace, limit, in_order)
        chosen = (cut for cut in cuts if cut[0].marks) if since_mark else cuts
        return _explore(
            trace, chosen, scenario, base, set() if checked is None else checked, share=share, enough=enough
        )


def redundant_syncs(scenario: Scenario, *, limit: int = LIMIT) -> list[Call]:
    """The syncs that the operation could do without, as far as the check of the scenario can tell.

    Each is either superfluous, or serves a promise that the check does not test.
    """
    with _recorded(scenario) as (trace, base):
        syncs = [(step, step.call) for step in trace.steps if isinstance(step.event, Sync) and step.call]
        return [call for step, call in syncs if _unharmed(trace.without(step), scenario, base, limit)]


def record(scenario: Scenario, directory: Path) -> Trace:
    """Prepare the empty `directory`, run the operation there and record its events."""
    scenario.prepare(directory)
    recorder = Recorder(directory)
    with interposed(recorder), listening(recorder.mark):
        scenario.operate(directory)
    recorder.mark(None)
    trace = recorder.trace()
    verify(trace, directory)
    return trace


@contextmanager
def _recorded(scenario: Scenario) -> Iterator[tuple[Trace, Path]]:
    with scratch() as base:
        with fresh(base) as directory:
            trace = record(scenario, directory)
        yield trace, base


def _unharmed(trace: Trace, scenario: Scenario, base: Path, limit: int) -> bool:
    report = _explore(trace, _cuts(trace, limit, in_order=False), scenario, base, set(), enough=1)
    if report.capped and not report.violations:
        raise RuntimeError(f"cannot tell without trying everything: {report}")
    return not report.violations


def _explore(
    trace: Trace,
    cuts: Iterable[tuple[Outcome, Disk]],
    scenario: Scenario,
    base: Path,
    checked: set[Case],
    *,
    enough: int | None = None,
    share: float = 1.0,
) -> Report:
    """Check the states of these cuts that have not been checked yet; stop after `enough` violations."""
    report = Report(type(scenario).__name__, "states after a power cut")
    report.calls.update(step.call.name for step in trace.steps if step.call is not None)
    for number, (outcome, disk) in enumerate(cuts):
        for state, is_chosen in sometimes(disk.states(), share=share, salt=f"{report.scenario} {number}"):
            case = (outcome.marks, outcome.acknowledged, state)
            if case in checked:
                continue
            checked.add(case)
            if not is_chosen:
                report.skipped += 1
                continue
            with fresh(base) as directory:
                build(state, directory)
                problem = judge(scenario, directory, outcome)
            report.add(outcome, problem, describe(state) if problem else "")
            if len(report.violations) == enough:
                return report
        if disk.capped:
            report.capped.append(f"{outcome}: {disk.capped}")
    return report


def _cuts(trace: Trace, limit: int, in_order: bool) -> Iterator[tuple[Outcome, Disk]]:
    """Each point at which the power may be cut, with the disk at that point."""
    disk = Disk(trace, limit, in_order=in_order)
    marks: tuple[str, ...] = ()
    yield Outcome(Ending.POWER_CUT, "power cut before the first call"), disk
    for event, call in trace.steps:
        disk.take(event)
        acknowledged = event == Mark(None)
        if isinstance(event, Mark) and event.label is not None:
            marks += (event.label,)
        what = "returned, then power cut; the last was" if acknowledged else "power cut after"
        yield Outcome(Ending.POWER_CUT, what, call, None, marks, acknowledged), disk
