"""Wait notes: visible exactly as long as the wait lasts, however it ends."""

from __future__ import annotations

import os
import random
import sys
import time
import uuid
from pathlib import Path

import pytest

from holdfast.fs import calls
from holdfast.fs.directory import Directory
from holdfast.leases import wait_notes
from holdfast.leases.deadlock import Resource
from holdfast.leases.wait_notes import WaitNote, WaitNotes
from holdfast.locks.identity import current_holder
from tests.locks.workers import Line, Workers

pytestmark = pytest.mark.skipif(sys.platform == "win32", reason="Windows cannot read a locked file")

THING = Resource("file lock", "/some/build.lock", "fe:00:7")


def note(since: str = "2026-01-02T03:04:05.000000Z") -> WaitNote:
    return WaitNote(
        str(uuid.uuid4()),
        THING,
        since,
        current_holder(),
        agent="host:me:7:1",
        above=("host:me:8:2", "host:me:9:3"),
        actor="agent:a",
        purpose="to build",
        shared=True,
        proof="5f0c",
    )


@pytest.fixture
def place(tmp_path: Path) -> Path:
    (tmp_path / "home").mkdir()
    return tmp_path / "home" / "waits"


def test_a_note_describes_a_wait_until_it_is_taken_down(place: Path) -> None:
    board, mine = WaitNotes([place]), note()
    posted = board.post(mine)
    assert board.notes() == [mine]
    posted.take_down()
    posted.take_down()
    assert board.notes() == []
    assert not list(place.iterdir())


def test_a_note_becomes_an_edge_of_the_wait_graph() -> None:
    mine = note()
    wait = mine.as_wait()
    assert (wait.resource, wait.ticket, wait.since, wait.shared) == (THING, mine.ticket, mine.since, True)
    assert (wait.waiter.actor, wait.waiter.owner) == ("agent:a", "")
    assert len(wait.waiter.processes) == 2
    assert len(wait.waiter.above) == 2
    assert wait.waiter.proofs == {"5f0c"}


def test_notes_are_listed_once_and_oldest_first_across_directories(place: Path, tmp_path: Path) -> None:
    board = WaitNotes([place, tmp_path / "home" / "more", place])
    young, old = note("2026-01-02T00:00:00Z"), note("2026-01-01T00:00:00Z")
    posted = [board.post(each) for each in (young, old)]
    assert board.notes() == [old, young]
    assert WaitNotes([tmp_path / "home" / "more"]).notes() == [old, young]
    for each in posted:
        each.take_down()


def test_posting_to_an_unwritable_directory_has_no_effect_and_does_not_fail(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    for place in (tmp_path / "file" / "waits", tmp_path / "missing" / "waits"):
        board = WaitNotes([place])
        board.post(note()).take_down()
        assert board.notes() == []
    assert not (tmp_path / "missing").exists(), "a missing directory must not be created"


def test_a_full_disk_leaves_no_empty_note_behind(place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(descriptor: int, content: bytes) -> int:
        raise OSError(28, "No space left on device")

    board = WaitNotes([place])
    with monkeypatch.context() as patched:
        patched.setattr(calls, "write", full)
        posted = board.post(note())
    assert board.notes() == []
    posted.take_down()
    assert not list(place.iterdir())


def test_a_link_in_place_of_the_directory_is_neither_written_to_nor_swept(place: Path) -> None:
    elsewhere = place.with_name("elsewhere")
    elsewhere.mkdir()
    (elsewhere / "letter.json").write_bytes(b"dear")
    place.symlink_to(elsewhere)

    board = WaitNotes([place])
    posted = board.post(note())

    assert board.notes() == []
    assert [each.name for each in elsewhere.iterdir()] == ["letter.json"]
    posted.take_down()


@pytest.mark.parametrize("content", [b"", b"{", b"[]", b"{}", b'{"ticket": 3}', b"\xff" * 70_000])
def test_a_file_that_is_not_a_note_is_swept_unless_it_is_locked(place: Path, content: bytes) -> None:
    place.mkdir()
    (place / "x.json").write_bytes(content)
    (place / "README").write_text("not ours")
    board = WaitNotes([place])
    assert board.notes(sweep=False) == []
    assert len(list(place.iterdir())) == 2
    assert board.notes() == []
    assert [each.name for each in place.iterdir()] == ["README"]


def test_a_note_with_a_wrong_name_or_time_is_ignored(place: Path) -> None:
    board = WaitNotes([place])
    posted = board.post(note())
    [path] = place.iterdir()
    path.rename(place / "other.json")
    wrong = board.post(note(since="yesterday"))
    assert board.notes() == []
    for each in (posted, wrong):
        each.take_down()


def test_the_note_of_a_killed_process_is_ignored_and_swept(place: Path) -> None:
    def work(line: Line) -> None:
        kept = WaitNotes([place]).post(note())
        line.say("posted")
        line.wait()
        kept.take_down()

    board = WaitNotes([place])
    with Workers() as workers:
        worker = workers.start(work)
        assert worker.hear() == "posted"
        assert len(board.notes()) == 1
        worker.kill()
        worker.wait()
        assert board.notes(sweep=False) == []
        assert len(list(place.iterdir())) == 1
        assert board.notes() == []
        assert not list(place.iterdir())


def test_a_child_neither_keeps_nor_takes_down_the_note_of_its_parent(place: Path) -> None:
    board = WaitNotes([place])
    posted = board.post(note())

    def work(line: Line) -> None:
        posted.take_down()
        line.say("done")
        line.wait()

    with Workers() as workers:
        worker = workers.start(work)
        assert worker.hear() == "done"
        assert len(board.notes()) == 1
        posted.take_down()
        assert board.notes() == []


def test_an_unlocked_note_of_another_machine_is_ignored_but_not_swept(place: Path) -> None:
    """On a file system that does not share locks, a free lock proves nothing."""
    board = WaitNotes([place])
    far = note()._replace(holder=current_holder()._replace(host="elsewhere", boot_id="another"))
    posted = board.post(far)
    assert board.notes() == [far]
    [path] = place.iterdir()
    content = path.read_bytes()
    posted.take_down()
    path.write_bytes(content)
    assert board.notes() == []
    assert path.exists()


def test_notes_posted_during_sweeps_are_never_lost(place: Path) -> None:
    """Sweepers remove every unlocked note, yet a posted note stays visible to all processes."""

    def post(line: Line) -> None:
        board = WaitNotes([place])
        for _ in range(80):
            mine = note()
            posted = board.post(mine)
            assert mine in board.notes()
            if random.random() < 0.2:
                time.sleep(0.001)
            assert mine in board.notes()
            posted.take_down()
        line.say("done")

    def sweep(line: Line) -> None:
        board = WaitNotes([place])
        while not line.has_news():
            board.notes()
        line.say("done")

    with Workers() as workers:
        posters, sweepers = workers.start_many(3, post), workers.start_many(1, sweep)
        assert [each.hear() for each in posters] == ["done"] * 3
        assert sweepers[0].ask("enough") == "done"
    assert not list(place.iterdir())


def test_a_writer_that_does_not_check_again_would_be_found(place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Planted bug: the note is written to a file that was swept before it was locked."""

    def swept(directory: Directory, name: str, content: bytes) -> None:
        os.unlink(directory.where(name))

    monkeypatch.setattr(wait_notes, "_write", swept)
    board, mine = WaitNotes([place]), note()
    posted = board.post(mine)
    assert mine not in board.notes()
    posted.take_down()
