"""The file store keeps the contract, behaves like the model, and is linearizable even if processes are killed."""

from __future__ import annotations

import contextlib
import errno
import os
import random
import shutil
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from functools import partial
from itertools import count
from pathlib import Path
from typing import Any
from unittest import mock

import pytest

from holdfast.fs import calls
from holdfast.store.files import FileStore
from holdfast.store.layout import Layout
from holdfast.store.model import Create, Decision, Key, Replace, Store, View
from holdfast.testing import Backend, Recipe, StoreContract, When
from holdfast.testing.backend import PATIENCE, Item, accounts, apply, number_of, swap, transfer
from proof.effort import rounds
from proof.linearizability import Accounts, Check, CheckResult, History, Operation, Register, check
from proof.model import StoreSubject, run_state_machine
from tests.store.storm import IsOver, Life, late_calls, storm


def open_file_store(path: Path) -> FileStore:
    """Open a store with a timeout long enough for a loaded machine."""
    return FileStore(path, timeout=PATIENCE)


class FileBackend(Backend):
    """Runs the contract, or a part of it, on files. `open_path` may open another kind of store."""

    path: Path
    open_path: Callable[[Path], Store] = staticmethod(open_file_store)

    def open_store(self) -> Store:
        return self.open_path(self.path)

    def reopen(self, store: Store) -> Store:
        return self.open_path(self.path)

    def seconds(self) -> float:
        return time.process_time()  # the machine may be busy

    def process_target(self, store: Store) -> Recipe:
        return Recipe(partial(FileStore, timeout=PATIENCE), (self.path,))

    @contextlib.contextmanager
    def losing_answers(self, store: Store, when: When) -> Iterator[None]:
        """Before: no file can be synced. After: the names that were published cannot be synced."""
        published: list[object] = []

        def noting(call: Callable[..., Any]) -> Callable[..., Any]:
            def note(*arguments: Any, **rest: Any) -> Any:
                published.append(call(*arguments, **rest))

            return note

        def failing(call: Callable[..., Any], *, if_published: bool) -> Callable[..., Any]:
            def fail(*arguments: Any) -> Any:
                if bool(published) is if_published:
                    raise OSError(errno.EIO, os.strerror(errno.EIO))
                return call(*arguments)

            return fail

        with contextlib.ExitStack() as patches:
            for name in ("link", "replace"):
                patches.enter_context(mock.patch.object(calls, name, noting(getattr(calls, name))))
            name = "fsync" if when == "before" else "sync_directory"
            fail = failing(getattr(calls, name), if_published=when == "after")
            patches.enter_context(mock.patch.object(calls, name, fail))
            yield

    def damage(self, store: Store, key: Key[Any], content: bytes) -> None:
        (self.path / Layout().locate(key.name).path).write_bytes(content)

    def stored(self, store: Store, key: Key[Any]) -> bytes:
        return (self.path / Layout().locate(key.name).path).read_bytes()

    def disturbed(self) -> AbstractContextManager[None]:
        return late_calls()


class TestFileStore(FileBackend, StoreContract):
    many = rounds(100_000, least=500)

    @pytest.fixture(autouse=True)
    def place(self, scratch: Path) -> None:
        self.path = scratch / "store"


def test_it_behaves_like_the_model(scratch: Path) -> None:
    numbers = count()

    def fresh() -> StoreSubject:
        path = scratch / str(next(numbers))
        return StoreSubject(FileStore(path), partial(FileStore, path), partial(shutil.rmtree, path))

    run_state_machine(fresh, examples=rounds(30, least=8))


# --- Histories of killed processes --------------------------------------------------------------------------

PROCESSES = 6
ACCOUNTS = {key.name: key for key in accounts(4)}
RICH = 10_000_000


def act_on_accounts(store: FileStore, history: History) -> None:
    """Do something with one or several documents, and record it."""
    source, target = random.sample(list(ACCOUNTS), 2)
    amount = random.randrange(1, 100_000)  # large, so that a sum shows which ones have happened
    match random.choice(["look around", "look around", "read_together", "transfer", "transfer", "deposit"]):
        case "look around":
            for name in random.sample(list(ACCOUNTS), 4):
                history.record("read", name, partial(number_of, store, ACCOUNTS[name]))
        case "read_together":
            history.record("read_together", list(ACCOUNTS), lambda: _read_all(store))
        case "transfer":
            move = (ACCOUNTS[source], ACCOUNTS[target], amount)
            history.record("transfer", [source, target, amount], lambda: transfer(store, *move))
        case "deposit":
            history.record("deposit", [target, amount], lambda: _deposit(store, ACCOUNTS[target], amount))


def _read_all(store: FileStore) -> list[int]:
    view = store.read_together(list(ACCOUNTS.values()))
    return [item.number for key in ACCOUNTS.values() if (item := view.get(key))]


