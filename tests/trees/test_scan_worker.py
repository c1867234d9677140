"""The scan worker only saves scans: the tree is the same with or without it."""

from __future__ import annotations

import multiprocessing
import os
import random
import select
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from holdfast.errors import ConsistencyUnavailable
from holdfast.fs import calls
from holdfast.trees import capture_directories as directories
from holdfast.trees import scan_worker as workers
from holdfast.trees.capture import capture
from holdfast.trees.capture_directories import SourceWatch
from holdfast.trees.engines import Engine
from holdfast.trees.manifest import Manifest, read_manifest
from holdfast.trees.results import Captured
from holdfast.trees.scan import scan_directory
from holdfast.trees.scan_worker import REPORT
from holdfast.trees.verify import changes, verify
from holdfast.trees.walker import TreeWalker, remove_tree
from proof.effort import rounds, until
from tests.support.loop_mounts import LoopMount
from tests.trees.groves import grow
from tests.trees.test_capture import CHANGES, Snapshots
from tests.trees.test_random_trees import EDITS, edit, place


class Started:
    """Records the started workers, and the directories whose report was used.

    `meet` is called with each requested path; by default the first call waits for all reports.
    """

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.workers: list[workers.ScanWorker] = []
        self.used: list[str] = []
        self.meet: Callable[[workers.ScanWorker, str], None] = self.wait_at("")
        make, find = workers.ScanWorker.__init__, workers.ScanWorker.find

        def noted(worker: workers.ScanWorker, *arguments: Any) -> None:
            make(worker, *arguments)
            self.workers.append(worker)

        def found(worker: workers.ScanWorker, path: str) -> workers.ScanReport | None:
            self.meet(worker, path)
            report = find(worker, path)
            if report is not None:
                self.used.append(path)
            return report

        monkeypatch.setattr(workers.ScanWorker, "__init__", noted)
        monkeypatch.setattr(workers.ScanWorker, "find", found)
        monkeypatch.setattr(directories, "_WORTH_A_WORKER", 1)
        monkeypatch.setattr(workers, "_SCANS_BETWEEN_READS", 1)
        monkeypatch.setattr(workers, "processors", lambda: 2)
        monkeypatch.setattr(workers, "_is_busy", lambda: False)

    def wait_at(
        self, where: str, before: Callable[[], object] = int, after: Callable[[], object] = int
    ) -> Callable[[workers.ScanWorker, str], None]:
        """Wait for all reports when `where` is requested."""

        def meet(worker: workers.ScanWorker, path: str) -> None:
            if path == where:
                before()
                wait_for_all(worker)
                after()

        return meet


def wait_for_all(worker: workers.ScanWorker) -> None:
    """Read until the worker has exited, and leave the reports as if they had just arrived."""
    while worker._running:
        assert select.select((worker.pipe,), (), (), 60)[0]
        worker._receive()


@pytest.fixture
def started(monkeypatch: pytest.MonkeyPatch) -> Started:
    return Started(monkeypatch)


@pytest.fixture
def snapshots(tmp_path: Path) -> Snapshots:
    made = Snapshots(tmp_path)
    made.fill({f"d{one}/e{two}/f{three}": b"%d" % three for one in range(4) for two in range(3) for three in range(2)})
    made.settle()
    return made


DIRECTORIES = 1 + 4 + 4 * 3


def scans_during(action: Callable[[], object], monkeypatch: pytest.MonkeyPatch) -> int:
    """Count the directories that the capturing process scans itself."""
    count = 0

    def counted(descriptor: int) -> Any:
        nonlocal count
        count += 1
        return scan_directory(descriptor)

    with monkeypatch.context() as patch:
        patch.setattr(directories, "scan_directory", counted)
        action()
    return count


def alike(one: Captured, other: Captured) -> bool:
    return one._replace(stored_bytes=0) == other._replace(stored_bytes=0)


# --- Saved scans ------------------------------------------------------------------------------------


def test_reported_directories_are_not_scanned_again(
    snapshots: Snapshots, started: Started, monkeypatch: pytest.MonkeyPatch
) -> None:
    _, first = snapshots.take()
    assert not started.workers, "there is no cache yet"
    scans = scans_during(snapshots.take, monkeypatch)
    tree, third = snapshots.take()

    assert scans == 0
    assert len(started.used) == 2 * DIRECTORIES
    assert alike(first, third)
    assert list(verify(tree, first.payload_hash)) == []


