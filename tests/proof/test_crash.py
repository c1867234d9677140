"""The sweeps find the planted bugs, and report nothing for correct code."""

from __future__ import annotations

import errno
import gc
import os
import sys
from pathlib import Path

import pytest

from holdfast.fs import calls
from holdfast.fs.directory import Directory
from holdfast.locks.file_lock import FileLocker
from proof.crash import (
    SHORT_WRITE,
    Attempt,
    Ending,
    Fault,
    Kill,
    Outcome,
    Report,
    cut_short,
    error_points,
    interposed,
    kill_points,
    mark,
    run_faulted,
    run_killed,
)
from tests.support.descriptors import open_descriptors

OLD = b"the old content\n"
NEW = b"the new content, which is longer\n"

needs_fork = pytest.mark.skipif(sys.platform == "win32", reason="there is no fork on Windows")


def write_all(fd: int, content: bytes) -> None:
    while content:
        content = content[calls.write(fd, content) :]


class Correct:
    """Replaces a file correctly; each subclass has one planted bug."""

    old: bytes | None = OLD

    def prepare(self, directory: Path) -> None:
        if self.old is not None:
            (directory / "file").write_bytes(self.old)

    def operate(self, directory: Path) -> None:
        draft = directory / "draft"
        fd = calls.open(draft, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o666)
        try:
            try:
                self.fill(fd)
            finally:
                calls.close(fd)
            calls.replace(draft, directory / "file")
        except BaseException:
            calls.unlink(draft)
            raise

    def fill(self, fd: int) -> None:
        write_all(fd, NEW)
        calls.fsync(fd)

    def check(self, directory: Path, outcome: Outcome) -> None:
        file = directory / "file"
        content = file.read_bytes() if file.exists() else None
        allowed = (NEW,) if outcome.acknowledged else (self.old, NEW)
        assert content in allowed, f"the file holds {content!r}"
        if outcome.ending is Ending.FAILED:
            assert not (directory / "draft").exists(), "a draft was left"


class InPlace(Correct):
    def operate(self, directory: Path) -> None:
        fd = calls.open(directory / "file", os.O_WRONLY | os.O_TRUNC)
        try:
            self.fill(fd)
        finally:
            calls.close(fd)


class CreateThenWrite(Correct):
    old = None

    def operate(self, directory: Path) -> None:
        fd = calls.open(directory / "file", os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o666)
        try:
            self.fill(fd)
        except BaseException:
            calls.unlink(directory / "file")
            raise
        finally:
            calls.close(fd)


class IgnoresShortWrite(Correct):
    def fill(self, fd: int) -> None:
        calls.write(fd, NEW)
        calls.fsync(fd)


class FailsOnShortWrite(Correct):
    def fill(self, fd: int) -> None:
        if calls.write(fd, NEW) != len(NEW):
            raise OSError(errno.EIO, "short write")
        calls.fsync(fd)


class SwallowsFullDisk(Correct):
    def operate(self, directory: Path) -> None:
        try:
            super().operate(directory)
        except OSError as error:
            if error.errno != errno.ENOSPC:
                raise


class LeaksDescriptor(Correct):
    leaked = -1

    def operate(self, directory: Path) -> None:
        self.leaked = calls.open(directory / "file", os.O_RDONLY)
        super().operate(directory)
        calls.close(self.leaked)

    def check(self, directory: Path, outcome: Outcome) -> None:
        for _ in outcome.left_open:
            os.close(self.leaked)  # the test itself must not leak


class LeavesDraft(Correct):
    def operate(self, directory: Path) -> None:
        fd = calls.open(directory / "draft", os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o666)
        try:
            self.fill(fd)
        finally:
            calls.close(fd)
        calls.replace(directory / "draft", directory / "file")


