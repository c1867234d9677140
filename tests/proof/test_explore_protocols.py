"""The locks and the file store, in every order of their file system calls.

Each test prints the number of states (`pytest -rP`) and requires a minimum, so that a search that tries
nothing cannot pass.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from pathlib import Path

import msgspec
import pytest

from holdfast.errors import LockTimeout, RepoLocked
from holdfast.fs import calls, durable
from holdfast.fs.directory import Directory
from holdfast.locks.file_lock import FileLocker
from holdfast.locks.identity import Liveness
from holdfast.locks.ledger_lock import LedgerLock
from holdfast.locks.lock_file import LockFile
from holdfast.locks.repo_lock import RepoLock, RepoLockInfo
from holdfast.store.files import FileStore
from holdfast.store.layout import Location
from holdfast.store.lines import Waiting
from holdfast.store.model import Append, Create, Decision, Key, Replace, Stream, StructCodec, View
from proof.crash import Ending
from proof.explore import Exploration, Result, explore

pytestmark = pytest.mark.skipif(sys.platform == "win32", reason="there is no flock on Windows")

Task = Callable[[Path], object]


def require_clean(explored: Exploration, *, at_least: int) -> None:
    sys.stdout.write(f"{explored}\n")
    explored.require_clean(at_least=at_least)


# --- Locks ---------------------------------------------------------------------------------------------


def stale_repo_lock(directory: Path) -> None:
    RepoLock(directory).lock("repo", "crashed")


def judge(info: RepoLockInfo) -> Liveness:
    return Liveness.DEAD if info.cmd == "crashed" else Liveness.ALIVE


def take(directory: Path) -> str | None:
    try:
        return RepoLock(directory, liveness_check=judge).lock("repo", "taken").lock_id
    except RepoLocked:
        return None


def take_and_release(directory: Path) -> str | None:
    try:
        with RepoLock(directory, liveness_check=judge).lock("repo", "taken") as held:
            return held.lock_id
    except RepoLocked:
        return None


def one_winner(directory: Path, results: Sequence[Result]) -> None:
    winners = [result.value for result in results if not result.killed and result.value]
    killed = any(result.killed for result in results)
    assert len(winners) <= 1, "two winners"
    assert winners or killed, "no winner"
    state = RepoLock(directory).state("repo")
    if winners:
        assert state is not None
        assert winners[0] in (directory / "repos/repo/.lock").read_text()
    else:  # wherever the kill struck, the next process gets the lock
        RepoLock(directory, liveness_check=lambda _: Liveness.DEAD).lock("repo")


@pytest.mark.req("RL-08")
@pytest.mark.sampled(1)
@pytest.mark.parametrize(("kills", "at_least"), [(0, 500), (1, 1500)])
@pytest.mark.long
def test_exactly_one_of_two_takeovers_of_a_stale_lock_wins(kills: int, at_least: int) -> None:
    explored = explore([take] * 2, prepare=stale_repo_lock, check=one_winner, kills=kills)

    require_clean(explored, at_least=at_least)


@pytest.mark.long
@pytest.mark.req("RL-08")
def test_exactly_one_of_three_takeovers_wins_when_switched_only_at_changes() -> None:
    explored = explore([take] * 3, prepare=stale_repo_lock, check=one_winner, names=calls.CHANGING)

    require_clean(explored, at_least=1000)


@pytest.mark.long
def test_a_release_never_removes_the_lock_of_another_holder() -> None:
    def taken(directory: Path, results: Sequence[Result]) -> None:
        assert results[0].value or results[1].value, "no task got the lock"
        state = RepoLock(directory).state("repo")
        assert (state is not None) == bool(results[1].value), "removed or left behind"

    explored = explore([take_and_release, take], prepare=stale_repo_lock, check=taken)

    require_clean(explored, at_least=500)


def number(directory: Path) -> None:
    (directory / "number").write_bytes(b"0")


def add(directory: Path) -> None:
    path = directory / "number"
    durable.replace(path, b"%d" % (int(durable.read(path)) + 1))


def add_locked(directory: Path) -> None:
    with FileLocker().lock_exclusive(directory / "lock"):
        add(directory)


def add_in_turn(directory: Path) -> None:
    with FileLocker(fair=True).lock_exclusive(directory / "lock"):
        add(directory)


def add_to_ledger(directory: Path) -> None:
    with LedgerLock(directory, "agent").acquire():
        add(directory)


def nothing_lost(directory: Path, results: Sequence[Result]) -> None:
    for result in results:
        assert result.error is None or isinstance(result.error, LockTimeout), repr(result.error)
    done = sum(result.ending is Ending.SUCCEEDED for result in results)
    killed = sum(result.killed for result in results)
    assert done <= int((directory / "number").read_bytes()) <= done + killed


@pytest.mark.parametrize(
    ("task", "kills", "timeouts", "at_least"),
    [
        (add_locked, 0, 0, 80),
        pytest.param(add_locked, 1, 0, 300, marks=pytest.mark.long),
        (add_locked, 0, 1, 120),
        pytest.param(add_in_turn, 0, 0, 150, marks=pytest.mark.long),
        pytest.param(add_to_ledger, 0, 0, 1500, marks=pytest.mark.long),
    ],
)
@pytest.mark.sampled(1)
def test_no_update_under_a_lock_is_lost(task: Task, kills: int, timeouts: int, at_least: int) -> None:
    explored = explore([task] * 2, prepare=number, check=nothing_lost, kills=kills, timeouts=timeouts)

    require_clean(explored, at_least=at_least)


# --- The store -----------------------------------------------------------------------------------------


class Account(msgspec.Struct):
    amount: int


CODEC = StructCodec(Account)
A, B, C = (Key(f"jit/issues/{name}", CODEC) for name in "abc")
EVENTS = Stream("jit/events", StructCodec(Account, pretty=False))


def accounts(directory: Path) -> None:
    with FileStore(directory) as store:
        store.transact([A, B, C], lambda *_: Decision([Create(key, Account(10)) for key in (A, B, C)], None))


def amount(view: View, key: Key[Account]) -> int:
    record = view.get(key)
    assert record is not None
    return record.amount


def transfer(source: Key[Account], target: Key[Account]) -> Task:
    def move_one(directory: Path) -> None:
        def decide(view: View, now: float) -> Decision[None]:
            less, more = Account(amount(view, source) - 1), Account(amount(view, target) + 1)
            return Decision([Replace(source, less), Replace(target, more)], None)

        with FileStore(directory) as store:
            store.transact([source, target], decide)

    return move_one


def deposit(directory: Path) -> None:
    with FileStore(directory) as store:
        store.transact([A], lambda view, _: Decision([Replace(A, Account(amount(view, A) + 1))], None))


def deposit_and_log(directory: Path) -> None:
    def decide(view: View, now: float) -> Decision[None]:
        record = Account(amount(view, A) + 1)
        return Decision([Replace(A, record), Append(EVENTS, record)], None)

    with FileStore(directory) as store:
        store.transact([A, EVENTS], decide)


def read_one_after_the_other(directory: Path) -> list[int]:
    with FileStore(directory) as store:
        documents = [store.read(key) for key in (A, B)]
        return [document.record.amount for document in documents if document is not None]


def read_together(directory: Path) -> list[int]:
    with FileStore(directory) as store:
        view = store.read_together([A, B])
        return [amount(view, key) for key in (A, B)]


def total(directory: Path) -> None:
    """A reader without a lock sees each transfer whole, at any moment."""
    with FileStore(directory) as store:
        documents = [store.read(key) for key in (A, B, C)]
    amounts = [document.record.amount for document in documents if document is not None]
    assert sum(amounts) == 30, f"a fractured view: {amounts}"


def still_works(directory: Path) -> None:
    """The store opens, the balance is right, and everything can still be changed."""
    total(directory)
    for source, target in ((A, B), (B, C), (C, A)):
        transfer(source, target)(directory)
    total(directory)
    assert not list((directory / ".holdfast/intents").glob("[!.]*"))


def no_errors(results: Sequence[Result]) -> None:
    for result in results:
        if result.error is not None:
            raise result.error


@pytest.mark.parametrize(
    ("tasks", "kills", "at_least"), [(2, 0, 15), (2, 1, 80), pytest.param(3, 0, 200, marks=pytest.mark.long)]
)
@pytest.mark.sampled(1)
def test_no_deposit_is_lost(tasks: int, kills: int, at_least: int) -> None:
    def check(directory: Path, results: Sequence[Result]) -> None:
        no_errors(results)
        done = sum(not result.killed for result in results)
        assert 10 + done <= read_one_after_the_other(directory)[0] <= 10 + len(results)
        deposit(directory)

    explored = explore([deposit] * tasks, prepare=accounts, check=check, kills=kills)

    require_clean(explored, at_least=at_least)


@pytest.mark.parametrize(("kills", "at_least"), [(0, 40), pytest.param(1, 200, marks=pytest.mark.long)])
@pytest.mark.sampled(1)
def test_a_reader_of_both_accounts_never_sees_half_a_transfer(kills: int, at_least: int) -> None:
    def check(directory: Path, results: Sequence[Result]) -> None:
        no_errors(results)
        assert results[1].killed or results[1].value in ([10, 10], [9, 11])
        still_works(directory)

    tasks = [transfer(A, B), read_together]
    explored = explore(tasks, prepare=accounts, check=check, kills=kills)

    require_clean(explored, at_least=at_least)


@pytest.mark.long
def test_a_reader_that_has_seen_one_side_of_a_transfer_sees_the_other_too() -> None:
    seen = []

    def check(directory: Path, results: Sequence[Result]) -> None:
        no_errors(results)
        seen.append(results[1].value)
        assert results[1].value != [9, 10], "one account after the transfer, then the other before it"
        still_works(directory)

    explored = explore([transfer(A, B), read_one_after_the_other], prepare=accounts, check=check)

    require_clean(explored, at_least=300)
    assert {tuple(each) for each in seen} == {(10, 10), (10, 11), (9, 11)}


@pytest.mark.sampled(1)
@pytest.mark.parametrize(("kills", "at_least"), [(0, 50), pytest.param(1, 300, marks=pytest.mark.long)])
def test_two_overlapping_transfers_are_both_whole(kills: int, at_least: int) -> None:
    def check(directory: Path, results: Sequence[Result]) -> None:
        no_errors(results)
        total(directory)
        with FileStore(directory) as store:
            view = store.read_together([A, B, C])
            first, second = 10 - amount(view, A), amount(view, C) - 10
        for result, done in zip(results, (first, second), strict=True):
            assert done == 1 or (result.killed and done == 0), f"{first} and {second} transfers"
        still_works(directory)

    explored = explore([transfer(A, B), transfer(B, C)], prepare=accounts, check=check, kills=kills)

    require_clean(explored, at_least=at_least)


@pytest.mark.long
def test_the_balance_is_right_at_every_moment() -> None:
    tasks = [transfer(A, B), transfer(B, A)]
    explored = explore(tasks, prepare=accounts, check=lambda *_: None, invariant=total, kills=1)

    require_clean(explored, at_least=300)


@pytest.mark.long
def test_a_deposit_and_its_event_are_committed_together() -> None:
    def check(directory: Path, results: Sequence[Result]) -> None:
        no_errors(results)
        with FileStore(directory) as store:
            logged = [entry.record.amount for entry in store.entries(EVENTS)]
            document = store.read(A)
        assert document is not None
        assert logged == list(range(11, document.record.amount + 1)), f"{logged}, but {document.record.amount}"
        deposit_and_log(directory)

    explored = explore([deposit_and_log] * 2, prepare=accounts, check=check, kills=1)

    require_clean(explored, at_least=300)


class Told(msgspec.Struct):
    account: str
    amount: int


TOLD: Stream[Told] = Stream(
    "jit/events", StructCodec(Told, pretty=False), chain=lambda _, records: [Append(TOLD, each) for each in records]
)
"""A stream that is locked only while a line is written."""


def deposit_and_tell(key: Key[Account]) -> Task:
    def decide(view: View, now: float) -> Decision[None]:
        record = Account(amount(view, key) + 1)
        return Decision([Replace(key, record), Append(TOLD, Told(key.name, record.amount))], None)

    def deposit_one(directory: Path) -> None:
        with FileStore(directory) as store:
            store.transact([key, TOLD], decide)

    return deposit_one


def told(store: FileStore) -> list[tuple[str, int]]:
    return [(entry.record.account, entry.record.amount) for entry in store.entries(TOLD)]


def read_the_account_first(directory: Path) -> tuple[bool, bool]:
    with FileStore(directory) as store:
        document = store.read(A)
        assert document is not None
        return document.record.amount == 11, (A.name, 11) in told(store)


def read_the_events_first(directory: Path) -> tuple[bool, bool]:
    with FileStore(directory) as store:
        is_told = (A.name, 11) in told(store)
        document = store.read(A)
        assert document is not None
        return is_told, document.record.amount == 11


def told_once(directory: Path, results: Sequence[Result]) -> None:
    no_errors(results)
    with FileStore(directory) as store:
        lines = told(store)
        amounts = {key: store.read(key) for key in (A, B)}
    for key, document in amounts.items():
        assert document is not None
        expected = [(key.name, each) for each in range(11, document.record.amount + 1)]
        assert [each for each in lines if each[0] == key.name] == expected, f"{lines}, but {document.record.amount}"
    for each in (deposit_and_tell(A), deposit_and_tell(B)):
        each(directory)
    assert (directory / ".jit/events.jsonl").read_bytes().count(b"\n") == len(lines) + 2
    assert not list((directory / ".holdfast/intents").glob("[!.]*"))


@pytest.mark.parametrize("other", [A, B], ids=["the same account", "another account"])
@pytest.mark.parametrize(("kills", "at_least"), [(0, 30), pytest.param(1, 200, marks=pytest.mark.long)])
@pytest.mark.sampled(1)
def test_deposits_and_their_late_events_are_committed_together(
    other: Key[Account], kills: int, at_least: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("holdfast.store.files._PAUSES", ())
    tasks = [deposit_and_tell(A), deposit_and_tell(other)]
    names = ("link", "replace", "write") if kills else calls.CHANGING  # with all, there are too many schedules
    explored = explore(tasks, prepare=accounts, check=told_once, kills=kills, names=names)

    require_clean(explored, at_least=at_least)


def seen_whole(directory: Path, results: Sequence[Result]) -> None:
    told_once(directory, results)
    assert results[1].killed or results[1].value != (True, False), "the deposit or its event, and then not the other"


@pytest.mark.parametrize("read", [read_the_account_first, read_the_events_first])
@pytest.mark.parametrize(("kills", "at_least"), [(0, 30), pytest.param(1, 200, marks=pytest.mark.long)])
@pytest.mark.sampled(1)
def test_a_reader_that_has_seen_a_deposit_or_its_late_event_sees_the_other_too(
    read: Task, kills: int, at_least: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("holdfast.store.files._PAUSES", ())
    tasks = [deposit_and_tell(A), read]
    explored = explore(tasks, prepare=accounts, check=seen_whole, kills=kills, names=calls.CHANGING)

    require_clean(explored, at_least=at_least)


# --- Planted bugs --------------------------------------------------------------------------------------


def test_the_explorer_finds_a_takeover_that_does_not_recheck_the_lock(monkeypatch: pytest.MonkeyPatch) -> None:
    def remove(self: LockFile, directory: Directory, identity: str) -> bool:
        return durable.remove_in(directory, ".lock", durable=False)

    monkeypatch.setattr(LockFile, "_remove_if", remove)
    explored = explore([take] * 2, prepare=stale_repo_lock, check=one_winner, most_violations=1)

    assert "two winners" in str(explored)


def test_the_explorer_finds_a_store_whose_readers_do_not_look_for_intents(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("holdfast.store.intents.Intents.pending", lambda self: [])

    tasks = [transfer(A, B)]
    explored = explore(tasks, prepare=accounts, check=lambda *_: None, invariant=total)

    assert "a fractured view: [9, 10, 10]" in str(explored) or "a fractured view: [10, 11, 10]" in str(explored)


def none_found(directory: Directory, location: Location, after: int, lines: tuple[bytes, ...]) -> Waiting:
    return Waiting(after, after, lines)


@pytest.mark.parametrize(
    ("bug", "planted", "symptom"),
    [
        ("lines.find_waiting", none_found, "but 11"),
        ("files.FileStore._await_lines", lambda self, stream, location: [], "and then not the other"),
    ],
    ids=["a line is written twice", "readers do not wait"],
)
def test_the_explorer_finds_a_bug_of_late_events(
    bug: str, planted: object, symptom: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("holdfast.store.files._PAUSES", ())
    monkeypatch.setattr(f"holdfast.store.{bug}", planted)
    tasks = [deposit_and_tell(A), read_the_account_first]
    explored = explore(tasks, prepare=accounts, check=seen_whole, most_violations=1)

    assert symptom in str(explored)


def test_the_explorer_finds_a_store_that_locks_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    def check(directory: Path, results: Sequence[Result]) -> None:
        assert read_one_after_the_other(directory)[0] == 12, "a deposit is lost"

    monkeypatch.setattr("holdfast.locks.flock.try_lock", lambda fd, shared: True)
    explored = explore([deposit] * 2, prepare=accounts, check=check)

    assert "a deposit is lost" in str(explored)