def test_the_walk_meets_the_worker_and_stops_it(
    snapshots: Snapshots, started: Started, monkeypatch: pytest.MonkeyPatch
) -> None:
    _, first = snapshots.take()
    started.meet = started.wait_at("d2/e1")
    with monkeypatch.context() as patch:
        patch.setattr(workers, "_SCANS_BETWEEN_READS", 1000)  # no report is read sooner, however fast the worker is
        scans = scans_during(snapshots.take, monkeypatch)
    started.meet = lambda *_: None
    _, third = snapshots.take()

    assert scans == 1 + 2 * 4 + 2  # the top, d0 and d1 with their contents, d2 and d2/e0
    assert started.used[0] == "d2/e1"
    assert alike(first, third)
    assert all(each._process.returncode is not None for each in started.workers)


def test_status_uses_the_worker_too(snapshots: Snapshots, started: Started, monkeypatch: pytest.MonkeyPatch) -> None:
    tree, _ = snapshots.take()
    assert scans_during(lambda: list(changes(snapshots.source, tree, cache=snapshots.cache)), monkeypatch) == 0
    (snapshots.source / "d1/e1/f0").write_bytes(b"other")
    found = [each.path for each in changes(snapshots.source, tree, cache=snapshots.cache) if each.kind == "f"]

    assert found == [b"d1/e1/f0"]


def test_unusual_entries_are_left_to_the_capturing_process(tmp_path: Path, started: Started) -> None:
    snapshots = Snapshots(tmp_path)
    grow(snapshots.source)
    snapshots.settle()
    _, first = snapshots.take()
    tree, second = snapshots.take()

    assert started.used == ["a/b", "empty"]
    assert alike(first, second)
    assert list(verify(tree, first.payload_hash)) == []


def test_a_symbolic_link_is_ordinary_and_has_no_bytes(snapshots: Snapshots, started: Started) -> None:
    (snapshots.source / "d1/link").symlink_to("nowhere/at/all")
    snapshots.settle()
    _, first = snapshots.take()
    _, second = snapshots.take()

    assert "d1" in started.used
    assert alike(first, second)


def test_a_mount_point_is_not_entered(tmp_path: Path, started: Started, loop_mount: Callable[[str], LoopMount]) -> None:
    mounted = loop_mount("ext4")
    (mounted.path / "inside").mkdir()
    source = mounted.path.parent
    (source / "beside").mkdir()
    time.sleep(0.03)  # recent changes are scanned again
    options: dict[str, Any] = {"engine": Engine.LINKED, "cache": tmp_path / "cache", "quiesced": True}
    first = capture(source, tmp_path / "a", **options)
    second = capture(source, tmp_path / "b", base=tmp_path / "a", **options)

    assert second.not_preserved == ("ext4: another filesystem is mounted there",)
    assert started.used == ["", "beside"]
    assert first.payload_hash == second.payload_hash


def test_a_directory_of_very_many_files_is_reported_whole(
    snapshots: Snapshots, started: Started, monkeypatch: pytest.MonkeyPatch
) -> None:
    snapshots.fill({f"d3/e2/{number:0100}": b"" for number in range(1500)})
    snapshots.settle()
    monkeypatch.setattr(calls, "enlarge_pipe", lambda *_: None)
    monkeypatch.setattr(workers, "_CHUNK", 1000)
    _, first = snapshots.take()

    assert scans_during(snapshots.take, monkeypatch) == 0
    assert alike(first, snapshots.take()[1])


def gone_after_its_report(snapshots: Snapshots, started: Started) -> list[str]:
    """Remove a directory after the worker reports it and before its parent is scanned."""
    snapshots.fill({"d2/linked": b"", "d2/e9/f0": b"old"})
    os.link(snapshots.source / "d2/linked", snapshots.source / "d2/again")  # so that d2 is scanned here
    snapshots.settle()
    snapshots.take()
    (snapshots.source / "d2/e9/f0").write_bytes(b"changed")
    snapshots.settle()

    def meet(worker: workers.ScanWorker, path: str) -> None:
        if path == "d1":
            wait_for_all(worker)
        elif path == "d2":
            (snapshots.source / "d2/e9/f0").unlink()
            (snapshots.source / "d2/e9").rmdir()

    started.meet = meet
    tree, captured = snapshots.take(quiesced=False)
    assert b"d2/e9" not in {each.path for each in read_manifest(tree)}
    return [str(each) for each in verify(tree, captured.payload_hash)] + [
        str(each) for each in (tree / "payload").rglob("e9")
    ]


