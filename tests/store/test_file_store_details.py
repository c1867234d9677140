"""Details of the file store: its files, its locks, recovery after a kill, and watching."""

from __future__ import annotations

import contextlib
import json
import os
import random
import shutil
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from holdfast.errors import Corrupt, LockTimeout, UsageFailure
from holdfast.fs import calls
from holdfast.locks.file_lock import HeldLock
from holdfast.store import files, intents
from holdfast.store.files import FileStore
from holdfast.store.intents import Intents
from holdfast.store.model import (
    Append,
    Blind,
    Change,
    Create,
    Decision,
    Delete,
    Family,
    Key,
    Replace,
    Stream,
    StructCodec,
    View,
)
from holdfast.store.watch import DirectoryEvents
from holdfast.testing.backend import (
    AUDIT,
    DESCRIPTORS,
    EVENTS,
    GATES,
    INDEX,
    ISSUES,
    LEDGER,
    PATIENCE,
    WORKTREES,
    Event,
    Item,
    append_often,
    apply,
    increment,
    number_of,
    run_threads,
)
from holdfast.testing.contract_streams import WatchingContract
from tests.locks.workers import Line, Workers
from tests.store.test_file_store import FileBackend, open_file_store
from tests.support.descriptors import open_descriptors
from tests.support.interruptions import interruptions

ONE = ISSUES.key("one")
TWO = ISSUES.key("two")
INTENTS = ".holdfast/intents"


@pytest.fixture
def store(scratch: Path) -> Iterator[FileStore]:
    with open_file_store(scratch / "store") as store:
        yield store


def intents_of(store: FileStore) -> list[Path]:
    return sorted((store.path / INTENTS).glob("*"))


# --- Plain files ------------------------------------------------------------------------------------


@pytest.mark.req("FL-07")
def test_documents_and_streams_are_plain_json_at_the_paths_of_the_specifications(store: FileStore) -> None:
    apply(store, Create(INDEX, Item(1, "Grüße")), Create(GATES, Item(2)), Create(ONE, Item(3)))
    apply(store, Create(WORKTREES.key("main"), Item(4)), Create(DESCRIPTORS.key("s1"), Item(5)))
    for number in (1, 2):
        apply(store, *(Append(stream, Event(number, "a\nb")) for stream in (EVENTS, AUDIT, LEDGER)))

    expected = {
        ".jit/index.json": {"number": 1, "text": "Grüße"},
        ".jit/gates.json": {"number": 2, "text": ""},
        ".jit/issues/one.json": {"number": 3, "text": ""},
        ".jvs/worktrees/main/config.json": {"number": 4, "text": ""},
        ".jvs/descriptors/s1.json": {"number": 5, "text": ""},
        "ledger/event-000001.json": {"number": 1, "text": "a\nb"},
        "ledger/event-000002.json": {"number": 2, "text": "a\nb"},
    }
    for path, record in expected.items():
        text = (store.path / path).read_text(encoding="utf-8")
        assert json.loads(text) == record
        assert "ledger" in path or text.endswith("\n}\n"), "documents span several lines, for people to read"
    assert "Grüße" in (store.path / ".jit/index.json").read_text(encoding="utf-8")
    for path in (".jit/events.jsonl", ".jvs/audit/audit.jsonl"):
        lines = (store.path / path).read_text(encoding="utf-8").splitlines()
        assert [json.loads(line) for line in lines] == [{"number": each, "text": "a\nb"} for each in (1, 2)]


def test_a_manual_edit_of_a_document_is_read(store: FileStore) -> None:
    apply(store, Create(ONE, Item(1)))
    before = store.read(ONE)
    (store.path / ".jit/issues/one.json").write_text('{"text": "by hand", "number": 7}')

    after = store.read(ONE)
    assert after is not None
    assert before is not None
    assert (after.record, after.version != before.version) == (Item(7, "by hand"), True)
    assert increment(store, ONE) == 8


