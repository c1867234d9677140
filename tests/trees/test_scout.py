"""The scout saves looks and nothing else: with it, without it, or with half of it the tree is the same."""

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
from holdfast.trees import Captured, Engine, capture, changes, read_manifest, remove_tree, verify
from holdfast.trees import capture_directories as intakes
from holdfast.trees import scan_worker as scouts
from holdfast.trees.manifest import Manifest
from holdfast.trees.scan import TreeWalker, look
from holdfast.trees.scan_worker import REPORT
from holdfast.trees.stat_cache import SourceWatch
from tests.support.loop_mounts import LoopMount
from tests.trees.groves import grow
from tests.trees.test_capturing import CHANGES, Desk
from tests.trees.test_random_trees import EDITS, edit, place


class Sent:
    """The scouts that were sent out, and of how many directories what they said was used.

    `meet` is called with each path that somebody asks for; as a rule the first time waits for all reports.
    """

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.scouts: list[scouts.ScanWorker] = []
        self.used: list[str] = []
        self.meet: Callable[[scouts.ScanWorker, str], None] = self.wait_at("")
        make, find = scouts.ScanWorker.__init__, scouts.ScanWorker.find

        def noted(scout: scouts.ScanWorker, *arguments: Any) -> None:
            make(scout, *arguments)
            self.scouts.append(scout)

        def found(scout: scouts.ScanWorker, path: str) -> scouts.ScanReport | None:
            self.meet(scout, path)
            report = find(scout, path)
            if report is not None:
                self.used.append(path)
            return report

        monkeypatch.setattr(scouts.ScanWorker, "__init__", noted)
        monkeypatch.setattr(scouts.ScanWorker, "find", found)
        monkeypatch.setattr(scouts, "_WORTH_A_SCOUT", 1)
        monkeypatch.setattr(scouts, "_PATIENCE", 1)
        monkeypatch.setattr(scouts, "processors", lambda: 2)
        monkeypatch.setattr(scouts, "_is_busy", lambda: False)

    def wait_at(
        self, where: str, before: Callable[[], object] = int, after: Callable[[], object] = int
    ) -> Callable[[scouts.ScanWorker, str], None]:
        """Wait for all reports when `where` is asked for."""

        def meet(scout: scouts.ScanWorker, path: str) -> None:
            if path == where:
                before()
                wait_for_all(scout)
                after()

        return meet


def wait_for_all(scout: scouts.ScanWorker) -> None:
    """Read until the scout has ended, and leave the reports as if they had just come."""
    while scout._running:
        assert select.select((scout.pipe,), (), (), 60)[0]
        scout._listen()


@pytest.fixture
def sent(monkeypatch: pytest.MonkeyPatch) -> Sent:
    return Sent(monkeypatch)


@pytest.fixture
def desk(tmp_path: Path) -> Desk:
    made = Desk(tmp_path)
    made.fill(
        {
            f"d{one}/e{two}/f{three}": b"%d" % three
            for one in range(4)
            for two in range(3)
            for three in range(2)
        }
    )
    made.settle()
    return made


DIRECTORIES = 1 + 4 + 4 * 3


def looks_during(action: Callable[[], object], monkeypatch: pytest.MonkeyPatch) -> int:
    """How many directories the first process looks at."""
    count = 0

    def counted(descriptor: int) -> Any:
        nonlocal count
        count += 1
        return look(descriptor)

    with monkeypatch.context() as patch:
        patch.setattr(intakes, "look", counted)
        action()
    return count


def alike(one: Captured, other: Captured) -> bool:
    return one._replace(stored_bytes=0) == other._replace(stored_bytes=0)


# --- What it saves ----------------------------------------------------------------------------------


def test_what_the_scout_saw_is_not_looked_at_again(
    desk: Desk, sent: Sent, monkeypatch: pytest.MonkeyPatch
) -> None:
    _, first = desk.take()
    assert not sent.scouts, "there is no cache yet"
    looks = looks_during(desk.take, monkeypatch)
    tree, third = desk.take()

    assert looks == 0
    assert len(sent.used) == 2 * DIRECTORIES
    assert alike(first, third)
    assert list(verify(tree, first.payload_hash)) == []


def test_they_meet_and_the_scout_is_stopped(desk: Desk, sent: Sent, monkeypatch: pytest.MonkeyPatch) -> None:
    _, first = desk.take()
    sent.meet = sent.wait_at("d2/e1")
    looks = looks_during(desk.take, monkeypatch)
    sent.meet = lambda *_: None
    _, third = desk.take()

    assert looks == 1 + 2 * 4 + 2  # the top, d0 and d1 with all in them, d2 and d2/e0
    assert sent.used[0] == "d2/e1"
    assert alike(first, third)
    assert all(each._process.returncode is not None for each in sent.scouts)


