"""Loose lines in files: written after the commit point, under the lock of their stream alone."""

from __future__ import annotations

import os
import random
import signal
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import msgspec
import pytest

from holdfast.errors import IoFailure
from holdfast.fs import calls, durable
from holdfast.fs.directory import Directory
from holdfast.store import files, lines
from holdfast.store.files import FileStore
from holdfast.store.intents import Intents
from holdfast.store.layout import INTENTS, Location
from holdfast.store.lines import Waiting
from holdfast.store.model import Append, Change, Create, Decision, Family, Key, Replace, Stream, StructCodec, View
from holdfast.store.model import newest_first as newest
from proof import effort
from tests.locks.workers import Line, Worker, Workers, stop_myself, wait_until

pytestmark = pytest.mark.skipif(sys.platform == "win32", reason="the workers are forked, stopped and killed")

Prepare = Callable[[pytest.MonkeyPatch], object]


class Note(msgspec.Struct, frozen=True):
    number: int
    text: str = ""


NOTES = Family("jit/issues", StructCodec(Note))
A, B, C = (NOTES.key(each) for each in "abc")


def _in_turn(view: View, records: Sequence[Note]) -> list[Append]:
    raise AssertionError("only a server calls this")


EVENTS = Stream("jit/events", StructCodec(Note, pretty=False), chain=_in_turn)


@pytest.fixture
def store(scratch: Path) -> Iterator[FileStore]:
    with FileStore(scratch, timeout=20.0) as found:
        commit(found, *(Create(each, Note(0)) for each in (A, B, C)), Append(EVENTS, Note(0, "first")))
        yield found


def commit(store: FileStore, *changes: Change, commit_id: str | None = None) -> None:
    named = [each.stream if isinstance(each, Append) else each.key for each in changes]
    store.transact(named, lambda view, now: Decision(changes, None), commit_id=commit_id)


def tell(store: FileStore, key: Key[Note], number: int, *, commit_id: str | None = None) -> None:
    """Change a document, with a line that says so."""
    commit(store, Replace(key, Note(number)), Append(EVENTS, Note(number, key.name)), commit_id=commit_id)


def tell_twice(store: FileStore, key: Key[Note], number: int) -> None:
    commit(
        store, Replace(key, Note(number)), *(Append(EVENTS, Note(number, each)) for each in (key.name, f"{key.name}!"))
    )


def told(store: FileStore, **options: Any) -> list[str]:
    return [f"{each.record.text[-1]}{each.record.number}" for each in store.entries(EVENTS, **options)]


def in_the_file(store: FileStore) -> list[bytes]:
    return (store.path / ".jit/events.jsonl").read_bytes().splitlines()


def pending(store: FileStore) -> list[str]:
    return sorted(path.stem for path in (store.path / INTENTS).glob("*.json"))


def elsewhere(
    workers: Workers, store: FileStore, prepare: Prepare, key: Key[Note], *, commit_id: str | None = None
) -> Worker:
    """Let another process commit; `prepare` ends or stops it at some point."""

    def work(line: Line) -> None:
        with pytest.MonkeyPatch.context() as patches, FileStore(store.path) as mine:
            prepare(patches)
            tell(mine, key, 1, commit_id=commit_id)
        line.say("done")

    return workers.start(work)


def die() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def at_the_commit_point(do: Callable[[], object]) -> Prepare:
    def prepare(patches: pytest.MonkeyPatch) -> None:
        apply = Intents.apply

        def first(*arguments: Any) -> list[int]:
            do()
            return apply(*arguments)

        patches.setattr(Intents, "apply", first)

    return prepare


def with_an_unsynced_line(patches: pytest.MonkeyPatch) -> None:
    """Dies after it has released the lock of the stream."""
    append = durable.append_in

    def appended(*arguments: Any, unlock: Callable[[], object], **options: Any) -> object:
        def unlock_and_die() -> None:
            unlock()
            die()

        return append(*arguments, unlock=unlock_and_die, **options)

    patches.setattr(durable, "append_in", appended)


# --- Power cuts, where several writers meet -----------------------------------------------------------


@pytest.mark.parametrize("ids", [("0", "1"), ("1", "0")], ids=["in order", "out of order"])
def test_a_line_whose_place_a_power_cut_has_moved_is_written_once(store: FileStore, ids: tuple[str, str]) -> None:
    """The line of the first process is not synced yet when the second one looks where the stream ends. Both lines have
    the same length, so the place exists again once one of them was written."""
    size = (store.path / ".jit/events.jsonl").stat().st_size
    with Workers() as workers:
        assert elsewhere(workers, store, with_an_unsynced_line, A, commit_id=ids[0]).wait() == -signal.SIGKILL
        assert elsewhere(workers, store, at_the_commit_point(die), B, commit_id=ids[1]).wait() == -signal.SIGKILL
    os.truncate(store.path / ".jit/events.jsonl", size)  # what a power cut may leave

    for _ in range(3):
        assert sorted(told(store)[1:]) == ["a1", "b1"]
    tell(store, A, 2)
    tell(store, B, 2)
    assert sorted(told(store)[1:]) == ["a1", "a2", "b1", "b2"]
    assert len(in_the_file(store)) == 5
    assert pending(store) == []