def test_a_change_of_the_working_directory_does_not_move_the_store(
    scratch: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (scratch / "elsewhere").mkdir()
    monkeypatch.chdir(scratch)
    with FileStore("store") as store:
        increment(store, ONE)
        monkeypatch.chdir(scratch / "elsewhere")
        assert increment(store, ONE, EVENTS) == 2
        assert [name for name, _ in store.scan(ISSUES)] == ["one"]
    assert list((scratch / "elsewhere").iterdir()) == []


def test_drafts_and_other_litter_are_ignored(store: FileStore) -> None:
    apply(store, Create(ONE, Item(1)), Create(WORKTREES.key("w"), Item(1)), Append(LEDGER, Event(1)))
    litter = [
        *(".jit/issues/.one.json-0123456789ab.tmp", ".jit/issues/one.json~", ".jit/issues/a b.json"),
        *(".jvs/worktrees/.DS_Store", ".jvs/worktrees/README", f"{INTENTS}/.x.json-0123456789ab.tmp"),
        *(f"{INTENTS}/README", "ledger/.event-000002.json-0123456789ab.tmp", ".jit/.index.json-0.tmp"),
    ]
    for path in litter:
        (store.path / path).write_text("litter")
    (store.path / ".jvs/worktrees/empty").mkdir()

    assert [name for name, _ in store.scan(ISSUES)] == ["one"]
    assert [name for name, _ in store.scan(WORKTREES)] == ["w"]
    assert increment(store, ONE, LEDGER) == 2
    assert [each.position for each in store.entries(LEDGER)] == [1, 2]
    assert all((store.path / path).read_text() == "litter" for path in litter)


# --- Streams ------------------------------------------------------------------------------------------


def test_the_positions_of_a_numbered_stream_are_its_numbers(store: FileStore) -> None:
    assert append_often(store, LEDGER, "", 3) == [1, 2, 3]
    with open_file_store(store.path) as other:
        assert apply(other, Append(LEDGER, Event(4)), Append(LEDGER, Event(5))).positions == (4, 5)
    assert append_often(store, LEDGER, "", 1) == [6]


def test_appending_to_a_numbered_stream_lists_nothing(store: FileStore, monkeypatch: pytest.MonkeyPatch) -> None:
    append_often(store, LEDGER, "", 100)
    listed, looked = noted(monkeypatch, "listdir"), noted(monkeypatch, "stat")
    scanned = noted(monkeypatch, "scandir")
    with open_file_store(store.path) as other:
        for number in (101, 102):  # the end is noted, for a process that has not seen it either
            looked.clear()
            assert append_often(other, LEDGER, "", 1) == [number]
            assert 0 < sum("event" in path for path in looked) < 5

    assert not [path for path in listed + scanned if "ledger" in path]


def test_a_commit_syncs_the_ledger_once_unless_a_name_may_not_be_synced(
    store: FileStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    append_often(store, LEDGER, "", 1)
    ledger = os.stat(store.path / "ledger").st_ino
    synced: list[int] = []
    sync = calls.sync_directory

    def note(descriptor: int) -> None:
        synced.append(os.fstat(descriptor).st_ino)
        sync(descriptor)

    def syncs(*changes: Append) -> int:
        synced.clear()
        apply(store, *changes)
        return synced.count(ledger)

    monkeypatch.setattr(calls, "sync_directory", note)
    assert syncs(Append(LEDGER, Event(2))) == 1
    assert syncs(*(Append(LEDGER, Event(number)) for number in range(3, 15))) == 1
    assert syncs(Append(LEDGER, Event(15))) == 1, "our own batch needs no extra sync either"
    with open_file_store(store.path) as other:
        apply(other, Append(LEDGER, Event(16)))
    assert syncs(Append(LEDGER, Event(17))) == 1, "the note of the other writer says that it has synced its name"
    (store.path / "ledger/note").touch()
    assert syncs(Append(LEDGER, Event(18))) == 2, "a process that died, or another program, may have appended"
    assert syncs(Append(LEDGER, Event(19))) == 1


def test_a_blind_append_syncs_its_draft_before_it_takes_the_lock(
    store: FileStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    append_often(store, LEDGER, "", 1)
    locked: list[bool] = []
    sync = calls.fsync

    def note(descriptor: int) -> None:
        locked.append((store.path / "ledger/ledger.lock").exists())
        sync(descriptor)

    monkeypatch.setattr(calls, "fsync", note)
    for _ in range(2):
        locked.clear()
        store.transact([LEDGER], Blind(lambda now: Decision([Append(LEDGER, Event(2))], None)))
    assert locked == [False, True], "the content, and then the name"


def noted(monkeypatch: pytest.MonkeyPatch, name: str) -> list[str]:
    """The paths that a call gets from now on; the list grows."""
    paths: list[str] = []
    call = getattr(calls, name)

    def note(path: object, *arguments: Any, **rest: Any) -> Any:
        paths.append(str(path))
        return call(path, *arguments, **rest)

    monkeypatch.setattr(calls, name, note)
    return paths


@pytest.mark.req("FL-12")
def test_a_torn_line_is_skipped_and_truncated_before_the_next_append(store: FileStore) -> None:
    append_often(store, EVENTS, "", 2)
    path = store.path / ".jit/events.jsonl"
    whole = path.read_bytes()
    path.write_bytes(whole + b'{"number": 2, "te')

    assert [each.record.number for each in store.entries(EVENTS)] == [0, 1]
    apply(store, Append(EVENTS, Event(3)), Create(ONE, Item(1)))
    assert [each.record.number for each in store.entries(EVENTS)] == [0, 1, 3]
    assert path.read_bytes().startswith(whole + b'{"number":3')


def test_a_reader_never_mixes_a_torn_line_with_its_replacement(
    store: FileStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    append_often(store, EVENTS, "", 1)
    path = store.path / ".jit/events.jsonl"
    path.write_bytes(path.read_bytes() + b'{"number": 99')
    read = calls.read

    def read_and_be_overtaken(fd: int, size: int) -> bytes:
        content = read(fd, size)
        if content.endswith(b"99"):
            monkeypatch.setattr(calls, "read", read)
            with open_file_store(store.path) as other:
                apply(other, Append(EVENTS, Event(5, "a longer one")))
        return content

    monkeypatch.setattr(calls, "read", read_and_be_overtaken)
    seen = [each.record.number for each in store.entries(EVENTS)]

    assert calls.read is read, "the reader was never overtaken"
    assert seen == [0, 5]


def test_lines_of_other_programs_may_have_any_whitespace_and_line_ending(store: FileStore) -> None:
    append_often(store, EVENTS, "", 1)
    with (store.path / ".jit/events.jsonl").open("ab") as file:
        file.write(b'{"number": 1}\r\n{"number":\r2,\t"text": "\xe2\x80\xa8\x7f"}\n')
    apply(store, Append(EVENTS, Event(3)))

    found = list(store.entries(EVENTS))
    assert [each.record.number for each in found] == [0, 1, 2, 3]
    for each in found:
        assert list(store.entries(EVENTS, after=each.position)) == found[found.index(each) + 1 :]


def test_a_damaged_line_is_reported_with_its_position(store: FileStore) -> None:
    positions = append_often(store, EVENTS, "", 3)
    path = store.path / ".jit/events.jsonl"
    lines = path.read_bytes().split(b"\n")
    path.write_bytes(b"\n".join([lines[0], b"#" * len(lines[1]), *lines[2:]]))

    with pytest.raises(Corrupt, match=f"events.jsonl, at {positions[1]}"):
        list(store.entries(EVENTS))
    assert [each.record.number for each in store.entries(EVENTS, after=positions[1])] == [2]


@pytest.mark.parametrize("after", [-1, 1, 10_000])
def test_an_invalid_position_in_a_stream_of_lines_is_refused(store: FileStore, after: int) -> None:
    with pytest.raises(UsageFailure):
        list(store.entries(EVENTS, after=after))
    append_often(store, EVENTS, "", 2)
    with pytest.raises(UsageFailure):
        list(store.entries(EVENTS, after=after))


def test_a_record_with_newlines_is_refused_before_anything_is_committed(store: FileStore) -> None:
    spread = Stream("jit/events", StructCodec(Event))  # formatted like a document
    for changes in ([Append(spread, Event(1))], [Append(spread, Event(1)), Create(ONE, Item(1))]):
        with pytest.raises(UsageFailure, match="newline"):
            apply(store, *changes)

    assert intents_of(store) == []
    assert increment(store, ONE, EVENTS) == 1


# --- Locks --------------------------------------------------------------------------------------------

_FOREIGN = """
import fcntl, sys
with open(sys.argv[1], "a") as file:
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        sys.exit("held")
    print("locked", flush=True)
    sys.stdin.read()
"""


@contextlib.contextmanager
def foreign_lock(path: Path) -> Iterator[str]:
    """Let another program lock a file with flock(2), and hold it; yields whether it could."""
    command = [sys.executable, "-c", _FOREIGN, str(path)]
    pipes: dict[str, Any] = dict.fromkeys(("stdin", "stdout", "stderr"), subprocess.PIPE)
    with subprocess.Popen(command, text=True, **pipes) as process:
        assert process.stdin is not None
        assert process.stdout is not None
        assert process.stderr is not None
        try:
            yield process.stdout.readline().strip() or process.stderr.readline().strip()
        finally:
            process.stdin.close()


GUARDED: dict[str, tuple[Change, str]] = {
    ".index.lock": (Create(INDEX, Item(1)), ".jit/.index.lock"),
    ".gates.lock": (Create(GATES, Item(1)), ".jit/.gates.lock"),
    ".events.lock": (Append(EVENTS, Event(1)), ".jit/.events.lock"),
    "issues/one.lock": (Create(ONE, Item(1)), ".jit/issues/one.lock"),
}


@pytest.mark.skipif(sys.platform == "win32", reason="needs flock(2)")
@pytest.mark.req("FL-05")
@pytest.mark.parametrize("lock", GUARDED)
def test_a_lock_of_another_program_keeps_us_out(store: FileStore, lock: str) -> None:
    change, path = GUARDED[lock]
    others = [each for each, _ in GUARDED.values() if each != change]
    (store.path / path).parent.mkdir(parents=True)
    with (
        FileStore(store.path, timeout=0.1) as hasty,
        foreign_lock(store.path / path) as answer,
    ):
        assert answer == "locked"
        with pytest.raises(LockTimeout, match=lock):
            apply(hasty, change)
        apply(hasty, *others)  # no other document is locked

    apply(store, change)


@pytest.mark.skipif(sys.platform == "win32", reason="needs flock(2)")
@pytest.mark.req("FL-05")
@pytest.mark.parametrize("lock", GUARDED)
def test_our_lock_keeps_another_program_out(store: FileStore, lock: str) -> None:
    change, path = GUARDED[lock]
    target = change.stream if isinstance(change, Append) else change.key

    def decide(view: View, now: float) -> Decision[list[str]]:
        answers = []
        for _, each in GUARDED.values():
            (store.path / each).parent.mkdir(parents=True, exist_ok=True)
            with foreign_lock(store.path / each) as answer:
                answers.append(f"{each} {answer}")
        return Decision([change], answers)

    answers = store.transact([target], decide).result
    assert answers == [f"{each} {'held' if each == path else 'locked'}" for _, each in GUARDED.values()]


@contextlib.contextmanager
def held_in_decide(store: FileStore, *changes: Change) -> Iterator[None]:
    """A context in which a transaction with these changes is inside its decide function."""
    inside, go_on = threading.Event(), threading.Event()
    named = [each.stream if isinstance(each, Append) else each.key for each in changes]

    def decide(view: View, now: float) -> Decision[None]:
        inside.set()
        assert go_on.wait(PATIENCE)
        return Decision(changes, None)

    thread = threading.Thread(target=store.transact, args=(named, decide))
    thread.start()
    try:
        assert inside.wait(PATIENCE)
        yield
    finally:
        go_on.set()
        thread.join(PATIENCE)


def test_a_transaction_does_not_block_those_on_other_documents(store: FileStore) -> None:
    apply(store, Create(ONE, Item(1)), Create(INDEX, Item(1)))
    with open_file_store(store.path) as other:
        with held_in_decide(store, Replace(ONE, Item(2)), Replace(INDEX, Item(2))):
            apply(other, Create(TWO, Item(3)), Create(GATES, Item(3)), Append(EVENTS, Event(3)))
            assert increment(store, TWO) == 4
            assert other.read_together([TWO, GATES]).get(TWO) == Item(4)
        assert (number_of(other, ONE), number_of(other, INDEX)) == (2, 2)


@pytest.mark.parametrize("stream", [None, EVENTS], ids=["one lock", "several"])
def test_a_lock_can_be_taken_again_after_a_signal_interrupts_its_release(
    store: FileStore, monkeypatch: pytest.MonkeyPatch, stream: Stream[Event] | None
) -> None:
    def interrupted(self: HeldLock, *problem: object) -> None:
        monkeypatch.undo()
        raise KeyboardInterrupt

    monkeypatch.setattr(HeldLock, "__exit__", interrupted)
    try:
        increment(store, ONE, stream)
    except KeyboardInterrupt:
        assert increment(store, ONE, stream) == 2
    else:
        pytest.fail("nothing was interrupted")


def test_a_signal_at_any_line_of_a_transaction_on_a_ledger_leaves_the_cleanup_free_to_run_another(
    tmp_path: Path,
) -> None:
    lines = 0
    for interrupt in interruptions("ledger_lock.py", "lock_file.py", "store/files.py"):
        with open_file_store(tmp_path) as store:
            with interrupt:
                append_often(store, LEDGER, "", 1)
            append_often(store, LEDGER, "", 1)  # a lock that is left behind would make it wait for itself
            lines += 1
    assert lines > 150


def test_readers_take_no_lock(store: FileStore) -> None:
    apply(store, Create(ONE, Item(1)), Create(INDEX, Item(1)), Append(EVENTS, Event(1)))
    with open_file_store(store.path) as other:
        with held_in_decide(store, Replace(ONE, Item(2)), Replace(INDEX, Item(2)), Append(EVENTS, Event(2))):
            assert (number_of(other, ONE), number_of(other, INDEX)) == (1, 1)
            assert [each.record for _, each in other.scan(ISSUES)] == [Item(1)]
            assert [each.record for each in other.entries(EVENTS)] == [Event(1)]
        assert (number_of(other, ONE), number_of(other, INDEX)) == (2, 2)


@pytest.mark.req("FL-07", "FL-09")
def test_neither_our_readers_nor_other_programs_ever_see_a_torn_state(store: FileStore) -> None:
    """Other programs know nothing of Holdfast and just read the files."""
    letters = "abcdefgh"
    sizes = [10, 5_000, 300_000]

    def written(number: int) -> Item:
        return Item(number, letters[number % 8] * random.choice(sizes))

    def write(line: Line) -> None:
        with open_file_store(store.path) as mine:
            for number in range(1, 60):
                apply(mine, Replace(ONE, written(number)))
                apply(mine, Replace(ONE, written(number)), Replace(INDEX, written(number)))
        line.say("done")

    def check(text: str, number: int) -> None:
        assert set(text) == {letters[number % 8]}
        assert len(text) in sizes

    apply(store, Create(ONE, written(0)), Create(INDEX, written(0)))
    with Workers() as workers:
        writers = workers.start_many(2, write)
        while not all(worker.line.has_news() for worker in writers):
            for key, path in ((ONE, ".jit/issues/one.json"), (INDEX, ".jit/index.json")):
                document = store.read(key)
                assert document is not None
                check(document.record.text, document.record.number)
                record = json.loads((store.path / path).read_bytes())
                check(record["text"], record["number"])
        assert [worker.hear() for worker in writers] == ["done", "done"]


# --- Recovery after a kill ----------------------------------------------------------------------------


KILLED = -9


def die() -> None:
    if sys.platform != "win32":
        os.kill(os.getpid(), signal.SIGKILL)


def killed_at(store: FileStore, change: Callable[[pytest.MonkeyPatch], object], *changes: Change) -> None:
    """Let another process make a commit, and be killed at the point that `change` sets up."""

    def work(line: Line) -> None:
        with pytest.MonkeyPatch.context() as patches, open_file_store(store.path) as mine:
            change(patches)
            apply(mine, *changes)

    with Workers() as workers:
        assert workers.start(work).wait() == KILLED


def just_decided(patches: pytest.MonkeyPatch) -> None:
    """Killed before any step is applied."""
    patches.setattr(Intents, "apply", lambda self, intent, opened, loose: die())


def half_applied(patches: pytest.MonkeyPatch) -> None:
    """Killed after the first document."""
    publish = intents.name_draft

    def publish_and_die(*arguments: Any, **options: Any) -> None:
        publish(*arguments, **options)
        die()

    patches.setattr(intents, "name_draft", publish_and_die)


def applied(patches: pytest.MonkeyPatch) -> None:
    """Killed before the intent is dropped."""
    patches.setattr(Intents, "drop", lambda self, intent: die())


@pytest.mark.skipif(sys.platform == "win32", reason="there is no SIGKILL on Windows")
@pytest.mark.parametrize("moment", [just_decided, half_applied, applied])
@pytest.mark.parametrize("by", ["writing", "reading numbers", "reading lines"])
def test_a_commit_of_a_killed_process_is_visible_and_the_next_one_that_needs_it_finishes_it(
    store: FileStore, moment: Callable[[pytest.MonkeyPatch], object], by: str
) -> None:
    apply(store, Create(ONE, Item(1)), Create(INDEX, Item(1)), Create(GATES, Item(1)))
    position = apply(store, Append(EVENTS, Event(1)), Append(LEDGER, Event(1))).positions[0]
    changes: list[Change] = [
        Replace(ONE, Item(2)),
        Replace(INDEX, Item(2)),
        Delete(GATES),
        Create(TWO, Item(2)),
    ]
    killed_at(store, moment, *changes, Append(EVENTS, Event(2)), Append(LEDGER, Event(2)))

    assert len(intents_of(store)) == 1
    for key in (ONE, TWO, INDEX):  # readers see it, without a lock and without a write
        assert number_of(store, key) == 2
    assert store.read(GATES) is None
    assert [(name, each.record.number) for name, each in store.scan(ISSUES)] == [("one", 2), ("two", 2)]
    assert len(intents_of(store)) == 1

    if by == "reading numbers":  # a number that a reader is shown must be given
        assert [each.position for each in store.entries(LEDGER)] == [1, 2]
    elif by == "writing":
        assert increment(store, INDEX) == 3  # the next transaction on any of its keys finishes it
    (event,) = store.entries(EVENTS, after=position)
    assert event.record == Event(2)
    assert list(store.entries(EVENTS, after=event.position)) == []
    if by == "reading lines" and moment is applied:  # the stream has them already
        assert increment(store, INDEX) == 3
    assert intents_of(store) == []
    assert json.loads((store.path / ".jit/issues/two.json").read_bytes())["number"] == 2
    assert not (store.path / ".jit/gates.json").exists()
    assert [each.record for each in store.entries(EVENTS)] == [Event(1), Event(2)]
    assert (store.path / ".jit/events.jsonl").read_bytes().count(b"\n") == 2
    assert sorted(path.name for path in (store.path / "ledger").glob("event-*")) == [
        *("event-000001.json", "event-000002.json")
    ]


@pytest.mark.skipif(sys.platform == "win32", reason="there is no SIGKILL on Windows")
def test_reading_together_finishes_an_unfinished_commit_too(store: FileStore) -> None:
    apply(store, Create(ONE, Item(1)), Create(INDEX, Item(1)))
    killed_at(store, just_decided, Replace(ONE, Item(2)), Replace(INDEX, Item(2)))

    seen = store.read_together([ONE, INDEX])
    assert (seen.get(ONE), seen.get(INDEX)) == (Item(2), Item(2))
    assert intents_of(store) == []


@pytest.mark.skipif(sys.platform == "win32", reason="there is no SIGKILL on Windows")
def test_an_edit_under_an_unfinished_commit_stands_and_blocks_nothing(store: FileStore) -> None:
    """In a document that no other program shares; the rest of the commit is applied."""
    one, two = DESCRIPTORS.key("one"), DESCRIPTORS.key("two")
    apply(store, Create(one, Item(1)), Create(two, Item(1)))
    killed_at(store, just_decided, Replace(one, Item(2)), Replace(two, Item(2)))
    foreign = b'{"number": 77}'
    (store.path / ".jvs/descriptors/one.json").write_bytes(foreign)

    assert (number_of(store, one), number_of(store, two)) == (77, 2), "readers see what will be"
    assert (increment(store, one), increment(store, two)) == (78, 3)
    (aside,) = intents_of(store)
    assert store.changes_set_aside() == [str(aside)]
    assert '"number":2' in aside.read_text().replace(" ", "").replace("\\n", "").replace("\\", "")


@pytest.mark.skipif(sys.platform == "win32", reason="there is no SIGKILL on Windows")
@pytest.mark.parametrize("moment", [just_decided, applied])
def test_lines_go_to_the_new_end_once_if_another_program_appended_first(
    store: FileStore, moment: Callable[[pytest.MonkeyPatch], object]
) -> None:
    apply(store, Create(ONE, Item(1)))
    killed_at(store, moment, Replace(ONE, Item(2)), Append(EVENTS, Event(1)), Append(EVENTS, Event(1)))
    with (store.path / ".jit/events.jsonl").open("ab") as file:
        file.write(b'{"number":7}\n')

    seen = [each.record.number for each in store.entries(EVENTS)]
    assert increment(store, ONE, EVENTS) == 3
    assert [each.record.number for each in store.entries(EVENTS)] == [*seen, 3]
    assert sorted(seen) == [1, 1, 7]


@pytest.mark.skipif(sys.platform == "win32", reason="there is no SIGKILL on Windows")
@pytest.mark.parametrize("lengths", [[0], [5], [-1, 40], [0, 0, 0], [30, -1, 0]], ids=str)
@pytest.mark.parametrize("lines", [1, 2])
@pytest.mark.parametrize("unended", ["none", "first", "last"])
def test_a_reader_that_was_shown_a_pending_line_misses_nothing(
    store: FileStore, lengths: list[int], lines: int, unended: str
) -> None:
    """Whatever the other program appends, the positions that readers were given stay good. Lines as long as the pending
    ones (`lengths` are differences) end just there. The other program may leave a line without its newline, before the
    kill or after it."""
    apply(store, Create(ONE, Item(1)), Append(EVENTS, Event(0)))
    if unended == "first":
        with (store.path / ".jit/events.jsonl").open("a") as file:
            file.write('{"number":9}')
    killed_at(store, just_decided, Replace(ONE, Item(2)), *(Append(EVENTS, Event(1 + n)) for n in range(lines)))
    size = len(store._intents.pending()[0].steps[-1].content)
    readers: list[list[tuple[int, int]]] = []

    def read() -> None:
        """Let all readers read on, and a new one begin."""
        readers.append([])
        for seen in readers:
            seen += [(e.position, e.record.number) for e in store.entries(EVENTS, after=seen[-1][0] if seen else 0)]

    read()
    for number, length in enumerate(lengths, 10):
        text = "x" * (size + length - len(f'{{"number":{number},"text":""}}'))
        begin = "\n" if unended == "first" and number == 10 else ""
        end = "" if unended == "last" and number == 9 + len(lengths) else "\n"
        with (store.path / ".jit/events.jsonl").open("a") as file:
            file.write(f'{begin}{{"number":{number},"text":"{text}"}}{end}')
        read()
    assert increment(store, ONE, EVENTS) == 3
    read()
    read()

    expected = {number for _, number in readers[-1]}
    assert expected >= {0, *range(1, 1 + lines), *range(10, 10 + len(lengths))}
    assert [{number for _, number in seen} for seen in readers] == [expected] * len(readers)
    assert all(len(set(seen)) == len(expected) for seen in readers[-2:])


@pytest.mark.skipif(sys.platform == "win32", reason="there is no SIGKILL on Windows")
@pytest.mark.parametrize("by_hand", [b'{"number": 77}', None])
def test_an_edit_after_a_document_is_published_does_not_block_recovery(store: FileStore, by_hand: bytes | None) -> None:
    """A user edits or deletes a document after a commit that lacked only the removal of its intent."""
    apply(store, Create(ONE, Item(1)), Create(TWO, Item(1)), Create(INDEX, Item(1)))
    changes: list[Change] = [Replace(INDEX, Item(2)), Replace(ONE, Item(2)), Replace(TWO, Item(2))]
    killed_at(store, applied, *changes, Append(EVENTS, Event(2)))
    path = store.path / ".jit/issues/one.json"
    path.write_bytes(by_hand) if by_hand else path.unlink()

    assert increment(store, TWO) == 3
    assert intents_of(store) == []
    assert number_of(store, INDEX) == 2
    assert (path.read_bytes() if by_hand else path.exists()) == (by_hand or False)
    assert [each.record for each in store.entries(EVENTS)] == [Event(2)]


# --- Watching -----------------------------------------------------------------------------------------


class TestWatchingByPolling(FileBackend, WatchingContract):
    """The same without file system events: the store polls."""

    @pytest.fixture(autouse=True)
    def place(self, scratch: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self.path = scratch / "store"
        monkeypatch.setattr(DirectoryEvents, "open", lambda: None)


@pytest.mark.parametrize("by_events", [True, False], ids=["by events", "by looking"])
def test_a_long_ledger_can_be_watched(store: FileStore, monkeypatch: pytest.MonkeyPatch, *, by_events: bool) -> None:
    append_often(store, LEDGER, "", 1)
    for number in range(2, 3000):
        (store.path / f"ledger/event-{number:06d}.json").write_bytes(b'{"number":0}')
    if not by_events:
        monkeypatch.setattr(DirectoryEvents, "open", lambda: None)
    with store.watch(LEDGER) as watch:
        assert watch.wait(0.1) == frozenset()
        assert append_often(store, LEDGER, "", 1) == [3000]
        assert watch.wait(PATIENCE) == {LEDGER.name}


@pytest.mark.parametrize("what", [WORKTREES.key("later"), ONE, ISSUES, LEDGER, EVENTS], ids=lambda each: each.name)
def test_watching_creates_nothing_and_notices_what_is_created_later(
    store: FileStore, what: Key[Item] | Family[Item] | Stream[Event]
) -> None:
    before = sorted(store.path.rglob("*"))
    with store.watch(what) as watch:
        assert watch.wait(0.0) == frozenset()
        assert sorted(store.path.rglob("*")) == before
        apply(store, Create(WORKTREES.key("later"), Item(1)), Create(ONE, Item(1)), Append(EVENTS, Event(1)))
        apply(store, Append(LEDGER, Event(1)))
        assert watch.wait(PATIENCE) == {ONE.name if what is ISSUES else what.name}
        shutil.rmtree(store.path / ".jit")
        shutil.rmtree(store.path / ".jvs")
        shutil.rmtree(store.path / "ledger")
        assert watch.wait(PATIENCE)
        assert sorted(each.name for each in store.path.iterdir()) == [".holdfast"]


@pytest.mark.skipif(sys.platform != "linux", reason="needs inotify")
def test_lost_events_make_the_watch_report_everything(store: FileStore, monkeypatch: pytest.MonkeyPatch) -> None:
    apply(store, Create(ONE, Item(1)))
    with store.watch(ISSUES) as watch:
        apply(store, Create(TWO, Item(1)))
        assert watch.wait(PATIENCE) == {TWO.name}
        apply(store, Delete(TWO))
        read = DirectoryEvents._read

        def lose(events: DirectoryEvents) -> None:
            read(events)
            monkeypatch.setattr(DirectoryEvents, "_read", read)

        monkeypatch.setattr(DirectoryEvents, "_read", lose)
        assert watch.wait(PATIENCE) == {ONE.name, TWO.name}
        apply(store, Create(TWO, Item(2)))
        assert watch.wait(PATIENCE) == {TWO.name}


@pytest.mark.skipif(sys.platform == "win32", reason="there is no SIGKILL on Windows")
@pytest.mark.parametrize("is_first", [True, False], ids=["first", "later"])
def test_a_commit_that_is_decided_but_not_applied_is_reported(store: FileStore, *, is_first: bool) -> None:
    if not is_first:
        apply(store, Create(TWO, Item(1)), Create(GATES, Item(1)))
    with store.watch(ISSUES) as watch:
        killed_at(store, just_decided, Create(ONE, Item(2)), Create(INDEX, Item(2)))
        assert watch.wait(PATIENCE) == {ONE.name}


@pytest.mark.skipif(sys.platform != "linux", reason="needs inotify")
def test_watching_works_with_more_descriptors_than_select_supports(store: FileStore) -> None:
    if sys.platform == "win32":
        return
    import resource

    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = 1200 if hard == resource.RLIM_INFINITY else min(1200, hard)
    resource.setrlimit(resource.RLIMIT_NOFILE, (max(soft, wanted), hard))
    null = os.open(os.devnull, os.O_RDONLY)
    many = [null]
    try:
        while many[-1] < wanted - 50:
            many.append(os.dup(null))
        with store.watch(ONE) as watch:
            run_threads(lambda: apply(store, Create(ONE, Item(1))))
            assert watch.wait(PATIENCE) == {ONE.name}
    finally:
        for fd in many:
            os.close(fd)
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


@pytest.mark.skipif(sys.platform != "linux", reason="counts what /proc shows")
def test_a_garbage_collected_store_leaves_no_descriptor_open(tmp_path: Path) -> None:
    def look() -> set[str]:
        store = FileStore(tmp_path)
        store.read(INDEX)
        store.transact([INDEX], lambda view, now: Decision([], None))
        del store
        return open_descriptors()

    look()
    before = look()

    assert [look() - before for _ in range(20)][-1] == set()


@pytest.mark.parametrize("moment", ["apply", "drop"])
def test_a_reader_that_began_before_a_commit_sees_all_of_it_or_nothing(
    moment: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The author is stopped, before or after it writes its lines, while it holds the lock of the stream."""
    original = getattr(Intents, moment)
    seen: list[int] = []
    with FileStore(tmp_path) as store, FileStore(tmp_path) as other:
        apply(store, Append(EVENTS, Event(0)))
        reader = iter(other.entries(EVENTS))
        next(reader)

        def read_first(*arguments: Any, **options: Any) -> object:
            thread = threading.Thread(target=lambda: seen.extend(each.record.number for each in reader))
            thread.start()
            thread.join()
            return original(*arguments, **options)

        monkeypatch.setattr(Intents, moment, read_first)
        monkeypatch.setattr(files, "_PATIENCE", 0.01)
        apply(store, Append(EVENTS, Event(1)), Append(EVENTS, Event(2)))
        assert seen == [1, 2]
        assert [each.record.number for each in other.entries(EVENTS)] == [0, 1, 2]
