"""The durable functions under a kill, an error or a power cut at every call they make."""

from __future__ import annotations

import errno
import os
import sys
from collections.abc import Callable
from contextlib import suppress
from itertools import count
from pathlib import Path
from typing import Any

import pytest

from holdfast.errors import AlreadyExists, Failure, NotDurable
from holdfast.fs import calls, durable
from holdfast.fs.directory import Directory
from proof.crash import Attempt, Ending, Kill, Outcome, cut_short, error_points, interposed, kill_points
from proof.effort import SHARE
from proof.powercut import mark, power_cuts, redundant_syncs

OLD = b"first line\nsecond line\n"
NEW = b"third line\nfourth line, longer than the others\n"
TORN = b"a line without an e"
LINE = b"the line that is added"
NEXT = b"the line after that"

pytestmark = pytest.mark.skipif(sys.platform == "win32", reason="needs fork and syncable directories")


# --- Operations under test ---------------------------------------------------------------------------


def append(path: Path, record: bytes) -> durable.Appended:
    with Directory.open(path.parent) as directory:
        return durable.append_in(directory, path.name, record)


class Case:
    """A durable function applied to a file that holds `old` before and `new` after it (None: no file)."""

    def __init__(self, act: Callable[[Path], object], old: bytes | None, new: bytes | None) -> None:
        self.act = act
        self.old = old
        self.new = new
        self.descriptors = 0

    def prepare(self, directory: Path) -> None:
        (directory / "other").write_bytes(OLD)
        if self.old is not None:
            (directory / "file").write_bytes(self.old)
        self.descriptors = descriptors()

    def operate(self, directory: Path) -> None:
        self.act(directory / "file")

    def check(self, directory: Path, outcome: Outcome) -> None:
        self.check_content(content(directory / "file"), outcome)
        assert content(directory / "other") == OLD, "an unrelated file was changed"
        if outcome.ending in (Ending.FAILED, Ending.SUCCEEDED):
            self.check_conduct(directory, outcome)
        else:
            self.check_next(directory)

    def check_content(self, found: bytes | None, outcome: Outcome) -> None:
        """The new state if acknowledged, the old one if failed, otherwise either."""
        if outcome.acknowledged:
            assert self.visible(found) == self.visible(self.new), f"acknowledged, but the file holds {found!r}"
        elif outcome.ending is Ending.FAILED and not isinstance(outcome.error, NotDurable):
            assert self.visible(found) == self.visible(self.old), f"failed, but the file holds {found!r}"
        else:
            assert self.visible(found) in map(self.visible, (self.old, self.new)), f"the file holds {found!r}"

    def visible(self, found: bytes | None) -> bytes | None:
        """The part of the content that readers consider."""
        return found

    def check_conduct(self, directory: Path, outcome: Outcome) -> None:
        """An operation that returns has cleaned up, and raises only our own failures."""
        assert outcome.error is None or isinstance(outcome.error, Failure), f"raised {outcome.error!r}"
        # Fewer are fine: the garbage collector closes what other tests have left open.
        assert descriptors() <= self.descriptors, "a descriptor was leaked"
        if outcome.call is None or outcome.call.name != "unlink":  # a draft that cannot be removed stays
            litter = {each.name for each in directory.iterdir()} - {"file", "other"}
            assert not litter, f"left {litter}"

    def check_next(self, directory: Path) -> None:
        """After a kill or a power cut the same operation can be repeated."""
        self.operate(directory)
        found = content(directory / "file")
        assert found == self.new, f"repeated, but the file holds {found!r}"


class Append(Case):
    """Judged by whole lines: bytes after the last newline do not count."""

    def __init__(self, old: bytes | None) -> None:
        super().__init__(lambda path: append(path, LINE), old, whole_lines(old) + LINE + b"\n")

    def visible(self, found: bytes | None) -> bytes | None:
        return whole_lines(found)

    def check_next(self, directory: Path) -> None:
        """The next append cuts off a torn line, returns it, and adds its own line to the others."""
        found = content(directory / "file") or b""
        lines = whole_lines(found)
        assert append(directory / "file", NEXT) == (len(lines), found[len(lines) :])
        assert content(directory / "file") == lines + NEXT + b"\n"


def content(path: Path) -> bytes | None:
    return path.read_bytes() if path.exists() else None