class RepairsByWriting(InPlace):
    """Puts the old content back after an error, which fails on a disk that stays full."""

    def operate(self, directory: Path) -> None:
        fd = calls.open(directory / "file", os.O_WRONLY)
        try:
            self.fill(fd)
        except OSError:
            calls.ftruncate(fd, 0)
            os.lseek(fd, 0, os.SEEK_SET)
            write_all(fd, OLD)
            raise
        finally:
            calls.close(fd)


def problems(report: Report) -> str:
    return "\n".join(str(each) for each in report.violations)


# --- Kills ------------------------------------------------------------------------------------------


@needs_fork
def test_a_correct_replacement_survives_a_kill_at_every_point() -> None:
    report = kill_points(Correct())
    report.require_clean(at_least=12)
    assert report.calls == {"open", "write", "fsync", "close", "replace"}
    assert report.points == 2 * 5 + 1 + 1, "before and after five calls, halfway through one, and to the end"


@needs_fork
@pytest.mark.parametrize(
    ("bug", "symptom"),
    [(InPlace, "killed before call 2, write"), (CreateThenWrite, "killed after call 1, open")],
)
def test_a_kill_finds_content_that_is_written_under_its_final_name(bug: type[Correct], symptom: str) -> None:
    found = problems(kill_points(bug()))
    assert symptom in found
    assert "killed halfway through call 2, write" in found
    assert f"file={NEW[: len(NEW) // 2]!r}" in found, "the violation shows the content of the directory"


