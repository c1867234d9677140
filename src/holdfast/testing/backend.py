"""The `Backend` class that a store's author subclasses, and the operations that the contract tests run."""

from __future__ import annotations

import contextlib
import multiprocessing
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager
from functools import partial
from typing import Any, ClassVar, Literal, NamedTuple, TypeVar

import msgspec
import pytest

from holdfast.store import model
from holdfast.store.model import Append, Change, Create, Decision, Family, Key, Replace, Store, Stream, View

PATIENCE = 60.0  # seconds before a test fails instead of hanging

Answer = TypeVar("Answer")


class Item(msgspec.Struct, frozen=True):
    """The record of a document."""

    number: int
    text: str = ""


class Event(Item, frozen=True):
    """The record of a stream."""


_ITEM: model.StructCodec[Item] = model.StructCodec(Item)
_EVENT: model.StructCodec[Event] = model.StructCodec(Event, pretty=False)

INDEX = Key("jit/index", _ITEM)
GATES = Key("jit/gates", _ITEM)
ISSUES = Family("jit/issues", _ITEM)
DESCRIPTORS = Family("jvs/descriptors", _ITEM)
WORKTREES = Family("jvs/worktrees", _ITEM)
EVENTS = Stream("jit/events", _EVENT)
AUDIT = Stream("jvs/audit", _EVENT)
LEDGER = Stream("ledger/events", _EVENT)
STREAMS = (EVENTS, AUDIT, LEDGER)
ONE, TWO = ISSUES.key("one"), ISSUES.key("two")


def accounts(count: int) -> list[Key[Item]]:
    """Keys of several kinds of documents, so that their locks differ."""
    return [INDEX, GATES, *(ISSUES.key(f"account-{each}") for each in range(count))][:count]


def apply(store: Store, *changes: Change) -> model.Commit[None]:
    """Commit changes unconditionally."""
    named = [each.stream if isinstance(each, Append) else each.key for each in changes]
    return store.transact(named, lambda view, now: Decision(changes, None))


def number_of(store: Store, key: Key[Item]) -> int:
    document = store.read(key)
    assert document is not None, f"{key.name} does not exist"
    return document.record.number


def incrementing(view: View, key: Key[Item]) -> tuple[list[Change], int]:
    """The change that increments a document's number, and the new number."""
    item = view.get(key)
    number = 1 if item is None else item.number + 1
    return [(Create if item is None else Replace)(key, Item(number))], number


def increment(store: Store, key: Key[Item], stream: Stream[Event] | None = None) -> int:
    """Increment a document's number, append it to the stream if one is given, and return it."""

    def decide(view: View, now: float) -> Decision[int]:
        changes, number = incrementing(view, key)
        if stream is not None:
            changes.append(Append(stream, Event(number)))
        return Decision(changes, number)

    return store.transact([key] if stream is None else [key, stream], decide).result


def increment_often(store: Store, key: Key[Item], stream: Stream[Event] | None, times: int) -> list[int]:
    return [increment(store, key, stream) for _ in range(times)]


def swap(store: Store, key: Key[Item], expected: int, new: Item) -> bool:
    """Replace a document if its number is the expected one; return whether it was."""

    def decide(view: View, now: float) -> Decision[bool]:
        item = view.get(key)
        fits = item is not None and item.number == expected
        return Decision([Replace(key, new)] if fits else [], fits)

    return store.transact([key], decide).result


def swap_rounds(store: Store, key: Key[Item], rounds: int, name: str) -> list[int]:
    """Try to swap each number for the next; return the rounds won."""
    return [each for each in range(rounds) if swap(store, key, each, Item(each + 1, name))]


def transfer(store: Store, source: Key[Item], target: Key[Item], amount: int) -> bool:
    """Move an amount from one document to another if the balance covers it; return whether it did."""

    def decide(view: View, now: float) -> Decision[bool]:
        one, other = view.get(source), view.get(target)
        assert one is not None
        assert other is not None
        if one.number < amount:
            return Decision([], False)
        changes = [Replace(source, Item(one.number - amount)), Replace(target, Item(other.number + amount))]
        return Decision(changes, True)

    return store.transact([source, target], decide).result


def transfer_around(store: Store, keys: Sequence[Key[Item]], rounds: int) -> None:
    """Move amounts from each document to the next."""
    for each in range(rounds):
        transfer(store, keys[each % len(keys)], keys[(each + 1) % len(keys)], 1 + each % 3)