def test_status_is_told_by_the_scout_too(desk: Desk, sent: Sent, monkeypatch: pytest.MonkeyPatch) -> None:
    tree, _ = desk.take()
    assert looks_during(lambda: list(changes(desk.source, tree, cache=desk.cache)), monkeypatch) == 0
    (desk.source / "d1/e1/f0").write_bytes(b"other")
    found = [each.path for each in changes(desk.source, tree, cache=desk.cache) if each.kind == "f"]

    assert found == [b"d1/e1/f0"]


def test_what_is_not_ordinary_is_left_to_the_first_process(tmp_path: Path, sent: Sent) -> None:
    desk = Desk(tmp_path)
    grow(desk.source)
    desk.settle()
    _, first = desk.take()
    tree, second = desk.take()

    assert sent.used == ["a/b", "empty"]
    assert alike(first, second)
    assert list(verify(tree, first.payload_hash)) == []


def test_a_symbolic_link_is_ordinary_and_has_no_bytes(desk: Desk, sent: Sent) -> None:
    (desk.source / "d1/link").symlink_to("nowhere/at/all")
    desk.settle()
    _, first = desk.take()
    _, second = desk.take()

    assert "d1" in sent.used
    assert alike(first, second)


def test_a_mount_point_is_not_entered(
    tmp_path: Path, sent: Sent, loop_mount: Callable[[str], LoopMount]
) -> None:
    mounted = loop_mount("ext4")
    (mounted.path / "inside").mkdir()
    source = mounted.path.parent
    (source / "beside").mkdir()
    time.sleep(0.03)  # what changed just before is looked at again
    options: dict[str, Any] = {"engine": Engine.LINKED, "cache": tmp_path / "cache", "quiesced": True}
    first = capture(source, tmp_path / "a", **options)
    second = capture(source, tmp_path / "b", base=tmp_path / "a", **options)

    assert second.not_preserved == ("ext4: another file system is mounted there",)
    assert sent.used == ["", "beside"]
    assert first.payload_hash == second.payload_hash


def test_a_directory_of_very_many_files_is_reported_whole(
    desk: Desk, sent: Sent, monkeypatch: pytest.MonkeyPatch
) -> None:
    desk.fill({f"d3/e2/{number:0100}": b"" for number in range(1500)})
    desk.settle()
    monkeypatch.setattr(calls, "enlarge_pipe", lambda *_: None)
    monkeypatch.setattr(scouts, "_CHUNK", 1000)
    _, first = desk.take()

    assert looks_during(desk.take, monkeypatch) == 0
    assert alike(first, desk.take()[1])


def gone_after_its_report(desk: Desk, sent: Sent) -> list[str]:
    """Let a directory go after the scout reported it, and before we look at the one that it is in."""
    desk.fill({"d2/linked": b"", "d2/e9/f0": b"old"})
    os.link(desk.source / "d2/linked", desk.source / "d2/again")  # so that we look at d2 ourselves
    desk.settle()
    desk.take()
    (desk.source / "d2/e9/f0").write_bytes(b"changed")
    desk.settle()

    def meet(scout: scouts.ScanWorker, path: str) -> None:
        if path == "d1":
            wait_for_all(scout)
        elif path == "d2":
            (desk.source / "d2/e9/f0").unlink()
            (desk.source / "d2/e9").rmdir()

    sent.meet = meet
    tree, captured = desk.take(quiesced=False)
    assert b"d2/e9" not in {each.path for each in read_manifest(tree)}
    return [str(each) for each in verify(tree, captured.payload_hash)] + [
        str(each) for each in (tree / "payload").rglob("e9")
    ]


def test_a_directory_that_has_gone_since_its_report_leaves_nothing(desk: Desk, sent: Sent) -> None:
    assert gone_after_its_report(desk, sent) == []