def test_a_line_after_one_that_another_program_did_not_sync_is_written_once(store: FileStore) -> None:
    path = store.path / ".jit/events.jsonl"
    size = path.stat().st_size
    with path.open("a") as file:
        file.write('{"number":7,"text":"not synced"}\n')
    with Workers() as workers:
        assert elsewhere(workers, store, at_the_commit_point(die), A).wait() == -signal.SIGKILL
    os.truncate(path, size)

    assert [told(store) for _ in range(3)] == [["t0", "a1"]] * 3
    assert len(in_the_file(store)) == 2


def test_no_line_becomes_durable_before_its_commit(store: FileStore, monkeypatch: pytest.MonkeyPatch) -> None:
    """The author is stopped once the intent has its name, before that is synced. A reader adds its line."""
    monkeypatch.setattr(files, "_PAUSES", ())
    synced: list[str] = []
    fsync, sync = calls.fsync, Directory.sync

    def stopping(patches: pytest.MonkeyPatch) -> None:
        def sync_names(directory: Directory, name: str = "") -> None:
            if name.endswith(".json") and directory.where("").rstrip("/").endswith(INTENTS):
                stop_myself()
            sync_all(directory, name)

        sync_all = durable.sync_names
        patches.setattr(durable, "sync_names", sync_names)

    def noted(fd: int) -> None:
        synced.append(os.path.basename(os.readlink(f"/proc/self/fd/{fd}")))
        fsync(fd)

    def noted_names(self: Directory) -> None:
        synced.append(os.path.basename(self.where("").rstrip("/")))
        sync(self)

    with Workers() as workers:
        worker = elsewhere(workers, store, stopping, A)
        worker.wait_until_stopped()
        monkeypatch.setattr(calls, "fsync", noted)
        monkeypatch.setattr(Directory, "sync", noted_names)
        assert told(store) == ["t0", "a1"]
        assert len(in_the_file(store)) == 2
        assert synced.index("intents") < synced.index("events.jsonl")
        worker.resume()
        assert worker.hear() == "done"
    assert told(store) == ["t0", "a1"]


# --- Authors that are stopped, and lines that cannot be added -----------------------------------------


def test_a_stopped_author_delays_no_transaction_but_those_on_its_documents(store: FileStore) -> None:
    with Workers() as workers:
        worker = elsewhere(workers, store, at_the_commit_point(stop_myself), A)
        worker.wait_until_stopped()
        commit(store, Append(EVENTS, Note(1, "alone")))  # locks the stream from the beginning
        tell(store, B, 1)
        assert told(store) == ["t0", "a1", "e1", "b1"]
        worker.resume()
        assert worker.hear() == "done"
    assert told(store) == ["t0", "a1", "e1", "b1"]
    assert pending(store) == []