def whole_lines(found: bytes | None) -> bytes:
    return b"" if found is None else found[: found.rfind(b"\n") + 1]


def descriptors() -> int:
    return len(os.listdir("/dev/fd"))


def create(path: Path) -> None:
    with suppress(AlreadyExists):
        durable.create(path, NEW)


def create_here(path: Path) -> None:
    with Directory.open(path.parent) as directory, suppress(AlreadyExists):
        durable.create_in(directory, path.name, NEW, mode=0o600)


def create_without_links(path: Path) -> None:
    def refuse(attempt: Attempt) -> None:
        raise OSError(errno.EPERM, "this file system has no links")

    with interposed(refuse, ("link",)):
        create(path)


def create_for_now(path: Path) -> None:
    with Directory.open(path.parent) as directory, suppress(AlreadyExists):
        durable.create_in(directory, path.name, NEW, durable=False)


def replace(path: Path) -> None:
    durable.replace(path, NEW)


DURABLE = {
    "create": Case(create, None, NEW),
    "create in a directory": Case(create_here, None, NEW),
    "create without links": Case(create_without_links, None, NEW),
    "create what is there": Case(create, OLD, OLD),
    "replace": Case(replace, OLD, NEW),
    "replace what is not there": Case(replace, None, NEW),
    "append": Append(OLD),
    "append to nothing": Append(None),
    "append to a torn line": Append(OLD + TORN),
    "append to only a torn line": Append(TORN),
    "remove": Case(durable.remove, OLD, None),
    "remove what is not there": Case(durable.remove, None, None),
}
VOLATILE = {"create for now": Case(create_for_now, None, NEW)}

durable_cases = pytest.mark.parametrize("case", DURABLE.values(), ids=DURABLE)
all_cases = pytest.mark.parametrize("case", [*DURABLE.values(), *VOLATILE.values()], ids=[*DURABLE, *VOLATILE])


# --- The sweeps --------------------------------------------------------------------------------------


@all_cases
@pytest.mark.sampled(3)
def test_a_kill_at_any_call_leaves_the_old_state_or_the_new(case: Case) -> None:
    kill_points(case, share=SHARE).require_clean(at_least=7)


@all_cases
def test_an_error_at_any_call_is_a_failure_that_leaves_the_old_state_and_no_litter(case: Case) -> None:
    report = error_points(case, names=calls.CHANGING + calls.READING, share=SHARE)
    report.require_clean(at_least=13)


@durable_cases
def test_a_power_cut_at_any_moment_leaves_the_old_state_or_the_new(case: Case) -> None:
    power_cuts(case, share=SHARE).require_clean(at_least=2)


@pytest.mark.long
def test_the_sweeps_still_cover_as_many_points() -> None:
    """A sweep that finds nothing because it tries nothing would fail here."""
    assert sum(power_cuts(case).points for case in DURABLE.values()) >= 60
    assert sum(error_points(case).points for case in DURABLE.values()) >= 380
    assert sum(kill_points(case).points for case in DURABLE.values()) >= 160


# --- Two processes, one after the other --------------------------------------------------------------


class AfterADeath:
    """One process dies at one call of its operation; another then completes its own.

    The acknowledged result of the second must survive a power cut, even if the first left changes unsynced.
    """

    def __init__(self, case: Case, when: Kill, index: int) -> None:
        self.case = case
        self.when = when
        self.index = index
        self.died = False

    def prepare(self, directory: Path) -> None:
        self.case.prepare(directory)

    def operate(self, directory: Path) -> None:
        first = cut_short(lambda: self.case.operate(directory), self.when, self.index)
        self.died = first is not None
        mark("died")
        self.second(directory)

    def second(self, directory: Path) -> None:
        self.case.operate(directory)

    def check(self, directory: Path, outcome: Outcome) -> None:
        self.case.check_content(content(directory / "file"), outcome)
        self.case.check_next(directory)


class AppendAfterADeath(AfterADeath):
    def second(self, directory: Path) -> None:
        append(directory / "file", NEXT)

    def check(self, directory: Path, outcome: Outcome) -> None:
        found = whole_lines(content(directory / "file"))
        old = whole_lines(self.case.old)
        first, second = LINE + b"\n", NEXT + b"\n"
        if outcome.acknowledged:
            assert found in (old + second, old + first + second), f"the file holds {found!r}"
        else:
            assert found in (old, old + first, old + second, old + first + second), f"the file holds {found!r}"
        self.case.check_next(directory)


