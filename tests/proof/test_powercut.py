"""The power-cut sweep tries exactly the states that its rules allow, and so finds the planted bugs."""

from __future__ import annotations

import errno
import os
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from holdfast.fs import calls
from proof import recorder
from proof.crash import Ending, Kill, Outcome, cut_short, scratch
from proof.effort import rounds
from proof.powercut import Case, Disk, Sync, mark, power_cuts, record, redundant_syncs

OLD = b"the old content\n"
NEW = b"the new content, which is longer\n"
HALF = NEW[: len(NEW) // 2]
FRESH = os.O_WRONLY | os.O_CREAT | os.O_EXCL

Tree = dict[str, bytes | str]

pytestmark = pytest.mark.skipif(sys.platform == "win32", reason="directories cannot be opened and synced on Windows")


# --- Hand-written operations -------------------------------------------------------------------------


@contextmanager
def opened(path: Path, flags: int = os.O_RDONLY) -> Iterator[int]:
    fd = calls.open(path, flags, 0o666)
    try:
        yield fd
    finally:
        calls.close(fd)


def write(path: Path, content: bytes, flags: int = FRESH, *, sync: bool = True) -> None:
    with opened(path, flags) as fd:
        calls.write(fd, content)
        if sync:
            calls.fsync(fd)


def sync_names(directory: Path) -> None:
    with opened(directory) as fd:
        calls.sync_directory(fd)


class Correct:
    """Replaces a file correctly; each subclass has one planted bug."""

    def prepare(self, directory: Path) -> None:
        (directory / "file").write_bytes(OLD)

    def operate(self, directory: Path) -> None:
        write(directory / "draft", NEW)
        calls.replace(directory / "draft", directory / "file")
        sync_names(directory)

    def check(self, directory: Path, outcome: Outcome) -> None:
        content = (directory / "file").read_bytes()
        allowed = (NEW,) if outcome.acknowledged else (OLD, NEW)
        assert content in allowed, f"the file holds {content!r}"


class NoSync(Correct):
    def operate(self, directory: Path) -> None:
        write(directory / "draft", NEW, sync=False)
        calls.replace(directory / "draft", directory / "file")
        sync_names(directory)


class NoDirectorySync(Correct):
    def operate(self, directory: Path) -> None:
        write(directory / "draft", NEW)
        calls.replace(directory / "draft", directory / "file")


class RenameBeforeSync(Correct):
    def operate(self, directory: Path) -> None:
        with opened(directory / "draft", FRESH) as fd:
            calls.write(fd, NEW)
            calls.replace(directory / "draft", directory / "file")
            calls.fsync(fd)
        sync_names(directory)


class InPlace(Correct):
    def operate(self, directory: Path) -> None:
        write(directory / "file", NEW, os.O_WRONLY)


class Truncating(Correct):
    def operate(self, directory: Path) -> None:
        write(directory / "file", NEW, os.O_WRONLY | os.O_TRUNC)


def test_a_correct_replacement_survives_a_cut_at_every_point() -> None:
    report = power_cuts(Correct())
    report.require_clean(at_least=6)
    assert report.calls == {"open", "write", "fsync", "replace", "sync_directory"}


@pytest.mark.parametrize(
    ("bug", "symptom"),
    [
        (NoSync, "the file holds b''"),
        (NoDirectorySync, f"the file holds {OLD!r}"),
        (RenameBeforeSync, f"the file holds {HALF!r}"),
        (InPlace, f"the file holds {HALF + OLD[len(HALF) :]!r}"),
        (Truncating, "the file holds b''"),
    ],
)
def test_a_power_cut_finds_the_planted_bug(bug: type[Correct], symptom: str) -> None:
    found = power_cuts(bug()).violations
    assert any(symptom in each.problem for each in found), found
    assert all(each.outcome.ending is Ending.POWER_CUT for each in found)


def test_a_missing_directory_sync_shows_only_after_the_operation_returned() -> None:
    found = power_cuts(NoDirectorySync()).violations
    assert [each.listing for each in found] == [f"file={OLD!r}", f"draft={NEW!r}, file={OLD!r}"]
    for each in found:
        assert each.outcome.acknowledged
        assert str(each.outcome).startswith("returned, then power cut; the last was call 5, replace(")


def test_each_sync_of_a_correct_replacement_is_needed() -> None:
    assert redundant_syncs(Correct()) == []


def test_a_superfluous_sync_is_named() -> None:
    class Cautious(Correct):
        def operate(self, directory: Path) -> None:
            sync_names(directory)
            super().operate(directory)

    (superfluous,) = redundant_syncs(Cautious())
    assert (superfluous.index, superfluous.name) == (2, "sync_directory")


# --- The rules, one by one ---------------------------------------------------------------------------


class Collects:
    """Runs a given operation, and collects every state to check by the promises made until then."""

    def __init__(self, operate: Callable[[Path], object], prepare: Callable[[Path], object]) -> None:
        self.operate = operate
        self._prepare = prepare
        self.seen: dict[tuple[str, ...], list[Tree]] = {}
        self.inodes: list[dict[str, int]] = []

    def prepare(self, directory: Path) -> None:
        self._prepare(directory)

    def check(self, directory: Path, outcome: Outcome) -> None:
        promised = (*outcome.marks, "returned") if outcome.acknowledged else outcome.marks
        self.seen.setdefault(promised, []).append(tree(directory))
        self.inodes.append({each.name: each.lstat().st_ino for each in directory.rglob("*")})


def tree(directory: Path) -> Tree:
    return {each.relative_to(directory).as_posix(): shown(each) for each in directory.rglob("*")}


def shown(path: Path) -> bytes | str:
    if path.is_symlink():
        return f"-> {os.readlink(path)}"
    return "directory" if path.is_dir() else path.read_bytes()


def states(
    operate: Callable[[Path], object],
    prepare: Callable[[Path], object] = lambda _: None,
    after: str = "returned",
) -> list[Tree]:
    """Every state that a cut after the mark `after` may leave, sorted."""
    scenario = Collects(operate, prepare)
    power_cuts(scenario).require_clean()
    return every(*(state for key, kept in scenario.seen.items() if key[-1:] == (after,) for state in kept))


def every(*expected: Tree) -> list[Tree]:
    return sorted(expected, key=lambda state: repr(sorted(state.items())))


def holding(name: str, *contents: bytes, beside: Tree | None = None) -> list[Tree]:
    """One state for each of these contents of a file."""
    return [{**(beside or {}), name: content} for content in contents]


def test_the_prepared_state_is_on_the_disk() -> None:
    def prepare(directory: Path) -> None:
        (directory / "sub").mkdir()
        (directory / "sub/file").write_bytes(OLD)
        (directory / "link").symlink_to("sub/file")

    expected: Tree = {"sub": "directory", "sub/file": OLD, "link": "-> sub/file"}
    assert states(lambda _: None, prepare) == [expected]


def test_a_new_file_that_was_not_synced_may_be_absent_empty_half_or_whole() -> None:
    found = states(lambda directory: write(directory / "file", NEW, sync=False))
    assert found == every({}, {"file": b""}, {"file": HALF}, {"file": NEW})


def test_syncing_a_file_does_not_sync_its_name() -> None:
    assert states(lambda directory: write(directory / "file", NEW)) == every({}, {"file": NEW})


def test_syncing_a_name_does_not_sync_its_file() -> None:
    def operate(directory: Path) -> None:
        write(directory / "file", NEW, sync=False)
        sync_names(directory)

    assert states(operate) == every({"file": b""}, {"file": HALF}, {"file": NEW})


def test_fsync_of_a_directory_syncs_its_names() -> None:
    def operate(directory: Path) -> None:
        write(directory / "file", NEW)
        with opened(directory) as fd:
            calls.fsync(fd)

    assert states(operate) == [{"file": NEW}]


def test_a_sync_of_the_file_system_syncs_everything() -> None:
    def operate(directory: Path) -> None:
        calls.mkdir(directory / "sub")
        write(directory / "sub/file", NEW, sync=False)
        with opened(directory) as fd:
            calls.sync_filesystem(fd)

    assert states(operate) == [{"sub": "directory", "sub/file": NEW}]


def test_any_prefix_of_several_writes_may_be_on_the_disk() -> None:
    def operate(directory: Path) -> None:
        with opened(directory / "file", os.O_RDWR | os.O_APPEND) as fd:
            calls.write(fd, memoryview(b"22"))
            calls.ftruncate(fd, 1)
            calls.write(fd, b"33")

    found = states(operate, lambda directory: (directory / "file").write_bytes(b"11"))
    assert found == every(*holding("file", b"11", b"112", b"1122", b"1", b"13", b"133"))


def test_content_written_before_a_sync_stays() -> None:
    def operate(directory: Path) -> None:
        with opened(directory / "file", FRESH) as fd:
            calls.write(fd, b"11")
            calls.fsync(fd)
            calls.write(fd, b"22")
        sync_names(directory)

    assert states(operate) == every({"file": b"11"}, {"file": b"112"}, {"file": b"1122"})


def test_any_subset_of_changed_names_may_be_on_the_disk() -> None:
    def operate(directory: Path) -> None:
        calls.unlink(directory / "old")
        calls.symlink("anywhere", directory / "new")

    found = states(operate, lambda directory: (directory / "old").touch())
    assert found == every({"old": b""}, {}, {"old": b"", "new": "-> anywhere"}, {"new": "-> anywhere"})


def test_a_rename_between_directories_is_never_half_done() -> None:
    def prepare(directory: Path) -> None:
        (directory / "here").mkdir()
        (directory / "there").mkdir()
        (directory / "here/file").write_bytes(OLD)

    def operate(directory: Path) -> None:
        calls.rename(directory / "here/file", directory / "there/moved")

    before: Tree = {"here": "directory", "there": "directory", "here/file": OLD}
    after: Tree = {"here": "directory", "there": "directory", "there/moved": OLD}
    assert states(operate, prepare) == every(before, after)
    for synced in ("here", "there"):

        def operate_and_sync(directory: Path, synced: str = synced) -> None:
            operate(directory)
            sync_names(directory / synced)

        assert states(operate_and_sync, prepare) == [after]


def test_a_name_on_the_disk_has_its_inode_even_if_its_first_name_is_not() -> None:
    def operate(directory: Path) -> None:
        write(directory / "here/draft", NEW)
        calls.rename(directory / "here/draft", directory / "there/file")
        sync_names(directory / "there")

    def prepare(directory: Path) -> None:
        (directory / "here").mkdir()
        (directory / "there").mkdir()

    assert states(operate, prepare) == [{"here": "directory", "there": "directory", "there/file": NEW}]


def test_a_rename_of_a_missing_name_does_not_happen() -> None:
    def operate(directory: Path) -> None:
        write(directory / "draft", NEW)
        calls.replace(directory / "draft", directory / "file")

    found = states(operate, lambda directory: (directory / "file").write_bytes(OLD))
    assert found == every({"file": OLD}, {"file": OLD, "draft": NEW}, {"file": NEW})


def test_the_content_of_a_new_directory_needs_the_name_of_the_directory() -> None:
    def operate(directory: Path) -> None:
        calls.mkdir(directory / "sub")
        write(directory / "sub/file", NEW)
        sync_names(directory / "sub")
        mark("inside")
        sync_names(directory)

    whole: Tree = {"sub": "directory", "sub/file": NEW}
    assert states(operate, after="inside") == every({}, whole)
    assert states(operate) == [whole]


def test_a_directory_is_not_removed_before_its_content() -> None:
    def prepare(directory: Path) -> None:
        (directory / "sub").mkdir()
        (directory / "sub/file").touch()

    def operate(directory: Path) -> None:
        calls.unlink(directory / "sub/file")
        calls.rmdir(directory / "sub")

    assert states(operate, prepare) == every({"sub": "directory", "sub/file": b""}, {"sub": "directory"}, {})


def test_two_names_of_one_inode_stay_two_names_of_one_inode() -> None:
    def operate(directory: Path) -> None:
        calls.link(directory / "old", directory / "new")

    scenario = Collects(operate, lambda directory: (directory / "old").write_bytes(OLD))
    power_cuts(scenario).require_clean()
    assert scenario.seen["returned",] == [{"old": OLD}, {"old": OLD, "new": OLD}]
    assert scenario.inodes[-1]["old"] == scenario.inodes[-1]["new"]


def test_a_rename_onto_the_same_inode_changes_nothing() -> None:
    def prepare(directory: Path) -> None:
        (directory / "old").write_bytes(OLD)
        os.link(directory / "old", directory / "new")

    def operate(directory: Path) -> None:
        calls.rename(directory / "old", directory / "new")

    assert states(operate, prepare) == [{"old": OLD, "new": OLD}]


def test_a_rename_that_must_not_replace_happens_only_after_the_removal_of_its_target() -> None:
    def prepare(directory: Path) -> None:
        (directory / "old").write_bytes(OLD)
        (directory / "new").write_bytes(NEW)

    def operate(directory: Path) -> None:
        with opened(directory) as fd:
            calls.unlink("old", dir_fd=fd)
            supported(lambda: calls.rename_noreplace("new", "old", src_dir_fd=fd, dst_dir_fd=fd))

    assert states(operate, prepare) == every({"old": OLD, "new": NEW}, {"new": NEW}, {"old": NEW})


def test_an_exchange_is_one_change() -> None:
    def prepare(directory: Path) -> None:
        (directory / "one").write_bytes(OLD)
        (directory / "other").mkdir()

    def operate(directory: Path) -> None:
        with opened(directory) as fd:
            supported(lambda: calls.rename_exchange("one", "other", src_dir_fd=fd, dst_dir_fd=fd))

    assert states(operate, prepare) == every({"one": OLD, "other": "directory"}, {"one": "directory", "other": OLD})


def supported(call: Callable[[], object]) -> None:
    try:
        call()
    except OSError as error:
        if error.errno in (errno.ENOSYS, errno.EINVAL, errno.EOPNOTSUPP):
            pytest.skip("this system has no such rename")
        raise


def test_a_clone_is_unsynced_content(monkeypatch: pytest.MonkeyPatch) -> None:
    def copy(target: int, source: int) -> None:  # memory file systems cannot clone
        os.write(target, os.read(source, 1000))

    def operate(directory: Path) -> None:
        with opened(directory / "old") as source, opened(directory / "new", FRESH) as target:
            calls.clone(target, source)
        sync_names(directory)

    monkeypatch.setattr(calls, "clone", copy)
    found = states(operate, lambda directory: (directory / "old").write_bytes(b"1234"))
    assert found == every(*holding("new", b"", b"12", b"1234", beside={"old": b"1234"}))


# --- Recording ---------------------------------------------------------------------------------------


def test_a_mark_is_a_promise_from_then_on() -> None:
    def operate(directory: Path) -> None:
        for name in ("first", "second"):
            write(directory / name, name.encode())
            sync_names(directory)
            mark(name)

    assert states(operate, after="first") == every(
        {"first": b"first"}, *holding("second", b"", b"sec", b"second", beside={"first": b"first"})
    )
    assert states(operate, after="second") == [{"first": b"first", "second": b"second"}]


def test_sweeps_that_share_checked_states_check_each_once() -> None:
    checked: set[Case] = set()
    first = power_cuts(Correct(), checked=checked)
    assert first.points == len(checked) > 0
    assert power_cuts(Correct(), checked=checked).points == 0


def test_a_bug_is_found_only_after_the_mark_if_only_that_part_is_swept() -> None:
    class Marked(NoSync):
        def operate(self, directory: Path) -> None:
            super().operate(directory)
            mark("done")

    every_cut, since_mark = power_cuts(Marked()), power_cuts(Marked(), since_mark=True)
    assert 0 < since_mark.points < every_cut.points
    assert all(each.outcome.marks == ("done",) for each in since_mark.violations)
    assert since_mark.violations


def test_an_operation_may_continue_where_another_one_died() -> None:
    """The first dies between rename and sync; the sync of the second makes the rename of the first durable too."""

    def operate(directory: Path) -> None:
        assert cut_short(lambda: Correct().operate(directory), Kill.AFTER, 5)
        mark("died")
        write(directory / "other", OLD)
        sync_names(directory)

    assert {"file": OLD} in states(operate, Correct().prepare, after="died")
    assert states(operate, Correct().prepare) == [{"file": NEW, "other": OLD}]


def test_directories_opened_before_the_recording_are_recognised() -> None:
    class Held(Correct):
        fd = -1

        def prepare(self, directory: Path) -> None:
            super().prepare(directory)
            (directory / "sub").mkdir()
            self.fd = os.open(directory / "sub", os.O_RDONLY)

        def operate(self, directory: Path) -> None:
            fd = calls.open("draft", FRESH, 0o666, dir_fd=self.fd)
            calls.write(fd, NEW)
            calls.fsync(fd)
            calls.close(fd)
            calls.replace("draft", "../file", src_dir_fd=self.fd, dst_dir_fd=self.fd)
            sync_names(directory)
            os.close(self.fd)

    report = power_cuts(Held())
    report.require_clean(at_least=6)


def test_changes_outside_the_directory_are_ignored(tmp_path: Path) -> None:
    def operate(directory: Path) -> None:
        write(tmp_path / "draft", NEW)
        calls.rename(tmp_path / "draft", tmp_path / "file")
        calls.mkdir(tmp_path / "sub")

    assert states(operate) == [{}]


@pytest.mark.parametrize(
    "change",
    [
        lambda directory: (directory / "other").touch(),
        lambda directory: (directory / "file").write_bytes(NEW),
        lambda directory: (directory / "file").unlink(),
        lambda directory: (directory / "file").chmod(0o400),
    ],
)
def test_a_change_that_bypasses_the_calls_is_found(change: Callable[[Path], object]) -> None:
    with pytest.raises(RuntimeError, match=r"changed without holdfast\.fs\.calls"):
        states(change, Correct().prepare)


def test_every_call_that_changes_something_is_recorded() -> None:
    nothing_on_disk = {"close", "flock", "flock_interruptible", "write_mapped"}  # the last: a file of the probe
    assert set(calls.CHANGING) == set(recorder.Recorder._NOTES) | nothing_on_disk


def test_a_file_that_cannot_be_rebuilt_is_refused(tmp_path: Path) -> None:
    if sys.platform != "win32":
        os.mkfifo(tmp_path / "pipe")
    with pytest.raises(ValueError, match="only files, directories and symbolic links"):
        record(Collects(lambda _: None, lambda _: None), tmp_path)


def test_a_cap_is_never_silent() -> None:
    def operate(directory: Path) -> None:
        for index in range(10):
            calls.mkdir(directory / f"sub{index}")

    scenario = Collects(operate, lambda _: None)
    report = power_cuts(scenario, limit=64)
    assert {} in scenario.seen["returned",]
    assert any(len(each) == 10 for each in scenario.seen["returned",])
    assert "64 of 1024 subsets of changed names" in report.capped[-1]
    assert "NOT EVERYTHING WAS TRIED" in str(report)
    with pytest.raises(AssertionError, match="NOT EVERYTHING WAS TRIED"):
        report.require_clean()


def test_a_capped_search_cannot_declare_a_sync_redundant() -> None:
    class Many(Correct):
        def operate(self, directory: Path) -> None:
            super().operate(directory)
            for index in range(10):
                calls.mkdir(directory / f"sub{index}")
            sync_names(directory)

    with pytest.raises(RuntimeError, match="cannot tell without trying everything"):
        redundant_syncs(Many(), limit=64)


# --- Random operations -------------------------------------------------------------------------------

NAMES = st.sampled_from(["a", "b", "sub/a", "sub/b"])
DONE = st.one_of(
    st.tuples(st.just("write"), NAMES, st.binary(min_size=1, max_size=4)),
    st.tuples(st.sampled_from(["link", "rename", "replace"]), NAMES, NAMES),
    st.tuples(st.sampled_from(["unlink", "fsync"]), NAMES),
    st.tuples(st.just("sync"), st.sampled_from([".", "sub"])),
)


def do(directory: Path, verb: str, *arguments: str | bytes) -> None:
    paths = [directory / each for each in arguments if isinstance(each, str)]
    try:
        match verb, *arguments:
            case "write", _, bytes(content):
                write(paths[0], content, os.O_WRONLY | os.O_CREAT | os.O_APPEND, sync=False)
            case "fsync", _:
                with opened(paths[0]) as fd:
                    calls.fsync(fd)
            case "sync", _:
                sync_names(paths[0])
            case _:
                getattr(calls, verb)(*paths)
    except (FileNotFoundError, FileExistsError):
        pass  # nothing happened, and nothing may be recorded


@settings(max_examples=rounds(150, least=5), deadline=None)
@given(st.lists(DONE, max_size=8))
def test_the_visible_state_is_always_possible_and_certain_once_everything_is_synced(
    done: list[tuple[str, ...]],
) -> None:
    def prepare(directory: Path) -> None:
        (directory / "sub").mkdir()
        (directory / "sub/a").write_bytes(OLD)

    def operate(directory: Path) -> None:
        for each in done:
            do(directory, *each)

    with scratch() as directory:
        trace = record(Collects(operate, prepare), directory)
        disk = Disk(trace, 100_000)
        for step in trace.steps:
            disk.take(step.event)
            assert disk.latest() in disk.states()
        disk.take(Sync(tuple(trace.nodes)))
        assert list(disk.states()) == [disk.latest()]