@needs_fork
def test_one_point_can_be_repeated_and_inspected(tmp_path: Path) -> None:
    outcome = run_killed(InPlace(), tmp_path, Kill.HALFWAY, 2)
    assert outcome.ending is Ending.KILLED
    assert outcome.call is not None
    assert (outcome.call.index, outcome.call.name) == (2, "write")
    assert (tmp_path / "file").read_bytes() == NEW[: len(NEW) // 2]


@needs_fork
def test_the_marks_of_a_killed_child_are_reported() -> None:
    seen: set[tuple[str, ...]] = set()

    class Marked(Correct):
        def fill(self, fd: int) -> None:
            super().fill(fd)
            mark("synced")

        def check(self, directory: Path, outcome: Outcome) -> None:
            seen.add(outcome.marks)

    kill_points(Marked())
    assert seen == {(), ("synced",)}


@needs_fork
def test_a_child_that_ends_in_another_way_does_not_count_as_killed() -> None:
    class Exits(Correct):
        def fill(self, fd: int) -> None:
            os._exit(3)

    class Raises(Correct):
        def fill(self, fd: int) -> None:
            raise ValueError("by itself")

    with pytest.raises(RuntimeError, match="ended with 3"):
        kill_points(Exits())
    with pytest.raises(RuntimeError, match=r"ended with 1.*by itself"):
        kill_points(Raises())


@needs_fork
def test_a_sigkill_from_elsewhere_is_not_mistaken_for_ours() -> None:
    class KillsItself(Correct):
        def fill(self, fd: int) -> None:
            if sys.platform != "win32":
                import signal

                os.kill(os.getpid(), signal.SIGKILL)

    with pytest.raises(RuntimeError, match="ended with -9"):
        kill_points(KillsItself())


# --- Errors -----------------------------------------------------------------------------------------


def test_a_correct_replacement_survives_every_error() -> None:
    report = error_points(Correct())
    report.require_clean(at_least=28)
    assert report.calls == {"open", "write", "fsync", "close", "replace"}


@pytest.mark.parametrize(
    ("bug", "symptom", "problem"),
    [
        (IgnoresShortWrite, "short write at call 2", "the file holds b'the new content"),
        (FailsOnShortWrite, "short write at call 2", "a short write is not an error"),
        (SwallowsFullDisk, "ENOSPC at call 2", "the file holds b'the old content"),
        pytest.param(LeaksDescriptor, "EIO at call 3", "never closed: call 1, open", marks=pytest.mark.long),
        (LeavesDraft, "EDQUOT at call 2", "a draft was left"),
        (InPlace, "EIO at call 2", "the file holds b''"),
        (RepairsByWriting, "ENOSPC from call 2", "the file holds b''"),
    ],
)
@pytest.mark.sampled(1)
def test_an_injected_error_finds_the_planted_bug(bug: type[Correct], symptom: str, problem: str) -> None:
    found = [each for each in error_points(bug()).violations if symptom in str(each.outcome)]
    assert found
    assert problem in found[0].problem


def test_a_single_error_misses_a_bug_that_only_a_broken_disk_shows() -> None:
    found = error_points(RepairsByWriting()).violations
    assert found
    assert all(" from call" in str(each.outcome) for each in found)


def test_a_failed_close_still_closes_the_descriptor(tmp_path: Path) -> None:
    closed: list[int] = []

    class Closes(Correct):
        def operate(self, directory: Path) -> None:
            fd = calls.open(directory / "file", os.O_RDONLY)
            closed.append(fd)
            calls.close(fd)

    outcome = run_faulted(Closes(), tmp_path, Fault(errno.EIO), 2)
    assert isinstance(outcome.error, OSError)
    assert outcome.left_open == ()
    with pytest.raises(OSError, match="Bad file descriptor"):
        os.fstat(closed[0])


def test_flock_interruptible_returns_the_injected_error(tmp_path: Path) -> None:
    returned: list[int] = []

    class Locks(Correct):
        def operate(self, directory: Path) -> None:
            returned.append(calls.flock_interruptible(-1, 0))

    outcome = run_faulted(Locks(), tmp_path, Fault(errno.EINTR), 1)
    assert outcome.ending is Ending.SUCCEEDED
    assert returned == [errno.EINTR]


def test_reads_can_fail_too() -> None:
    class Reads(Correct):
        def fill(self, fd: int) -> None:
            calls.fstat(fd)
            super().fill(fd)

    report = error_points(Reads(), (errno.EIO,), names=calls.CHANGING + calls.READING)
    report.require_clean()
    assert "fstat" in report.calls
    assert "fstat" not in error_points(Reads(), (errno.EIO,)).calls


def test_an_operation_that_fails_undisturbed_is_a_broken_scenario() -> None:
    class Broken(Correct):
        def operate(self, directory: Path) -> None:
            raise ValueError("by itself")

    with pytest.raises(RuntimeError, match="though nothing disturbed it"):
        error_points(Broken())


def test_an_error_sweep_without_errors_is_refused() -> None:
    with pytest.raises(ValueError, match="at least one error"):
        error_points(Correct(), ())


def test_any_exception_in_a_check_is_a_violation() -> None:
    class Unreadable(Correct):
        def check(self, directory: Path, outcome: Outcome) -> None:
            (directory / "not there").read_bytes()

    assert "FileNotFoundError" in error_points(Unreadable(), (errno.EIO,)).violations[0].problem


def test_a_report_with_too_few_points_is_not_clean() -> None:
    report = error_points(Correct(), (errno.EIO,))
    with pytest.raises(AssertionError, match="at least 1000 points"):
        report.require_clean(at_least=1000)


# --- Deaths in this process, and interposition ------------------------------------------------------


@pytest.mark.parametrize(
    ("when", "index", "left"),
    [
        (Kill.BEFORE, 1, {"file": OLD}),
        (Kill.AFTER, 1, {"file": OLD, "draft": b""}),
        (Kill.HALFWAY, 2, {"file": OLD, "draft": NEW[: len(NEW) // 2]}),
        (Kill.BEFORE, 5, {"file": OLD, "draft": NEW}),
        (Kill.AFTER, 5, {"file": NEW}),
    ],
)
def test_an_operation_that_is_cut_short_leaves_the_same_state_as_a_killed_one(
    tmp_path: Path, when: Kill, index: int, left: dict[str, bytes]
) -> None:
    scenario = Correct()
    scenario.prepare(tmp_path)
    call = cut_short(lambda: scenario.operate(tmp_path), when, index)
    assert call is not None
    assert call.index == index
    assert {each.name: each.read_bytes() for each in tmp_path.iterdir()} == left


def test_an_operation_that_finishes_before_the_cut_is_complete(tmp_path: Path) -> None:
    assert cut_short(lambda: Correct().operate(tmp_path), Kill.BEFORE, 6) is None
    assert (tmp_path / "file").read_bytes() == NEW


@pytest.mark.skipif(not Path("/proc/self/fd").exists(), reason="counts descriptors in /proc")
def test_the_descriptors_of_a_dead_operation_are_closed(tmp_path: Path) -> None:
    before = open_descriptors()
    for index in range(1, 6):
        for when in Kill:
            (tmp_path / "draft").unlink(missing_ok=True)
            assert cut_short(lambda: Correct().operate(tmp_path), when, index)
    assert open_descriptors() - before == set()


@pytest.mark.skipif(not Path("/proc/self/fd").exists(), reason="counts descriptors in /proc")
def test_a_directory_that_a_dead_operation_had_open_is_closed(tmp_path: Path) -> None:
    def operate() -> None:
        with Directory.open(tmp_path) as opened:
            calls.mkdir("below", dir_fd=opened.fd)

    before = open_descriptors()
    assert cut_short(operate, Kill.BEFORE, 1)
    assert open_descriptors() - before == set()


@pytest.mark.long
@needs_fork
def test_a_dead_operation_holds_no_lock_and_closes_no_descriptor_twice(tmp_path: Path) -> None:
    """A lock closes its descriptor when it is finalised: by then another file may have the same number."""
    path = tmp_path / "lock"
    path.touch()
    for index in range(1, 5):
        for when in (Kill.BEFORE, Kill.AFTER):
            dead = FileLocker(0)
            cut_short(lambda locker=dead: locker.lock_exclusive(path).release(), when, index)  # type: ignore[misc]
            with path.open("rb") as mine, FileLocker(0).lock_exclusive(path):
                del dead
                gc.collect()
                os.fstat(mine.fileno())


def test_existing_files_can_be_opened_on_a_full_disk(tmp_path: Path) -> None:
    class Reopens(Correct):
        def operate(self, directory: Path) -> None:
            calls.close(calls.open(directory / "file", os.O_RDWR | os.O_CREAT, 0o666))

    assert run_faulted(Reopens(), tmp_path, Fault(errno.ENOSPC, lasting=True), 1).call is None
    (tmp_path / "file").unlink()
    Reopens.old = None
    struck = run_faulted(Reopens(), tmp_path, Fault(errno.ENOSPC, lasting=True), 1).call
    assert struck is not None
    assert struck.name == "open"


def test_the_calls_are_restored_even_after_an_exception() -> None:
    before = {name: getattr(calls, name) for name in calls.CHANGING if hasattr(calls, name)}

    def refuse(attempt: Attempt) -> None:
        raise OSError(errno.EIO, attempt.name)

    with pytest.raises(OSError, match="mkdir"), interposed(refuse):
        calls.mkdir("anywhere")
    assert {name: getattr(calls, name) for name in before} == before


def test_a_call_inside_a_call_is_part_of_it(tmp_path: Path) -> None:
    seen: list[str] = []

    def note(attempt: Attempt) -> object:
        seen.append(attempt.name)
        return attempt.perform()

    with interposed(note), interposed(note):
        fd = calls.open(tmp_path, os.O_RDONLY)
        calls.sync_directory(fd)
        calls.close(fd)
    assert seen == ["open", "open", "sync_directory", "sync_directory", "close", "close"]


def test_a_write_of_one_byte_is_never_short(tmp_path: Path) -> None:
    class OneByte(Correct):
        def fill(self, fd: int) -> None:
            assert calls.write(fd, b"x") == 1

    assert run_faulted(OneByte(), tmp_path, SHORT_WRITE, 2).call is None
