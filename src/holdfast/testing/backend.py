"""What a backend's test file gives to the contract."""

from __future__ import annotations

import contextlib
import multiprocessing
import threading
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager
from functools import partial
from typing import Any, ClassVar, Literal, NamedTuple, TypeVar

import msgspec
import pytest

from holdfast.store.model import (
    Append,
    Change,
    Commit,
    Create,
    Decision,
    Family,
    Key,
    Replace,
    Store,
    Stream,
    StructCodec,
    View,
)

PATIENCE = 60.0
"""How long anything may take before the test fails instead of hanging; nothing depends on its value."""

Answer = TypeVar("Answer")


class Item(msgspec.Struct, frozen=True):
    """The record of a document."""

    number: int
    text: str = ""


class Event(msgspec.Struct, frozen=True):
    """The record of a stream."""

    number: int
    text: str = ""


_ITEM: StructCodec[Item] = StructCodec(Item)
_EVENT: StructCodec[Event] = StructCodec(Event, pretty=False)

INDEX = Key("jit/index", _ITEM)
GATES = Key("jit/gates", _ITEM)
ISSUES = Family("jit/issues", _ITEM)
DESCRIPTORS = Family("jvs/descriptors", _ITEM)
WORKTREES = Family("jvs/worktrees", _ITEM)
EVENTS = Stream("jit/events", _EVENT)
AUDIT = Stream("jvs/audit", _EVENT)
LEDGER = Stream("ledger/events", _EVENT)
STREAMS = (EVENTS, AUDIT, LEDGER)


def accounts(count: int) -> list[Key[Item]]:
    """The documents that amounts are moved between: of several kinds, so that their guards differ."""
    return [INDEX, GATES, *(ISSUES.key(f"account-{each}") for each in range(count))][:count]


# --- What clients do --------------------------------------------------------------------------------


def apply(store: Store, *changes: Change) -> Commit[None]:
    """Commit some changes, whatever is there."""
    named = [each.stream if isinstance(each, Append) else each.key for each in changes]
    return store.transact(named, lambda view, now: Decision(changes, None))


def number_of(store: Store, key: Key[Item]) -> int:
    """The number in a document that is there."""
    document = store.read(key)
    assert document is not None, f"there is no {key.name}"
    return document.record.number


def increment(store: Store, key: Key[Item], stream: Stream[Event] | None = None) -> int:
    """Count one up in a document, and with it append the new number to a stream; return the number."""

    def decide(view: View, now: float) -> Decision[int]:
        there = view.get(key)
        number = 1 if there is None else there.number + 1
        changes: list[Change] = [(Create if there is None else Replace)(key, Item(number))]
        if stream is not None:
            changes.append(Append(stream, Event(number)))
        return Decision(changes, number)

    return store.transact([key] if stream is None else [key, stream], decide).result


def increment_often(store: Store, key: Key[Item], stream: Stream[Event] | None, times: int) -> list[int]:
    """Count up again and again; the numbers that were made."""
    return [increment(store, key, stream) for _ in range(times)]


def swap(store: Store, key: Key[Item], expected: int, new: Item) -> bool:
    """Compare and swap: put a record into a document if its number is the expected one."""

    def decide(view: View, now: float) -> Decision[bool]:
        there = view.get(key)
        fits = there is not None and there.number == expected
        return Decision([Replace(key, new)] if fits else [], fits)

    return store.transact([key], decide).result


def swap_rounds(store: Store, key: Key[Item], rounds: int, name: str) -> list[int]:
    """Try to be the one who leads a document from each number to the next; the rounds that were won."""
    return [each for each in range(rounds) if swap(store, key, each, Item(each + 1, name))]


def transfer(store: Store, source: Key[Item], target: Key[Item], amount: int) -> bool:
    """Move an amount from one document to another, unless there is too little."""

    def decide(view: View, now: float) -> Decision[bool]:
        there, here = view.get(source), view.get(target)
        assert there is not None
        assert here is not None
        if there.number < amount:
            return Decision([], False)
        changes = [Replace(source, Item(there.number - amount)), Replace(target, Item(here.number + amount))]
        return Decision(changes, True)

    return store.transact([source, target], decide).result


def transfer_around(store: Store, keys: Sequence[Key[Item]], rounds: int) -> None:
    """Move amounts from each document to the next."""
    for each in range(rounds):
        transfer(store, keys[each % len(keys)], keys[(each + 1) % len(keys)], 1 + each % 3)


def sums_seen(store: Store, keys: Sequence[Key[Item]], rounds: int) -> set[int]:
    """Read documents together again and again; the sums that were seen."""
    return {
        sum(item.number for key in keys if (item := view.get(key))) for view in _views(store, keys, rounds)
    }


def _views(store: Store, keys: Sequence[Key[Item]], rounds: int) -> list[View]:
    return [store.read_together(keys) for _ in range(rounds)]


def append_often(store: Store, stream: Stream[Event], name: str, times: int) -> list[int]:
    """Append to a stream again and again; the positions."""
    return [apply(store, Append(stream, Event(each, name))).positions[0] for each in range(times)]


