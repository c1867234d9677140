"""Notes of those who wait: seen as long as they wait, and not a moment longer, however the wait ends."""

from __future__ import annotations

import os
import random
import sys
import time
import uuid
from pathlib import Path

import pytest

from holdfast.fs import calls
from holdfast.leases import wait_notes
from holdfast.leases.deadlock import Resource
from holdfast.leases.wait_notes import WaitNote, WaitNotes
from holdfast.locks.identity import current_holder
from tests.locks.workers import Line, Workers

pytestmark = pytest.mark.skipif(sys.platform == "win32", reason="a locked file cannot be read there")

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


def test_a_note_says_all_of_a_wait_until_it_is_taken_down(place: Path) -> None:
    board, mine = WaitNotes([place]), note()
    posted = board.post(mine)
    assert board.notes() == [mine]
    posted.take_down()
    posted.take_down()
    assert board.notes() == []
    assert not list(place.iterdir())


def test_a_note_is_a_wait_in_a_picture() -> None:
    mine = note()
    wait = mine.as_wait()
    assert (wait.resource, wait.ticket, wait.since, wait.shared) == (THING, mine.ticket, mine.since, True)
    assert (wait.waiter.actor, wait.waiter.owner) == ("agent:a", "")
    assert len(wait.waiter.processes) == 2
    assert len(wait.waiter.above) == 2
    assert wait.waiter.proofs == {"5f0c"}


def test_the_oldest_come_first_and_each_once_wherever_they_are_posted(place: Path, tmp_path: Path) -> None:
    board = WaitNotes([place, tmp_path / "home" / "more", place])
    young, old = note("2026-01-02T00:00:00Z"), note("2026-01-01T00:00:00Z")
    posted = [board.post(each) for each in (young, old)]
    assert board.notes() == [old, young]
    assert WaitNotes([tmp_path / "home" / "more"]).notes() == [old, young]
    for each in posted:
        each.take_down()


def test_where_nothing_can_be_written_nothing_is_seen_and_nothing_fails(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    for place in (tmp_path / "file" / "waits", tmp_path / "missing" / "waits"):
        board = WaitNotes([place])
        board.post(note()).take_down()
        assert board.notes() == []
    assert not (tmp_path / "missing").exists(), "what is gone is not made anew"


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


@pytest.mark.parametrize("content", [b"", b"{", b"[]", b"{}", b'{"ticket": 3}', b"\xff" * 70_000])
def test_what_is_no_note_is_swept_if_nobody_has_it(place: Path, content: bytes) -> None:
    place.mkdir()
    (place / "x.json").write_bytes(content)
    (place / "README").write_text("not ours")
    board = WaitNotes([place])
    assert board.notes(sweep=False) == []
    assert len(list(place.iterdir())) == 2
    assert board.notes() == []
    assert [each.name for each in place.iterdir()] == ["README"]


def test_a_note_under_another_name_or_without_a_time_does_not_count(place: Path) -> None:
    board = WaitNotes([place])
    posted = board.post(note())
    [path] = place.iterdir()
    path.rename(place / "other.json")
    wrong = board.post(note(since="yesterday"))
    assert board.notes() == []
    for each in (posted, wrong):
        each.take_down()


def test_a_note_of_one_who_was_killed_does_not_count_and_is_swept(place: Path) -> None:
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


def test_a_child_does_not_keep_the_note_of_its_parent_nor_take_it_down(place: Path) -> None:
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


def test_a_note_of_another_machine_is_left_alone_but_does_not_count_unlocked(place: Path) -> None:
    """On a file system that does not share locks, that it can be locked says nothing."""
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


def test_notes_that_are_made_and_swept_at_once_are_never_lost(place: Path) -> None:
    """Sweepers take whatever is not locked; a note that was posted is seen all the same, by everybody."""

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


def test_a_writer_that_does_not_look_again_would_be_found(place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A planted fault: the note is written into a file that was swept before it was locked."""

    def swept(path: str, content: bytes) -> None:
        os.unlink(path)

    monkeypatch.setattr(wait_notes, "_write", swept)
    board, mine = WaitNotes([place]), note()
    posted = board.post(mine)
    assert mine not in board.notes()
    posted.take_down()