def _deposit(store: FileStore, key: Key[Item], amount: int) -> int:
    def decide(view: View, now: float) -> Decision[int]:
        there = view.get(key)
        assert there is not None
        return Decision([Replace(key, Item(there.number + amount))], there.number + amount)

    return store.transact([key], decide).result


def act_on_registers(store: FileStore, history: History) -> None:
    """Read, write or swap one document, and record it."""
    name = random.choice(list(ACCOUNTS))
    key = ACCOUNTS[name]
    old, new = random.randrange(5), random.randrange(5)
    match random.choice(["read", "read", "write", "cas"]):
        case "read":
            history.record(f"read {name}", None, lambda: number_of(store, key))
        case "write":
            history.record(f"write {name}", new, lambda: apply(store, Replace(key, Item(new))) and None)
        case "cas":
            history.record(f"cas {name}", [old, new], lambda: swap(store, key, old, Item(new)))


Act = Callable[[FileStore, History], object]
OpenStore = Callable[[Path], FileStore]


def record(
    scratch: Path, open_store: OpenStore, act: Act, start: int, *, kills: int, each: int, stop_for: float = 0.0
) -> list[Operation]:
    """The history of many processes, some of which are killed, or stopped and continued."""
    (scratch / "histories").mkdir()
    with open_store(scratch / "store") as store:
        apply(store, *(Create(key, Item(start)) for key in ACCOUNTS.values()))

    def live(life: Life, is_over: IsOver) -> None:
        history = History(scratch / "histories", life.name)
        with open_store(scratch / "store") as store:
            for number in count():
                if number >= each and is_over():
                    return
                act(store, history)

    def note_death(life: Life) -> None:
        History.note_end(scratch / "histories", life.name)

    assert storm(PROCESSES, live, kills=kills, stop_for=stop_for, on_death=note_death) == kills
    return History.read(scratch / "histories")


def judge_accounts(history: list[Operation]) -> Check:
    return check(history, Accounts(dict.fromkeys(ACCOUNTS, RICH)))


def judge_registers(history: list[Operation]) -> Check:
    """Check each key by itself; the names of operations contain the key."""

    def plain(operation: Operation) -> Operation:
        return operation._replace(name=operation.name.split()[0])

    by_key: dict[str, list[Operation]] = {}
    for each in history:
        by_key.setdefault(each.name.split()[1], []).append(plain(each))
    assert len(by_key) == len(ACCOUNTS)
    verdicts = [check(operations, Register(0)) for operations in by_key.values()]
    return next((each for each in verdicts if each.result is not CheckResult.LINEARIZABLE), verdicts[0])


@pytest.mark.parametrize(
    ("act", "start", "judge"),
    [(act_on_accounts, RICH, judge_accounts), (act_on_registers, 0, judge_registers)],
    ids=["several documents", "single documents"],
)
@pytest.mark.sampled(1)
def test_histories_are_linearizable_even_if_processes_are_killed(
    scratch: Path, act: Act, start: int, judge: Callable[[list[Operation]], Check]
) -> None:
    kills = rounds(40, least=16)
    history = record(scratch, open_file_store, act, start, kills=kills, each=20)

    assert sum(each.returned_at is None for each in history) >= kills // 4
    judge(history).require()
    with open_file_store(scratch / "store") as store:  # the store is still sound
        assert sum(number_of(store, key) for key in ACCOUNTS.values()) == sum(_read_all(store))
        apply(store, *(Replace(key, Item(0)) for key in ACCOUNTS.values()))
        assert list((scratch / "store/.holdfast/intents").glob("*.json")) == []


class WithoutLocks(FileStore):
    """Locks nothing."""

    def __init__(self, path: Path) -> None:
        super().__init__(path)
        self._locks = mock.Mock(locked=lambda places, shared=False: contextlib.nullcontext())


class IgnoresIntents(FileStore):
    """Reads the files and ignores unfinished commits."""

    def __init__(self, path: Path) -> None:
        super().__init__(path)
        self._intents.pending_steps = lambda name: []  # type: ignore[method-assign]


@pytest.mark.sampled(1)
@pytest.mark.parametrize("broken", [WithoutLocks, IgnoresIntents])
def test_a_broken_store_is_found(scratch: Path, broken: OpenStore) -> None:
    found = []
    for attempt in range(20):
        place = scratch / str(attempt)
        place.mkdir()
        try:
            history = record(place, broken, act_on_accounts, RICH, kills=5, each=20)
        except AssertionError:  # the store failed outright
            return
        found.append(judge_accounts(history).result)
        if found[-1] is CheckResult.NOT_LINEARIZABLE:
            return
    raise AssertionError(f"no violation was found: {found}")