def test_a_directory_removed_after_its_report_leaves_nothing(snapshots: Snapshots, started: Started) -> None:
    assert gone_after_its_report(snapshots, started) == []


def test_capturing_a_directory_that_the_walk_never_reaches_is_found(
    snapshots: Snapshots, started: Started, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Planted: every report is captured immediately."""

    class Everything(set[str]):
        def __contains__(self, _: object) -> bool:
            return True

    def begin(self: directories.DirectoryCapture, *arguments: Any, **options: Any) -> None:
        make(self, *arguments, **options)
        self._expected = Everything()

    make = directories.DirectoryCapture.__init__
    monkeypatch.setattr(directories.DirectoryCapture, "__init__", begin)
    assert gone_after_its_report(snapshots, started) != []


def test_changed_directories_are_captured_when_they_are_reported(
    snapshots: Snapshots, started: Started, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The worker scans everything before the walk reaches `d1`, so `d3` is read before `d2`."""
    snapshots.take()
    for number in range(4):
        (snapshots.source / f"d{number}/e1/f0").write_bytes(b"changed")
    snapshots.settle()
    read: list[str] = []
    capture_one = directories.DirectoryCapture.read

    def noted(self: directories.DirectoryCapture, path: str, *rest: Any) -> directories.CapturedDirectory:
        read.append(path)
        return capture_one(self, path, *rest)

    monkeypatch.setattr(directories.DirectoryCapture, "read", noted)
    started.meet = started.wait_at("d1")
    tree, captured = snapshots.take()

    assert read == ["d0/e1", "d3/e1", "d2/e1", "d1/e1"]
    assert list(Manifest.read(tree).paths()) == sorted(Manifest.read(tree).paths())
    assert list(verify(tree, captured.payload_hash)) == []


# --- Without a worker -------------------------------------------------------------------------------

FALSE_REPORT = REPORT.pack(5, 60, 7, 0, 0) + b"d0/e0" + bytes(60)
PROGRAMS = {
    "ends": "raise SystemExit(1)",
    "says something": "print('?' * 1000)",
    "says nothing": "import time; time.sleep(600)",
    "random bytes": "import os; os.write(1, os.urandom(100_000))",
    "a false report": f"import os; os.write(1, {FALSE_REPORT!r})",
}


@pytest.mark.parametrize("program", PROGRAMS)
def test_the_tree_is_the_same_for_any_report(
    snapshots: Snapshots, started: Started, monkeypatch: pytest.MonkeyPatch, program: str
) -> None:
    _, first = snapshots.take()
    monkeypatch.setattr(workers, "PROGRAM", PROGRAMS[program])
    started.meet = (lambda *_: None) if program == "says nothing" else started.meet
    tree, second = snapshots.take()

    assert (len(started.workers), started.used) == (1, [])
    assert started.workers[0]._process.returncode is not None
    assert alike(first, second)
    assert list(verify(tree, first.payload_hash)) == []


def test_a_torn_report_is_ignored(snapshots: Snapshots, started: Started, monkeypatch: pytest.MonkeyPatch) -> None:
    _, first = snapshots.take()
    read, taken = calls.read, bytearray()

    def cut(descriptor: int, size: int) -> bytes:
        content = read(descriptor, size)
        if started.workers and descriptor == started.workers[-1].pipe:
            content = content[: max(0, 1000 - len(taken))]
            taken.extend(content)
        return content

    monkeypatch.setattr(calls, "read", cut)
    _, second = snapshots.take()

    assert 0 < len(started.used) < DIRECTORIES
    assert alike(first, second)


REASONS: dict[str, tuple[object, str, object]] = {
    "one processor": (workers, "processors", lambda: 1),
    "no processor free": (workers, "_is_busy", lambda: True),
    "no interpreter": (sys, "executable", ""),
    "another interpreter": (sys, "executable", "/nowhere/python"),
    "too small": (directories, "_WORTH_A_WORKER", 1 << 40),
}


@pytest.mark.parametrize("reason", REASONS)
def test_no_worker_starts_where_it_cannot_help(
    snapshots: Snapshots, started: Started, monkeypatch: pytest.MonkeyPatch, reason: str
) -> None:
    _, first = snapshots.take()
    monkeypatch.setattr(*REASONS[reason])
    _, second = snapshots.take()

    assert not started.workers
    assert alike(first, second)


@pytest.mark.parametrize(
    ("said", "busy"),
    [
        (b"0.5 0.4 0.3 1/812 4242\n", False),
        (b"0.5 0.4 0.3 2/812 4242\n", False),
        (b"0.5 0.4 0.3 3/812 4242\n", True),
        (b"", False),
        (b"a b c d/e", False),
    ],
)
def test_two_processors_are_busy_with_three_running_processes(
    said: bytes, busy: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    if sys.platform != "linux":
        pytest.skip("only Linux reports the number of running processes")
    monkeypatch.setattr(workers, "read_whole", lambda _: said)
    monkeypatch.setattr(os, "cpu_count", lambda: 2)

    assert workers._is_busy() is busy


@pytest.mark.long
def test_a_killed_worker_leaves_the_rest_to_the_capturing_process(snapshots: Snapshots, started: Started) -> None:
    _, first = snapshots.take()
    chance = random.Random(4)
    times, seen = 25, set()

    def kill_soon(worker: workers.ScanWorker, path: str) -> None:
        if path == "":
            timer = threading.Timer(chance.uniform(0.01, 0.05), worker._process.kill)
            timer.start()
            wait_for_all(worker)
            timer.join()

    started.meet = kill_soon
    for _ in range(times):
        started.used.clear()
        tree, again = snapshots.take()
        assert alike(first, again)
        seen.add(len(started.used))
        if snapshots.count > 2:
            remove_tree(snapshots.place / f"tree-{snapshots.count - 1}")
    assert list(verify(tree, first.payload_hash)) == []
    assert {0, DIRECTORIES} & seen


def test_the_worker_ends_with_its_parent(snapshots: Snapshots) -> None:
    """The parent is killed while the worker is writing a report that nobody reads."""
    snapshots.fill({f"d3/e2/{number:0100}": b"" for number in range(1500)})
    snapshots.take()
    code = (
        "import os, sys, time\n"
        "from holdfast.fs import calls\n"
        "from holdfast.trees import scan_worker\n"
        "from holdfast.trees.walker import TreeWalker\n"
        "calls.enlarge_pipe = lambda *_: None\n"
        "scan_worker.processors, scan_worker._is_busy = lambda: 2, lambda: False\n"
        "started = scan_worker.ScanWorker.start(TreeWalker(sys.argv[1]), None)\n"
        "print(started._process.pid, flush=True)\n"
        "time.sleep(600)\n"
    )
    with subprocess.Popen([sys.executable, "-c", code, snapshots.source], stdout=subprocess.PIPE, text=True) as parent:
        assert parent.stdout is not None
        worker = int(parent.stdout.readline())
        time.sleep(0.1)
        parent.kill()
    ends = time.monotonic() + 60
    while is_running(worker):
        assert time.monotonic() < ends
        time.sleep(0.01)


def is_running(process: int) -> bool:
    try:
        return Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()[0] not in "ZX"
    except (FileNotFoundError, ProcessLookupError):
        return False


# --- Consistency ------------------------------------------------------------------------------------


@pytest.mark.parametrize("watching", [True, False], ids=["watching", "scanning"])
@pytest.mark.parametrize("name", CHANGES)
@pytest.mark.sampled(5)
def test_any_change_after_the_scan_of_the_worker_is_noticed(
    snapshots: Snapshots, started: Started, name: str, watching: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    snapshots.fill({"d0/f0": b"", "d0/f1": b""})
    snapshots.settle()
    snapshots.take()
    if watching:
        monkeypatch.setattr("holdfast.trees.capture.scan_again", lambda *_: None)
    else:
        monkeypatch.setattr(SourceWatch, "begin", lambda _: -1)
    started.meet = started.wait_at("", after=lambda: CHANGES[name](snapshots.source))

    with pytest.raises(ConsistencyUnavailable, match=r"changed while it was captured: (d0|e0|\.)"):
        snapshots.take()
    assert "d0" in started.used


def test_a_change_shortly_before_the_scan_of_the_worker_forces_a_second_scan(
    snapshots: Snapshots, started: Started, monkeypatch: pytest.MonkeyPatch
) -> None:
    snapshots.take()
    again: list[str] = []

    def noted(_source: TreeWalker, captured: Iterator[directories.CapturedDirectory], _stats: object) -> None:
        again.extend(each.path for each in captured)

    monkeypatch.setattr("holdfast.trees.capture.scan_again", noted)
    snapshots.take()
    assert again == []
    start = time.time_ns() - 3600 * 1_000_000_000
    monkeypatch.setattr("holdfast.trees.capture._make_tree", lambda tree: tree.mkdir() or start)
    snapshots.take()

    assert len(again) == DIRECTORIES
    assert len(started.used) == 2 * DIRECTORIES


def moved_across(snapshots: Snapshots, started: Started, monkeypatch: pytest.MonkeyPatch) -> set[bytes]:
    """Move a directory that neither has scanned behind the walk, then let the worker scan."""
    snapshots.take()
    go = snapshots.place / "go"
    wait = f"import os, time\nwhile not os.path.exists({str(go)!r}): time.sleep(0.001)\n"
    monkeypatch.setattr(workers, "PROGRAM", wait + workers.PROGRAM)

    def move() -> None:
        (snapshots.source / "d3/e1").rename(snapshots.source / "d0/moved")
        go.touch()

    started.meet = started.wait_at("d1", before=move)
    tree, _ = snapshots.take()
    return {each.path for each in read_manifest(tree) if each.path.endswith(b"/f1")}


def test_a_directory_moved_behind_both_is_noticed(
    snapshots: Snapshots, started: Started, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(ConsistencyUnavailable, match="d0/moved"):
        moved_across(snapshots, started, monkeypatch)
    assert "d2" in started.used


def test_a_directory_missed_by_both_is_found(
    snapshots: Snapshots, started: Started, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Planted: no watch, and no second scan."""
    monkeypatch.setattr(SourceWatch, "changed", lambda _: [])
    monkeypatch.setattr("holdfast.trees.capture.scan_again", lambda *_: None)
    assert len(moved_across(snapshots, started, monkeypatch)) == 4 * 3 - 1


# --- Random edits -----------------------------------------------------------------------------------


@given(batches=st.lists(EDITS, min_size=2, max_size=3))
@settings(max_examples=rounds(12, least=4), deadline=None)
def test_after_random_edits_the_worker_makes_no_difference(
    batches: list[list[tuple[str, str, Any]]],
) -> None:
    with pytest.MonkeyPatch.context() as monkeypatch, place() as here:
        Started(monkeypatch)
        source, base = here / "source", None
        for number, edits in enumerate(batches):
            for each in edits:
                edit(source, *each)
            cheap, cache = here / f"cheap-{number}", here / "cache"
            linked = capture(source, cheap, engine=Engine.LINKED, base=base, cache=cache, quiesced=True)
            copied = capture(source, here / f"long-{number}", engine=Engine.COPY, quiesced=False)

            assert linked.payload_hash == copied.payload_hash
            assert list(changes(source, cheap, cache=cache)) == []
            base = cheap


PLACES, MOVED, IN_EACH = 24, 12, 3


def moves() -> Iterator[list[int]]:
    """Yield the places of all directories, state by state; every call yields the same states."""
    chance = random.Random(11)
    at = [chance.randrange(PLACES) for _ in range(MOVED)]
    while True:
        yield list(at)
        at[chance.randrange(MOVED)] = chance.randrange(PLACES)


def move_forever(source: str, count: Any, pause: Any) -> None:
    """Go through the states in short bursts, with pauses up to the length that the other process sets."""
    states, chance = moves(), random.Random(5)
    before = next(states)
    while True:
        for _ in range(chance.randrange(1, 4)):
            now = next(states)
            for each, (old, new) in enumerate(zip(before, now, strict=True)):
                if old != new:
                    os.rename(f"{source}/p{old:02}/x{each}", f"{source}/p{new:02}/x{each}")
            before = now
            count.value += 1
            time.sleep(chance.uniform(0, 0.002))
        time.sleep(chance.uniform(0, pause.value))


def layout(tree: Path) -> list[int]:
    """The places of the directories in a tree; none may be missing, duplicated or incomplete."""
    paths = [each.path.decode() for each in read_manifest(tree) if each.kind == "f"]
    found = sorted((int(path.split("/")[1][1:]), int(path[1:3])) for path in paths)
    assert [each for each, _ in found] == [each for each in range(MOVED) for _ in range(IN_EACH)]
    return [where for _, where in found[::IN_EACH]]


def test_a_capture_while_directories_move_is_one_state_or_refused(scratch: Path, started: Started) -> None:
    if sys.platform == "win32":
        raise NotImplementedError
    source, chance = scratch / "source", random.Random(3)
    for number in range(PLACES):
        (source / f"p{number:02}").mkdir(parents=True)
    for each, where in enumerate(next(moves())):
        (source / f"p{where:02}/x{each}").mkdir()
        for name in range(IN_EACH):
            (source / f"p{where:02}/x{each}/f{name}").write_bytes(b"%d" % each)
    time.sleep(0.05)
    options: dict[str, Any] = {"engine": Engine.LINKED, "cache": scratch / "cache", "quiesced": True}
    base = scratch / "q"
    capture(source, base, **options)
    context = multiprocessing.get_context("fork")
    count, pause = context.Value("q", 0), context.Value("d", 0.1)
    mover = context.Process(target=move_forever, args=(str(source), count, pause), daemon=True)
    refused: list[int] = []
    taken: list[Any] = []
    mover.start()
    try:
        for number in until(lambda: refused and taken, 45):
            started.meet = started.wait_at(f"p{chance.randrange(PLACES):02}")
            tree = scratch / f"q{number}"
            try:
                capture(source, tree, base=base, **options)
            except ConsistencyUnavailable:
                refused.append(number)
                pause.value *= 1.2
            else:
                taken.append(layout(tree))
                base = tree
                pause.value /= 1.3
    finally:
        mover.kill()
        mover.join()
    states = [state for _, state in zip(range(count.value + 2), moves(), strict=False)]
    assert all(each in states for each in taken)
    assert started.used


# --- Changed directories ----------------------------------------------------------------------------


def test_a_reported_changed_directory_is_read_without_another_scan(
    snapshots: Snapshots, started: Started, monkeypatch: pytest.MonkeyPatch
) -> None:
    snapshots.take()
    (snapshots.source / "d1/e1/f1").write_bytes(b"changed")
    (snapshots.source / "d2/e0/new").write_bytes(b"new")
    (snapshots.source / "d2/e2/f0").unlink()
    snapshots.settle()
    captured: list[Captured] = []

    assert scans_during(lambda: captured.append(snapshots.take()[1]), monkeypatch) == 0
    tree = snapshots.place / "tree-2"
    copied = capture(snapshots.source, snapshots.place / "copied", engine=Engine.COPY, quiesced=True)
    assert captured[0].payload_hash == copied.payload_hash
    assert (captured[0].files, captured[0].bytes) == (copied.files, copied.bytes)
    assert list(verify(tree, copied.payload_hash)) == []


def test_a_directory_that_changed_again_after_the_report_is_scanned(
    snapshots: Snapshots, started: Started, monkeypatch: pytest.MonkeyPatch
) -> None:
    snapshots.take()
    (snapshots.source / "d1/e1/f1").write_bytes(b"changed")
    snapshots.settle()
    started.meet = started.wait_at("", after=(snapshots.source / "d1/e1/late").touch)
    tree, captured = snapshots.take(quiesced=False)

    assert "d1/e1/late" in {os.fsdecode(each.path) for each in read_manifest(tree)}
    assert list(verify(tree, captured.payload_hash)) == []


def test_a_symbolic_link_in_a_changed_directory_keeps_its_owner(snapshots: Snapshots, started: Started) -> None:
    (snapshots.source / "d1/e1/link").symlink_to("f1")
    snapshots.settle()
    snapshots.take()
    (snapshots.source / "d1/e1/f1").write_bytes(b"changed")
    snapshots.settle()
    tree, captured = snapshots.take()
    copied = capture(snapshots.source, snapshots.place / "copied", engine=Engine.COPY, quiesced=True)
    assert captured.payload_hash == copied.payload_hash
    assert list(verify(tree, copied.payload_hash)) == []