def sums_seen(store: Store, keys: Sequence[Key[Item]], rounds: int) -> set[int]:
    """Read documents together repeatedly; return the sums seen."""
    views = (store.read_together(keys) for _ in range(rounds))
    return {sum(item.number for key in keys if (item := view.get(key))) for view in views}


def append_often(store: Store, stream: Stream[Event], name: str, times: int) -> list[int]:
    return [apply(store, Append(stream, Event(each, name))).positions[0] for each in range(times)]


def run_threads(*tasks: Callable[[], Answer]) -> list[Answer]:
    """Run each task in its own thread, all starting at once; return their results."""
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
        assert not thread.is_alive(), "a thread did not finish"
    if problems:
        raise problems[0]
    return answers


class Recipe(NamedTuple):
    """How another process opens the same store: an importable function and picklable arguments."""

    open: Callable[..., Store]
    arguments: tuple[Any, ...] = ()


class Task(NamedTuple):
    """Work for a process: an importable function, called with a store and these arguments."""

    do: Callable[..., Any]
    arguments: tuple[Any, ...] = ()


def run_processes(recipe: Recipe, *tasks: Task) -> list[Any]:
    """Run each task in its own process, all starting at once; return their results."""
    context = _fresh_processes({recipe.open.__module__, *(task.do.__module__ for task in tasks)})
    start = context.Barrier(len(tasks))
    running = []
    for task in tasks:
        here, there = context.Pipe()
        process = context.Process(target=_work, args=(recipe, task, start, there), daemon=True)
        process.start()
        there.close()
        running.append((process, here))
    try:
        return [_receive(here) for _, here in running]
    finally:
        for process, here in running:
            here.close()
            process.kill()
            process.join()


def _fresh_processes(modules: set[str]) -> Any:
    """A context for processes that share no state with this one.

    Where possible, they fork from a server process, which has loaded the modules that the first caller named.
    """
    if sys.platform == "win32":
        return multiprocessing.get_context("spawn")
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload([__name__, *modules])
    return context


class _Raised(NamedTuple):
    trace: str


def _receive(connection: Any) -> Any:
    assert connection.poll(PATIENCE), "a process did not finish"
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
    """Access to the store under test. Subclass this for your store."""

    many: ClassVar[int] = 100_000  # how many documents the store must be able to hold
    many_within: ClassVar[float] = 60.0  # seconds to create, scan, read and change that many documents

    def seconds(self) -> float:
        """The clock for `many_within`. A store that does all its work in this process may use CPU time."""
        return time.monotonic()

    def open_store(self) -> Store:
        """Open a store with fresh state."""
        raise NotImplementedError

    def reopen(self, store: Store) -> Store:
        """Open a second client of the same state."""
        raise NotImplementedError

    def process_target(self, store: Store) -> Recipe | None:
        """How another process opens the same state; None if it cannot, and then the contract uses threads."""
        return None

    def losing_answers(self, store: Store, when: When) -> AbstractContextManager[None]:
        """A context in which the answer to the next commit is lost, before or after the commit is made."""
        raise NotImplementedError

    def damage(self, store: Store, key: Key[Any], content: bytes) -> None:
        """Overwrite the stored bytes of a document, bypassing the store."""
        raise NotImplementedError

    def stored(self, store: Store, key: Key[Any]) -> bytes:
        """The stored bytes of a document."""
        raise NotImplementedError

    def disturbed(self) -> AbstractContextManager[None]:
        """A context with random delays at the most critical points."""
        return contextlib.nullcontext()

    @pytest.fixture
    def store(self) -> Iterator[Store]:
        with contextlib.closing(self.open_store()) as store:
            yield store

    def client(self, store: Store) -> AbstractContextManager[Store]:
        """A context with a second client of the same state."""
        return contextlib.closing(self.reopen(store))

    @contextlib.contextmanager
    def clients(self, store: Store, count: int) -> Iterator[list[Store]]:
        """A context with several more clients of the same state."""
        with contextlib.ExitStack() as opened:
            yield [opened.enter_context(self.client(store)) for _ in range(count)]

    def elsewhere(self, store: Store, *tasks: Task) -> list[Any]:
        """Run each task in another process, or in a thread if other processes cannot open the store."""
        recipe = self.process_target(store)
        if recipe is not None:
            return run_processes(recipe, *tasks)
        with self.clients(store, len(tasks)) as clients:
            return run_threads(
                *(partial(task.do, each, *task.arguments) for task, each in zip(tasks, clients, strict=True))
            )