def sweep_after_deaths(case: Case, kind: type[AfterADeath]) -> int:
    """Kill the first process at each of its calls, cut the power at each moment after; count the states."""
    states = 0
    for index in count(1):
        for when in Kill:
            scenario = kind(case, when, index)
            report = power_cuts(scenario)
            report.require_clean()
            states += report.points
            if not scenario.died:
                return states
    raise AssertionError("never reached")


@pytest.mark.parametrize("old", [None, OLD, OLD + TORN, TORN], ids=["nothing", "lines", "torn", "only torn"])
def test_a_completed_append_survives_the_death_of_an_earlier_one(old: bytes | None) -> None:
    assert sweep_after_deaths(Append(old), AppendAfterADeath) >= 100


@pytest.mark.parametrize("name", ["replace", "replace what is not there", "remove"])
def test_a_completed_operation_survives_the_death_of_an_earlier_one(name: str) -> None:
    assert sweep_after_deaths(DURABLE[name], AfterADeath) >= 40


# --- The sweeps find planted bugs --------------------------------------------------------------------


@durable_cases
def test_every_sync_is_needed(case: Case, request: pytest.FixtureRequest) -> None:
    """Leave out each sync in turn: a power cut reveals it, except where the case does not need it."""
    spare = {
        "create what is there": ["fsync"],  # of a draft that is then discarded
        "append to only a torn line": ["sync_directory"],  # of a name that was already durable
        "remove what is not there": ["sync_directory"],  # for a process that died before its sync; there is none here
    }
    found = {call.name for call in redundant_syncs(case)}
    assert found <= set(spare.get(request.node.callspec.id, []))


def lying(act: Callable[[Path], object], *names: str) -> Callable[[Path], None]:
    """The same operation on a system whose syncs do nothing."""

    def operate(path: Path) -> None:
        with interposed(lambda _: None, names):
            act(path)

    return operate


@pytest.mark.parametrize(
    ("name", "left_out"),
    [
        ("create", "fsync"),
        ("create", "sync_directory"),
        ("replace", "fsync"),
        ("replace", "sync_directory"),
        ("append to nothing", "fsync"),
        ("append to nothing", "sync_directory"),
        ("remove", "sync_directory"),
    ],
)
def test_a_function_without_its_syncs_is_found(name: str, left_out: str, monkeypatch: pytest.MonkeyPatch) -> None:
    case = DURABLE[name]
    monkeypatch.setattr(case, "act", lying(case.act, left_out))
    found = power_cuts(case).violations
    assert any(each.problem.startswith("AssertionError: acknowledged, but") for each in found)


def write_in_place(path: Path) -> None:
    with Directory.open(path.parent) as directory:
        fd = calls.open(path.name, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o666, dir_fd=directory.fd)
        try:
            calls.write(fd, NEW)
            calls.fsync(fd)
        finally:
            calls.close(fd)
        directory.sync()


def test_a_replacement_in_place_is_found_by_every_sweep() -> None:
    case = Case(write_in_place, OLD, NEW)
    assert any("holds b''" in each.problem for each in kill_points(case).violations)
    assert any("failed, but" in each.problem for each in error_points(case).violations)
    assert any("holds b''" in each.problem for each in power_cuts(case).violations)


def test_an_append_that_keeps_a_torn_line_is_found() -> None:
    def append(path: Path) -> None:
        fd = calls.open(path, os.O_WRONLY | os.O_APPEND)
        calls.write(fd, LINE + b"\n")
        calls.fsync(fd)
        calls.close(fd)

    case = Append(OLD + TORN)
    case.act = append
    assert kill_points(case).violations


NOATIME = getattr(os, "O_NOATIME", 0)


@pytest.mark.skipif(not NOATIME, reason="only Linux has O_NOATIME")
def test_a_file_of_another_owner_is_still_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Only the owner may open a file with O_NOATIME."""
    (tmp_path / "theirs").write_bytes(b"content")
    open_file = calls.open

    def denied(path: Any, flags: int, *arguments: Any, **rest: Any) -> int:
        if flags & NOATIME:
            raise PermissionError(errno.EPERM, os.strerror(errno.EPERM))
        return open_file(path, flags, *arguments, **rest)

    monkeypatch.setattr(calls, "open", denied)
    assert durable.read(tmp_path / "theirs") == b"content"