def test_taking_in_what_we_may_never_come_to_is_found(
    desk: Desk, sent: Sent, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Planted: whatever the scout reports is taken in at once."""

    class Everything(set[str]):
        def __contains__(self, _: object) -> bool:
            return True

    def begin(self: intakes.DirectoryCapture, *arguments: Any, **options: Any) -> None:
        make(self, *arguments, **options)
        self._awaited = Everything()

    make = intakes.DirectoryCapture.__init__
    monkeypatch.setattr(intakes.DirectoryCapture, "__init__", begin)
    assert gone_after_its_report(desk, sent) != []


def test_what_changed_is_taken_in_when_it_is_reported(
    desk: Desk, sent: Sent, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The scout has looked at all before we come to `d1`; `d3` is read before `d2` then."""
    desk.take()
    for number in range(4):
        (desk.source / f"d{number}/e1/f0").write_bytes(b"changed")
    desk.settle()
    read: list[str] = []
    take_in = intakes.DirectoryCapture._read

    def noted(self: intakes.DirectoryCapture, path: str, *rest: Any) -> intakes.CapturedDirectory:
        read.append(path)
        return take_in(self, path, *rest)

    monkeypatch.setattr(intakes.DirectoryCapture, "_read", noted)
    sent.meet = sent.wait_at("d1")
    tree, captured = desk.take()

    assert read == ["d0/e1", "d3/e1", "d2/e1", "d1/e1"]
    assert list(Manifest.read(tree).paths()) == sorted(Manifest.read(tree).paths())
    assert list(verify(tree, captured.payload_hash)) == []


# --- Without it -------------------------------------------------------------------------------------

FALSE_REPORT = REPORT.pack(5, 60, 7, 0, 0) + b"d0/e0" + bytes(60)
PROGRAMS = {
    "ends": "raise SystemExit(1)",
    "says something": "print('?' * 1000)",
    "says nothing": "import time; time.sleep(600)",
    "random bytes": "import os; os.write(1, os.urandom(100_000))",
    "a false report": f"import os; os.write(1, {FALSE_REPORT!r})",
}


@pytest.mark.parametrize("program", PROGRAMS)
def test_whatever_it_says_the_tree_is_the_same(
    desk: Desk, sent: Sent, monkeypatch: pytest.MonkeyPatch, program: str
) -> None:
    _, first = desk.take()
    monkeypatch.setattr(scouts, "PROGRAM", PROGRAMS[program])
    sent.meet = (lambda *_: None) if program == "says nothing" else sent.meet
    tree, second = desk.take()

    assert (len(sent.scouts), sent.used) == (1, [])
    assert sent.scouts[0]._process.returncode is not None
    assert alike(first, second)
    assert list(verify(tree, first.payload_hash)) == []


def test_a_torn_report_is_none(desk: Desk, sent: Sent, monkeypatch: pytest.MonkeyPatch) -> None:
    _, first = desk.take()
    read, taken = calls.read, bytearray()

    def cut(descriptor: int, size: int) -> bytes:
        content = read(descriptor, size)
        if sent.scouts and descriptor == sent.scouts[-1].pipe:
            content = content[: max(0, 1000 - len(taken))]
            taken.extend(content)
        return content

    monkeypatch.setattr(calls, "read", cut)
    _, second = desk.take()

    assert 0 < len(sent.used) < DIRECTORIES
    assert alike(first, second)


REASONS: dict[str, tuple[object, str, object]] = {
    "one processor": (scouts, "processors", lambda: 1),
    "no processor free": (scouts, "_is_busy", lambda: True),
    "no interpreter": (sys, "executable", ""),
    "another interpreter": (sys, "executable", "/nowhere/python"),
    "too small": (scouts, "_WORTH_A_SCOUT", 1 << 40),
}


@pytest.mark.parametrize("reason", REASONS)
def test_where_there_can_be_none_there_is_none(
    desk: Desk, sent: Sent, monkeypatch: pytest.MonkeyPatch, reason: str
) -> None:
    _, first = desk.take()
    monkeypatch.setattr(*REASONS[reason])
    _, second = desk.take()

    assert not sent.scouts
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
def test_two_processors_are_busy_with_three_that_run(
    said: bytes, busy: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    if sys.platform != "linux":
        pytest.skip("only Linux tells")
    monkeypatch.setattr(scouts, "read_whole", lambda _: said)
    monkeypatch.setattr(os, "cpu_count", lambda: 2)

    assert scouts._is_busy() is busy


def test_killed_at_any_moment_it_leaves_the_rest_to_the_first_process(desk: Desk, sent: Sent) -> None:
    _, first = desk.take()
    chance = random.Random(4)
    rounds, seen = 25, set()

    def kill_soon(scout: scouts.ScanWorker, path: str) -> None:
        if path == "":
            timer = threading.Timer(chance.uniform(0.01, 0.05), scout._process.kill)
            timer.start()
            wait_for_all(scout)
            timer.join()

    sent.meet = kill_soon
    for _ in range(rounds):
        sent.used.clear()
        tree, again = desk.take()
        assert alike(first, again)
        seen.add(len(sent.used))
        if desk.count > 2:
            remove_tree(desk.place / f"tree-{desk.count - 1}")
    assert list(verify(tree, first.payload_hash)) == []
    assert {0, DIRECTORIES} & seen


def test_it_ends_with_the_process_that_sent_it(desk: Desk) -> None:
    """It is in the middle of a report that nobody reads when its parent is killed."""
    desk.fill({f"d3/e2/{number:0100}": b"" for number in range(1500)})
    desk.take()
    code = (
        "import os, sys, time, pathlib\n"
        "from holdfast.fs import calls\n"
        "from holdfast.trees import scout\n"
        "from holdfast.trees.scan import Descent\n"
        "calls.enlarge_pipe = lambda *_: None\n"
        "scout._WORTH_A_SCOUT, scout.processors, scout._is_busy = 1, lambda: 2, lambda: False\n"
        "sent = scout.Scout.start(Descent(sys.argv[1]), pathlib.Path(sys.argv[2]), None)\n"
        "print(sent._process.pid, flush=True)\n"
        "time.sleep(600)\n"
    )
    with subprocess.Popen(
        [sys.executable, "-c", code, desk.source, desk.cache], stdout=subprocess.PIPE, text=True
    ) as parent:
        assert parent.stdout is not None
        scout = int(parent.stdout.readline())
        time.sleep(0.1)
        parent.kill()
    ends = time.monotonic() + 60
    while is_running(scout):
        assert time.monotonic() < ends
        time.sleep(0.01)


def is_running(process: int) -> bool:
    try:
        return Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()[0] not in "ZX"
    except (FileNotFoundError, ProcessLookupError):
        return False


# --- One moment -------------------------------------------------------------------------------------


@pytest.mark.parametrize("listening", [True, False], ids=["told", "looking"])
@pytest.mark.parametrize("name", CHANGES)
@pytest.mark.sampled(9)
def test_whatever_changes_after_the_scout_looked_is_noticed(
    desk: Desk, sent: Sent, name: str, listening: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    desk.fill({"d0/f0": b"", "d0/f1": b""})
    desk.settle()
    desk.take()
    if listening:
        monkeypatch.setattr("holdfast.trees.capture.second_look", lambda *_: None)
    else:
        monkeypatch.setattr(SourceWatch, "begin", lambda _: -1)
    sent.meet = sent.wait_at("", after=lambda: CHANGES[name](desk.source))

    with pytest.raises(ConsistencyUnavailable, match=r"changed while it was captured: (d0|e0|\.)"):
        desk.take()
    assert "d0" in sent.used


def test_what_changed_shortly_before_the_scout_looked_makes_all_be_looked_at_again(
    desk: Desk, sent: Sent, monkeypatch: pytest.MonkeyPatch
) -> None:
    desk.take()
    again: list[str] = []

    def noted(_source: TreeWalker, taken: Iterator[intakes.CapturedDirectory], _tally: object) -> None:
        again.extend(each.path for each in taken)

    monkeypatch.setattr("holdfast.trees.capture.second_look", noted)
    desk.take()
    assert again == []
    start = time.time_ns() - 3600 * 1_000_000_000
    monkeypatch.setattr("holdfast.trees.capture._make_tree", lambda tree: tree.mkdir() or start)
    desk.take()

    assert len(again) == DIRECTORIES
    assert len(sent.used) == 2 * DIRECTORIES


def moved_across(desk: Desk, sent: Sent, monkeypatch: pytest.MonkeyPatch) -> set[bytes]:
    """Move a directory that neither has seen to where the first process has been, then let the scout look."""
    desk.take()
    go = desk.place / "go"
    wait = f"import os, time\nwhile not os.path.exists({str(go)!r}): time.sleep(0.001)\n"
    monkeypatch.setattr(scouts, "PROGRAM", wait + scouts.PROGRAM)

    def move() -> None:
        (desk.source / "d3/e1").rename(desk.source / "d0/moved")
        go.touch()

    sent.meet = sent.wait_at("d1", before=move)
    tree, _ = desk.take()
    return {each.path for each in read_manifest(tree) if each.path.endswith(b"/f1")}


def test_a_directory_that_is_moved_behind_both_is_noticed(
    desk: Desk, sent: Sent, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(ConsistencyUnavailable, match="d0/moved"):
        moved_across(desk, sent, monkeypatch)
    assert "d2" in sent.used


def test_a_directory_that_was_missed_by_both_is_found(
    desk: Desk, sent: Sent, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Planted: nobody listens, and nobody looks again."""
    monkeypatch.setattr(SourceWatch, "changed", lambda _: [])
    monkeypatch.setattr("holdfast.trees.capture.second_look", lambda *_: None)
    assert len(moved_across(desk, sent, monkeypatch)) == 4 * 3 - 1


# --- At random --------------------------------------------------------------------------------------


@given(rounds=st.lists(EDITS, min_size=2, max_size=3))
@settings(max_examples=12, deadline=None)
def test_after_random_edits_it_is_as_if_there_were_no_scout(rounds: list[list[tuple[str, str, Any]]]) -> None:
    with pytest.MonkeyPatch.context() as monkeypatch, place() as here:
        Sent(monkeypatch)
        source, base = here / "source", None
        for number, edits in enumerate(rounds):
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
    """Where each directory is, in one state after the other; the same states whenever they are asked for."""
    chance = random.Random(11)
    at = [chance.randrange(PLACES) for _ in range(MOVED)]
    while True:
        yield list(at)
        at[chance.randrange(MOVED)] = chance.randrange(PLACES)


def move_for_ever(source: str, count: Any, pause: Any) -> None:
    """Go from state to state, some of them at once, then rest, for as long as the other process wishes."""
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
    """Where the directories are in a tree; none may be missing, or there twice, or without its files."""
    paths = [each.path.decode() for each in read_manifest(tree) if each.kind == "f"]
    found = sorted((int(path.split("/")[1][1:]), int(path[1:3])) for path in paths)
    assert [each for each, _ in found] == [each for each in range(MOVED) for _ in range(IN_EACH)]
    return [where for _, where in found[::IN_EACH]]


def test_while_directories_are_moved_about_a_tree_is_one_state_or_none(scratch: Path, sent: Sent) -> None:
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
    mover = context.Process(target=move_for_ever, args=(str(source), count, pause), daemon=True)
    refused, taken = 0, []
    mover.start()
    try:
        for number in range(45):
            sent.meet = sent.wait_at(f"p{chance.randrange(PLACES):02}")
            tree = scratch / f"q{number}"
            try:
                capture(source, tree, base=base, **options)
            except ConsistencyUnavailable:
                refused += 1
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
    assert sent.used
    assert refused > 0, "the directories were moved too slowly for this to mean anything"
    assert taken, "the directories were moved too fast for this to mean anything"


# --- Directories that changed -----------------------------------------------------------------------


def test_what_it_saw_in_a_directory_that_changed_is_read_without_another_look(
    desk: Desk, sent: Sent, monkeypatch: pytest.MonkeyPatch
) -> None:
    desk.take()
    (desk.source / "d1/e1/f1").write_bytes(b"changed")
    (desk.source / "d2/e0/new").write_bytes(b"new")
    (desk.source / "d2/e2/f0").unlink()
    desk.settle()
    captured: list[Captured] = []

    assert looks_during(lambda: captured.append(desk.take()[1]), monkeypatch) == 0
    tree = desk.place / "tree-2"
    copied = capture(desk.source, desk.place / "copied", engine=Engine.COPY, quiesced=True)
    assert captured[0].payload_hash == copied.payload_hash
    assert (captured[0].files, captured[0].bytes) == (copied.files, copied.bytes)
    assert list(verify(tree, copied.payload_hash)) == []


def test_a_directory_that_changed_again_after_it_looked_is_looked_at(
    desk: Desk, sent: Sent, monkeypatch: pytest.MonkeyPatch
) -> None:
    desk.take()
    (desk.source / "d1/e1/f1").write_bytes(b"changed")
    desk.settle()
    sent.meet = sent.wait_at("", after=(desk.source / "d1/e1/late").touch)
    tree, captured = desk.take(quiesced=False)

    assert "d1/e1/late" in {os.fsdecode(each.path) for each in read_manifest(tree)}
    assert list(verify(tree, captured.payload_hash)) == []


def test_a_symbolic_link_in_a_directory_that_changed_has_its_owner(desk: Desk, sent: Sent) -> None:
    (desk.source / "d1/e1/link").symlink_to("f1")
    desk.settle()
    desk.take()
    (desk.source / "d1/e1/f1").write_bytes(b"changed")
    desk.settle()
    tree, captured = desk.take()
    copied = capture(desk.source, desk.place / "copied", engine=Engine.COPY, quiesced=True)
    assert captured.payload_hash == copied.payload_hash
    assert list(verify(tree, copied.payload_hash)) == []