def test_a_transaction_on_the_stream_alone_is_decided_once_however_many_others_commit(
    store: FileStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Their intents do not look like those of dead authors."""
    attempts: list[object] = []
    original = FileStore._try

    def counted(*arguments: Any) -> Any:
        attempts.append(arguments)
        return original(*arguments)

    def write(key: Key[Note]) -> Callable[[Line], None]:
        def work(line: Line) -> None:
            with FileStore(store.path) as mine:
                number = 1
                while not line.has_news():
                    tell(mine, key, number)
                    number += 1

        return work

    with Workers() as workers:
        writers = [workers.start(write(key)) for key in (A, B, C)]
        wait_until(lambda: len(in_the_file(store)) > 10)
        monkeypatch.setattr(FileStore, "_try", counted)
        count = effort.rounds(500, least=20)
        for number in range(count):
            commit(store, Append(EVENTS, Note(number, "alone")))
        for each in writers:
            each.say("stop")
        assert [each.wait() for each in writers] == [0, 0, 0]
    assert len(attempts) == count
    assert [each for each in told(store) if each[0] == "e"] == [f"e{number}" for number in range(count)]


def test_the_commit_of_a_dead_author_is_finished_beside_one_of_a_stopped_one(store: FileStore) -> None:
    with Workers() as workers:
        stopped = elsewhere(workers, store, at_the_commit_point(stop_myself), A, commit_id="a")
        stopped.wait_until_stopped()
        assert elsewhere(workers, store, at_the_commit_point(die), B, commit_id="b").wait() == -signal.SIGKILL
        assert sorted(told(store)) == ["a1", "b1", "t0"]
        assert pending(store) == ["a"]
        stopped.resume()
        assert stopped.hear() == "done"
    assert pending(store) == []


@pytest.mark.parametrize("reason", ["locked", "full"])
def test_lines_that_cannot_be_added_are_shown_at_the_end_and_once_more_when_they_are_written(
    store: FileStore, reason: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A reader that continues at the end waits for something new."""
    monkeypatch.setattr(files, "_PAUSES", ())
    monkeypatch.setattr(files, "_PATIENCE", 0.05)

    def fail(*arguments: object) -> None:
        raise IoFailure("append to", "events.jsonl", OSError(28, "No space left on device"))

    with Workers() as workers, FileStore(store.path) as other:
        worker = elsewhere(workers, store, at_the_commit_point(stop_myself), A)
        worker.wait_until_stopped()
        with pytest.MonkeyPatch.context() as patches:
            if reason == "full":
                patches.setattr(FileStore, "_add_lines", fail)
            else:
                held = other._locks.locked([other._locate(EVENTS)])
                held.__enter__()
            entries = list(store.entries(EVENTS))
            assert [each.record.text for each in entries] == ["first", A.name]
            assert entries[1].position == entries[0].position
            assert list(newest(store, EVENTS)) == entries[::-1]
            assert told(store, after=entries[1].position) == []
            if reason == "locked":
                held.__exit__(None, None, None)
        assert told(store, after=entries[1].position) == ["a1"]
        worker.resume()
        assert worker.hear() == "done"


def test_a_torn_line_before_those_of_others_is_removed(store: FileStore) -> None:
    """The author dies amid its line, long after others have written theirs, and another program appends to it."""

    def torn(patches: pytest.MonkeyPatch) -> None:
        def write(self: Intents, directory: Directory, *arguments: object) -> None:
            patches.undo()
            with FileStore(store.path) as other:
                tell(other, B, 1)
            with open(directory.where("events.jsonl"), "a") as file:
                file.write('{"number":1,"te')
            die()

        patches.setattr(Intents, "_write_loose", write)

    with Workers() as workers:
        assert elsewhere(workers, store, torn, A).wait() == -signal.SIGKILL
    with (store.path / ".jit/events.jsonl").open("a") as file:
        file.write('{"number":5,"text":"other"}\n')

    tell(store, A, 2)
    assert told(store) == ["t0", "b1", "r5", "a1", "a2"]


# --- Many at once -------------------------------------------------------------------------------------


def test_killed_and_stopped_writers_lose_no_line_and_write_none_twice(store: FileStore) -> None:
    """Each writer has a document of its own and counts in it; system calls take a random time. Some writers are killed
    or stopped at any moment, while others read."""
    chance = random.Random(effort.SEED)
    for _ in range(effort.rounds(100)):
        storm(store, chance)
        effort.tried["rounds of late lines"] += 1


def not_recognised(plant: pytest.MonkeyPatch) -> None:
    def none_found(directory: Directory, location: Location, after: int, lines: tuple[bytes, ...]) -> Waiting:
        return Waiting(after, after, lines)

    plant.setattr(lines, "find_waiting", none_found)


def not_awaited(plant: pytest.MonkeyPatch) -> None:
    plant.setattr(FileStore, "_await_lines", lambda self, stream, location: ())


@pytest.mark.parametrize(("bug", "symptom"), [(not_recognised, "At index"), (not_awaited, "and then not its line")])
def test_the_storm_finds_lines_that_are(
    bug: Prepare, symptom: str, store: FileStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    bug(monkeypatch)
    chance = random.Random(effort.SEED)
    with pytest.raises(AssertionError, match=symptom):  # noqa: PT012
        for _ in range(100):
            storm(store, chance)


def storm(store: FileStore, chance: random.Random) -> None:
    with Workers() as workers:
        writers = [workers.start(counting(store.path, key, chance.randrange(1 << 32))) for key in (A, B, C)]
        for _ in range(10):
            time.sleep(chance.random() / 20)
            os.kill(chance.choice(writers).pid, chance.choice([signal.SIGSTOP, signal.SIGCONT]))
            check_numbers(store)
        for each in writers:
            each.kill()
    for key in (A, B, C):
        tell_twice(store, key, number_in(store, key) + 1)
    check_numbers(store)
    assert pending(store) == []
    assert len(in_the_file(store)) == len(told(store))


def counting(directory: Path, key: Key[Note], seed: int) -> Callable[[Line], None]:
    delays = random.Random(seed)

    def delayed(call: Callable[..., Any]) -> Callable[..., Any]:
        def slow(*arguments: Any, **options: Any) -> Any:
            if delays.random() < 0.2:
                time.sleep(delays.random() / 200)
            return call(*arguments, **options)

        return slow

    def work(line: Line) -> None:
        with pytest.MonkeyPatch.context() as patches, FileStore(directory, timeout=60.0) as mine:
            for name in ("fsync", "link", "replace", "write", "unlink"):
                patches.setattr(calls, name, delayed(getattr(calls, name)))
            while True:
                tell_twice(mine, key, number_in(mine, key) + 1)

    return work


def number_in(store: FileStore, key: Key[Note]) -> int:
    found = store.read(key)
    assert found is not None
    return found.record.number


def check_numbers(store: FileStore) -> None:
    """Assert that the stream has all lines of the documents as they are now, once and in order."""
    numbers = {key.name: number_in(store, key) for key in (A, B, C)}
    entries = [each.record for each in store.entries(EVENTS)]
    for name, number in numbers.items():
        found = [each.number for each in entries if each.text == name]
        assert found == list(range(1, len(found) + 1))
        assert found == [each.number for each in entries if each.text == f"{name}!"], "half of a commit"
        assert len(found) >= number, f"a reader has seen {name} {number}, and then not its line"