# --- Several at once --------------------------------------------------------------------------------


def run_threads(*tasks: Callable[[], Answer]) -> list[Answer]:
    """Let each task run in a thread of its own, all from the same moment on; what they return."""
    answers: list[Any] = [None] * len(tasks)
    problems: list[BaseException] = []
    start = threading.Barrier(len(tasks))

    def run(index: int, task: Callable[[], Answer]) -> None:
        try:
            start.wait(PATIENCE)
            answers[index] = task()
        except BaseException as problem:
            problems.append(problem)

    threads = [threading.Thread(target=run, args=each, daemon=True) for each in enumerate(tasks)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(PATIENCE)
        assert not thread.is_alive(), "a thread did not come to its end"
    if problems:
        raise problems[0]
    return answers


class Recipe(NamedTuple):
    """How another process opens the same store: something that it can import, and plain arguments."""

    open: Callable[..., Store]
    arguments: tuple[Any, ...] = ()


class Task(NamedTuple):
    """What a process is to do: a function of a module, which takes a store and these arguments."""

    do: Callable[..., Any]
    arguments: tuple[Any, ...] = ()


def run_processes(recipe: Recipe, *tasks: Task) -> list[Any]:
    """Let each task run in a process of its own, all from the same moment on; what they return."""
    context = multiprocessing.get_context("spawn")
    start = context.Barrier(len(tasks))
    running = []
    for task in tasks:
        here, there = context.Pipe()
        process = context.Process(target=_work, args=(recipe, task, start, there), daemon=True)
        process.start()
        there.close()
        running.append((process, here))
    try:
        return [_hear(here) for _, here in running]
    finally:
        for process, here in running:
            here.close()
            process.kill()
            process.join()


class _Raised(NamedTuple):
    trace: str


def _hear(connection: Any) -> Any:
    assert connection.poll(PATIENCE), "a process did not come to its end"
    answer = connection.recv()
    assert not isinstance(answer, _Raised), f"a process failed:\n{answer.trace}"
    return answer


def _work(recipe: Recipe, task: Task, start: Any, connection: Any) -> None:
    try:
        store = recipe.open(*recipe.arguments)
        start.wait(PATIENCE)
        answer = task.do(store, *task.arguments)
    except BaseException:
        answer = _Raised(traceback.format_exc())
    connection.send(answer)


When = Literal["before", "after"]


class Backend:
    """What a backend fills in."""

    many: ClassVar[int] = 100_000
    """How many documents "many" are."""
    many_within: ClassVar[float] = 60.0
    """In how many seconds they are created, found, read and changed."""

    def seconds(self) -> float:
        """The clock for that. A store that does all its work in this process may take its CPU time."""
        return time.monotonic()

    def open_store(self) -> Store:
        """A store on fresh state."""
        raise NotImplementedError

    def reopen(self, store: Store) -> Store:
        """A second client of the same state."""
        raise NotImplementedError

    def process_target(self, store: Store) -> Recipe | None:
        """How another process opens the same state; None if none can, and threads are to do."""
        return None

    def losing_answers(self, store: Store, when: When) -> AbstractContextManager[None]:
        """Within, the answer to the next commit gets lost: before the commit was made, or after."""
        raise NotImplementedError

    def damage(self, store: Store, key: Key[Any], content: bytes) -> None:
        """Put this content in the place of a document, past the store."""
        raise NotImplementedError

    def stored(self, store: Store, key: Key[Any]) -> bytes:
        """What is stored in the place of a document."""
        raise NotImplementedError

    def disturbed(self) -> AbstractContextManager[None]:
        """Within, things take a little longer now and then, at the moments at which it hurts most."""
        return contextlib.nullcontext()

    def close(self, store: Store) -> None:
        """Let go of a store."""
        close = getattr(store, "close", None)
        if close is not None:
            close()

    # --- What the contract makes of it ----------------------------------------------------------------

    @pytest.fixture
    def store(self) -> Iterator[Store]:
        """The store of one test."""
        store = self.open_store()
        yield store
        self.close(store)

    @contextlib.contextmanager
    def client(self, store: Store) -> Iterator[Store]:
        """A second client for a while."""
        second = self.reopen(store)
        try:
            yield second
        finally:
            self.close(second)

    @contextlib.contextmanager
    def clients(self, store: Store, count: int) -> Iterator[list[Store]]:
        """Several more clients for a while."""
        with contextlib.ExitStack() as opened:
            yield [opened.enter_context(self.client(store)) for _ in range(count)]

    def elsewhere(self, store: Store, *tasks: Task) -> list[Any]:
        """Let each task run in another process, or in a thread if other processes cannot open the store."""
        recipe = self.process_target(store)
        if recipe is not None:
            return run_processes(recipe, *tasks)
        with self.clients(store, len(tasks)) as clients:
            return run_threads(
                *(partial(task.do, each, *task.arguments) for task, each in zip(tasks, clients, strict=True))
            )
